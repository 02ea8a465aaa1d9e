"""Convert messages to the values that templates show: text, thinking, pictures, tool calls."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from json import JSONEncoder
from typing import Any, Final

import msgspec
from markupsafe import Markup
from msgspec import Struct

from stenolog.agent.turn import INTERRUPTED
from stenolog.catalog.message_metadata import (
    has_failed,
    interruption,
    model_of,
    origin_of,
    seconds_of,
    usage_of,
)
from stenolog.gateway.viewer.markdown_html import (
    MAX_COLOURED_ON_PAGE,
    MAX_RENDERED,
    coloured,
    is_address,
    is_picture,
    to_html,
)
from stenolog.messages import (
    FilePart,
    ImagePart,
    Part,
    TextPart,
    ThinkingPart,
    ToolResult,
    UnknownPart,
    as_json,
    read_content,
    read_message,
    text_of,
    type_of,
)
from stenolog.messages import ToolCall as Call
from stenolog.records import Message
from stenolog.transfer.export.code_blocks import ColourBudget

_ROLES: Final = {"user", "assistant", "tool", "system", "developer"}
_LINE: Final = 120
_LAYOUT: Final = JSONEncoder(indent=2, ensure_ascii=False)


class Picture(Struct, frozen=True, kw_only=True):
    """A picture. Embedded pictures are shown, others only linked."""

    address: str
    shown: bool
    link: bool


class ToolCall(Struct, frozen=True, kw_only=True):
    """A tool call, with its result if it has one."""

    name: str
    line: str
    """The arguments in one line, shortened."""
    arguments: Markup
    result: Markup | None
    seconds: float | None
    failed: bool


class MessageView(Struct, frozen=True, kw_only=True):
    """One message as the page shows it."""

    seq: int
    at: datetime
    hidden: bool
    role: str
    """The role as stored, which may be any text."""
    kind: str
    """The role if the style sheet knows it, otherwise `other`."""
    words: Markup
    thoughts: tuple[Markup, ...] = ()
    pictures: tuple[Picture, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    model: str | None = None
    seconds: float | None = None
    usage: Mapping[str, int] | None = None
    interrupted: str = ""
    origin: str = ""


class _Answered(Struct, frozen=True):
    result: ToolResult
    message: Message


def message_views(messages: Sequence[Message], later: Sequence[Message] = ()) -> list[MessageView]:
    """Return the messages for the page; a result is shown at its call if the call is among them.

    `later` are messages after these, which may contain the results of the last calls.
    """
    bodies = {one.seq: one.to_dict() for one in messages}
    parts = {seq: list(read_message(body)) for seq, body in bodies.items()}
    after = {one.seq: list(read_message(one.to_dict())) for one in later}
    answers = _answers([*messages, *later], bodies, {**after, **parts})
    at_calls = {id(found.result) for found in answers.values()}
    page = ColourBudget(MAX_COLOURED_ON_PAGE)
    made = []
    # Colour the newest messages first: a page opens at its end.
    for message in reversed(messages):
        own = parts[message.seq]
        left = [part for part in own if id(part) not in at_calls]
        if own and not left:
            continue
        calls = tuple(_calls(message.seq, own, answers, page))
        pictures = tuple(_pictures(own))
        made.append(_shown(message, bodies[message.seq], left, pictures, calls, page))
    return made[::-1]


def prompt_line(body: Mapping[str, Any]) -> str:
    """Return the user's prompt in one line, without pictures."""
    content = body.get("content")
    if content is not None and not isinstance(content, str | list):
        return one_line(as_json(content))
    return one_line(_text(body, read_message(body)))


def one_line(text: str) -> str:
    """Return the start of a text in one line."""
    line = " ".join(text[: 4 * _LINE].split())
    return line if len(line) <= _LINE else line[: _LINE - 1].rstrip() + "…"


def pretty(value: Any, page: ColourBudget | None = None) -> Markup:
    """Return a value as indented JSON, and text that is not JSON unchanged; cut at LONGEST."""
    if isinstance(value, str):
        if len(value) > MAX_RENDERED:
            # Not decoded: the layout of nested lists is many times longer than their text.
            return Markup("{}").format(_cut(value))
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return Markup("{}").format(_cut(value))
        if isinstance(value, str):
            return Markup("{}").format(_cut(value))
    try:
        text = _laid_out(value)
    except (TypeError, ValueError, RecursionError):
        text = as_json(value)
    return coloured(_cut(text), "json", page)


def _laid_out(value: Any) -> str:
    """Return the value as indented JSON, up to a little more than LONGEST characters."""
    pieces, size = list[str](), 0
    for piece in _LAYOUT.iterencode(value):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_RENDERED:  # guard: layout-bounded
            break
    return "".join(pieces)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_RENDERED else text[:MAX_RENDERED] + "\n… cut"


