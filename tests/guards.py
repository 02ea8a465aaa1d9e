"""Break a guarded line of the source and check that the test named for it fails.

A guarded line carries a comment, `# guard: name` (`-- guard: name` in SQL), on its first line or
on the line above it. Each row of guards.toml says what the statement becomes and which test must
notice. The comment moves with the code, so a row stays valid when the code around it changes.

A guard holds only if its test passes on an unchanged copy of the tree and fails on the broken
copy. A test that is skipped, cannot be collected, raises in a fixture or hangs proves nothing.
"""

import argparse
import ast
import builtins
import collections
import contextlib
import io
import os
import random
import re
import shutil
import signal
import subprocess
import symtable
import sys
import tempfile
import textwrap
import tokenize
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "guards.toml"
SOURCE = Path("src/stenolog")
PROMISES = {*(f"P{number}" for number in range(1, 14)), "security"}

# Everything that the tests may read.
COPIED = ["src", "tests", "docs", "bench", "scripts", "README.md", "CHANGELOG.md", "pyproject.toml"]

# Code that cannot run at all fails every test, so the failure proves nothing.
NOT_A_BREAKAGE = (
    "ImportError",
    "IndentationError",
    "ModuleNotFoundError",
    "NameError",
    "SyntaxError",
    "UnboundLocalError",
)

# A pytest plugin: refuse to run if an installed stenolog hides the broken copy.
PLUGIN = """
from pathlib import Path

import pytest

import stenolog


def pytest_configure(config):
    found = Path(stenolog.__file__).resolve()
    if not found.is_relative_to(Path(__file__).resolve().parent / "src"):
        raise pytest.UsageError(f"stenolog was imported from {found}, not from the broken copy")
"""

_COMMENT = re.compile(r"(?:#|--) guard: ([a-z0-9-]+(?:, [a-z0-9-]+)*)[ \t]*$", re.MULTILINE)


class Outcome(Enum):
    """How the run of one test ended: the verb after "the test"."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "was skipped"
    HUNG = "hung"
    UNUSABLE = "could not be run"


class Verdict(Enum):
    """The result of one guard."""

    HELD = "held"
    SURVIVED = "SURVIVED"
    INVALID = "INVALID"
    NOT_RUN = "NOT RUN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """One row of the table.

    `replace` takes the place of the guarded statement (of the header, for a compound statement),
    or only of `part`, a text that occurs once in it.
    """

    name: str
    promise: str
    why: str
    replace: str
    test: str
    part: str | None = None


@dataclass(frozen=True, slots=True)
class Anchor:
    """The first and last line of a guarded statement, counted from 1."""

    path: Path
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How one test ended, and its message."""

    outcome: Outcome
    message: str


class InvalidRowError(Exception):
    """A row that cannot be applied to the code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        rows = read_table(TABLE)
        if options.check:
            return _check(rows)
        chosen = _choose(rows, only=options.only, sample=options.sample, seed=options.seed)
    except InvalidRowError as error:
        print(f"guards: {error}", file=sys.stderr)
        return 2
    return _run_all(chosen, jobs=options.jobs, limit=options.limit)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="guards", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="this guard; repeatable")
    parser.add_argument("--sample", type=int, metavar="N", help="N guards drawn at random")
    parser.add_argument("--seed", type=int, help="seed of --sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="tests at once")
    parser.add_argument("--limit", type=float, default=900, help="seconds per test")
    parser.add_argument(
        "--check", action="store_true", help="only check that the table fits the code"
    )
    return parser


def read_table(path: Path) -> list[Guard]:
    """Return the rows of a table. Raises InvalidRowError for an incomplete or repeated row."""
    rows = []
    for number, fields in enumerate(tomllib.loads(path.read_text()).get("guard", []), 1):
        try:
            rows.append(Guard(**fields))
        except TypeError as error:
            raise InvalidRowError(f"{path.name}, row {number}: {error}") from error
    for name, times in collections.Counter(row.name for row in rows).items():
        if times > 1:
            raise InvalidRowError(f"{path.name}: {times} rows are named {name!r}")
    return rows


def problems(rows: Sequence[Guard], root: Path = ROOT) -> list[str]:
    """Return what is wrong with the table: rows, comments and tests that do not fit together."""
    guarded, found = anchors(root)
    for row in rows:
        if row.promise not in PROMISES:
            found.append(f"{row.name}: the promise is P1 to P13 or security, not {row.promise!r}")
        if not _test_exists(root, row.test):
            found.append(f"{row.name}: there is no test {row.test}")
        try:
            broken(row, guarded)
        except InvalidRowError as error:
            found.append(f"{row.name}: {error}")
    found += [
        f"{guarded[name].path.relative_to(root)}:{guarded[name].first}: "
        f"the comment `guard: {name}` has no row in {TABLE.name}"
        for name in sorted(guarded.keys() - {row.name for row in rows})
    ]
    missing = PROMISES - {row.promise for row in rows}
    return found + [f"no guard for {promise}" for promise in sorted(missing)]


def _check(rows: Sequence[Guard]) -> int:
    found = problems(rows)
    for problem in found:
        print(problem)
    counts = collections.Counter(row.promise for row in rows)
    listed = ", ".join(f"{name} {counts[name]}" for name in sorted(counts, key=_promise_order))
    print(f"{len(rows)} guards: {listed}")
    return 1 if found else 0


def _promise_order(name: str) -> int:
    return int(name[1:]) if name != "security" else 99


def _test_exists(root: Path, test: str) -> bool:
    """Return whether the file of a test, or the store contract, defines its function."""
    file, *names = test.split("::")
    path = root / file
    if not path.is_file() or not names:
        return False
    function = names[-1].partition("[")[0]
    places = [path, *(root / "tests" / "support" / "contract").glob("*.py")]
    return any(f"def {function}(" in _text(place) for place in places)


@cache
def _text(path: Path) -> str:
    return path.read_text()


def anchors(root: Path) -> tuple[dict[str, Anchor], list[str]]:
    """Return the guarded statements by name, and a problem for each name used twice."""
    found: dict[str, Anchor] = {}
    twice = []
    for path in sorted((root / SOURCE).rglob("*")):
        if path.suffix not in (".py", ".sql") or " guard: " not in path.read_text():
            continue
        for name, first, last in _guarded(path):
            if name in found:
                place = found[name].path.relative_to(root)
                twice.append(f"{name}: in {path.relative_to(root)} and in {place}")
            found[name] = Anchor(path, first, last)
    return found, twice


def _guarded(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the name, first and last line of each guarded statement of a file."""
    text = path.read_text()
    statements = _statements(text) if path.suffix == ".py" else None
    for number, line in enumerate(text.splitlines(), 1):
        comment = _COMMENT.search(line)
        if comment is None:
            continue
        alone = not line[: comment.start()].strip()
        first, last = number + alone, number + alone
        if statements is not None:
            # A comment alone may be followed by further comments.
            first, last = next(span for span in statements if span[1] >= number)
        for name in comment[1].split(", "):
            yield name, first, last


