"""Safe and uniform output: text without control sequences, JSON, counts, times, tables."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import click

from stenolog.lazy_loading import lazy_pattern
from stenolog.redaction.redact import UNPRINTABLE_RANGES
from stenolog.redaction.redact import printable as printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.progress import Progress
    from rich.text import Text

_Item = TypeVar("_Item")

EXIT_PARTIAL: Final = 3
"""Exit code if a part of the task could not be done."""
EXIT_CTRL_C: Final = 128 + 2
"""Exit code of a program that was ended with Ctrl-C."""
JSON_OUTPUT: Final = "stenolog.json"
"""Key in click's `Context.meta`. Its value is true if the user gave the option `--json`."""
_MAX_CONFIRMED_LINES: Final = 20
"""Maximum number of lines listed by a dry run, or before the user is asked to confirm."""
_MIN_PROGRESS_BYTES: Final = 1024 * 1024
"""Minimum size of an import in bytes for which a progress bar is shown."""

# Lone surrogates are unsafe too, because they cannot be encoded.
# Line ends are safe in JSON, because they occur only between values.
_UNSAFE_IN_JSON: Final = lazy_pattern(f"[{UNPRINTABLE_RANGES}\ud800-\udfff]")
_CONTROL_OR_LINE_END: Final = lazy_pattern(f"[{UNPRINTABLE_RANGES}\t\n]")


def one_line(name: str) -> str:
    """Return a text, such as a key, in one line: line ends and control characters are escaped."""
    return _CONTROL_OR_LINE_END.sub(lambda match: ascii(match[0])[1:-1], name)


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return a value as JSON that is safe to print: control characters are escaped.

    Times have the form of `format_time`.
    """
    text = json.dumps(value, ensure_ascii=False, indent=indent, default=format_time)
    return _UNSAFE_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def attributes_of(item: object, *names: str) -> dict[str, Any]:
    """Return attributes of an object by name, as fields of a JSON object."""
    return {name: getattr(item, name) for name in names}


def print_notice(*texts: str) -> None:
    """Print messages to stderr, each in a line of its own."""
    for text in texts:
        click.echo(printable(text), err=True)


def first_lines(lines: Sequence[str], max_count: int) -> list[str]:
    """Return the first lines, indented, and a line with the number of further lines."""
    more = [f"… and {len(lines) - max_count:,} more"] if len(lines) > max_count else []
    return [f"  {line}" for line in (*lines[:max_count], *more)]


def print_first_lines(heading: str, lines: Sequence[str]) -> None:
    """Print a heading, the first lines, and the number of further lines."""
    print_notice(heading, *first_lines(lines, _MAX_CONFIRMED_LINES))


def shorten(text: str, max_length: int) -> str:
    """Return the text, or its start and `…`, with at most `max_length` characters."""
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


def wants_json() -> bool:
    """Return whether the user gave the option `--json`."""
    return bool(click.get_current_context().meta.get(JSON_OUTPUT))


def print_json(fields: Any, *, indent: int | None = None) -> bool:
    """Print `fields` as JSON to stdout if the user gave `--json`; return whether it was given."""
    as_json = wants_json()
    if as_json:
        click.echo(json_text(fields, indent=indent))
    return as_json


def print_rows(
    items: Sequence[_Item],
    *,
    fields: Callable[[_Item], Any],
    cells: Callable[[_Item], Iterable[object]],
    table: Callable[[Sequence[_Item]], None] | None = None,
) -> None:
    """Print one line per item to stdout: a JSON object, or cells separated by tabs.

    In a terminal, `table` prints the items instead of the cells.
    """
    as_json = wants_json()
    if items and table is not None and not as_json and sys.stdout.isatty():
        table(items)
        return
    for item in items:
        if as_json:
            click.echo(json_text(fields(item)))
        else:
            click.echo("\t".join(one_line(str(cell)) for cell in cells(item)))


def print_result(fields: Any, text: str) -> None:
    """Print a result: as JSON to stdout, or as a message to stderr."""
    if not print_json(fields):
        print_notice(text)


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: `1 message`, `2 messages`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def sentence(text: str) -> str:
    """Return the text in one line that ends with a full stop."""
    line = one_line(text)
    return line if line.endswith((".", "?", "!")) else f"{line}."


def error_sentence(error: Exception | str) -> str:
    """Return an error as a sentence. The first letter becomes upper case, except in a name."""
    text = sentence(str(error))
    word, _, rest = text.partition(" ")
    # "x at http://…" starts with the name of a model, which keeps its case.
    begins_with_word = word.isascii() and word.isalpha() and not rest.startswith("at http")
    return text[:1].upper() + text[1:] if begins_with_word else text


def format_time(time: datetime) -> str:
    """Return a UTC time as text, to the second: `2026-11-05T14:30:00Z`."""
    # The C library of some systems does not pad the year 1 to 0001.
    return f"{time.year:04}{time:-%m-%dT%H:%M:%SZ}"


def format_local_time(time: datetime) -> str:
    """Return a time as text in the local time zone, with the name of the zone."""
    try:
        local = time.astimezone()
    except (OverflowError, ValueError):
        return format_time(time)  # the local time would be before year 1 or after year 9999
    return f"{local.year:04}{local:-%m-%d %H:%M:%S %Z}"


_UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_AGE_PATTERN: Final = lazy_pattern(r"(\d{1,6})([smhdw])")


def parse_time(text: str, now: datetime) -> datetime | None:
    """Return the time that a text describes, or None if it describes no time.

    Forms: `2026-11-05`, `2026-11-05T14:30` (UTC), `3d` ago, `today`, `yesterday` (from 0:00 UTC).
    """
    days = {"today": 0, "yesterday": 1}.get(text.strip().lower())
    if days is not None:
        midnight = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        return midnight - timedelta(days=days)
    age = _AGE_PATTERN.fullmatch(text.strip())
    try:
        if age is not None:
            return now - timedelta(seconds=int(age[1]) * _UNIT_SECONDS[age[2]])
        time = datetime.fromisoformat(text.strip())
        return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


TIME_FORMATS: Final = (
    "2026-11-05, 2026-11-05T14:30 (UTC), today, yesterday, or an age: 90s, 15m, 2h, 3d, 1w"
)
"""Forms of a time option, for help and errors."""


class TimeType(click.ParamType[datetime]):
    """The type of a time option: a date, a time, or an age."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        """Return the time. Fails if the value is not a time."""
        if isinstance(value, datetime):
            return value
        time = parse_time(value, datetime.now(UTC))
        if time is None:
            self.fail(f"{value!r} is not a time; write {TIME_FORMATS}", param, ctx)
        return time


def format_age(time: datetime, now: datetime) -> str:
    """Return the age of a time in one unit, or the date if the age is nine weeks or more."""
    seconds = max(0, int((now - time).total_seconds()))
    if seconds >= 9 * _UNIT_SECONDS["w"]:
        return format_local_time(time)[:10]
    for unit in ("w", "d", "h", "m"):
        if seconds >= _UNIT_SECONDS[unit]:
            return f"{seconds // _UNIT_SECONDS[unit]}{unit}"
    return "now"


# --- terminal -------------------------------------------------------------------------------------


_DUMB_TERMINALS: Final = ("", "dumb", "unknown")


def is_interactive() -> bool:
    """Return whether stdin and stdout are a terminal that can move its cursor."""
    terminal_type = os.environ.get("TERM", "").casefold()
    # If a program is started with stdin closed, `sys.stdin` is None.
    has_terminal_input = sys.stdin is not None and sys.stdin.isatty()
    return has_terminal_input and sys.stdout.isatty() and terminal_type not in _DUMB_TERMINALS


def uses_color() -> bool:
    """Return whether the running command may print colours."""
    ctx = click.get_current_context(silent=True)
    return ctx is None or ctx.color is not False


def terminal_console(*, styled: bool | None = None) -> "Console":
    """Return a console for stdout. If `styled` is False, it prints neither colours nor bold text.

    If `styled` is None, this depends on whether the running command may print colours.
    """
    # These imports are slow and only needed in a terminal.
    from rich.console import Console
    from rich.theme import Theme

    is_styled = uses_color() if styled is None else styled
    colors: Literal["auto"] | None = "auto" if is_styled else None
    # By default, rich prints inline code on black, also in a light terminal.
    theme = Theme({"markdown.code": "bold cyan"})
    return Console(color_system=colors, highlight=False, emoji=False, markup=False, theme=theme)


def render_lines(
    console: "Console", text: "Text | Markdown", *, style: str | None = None
) -> list[str]:
    """Return the lines that the console would print, with its colour codes."""
    with console.capture() as captured:
        console.print(text, style=style)
    return captured.get().removesuffix("\n").split("\n")


def styled_lines(console: "Console", text: str, style: str) -> list[str]:
    """Return the lines of a text in one style. Control sequences in the text are removed."""
    from rich.text import Text

    return render_lines(console, Text(printable(text), style=style))  # guard: tool-output-printable


def print_table(
    columns: Mapping[str, Mapping[str, Any]],
    rows: Iterable[Sequence[Any]],
    *,
    console: "Console | None" = None,
    **options: Any,
) -> None:
    """Print rows with a header. A cell is text, a tuple of text and style, or a rich object.

    `columns` are the rich options of each column by its name; `options` are those of the table.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", **options)
    for name, column_style in columns.items():
        table.add_column(name, **column_style)
    for row in rows:
        cells = (Text(cell) if isinstance(cell, str) else cell for cell in row)
        table.add_row(*(Text(*cell) if isinstance(cell, tuple) else cell for cell in cells))
    (console or terminal_console()).print(table)


