"""Convert messages to the values that templates show: text, thinking, pictures, tool calls."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from markupsafe import Markup
from msgspec import Struct

from stenolog.catalog.message_metadata import (
    FIELD,
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
    coloured_code,
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
    ToolCall,
    ToolResult,
    UnknownPart,
    as_json,
    has_text,
    read_content,
    read_message,
    text_of,
    type_of,
)
from stenolog.records import Message
from stenolog.transfer.export.code_blocks import ColourBudget
from stenolog.transfer.export.tool_views import (
    DiffBudget,
    ToolBlock,
    argument_blocks,
    cut_text,
    decode_json,
    error_line,
    format_json,
    path_read,
    result_blocks,
    summary_of,
)
from stenolog.transfer.transcripts.transcript import KIND

_ROLES: Final = {"user", "assistant", "tool", "system", "developer"}
_INTERRUPTED_MARK: Final = "[interrupted]"
"""Text that marks an interrupted answer for the model."""
_MAX_LINE_LENGTH: Final = 120
_CODE_BLOCK: Final = re.compile(r"<pre>(.*?)</pre>", re.DOTALL)
_CODE_WITH_BUTTON: Final = (
    r'<div class="copyable"><button type="button" class="copy-code" data-copy="code">copy</button>'
    r"<pre>\1</pre></div>"
)
_MAX_COLOURED_IN_DOCUMENT: Final = 1_000_000
"""Maximum number of characters of code that are coloured in one exported document."""


class Picture(Struct, frozen=True, kw_only=True):
    """A picture. Embedded pictures are shown, others only linked."""

    address: str
    is_embedded: bool
    is_link: bool


class ToolCallView(Struct, frozen=True, kw_only=True):
    """A tool call, with its result if it has one."""

    name: str
    line: str
    """The most informative argument, in one line."""
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
    injected: bool = False
    """Whether a program, not the user, wrote this user message."""
    html: Markup
    thoughts: tuple[Markup, ...] = ()
    pictures: tuple[Picture, ...] = ()
    calls: tuple[ToolCallView, ...] = ()
    model: str | None = None
    seconds: float | None = None
    usage: Mapping[str, int] | None = None
    interrupted: str = ""
    origin: str = ""


class _ResultOfCall(Struct, frozen=True):
    result: ToolResult
    message: Message


BodyOf = Callable[[Message], Mapping[str, Any]]
"""Function that returns the body of a message for display."""


class _Limits:
    """Remaining budgets of one page or exported document: coloured code, diffs and secrets."""

    def __init__(self, colours: int, *, on_page: bool) -> None:
        self.on_page = on_page
        self.colours = ColourBudget(colours)
        self.diffs = DiffBudget()
        self.mask = SecretMask(enabled=on_page)

    def markdown(self, text: str) -> Markup:
        html = self.mask.buttons(to_html(self.hide(text), self.colours))
        return Markup(_CODE_BLOCK.sub(_CODE_WITH_BUTTON, str(html))) if self.on_page else html

    def pretty(self, value: Any) -> Markup:
        return self.mask.buttons(pretty_json(value, self.colours, self.mask))

    def hide(self, text: str) -> str:
        # Text after the limit is not shown, so its secrets need not be hidden.
        return self.mask.hide(text[:MAX_RENDERED]) + text[MAX_RENDERED:]


def message_views(messages: Sequence[Message], later: Sequence[Message] = ()) -> list[MessageView]:
    """Return the messages for the page. A tool result is shown at its call if possible.

    `later` are the messages after `messages`, which may contain the results of the last calls.
    """
    limits = _Limits(MAX_COLOURED_ON_PAGE, on_page=True)
    # Colour the newest messages first, because a page opens at its end.
    return list(_make_views(messages, later, Message.to_dict, limits, reversed(messages)))[::-1]


def document_views(messages: Sequence[Message], body_of: BodyOf) -> Iterator[MessageView]:
    """Yield all messages of a session for a document; secrets are not masked."""
    return _make_views(
        messages, (), body_of, _Limits(_MAX_COLOURED_IN_DOCUMENT, on_page=False), messages
    )


def _make_views(
    messages: Sequence[Message],
    later: Sequence[Message],
    body_of: BodyOf,
    limits: _Limits,
    order: Iterable[Message],
) -> Iterator[MessageView]:
    bodies = {message.seq: body_of(message) for message in messages}
    parts = {seq: list(read_message(body)) for seq, body in bodies.items()}
    all_bodies = {**bodies, **{message.seq: body_of(message) for message in later}}
    later_parts = {message.seq: list(read_message(all_bodies[message.seq])) for message in later}
    results = _results_by_call([*messages, *later], bodies, {**later_parts, **parts})
    placed_ids = {id(answer.result) for answer in results.values()}
    for message in order:
        message_parts = parts[message.seq]
        other_parts = [part for part in message_parts if id(part) not in placed_ids]
        if message_parts and not other_parts:
            continue
        calls = tuple(_call_views(message.seq, message_parts, results, all_bodies, limits))
        pictures = tuple(_find_pictures(message_parts))
        yield _message_view(message, bodies[message.seq], other_parts, pictures, calls, limits)


def is_prompt(body: Mapping[str, Any]) -> bool:
    """Return whether the user wrote this message: it is neither a tool result nor injected."""
    return has_text(body) and not is_injected(body)


def is_injected(body: Mapping[str, Any]) -> bool:
    """Return whether a program wrote this user message: a reminder, a command, or a summary."""
    metadata = body.get(FIELD)
    return isinstance(metadata, Mapping) and isinstance(metadata.get(KIND), str)


def prompt_line(body: Mapping[str, Any]) -> str:
    """Return the user's prompt in one line, without pictures."""
    content = body.get("content")
    if content is not None and not isinstance(content, str | list):
        return one_line(as_json(content))
    return one_line(_message_text(body, read_message(body)))


