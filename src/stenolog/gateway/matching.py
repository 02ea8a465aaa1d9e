"""What a client sent, against what its session shows: which of it is new. Pure.

Some clients send what is new, others all that was said, every time. A client has not seen the
calls that the agent carried out itself: to it, all that was said in a turn is one message. What was
compacted is no longer in sight here, but still in what the client sends. Nothing is lost by a
mistake: what is taken out of sight can be brought back.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec import Struct

from stenolog.catalog.answers import calls_of_client, interruption
from stenolog.context.shapes import Call, calls_of, results_of, speaks, text_of, words_of
from stenolog.records import Message

Body = Mapping[str, Any]

BETWEEN = "\n\n"
"""What stands between two texts of one turn, for a client that sees them as one."""
_SYSTEM = ("system", "developer")


class Part(Struct, frozen=True, kw_only=True):
    """A message as a client sees it."""

    role: str
    content: object
    """Of a user, the parts; else the text."""
    calls: tuple[tuple[str, object], ...] = ()
    """The calls that the client carries out: name and arguments."""
    call_id: str = ""
    """Of a result: of which call."""
    seq: int = 0
    """Where the last message of the log stands that is told by it; 0 for what was sent."""
    end: int = 0
    """How many messages of the log there are up to and with it."""
    cut: bool = False
    """Whether it was cut off, so that a client may have seen less of it."""


class Match(Struct, frozen=True, kw_only=True):
    """What is to be done with what was sent."""

    keep: int
    """So many of the messages in sight stay there."""
    new: tuple[Body, ...]
    """What is said after them."""
    answered: int | None = None
    """Nothing is new, and this seq is the answer: to who asks again because it got none."""
    asked: int = 0
    """The seq of the last message that was sent, if `answered` is its answer."""
    handed: bool = False
    """Whether that answer is a call which the client is to carry out."""


def as_seen(history: Sequence[Message]) -> list[Part]:
    """What the client has seen of these messages, the newest last."""
    seen: list[Part] = []
    texts: list[str] = []
    own: set[str] = set()
    """The ids of the calls that the agent carries out."""
    for end, message in enumerate(history, start=1):
        body = message.to_dict()
        if body.get("role") == "assistant":
            of_client = calls_of_client(body)
            calls = calls_of(body)
            own |= {call.id for call in calls if call.id}
            own -= of_client  # an id may be used again
            if words := _words(body):
                texts.append(words)
            handed = [call for call in calls if call.id in of_client]
            if calls and not handed:
                continue  # it goes on by itself
            seen.append(
                Part(
                    role="assistant",
                    content=" ".join(texts),
                    calls=tuple(map(_made, handed)),
                    seq=message.seq,
                    end=end,
                    cut=bool(interruption(body)),
                )
            )
            texts = []
        elif speaks(body):
            texts = []
            seen.append(
                Part(role="user", content=_parts(body.get("content")), seq=message.seq, end=end)
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
    """Which of the messages that were sent are new in a session that shows this history.

    `before`: gives all that was said and is no longer in sight, where there is any; it is read
    only where it is needed. What is sent has no system messages.
    """
    seen, asked = as_seen(history), [_sent(body) for body in sent]
    if not any(part.role == "assistant" for part in asked):
        return _only_new(history, seen, asked, sent)
    if before is not None:
        end = _behind(seen, asked)
        if end is not None:
            return Match(keep=len(history), new=tuple(sent[end:]))
        gone = _gone(as_seen(before()), seen, asked)
        if gone is not None:
            return _whole(history, seen, asked[gone:], sent[gone:])
    common = _common(seen, asked)
    if seen and not common and (overlap := _overlap(seen, asked)):
        return Match(keep=len(history), new=tuple(sent[overlap:]))
    return _whole(history, seen, asked, sent)


def is_of_system(body: Body) -> bool:
    """Whether a message that was sent is an instruction, and not a part of the talk."""
    return body.get("role") in _SYSTEM


def text_at(history: Sequence[Message], seq: int) -> str:
    """What the client is told of the answer at this seq: all that was said in its turn."""
    texts: list[str] = []
    for message in history:
        body = message.to_dict()
        if body.get("role") == "assistant":
            texts += [words] if (words := words_of(body).strip()) else []
            if message.seq == seq:
                return BETWEEN.join(texts)
            handed = calls_of_client(body)
            if not calls_of(body) or handed:
                texts = []
        elif speaks(body):
            texts = []
    return ""


# --- the two kinds of clients ----------------------------------------------------------------


def _only_new(
    history: Sequence[Message], seen: list[Part], asked: list[Part], sent: Sequence[Body]
) -> Match:
    """Of a client that sends what is new: all of it, but for what was stored when it asked before.

    What nobody has answered stands at the end of the log, and then the client asks again.
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