def _statements(text: str) -> list[tuple[int, int]]:
    """Return the first and last line of each logical line of Python code, in order."""
    found = []
    first = None
    skipped = (tokenize.INDENT, tokenize.DEDENT, tokenize.NL, tokenize.COMMENT)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in skipped:
            continue
        first = token.start[0] if first is None else first
        if token.type == tokenize.NEWLINE:
            found.append((first, token.start[0]))
            first = None
    return found


def broken(row: Guard, guarded: dict[str, Anchor]) -> tuple[Path, str]:
    """Return the file of a guard and its text with the guarded statement replaced."""
    anchor = guarded.get(row.name)
    if anchor is None:
        raise InvalidRowError(f"no line below {SOURCE} has the comment `guard: {row.name}`")
    text = anchor.path.read_text()
    lines = text.splitlines(keepends=True)
    before, after = lines[: anchor.first - 1], lines[anchor.last :]
    statement = _COMMENT.sub("", "".join(lines[anchor.first - 1 : anchor.last]))
    if row.part is None:
        indent = statement[: len(statement) - len(statement.lstrip())]
        changed = textwrap.indent(row.replace, indent) + "\n"
    else:
        times = statement.count(row.part)
        if times != 1:
            raise InvalidRowError(f"the part occurs {times} times in the statement, not once")
        changed = statement.replace(row.part, row.replace)
    result = "".join([*before, changed, *after])
    if anchor.path.suffix == ".py":
        _check_code(text, result)
    elif changed.split() == statement.split():
        raise InvalidRowError("the replacement changes nothing")
    return anchor.path, result


def _check_code(text: str, broken: str) -> None:
    try:
        changed = ast.dump(ast.parse(broken))
    except SyntaxError as error:
        raise InvalidRowError(f"the broken code is not Python: {error}") from error
    if changed == _parsed(text):
        raise InvalidRowError("the replacement changes nothing")
    # After a rename, a NameError or AttributeError would fail the test and prove nothing.
    unknown = {
        name
        for name in _identifiers(broken) - _identifiers(text)
        if name[0] == "_" or (name[0].isupper() and not hasattr(builtins, name))
    }
    unknown |= _undefined_names(broken) - _undefined_names(text)
    if unknown:
        raise InvalidRowError(f"the file has no {', '.join(sorted(unknown))}")


