"""Types of the fixtures that run steno, the columns in its help, and a log of a newer version."""

import re
from binascii import crc32
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


def log_of_newer_version(text: bytes) -> bytes:
    """Return a log to which a newer version has written."""
    first = text.splitlines()[0].rpartition(b',"crc":"')[0].replace(b'"format":1', b'"format":2')
    return text + b'%b,"crc":"%08x"}\n' % (first, crc32(first))
