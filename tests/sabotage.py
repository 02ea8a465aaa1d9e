"""Breaks our own code, one line at a time, and sees whether the test that should notice does.

Each row of sabotage.toml is applied to a copy of the tree, and the test it names is run against
that copy. A breakage counts as caught only if that very test ran and failed: a test that was
skipped, could not be collected, errored in a fixture or hung has noticed nothing. Each named test
is first run on an unbroken copy, because a test that fails anyway proves nothing either.
"""

import argparse
import ast
import collections
import contextlib
import difflib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "sabotage.toml"
PAGE = ROOT / "docs" / "contract.md"
BEGIN = "<!-- begin sabotage: written by tests/sabotage.py -->"
END = "<!-- end sabotage -->"

# The tests run in the copy as they would in the tree, so it holds all that they may read.
COPIED = ["src", "tests", "docs", "bench", "scripts", "README.md", "CHANGELOG.md", "pyproject.toml"]

# A row that leaves code which cannot run at all is noticed by any test, and so proves nothing.
NOT_A_BREAKAGE = (
    "ImportError",
    "IndentationError",
    "ModuleNotFoundError",
    "NameError",
    "SyntaxError",
    "UnboundLocalError",
)

# Loaded into pytest: an installed stenolog that hides the broken copy would let it survive.
GUARD = """
from pathlib import Path

import pytest

import stenolog


def pytest_configure(config):
    found = Path(stenolog.__file__).resolve()
    if not found.is_relative_to(Path(__file__).resolve().parent / "src"):
        raise pytest.UsageError(f"stenolog was imported from {found}, not from the broken copy")
"""


class Outcome(Enum):
    """How the run of one test ended: the verb after "the test"."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "was skipped"
    HUNG = "hung"
    UNUSABLE = "could not be run"


class Verdict(Enum):
    """What a breakage came to."""

    CAUGHT = "caught"
    SURVIVED = "SURVIVED"
    INVALID = "INVALID"
    NOT_RUN = "NOT RUN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakage:
    """One row of the table: find, which stands exactly once in file, becomes replace."""

    name: str
    why: str
    file: str
    find: str
    replace: str
    test: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How one test ended, and the words it ended with."""

    outcome: Outcome
    words: str


class InvalidRowError(Exception):
    """A row cannot be applied as it stands."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for and give back the exit code."""
    options = _parser().parse_args(arguments)
    try:
        rows = read_table(TABLE)
        if options.write_docs or options.check_docs:
            return _docs(rows, write=options.write_docs)
        chosen = _choose(rows, only=options.only, sample=options.sample, seed=options.seed)
    except InvalidRowError as error:
        print(f"sabotage: {error}", file=sys.stderr)
        return 2
    return _sabotage(chosen, jobs=options.jobs, limit=options.limit)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sabotage", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="this row; repeatable")
    parser.add_argument("--sample", type=int, metavar="K", help="K rows drawn at random")
    parser.add_argument("--seed", type=int, help="draw the same sample again")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="tests at once")
    parser.add_argument("--limit", type=float, default=180, help="seconds per test")
    parser.add_argument("--write-docs", action="store_true", help="renew the table in the docs")
    parser.add_argument("--check-docs", action="store_true", help="fail if that table is stale")
    return parser


def read_table(path: Path) -> list[Breakage]:
    """The rows of a table. Raises InvalidRowError when one is not complete or not unique."""
    rows = []
    for number, fields in enumerate(tomllib.loads(path.read_text()).get("breakage", []), 1):
        try:
            rows.append(Breakage(**fields))
        except TypeError as error:
            raise InvalidRowError(f"{path.name}, row {number}: {error}") from error
    for name, times in collections.Counter(row.name for row in rows).items():
        if times > 1:
            raise InvalidRowError(f"{path.name}: {times} rows are called {name!r}")
    return rows


def _choose(
    rows: list[Breakage], *, only: list[str] | None, sample: int | None, seed: int | None
) -> list[Breakage]:
    if only is not None:
        unknown = set(only) - {row.name for row in rows}
        if unknown:
            raise InvalidRowError(f"no row is called {', '.join(sorted(unknown))}")
        rows = [row for row in rows if row.name in only]
    if sample is not None:
        seed = random.randrange(10**6) if seed is None else seed
        sample = min(sample, len(rows))
        print(f"{sample} of {len(rows)} rows, seed {seed}")
        rows = random.Random(seed).sample(rows, sample)
    return rows


def _sabotage(rows: list[Breakage], *, jobs: int, limit: float) -> int:
    tests = sorted({row.test for row in rows})
    width = max((len(row.name) for row in rows), default=0)
    verdicts: collections.Counter[Verdict] = collections.Counter()
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        unbroken = dict(
            zip(tests, pool.map(lambda test: _run(test, None, limit), tests), strict=True)
        )

        def judge(row: Breakage) -> tuple[Verdict, str]:
            return _judge(row, unbroken[row.test], limit)

        for row, (verdict, words) in zip(rows, pool.map(judge, rows), strict=True):
            verdicts[verdict] += 1
            print(f"{verdict.value:8}  {row.name:{width}}  {row.test}", flush=True)
            print(f"{'':8}  {'':{width}}  {words}", flush=True)
    print(", ".join(f"{verdicts[verdict]} {verdict.value}" for verdict in Verdict))
    return 1 if verdicts[Verdict.SURVIVED] or verdicts[Verdict.INVALID] else 0


