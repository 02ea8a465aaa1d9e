"""Metadata that an agent stores in a message, in its field `stenolog`. Pure.

An answer takes all messages up to the seq `seen` into account, and the messages in `answers`. A
message that arrives while an answer is being written precedes the answer in the log, but is not
answered by it. Answers of other programs have no `seen`: they count as having seen all messages
before them. `answers` lists the seqs of the messages that an answer answers: messages of users, and
results of tools that a client has run. So a message that is sent again gets exactly its answer
(`agent/stored_answers.py`). These seqs may be above `seen` in a session that got the messages of
another session (`transfer/merge.py`). `interrupted` is the reason why an answer is
incomplete.

In a message with tool calls, `of_client` lists the calls that the client runs, not the agent.

An answer has the name of its model as `model`, the token counts of the provider as `usage`
(`prompt`, `answer` and `cached`), and its duration as `seconds`. The result of a tool has
`seconds`, and `failed` if the tool failed. If an imported response consists of several messages,
each message has the id of the response as `response`, and one message has the usage. Messages that
another program copied into a fork have `copied`; the usage of these copies is counted only for the
original session.

A user message that a stenolog agent accepted has `received` (docs/decisions/0012), with
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
"""Name of the field with the metadata."""
RESPONSE: Final = "response"
IDENTITY: Final = "id"
"""Name of the field with the identity of a message that was imported from a transcript."""
PROGRAM_FIELDS: Final = frozenset(
    {
        "chatgpt",
        "claude_ai",
        "claude_code",
        "codex",
        "gemini_cli",
        "llm",
        "open_webui",
        "opencode",
    }
)
"""Fields of imported messages that hold the rest of the original record."""
_MAX_PLAUSIBLE_NUMBER: Final = 1e15
"""Upper limit of plausible token counts and seconds."""


def mark_seen(
    message: Mapping[str, Any],
    *,
    seen: int | None,
    answers: Sequence[int] | None = None,
    interrupted: str = "",
) -> dict[str, Any]:
    """Return the message with `seen`, `answers` and `interrupted`.

    `seen`: None means all earlier messages. `answers`: None for a message that is not an answer.
    """
    answered = None if answers is None else list(answers)
    return _add_metadata(message, seen=seen, answers=answered, interrupted=interrupted or None)


def answered_seqs(message: Mapping[str, Any]) -> list[int] | None:
    """Return the seqs of the messages that an answer answers; None if it does not say."""
    seqs = _metadata(message).get("answers")
    return [seq for seq in seqs if isinstance(seq, int)] if isinstance(seqs, list) else None


def last_seen_seq(message: Mapping[str, Any], seq: int) -> int:
    """Return the last seq that the message at `seq` takes into account."""
    seen_seq = _metadata(message).get("seen")
    if isinstance(seen_seq, int) and not isinstance(seen_seq, bool) and 0 <= seen_seq < seq:
        return seen_seq
    return seq - 1


def has_seen(message: Mapping[str, Any], seq: int, earlier_seq: int) -> bool:
    """Return whether the message at `seq` takes the message at `earlier_seq` into account."""
    if earlier_seq <= last_seen_seq(message, seq):
        return True
    return earlier_seq < seq and earlier_seq in (answered_seqs(message) or ())


class AnsweredMessages:
    """The messages that a session's answers take into account.

    The answers are added from the newest to the oldest.
    """

    def __init__(self) -> None:
        self.upto = 0
        """Every message up to this seq is included."""
        self._named: set[int] = set()

    def add(self, answer: Mapping[str, Any], seq: int) -> None:
        """Add the messages that the answer at `seq` takes into account."""
        seen_seq = last_seen_seq(answer, seq)
        self.upto = max(self.upto, seen_seq)
        if seen_seq < seq - 1:
            self._named.update(named for named in answered_seqs(answer) or () if named < seq)

    def __contains__(self, seq: int) -> bool:
        return seq <= self.upto or seq in self._named


def without_seqs(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message without `seen` and `answers`, which name messages by seq."""
    metadata = _metadata(message)
    if not {"seen", "answers"} & metadata.keys():
        return dict(message)
    kept = {name: value for name, value in metadata.items() if name not in ("seen", "answers")}
    return {**message, FIELD: kept}


