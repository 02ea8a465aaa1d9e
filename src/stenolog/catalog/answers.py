"""What a message of the agent's loop says of itself, in its field `stenolog`. Pure.

`seen` is the seq of the newest message that the answer was made of: what arrives while it is being
written stands before it in the log, and is not answered by it. `interrupted` says why it was cut
off. Messages of others have no such field: their answers have seen all that stands before them.
Of a message that calls tools, `of_client` names the calls that the client carries out, not we.
A user's message from a chat app has `origin`: where its answer belongs, in the app's own words.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

FIELD: Final = "stenolog"
_SEEN: Final = "seen"
_INTERRUPTED: Final = "interrupted"
_ORIGIN: Final = "origin"
_OF_CLIENT: Final = "of_client"


def marked(body: Mapping[str, Any], *, seen: int | None, interrupted: str = "") -> dict[str, Any]:
    """The message with what it says of itself; `seen` None: all that will stand before it."""
    of_itself: dict[str, Any] = {} if seen is None else {_SEEN: seen}
    if interrupted:
        of_itself[_INTERRUPTED] = interrupted
    return {**body, FIELD: {**_told(body), **of_itself}} if of_itself else dict(body)


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


def for_client(body: Mapping[str, Any], ids: Sequence[str]) -> dict[str, Any]:
    """The message with which of its calls the client carries out."""
    return {**body, FIELD: {**_told(body), _OF_CLIENT: list(ids)}} if ids else dict(body)


def calls_of_client(body: Mapping[str, Any]) -> frozenset[str]:
    """The ids of the calls in a message that its client carries out."""
    told = _told(body).get(_OF_CLIENT)
    listed = told if isinstance(told, list) else []
    return frozenset(one for one in listed if isinstance(one, str))


def from_channel(body: Mapping[str, Any], origin: Mapping[str, Any] | None) -> dict[str, Any]:
    """The message with where its answer belongs; None: where it was asked, and nowhere else."""
    return dict(body) if origin is None else {**body, FIELD: {_ORIGIN: dict(origin)}}


def origin_of(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Where the answer to a message belongs; None where it came from no chat app."""
    told = _told(body).get(_ORIGIN)
    return told if isinstance(told, Mapping) else None


def _told(body: Mapping[str, Any]) -> Mapping[str, Any]:
    told = body.get(FIELD)
    return told if isinstance(told, Mapping) else {}
