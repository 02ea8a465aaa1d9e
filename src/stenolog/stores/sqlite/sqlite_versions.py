"""Versions of SQLite that are known to damage databases. Pure."""

from typing import Final

_Version = tuple[int, int, int]

_WAL_RESET: Final = (
    "SQLite {} can lose committed transactions when a checkpoint meets a writer (the WAL-reset "
    "bug, fixed in 3.51.3, 3.50.7 and 3.44.6); install a newer apsw"
)


def known_bugs(version: str) -> list[str]:
    """Return the known bugs of this version of SQLite, as sentences."""
    number = _number(version)
    is_fixed = (
        number >= (3, 51, 3)
        or (3, 50, 7) <= number < (3, 51, 0)
        or (3, 44, 6) <= number < (3, 45, 0)
    )
    return [] if is_fixed or number < (3, 7, 0) else [_WAL_RESET.format(version)]


def _number(version: str) -> _Version:
    major, minor, patch, *_ = (*map(int, version.split(".")), 0, 0)
    return major, minor, patch
