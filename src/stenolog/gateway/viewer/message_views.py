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
from stenolog.context.message_parts import (
    REASONING,
    THINKING_PARTS,
    Result,
    as_json,
    calls_of,
    results_of,
    text_of,
    text_parts_of,
)
from stenolog.gateway.viewer.markdown_html import (
    MAX_COLOURED_ON_PAGE,
    MAX_RENDERED,
    coloured,
    is_address,
    is_picture,
    to_html,
)
from stenolog.records import Message
from stenolog.transfer.export.code_blocks import ColourBudget

_ROLES: Final = {"user", "assistant", "tool", "system", "developer"}
_PICTURE_PARTS: Final = {"image_url", "image", "input_image"}
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
    result: Result
    message: Message


def message_views(messages: Sequence[Message], later: Sequence[Message] = ()) -> list[MessageView]:
    """Return the messages for the page; a result is shown at its call if the call is among them.

    `later` are messages after these, which may contain the results of the last calls.
    """
    bodies = {one.seq: one.to_dict() for one in messages}
    after = {one.seq: one.to_dict() for one in later}
    answers = _answers(messages, bodies, later, after)
    told = {found.message.seq for found in answers.values()}
    page = ColourBudget(MAX_COLOURED_ON_PAGE)
    made = []
    # Colour the newest messages first: a page opens at its end.
    for message in reversed(messages):
        body = bodies[message.seq]
        if message.seq in told and _only_results(body):
            continue
        calls = tuple(_calls(message.seq, body, answers, page))
        made.append(_shown(message, body, calls, page))
    return made[::-1]


def prompt_line(body: Mapping[str, Any]) -> str:
    """Return the user's prompt in one line, without pictures."""
    return one_line(text_parts_of({**body, "content": _without_pictures(body.get("content"))}))


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
    message: Message, body: Mapping[str, Any], calls: tuple[ToolCall, ...], page: ColourBudget
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
        words=_words(body, named, page),
        thoughts=tuple(to_html(text, page) for text in _thoughts(body) if text.strip()),
        pictures=tuple(_pictures(body)),
        calls=calls,
        model=model_of(body),
        seconds=seconds_of(body),
        usage=usage_of(body),
        interrupted=interruption(body),
        origin=channel if isinstance(channel, str) else "",
    )


def _words(body: Mapping[str, Any], role: str, page: ColourBudget) -> Markup:
    if role == "tool":
        return Markup("<pre>{}</pre>").format(pretty(text_of(body.get("content")), page))
    content = _without_pictures(body.get("content"))
    if isinstance(content, str) and interruption(body):
        # The page shows the interruption and its reason itself.
        content = content.removesuffix(INTERRUPTED).rstrip()
    if content is not None and not isinstance(content, str | list):
        return Markup("<pre>{}</pre>").format(pretty(content, page))
    return to_html(text_parts_of({**body, "content": content}), page)


def _without_pictures(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [part for part in content if _kind(part) not in _PICTURE_PARTS]


def _thoughts(body: Mapping[str, Any]) -> Iterator[str]:
    content = body.get("content")
    for part in content if isinstance(content, list) else ():
        if _kind(part) in THINKING_PARTS:
            yield _first_text(part)
    # Providers send the same text in two fields: show only the first one.
    for field in REASONING:
        value = body.get(field)
        if isinstance(value, str) and value:
            yield value
            return
        if isinstance(value, list) and value:
            yield "\n\n".join(_first_text(part) for part in value if isinstance(part, Mapping))
            return


def _first_text(part: Mapping[str, Any]) -> str:
    for field in ("thinking", "text", "reasoning", "summary", "content"):
        value = part.get(field)
        if isinstance(value, str):
            return value
    return ""


def _pictures(body: Mapping[str, Any]) -> Iterator[Picture]:
    content = body.get("content")
    for part in content if isinstance(content, list) else ():
        if _kind(part) in _PICTURE_PARTS:
            address = _address(part)
            yield Picture(address=address, shown=is_picture(address), link=is_address(address))


def _address(part: Mapping[str, Any]) -> str:
    given = part.get("image_url")
    if isinstance(given, Mapping):
        given = given.get("url")
    source = part.get("source")
    if given is None and isinstance(source, Mapping):
        kind, data = source.get("media_type"), source.get("data")
        given = f"data:{kind};base64,{data}" if data is not None else source.get("url")
    return given if isinstance(given, str) else ""


def _kind(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else ""


# --- calls and results -----------------------------------------------------------------------


def _answers(
    messages: Iterable[Message],
    bodies: Mapping[int, Mapping[str, Any]],
    later: Iterable[Message],
    after: Mapping[int, Mapping[str, Any]],
) -> dict[tuple[int, int], _Answered]:
    """Return the result of each call, by seq of the message and position of the call in it."""
    found: dict[tuple[int, int], _Answered] = {}
    waiting: dict[str | None, list[tuple[int, int]]] = {}
    for message, body in [
        *((one, bodies[one.seq]) for one in messages),
        *((one, after[one.seq]) for one in later),
    ]:
        if message.seq in bodies and (calls := calls_of(body)):
            waiting = {}
            for place, call in enumerate(calls):
                waiting.setdefault(call.id, []).append((message.seq, place))
        for result in results_of(body):
            spots = waiting.get(result.id)
            if spots:
                found[spots.pop(0)] = _Answered(result, message)
    return found


def _calls(
    seq: int,
    body: Mapping[str, Any],
    answers: Mapping[tuple[int, int], _Answered],
    page: ColourBudget,
) -> Iterator[ToolCall]:
    for place, call in enumerate(calls_of(body)):
        answer = answers.get((seq, place))
        told = None if answer is None else answer.message.to_dict()
        yield ToolCall(
            name=call.name,
            line=one_line(
                call.arguments if isinstance(call.arguments, str) else as_json(call.arguments)
            ),
            arguments=pretty(call.arguments, page),
            result=None if answer is None else pretty(text_of(answer.result.content), page),
            seconds=None if told is None else seconds_of(told),
            failed=told is not None
            and (has_failed(told) or (answer is not None and _is_error(answer.result))),
        )


def _is_error(result: Result) -> bool:
    return result.part.get("is_error") is True


def _only_results(body: Mapping[str, Any]) -> bool:
    if body.get("role") == "tool":
        return True
    content = body.get("content")
    return isinstance(content, list) and all(_kind(part) == "tool_result" for part in content)
