"""Isolates every run from the user's files and keys, and lists skipped tests at the end."""

import argparse
import asyncio
import fnmatch
import gc
import inspect
import itertools
import logging
import os
import random
import re
import shutil
import signal
import tempfile
import tomllib
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from support import needs, temporary_folders
from support.pgbouncer import Bouncer
from support.postgres_server import Databases, Installation, Places, Server, Unavailable

# Before test modules import them, so that failed assertions show values.
pytest.register_assert_rewrite("support.cli", "support.contract")

_SECRET = re.compile(r"_(API_?KEY|TOKEN|SECRET|SECRET_KEY|PASSWORD)$", re.IGNORECASE)
_USER_FOLDERS = {
    "HOME": "home",
    "TMPDIR": "t",
    "XDG_CACHE_HOME": "home/.cache",
    "XDG_CONFIG_HOME": "home/.config",
    "XDG_DATA_HOME": "home/.local/share",
    "XDG_RUNTIME_DIR": "run",
    "XDG_STATE_HOME": "home/.local/state",
}

_GIVEN_SERVER = "STENO_TEST_POSTGRES"
"""URL of an additional PostgreSQL server, with a user who may create databases."""

_own_folder = pytest.StashKey[Path]()

# The duration of an example depends on the machine, so there is no deadline. `make test` runs the
# same examples every time, `make test-all` runs new ones with --hypothesis-profile=random.
_random = settings(deadline=None, print_blob=True)
settings.register_profile("random", _random)
settings.register_profile("quick", _random, derandomize=True, max_examples=20)
settings.load_profile("quick")


