"""Types of the fixtures that run steno, and what its help says about columns."""

import re
from collections.abc import Callable

from click.testing import Result

Steno = Callable[..., Result]
InTerminal = Callable[..., tuple[int, str]]


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
