"""Count the tests of each promise and compare the numbers with promises.toml.

A test belongs to a promise if its name says so: `test_p3_...`, or `test_p1_p2_...` for two. The
tests of the shipped contract count as well. A number that falls below the recorded one fails, so
that no test of a promise is lost by mistake; `--write` records the current numbers.
"""

import argparse
import ast
import collections
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "tests" / "promises.toml"
PLACES = ("tests", "src/stenolog/testing")
PROMISES = range(1, 14)

_NUMBERS = re.compile(r"test((?:_p\d+)+)_")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="promises", description=__doc__)
    parser.add_argument("--write", action="store_true", help="record the current numbers")
    options = parser.parse_args(arguments)
    counts = count(ROOT)
    print("Tests per promise: " + ", ".join(f"P{n} {counts[n]}" for n in PROMISES))
    if options.write:
        lines = [f"P{n} = {counts[n]}" for n in PROMISES]
        head = "# Tests per promise; tests/promises.py --write records the current numbers.\n"
        RECORDED.write_text(head + "\n".join(lines) + "\n")
        return 0
    found = missing(counts, tomllib.loads(RECORDED.read_text()))
    for line in found:
        print(line)
    return 1 if found else 0


def count(root: Path) -> collections.Counter[int]:
    """Return how many test functions name each promise."""
    found: collections.Counter[int] = collections.Counter()
    for place in PLACES:
        for path in (root / place).rglob("*.py"):
            for name in _functions(path):
                match = _NUMBERS.match(name)
                if match is not None:
                    found.update(int(number) for number in re.findall(r"\d+", match[1]))
    return found


def missing(counts: collections.Counter[int], recorded: dict[str, int]) -> list[str]:
    """Return a line for each promise with fewer tests than recorded."""
    return [
        f"P{n} has {counts[n]} tests; {recorded[f'P{n}']} are recorded in {RECORDED.name}"
        for n in PROMISES
        if counts[n] < recorded[f"P{n}"]
    ]


def _functions(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


if __name__ == "__main__":
    sys.exit(main())
