"""What a message of the agent's loop says of itself, in its field `stenolog`. Pure.

`seen` is the seq of the newest message that the answer was made of: what arrives while it is being
written stands before it in the log, and is not answered by it. `interrupted` says why it was cut
off. Messages of others have no such field: their answers have seen all that stands before them.
Of a message that calls tools, `of_client` names the calls that the client carries out, not we.
What a model said has its name as `model`, what its provider counted as `usage` (`prompt`, `answer`
and `cached`, in tokens) and how long it took as `seconds`; the result of a tool has `seconds`, and
`failed` where it did.
A user message that a stenolog agent accepted has `received`, the mark of docs/decisions/0012: with
`sender` where a channel or the command line knows who wrote it. One from a chat app has `origin`,
too: where its answer belongs, in the app's own words.
The last message of an HTTP request has `request`, so that a retry of that request is recognised by
every gateway of the store.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

FIELD: Final = "stenolog"
_SEEN: Final = "seen"
_INTERRUPTED: Final = "interrupted"
_ORIGIN: Final = "origin"
_REQUEST: Final = "request"
_ID: Final = "id"
_DIGEST: Final = "digest"
_RECEIVED: Final = "received"
_SENDER: Final = "sender"
_OF_CLIENT: Final = "of_client"
_MODEL: Final = "model"
_USAGE: Final = "usage"
_SECONDS: Final = "seconds"
_FAILED: Final = "failed"
_MOST: Final = 1e15
"""More tokens or seconds than there are."""


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


def made_by(
    body: Mapping[str, Any],
    *,
    model: str,
    seconds: float,
    usage: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The message with who said it, how long that took, and what was counted for it."""
    of_itself: dict[str, Any] = {_MODEL: model, _SECONDS: round(seconds, 3)}
    if usage is not None:
        of_itself[_USAGE] = dict(usage)
    return {**body, FIELD: {**_told(body), **of_itself}}


def ran_for(body: Mapping[str, Any], *, seconds: float, failed: bool) -> dict[str, Any]:
    """The result of a tool with how long it ran, and whether it failed."""
    of_itself: dict[str, Any] = {_SECONDS: round(seconds, 3)}
    if failed:
        of_itself[_FAILED] = True
    return {**body, FIELD: {**_told(body), **of_itself}}


def model_of(body: Mapping[str, Any]) -> str | None:
    """Which model said it; None where it does not tell."""
    told = _told(body).get(_MODEL)
    return told if isinstance(told, str) and told else None


def usage_of(body: Mapping[str, Any]) -> dict[str, int] | None:
    """The tokens that its provider counted: `prompt`, `answer`, `cached`; None: it does not say."""
    told = _told(body).get(_USAGE)
    if not isinstance(told, Mapping):
        return None
    return {
        name: value
        for name in ("prompt", "answer", "cached")
        if isinstance(value := told.get(name, 0), int) and _is_sane(value)
    }


def seconds_of(body: Mapping[str, Any]) -> float | None:
    """How long it took to say, or to run; None where it does not tell."""
    told = _told(body).get(_SECONDS)
    return float(told) if isinstance(told, int | float) and _is_sane(told) else None


def _is_sane(number: float) -> bool:
    """Whether anybody can have counted that much: a message is anybody's to write."""
    return not isinstance(number, bool) and 0 <= number <= _MOST


def has_failed(body: Mapping[str, Any]) -> bool:
    """Whether the tool that this is the result of has failed."""
    return _told(body).get(_FAILED) is True


def received(
    body: Mapping[str, Any], *, sender: str = "", origin: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the user message with the mark of the agent that accepts it.

    `sender`: the user or group chat, if the caller has verified it. `origin`: where the answer
    belongs; None if nobody but the caller waits for it. Replaces a mark that is already there.
    """
    mark: dict[str, Any] = {_RECEIVED: {_SENDER: sender} if sender else {}}
    if origin is not None:
        mark[_ORIGIN] = dict(origin)
    return {**body, FIELD: mark}


def is_received(body: Mapping[str, Any]) -> bool:
    """Return whether a stenolog agent accepted this user message."""
    return body.get("role") == "user" and isinstance(_told(body).get(_RECEIVED), Mapping)


def sender_of(body: Mapping[str, Any]) -> str:
    """Return the verified sender of a user message, or an empty string."""
    mark = _told(body).get(_RECEIVED)
    sender = mark.get(_SENDER) if isinstance(mark, Mapping) and is_received(body) else None
    return sender if isinstance(sender, str) else ""


def requested(body: Mapping[str, Any], *, id: str, digest: str) -> dict[str, Any]:
    """Return the message with the HTTP request that brought it.

    `id`: the idempotency key of the client, or empty. `digest`: of all messages of the request.
    """
    return {**body, FIELD: {**_told(body), _REQUEST: {_ID: id, _DIGEST: digest}}}


def request_of(body: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return idempotency key and digest of the HTTP request that brought a message."""
    mark = _told(body).get(_REQUEST)
    if not isinstance(mark, Mapping):
        return None
    id, digest = mark.get(_ID), mark.get(_DIGEST)
    return (id, digest) if isinstance(id, str) and isinstance(digest, str) else None


def without_marks(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message without the reserved field, as messages of others are stored."""
    return {name: value for name, value in body.items() if name != FIELD}


def origin_of(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Where the answer to a message belongs; None where it came from no chat app."""
    told = _told(body).get(_ORIGIN)
    return told if isinstance(told, Mapping) else None


def _told(body: Mapping[str, Any]) -> Mapping[str, Any]:
    told = body.get(FIELD)
    return told if isinstance(told, Mapping) else {}