@cache
def _identifiers(text: str) -> set[str]:
    """Return the names and attributes that a module uses or defines."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(name=name):
                found.add(name)
    return found


@cache
def _undefined_names(text: str) -> set[str]:
    """Return the names that functions use but neither they nor their module define."""
    module = symtable.symtable(text, "", "exec")
    defined = {symbol.get_name() for symbol in module.get_symbols() if not symbol.is_global()}
    defined |= {
        symbol.get_name()
        for symbol in module.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }
    undefined, tables = set(), [module]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        undefined |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_global() and symbol.get_name() not in defined
        }
    return {name for name in undefined if not hasattr(builtins, name)}


@cache
def _parsed(text: str) -> str:
    return ast.dump(ast.parse(text))


def _choose(
    rows: list[Guard], *, only: list[str] | None, sample: int | None, seed: int | None
) -> list[Guard]:
    if only is not None:
        unknown = set(only) - {row.name for row in rows}
        if unknown:
            raise InvalidRowError(f"no guard is named {', '.join(sorted(unknown))}")
        rows = [row for row in rows if row.name in only]
    if sample is not None:
        seed = random.randrange(10**6) if seed is None else seed
        sample = min(sample, len(rows))
        print(f"{sample} of {len(rows)} guards, seed {seed}")
        rows = random.Random(seed).sample(rows, sample)
    return rows


def _run_all(rows: list[Guard], *, jobs: int, limit: float) -> int:
    tests = sorted({row.test for row in rows})
    width = max((len(row.name) for row in rows), default=0)
    verdicts: collections.Counter[Verdict] = collections.Counter()
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        unbroken = dict(
            zip(tests, pool.map(lambda test: _run(test, None, limit), tests), strict=True)
        )

        def judge(row: Guard) -> tuple[Verdict, str]:
            return _judge(row, unbroken[row.test], limit)

        for row, (verdict, message) in zip(rows, pool.map(judge, rows), strict=True):
            verdicts[verdict] += 1
            print(f"{verdict.value:8}  {row.name:{width}}  {row.test}", flush=True)
            print(f"{'':8}  {'':{width}}  {message}", flush=True)
    print(", ".join(f"{verdicts[verdict]} {verdict.value}" for verdict in Verdict))
    return 1 if verdicts[Verdict.SURVIVED] or verdicts[Verdict.INVALID] else 0


def _judge(row: Guard, unbroken: Run, limit: float) -> tuple[Verdict, str]:
    if unbroken.outcome is Outcome.SKIPPED:
        return Verdict.NOT_RUN, unbroken.message
    if unbroken.outcome is not Outcome.PASSED:
        return Verdict.INVALID, f"unbroken, the test {unbroken.outcome.value}: {unbroken.message}"
    try:
        run = _run(row.test, row, limit)
    except InvalidRowError as error:
        return Verdict.INVALID, str(error)
    if run.outcome is not Outcome.FAILED:
        return Verdict.SURVIVED, f"the test {run.outcome.value}: {run.message}"
    if run.message.startswith(NOT_A_BREAKAGE):
        return Verdict.INVALID, f"the broken code does not run at all: {run.message}"
    return Verdict.HELD, run.message


def _run(test: str, row: Guard | None, limit: float) -> Run:
    """Run one test on a copy of the tree, broken by `row` if given."""
    with tempfile.TemporaryDirectory(prefix="steno-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder)
        _copy(tree)
        if row is not None:
            path, text = broken(row, anchors(tree)[0])
            path.write_text(text)
        (tree / "guard_plugin.py").write_text(PLUGIN)
        report = tree / "report.xml"
        # --timeout=0: a hanging test must not be mistaken for a failed one.
        options = ["-p", "guard_plugin", "-p", "no:cacheprovider", "-q", "-x", "--timeout=0"]
        command = [sys.executable, "-m", "pytest", *options, f"--junit-xml={report}", test]
        # A file: a pipe would stay open as long as any child process of the test runs.
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
            return Run(outcome=Outcome.HUNG, message=f"no end after {limit:g} s")
        finally:
            # The test runs in its own session: this ends its child processes as well.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return _read_report(report, code, output.read_text(errors="replace"))


def _copy(tree: Path) -> None:
    # No compiled files: Python would run one that is newer than the broken source.
    unwanted = shutil.ignore_patterns("__pycache__", "*.pyc", ".hypothesis")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=unwanted, symlinks=True)
        elif source.exists():
            shutil.copy2(source, tree / name)


def _environment(tree: Path) -> dict[str, str]:
    # PYTHONPATH precedes the installed package, also in child processes of a test.
    search = os.pathsep.join([str(tree / "src"), str(tree)])
    # The temporary files of a killed test are deleted together with the copy.
    temporary = tree / "t"
    temporary.mkdir()
    return {
        **os.environ,
        "PYTHONPATH": search,
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(temporary),
    }


def _read_report(report: Path, code: int, output: str) -> Run:
    if code not in (0, 1) or not report.exists():
        return Run(outcome=Outcome.UNUSABLE, message=f"pytest ended with {code}: {_tail(output)}")
    suite = ET.parse(report).getroot().find("testsuite")
    assert suite is not None, "pytest always writes one"
    for found, outcome in (
        ("error", Outcome.UNUSABLE),
        ("failure", Outcome.FAILED),
        ("skipped", Outcome.SKIPPED),
    ):
        element = suite.find(f"testcase/{found}")
        if element is not None:
            message = " ".join(element.get("message", "").split())
            return Run(outcome=outcome, message=message[:160])
    count = int(suite.get("tests", "0"))
    if count == 0:
        return Run(outcome=Outcome.UNUSABLE, message="no test ran")
    return Run(outcome=Outcome.PASSED, message=f"{count} passed")


def _tail(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return " / ".join(lines[-3:])[:200]


if __name__ == "__main__":
    sys.exit(main())