def one_line(text: str) -> str:
    """Return the start of a text in one line."""
    line = " ".join(text[: 4 * _MAX_LINE_LENGTH].split())
    return line if len(line) <= _MAX_LINE_LENGTH else line[: _MAX_LINE_LENGTH - 1].rstrip() + "…"


def pretty_json(
    value: Any, page: ColourBudget | None = None, mask: SecretMask | None = None
) -> Markup:
    """Return a value as indented JSON, cut at MAX_BLOCK. Text that is not JSON is not changed."""
    # Longer JSON is not decoded, because indented JSON may be many times longer than compact JSON.
    value = (
        decode_json(value) if not isinstance(value, str) or len(value) <= MAX_RENDERED else value
    )
    text = cut_text(value) if isinstance(value, str) else format_json(value)
    text = text if mask is None else mask.hide(text)
    return (
        Markup("{}").format(text) if isinstance(value, str) else coloured_code(text, "json", page)
    )


def _message_view(
    message: Message,
    body: Mapping[str, Any],
    parts: Sequence[Part],
    pictures: tuple[Picture, ...],
    calls: tuple[ToolCallView, ...],
    limits: _Limits,
) -> MessageView:
    role = body.get("role")
    role_name = role if isinstance(role, str) else "?"
    origin = origin_of(body)
    channel = None if origin is None else origin.get("channel")
    return MessageView(
        seq=message.seq,
        at=message.at,
        hidden=message.hidden,
        role=role_name,
        kind=role_name if role_name in _ROLES else "other",
        injected=role_name == "user" and is_injected(body),
        html=_text_html(body, parts, limits),
        thoughts=tuple(limits.markdown(text) for text in _thinking_texts(parts) if text.strip()),
        pictures=pictures,
        calls=calls,
        model=model_of(body),
        seconds=seconds_of(body),
        usage=usage_of(body),
        interrupted=interruption(body),
        origin=channel if isinstance(channel, str) else "",
    )


def _text_html(body: Mapping[str, Any], parts: Sequence[Part], limits: _Limits) -> Markup:
    """Return the text of a message, and the tool results whose call is not on the page."""
    results = [_result_text(part) for part in parts if isinstance(part, ToolResult)]
    content = body.get("content")
    if not results and content is not None and not isinstance(content, str | list):
        return Markup("<pre>{}</pre>").format(limits.pretty(content))
    text = _message_text(body, parts)
    if isinstance(content, str) and interruption(body):
        # The page shows the interruption and its reason itself.
        text = text.removesuffix(_INTERRUPTED_MARK).rstrip()
    result_html = [
        _blocks(result_blocks(result, limits.diffs), "Result", limits) for result in results
    ]
    return Markup().join(
        [*result_html, limits.markdown(text)] if text or not result_html else result_html
    )


