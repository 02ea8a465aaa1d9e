"""Types of the fixtures that run steno, transcripts, and what its help says about columns."""

import inspect
import re
import shlex
from collections.abc import Callable, Iterator

from click.testing import Result

Steno = Callable[..., Result]
InTerminal = Callable[..., tuple[int, str]]

_CHANGING = {
    "TIME": re.compile(r"\d{4}-\d\d-\d\d(?:T\d\d:\d\d:\d\dZ| \d\d:\d\d:\d\d \S+)"),
    "UID": re.compile(r"\b[0-9a-f]{16}\b"),
}


def assert_transcript(steno: Steno, transcript: str) -> None:
    """Run the commands of a transcript, and compare all that they print with it.

    `$ steno …` is a command. Below it is its output: stdout, then stderr with `! ` before each
    line and without click's lines about usage, then the exit code if it is not 0, such as
    `(exit 2)`. A tab is `→`; times are `TIME` and uids `UID`.
    """
    __tracebackhide__ = True
    expected = inspect.cleandoc(transcript)
    commands = [line for line in expected.splitlines() if line.startswith("$ steno ")]
    actual = "\n".join(line for command in commands for line in _transcribed(steno, command))
    assert actual.rstrip() == expected


def _transcribed(steno: Steno, command: str) -> Iterator[str]:
    result = steno(*shlex.split(command)[2:])
    errors = re.sub(r"\AUsage: .*\nTry .*\n\n", "", result.stderr).splitlines()
    yield command
    for line in [*result.stdout.splitlines(), *(f"! {error}" for error in errors)]:
        for name, pattern in _CHANGING.items():
            line = pattern.sub(name, line)
        yield line.replace("\t", "→")
    if result.exit_code:
        yield f"(exit {result.exit_code})"


def documented_columns(help_text: str, heading: str) -> list[str]:
    """Return the columns that a numbered list below a line of a help text names, in order."""
    lines = help_text.partition(heading)[2].split("\n")[1:]
    columns: list[str] = []
    for line in lines:
        found = re.fullmatch(rf" +{len(columns) + 1}  (\S.*)", line)
        if found is None:
            break
        columns.append(found[1])
    return columns