def _shown(
    message: Message,
    body: Mapping[str, Any],
    parts: Sequence[Part],
    pictures: tuple[Picture, ...],
    calls: tuple[ToolCall, ...],
    page: ColourBudget,
) -> MessageView:
    role = body.get("role")
    named = role if isinstance(role, str) else "?"
    origin = origin_of(body)
    channel = None if origin is None else origin.get("channel")
    return MessageView(
        seq=message.seq,
        at=message.at,
        hidden=message.hidden,
        role=named,
        kind=named if named in _ROLES else "other",
        words=_words(body, parts, page),
        thoughts=tuple(to_html(text, page) for text in _thoughts(parts) if text.strip()),
        pictures=pictures,
        calls=calls,
        model=model_of(body),
        seconds=seconds_of(body),
        usage=usage_of(body),
        interrupted=interruption(body),
        origin=channel if isinstance(channel, str) else "",
    )


def _words(body: Mapping[str, Any], parts: Sequence[Part], page: ColourBudget) -> Markup:
    """Return the text of a message, and results whose call is not on the page."""
    results = [_result_text(part) for part in parts if isinstance(part, ToolResult)]
    content = body.get("content")
    if not results and content is not None and not isinstance(content, str | list):
        return Markup("<pre>{}</pre>").format(pretty(content, page))
    text = _text(body, parts)
    if isinstance(content, str) and interruption(body):
        # The page shows the interruption and its reason itself.
        text = text.removesuffix(INTERRUPTED).rstrip()
    shown = [Markup("<pre>{}</pre>").format(pretty(result, page)) for result in results]
    return Markup().join([*shown, to_html(text, page)] if text or not shown else shown)


def _text(body: Mapping[str, Any], parts: Iterable[Part]) -> str:
    return "\n".join(filter(None, (_part_text(part, body) for part in parts)))


def _part_text(part: Part, body: Mapping[str, Any]) -> str:
    match part:
        case TextPart():
            return part.text
        case FilePart() if part.value is body.get("audio"):
            return part.content if isinstance(part.content, str) else "[audio]"
        case UnknownPart() if part.field != "content":
            return as_json({part.field: part.value})
        case FilePart() | UnknownPart():
            return text_of([part.value])
    return ""


def _thoughts(parts: Iterable[Part]) -> Iterator[str]:
    thoughts = [part for part in parts if isinstance(part, ThinkingPart)]
    for part in thoughts:
        if part.in_content:
            yield part.text or f"[{type_of(part.value)}]"
    # Providers send the same text in two fields: show only the first one.
    yield from [part.text for part in thoughts if not part.in_content and part.text][:1]


def _pictures(parts: Iterable[Part]) -> Iterator[Picture]:
    for part in parts:
        if isinstance(part, ImagePart):
            url = part.url
            yield Picture(address=url, shown=is_picture(url), link=is_address(url))
        elif isinstance(part, ToolResult) and isinstance(part.content, Mapping):
            yield from _pictures(read_content(part.content))


# --- calls and results -----------------------------------------------------------------------


def _answers(
    messages: Iterable[Message],
    bodies: Mapping[int, Mapping[str, Any]],
    parts: Mapping[int, Sequence[Part]],
) -> dict[tuple[int, int], _Answered]:
    """Return the result of each call, by seq of the message and position of the call in it."""
    found: dict[tuple[int, int], _Answered] = {}
    waiting: dict[str | None, list[tuple[int, int]]] = {}
    for message in messages:
        own = parts[message.seq]
        if message.seq in bodies and (calls := _calls_in(own)):
            if "role" in bodies[message.seq]:  # Responses items of one answer are several messages
                waiting = {}
            for place, call in enumerate(calls):
                waiting.setdefault(call.id, []).append((message.seq, place))
        for part in own:
            if isinstance(part, ToolResult) and (spots := waiting.get(part.id)):
                found[spots.pop(0)] = _Answered(part, message)
    return found


def _calls_in(parts: Iterable[Part]) -> list[Call]:
    """Return the calls of a message. The same call may be in `tool_calls` and in the content."""
    calls = [part for part in parts if isinstance(part, Call)]
    listed = {call.id for call in calls if not call.in_content}
    return [call for call in calls if not call.in_content or call.id not in listed]


def _calls(
    seq: int,
    parts: Iterable[Part],
    answers: Mapping[tuple[int, int], _Answered],
    page: ColourBudget,
) -> Iterator[ToolCall]:
    for place, call in enumerate(_calls_in(parts)):
        answer = answers.get((seq, place))
        told = None if answer is None else answer.message.to_dict()
        yield ToolCall(
            name=call.name,
            line=one_line(
                call.arguments if isinstance(call.arguments, str) else as_json(call.arguments)
            ),
            arguments=pretty(call.arguments, page),
            result=None if answer is None else pretty(_result_text(answer.result), page),
            seconds=None if told is None else seconds_of(told),
            failed=told is not None
            and (has_failed(told) or (answer is not None and answer.result.is_error)),
        )


def _result_text(result: ToolResult) -> str:
    is_part = isinstance(result.content, Mapping) and type_of(result.content)
    return text_of([result.content] if is_part else result.content)
