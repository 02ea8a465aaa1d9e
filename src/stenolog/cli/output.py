"""Safe and uniform output: text without control sequences, JSON, counts, times, tables."""

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from prompt_toolkit.output.vt100 import Vt100_Output
    from rich.console import Console
    from rich.progress import Progress

PARTIAL: Final = 3
"""Exit code if a part of the task could not be done."""

# Remove whole sequences, otherwise their visible part would remain: "[31m".
_SEQUENCE: Final = re.compile(
    # colours, cursor, erase
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    # titles and links
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]"
)
# Control characters, and characters that change the writing direction.
_UNPRINTABLE: Final = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_CONTROL: Final = re.compile(f"[{_UNPRINTABLE}]")
# Also lone surrogates, which cannot be encoded. In JSON, line ends occur only between values.
_IN_JSON: Final = re.compile(f"[{_UNPRINTABLE}\ud800-\udfff]")
_CONTROL_IN_LINE: Final = re.compile(f"[{_UNPRINTABLE}\t\n]")


def printable(text: str) -> str:
    """Return the text without terminal control sequences; line ends and tabs are kept."""
    return _CONTROL.sub("", _SEQUENCE.sub("", text))


def one_line(name: str) -> str:
    """Return a key or path in one line, with control characters escaped."""
    return _CONTROL_IN_LINE.sub(lambda found: ascii(found[0])[1:-1], name)


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return a value as JSON that is safe to print: control characters are escaped."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return _IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def print_notice(words: str) -> None:
    """Print a message to stderr."""
    click.echo(printable(words), err=True)


def print_result(fields: Any, words: str, *, as_json: bool) -> None:
    """Print a result: as JSON to stdout, or as a message to stderr."""
    if as_json:
        click.echo(json_text(fields))
    else:
        print_notice(words)


def plural(number: int, what: str) -> str:
    """Return a count with its noun."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def sentence(words: str) -> str:
    """Return an error text that ends with a full stop."""
    text = one_line(words)
    return text if text.endswith((".", "?", "!")) else f"{text}."


def error_sentence(error: Exception | str) -> str:
    """Return an error as a sentence. The first letter is capitalized unless it starts a name."""
    text = sentence(str(error))
    first, _, rest = text.partition(" ")
    # "x at http://…" starts with the name of a model.
    begins_with_word = first.isascii() and first.isalpha() and not rest.startswith("at http")
    return text[:1].upper() + text[1:] if begins_with_word else text


def format_time(at: datetime) -> str:
    """Return a time in UTC, to the second."""
    # The C library of some systems does not pad the year 1 to 0001.
    return f"{at.year:04}{at:-%m-%dT%H:%M:%SZ}"


def format_local_time(at: datetime) -> str:
    """Return a time in the zone of this machine with the zone's name, for people."""
    try:
        local = at.astimezone()
    except (OverflowError, ValueError):
        return format_time(at)  # next to the first or last year, a zone may not be applied
    return f"{local.year:04}{local:-%m-%d %H:%M:%S %Z}"


_UNITS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_AGE: Final = re.compile(r"(\d{1,6})([smhdw])")


def parse_time(words: str, now: datetime) -> datetime | None:
    """Return the time that the words describe, or None.

    Forms: `2026-11-05`, `2026-11-05T14:30` (UTC), `3d` ago, `today`, `yesterday` (from 0:00 UTC).
    """
    days = {"today": 0, "yesterday": 1}.get(words.strip().lower())
    if days is not None:
        midnight = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        return midnight - timedelta(days=days)
    ago = _AGE.fullmatch(words.strip())
    try:
        if ago is not None:
            return now - timedelta(seconds=int(ago[1]) * _UNITS[ago[2]])
        found = datetime.fromisoformat(words.strip())
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
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
        found = parse_time(value, datetime.now(UTC))
        if found is None:
            self.fail(f"{value!r} is not a time; write {TIME_FORMATS}", param, ctx)
        return found


def format_age(at: datetime, now: datetime) -> str:
    """Return the age in one unit, or the date if it is nine weeks or more."""
    seconds = max(0, int((now - at).total_seconds()))
    if seconds >= 9 * _UNITS["w"]:
        return format_local_time(at)[:10]
    for unit in ("w", "d", "h", "m"):
        if seconds >= _UNITS[unit]:
            return f"{seconds // _UNITS[unit]}{unit}"
    return "now"


# --- terminal -------------------------------------------------------------------------------------
# The terminal: detection, and output below the other lines, without the alternate screen.


_DUMB_TERMINALS: Final = ("", "dumb", "unknown")


def is_interactive() -> bool:
    """Return whether stdin and stdout are a terminal that can move its cursor."""
    term = os.environ.get("TERM", "").casefold()
    # If a program is started with stdin closed, `sys.stdin` is None.
    typed = sys.stdin is not None and sys.stdin.isatty()
    return typed and sys.stdout.isatty() and term not in _DUMB_TERMINALS


def terminal_console() -> "Console":
    """Return a console that renders colours for this terminal; none with NO_COLOR."""
    # Imported late: slow, and only needed in a terminal.
    from rich.console import Console

    return Console(highlight=False, emoji=False, markup=False)


def table_console(*, color: bool) -> "Console":
    """Return the console for tables: stdout, as wide as the terminal."""
    from rich.console import Console

    return Console(color_system="auto" if color else None, highlight=False)


def print_table(
    console: "Console",
    columns: Mapping[str, Mapping[str, Any]],
    rows: Iterable[Sequence[Any]],
    **options: Any,
) -> None:
    """Print rows with a header. A cell is text, or a tuple of text and style."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", **options)
    for name, look in columns.items():
        table.add_column(name, **look)
    for row in rows:
        split = (cell if isinstance(cell, tuple) else (cell,) for cell in row)
        table.add_row(*(Text(*one) if isinstance(one[0], str) else one[0] for one in split))
    console.print(table)


def progress_bar(*more: str) -> "Progress":
    """Return a progress bar on stderr that disappears at the end.

    `more` are formats of further columns.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True, highlight=False)
    return Progress(*columns, *map(TextColumn, more), console=console, transient=True)


def inline_output() -> "Vt100_Output":
    """Return the terminal for widgets that are drawn below the other output and then removed."""
    from prompt_toolkit.output.color_depth import ColorDepth
    from prompt_toolkit.output.vt100 import Vt100_Output

    output = Vt100_Output.from_pty(
        sys.stdout,
        term=os.environ.get("TERM"),
        default_color_depth=ColorDepth.from_env(),
        enable_bell=False,
    )
    # The cursor position is not needed, and the terminal's answer would mix with typed text.
    output.enable_cpr = False
    return output
