"""Messages as lines: plain text for pipes, and rendered for a terminal."""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import click

from stenolog.catalog.message_metadata import (
    FIELD,
    PROGRAM_FIELDS,
    has_failed,
    interruption,
    model_label,
    model_of,
    seconds_of,
)
from stenolog.cli.output import (
    format_local_time,
    format_time,
    one_line,
    printable,
    render_lines,
    terminal_console,
)
from stenolog.messages import (
    UNNAMED,
    FilePart,
    ImagePart,
    Part,
    TextPart,
    ThinkingPart,
    ToolCall,
    ToolResult,
    UnknownPart,
    read_content,
    read_message,
    read_part,
    unread_fields,
)
from stenolog.records import Message
from stenolog.transfer.export.tool_views import (
    ToolBlock,
    argument_blocks,
    result_blocks,
    summary_of,
)

if TYPE_CHECKING:
    from rich.text import Text

_DETAIL_STYLE: Final = "not bold not reverse dim default"
_INTERRUPTED: Final = "[interrupted]"
"""Text at the end of an interrupted answer, which tells the model about the interruption."""
_MAX_VALUE_LENGTH: Final = 400
"""Maximum number of characters shown of a field other than the content."""
_COLOURS: Final = {"user": "cyan", "assistant": "green", "tool": "yellow"}
_MAX_TOOL_LINES: Final = 12
"""Maximum number of lines shown of each block of a tool call or result."""
_STYLES: Final = {"added": "green", "removed": "red", "same": "dim", "head": "dim cyan"}
_TICKS: Final = {"done": "☑", "active": "◐", "open": "☐"}
_TICK_STYLES: Final = {"done": "dim", "active": "bold", "open": ""}


# --- plain text ------------------------------------------------------------------------------


def print_message(message: Message) -> None:
    """Print a message for reading, without the fields that stenolog or other programs added."""
    fields = message.to_dict()
    cause = interruption(fields)
    for name in fields.keys() & {FIELD, *PROGRAM_FIELDS}:
        del fields[name]
    click.secho(_message_header(message, fields.pop("role", "message")), bold=True, nl=False)
    click.secho(f" · {_time_and_visibility(message, format_time(message.at))}", dim=True, nl=True)
    for text in _paragraphs(fields.pop("content", None)):
        click.echo(printable(_mark_interrupted(text, cause) if cause else text))
    for name, value in fields.items():
        click.echo(printable(f"{name}: {_as_json(value)}"))
    click.echo()


def _message_header(message: Message, role: Any) -> str:
    return printable(f"[{message.seq}] {role if isinstance(role, str) else json.dumps(role)}")


def _time_and_visibility(message: Message, time: str) -> str:
    return f"{time}{' · hidden' if message.hidden else ''}"


def _mark_interrupted(text: str, cause: str) -> str:
    if not text.endswith(_INTERRUPTED):
        return text
    reason = "" if cause == "stopped" else f": {cause}"
    return f"{text.removesuffix(_INTERRUPTED)}(interrupted{reason})"


def _paragraphs(content: Any) -> Iterator[str]:
    """Yield the content in paragraphs: text unchanged, other parts as JSON."""
    if content is None:
        return
    for value in content if isinstance(content, list) else [content]:
        yield _part_text(read_part(value), value)


def _part_text(part: Part, value: Any) -> str:
    """Return the text of a part, the size of an embedded image, or the part as JSON."""
    if isinstance(part, ImagePart) and part.url.startswith("data:"):
        kind, _, data = part.url.removeprefix("data:").partition(",")
        return f"[{kind.partition(';')[0] or 'image'}, about {len(data) * 3 // 4:,} bytes]"
    text = part.text if isinstance(part, TextPart | UnknownPart) else None
    return _as_json(value) if text is None else text


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# --- in a terminal ---------------------------------------------------------------------------


def _is_in_head(block: ToolBlock) -> bool:
    """Return whether the line of the tool call already shows the content of this block."""
    is_short = block.kind == "shell" and "\n" not in block.text and len(block.text) < 120
    return block.kind == "json" or is_short


