"""The statements of queries.sql by name, for one schema."""

import re
from functools import cache
from importlib.resources import files
from typing import Final

_NAME: Final = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


@cache
def statements(schema: str) -> dict[str, bytes]:
    """Return every statement as bytes, the form in which the driver sends it."""
    text = (files(__package__) / "queries.sql").read_text(encoding="utf-8")
    _, *parts = _NAME.split(text.replace("{schema}", quoted(schema)))
    return {
        name: statement.partition(";")[0].strip().encode()
        for name, statement in zip(parts[::2], parts[1::2], strict=True)
    }


def quoted(name: str) -> str:
    """Return a name quoted for use in a statement."""
    return '"' + name.replace('"', '""') + '"'