def interruption(message: Mapping[str, Any]) -> str:
    """Return the reason why the answer is incomplete, or an empty string."""
    reason = _metadata(message).get("interrupted")
    return reason if isinstance(reason, str) else ""


def mark_client_calls(message: Mapping[str, Any], call_ids: Sequence[str]) -> dict[str, Any]:
    """Return the message with the ids of the tool calls that the client runs."""
    return _add_metadata(message, of_client=list(call_ids) or None)


def client_call_ids(message: Mapping[str, Any]) -> frozenset[str]:
    """Return the ids of the tool calls that the client runs, not the agent."""
    ids = _metadata(message).get("of_client")
    return frozenset(id for id in (ids if isinstance(ids, list) else []) if isinstance(id, str))


def mark_model(
    message: Mapping[str, Any],
    *,
    model: str,
    seconds: float,
    usage: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return the message with its model, duration and token counts."""
    counts = None if usage is None else dict(usage)
    return _add_metadata(message, model=model, seconds=round(seconds, 3), usage=counts)


def mark_tool_outcome(
    message: Mapping[str, Any], *, seconds: float, failed: bool
) -> dict[str, Any]:
    """Return the message of a tool with its duration, and a mark if the tool failed."""
    return _add_metadata(message, seconds=round(seconds, 3), failed=failed or None)


def model_of(message: Mapping[str, Any]) -> str | None:
    """Return the name of the model that wrote the message, or None if unknown.

    Other programs write the name into the field `model` of the message.
    """
    name = _metadata(message).get("model") or message.get("model")
    return name if isinstance(name, str) and name else None


def model_label(name: str) -> str:
    """Return the name of a model for display, without the address of its server."""
    address, _, short = name.rpartition("#")
    return short if short and "://" in address else name


def usage_of(message: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the provider's token counts: `prompt`, `answer`, `cached`; None if unknown."""
    usage = _metadata(message).get("usage")
    if not isinstance(usage, Mapping):
        # Messages of other programs may have the counts in a provider's format.
        usage = _provider_usage(message.get("usage"))
    if usage is None:
        return None
    return {
        name: value
        for name in ("prompt", "answer", "cached")
        if isinstance(value := usage.get(name, 0), int) and _is_plausible(value)
    }


def response_of(message: Mapping[str, Any]) -> str:
    """Return the id of the response that the message is a part of, or an empty string."""
    response_id = _metadata(message).get(RESPONSE)
    return response_id if isinstance(response_id, str) else ""


def _provider_usage(usage: Any) -> dict[str, int] | None:
    """Convert token counts of OpenAI's or Anthropic's API to the counts that stenolog stores."""
    if not isinstance(usage, Mapping):
        return None

    def first_count(fields: Any, *names: str) -> int | None:
        values = (fields.get(name) for name in names) if isinstance(fields, Mapping) else ()
        counts = (value for value in values if isinstance(value, int) and _is_plausible(value))
        return next(counts, None)

    prompt = first_count(usage, "prompt_tokens", "input_tokens")
    answer = first_count(usage, "completion_tokens", "output_tokens")
    if prompt is None and answer is None:
        return None
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached = first_count(details, "cached_tokens") or first_count(usage, "cached_tokens") or 0
    # The input tokens that Anthropic reports do not include cached tokens.
    cache_read = first_count(usage, "cache_read_input_tokens") or 0
    cache_written = first_count(usage, "cache_creation_input_tokens") or 0
    return {
        "prompt": (prompt or 0) + cache_read + cache_written,
        "answer": answer or 0,
        "cached": cached or cache_read,
    }


def seconds_of(message: Mapping[str, Any]) -> float | None:
    """Return the duration of an answer or a tool call in seconds, or None if unknown."""
    seconds = _metadata(message).get("seconds")
    return float(seconds) if isinstance(seconds, int | float) and _is_plausible(seconds) else None


def _is_plausible(number: float) -> bool:
    """Return whether a count or duration is plausible. Any program can write any number."""
    return not isinstance(number, bool) and 0 <= number <= _MAX_PLAUSIBLE_NUMBER


def has_failed(message: Mapping[str, Any]) -> bool:
    """Return whether the message is the result of a tool that failed."""
    return _metadata(message).get("failed") is True


def without_usage(message: Mapping[str, Any], *, copied: bool = False) -> dict[str, Any]:
    """Return the message without its token counts, because another message has them.

    `copied`: mark the message as a copy that another program made for a fork.
    """
    metadata = {name: value for name, value in _metadata(message).items() if name != "usage"}
    return _add_metadata({**message, FIELD: metadata}, copied=copied or None)


def is_copied(message: Mapping[str, Any]) -> bool:
    """Return whether another program copied the message into a fork."""
    return _metadata(message).get("copied") is True


def mark_received(
    message: Mapping[str, Any], *, sender: str = "", origin: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the user message with a mark that an agent accepted it. Replaces its metadata.

    `sender`: the user or group chat, if the caller has verified it. `origin`: where the
    message came from, and so where the answer is sent; None if only the caller gets the answer.
    """
    metadata: dict[str, Any] = {"received": {"sender": sender} if sender else {}}
    if origin is not None:
        metadata["origin"] = dict(origin)
    return {**message, FIELD: metadata}


def is_received(message: Mapping[str, Any]) -> bool:
    """Return whether a stenolog agent accepted this user message."""
    return message.get("role") == "user" and isinstance(_metadata(message).get("received"), Mapping)


def sender_of(message: Mapping[str, Any]) -> str:
    """Return the verified sender of a user message, or an empty string."""
    sender = _metadata(message)["received"].get("sender") if is_received(message) else None
    return sender if isinstance(sender, str) else ""


def mark_request(message: Mapping[str, Any], *, id: str, digest: str) -> dict[str, Any]:
    """Return the message with the id and digest of its HTTP request.

    `id`: the idempotency key of the client, or empty. `digest`: digest of all messages of the
    request.
    """
    return _add_metadata(message, request={"id": id, "digest": digest})


def request_of(message: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the idempotency key and digest of the HTTP request of a message, or None."""
    request = _metadata(message).get("request")
    if not isinstance(request, Mapping):
        return None
    id, digest = request.get("id"), request.get("digest")
    return (id, digest) if isinstance(id, str) and isinstance(digest, str) else None


def without_marks(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message without the field `stenolog`."""
    return {name: value for name, value in message.items() if name != FIELD}


def origin_of(message: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the destination of the answer, or None if the message is not from a chat app."""
    origin = _metadata(message).get("origin")
    return origin if isinstance(origin, Mapping) else None


def _add_metadata(message: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the message with these fields in its metadata, except fields that are None."""
    added_fields = {name: value for name, value in fields.items() if value is not None}
    if not added_fields:
        return dict(message)
    return {**message, FIELD: {**_metadata(message), **added_fields}}


def identity_of(message: Mapping[str, Any]) -> str | None:
    """Return the identity of a message that was imported from a transcript; None for others."""
    identity = _metadata(message).get(IDENTITY)
    return identity if isinstance(identity, str) and identity else None


def _metadata(message: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = message.get(FIELD)
    return metadata if isinstance(metadata, Mapping) else {}


# --- owners ----------------------------------------------------------------------------------


class Ownership(Struct, frozen=True):
    """The owner of a session, as determined by its user messages (docs/decisions/0012).

    The key does not prove who owns a session, because clients of the gateway and importers choose
    keys. `sender` is empty if a user message has no sender, or if two messages have different
    senders. A session with an empty `sender` has its own memory scope.
    """

    owner: str = ""
    """Sender of the first user message; empty if it has none, or if there is no user message."""
    mixed: bool = False
    """Whether a user message has no sender, or another sender than the first message."""

    @property
    def sender(self) -> str:
        """The sender of all user messages, or an empty string."""
        return "" if self.mixed else self.owner

    def with_messages(self, messages: Iterable[Message]) -> Self:
        """Return the ownership of the session after these additional messages."""
        ownership = self
        for message in messages:
            if ownership.mixed:
                break
            if getattr(message, "role", None) == "user":
                sender = replace_surrogates(sender_of(message.to_dict()))
                # Without an owner, this message is the first user message.
                owner = ownership.owner or sender
                # guard: one-sender
                ownership = replace(ownership, owner=owner, mixed=not sender or sender != owner)
        return ownership
