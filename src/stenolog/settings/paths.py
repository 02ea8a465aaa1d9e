"""Names and texts as TOML writes them, and as errors and the config file show them."""

import re
from typing import Final

Path = tuple[str, ...]

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")


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
