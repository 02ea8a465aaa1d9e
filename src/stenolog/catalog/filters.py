"""What a caller asks for, in the form that the tables hold it. Pure."""

from typing import Final

MOST: Final = 2**63 - 2
"""SQLite counts one further, and no more."""


def clean(text: str) -> str:
    """The same text where UTF-8 can hold it; lone surrogates become question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def prefix_range(prefix: str) -> tuple[str | None, bytes | None]:
    """The keys that begin so: from the one, to just before the other."""
    if not prefix:
        return None, None
    raw = prefix.encode("utf-8", "replace")
    # No byte of UTF-8 is the highest one, so the last can always be raised.
    return raw.decode(), raw[:-1] + bytes([raw[-1] + 1])
