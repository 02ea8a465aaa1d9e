"""Taking the last change of a session back as a person means it, with what came of that change."""

from collections.abc import Sequence

from msgspec.structs import replace

from stenolog.records import Message, Undone
from stenolog.stores.base import Store


def undo(store: Store, key: str) -> Undone:
    """Take back the newest change, as the store does. Raises NothingToUndo.

    Where what was said was replaced, the answer to what was said instead is hidden, too: it would
    stand there beside what is back, without its question.
    """
    before = store.get_history(key)
    undone = store.undo(key)
    if undone.op != "replace":
        return undone
    instead = _answered_instead(before, store.get_history(key))
    if not instead:
        return undone
    store.hide(key, instead[0], instead[-1])
    return replace(undone, hid=undone.hid + len(instead))


def _answered_instead(before: Sequence[Message], after: Sequence[Message]) -> list[int]:
    """The seqs of the answer that what was taken back had brought."""
    known = {message.seq for message in before}
    back = [message.seq for message in after if message.seq not in known]
    if not back:
        return []
    found = []
    for message in after:
        if message.seq > back[-1]:
            if message.role == "user":
                break
            found.append(message.seq)
    return found
