"""The statements of queries.sql by name, for the schema that the tables live in."""

import re
from functools import cache
from importlib.resources import files
from typing import Final

_NAME: Final = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


@cache
def statements(schema: str) -> dict[str, bytes]:
    """Every statement; as bytes, which is what the driver sends."""
    text = (files(__package__) / "queries.sql").read_text(encoding="utf-8")
    _, *parts = _NAME.split(text.replace("{schema}", quoted(schema)))
    return {
        name: statement.partition(";")[0].strip().encode()
        for name, statement in zip(parts[::2], parts[1::2], strict=True)
    }


def quoted(name: str) -> str:
    """A name as it stands in a statement."""
    return '"' + name.replace('"', '""') + '"'
