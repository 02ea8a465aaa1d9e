"""`steno show` and `steno tail`: print the messages of a session."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, Final

import click

from stenolog.catalog.entries import Entry
from stenolog.catalog.message_metadata import (
    FIELD,
    has_failed,
    interruption,
    model_label,
    model_of,
    seconds_of,
)
from stenolog.catalog.searchable_text import prompt_from, role_of, text_of, title_from
from stenolog.cli.completion import complete_key
from stenolog.cli.output import (
    format_local_time,
    format_time,
    json_text,
    one_line,
    printable,
)
from stenolog.cli.tool_lines import block_lines, is_shaped
from stenolog.cli.workspace import Location, display_name, location_options, open_read_only
from stenolog.errors import NoSuchSession
from stenolog.messages import (
    UNNAMED,
    FilePart,
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
from stenolog.sessions.aliases import Aliases
from stenolog.stores.base import Store
from stenolog.transfer.export.tool_views import (
    ToolBlock,
    argument_blocks,
    result_blocks,
    summary_of,
)

PROGRAM_FIELDS: Final = frozenset(
    {
        "aider",
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
_INTERRUPTED: Final = "[interrupted]"
"""Text that marks an interrupted answer for the model."""
_NEIGHBOURS: Final = 5
"""Number of messages shown before and after the requested one."""
_MAX_VALUE: Final = 400
"""Maximum number of characters of any other field."""
_COLOURS: Final = {"user": "cyan", "assistant": "green", "tool": "yellow"}


@click.command("show")
@click.argument("key", shell_complete=complete_key)
@click.option("--all", "full", is_flag=True, help="Include hidden and archived messages.")
@click.option(
    "--at",
    metavar="SEQ",
    type=click.IntRange(min=1),
    help="Show only this message and its neighbours.",
)
@click.option("--tools", is_flag=True, help="Do not shorten tool calls and results.")
@click.option("--no-pager", is_flag=True, help="Do not use a pager.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@location_options
@click.pass_context
def show_command(
    ctx: click.Context,
    key: str,
    full: bool,
    at: int | None,
    tools: bool,
    no_pager: bool,
    as_json: bool,
    where: Location,
) -> None:
    """Show the messages of the session KEY.

    KEY:SEQ, as `steno search` prints it, shows one message with those before and after it,
    including hidden ones. This is the same as --at SEQ.

    In a terminal, Markdown is formatted, tool results are shortened, and long output is paged
    ($PAGER, otherwise less). Without a terminal the output is plain text. Control characters are
    removed; `steno export` prints messages exactly as stored.

    Example: steno show telegram:123 --all

    Exit codes: 0 done, 1 there is no such session or message, 2 wrong usage.
    """
    with open_read_only(where) as store:
        info, at = _find_message(store, key, at)
        whole = at is None
        messages = (
            store.get_history(info.key, full=full) if at is None else _neighbours(store, info, at)
        )
        if as_json:
            click.echo(json_text(_fields(store, info, messages)))
        elif sys.stdout.isatty():
            page = _MessageRenderer(color=ctx.color is not False, tools=tools)
            lines = page.lines(info.summary if whole else "", messages, at)
            earlier = [message for message in messages if at is not None and message.seq < at]
            start = len(list(page.lines("", earlier, None)))
            _print_lines(lines, paged=not no_pager, color=page.color, start=start)
        else:
            if info.summary and whole:
                click.secho("Summary", bold=True)
                click.echo(f"{printable(info.summary)}\n")
            for message in messages:
                print_message(message)
        hidden = info.count - info.visible
        if hidden and whole and not full:
            click.echo(f"{messages_are(hidden)} hidden. Use --all to show them.", err=True)
        # Read again: reading all messages may have discovered damage.
        for words in damage_lines(find_session(store, info.key), where.workspace):
            click.echo(words, err=True)


# --- selection -------------------------------------------------------------------------------


def find_session(store: Store, name: str) -> SessionInfo:
    """Return the session with this key or alias. Raises ClickException if there is none."""
    found = _find_info(store, name)
    if found is None:
        raise click.ClickException(
            f"There is no session {one_line(name)!r}. `steno list` lists the sessions."
        )
    return found


def _find_info(store: Store, name: str) -> SessionInfo | None:
    try:
        return store.info(Aliases(store).resolve_key(name))
    except NoSuchSession:
        return None


def _find_message(store: Store, name: str, at: int | None) -> tuple[SessionInfo, int | None]:
    """Return the session and the seq of the message.

    An existing key takes precedence over KEY:SEQ.
    """
    key, _, seq = name.rpartition(":")
    if at is None and key and seq.isascii() and seq.isdecimal() and _find_info(store, name) is None:
        found = _find_info(store, key)
        if found is not None:
            return found, int(seq)
    return find_session(store, name), at


def _neighbours(store: Store, info: SessionInfo, at: int) -> list[Message]:
    """Return a message and its neighbours. Raises ClickException if it does not exist."""
    every = store.get_history(info.key, after=max(0, at - 1 - 4 * _NEIGHBOURS), full=True)
    before = [message for message in every if message.seq < at][-_NEIGHBOURS:]
    found = [message for message in every if message.seq >= at][: _NEIGHBOURS + 1]
    if not found or found[0].seq != at:
        raise click.ClickException(
            f"There is no message {at} in {one_line(info.key)}. The last one is {info.last_seq}."
        )
    return [*before, *found]


def _fields(store: Store, info: SessionInfo, messages: Iterable[Message]) -> dict[str, Any]:
    bodies = (message.to_dict() for message in store.get_history(info.key, full=True))
    return {
        "key": info.key,
        "uid": info.uid,
        "title": title_from(
            info.meta, prompt_from((role_of(body), text_of(body)) for body in bodies)
        ),
        "created": format_time(info.created),
        "updated": format_time(info.updated),
        "summary": info.summary,
        "visible": info.visible,
        "count": info.count,
        "messages": [message_fields(message) for message in messages],
    }


def message_fields(message: Message) -> dict[str, Any]:
    """Return a message as a JSON object: its position, and the object exactly as stored."""
    return {
        "seq": message.seq,
        "at": format_time(message.at),
        "hidden": message.hidden,
        "message": message.to_dict(),
    }


def damage_lines(info: SessionInfo | Entry, workspace: str) -> Iterator[str]:
    """Yield a sentence if the session is damaged."""
    if info.lost or info.damaged:
        cost = (
            f"at least {messages_are(info.lost)} lost" if info.lost else "no message is lost so far"
        )
        yield (
            f"{one_line(info.key)} is damaged: {cost}. "
            f"Run `steno doctor {display_name(workspace)}` for details."
        )


def messages_are(count: int) -> str:
    """Return the number of messages with the verb."""
    return "1 message is" if count == 1 else f"{count:,} messages are"


# --- plain text ------------------------------------------------------------------------------


def print_message(message: Message) -> None:
    """Print a message for reading, without the metadata for the agent loop."""
    fields = message.to_dict()
    why = interruption(fields)
    fields.pop(FIELD, None)
    click.secho(_head(message, fields.pop("role", "message")), bold=True, nl=False)
    click.secho(f" · {_place(message, format_time(message.at))}", dim=True, nl=True)
    for text in _texts(fields.pop("content", None)):
        click.echo(printable(_mark_interrupted(text, why) if why else text))
    for name, value in fields.items():
        click.echo(printable(f"{name}: {_as_json(value)}"))
    click.echo()


def _head(message: Message, role: Any) -> str:
    return printable(f"[{message.seq}] {role if isinstance(role, str) else json.dumps(role)}")


def _place(message: Message, time: str) -> str:
    return f"{time}{' · hidden' if message.hidden else ''}"


def _mark_interrupted(text: str, why: str) -> str:
    if not text.endswith(_INTERRUPTED):
        return text
    reason = "" if why == "stopped" else f": {why}"
    return f"{text.removesuffix(_INTERRUPTED)}(interrupted{reason})"


def _texts(content: Any) -> Iterator[str]:
    """Yield the content in paragraphs: text unchanged, other parts as JSON."""
    if content is None:
        return
    for value in content if isinstance(content, list) else [content]:
        part = read_part(value)
        text = part.text if isinstance(part, TextPart | UnknownPart) else None
        yield _as_json(value) if text is None else text


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# --- in a terminal ---------------------------------------------------------------------------


def _is_in_head(block: ToolBlock) -> bool:
    """Return whether the line of the call shows all of this block, or as much as is needed."""
    is_short = block.kind == "shell" and "\n" not in block.text and len(block.text) < 120
    return block.kind == "json" or is_short


def message_renderer(*, color: bool) -> "_MessageRenderer":
    """Return a renderer of single messages for a terminal."""
    return _MessageRenderer(color=color, tools=False)


class _MessageRenderer:
    """Renderer of messages for a terminal: Markdown laid out, tool calls shortened."""

    def __init__(self, *, color: bool, tools: bool) -> None:
        """Create a renderer. `tools` shows tool calls and results completely."""
        # Imported late: slow, and only needed in a terminal.
        from rich.console import Console

        self.color = color
        self._console = Console(
            color_system="auto" if color else None, highlight=False, emoji=False, markup=False
        )
        self._tools = tools

    def lines(self, summary: str, messages: Iterable[Message], at: int | None) -> Iterator[str]:
        """Yield the lines of summary and messages; the message `at` is highlighted."""
        if summary:
            yield from self._styled("Summary", "bold")
            yield from self._markdown(summary)
            yield ""
        for message in messages:
            yield from self.message(message, marked=message.seq == at)

    def message(self, message: Message, *, marked: bool = False) -> Iterator[str]:
        """Yield the lines of one message, and an empty line."""
        fields = message.to_dict()
        why = interruption(fields)
        told = {
            "model": model_of(fields),
            "seconds": seconds_of(fields),
            "failed": has_failed(fields),
        }
        yield from self._head(message, fields.get("role", "message"), told, marked=marked)
        for part in read_message(fields):
            yield from self._part(part, fields, why)
        for name, value in unread_fields(fields).items():
            if name != FIELD and name not in PROGRAM_FIELDS:
                yield from self._field(name, value)
        yield ""

    def _part(self, part: Part, fields: Mapping[str, Any], why: str) -> Iterator[str]:
        """Yield the lines of a part; parts without readable form are shown as JSON."""
        match part:
            case TextPart():
                yield from self._content(_mark_interrupted(part.text, why) if why else part.text)
            case ThinkingPart() if not part.in_content and not isinstance(part.value, str):
                yield from self._field(part.field, part.value)
            case ThinkingPart() if part.text.strip() or not part.in_content:
                if text := part.text.strip():
                    yield from self._styled(text, "dim italic")
            case ToolCall():
                yield from self._call(part)
            case ToolResult():
                yield from self._result(part, failed=part.is_error or has_failed(fields))
            case FilePart() if part.value is fields.get("audio"):
                if isinstance(part.content, str):
                    yield from self._content(part.content)
                yield from self._field("audio", part.value)
            case UnknownPart() if part.field in ("tool_calls", "function_call"):
                yield from self._styled(f"→ {self._short(_as_json(part.value))}", "yellow")
            case UnknownPart() if part.field != "content":
                yield from self._field(part.field, part.value)
            case UnknownPart() if part.text is not None:
                yield from self._content(part.text)
            case _ if part.value is not fields:
                yield from self._styled(self._short(_as_json(part.value)), "dim")

    def _field(self, name: str, value: Any) -> list[str]:
        return self._styled(f"{name}: {self._short(_as_json(value))}", "dim")

    def _head(
        self, message: Message, role: Any, told: Mapping[str, Any], *, marked: bool
    ) -> list[str]:
        from rich.text import Text

        colour = _COLOURS.get(role, "") if isinstance(role, str) else ""
        head = Text(
            _head(message, role), style=f"bold {colour}{' reverse' if marked else ''}".strip()
        )
        place = _place(message, format_local_time(message.at))
        head.append(f" · {place}", style="not bold not reverse dim default")
        if told.get("model"):
            head.append(
                f" · {one_line(model_label(told['model']))}",
                style="not bold not reverse dim default",
            )
        if told.get("seconds") is not None:
            spent = f" · {told['seconds']:.1f} s"
            head.append(spent, style="not bold not reverse dim default")
        if told.get("failed"):
            head.append(" · failed", style="not bold not reverse red")
        return self._printed(head)

    def _content(self, text: str) -> list[str]:
        # Parts that are not text, such as images, are JSON and may be long.
        is_json = text[:1] == "{" and text[-1:] == "}"
        return self._styled(self._short(text), "dim") if is_json else self._markdown(text)

    def _markdown(self, text: str) -> list[str]:
        from stenolog.cli.terminal_markdown import MarkdownStream, render_block
        from stenolog.transfer.export.code_blocks import ColourBudget

        stream = MarkdownStream()
        blocks = [*stream.add(text), *stream.end()]
        budget = ColourBudget()
        return [line for one in blocks for line in render_block(one, self._console, budget=budget)]

    def _call(self, call: ToolCall) -> Iterator[str]:
        """Yield a tool call: one line, and below it diffs, commands, files and checklists."""
        # Imported late: slow, and only needed for tool calls.
        from stenolog.cli.chat_screen import short_call

        if call.name == UNNAMED:
            yield from self._styled(f"→ {self._short(_as_json(call.value))}", "yellow")
            return
        blocks = argument_blocks(call.arguments)
        if is_shaped(blocks):
            head = " ".join(filter(None, (call.name, summary_of(call.arguments))))
            yield from self._styled(f"→ {head}", "yellow")
            for block in blocks:
                if self._tools or not _is_in_head(block):
                    yield from self._block(block)
            return
        given = call.arguments
        given = given if isinstance(given, str) else "" if given is None else _as_json(given)
        words = f"{call.name}({given})" if self._tools else short_call(call.name, given)
        yield from self._styled(f"→ {words}", "yellow")

    def _result(self, result: ToolResult, *, failed: bool) -> Iterator[str]:
        """Yield the lines of a tool result; text is cut, other parts are JSON."""
        parts = list(read_content(result.content))
        if not parts and result.in_content:
            yield from self._output(_as_json(result.value), failed=failed)
        for part in parts:
            if isinstance(part, ToolResult):
                yield from self._result(part, failed=failed or part.is_error)
            else:
                text = part.text if isinstance(part, TextPart | UnknownPart) else None
                shown = _as_json(part.value) if text is None else text
                yield from self._output(shown, failed=failed)

    def _output(self, text: str, *, failed: bool) -> Iterator[str]:
        blocks = result_blocks(text)
        if not is_shaped(blocks):
            # As the tool printed it.
            blocks = (ToolBlock(kind="text", text=text),)
        for block in blocks:
            yield from self._block(block, "red" if failed else "dim")

    def _block(self, block: ToolBlock, style: str = "dim") -> Iterator[str]:
        for text, one in block_lines(block, whole=self._tools, style=style):
            yield from self._styled(text if self._tools else self._short(text), one)

    def _short(self, text: str) -> str:
        whole = self._tools or len(text) <= _MAX_VALUE
        return text if whole else f"{text[: _MAX_VALUE - 1]}…"

    def _styled(self, text: str, style: str) -> list[str]:
        from rich.text import Text

        return self._printed(Text(printable(text), style=style))  # guard: tool-output-printable

    def _printed(self, text: Any) -> list[str]:
        with self._console.capture() as captured:
            self._console.print(text, overflow="fold")
        return captured.get().removesuffix("\n").split("\n")


def _print_lines(lines: Iterator[str], *, paged: bool, color: bool, start: int) -> None:
    """Print lines, through a pager if they do not fit on the screen.

    If the pager is less, it starts after `start` lines.
    """
    first = list(islice(lines, max(1, shutil.get_terminal_size().lines - 1))) if paged else []
    longer = next(lines, None) if paged else None
    if longer is None:
        for line in chain(first, lines):
            click.echo(line, color=color)
        return
    rest = chain(first, [longer], lines)
    if start:
        os.environ["LESS"] = f"{os.environ.get('LESS', '-R')} +{start + 1}g"
    click.echo_via_pager((f"{line}\n" for line in rest), color=None if color else False)


# --- tail -----------------------------------------------------------------------------------------
# `steno tail`: print the end of a session, and new messages as any process stores them.


_CTRL_C_EXIT: Final = 128 + 2
"""Exit code of a program that was ended with Ctrl-C."""


@click.command("tail")
@click.argument("key", shell_complete=complete_key)
@click.option("-f", "--follow", is_flag=True, help="Follow new messages until Ctrl-C.")
@click.option(
    "-n",
    "--last",
    metavar="N",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="Number of messages to show first.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per message.")
@location_options
@click.pass_context
def tail_command(
    ctx: click.Context, key: str, follow: bool, last: int, as_json: bool, where: Location
) -> None:
    """Show the last messages of the session KEY, and new ones with -f.

    With -f, each message is shown as soon as any process stores it, until you press Ctrl-C or the
    session is deleted.

    Exit codes: 0 done, 1 there is no such session, or it was deleted, 2 wrong usage, 130 stopped
    with Ctrl-C.
    """
    show = _printer(ctx, as_json=as_json)
    try:
        with open_read_only(where) as store:
            info, messages, seen = _last_messages(store, key, last)
            for message in messages:
                show(message)
            for words in damage_lines(info, where.workspace):
                click.echo(words, err=True)
            if not follow:
                return
            if sys.stderr.isatty():
                click.echo(f"Following {one_line(info.key)}. Press Ctrl-C to stop.", err=True)
            for message in store.follow(info.key, after=seen, uid=info.uid):
                show(message)
    except KeyboardInterrupt:
        ctx.exit(_CTRL_C_EXIT)


def _last_messages(store: Store, key: str, last: int) -> tuple[SessionInfo, list[Message], int]:
    """Return a session, its last visible messages, and the seq to follow from.

    Reads again if the session was deleted and created again in between.
    """
    while True:
        info = find_session(store, key)
        messages = store.get_history(info.key, last=last)
        now = find_session(store, info.key)
        if now.uid == info.uid:
            # Messages hidden in between are not shown, and none is shown twice.
            seen = max([info.last_seq, *(message.seq for message in messages)])
            return now, messages, seen


def _printer(ctx: click.Context, *, as_json: bool) -> Callable[[Message], None]:
    """Return a function that prints one message to stdout."""
    if as_json:
        return lambda message: click.echo(json_text(message_fields(message)))
    if not sys.stdout.isatty():
        return print_message
    page = message_renderer(color=ctx.color is not False)

    def print_rendered(message: Message) -> None:
        for line in page.message(message):
            click.echo(line, color=page.color)

    return print_rendered
