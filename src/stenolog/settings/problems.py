"""What is wrong with the settings: each problem by place and field, all of them in one error."""

import re
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from stenolog.errors import UsageError

Path = tuple[str, ...]

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")


class Problem(Struct, frozen=True, kw_only=True):
    """One thing that is wrong."""

    source: str
    """Where it was said: `FILE:LINE`, a file, a variable, or `the command line`."""
    field: str = ""
    """Which field, with dots: `agent.max_context_tokens`; empty for the file as a whole."""
    reason: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.source, self.field, self.reason) if part)


class WrongSettings(UsageError):
    """The settings cannot be used; nothing was started. All that is wrong is told at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(map(str, problems)))


def dotted(path: Path) -> str:
    """A path as one writes it; a name that is no plain word stands in quotes."""
    return ".".join(part if _BARE.fullmatch(part) else quoted(part) for part in path)


def quoted(text: str) -> str:
    """A text as TOML writes it; what a terminal would obey stands there as escapes."""
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable():
        return character
    known = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    code = ord(character)
    return known.get(character) or (f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
