"""The code of an older commit and the current code take turns on one workspace.

Both processes have the store open the whole time. After each turn both must see the same; the older
code may refuse what the current code wrote, but only with NewerFormat.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from support import needs
from support.postgres_server import Databases

ROOT = Path(__file__).resolve().parent.parent.parent
COMMIT = "8f2bf62"

pytestmark = pytest.mark.slow


class Worker:
    """A process that makes calls on the store with one version of the code."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.code = self._answer()

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Make one call; an error is a dict with its name."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, arguments, options]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the worker ended with {self._process.wait()}"
        return json.loads(line)


@contextmanager
def _working(source: Path, place: str) -> Iterator[Worker]:
    with subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "support" / "version_worker.py"), place],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(source)},
    ) as process:
        try:
            worker = Worker(process)
            assert Path(worker.code).is_relative_to(source)
            yield worker
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait() == 0
        finally:
            process.kill()


@pytest.fixture(scope="session")
def old_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source of the older commit, from the history of this clone."""
    needs.tool("git")
    # safe.directory: a clone may belong to another user.
    packed = subprocess.run(
        ["git", "-c", "safe.directory=*", "archive", COMMIT, "src"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if packed.returncode != 0:
        pytest.skip(f"NOT RUN: the history of this clone does not have commit {COMMIT}")
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


@pytest.fixture(params=["jsonl", "sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty workspace on each engine."""
    if request.param == "postgres":
        databases: Databases = request.getfixturevalue("own_databases")
        url = databases.new()
        yield url
        databases.leave(url)
    else:
        yield str(tmp_path / "w") if request.param == "jsonl" else f"sqlite:{tmp_path}/steno.db"


@pytest.fixture
def workers(old_source: Path, place: str) -> Iterator[tuple[Worker, Worker]]:
    """The older code, which makes the workspace, and the current code."""
    with ExitStack() as stack:
        old = stack.enter_context(_working(old_source, place))
        new = stack.enter_context(_working(ROOT / "src", place))
        assert old.call("open") is None
        yield old, new


def test_p13_both_versions_read_messages_of_the_other(workers: tuple[Worker, Worker]) -> None:
    old, new = workers
    _write(old, "old")
    before = old.call("picture")
    assert new.call("open") is None
    assert new.call("picture") == before
    for turn, writer in enumerate([new, old, new, old]):
        if writer is old and _refuses(old):
            return
        _change(writer, turn)
        seen = new.call("picture")
        assert "error" not in seen
        assert _refuses(old) or old.call("picture") == seen


def test_p13_idempotency_keys_of_one_version_are_known_to_the_other(
    workers: tuple[Worker, Worker],
) -> None:
    old, new = workers
    first = old.call("add_message", "shared", "user", "apple", once="token-1")
    assert new.call("open") is None
    assert new.call("add_message", "shared", "user", "apple", once="token-1") == first
    second = new.call("add_message", "shared", "user", "pear", once="token-2")
    assert second == first + 1
    again = old.call("add_message", "shared", "user", "pear", once="token-2")
    assert again == second or again["error"] == "NewerFormat"


def test_p13_lease_of_one_version_blocks_the_other(workers: tuple[Worker, Worker]) -> None:
    old, new = workers
    old.call("add_message", "shared", "user", "apple")
    assert new.call("open") is None
    epoch = 0
    for holder, other in [(old, new), (new, old), (old, new)]:
        if _refuses(old):
            return
        taken = holder.call("lease", "shared", ttl=60, wait=0)
        assert taken > epoch
        epoch = taken
        assert other.call("lease", "shared", ttl=60, wait=0)["error"] == "StoreBusy"
        assert isinstance(holder.call("add_with_lease", "shared", "user", "apple"), int)
        assert holder.call("release", "shared") is None
    assert old.call("picture") == new.call("picture")


def _refuses(old: Worker) -> bool:
    """Return whether the older code refuses the workspace, which only NewerFormat may say."""
    seen = old.call("list_sessions")
    if isinstance(seen, dict):
        assert seen["error"] == "NewerFormat", seen
        return True
    return False


def _write(worker: Worker, name: str) -> None:
    """Make sessions with every kind of record."""
    for key in ("shared", f"{name}-away", f"{name}-short"):
        _good(worker, "add_message", key, "user", f"an apple from {name}", once=f"{name}-{key}-1")
        batch = [{"role": "assistant", "content": f"{n} apples"} for n in range(6)]
        _good(worker, "add_messages", key, batch, once=f"{name}-{key}-2")
    _good(worker, "set_meta", "shared", title="Apples", tags=["fruit"])
    _good(worker, "checkpoint", "shared", summary="about apples", upto=2)
    _good(worker, "hide", "shared", 4, 4)
    _good(worker, "fork", "shared", f"{name}-fork")
    _good(worker, "delete", f"{name}-away")
    _good(worker, "truncate_history", f"{name}-short", 2)
    _good(worker, "compact", f"{name}-short")
    _good(worker, "set_summary", f"{name}-short", "a few apples")


def _change(worker: Worker, turn: int) -> None:
    """Change the sessions of the other version: append, hide, undo, restore, fork, archive."""
    _good(worker, "add_message", "shared", "user", f"turn {turn}: one more apple")
    _good(worker, "undo", "shared")
    _good(worker, "clear" if turn % 2 else "pop", "shared")
    _good(worker, "truncate_history", "old-short", 1)
    _good(worker, "undo", "old-short")
    _good(worker, "add_message", "old-short", "user", f"apple {turn}", once=f"turn-{turn}")
    _good(worker, "compact", "shared")
    _good(worker, "fork", "shared", f"fork-{turn}")
    if turn == 0:
        _good(worker, "restore", "old-away")
    else:
        _good(worker, "delete", f"fork-{turn - 1}")
    _good(worker, "set_history", f"set-{turn}", [{"role": "user", "content": "apple pie"}])
    _good(worker, "set_meta", "shared", title=f"Title {turn}")
    _good(worker, "checkpoint", "old-fork", summary=f"summary {turn}", upto=turn + 3)
    if turn > 0:
        _good(worker, "purge", f"set-{turn - 1}")
    if turn < 2:
        _write(worker, f"by-{turn}")


def _good(worker: Worker, name: str, *arguments: Any, **options: Any) -> None:
    result = worker.call(name, *arguments, **options)
    assert not (isinstance(result, dict) and "error" in result), (name, arguments, result)