def _message_text(body: Mapping[str, Any], parts: Iterable[Part]) -> str:
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


def _thinking_texts(parts: Iterable[Part]) -> Iterator[str]:
    thoughts = [part for part in parts if isinstance(part, ThinkingPart)]
    for part in thoughts:
        if part.in_content:
            yield part.text or f"[{type_of(part.value)}]"
    # Some providers send the same text in two fields. Show only the first field.
    yield from [part.text for part in thoughts if not part.in_content and part.text][:1]


def _find_pictures(parts: Iterable[Part]) -> Iterator[Picture]:
    for part in parts:
        if isinstance(part, ImagePart):
            url = part.url
            yield Picture(address=url, is_embedded=is_picture(url), is_link=is_address(url))
        elif isinstance(part, ToolResult) and isinstance(part.content, Mapping | list):
            yield from _find_pictures(read_content(part.content))


# --- calls and results -----------------------------------------------------------------------


def _results_by_call(
    messages: Iterable[Message],
    bodies: Mapping[int, Mapping[str, Any]],
    parts: Mapping[int, Sequence[Part]],
) -> dict[tuple[int, int], _ResultOfCall]:
    """Return the result of each call, by the seq of the calling message and the call's index."""
    results: dict[tuple[int, int], _ResultOfCall] = {}
    open_calls: dict[str | None, list[tuple[int, int]]] = {}
    for message in messages:
        message_parts = parts[message.seq]
        if message.seq in bodies and (calls := _calls_in(message_parts)):
            # Items of the Responses API have no role, and one answer has several items.
            if "role" in bodies[message.seq]:
                # Calls with other ids keep waiting, because their results may follow later.
                for call_id in {None, *(call.id for call in calls)}:
                    open_calls.pop(call_id, None)
            for index, call in enumerate(calls):
                open_calls.setdefault(call.id, []).append((message.seq, index))
        for part in message_parts:
            if isinstance(part, ToolResult) and (positions := open_calls.get(part.id)):
                results[positions.pop(0)] = _ResultOfCall(part, message)
    return results


def _calls_in(parts: Iterable[Part]) -> list[ToolCall]:
    """Return each call of a message once, even if it is in both `tool_calls` and the content."""
    calls = [part for part in parts if isinstance(part, ToolCall)]
    listed_ids = {call.id for call in calls if not call.in_content}
    return [call for call in calls if not call.in_content or call.id not in listed_ids]


def _call_views(
    seq: int,
    parts: Iterable[Part],
    results: Mapping[tuple[int, int], _ResultOfCall],
    bodies: Mapping[int, Mapping[str, Any]],
    limits: _Limits,
) -> Iterator[ToolCallView]:
    for index, call in enumerate(_calls_in(parts)):
        answer = results.get((seq, index))
        result = None if answer is None else _result_text(answer.result)
        result_body = {} if answer is None else bodies[answer.message.seq]
        is_separate = answer is not None and answer.message.seq != seq
        failed = answer is not None and (has_failed(result_body) or answer.result.is_error)
        path = "" if failed else path_read(call.arguments)
        yield ToolCallView(
            name=call.name,
            line=limits.mask.cover(summary_of(call.arguments)),
            arguments=_blocks(argument_blocks(call.arguments, limits.diffs), "Arguments", limits),
            result=None
            if result is None
            else _blocks(result_blocks(result, limits.diffs, path=path), "Result", limits),
            pictures=tuple(_find_pictures([answer.result])) if answer and is_separate else (),
            seconds=None if answer is None else seconds_of(result_body),
            failed=failed,
            error=limits.mask.cover(error_line(result)) if failed and result else "",
        )


def _blocks(blocks: Sequence[ToolBlock], label: str, limits: _Limits) -> Markup:
    return blocks_html(blocks, label, limits.colours, limits.mask, copy=limits.on_page)


def _result_text(result: ToolResult) -> str:
    is_part = isinstance(result.content, Mapping) and type_of(result.content)
    return text_of([result.content] if is_part else result.content)
