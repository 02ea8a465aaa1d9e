"""Tests that docs/origin.md names existing tests, and all tests named after a reference."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "origin.md").read_text()
NAMED = re.compile(r"`((?:tests|src)/[\w/]+\.py)(?:::(\w+))?`")


@cache
def _defined(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


def test_every_test_named_on_the_origin_page_exists() -> None:
    named = NAMED.findall(PAGE)
    assert len(named) > 60
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (ROOT / file).exists() or (test and test not in _defined(ROOT / file))
    ]
    assert missing == []


def test_every_reference_test_is_on_the_origin_page() -> None:
    named = set(NAMED.findall(PAGE))
    tests = {
        (str(path.relative_to(ROOT)), name)
        for path in (ROOT / "tests" / "reference").glob("test_*.py")
        for name in _defined(path)
        if name.startswith("test_")
    }
    assert len(tests) == 8 + 25 + 9 + 6
    assert tests - named == set()


def test_every_row_has_a_test_or_a_reason() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]
    bare = [
        row
        for row in rows
        if not NAMED.search(row) and "**open**" not in row and "| there |" not in row
    ]
    assert bare == []
