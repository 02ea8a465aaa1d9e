"""Keeps every run away from the user's files and keys, and lists last what could not be run."""

import os
import re
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest
from hypothesis import settings

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

_own_folder = pytest.StashKey[Path]()

# How long an example takes says something about the machine, not about the code.
settings.register_profile("stenolog", settings(), deadline=None, print_blob=True)
settings.load_profile("stenolog")


def pytest_configure(config: pytest.Config) -> None:
    """Give this run a home, a temporary folder and an environment of its own."""
    # Short, because a socket's path may have no more than about 100 bytes.
    own = Path(tempfile.mkdtemp(prefix="steno-"))
    config.stash[_own_folder] = own
    for variable, name in _USER_FOLDERS.items():
        folder = own / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ[variable] = str(folder)
    tempfile.tempdir = None
    for variable in [name for name in os.environ if _SECRET.search(name)]:
        del os.environ[variable]
    # Debian leaves these out for users who are not root, and strace's friends live there.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the run's own folder."""
    own = config.stash.get(_own_folder, None)
    if own is not None:
        shutil.rmtree(own, ignore_errors=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """Print what was not run, after everything that pytest itself prints."""
    result = yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        for line in _not_run(reporter.stats.get("skipped", [])):
            reporter.write_line(line)
    return result


def _not_run(skipped: Iterable[pytest.TestReport | pytest.CollectReport]) -> Iterable[str]:
    tests: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for report in skipped:
        # (file, line, reason) for a skip; other shapes belong to xfail, which did run.
        if isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if not reason.startswith("NOT RUN"):
                reason = f"NOT RUN: {reason}"
            tests[reason][report.nodeid.partition("[")[0]] += 1
    for reason in sorted(tests):
        yield reason
        for test, times in sorted(tests[reason].items()):
            yield f"    {test}" + (f" ({times} times)" if times > 1 else "")
