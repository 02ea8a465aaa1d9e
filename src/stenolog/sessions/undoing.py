"""Taking the last change of a session back as a person means it, with what came of that change."""

from collections.abc import Sequence

from stenolog.errors import StenologError
from stenolog.records import Message, Span, Undo, Undone
from stenolog.stores.base import Store
from stenolog.stores.snapshots import LifeMark, WholeStore


def undo(store: Store, key: str) -> Undone:
    """Take back the newest change, as the store does. Raises NothingToUndo.

    Where what was said was replaced, the answer to what was said instead is hidden, too: it would
    stand there beside what is back, without its question.
    """
    newest = _newest(store, key)
    if newest is None or newest.op != "replace":
        return store.undo(key)
    return store.undo(key, answered=_answered(store.get_history(key), newest))


def _newest(store: Store, key: str) -> Undo | None:
    """The step that would be taken back; None where nobody can tell."""
    if not isinstance(store, WholeStore):
        return None
    try:
        mark = LifeMark(key=key, uid=store.info(key).uid, stamp="")
        with store.read_life(mark) as reading:
            return reading.life.undo[-1] if reading.life.undo else None
    except StenologError:
        return None  # what is wrong with it, the store will say


def _answered(history: Sequence[Message], step: Undo) -> Span | None:
    """From where to where the answer goes that a replace has brought."""
    added = [step.added] if step.added is not None else []
    end = max((last for _, last in (*step.newly, *added)), default=0)
    found: list[int] = []
    for message in history:
        if message.seq > end:
            if getattr(message, "role", None) == "user":
                break
            found.append(message.seq)
    return (found[0], found[-1]) if found else None
