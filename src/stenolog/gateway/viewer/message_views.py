"""Convert messages to the values that templates show: text, thinking, pictures, tool calls."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from markupsafe import Markup
from msgspec import Struct

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
from stenolog.gateway.viewer.secret_masks import SecretMask
from stenolog.gateway.viewer.tool_html import blocks_html
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
from stenolog.transfer.export.tool_views import (
    DiffBudget,
    ToolBlock,
    argument_blocks,
    cut,
    decoded,
    error_line,
    laid_out,
    result_blocks,
    summary_of,
)

_ROLES: Final = {"user", "assistant", "tool", "system", "developer"}
_INTERRUPTED: Final = "[interrupted]"
"""Text that marks an interrupted answer for the model."""
_LINE: Final = 120
_PRE: Final = re.compile(r"<pre>(.*?)</pre>", re.DOTALL)
_WITH_COPY: Final = (
    r'<div class="copyable"><button type="button" class="copy-code" data-copy="code">copy</button>'
    r"<pre>\1</pre></div>"
)
_MAX_COLOURED_IN_DOCUMENT: Final = 1_000_000
"""Maximum number of characters of code that are coloured in one exported document."""


class Picture(Struct, frozen=True, kw_only=True):
    """A picture. Embedded pictures are shown, others only linked."""

    address: str
    shown: bool
    link: bool


class ToolCall(Struct, frozen=True, kw_only=True):
    """A tool call, with its result if it has one."""

    name: str
    line: str
    """The argument that tells most, in one line."""
    arguments: Markup
    result: Markup | None
    pictures: tuple[Picture, ...] = ()
    """Pictures in the result."""
    seconds: float | None
    failed: bool
    error: str = ""
    """The first line of the error, if the call failed."""


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


BodyOf = Callable[[Message], Mapping[str, Any]]
"""Function that returns the body of a message as it may be shown."""


class _Limits:
    """What one page, or one exported document, may still use."""

    def __init__(self, colours: int, *, on_page: bool) -> None:
        self.on_page = on_page
        self.colours = ColourBudget(colours)
        self.diffs = DiffBudget()
        self.mask = SecretMask(enabled=on_page)

    def markdown(self, text: str) -> Markup:
        made = self.mask.buttons(to_html(self.hide(text), self.colours))
        return Markup(_PRE.sub(_WITH_COPY, str(made))) if self.on_page else made

    def pretty(self, value: Any) -> Markup:
        return self.mask.buttons(pretty(value, self.colours, self.mask))

    def hide(self, text: str) -> str:
        # Text after the limit is not shown.
        return self.mask.hide(text[:MAX_RENDERED]) + text[MAX_RENDERED:]


def message_views(messages: Sequence[Message], later: Sequence[Message] = ()) -> list[MessageView]:
    """Return the messages for the page; a result is shown at its call if the call is among them.

    `later` are messages after these, which may contain the results of the last calls.
    """
    limits = _Limits(MAX_COLOURED_ON_PAGE, on_page=True)
    # Colour the newest messages first: a page opens at its end.
    return list(_views(messages, later, Message.to_dict, limits, reversed(messages)))[::-1]


def document_views(messages: Sequence[Message], body_of: BodyOf) -> Iterator[MessageView]:
    """Yield all messages of a session for a document; secrets are not masked."""
    return _views(
        messages, (), body_of, _Limits(_MAX_COLOURED_IN_DOCUMENT, on_page=False), messages
    )


def _views(
    messages: Sequence[Message],
    later: Sequence[Message],
    body_of: BodyOf,
    limits: _Limits,
    order: Iterable[Message],
) -> Iterator[MessageView]:
    bodies = {one.seq: body_of(one) for one in messages}
    parts = {seq: list(read_message(body)) for seq, body in bodies.items()}
    told = {**bodies, **{one.seq: body_of(one) for one in later}}
    after = {one.seq: list(read_message(told[one.seq])) for one in later}
    answers = _answers([*messages, *later], bodies, {**after, **parts})
    at_calls = {id(found.result) for found in answers.values()}
    for message in order:
        own = parts[message.seq]
        left = [part for part in own if id(part) not in at_calls]
        if own and not left:
            continue
        calls = tuple(_calls(message.seq, own, answers, told, limits))
        pictures = tuple(_pictures(own))
        yield _shown(message, bodies[message.seq], left, pictures, calls, limits)


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


def pretty(value: Any, page: ColourBudget | None = None, mask: SecretMask | None = None) -> Markup:
    """Return a value as indented JSON, and text that is not JSON unchanged; cut at MAX_BLOCK."""
    # Longer JSON is not decoded: the layout of nested lists is many times longer than their text.
    value = decoded(value) if not isinstance(value, str) or len(value) <= MAX_RENDERED else value
    text = cut(value) if isinstance(value, str) else laid_out(value)
    text = text if mask is None else mask.hide(text)
    return Markup("{}").format(text) if isinstance(value, str) else coloured(text, "json", page)


def _shown(
    message: Message,
    body: Mapping[str, Any],
    parts: Sequence[Part],
    pictures: tuple[Picture, ...],
    calls: tuple[ToolCall, ...],
    limits: _Limits,
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
        words=_words(body, parts, limits),
        thoughts=tuple(limits.markdown(text) for text in _thoughts(parts) if text.strip()),
        pictures=pictures,
        calls=calls,
        model=model_of(body),
        seconds=seconds_of(body),
        usage=usage_of(body),
        interrupted=interruption(body),
        origin=channel if isinstance(channel, str) else "",
    )


def _words(body: Mapping[str, Any], parts: Sequence[Part], limits: _Limits) -> Markup:
    """Return the text of a message, and results whose call is not on the page."""
    results = [_result_text(part) for part in parts if isinstance(part, ToolResult)]
    content = body.get("content")
    if not results and content is not None and not isinstance(content, str | list):
        return Markup("<pre>{}</pre>").format(limits.pretty(content))
    text = _text(body, parts)
    if isinstance(content, str) and interruption(body):
        # The page shows the interruption and its reason itself.
        text = text.removesuffix(_INTERRUPTED).rstrip()
    shown = [_blocks(result_blocks(one, limits.diffs), "Result", limits) for one in results]
    return Markup().join([*shown, limits.markdown(text)] if text or not shown else shown)


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
        elif isinstance(part, ToolResult) and isinstance(part.content, Mapping | list):
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
                # Calls with other ids still wait: their results may follow the next calls.
                for known in {None, *(call.id for call in calls)}:
                    waiting.pop(known, None)
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
    bodies: Mapping[int, Mapping[str, Any]],
    limits: _Limits,
) -> Iterator[ToolCall]:
    for place, call in enumerate(_calls_in(parts)):
        answer = answers.get((seq, place))
        result = None if answer is None else _result_text(answer.result)
        told = {} if answer is None else bodies[answer.message.seq]
        elsewhere = answer is not None and answer.message.seq != seq
        failed = answer is not None and (has_failed(told) or answer.result.is_error)
        yield ToolCall(
            name=call.name,
            line=limits.mask.cover(summary_of(call.arguments)),
            arguments=_blocks(argument_blocks(call.arguments, limits.diffs), "Arguments", limits),
            result=None
            if result is None
            else _blocks(result_blocks(result, limits.diffs), "Result", limits),
            pictures=tuple(_pictures([answer.result])) if answer and elsewhere else (),
            seconds=None if answer is None else seconds_of(told),
            failed=failed,
            error=limits.mask.cover(error_line(result)) if failed and result else "",
        )


def _blocks(blocks: Sequence[ToolBlock], label: str, limits: _Limits) -> Markup:
    return blocks_html(blocks, label, limits.colours, limits.mask, copy=limits.on_page)


def _result_text(result: ToolResult) -> str:
    is_part = isinstance(result.content, Mapping) and type_of(result.content)
    return text_of([result.content] if is_part else result.content)
