"""Finds the new messages in a chat request by comparing it with its session. Pure functions.

Some clients send only new messages, others send the whole conversation every time. A client has not
seen the tool calls that the agent ran: it sees all texts of a turn as one message. It may also send
messages that were summarized and are hidden by now. A wrong match loses nothing: hidden messages
can be made visible again.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec import Struct

from stenolog.catalog.message_metadata import client_call_ids, interruption
from stenolog.messages import (
    ToolCall,
    calls_of,
    has_text,
    results_of,
    text_of,
    text_parts_of,
)
from stenolog.records import Message

Body = Mapping[str, Any]

SEPARATOR = "\n\n"
"""Separator between the texts of one turn, for clients that see them as one message."""
_SYSTEM = ("system", "developer")


class ClientMessage(Struct, frozen=True, kw_only=True):
    """A message as a client sees it."""

    role: str
    content: object
    """Content parts of a user message, otherwise the text."""
    calls: tuple[tuple[str, object], ...] = ()
    """Calls that the client runs: name and arguments."""
    call_id: str = ""
    """Id of the call, for a result."""
    seq: int = 0
    """Seq of the last log message that this part covers; 0 for a part of the request."""
    end: int = 0
    """Number of log messages up to and including this part."""
    cut: bool = False
    """Whether the answer was cut off, so that the client may have seen less of it."""


class Match(Struct, frozen=True, kw_only=True):
    """How a request continues its session."""

    keep: int
    """Number of visible messages that stay visible."""
    new: tuple[Body, ...]
    """Messages to append after them."""
    answered: int | None = None
    """Seq of the answer if the request has no new messages: the client may be retrying."""
    asked: int = 0
    """Seq of the last message of the request, if `answered` is its answer."""
    handed: bool = False
    """Whether that answer has calls for the client."""


def client_view(history: Sequence[Message]) -> list[ClientMessage]:
    """Return the messages as the client has seen them, newest last."""
    seen: list[ClientMessage] = []
    texts: list[str] = []
    own: set[str] = set()
    """Ids of the calls that the agent runs."""
    for end, message in enumerate(history, start=1):
        body = message.to_dict()
        if body.get("role") == "assistant":
            of_client = client_call_ids(body)
            calls = calls_of(body)
            own |= {call.id for call in calls if call.id}
            own -= of_client  # an id may be used again
            if words := _words(body):
                texts.append(words)
            handed = [call for call in calls if call.id in of_client]
            if calls and not handed:
                continue  # the agent runs the calls and continues
            seen.append(
                ClientMessage(
                    role="assistant",
                    content=" ".join(texts),
                    calls=tuple(map(_comparable_call, handed)),
                    seq=message.seq,
                    end=end,
                    cut=bool(interruption(body)),
                )
            )
            texts = []
        elif has_text(body):
            texts = []
            seen.append(
                ClientMessage(
                    role="user", content=_parts(body.get("content")), seq=message.seq, end=end
                )
            )
        else:
            for result in results_of(body):
                if result.id and result.id in own:
                    continue
                seen.append(_result(result.id, result.content, seq=message.seq, end=end))
    return seen


def match(
    history: Sequence[Message],
    sent: Sequence[Body],
    *,
    before: Callable[[], Sequence[Message]] | None = None,
) -> Match:
    """Compare the messages of a request with the visible messages of its session.

    `before`: returns the hidden messages, if there are any; it is called only if needed. `sent` has
    no system messages.
    """
    seen, asked = client_view(history), [_client_message(body) for body in sent]
    if not any(part.role == "assistant" for part in asked):
        return _match_new_messages(history, seen, asked, sent)
    if before is not None:
        end = _after_visible(seen, asked)
        if end is not None:
            return Match(keep=len(history), new=tuple(sent[end:]))
        gone = _hidden_count(client_view(before()), seen, asked)
        if gone is not None:
            return _match_full_history(history, seen, asked[gone:], sent[gone:])
    common = _common(seen, asked)
    if seen and not common and (overlap := _overlap(seen, asked)):
        return Match(keep=len(history), new=tuple(sent[overlap:]))
    return _match_full_history(history, seen, asked, sent)


def is_of_system(body: Body) -> bool:
    """Return whether a message of a request is a system message."""
    return body.get("role") in _SYSTEM


def text_at(history: Sequence[Message], seq: int) -> str:
    """Return the text of the answer at this seq for the client: all texts of its turn."""
    texts: list[str] = []
    for message in history:
        body = message.to_dict()
        if body.get("role") == "assistant":
            texts += [words] if (words := text_parts_of(body).strip()) else []
            if message.seq == seq:
                return SEPARATOR.join(texts)
            handed = client_call_ids(body)
            if not calls_of(body) or handed:
                texts = []
        elif has_text(body):
            texts = []
    return ""


# --- the two kinds of clients ----------------------------------------------------------------


def _match_new_messages(
    history: Sequence[Message],
    seen: list[ClientMessage],
    asked: list[ClientMessage],
    sent: Sequence[Body],
) -> Match:
    """Match a client that sends only new messages: all are new, except those stored before.

    Messages at the end of the log without an answer were stored by an earlier request, which the
    client repeats.
    """
    overlap = _overlap(seen, asked)
    count = len(asked)
    answered = None
    if seen and seen[-1].role == "assistant" and len(seen) > count:
        is_last = all(map(_same, seen[-1 - count : -1], asked))
        answered = seen[-1].seq if is_last and not overlap else None
    new = tuple(sent[overlap:])
    handed = answered is not None and bool(seen[-1].calls)
    asked_at = seen[-2].seq if answered is not None else 0
    return Match(keep=len(history), new=new, answered=answered, asked=asked_at, handed=handed)


def _match_full_history(
    history: Sequence[Message],
    seen: list[ClientMessage],
    asked: list[ClientMessage],
    sent: Sequence[Body],
) -> Match:
    """Match a client that sends the whole conversation: messages after the common part are new."""
    common = _common(seen, asked)
    keep = len(history) if common == len(seen) else (seen[common - 1].end if common else 0)
    new = tuple(sent[common:])
    answered = None
    if not new and common + 1 == len(seen) and seen[-1].role == "assistant":
        answered = seen[-1].seq
    handed = answered is not None and bool(seen[-1].calls)
    asked_at = seen[-2].seq if answered is not None and len(seen) > 1 else 0
    return Match(keep=keep, new=new, answered=answered, asked=asked_at, handed=handed)


def _after_visible(seen: list[ClientMessage], asked: list[ClientMessage]) -> int | None:
    """Return the index in the request after the visible messages; None if some are missing."""
    count = len(seen)
    starts = range(len(asked) - count, -1, -1) if seen else ()
    found = (at for at in starts if all(map(_same, seen, asked[at : at + count])))
    start = next(found, None)
    return None if start is None else start + count


def _hidden_count(
    before: list[ClientMessage], seen: list[ClientMessage], asked: list[ClientMessage]
) -> int | None:
    """Return the number of messages at the start of the request that are hidden; None if unclear.

    If several positions are possible, the one with the most visible messages in common is chosen.
    """
    passed = 0
    told = 0
    for part in asked:
        # The client has removed some hidden messages itself.
        found = next((at for at in range(told, len(before)) if _same(before[at], part)), None)
        if found is None:
            break
        told = found + 1
        passed += 1
    places = [
        (common, at)
        for at in range(passed + 1)
        if (common := _common(seen, asked, start=at)) or not seen
    ]
    if not places and passed and told == len(before):
        return passed  # the client has removed all visible messages
    if not places:
        return None
    return max(places)[1]


def _common(
    seen: Sequence[ClientMessage], asked: Sequence[ClientMessage], *, start: int = 0
) -> int:
    """Return the number of equal messages at the start; `start`: an index in the request."""
    count = 0
    for here, there in zip(seen, islice(asked, start, None), strict=False):
        if not _same(here, there):
            break
        count += 1
    return count


def _overlap(seen: Sequence[ClientMessage], asked: Sequence[ClientMessage]) -> int:
    """Return how many messages at the start of the request are the last visible ones."""
    for count in range(min(len(seen), len(asked)), 0, -1):
        if all(map(_same, seen[-count:], asked[:count])):
            return count
    return 0


# --- one message -----------------------------------------------------------------------------


def _same(here: ClientMessage, there: ClientMessage) -> bool:
    if here.role != there.role or here.calls != there.calls or here.call_id != there.call_id:
        return False
    if here.cut and isinstance(here.content, str) and isinstance(there.content, str):
        return here.content.startswith(there.content)
    return here.content == there.content


def _client_message(body: Body) -> ClientMessage:
    role = body.get("role")
    match role:
        case "assistant":
            return ClientMessage(
                role=role,
                content=_words(body),
                calls=tuple(map(_comparable_call, calls_of(body))),
            )
        case "tool":
            id = body.get("tool_call_id")
            return _result(id if isinstance(id, str) else None, body.get("content"))
    return ClientMessage(role="user", content=_parts(body.get("content")))


def _words(body: Body) -> str:
    """Return the text with normalized whitespace: clients join and trim pieces differently."""
    return " ".join(text_parts_of(body).split())


def _comparable_call(call: ToolCall) -> tuple[str, object]:
    """Return a call with decoded arguments: clients format the JSON differently."""
    arguments = call.arguments
    if isinstance(arguments, str):
        try:
            return call.name, json.loads(arguments)
        except (ValueError, RecursionError):
            return call.name, arguments
    return call.name, arguments


def _result(id: str | None, content: object, *, seq: int = 0, end: int = 0) -> ClientMessage:
    return ClientMessage(role="tool", content=text_of(content), call_id=id or "", seq=seq, end=end)


def _parts(content: object) -> object:
    """Return the text if it is the only part, so that both notations are equal."""
    if isinstance(content, list) and len(content) == 1:
        [part] = content
        if isinstance(part, Mapping) and set(part) == {"type", "text"} and part["type"] == "text":
            return part["text"]
    return content
