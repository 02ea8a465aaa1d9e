"""Undo of the last change of a session, together with the answer that followed the change."""

from collections.abc import Sequence

from stenolog.errors import StenologError
from stenolog.records import Message, Span, Undo, Undone
from stenolog.stores.base import Store
from stenolog.stores.snapshots import SnapshotMark, SnapshotStore


def undo_last(store: Store, key: str) -> Undone:
    """Undo the newest change, as the store does. Raises NothingToUndo.

    If the change replaced messages, the answer to the replacement is hidden too. The answer must
    not follow the restored messages without the message that it answers.
    """
    last_step = _last_step(store, key)
    if last_step is None or last_step.op != "replace":
        return store.undo(key)
    return store.undo(key, answered=_answer_seqs(store.get_history(key), last_step))


def _last_step(store: Store, key: str) -> Undo | None:
    """Return the step that would be undone; None if it is unknown."""
    if not isinstance(store, SnapshotStore):
        return None
    try:
        mark = SnapshotMark(key=key, uid=store.info(key).uid, stamp="")
        with store.read_snapshot(mark) as reading:
            return reading.snapshot.undo[-1] if reading.snapshot.undo else None
    except StenologError:
        return None  # the store reports the error


def _answer_seqs(history: Sequence[Message], step: Undo) -> Span | None:
    """Return the seqs of the answer that followed a replacement."""
    added_spans = [step.added] if step.added is not None else []
    last_seq = max((last for _, last in (*step.newly, *added_spans)), default=0)
    answer_seqs: list[int] = []
    for message in history:
        if message.seq > last_seq:
            if getattr(message, "role", None) == "user":
                break
            answer_seqs.append(message.seq)
    return (answer_seqs[0], answer_seqs[-1]) if answer_seqs else None