def pytest_configure(config: pytest.Config) -> None:
    """Give this run its own home, temporary folder and environment."""
    # A shell starts background jobs with SIGINT ignored, and child processes inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    own = temporary_folders.new_folder_of_run()
    config.stash[_own_folder] = own
    for variable, name in _USER_FOLDERS.items():
        folder = own / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ[variable] = str(folder)
    tempfile.tempdir = None
    for variable in [name for name in os.environ if _SECRET.search(name)]:
        del os.environ[variable]
    # Debian leaves these out for users other than root, but tools such as mkfs are there.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function, in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the run's folder."""
    own = config.stash.get(_own_folder, None)
    if own is not None:
        shutil.rmtree(own, ignore_errors=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """Print the tests that were NOT RUN, after pytest's own output."""
    result = yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        for line in _not_run(reporter.stats.get("skipped", [])):
            reporter.write_line(line)
    return result


def _not_run(skipped: Iterable[pytest.TestReport | pytest.CollectReport]) -> Iterable[str]:
    tests: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for report in skipped:
        # (file, line, reason) for a skip; other shapes are from xfail, which did run.
        if isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if not reason.startswith("NOT RUN"):
                reason = f"NOT RUN: {reason}"
            tests[reason][report.nodeid.partition("[")[0]] += 1
    for reason in sorted(tests):
        yield reason
        for test, times in sorted(tests[reason].items()):
            yield f"    {test}" + (f" ({times} times)" if times > 1 else "")


# --- tests that only `make test-all` runs --------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--part`, which runs a part of the selected tests."""
    parser.addoption(
        "--part", type=_parse_part, metavar="K/N", help="run only part K of N of the selected tests"
    )


def _parse_part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 1 to N, such as 3/10")
    return int(part), int(parts)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Mark slow tests before `-m` selects tests; then select those of `--part`."""
    _mark_slow(config, items)
    _mark_cases_slow(items)
    yield
    if config.option.part is not None:
        part, parts = config.option.part
        # Every n-th test, since neighbours take about the same time.
        selected = items[part - 1 :: parts]
        config.hook.pytest_deselected(items=list(set(items) - set(selected)))
        items[:] = selected


def _mark_slow(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests in slow.toml; a row that matches no test is an error."""
    whole_suite = [Path(argument).name for argument in config.args] == ["tests"]
    tests: defaultdict[str, list[tuple[str, pytest.Item]]] = defaultdict(list)
    for item in items:
        # The text between the brackets: the parameters of the test.
        name, _, parameters = item.nodeid.partition("[")
        tests[name].append((parameters[:-1], item))
    for row in tomllib.loads((Path(__file__).parent / "slow.toml").read_text())["slow"]:
        named = fnmatch.filter(tests, row["tests"])
        for parameters, item in itertools.chain.from_iterable(map(tests.__getitem__, named)):
            test = item.nodeid.partition("[")[0].rpartition("::")[2]
            if not any(
                fnmatch.fnmatchcase(test if kept.startswith("test_") else parameters, kept)
                for kept in row.get("keep", [])
            ):
                item.add_marker(pytest.mark.slow)
        if not named and whole_suite:
            raise pytest.UsageError(f"slow.toml: no test is named {row['tests']}")


def _mark_cases_slow(items: list[pytest.Item]) -> None:
    """Mark the cases of tests that have the marker `quick(count)`, except a sample of `count`."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("quick") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, table in cases.items():
        marker = table[0].get_closest_marker("quick")
        assert marker is not None
        (count,) = marker.args
        # The same sample in every run and process.
        kept = random.Random(name).sample(range(len(table)), min(count, len(table)))
        for index, item in enumerate(table):
            if index not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _logger_restored() -> Iterator[None]:
    """Undo changes of a test to the logger: `steno serve` adds a handler and lowers the level."""
    logger = logging.getLogger("stenolog")
    before = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.setLevel(before[0])
    logger.propagate = before[1]
    logger.handlers[:] = before[2]


def pytest_collection_finish() -> None:
    """Exclude the thousands of collected tests from garbage collection.

    Many tests call gc.collect(), which would traverse all of them each time.
    """
    gc.collect()
    gc.freeze()


# --- PostgreSQL ---------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def postgres_installation() -> Iterator[Installation]:
    """Yield the programs of PostgreSQL and a folder for servers, which all end with the run."""
    try:
        installation = Installation()
    except Unavailable as error:
        needs.lacking(str(error))
    with installation:
        yield installation


@pytest.fixture(scope="session")
def postgres(postgres_installation: Installation) -> Server:
    """Start the server of this run, which no test stops."""
    try:
        return postgres_installation.server().start()
    except Unavailable as error:
        needs.lacking(str(error))


@pytest.fixture(scope="session")
def own_databases(postgres: Server) -> Iterator[Databases]:
    """Yield new databases on the server of this run."""
    databases = Databases(postgres.url())
    yield databases
    databases.close()


@pytest.fixture(
    scope="session", params=["own", *(["given"] if os.environ.get(_GIVEN_SERVER) else [])]
)
def postgres_databases(request: pytest.FixtureRequest) -> Iterator[Databases]:
    """Yield databases on the server of this run, then on the server that the environment names."""
    if request.param == "own":
        yield request.getfixturevalue("own_databases")
        return
    databases = Databases(os.environ[_GIVEN_SERVER])
    yield databases
    databases.close()


@pytest.fixture
def postgres_places(postgres_databases: Databases) -> Iterator[Places]:
    """Yield a new, empty database for each requested folder."""
    places = Places(postgres_databases)
    yield places
    places.close()


@pytest.fixture
def postgres_url(postgres_places: Places) -> str:
    """Return the URL of a new, empty database."""
    return postgres_places.new()


@pytest.fixture
def own_url(own_databases: Databases) -> Iterator[str]:
    """Yield a new, empty database on the server of this run, for proxies and PgBouncer."""
    url = own_databases.new()
    yield url
    own_databases.leave(url)


@pytest.fixture(scope="session")
def bouncer(postgres_installation: Installation, postgres: Server) -> Bouncer:
    """Run PgBouncer in transaction mode in front of the server of this run."""
    needs.tool("pgbouncer")
    return Bouncer(postgres_installation, postgres)
