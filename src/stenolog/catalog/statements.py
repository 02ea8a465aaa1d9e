"""The SQL of the catalog, by name, for tables of a given prefix."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

PREFIX: Final = "catalog_"
VERSION: Final = "5"
"""Another one wherever the tables change, or what a text is cut into.

An index of another version is thrown away.
"""

BLOCK: Final = 4_096
"""How many messages share a row that tells of their times."""

_FOLDER: Final = Path(__file__).parent


@cache
def statements(prefix: str = PREFIX) -> Mapping[str, str]:
    """Every statement of queries.sql."""
    return _named("queries.sql", prefix)


@cache
def triggers(prefix: str) -> Mapping[str, str]:
    """The triggers of triggers.sql, by the end of their names."""
    return _named("triggers.sql", prefix)


@cache
def schema(prefix: str = PREFIX) -> tuple[str, ...]:
    """The statements that make the tables; the last one takes the version."""
    parts = re.split(r"(?m);\s*$", _read("schema.sql", prefix))
    return tuple(part.strip() for part in parts if part.strip())


def _read(name: str, prefix: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8").replace(PREFIX, prefix)


def _named(file: str, prefix: str) -> Mapping[str, str]:
    _, *sections = re.split(r"(?m)^-- name: (\w+)\n", _read(file, prefix))
    return {
        name: text.strip().removesuffix(";")
        for name, text in zip(sections[::2], sections[1::2], strict=True)
    }
