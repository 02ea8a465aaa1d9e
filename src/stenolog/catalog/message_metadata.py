"""Metadata that an agent stores in a message, in its field `stenolog`. Pure.

`seen` is the seq of the newest message that an answer takes into account. A message that arrives
while the answer is being written comes before it in the log, but is not answered by it.
`interrupted` is the reason why an answer is incomplete. Messages of other programs do not have this
field: their answers count as having seen all messages before them.

In a message with tool calls, `of_client` lists the calls that the client runs, not the agent.

An answer has the name of its model as `model`, the token counts of the provider as `usage`
(`prompt`, `answer` and `cached`), and its duration as `seconds`. The result of a tool has
`seconds`, and `failed` if the tool failed.

A user message that a stenolog agent accepted has `received`, the mark of docs/decisions/0012, with
`sender` if a channel or the command line knows its author. A message from a chat app also has
`origin`: the destination of its answer, in the format of the app.

The last message of an HTTP request has `request`, so that every gateway of the store recognizes a
retry of that request.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Self

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog.catalog_database import replace_surrogates
from stenolog.records import Message

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
_MAX_PLAUSIBLE: Final = 1e15
"""Upper limit of plausible token counts and seconds."""


def mark_seen(
    body: Mapping[str, Any], *, seen: int | None, interrupted: str = ""
) -> dict[str, Any]:
    """Return the message with `seen` and `interrupted`. `seen` None: all messages before it."""
    of_itself: dict[str, Any] = {} if seen is None else {_SEEN: seen}
    if interrupted:
        of_itself[_INTERRUPTED] = interrupted
    return {**body, FIELD: {**_metadata(body), **of_itself}} if of_itself else dict(body)


def last_seen_seq(body: Mapping[str, Any], seq: int) -> int:
    """Return the last seq that the message at `seq` takes into account."""
    stored = _metadata(body).get(_SEEN)
    if isinstance(stored, int) and not isinstance(stored, bool) and 0 <= stored < seq:
        return stored
    return seq - 1


def interruption(body: Mapping[str, Any]) -> str:
    """Return the reason why the answer is incomplete, or an empty string."""
    stored = _metadata(body).get(_INTERRUPTED)
    return stored if isinstance(stored, str) else ""


def mark_client_calls(body: Mapping[str, Any], ids: Sequence[str]) -> dict[str, Any]:
    """Return the message with the ids of the tool calls that the client runs."""
    return {**body, FIELD: {**_metadata(body), _OF_CLIENT: list(ids)}} if ids else dict(body)


def client_call_ids(body: Mapping[str, Any]) -> frozenset[str]:
    """Return the ids of the tool calls in a message that the client runs."""
    stored = _metadata(body).get(_OF_CLIENT)
    listed = stored if isinstance(stored, list) else []
    return frozenset(one for one in listed if isinstance(one, str))


def mark_model(
    body: Mapping[str, Any],
    *,
    model: str,
    seconds: float,
    usage: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return the message with its model, duration and token counts."""
    of_itself: dict[str, Any] = {_MODEL: model, _SECONDS: round(seconds, 3)}
    if usage is not None:
        of_itself[_USAGE] = dict(usage)
    return {**body, FIELD: {**_metadata(body), **of_itself}}


def mark_tool_outcome(body: Mapping[str, Any], *, seconds: float, failed: bool) -> dict[str, Any]:
    """Return the result of a tool with its duration and whether it failed."""
    of_itself: dict[str, Any] = {_SECONDS: round(seconds, 3)}
    if failed:
        of_itself[_FAILED] = True
    return {**body, FIELD: {**_metadata(body), **of_itself}}


def model_of(body: Mapping[str, Any]) -> str | None:
    """Return the name of the model that wrote the message, or None if unknown.

    Other programs write the name into the field `model` of the message.
    """
    stored = _metadata(body).get(_MODEL) or body.get("model")
    return stored if isinstance(stored, str) and stored else None


def model_label(name: str) -> str:
    """Return the name of a model for people: without the address of its server."""
    address, _, short = name.rpartition("#")
    return short if short and "://" in address else name


