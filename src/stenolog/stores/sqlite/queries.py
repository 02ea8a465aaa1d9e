"""The statements of queries.sql by name."""

import re
from importlib.resources import files
from typing import Final

_NAME: Final = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


def _load() -> dict[str, str]:
    text = (files(__package__) / "queries.sql").read_text(encoding="utf-8")
    _, *parts = _NAME.split(text)
    return {
        name: statement.partition(";")[0].strip()
        for name, statement in zip(parts[::2], parts[1::2], strict=True)
    }


SQL: Final = _load()
"""Every statement."""