@contextmanager
def show_progress(
    label: str, total: int, *, enabled: bool = True, percent: bool = False
) -> Iterator[Callable[..., None]]:
    """Yield a function that advances a progress bar, by one or by the given amount.

    The bar is shown only if it is `enabled` and stderr is a terminal.
    """
    if not enabled or not sys.stderr.isatty():
        yield lambda _amount=1: None
        return
    with progress_bar(percent=percent) as bar:
        yield partial(bar.advance, bar.add_task(label, total=total))


def show_import_progress(byte_count: int) -> AbstractContextManager[Callable[..., None]]:
    """Return a progress bar that counts imported bytes. It is shown only for a large import."""
    is_large = byte_count >= _MIN_PROGRESS_BYTES
    return show_progress("Importing", byte_count, enabled=is_large, percent=True)


def progress_bar(*extra_columns: str, percent: bool = False) -> "Progress":
    """Return a progress bar on stderr that disappears at the end.

    `extra_columns` are rich formats of further columns. With `percent`, the bar shows a percentage
    instead of counts.
    """
    from rich import progress
    from rich.console import Console

    state_column = progress.TaskProgressColumn() if percent else progress.MofNCompleteColumn()
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), state_column)
    text_columns = map(progress.TextColumn, extra_columns)
    console = Console(stderr=True, highlight=False)
    return progress.Progress(*columns, *text_columns, console=console, transient=True)