def usage_of(body: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the provider's token counts: `prompt`, `answer`, `cached`; None if unknown."""
    stored = _metadata(body).get(_USAGE)
    if not isinstance(stored, Mapping):
        # Messages of other programs may have the counts in the form of a provider.
        stored = _provider_usage(body.get(_USAGE))
    if stored is None:
        return None
    return {
        name: value
        for name in ("prompt", "answer", "cached")
        if isinstance(value := stored.get(name, 0), int) and _is_sane(value)
    }


def _provider_usage(usage: Any) -> dict[str, int] | None:
    """Return token counts in the form of OpenAI's or Anthropic's API as stenolog stores them."""
    if not isinstance(usage, Mapping):
        return None

    def count(fields: Any, *names: str) -> int | None:
        found = (fields.get(name) for name in names) if isinstance(fields, Mapping) else ()
        return next((one for one in found if isinstance(one, int) and _is_sane(one)), None)

    prompt = count(usage, "prompt_tokens", "input_tokens")
    answer = count(usage, "completion_tokens", "output_tokens")
    if prompt is None and answer is None:
        return None
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached = count(details, "cached_tokens") or count(usage, "cached_tokens") or 0
    # Anthropic counts tokens of the cache apart from the others.
    read = count(usage, "cache_read_input_tokens") or 0
    written = count(usage, "cache_creation_input_tokens") or 0
    return {
        "prompt": (prompt or 0) + read + written,
        "answer": answer or 0,
        "cached": cached or read,
    }


def seconds_of(body: Mapping[str, Any]) -> float | None:
    """Return the duration of an answer or a tool call in seconds, or None if unknown."""
    stored = _metadata(body).get(_SECONDS)
    return float(stored) if isinstance(stored, int | float) and _is_sane(stored) else None


def _is_sane(number: float) -> bool:
    """Whether the number is plausible: any program can write a message."""
    return not isinstance(number, bool) and 0 <= number <= _MAX_PLAUSIBLE


def has_failed(body: Mapping[str, Any]) -> bool:
    """Whether the message is the result of a tool that failed."""
    return _metadata(body).get(_FAILED) is True


def mark_received(
    body: Mapping[str, Any], *, sender: str = "", origin: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the user message with the mark of the agent that accepts it.

    `sender`: the user or group chat, if the caller has verified it. `origin`: the destination of
    the answer; None if only the caller waits for it. Replaces a mark that is already there.
    """
    mark: dict[str, Any] = {_RECEIVED: {_SENDER: sender} if sender else {}}
    if origin is not None:
        mark[_ORIGIN] = dict(origin)
    return {**body, FIELD: mark}


def is_received(body: Mapping[str, Any]) -> bool:
    """Whether a stenolog agent accepted this user message."""
    return body.get("role") == "user" and isinstance(_metadata(body).get(_RECEIVED), Mapping)


def sender_of(body: Mapping[str, Any]) -> str:
    """Return the verified sender of a user message, or an empty string."""
    mark = _metadata(body).get(_RECEIVED)
    sender = mark.get(_SENDER) if isinstance(mark, Mapping) and is_received(body) else None
    return sender if isinstance(sender, str) else ""


def mark_request(body: Mapping[str, Any], *, id: str, digest: str) -> dict[str, Any]:
    """Return the message with the HTTP request that it came in.

    `id`: the idempotency key of the client, or empty. `digest`: of all messages of the request.
    """
    return {**body, FIELD: {**_metadata(body), _REQUEST: {_ID: id, _DIGEST: digest}}}


def request_of(body: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the idempotency key and digest of the HTTP request of a message, or None."""
    mark = _metadata(body).get(_REQUEST)
    if not isinstance(mark, Mapping):
        return None
    id, digest = mark.get(_ID), mark.get(_DIGEST)
    return (id, digest) if isinstance(id, str) and isinstance(digest, str) else None


def without_marks(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message without the reserved field."""
    return {name: value for name, value in body.items() if name != FIELD}


def origin_of(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the destination of the answer, or None if the message is not from a chat app."""
    stored = _metadata(body).get(_ORIGIN)
    return stored if isinstance(stored, Mapping) else None


def _metadata(body: Mapping[str, Any]) -> Mapping[str, Any]:
    stored = body.get(FIELD)
    return stored if isinstance(stored, Mapping) else {}


# --- owners ----------------------------------------------------------------------------------


class Ownership(Struct, frozen=True):
    """The senders of the user messages of a session, which decide its owner (docs/decisions/0012).

    The key does not prove who owns a session, because clients of the gateway and importers choose
    keys. A session has no owner if a user message has no sender, or if two messages have different
    senders. Such a session has its own scope.
    """

    owner: str = ""
    """The sender of the first user message; empty without a sender or without user messages."""
    mixed: bool = False
    """Whether a user message has no sender, or a different one than the first."""

    @property
    def is_open(self) -> bool:
        """Whether the session has no user message yet."""
        return not self.owner and not self.mixed

    @property
    def sender(self) -> str:
        """The sender of all user messages, or an empty string."""
        return "" if self.mixed else self.owner

    def after(self, messages: Iterable[Message]) -> Self:
        """Return the ownership after additional messages."""
        now = self
        for message in messages:
            if now.mixed:
                break
            if getattr(message, "role", None) == "user":
                sender = replace_surrogates(sender_of(message.to_dict()))
                first = now.is_open and bool(sender)
                now = replace(now, owner=sender) if first else now
                now = replace(now, mixed=not sender or sender != now.owner)  # guard: one-sender
        return now
