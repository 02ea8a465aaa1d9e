"""What an answer of the agent's loop says of itself, in the field `stenolog` of its message. Pure.

`seen` is the seq of the newest message that the answer was made of: what arrives while it is being
written stands before it in the log, and is not answered by it. `interrupted` says why it was cut
off. Messages of others have no such field: their answers have seen all that stands before them.
"""

from collections.abc import Mapping
from typing import Any, Final

FIELD: Final = "stenolog"
_SEEN: Final = "seen"
_INTERRUPTED: Final = "interrupted"


def marked(body: Mapping[str, Any], *, seen: int | None, interrupted: str = "") -> dict[str, Any]:
    """The message with what it says of itself; `seen` None: all that will stand before it."""
    of_itself: dict[str, Any] = {} if seen is None else {_SEEN: seen}
    if interrupted:
        of_itself[_INTERRUPTED] = interrupted
    return {**body, FIELD: of_itself} if of_itself else dict(body)


def seen_by(body: Mapping[str, Any], seq: int) -> int:
    """Up to which seq the message at this seq has seen the log."""
    told = _told(body).get(_SEEN)
    if isinstance(told, int) and not isinstance(told, bool) and 0 <= told < seq:
        return told
    return seq - 1


def interruption(body: Mapping[str, Any]) -> str:
    """Why the answer was cut off; empty where it was not."""
    told = _told(body).get(_INTERRUPTED)
    return told if isinstance(told, str) else ""


def _told(body: Mapping[str, Any]) -> Mapping[str, Any]:
    told = body.get(FIELD)
    return told if isinstance(told, Mapping) else {}
