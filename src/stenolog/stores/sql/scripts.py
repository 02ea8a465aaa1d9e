"""The SQL files of an engine: named statements, and numbered scripts."""

import re
from pathlib import Path
from typing import Final

_STATEMENT_NAMES: Final = re.compile(r"^-- name: (\w+(?:, \w+)*)\n", re.MULTILINE)


def named_statements(text: str) -> dict[str, list[str]]:
    """Return the statements of each name. Several names may share statements.

    A comment after the last statement must not contain a semicolon: it would become a statement.
    """
    _, *parts = _STATEMENT_NAMES.split(text)
    return {
        name: [statement.strip() for statement in statements.split(";")[:-1]]
        for names, statements in zip(parts[::2], parts[1::2], strict=True)
        for name in names.split(", ")
    }


def numbered_scripts(folder: Path, *, first: int = 1) -> dict[int, str]:
    """Return the scripts by the number at the start of their file names."""
    scripts = {
        int(path.name.partition("_")[0]): path.read_text(encoding="utf-8")
        for path in sorted(folder.glob("*.sql"))
    }
    assert list(scripts) == list(range(first, first + len(scripts))), "a number is missing"
    return scripts