def _whole(
    history: Sequence[Message], seen: list[Part], asked: list[Part], sent: Sequence[Body]
) -> Match:
    """Of a client that sends all that was said: what stands behind that which both have."""
    common = _common(seen, asked)
    keep = len(history) if common == len(seen) else (seen[common - 1].end if common else 0)
    new = tuple(sent[common:])
    answered = None
    if not new and common + 1 == len(seen) and seen[-1].role == "assistant":
        answered = seen[-1].seq
    handed = answered is not None and bool(seen[-1].calls)
    asked_at = seen[-2].seq if answered is not None and len(seen) > 1 else 0
    return Match(keep=keep, new=new, answered=answered, asked=asked_at, handed=handed)


def _behind(seen: list[Part], asked: list[Part]) -> int | None:
    """Where that ends in what was sent which is all that is in sight; None: not all of it is."""
    count = len(seen)
    starts = range(len(asked) - count, -1, -1) if seen else ()
    found = (at for at in starts if all(map(_same, seen, asked[at : at + count])))
    start = next(found, None)
    return None if start is None else start + count


def _gone(before: list[Part], seen: list[Part], asked: list[Part]) -> int | None:
    """How many of the first messages that were sent are no longer in sight; None: nobody knows.

    Where one is in sight that could be the first, the place is it from where most agree.
    """
    passed = 0
    told = 0
    for part in asked:
        # Some of what is out of sight the client has taken back itself.
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
        return passed  # what is in sight, the client has taken back as a whole
    if not places:
        return None
    return max(places)[1]


def _common(seen: Sequence[Part], asked: Sequence[Part], *, start: int = 0) -> int:
    """How many agree from the start, or from there in what was sent."""
    count = 0
    for here, there in zip(seen, islice(asked, start, None), strict=False):
        if not _same(here, there):
            break
        count += 1
    return count


def _overlap(seen: Sequence[Part], asked: Sequence[Part]) -> int:
    """How many of the first that were sent are the last in sight."""
    for count in range(min(len(seen), len(asked)), 0, -1):
        if all(map(_same, seen[-count:], asked[:count])):
            return count
    return 0


# --- one message -----------------------------------------------------------------------------


def _same(here: Part, there: Part) -> bool:
    if here.role != there.role or here.calls != there.calls or here.call_id != there.call_id:
        return False
    if here.cut and isinstance(here.content, str) and isinstance(there.content, str):
        return here.content.startswith(there.content)
    return here.content == there.content


def _sent(body: Body) -> Part:
    role = body.get("role")
    match role:
        case "assistant":
            return Part(
                role=role,
                content=_words(body),
                calls=tuple(map(_made, calls_of(body))),
            )
        case "tool":
            id = body.get("tool_call_id")
            return _result(id if isinstance(id, str) else None, body.get("content"))
    return Part(role="user", content=_parts(body.get("content")))


def _words(body: Body) -> str:
    """What is said, without regard to blanks: clients join and trim pieces as they like."""
    return " ".join(words_of(body).split())


def _made(call: Call) -> tuple[str, object]:
    """A call as what it means: clients write its arguments down in their own way."""
    arguments = call.arguments
    if isinstance(arguments, str):
        try:
            return call.name, json.loads(arguments)
        except (ValueError, RecursionError):
            return call.name, arguments
    return call.name, arguments


def _result(id: str | None, content: object, *, seq: int = 0, end: int = 0) -> Part:
    return Part(role="tool", content=text_of(content), call_id=id or "", seq=seq, end=end)


def _parts(content: object) -> object:
    """The same for a text and for a list that holds it alone."""
    if isinstance(content, list) and len(content) == 1:
        [part] = content
        if isinstance(part, Mapping) and set(part) == {"type", "text"} and part["type"] == "text":
            return part["text"]
    return content
