"""`steno show` and `steno tail`: print the messages of a session."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, Final

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
    EXIT_CTRL_C,
    attributes_of,
    format_local_time,
    format_time,
    json_text,
    one_line,
    print_notice,
    printable,
    render_lines,
    shorten,
    styled_lines,
    terminal_console,
    uses_color,
    wants_json,
)
from stenolog.cli.workspace import (
    Location,
    damage_lines,
    find_session,
    find_session_or_none,
    find_session_to_read,
    json_option,
    limit_option,
    location_options,
    messages_with_verb,
    session_title,
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
from stenolog.records import Message, SessionInfo
from stenolog.sessions.fork_source import find_fork_source
from stenolog.stores.base import Store
from stenolog.transfer.export.tool_views import (
    ToolBlock,
    argument_blocks,
    result_blocks,
    summary_of,
)
from stenolog.transfer.transcripts.program_messages import (
    is_in_place,
    is_shown,
    kind_of,
    program_line,
)

_NEIGHBOUR_COUNT: Final = 5
"""Number of messages shown before and after the requested message."""


@click.command("show")
@click.argument("key")
@click.option(
    "--all/--visible-only",
    "include_hidden",
    default=None,
    help="Include hidden and archived messages, or not.  [default: only imported messages of "
    "another program]",
)
@click.option(
    "--tools",
    is_flag=True,
    help="Do not shorten tool calls and results, and messages of other programs.",
)
@json_option()
@location_options
def show_command(
    key: str,
    include_hidden: bool | None,
    tools: bool,
    location: Location,
) -> None:
    """Show the messages of the session KEY.

    KEY:SEQ shows one message and its neighbours, including hidden messages. In a terminal,
    `steno search` prints the KEY:SEQ of each result.

    In a terminal, the start or end of KEY, or the start of a part after a colon, is enough if only
    one session matches.

    A message that another program added, such as a command or a reminder, is shown as one line.

    In a terminal, Markdown is formatted, tool results are shortened, and long output is paged
    ($PAGER, otherwise less). Without a terminal the output is plain text. Control characters are
    removed; `steno export` prints messages exactly as stored.

    Example: steno show telegram:123 --all

    Exit codes: 0 done, 1 there is no such session or message, 2 wrong usage.
    """
    with location.open() as store:
        info, seq = _resolve_reference(store, key)
        summary = info.summary
        if seq is not None:
            messages, summary = _read_message_and_neighbours(store, info, seq), ""
        elif include_hidden is None and is_in_place(info):
            messages = list(filter(is_shown, store.get_history(info.key, full=True)))
        else:
            messages = store.get_history(info.key, full=bool(include_hidden))
        hidden_count = 0 if seq is not None or include_hidden else info.count - len(messages)
        if summary and any(kind_of(message.to_dict()) == "summary" for message in messages):
            summary = ""  # it is one of the messages
        fork_source = None if wants_json() or seq is not None else find_fork_source(store, info)
        fork_text = "" if fork_source is None else one_line(str(fork_source))
        if wants_json():
            click.echo(json_text(_session_fields(store, info, messages)))
        elif sys.stdout.isatty():
            renderer = MessageRenderer(color=uses_color(), complete_tools=tools)
            earlier_messages = [message for message in messages if message.seq < (seq or 0)]
            skipped_lines = len(list(renderer.conversation_lines("", earlier_messages, None)))
            lines = renderer.conversation_lines(summary, messages, seq)
            lines = chain([fork_text, ""] if fork_text else [], lines)
            _print_lines(lines, skipped_lines=skipped_lines)
        else:
            if fork_text:
                click.echo(f"{fork_text}\n")
            if summary:
                click.secho("Summary", bold=True)
                click.echo(f"{printable(summary)}\n")
            for message in messages:
                print_message(message, complete=tools or message.seq == seq)
        if hidden_count and not include_hidden:
            hidden_text = messages_with_verb(hidden_count)
            print_notice(f"{hidden_text} hidden. Use --all to show all messages.")
        # Read the info again: reading all messages may have discovered damage.
        print_notice(*damage_lines(find_session(store, info.key), location.workspace))


# --- selection -------------------------------------------------------------------------------


def _resolve_reference(store: Store, name: str) -> tuple[SessionInfo, int | None]:
    """Return the session, and the seq of the requested message or None.

    `name` is read as KEY:SEQ only if no session has the key `name`.
    """
    key, _, seq_text = name.rpartition(":")
    if key and seq_text.isascii() and seq_text.isdecimal():
        info = None if find_session_or_none(store, name) else find_session_or_none(store, key)
        if info is not None:
            return info, int(seq_text)
    return find_session_to_read(store, name), None


def _read_message_and_neighbours(store: Store, info: SessionInfo, seq: int) -> list[Message]:
    """Return a message and its neighbours. Raises ClickException if the message does not exist."""
    messages = store.get_history(info.key, after=max(0, seq - 1 - 4 * _NEIGHBOUR_COUNT), full=True)
    for index, message in enumerate(messages):
        if message.seq == seq:
            return messages[max(0, index - _NEIGHBOUR_COUNT) : index + _NEIGHBOUR_COUNT + 1]
    raise click.ClickException(
        f"There is no message {seq} in {one_line(info.key)}; the last is {info.last_seq}."
    )


def _session_fields(store: Store, info: SessionInfo, messages: Iterable[Message]) -> dict[str, Any]:
    return {
        **attributes_of(info, "key", "uid"),
        "title": session_title(info, store.get_history(info.key, full=True)),
        **attributes_of(info, "created", "updated", "summary", "visible", "count"),
        "messages": [message_fields(message) for message in messages],
    }


def message_fields(message: Message) -> dict[str, Any]:
    """Return a message as a JSON object: seq, time, visibility, and the stored message."""
    return {**attributes_of(message, "seq", "at", "hidden"), "message": message.to_dict()}


def _print_lines(lines: Iterator[str], *, skipped_lines: int) -> None:
    """Print lines, through a pager if they do not fit on the screen.

    If the pager is `less`, it starts after `skipped_lines` lines.
    """
    screen_lines = max(1, shutil.get_terminal_size().lines - 1)
    first_lines = list(islice(lines, screen_lines + 1))
    all_lines = chain(first_lines, lines)
    if len(first_lines) <= screen_lines:
        for line in all_lines:
            click.echo(line)
        return
    if skipped_lines:
        os.environ["LESS"] = f"{os.environ.get('LESS', '-R')} +{skipped_lines + 1}g"
    click.echo_via_pager(f"{line}\n" for line in all_lines)


# --- tail -----------------------------------------------------------------------------------------


@click.command("tail")
@click.argument("key")
@click.option("-f", "--follow", is_flag=True, help="Follow new messages until Ctrl-C.")
@limit_option(
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="Maximum number of messages to show first.",
)
@json_option("one JSON object per message")
@location_options
def tail_command(key: str, follow: bool, limit: int, location: Location) -> int:
    """Show the last messages of the session KEY, and new messages with -f.

    In a terminal, the start or end of KEY, or the start of a part after a colon, is enough if only
    one session matches.

    With -f, each message is shown as soon as any process stores it, until you press Ctrl-C or the
    session is deleted.

    Exit codes: 0 done, 1 there is no such session, or it was deleted, 2 wrong usage, 130 stopped
    with Ctrl-C.
    """
    show_message = _message_printer()
    try:
        with location.open() as store:
            info = find_session_to_read(store, key)
            messages = store.get_history(info.key, last=limit)
            # Reading the messages may have discovered damage.
            damage = list(damage_lines(find_session(store, info.key), location.workspace))
            for message in messages:
                show_message(message)
            print_notice(*damage)
            if not follow:
                return 0
            if sys.stderr.isatty():
                print_notice(f"Following {one_line(info.key)}. Press Ctrl-C to stop.")
            # Messages that were stored after `info` was read are among `messages`.
            last_seq = max([info.last_seq, *(message.seq for message in messages)])
            for message in store.follow(info.key, after=last_seq, uid=info.uid):
                show_message(message)
    except KeyboardInterrupt:
        return EXIT_CTRL_C
    return 0


def _message_printer() -> Callable[[Message], None]:
    """Return a function that prints one message to stdout."""
    if wants_json():
        return lambda message: click.echo(json_text(message_fields(message)))
    if not sys.stdout.isatty():
        return print_message
    renderer = MessageRenderer(color=uses_color())
    return lambda message: click.echo("\n".join(renderer.message_lines(message)))


# --- messages as plain text -----------------------------------------------------------------------


_INTERRUPTED_SUFFIX: Final = "[interrupted]"
"""Text at the end of an interrupted answer, which tells the model about the interruption."""


def print_message(message: Message, *, complete: bool = False) -> None:
    """Print a message for reading, without the fields that stenolog or other programs added.

    A message of another program is printed as one line, unless `complete`.
    """
    fields = message.to_dict()
    if kind_of(fields) and not complete:
        if line := _program_line(message, fields):
            time = _time_and_visibility(message, format_time(message.at))
            click.secho(f"{line} · {time}\n", dim=True)
        return
    cause = interruption(fields)
    for name in fields.keys() & {FIELD, *PROGRAM_FIELDS}:
        del fields[name]
    click.secho(_message_header(message, fields.pop("role", "message")), bold=True, nl=False)
    click.secho(f" · {_time_and_visibility(message, format_time(message.at))}", dim=True, nl=True)
    for text in _part_texts(fields.pop("content", None)):
        click.echo(printable(_format_interruption(text, cause)))
    for name, value in fields.items():
        click.echo(printable(f"{name}: {_as_json(value)}"))
    click.echo()


def _program_line(message: Message, fields: Mapping[str, Any]) -> str:
    """Return the line for a message of another program; empty if it only marks a place."""
    line = shorten(program_line(fields), _MAX_VALUE_LENGTH)
    return printable(f"[{message.seq}] {line}") if line else ""


def _message_header(message: Message, role: Any) -> str:
    return printable(f"[{message.seq}] {role if isinstance(role, str) else json.dumps(role)}")


def _time_and_visibility(message: Message, time: str) -> str:
    return f"{time}{' · hidden' if message.hidden else ''}"


def _format_interruption(text: str, cause: str) -> str:
    if not cause or not text.endswith(_INTERRUPTED_SUFFIX):
        return text
    reason = "" if cause == "stopped" else f": {cause}"
    return f"{text.removesuffix(_INTERRUPTED_SUFFIX)}(interrupted{reason})"


def _part_texts(content: Any) -> Iterator[str]:
    """Yield the text of each part of the content; see `_part_text`."""
    if content is None:
        return
    for value in content if isinstance(content, list) else [content]:
        yield _part_text(read_part(value), value)


def _part_text(part: Part, value: Any) -> str:
    """Return the text of a message part, the size of an embedded image, or the part as JSON."""
    if isinstance(part, ImagePart) and part.url.startswith("data:"):
        kind, _, data = part.url.removeprefix("data:").partition(",")
        return f"[{kind.partition(';')[0] or 'image'}, about {len(data) * 3 // 4:,} bytes]"
    text = part.text if isinstance(part, TextPart | UnknownPart) else None
    return _as_json(value) if text is None else text


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# --- messages in a terminal -----------------------------------------------------------------------


_DETAIL_STYLE: Final = "not bold not reverse dim default"
_MAX_VALUE_LENGTH: Final = 400
"""Maximum number of characters shown of a field other than the content."""
_ROLE_COLOURS: Final = {"user": "cyan", "assistant": "green", "tool": "yellow"}
_MAX_TOOL_LINES: Final = 12
"""Maximum number of lines shown of each block of a tool call or result."""
_DIFF_STYLES: Final = {"added": "green", "removed": "red", "same": "dim", "head": "dim cyan"}
_CHECKBOXES: Final = {"done": "☑", "active": "◐", "open": "☐"}
_CHECKBOX_STYLES: Final = {"done": "dim", "active": "bold", "open": ""}


def _is_in_call_line(block: ToolBlock) -> bool:
    """Return whether the first line of a tool call already shows the content of this block."""
    is_short = block.kind == "shell" and "\n" not in block.text and len(block.text) < 120
    return block.kind == "json" or is_short


class MessageRenderer:
    """Renderer of messages for a terminal. Lays out Markdown and shortens tool calls."""

    def __init__(self, *, color: bool, complete_tools: bool = False) -> None:
        """Create a renderer. With `complete_tools`, tool calls and results are not shortened."""
        self._console = terminal_console(styled=color)
        self._verbose = complete_tools
        self._tool_names: dict[str, str] = {}
        """Tool names by the id of the tool call."""

    def conversation_lines(
        self, summary: str, messages: Iterable[Message], highlighted_seq: int | None
    ) -> Iterator[str]:
        """Yield the lines of the summary and of the messages."""
        if summary:
            yield from self._render_styled("Summary", "bold")
            yield from self._markdown_lines(summary)
            yield ""
        for message in messages:
            yield from self.message_lines(message, is_highlighted=message.seq == highlighted_seq)

    def message_lines(self, message: Message, *, is_highlighted: bool = False) -> Iterator[str]:
        """Yield the lines of one message, and an empty line."""
        fields = message.to_dict()
        if kind_of(fields) and not self._verbose and not is_highlighted:
            if line := _program_line(message, fields):
                time = _time_and_visibility(message, format_local_time(message.at))
                yield from self._render_styled(f"{line} · {time}", "dim")
                yield ""
            return
        cause = interruption(fields)
        yield from self._message_header_lines(message, fields, is_highlighted=is_highlighted)
        for part in read_message(fields):
            yield from self._part_lines(part, fields, cause)
        for name, value in unread_fields(fields).items():
            is_in_header = name == "name" and fields.get("role") == "tool"
            if name != FIELD and name not in PROGRAM_FIELDS and not is_in_header:
                yield from self._field_lines(name, value)
        yield ""

    def _part_lines(self, part: Part, fields: Mapping[str, Any], cause: str) -> Iterator[str]:
        """Yield the lines of a part of a message. A part that is not readable is shown as JSON."""
        match part:
            case TextPart():
                yield from self._content_lines(_format_interruption(part.text, cause))
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
        self, message: Message, fields: Mapping[str, Any], *, is_highlighted: bool
    ) -> list[str]:
        from rich.text import Text

        role = fields.get("role", "message")
        colour = _ROLE_COLOURS.get(role, "") if isinstance(role, str) else ""
        tool_name = ""
        if role == "tool":
            name = fields.get("name") or self._tool_names.get(str(fields.get("tool_call_id")))
            tool_name = f" {one_line(printable(name))}" if isinstance(name, str) else ""
        style = f"bold {colour}{' reverse' if is_highlighted else ''}".strip()
        header = Text(f"{_message_header(message, role)}{tool_name}", style=style)
        details = [_time_and_visibility(message, format_local_time(message.at))]
        if model := model_of(fields):
            details.append(one_line(model_label(model)))
        if (seconds := seconds_of(fields)) is not None:
            details.append(f"{seconds:.1f} s")
        header.append("".join(f" · {detail}" for detail in details), style=_DETAIL_STYLE)
        if has_failed(fields):
            header.append(" · failed", style="not bold not reverse red")
        return render_lines(self._console, header)

    def _content_lines(self, text: str) -> list[str]:
        # A JSON object is not Markdown, and it may be long.
        if text[:1] == "{" and text[-1:] == "}":
            return self._render_styled(self._shorten(text), "dim")
        return self._markdown_lines(text)

    def _markdown_lines(self, text: str) -> list[str]:
        from stenolog.cli.terminal_markdown import MarkdownStream, render_block
        from stenolog.transfer.export.code_blocks import ColourBudget

        stream = MarkdownStream()
        lines: list[str] = []
        colour_budget = ColourBudget()
        for block in (*stream.add(text), *stream.end()):
            lines += render_block(block, self._console, colour_budget=colour_budget)
        return lines

    def _call_lines(self, call: ToolCall) -> Iterator[str]:
        """Yield a tool call: one line, and below it diffs, commands, files and checklists."""
        # This import is slow and only needed for tool calls.
        from stenolog.cli.chat_screen import tool_call_text

        if call.name == UNNAMED:
            yield from self._render_styled(f"→ {self._shorten(_as_json(call.value))}", "yellow")
            return
        blocks = argument_blocks(call.arguments)
        if _has_formatted_block(blocks):
            header = " ".join(filter(None, (call.name, summary_of(call.arguments))))
            yield from self._render_styled(f"→ {header}", "yellow")
            for block in blocks:
                if self._verbose or not _is_in_call_line(block):
                    yield from self._block_lines(block)
            return
        arguments = call.arguments
        if not isinstance(arguments, str):
            arguments = "" if arguments is None else _as_json(arguments)
        whole_call = f"{call.name}({arguments})"
        text = whole_call if self._verbose else tool_call_text(call.name, arguments)
        yield from self._render_styled(f"→ {text}", "yellow")

    def _result_lines(self, result: ToolResult, *, failed: bool) -> Iterator[str]:
        """Yield the lines of a tool result. Long text is shortened; other parts are JSON."""
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
        if not _has_formatted_block(blocks):
            # Show the output as the tool printed it.
            blocks = (ToolBlock(kind="text", text=text),)
        for block in blocks:
            yield from self._block_lines(block, "red" if failed else "dim")

    def _block_lines(self, block: ToolBlock, style: str = "dim") -> Iterator[str]:
        lines = list(_styled_block_lines(block, style))
        count = len(lines)
        shown_count = count if self._verbose or count <= _MAX_TOOL_LINES else _MAX_TOOL_LINES - 1
        for text, line_style in lines[:shown_count]:
            yield from self._render_styled(self._shorten(text), line_style)
        if omitted_count := count - shown_count + block.omitted:
            hint = "" if self._verbose else "; use --tools to show them"
            yield from self._render_styled(f"… {omitted_count:,} more lines{hint}", "dim italic")

    def _shorten(self, text: str) -> str:
        return text if self._verbose else shorten(text, _MAX_VALUE_LENGTH)

    def _render_styled(self, text: str, style: str) -> list[str]:
        return styled_lines(self._console, text, style)


# --- tool calls and results ------------------------------------------------------------------


def _has_formatted_block(blocks: Iterable[ToolBlock]) -> bool:
    """Return whether any block is neither plain text nor JSON, for example a diff."""
    return any(block.kind not in ("json", "text") for block in blocks)


def _styled_block_lines(block: ToolBlock, style: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of a block with their rich styles. `style` is the style of plain text."""
    match block.kind:
        case "diff":
            for line in block.lines:
                yield f"{line.sign}{line.text}", _DIFF_STYLES[line.kind]
        case "checklist":
            for item in block.items:
                text = " ".join(item.text.split())
                yield f"{_CHECKBOXES[item.state]} {text}", _CHECKBOX_STYLES[item.state]
        case "shell":
            if block.label:
                yield printable(block.label), style
            for line_index, text in enumerate(printable(block.text).rstrip("\n").split("\n")):
                yield f"{'  ' if line_index else '$ '}{text}", "bold"
        case "code" | "text" | "json":
            for text in printable(block.text).rstrip("\n").split("\n"):
                yield text, style