class MessageRenderer:
    """Renderer of messages for a terminal: Markdown laid out, tool calls shortened."""

    def __init__(self, *, color: bool, tools: bool = False) -> None:
        """Create a renderer. `tools` shows tool calls and results completely."""
        self._console = terminal_console(styled=color)
        self._verbose = tools
        self._tool_names: dict[str, str] = {}
        """Name of the tool of each call, by the id of the call."""

    def conversation_lines(
        self, summary: str, messages: Iterable[Message], at: int | None
    ) -> Iterator[str]:
        """Yield the lines of summary and messages; the message `at` is highlighted."""
        if summary:
            yield from self._render_styled("Summary", "bold")
            yield from self._markdown_lines(summary)
            yield ""
        for message in messages:
            yield from self.message_lines(message, is_marked=message.seq == at)

    def message_lines(self, message: Message, *, is_marked: bool = False) -> Iterator[str]:
        """Yield the lines of one message, and an empty line."""
        fields = message.to_dict()
        cause = interruption(fields)
        yield from self._message_header_lines(message, fields, is_marked=is_marked)
        for part in read_message(fields):
            yield from self._part_lines(part, fields, cause)
        for name, value in unread_fields(fields).items():
            is_in_head = name == "name" and fields.get("role") == "tool"
            if name != FIELD and name not in PROGRAM_FIELDS and not is_in_head:
                yield from self._field_lines(name, value)
        yield ""

    def _part_lines(self, part: Part, fields: Mapping[str, Any], cause: str) -> Iterator[str]:
        """Yield the lines of a part; parts without readable form are shown as JSON."""
        match part:
            case TextPart():
                yield from self._content_lines(
                    _mark_interrupted(part.text, cause) if cause else part.text
                )
            case ThinkingPart() if not part.in_content and not isinstance(part.value, str):
                yield from self._field_lines(part.field, part.value)
            case ThinkingPart() if part.text.strip() or not part.in_content:
                if text := part.text.strip():
                    yield from self._render_styled(text, "dim italic")
            case ToolCall():
                if part.id is not None and part.name != UNNAMED:
                    self._tool_names[part.id] = part.name
                yield from self._call_lines(part)
            case ToolResult():
                yield from self._result_lines(part, failed=part.is_error or has_failed(fields))
            case FilePart() if part.value is fields.get("audio"):
                if isinstance(part.content, str):
                    yield from self._content_lines(part.content)
                yield from self._field_lines("audio", part.value)
            case UnknownPart() if part.field in ("tool_calls", "function_call"):
                yield from self._render_styled(f"→ {self._shorten(_as_json(part.value))}", "yellow")
            case UnknownPart() if part.field != "content":
                yield from self._field_lines(part.field, part.value)
            case UnknownPart() if part.text is not None:
                yield from self._content_lines(part.text)
            case _ if part.value is not fields:
                text = _part_text(part, part.value)
                yield from self._render_styled(self._shorten(text), "dim")

    def _field_lines(self, name: str, value: Any) -> list[str]:
        return self._render_styled(f"{name}: {self._shorten(_as_json(value))}", "dim")

    def _message_header_lines(
        self, message: Message, fields: Mapping[str, Any], *, is_marked: bool
    ) -> list[str]:
        from rich.text import Text

        role = fields.get("role", "message")
        colour = _COLOURS.get(role, "") if isinstance(role, str) else ""
        tool_name = ""
        if role == "tool":
            name = fields.get("name") or self._tool_names.get(str(fields.get("tool_call_id")))
            tool_name = f" {one_line(printable(name))}" if isinstance(name, str) else ""
        head = Text(
            f"{_message_header(message, role)}{tool_name}",
            style=f"bold {colour}{' reverse' if is_marked else ''}".strip(),
        )
        details = [_time_and_visibility(message, format_local_time(message.at))]
        if model := model_of(fields):
            details.append(one_line(model_label(model)))
        if (seconds := seconds_of(fields)) is not None:
            details.append(f"{seconds:.1f} s")
        head.append("".join(f" · {detail}" for detail in details), style=_DETAIL_STYLE)
        if has_failed(fields):
            head.append(" · failed", style="not bold not reverse red")
        return self._render_text(head)

    def _content_lines(self, text: str) -> list[str]:
        # Parts that are not text, such as images, are JSON and may be long.
        if text[:1] == "{" and text[-1:] == "}":
            return self._render_styled(self._shorten(text), "dim")
        return self._markdown_lines(text)

    def _markdown_lines(self, text: str) -> list[str]:
        from stenolog.cli.terminal_markdown import MarkdownStream, render_block
        from stenolog.transfer.export.code_blocks import ColourBudget

        stream = MarkdownStream()
        blocks = [*stream.add(text), *stream.end()]
        budget = ColourBudget()
        rendered = (render_block(block, self._console, budget=budget) for block in blocks)
        return list(chain.from_iterable(rendered))

    def _call_lines(self, call: ToolCall) -> Iterator[str]:
        """Yield a tool call: one line, and below it diffs, commands, files and checklists."""
        # This import is slow and only needed for tool calls.
        from stenolog.cli.chat_screen import short_call

        if call.name == UNNAMED:
            yield from self._render_styled(f"→ {self._shorten(_as_json(call.value))}", "yellow")
            return
        blocks = argument_blocks(call.arguments)
        if _has_details(blocks):
            head = " ".join(filter(None, (call.name, summary_of(call.arguments))))
            yield from self._render_styled(f"→ {head}", "yellow")
            for block in blocks:
                if self._verbose or not _is_in_head(block):
                    yield from self._block_lines(block)
            return
        arguments = call.arguments
        if not isinstance(arguments, str):
            arguments = "" if arguments is None else _as_json(arguments)
        text = f"{call.name}({arguments})" if self._verbose else short_call(call.name, arguments)
        yield from self._render_styled(f"→ {text}", "yellow")

    def _result_lines(self, result: ToolResult, *, failed: bool) -> Iterator[str]:
        """Yield the lines of a tool result. Long text is cut; other parts are shown as JSON."""
        parts = list(read_content(result.content))
        if not parts and result.in_content:
            yield from self._output_lines(_as_json(result.value), failed=failed)
        for part in parts:
            if isinstance(part, ToolResult):
                yield from self._result_lines(part, failed=failed or part.is_error)
            else:
                yield from self._output_lines(_part_text(part, part.value), failed=failed)

    def _output_lines(self, text: str, *, failed: bool) -> Iterator[str]:
        blocks = result_blocks(text)
        if not _has_details(blocks):
            # Show the output as the tool printed it.
            blocks = (ToolBlock(kind="text", text=text),)
        for block in blocks:
            yield from self._block_lines(block, "red" if failed else "dim")

    def _block_lines(self, block: ToolBlock, style: str = "dim") -> Iterator[str]:
        lines = list(_all_block_lines(block, style))
        count = len(lines)
        shown_count = count if self._verbose or count <= _MAX_TOOL_LINES else _MAX_TOOL_LINES - 1
        for text, line_style in lines[:shown_count]:
            yield from self._render_styled(self._shorten(text), line_style)
        if omitted := count - shown_count + block.omitted:
            hint = "" if self._verbose else "; use --tools to show them"
            yield from self._render_styled(f"… {omitted:,} more lines{hint}", "dim italic")

    def _shorten(self, text: str) -> str:
        is_complete = self._verbose or len(text) <= _MAX_VALUE_LENGTH
        return text if is_complete else f"{text[: _MAX_VALUE_LENGTH - 1]}…"

    def _render_styled(self, text: str, style: str) -> list[str]:
        from rich.text import Text

        return self._render_text(Text(printable(text), style=style))  # guard: tool-output-printable

    def _render_text(self, text: "Text") -> list[str]:
        return render_lines(self._console, text, overflow="fold")


# --- tool calls and results ------------------------------------------------------------------


def _has_details(blocks: Iterable[ToolBlock]) -> bool:
    """Return whether a block is more than plain text or JSON, for example a diff."""
    return any(block.kind not in ("json", "text") for block in blocks)


def _all_block_lines(block: ToolBlock, style: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of a block with their rich styles. `style` is the style of plain text."""
    match block.kind:
        case "diff":
            for line in block.lines:
                yield f"{line.sign}{line.text}", _STYLES[line.kind]
        case "checklist":
            for item in block.items:
                text = " ".join(item.text.split())
                yield f"{_TICKS[item.state]} {text}", _TICK_STYLES[item.state]
        case "shell":
            if block.label:
                yield printable(block.label), style
            for number, text in enumerate(printable(block.text).rstrip("\n").split("\n")):
                yield f"{'  ' if number else '$ '}{text}", "bold"
        case "code" | "text" | "json":
            for text in printable(block.text).rstrip("\n").split("\n"):
                yield text, style
