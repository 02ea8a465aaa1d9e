"""The SQL of the catalog in PostgreSQL, by name, for tables of a given schema and namespace."""

from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Final

from stenolog.catalog.statements import PREFIX, VERSION, in_order, named
from stenolog.stores.postgres.queries import quoted

_FOLDER: Final = Path(__file__).parent
_LAYOUT: Final = 2
"""Another one wherever only the tables or the triggers here change."""


def version_of(schema: str) -> str:
    """The version of an index in this schema, whose name its triggers know."""
    return f"{VERSION}/{_LAYOUT}/{schema}"


def prefix_of(namespace: str) -> str:
    """What the names of the tables begin with; short, because longer names are cut off."""
    return f"{PREFIX}{blake2b(namespace.encode(), digest_size=8).hexdigest()}_"


@cache
def statements(schema: str, prefix: str = PREFIX) -> Mapping[str, str]:
    """Every statement of queries.sql."""
    return named(_read("queries.sql", schema, prefix))


@cache
def triggers(schema: str, namespace: str) -> Mapping[str, str]:
    """What empties the index when something is purged, and what calls that."""
    text = _read("triggers.sql", schema, prefix_of(namespace))
    return named(text.replace("{namespace}", namespace.encode().hex()))


@cache
def tables(schema: str, prefix: str) -> tuple[str, ...]:
    """The statements that make the tables; the last one takes the version."""
    return in_order(_read("schema.sql", schema, prefix))


def _read(name: str, schema: str, prefix: str) -> str:
    text = (_FOLDER / name).read_text(encoding="utf-8").replace(PREFIX, prefix)
    return text.replace("{schema}", quoted(schema))
