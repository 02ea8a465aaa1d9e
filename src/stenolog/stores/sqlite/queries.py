"""The statements of queries.sql by name.

A name may have several statements: `Transaction.run` executes them in order. Two names may share
statements: SQLite needs no row locks, so `lock_session` is `find_session`.
"""

import re
from importlib.resources import files
from typing import Final

_NAMES: Final = re.compile(r"^-- name: (\w+(?:, \w+)*)\n", re.MULTILINE)
_PARAMETER: Final = re.compile(r"\?(\d+)")


def _load() -> dict[str, list[str]]:
    text = (files(__package__) / "queries.sql").read_text(encoding="utf-8")
    _, *parts = _NAMES.split(text)
    return {
        name: [statement.strip() for statement in statements.split(";")[:-1]]
        for names, statements in zip(parts[::2], parts[1::2], strict=True)
        for name in names.split(", ")
    }


_STATEMENTS: Final = _load()
SQL: Final = {name: statements[0] for name, statements in _STATEMENTS.items()}
"""The first statement of each name."""
FURTHER_SQL: Final = {name: found[1:] for name, found in _STATEMENTS.items() if found[1:]}
"""The other statements of the names that have several."""
PARAMETER_COUNTS: Final = {
    statement: max(map(int, _PARAMETER.findall(statement)), default=0)
    for statements in _STATEMENTS.values()
    for statement in statements
}
"""Number of values that each statement takes."""
