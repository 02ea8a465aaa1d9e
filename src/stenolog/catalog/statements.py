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
    return named(_read("queries.sql", prefix))


@cache
def triggers(prefix: str) -> Mapping[str, str]:
    """The triggers of triggers.sql, by the end of their names."""
    return named(_read("triggers.sql", prefix))


@cache
def schema(prefix: str = PREFIX) -> tuple[str, ...]:
    """The statements that make the tables; the last one takes the version."""
    return in_order(_read("schema.sql", prefix))


def _read(name: str, prefix: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8").replace(PREFIX, prefix)


def named(text: str) -> Mapping[str, str]:
    """The statements of a file in which each has a name."""
    _, *sections = re.split(r"(?m)^-- name: (\w+)\n", text)
    return {
        name: part.strip().removesuffix(";")
        for name, part in zip(sections[::2], sections[1::2], strict=True)
    }


def in_order(text: str) -> tuple[str, ...]:
    """The statements of a file, one after the other."""
    parts = re.split(r"(?m);\s*$", text)
    return tuple(part.strip() for part in parts if part.strip())