def _judge(row: Breakage, unbroken: Run, limit: float) -> tuple[Verdict, str]:
    if unbroken.outcome is Outcome.SKIPPED:
        return Verdict.NOT_RUN, unbroken.words
    if unbroken.outcome is not Outcome.PASSED:
        return Verdict.INVALID, f"unbroken, the test {unbroken.outcome.value}: {unbroken.words}"
    try:
        broken = _run(row.test, row, limit)
    except InvalidRowError as error:
        return Verdict.INVALID, str(error)
    if broken.outcome is not Outcome.FAILED:
        return Verdict.SURVIVED, f"the test {broken.outcome.value}: {broken.words}"
    if broken.words.startswith(NOT_A_BREAKAGE):
        return Verdict.INVALID, f"the broken code does not run at all: {broken.words}"
    return Verdict.CAUGHT, broken.words


def apply(row: Breakage, tree: Path) -> None:
    """Break the copy in tree. Raises InvalidRowError when the row does not fit the code."""
    path = tree / row.file
    if not path.is_file():
        raise InvalidRowError(f"there is no {row.file}")
    code = path.read_text()
    times = code.count(row.find)
    if times != 1:
        raise InvalidRowError(f"what to find stands {times} times in {row.file}, not once")
    broken = code.replace(row.find, row.replace)
    if path.suffix == ".py":
        _check_code(row, code, broken)
    path.write_text(broken)


def _check_code(row: Breakage, code: str, broken: str) -> None:
    try:
        before, after = _shape(code), ast.dump(ast.parse(broken))
    except SyntaxError as error:
        raise InvalidRowError(f"the broken {row.file} is not Python: {error}") from error
    if before == after:
        raise InvalidRowError("the breakage changes no code")


@cache
def _shape(code: str) -> str:
    """What a file says to Python, which many rows ask of the same one."""
    return ast.dump(ast.parse(code))


def _run(test: str, row: Breakage | None, limit: float) -> Run:
    """Run one test on a copy of the tree, broken by row if there is one."""
    with tempfile.TemporaryDirectory(prefix="steno-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder)
        _copy(tree)
        if row is not None:
            apply(row, tree)
        (tree / "sabotage_guard.py").write_text(GUARD)
        report = tree / "report.xml"
        # --timeout=0: hanging is for us to see, so that it is not mistaken for a failed test.
        options = ["-p", "sabotage_guard", "-p", "no:cacheprovider", "-q", "-x", "--timeout=0"]
        command = [sys.executable, "-m", "pytest", *options, f"--junit-xml={report}", test]
        # A file, because a pipe would stay open for as long as any child of the test lives.
        output = tree / "output.txt"
        with output.open("wb") as opened:
            child = subprocess.Popen(
                command,
                cwd=tree,
                env=_environment(tree),
                stdin=subprocess.DEVNULL,
                stdout=opened,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            code = child.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return Run(outcome=Outcome.HUNG, words=f"no end after {limit:g} s")
        finally:
            # Its own session, so that children which the test left behind end as well.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return _read_report(report, code, output.read_text(errors="replace"))


def _copy(tree: Path) -> None:
    # Compiled files are left out: one that is newer than the breakage would be run in its place.
    unwanted = shutil.ignore_patterns("__pycache__", "*.pyc", ".hypothesis")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=unwanted, symlinks=True)
        elif source.exists():
            shutil.copy2(source, tree / name)


def _environment(tree: Path) -> dict[str, str]:
    # PYTHONPATH comes before the installed package, also in the children that a test starts.
    search = os.pathsep.join([str(tree / "src"), str(tree)])
    # What a test that had to be killed leaves behind goes with the copy.
    leavings = tree / "t"
    leavings.mkdir()
    return {
        **os.environ,
        "PYTHONPATH": search,
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(leavings),
    }


def _read_report(report: Path, code: int, output: str) -> Run:
    if code not in (0, 1) or not report.exists():
        return Run(outcome=Outcome.UNUSABLE, words=f"pytest ended with {code}: {_tail(output)}")
    suite = ET.parse(report).getroot().find("testsuite")
    assert suite is not None, "pytest always writes one"
    for found, outcome in (
        ("error", Outcome.UNUSABLE),
        ("failure", Outcome.FAILED),
        ("skipped", Outcome.SKIPPED),
    ):
        element = suite.find(f"testcase/{found}")
        if element is not None:
            words = " ".join(element.get("message", "").split())
            return Run(outcome=outcome, words=words[:160])
    count = int(suite.get("tests", "0"))
    if count == 0:
        return Run(outcome=Outcome.UNUSABLE, words="no test ran")
    return Run(outcome=Outcome.PASSED, words=f"{count} passed")


def _tail(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return " / ".join(lines[-3:])[:200]


def _docs(rows: list[Breakage], *, write: bool) -> int:
    if not PAGE.exists():
        raise InvalidRowError(f"there is no docs/{PAGE.name} to hold the table")
    page = PAGE.read_text()
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise InvalidRowError(f"docs/{PAGE.name} needs these two lines once: {BEGIN} and {END}")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = f"{before}{BEGIN}\n{_markdown(rows)}{END}{after}"
    if wanted == page:
        return 0
    if write:
        PAGE.write_text(wanted)
        return 0
    changed = difflib.unified_diff(
        page.splitlines(), wanted.splitlines(), "is", "should be", n=0, lineterm=""
    )
    print("\n".join(changed))
    print(f"The table in docs/{PAGE.name} is stale: run make fix.")
    return 1


def _markdown(rows: list[Breakage]) -> str:
    def cell(text: str) -> str:
        return " ".join(text.split()).replace("|", "\\|")

    lines = ["| breakage | what it would cost | the test that fails |", "|---|---|---|"]
    lines += [f"| {cell(row.name)} | {cell(row.why)} | `{cell(row.test)}` |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
