"""Processes that import old sessions or use the fallback store, and are killed at the n-th step.

A small process with everything imported forks one for each run. A step is a call that can change
files. Python's profiler counts the steps, so the code under test is unchanged, and the process is
killed with SIGKILL right before that call.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from stenolog import NotStored
from stenolog.catalog.message_metadata import mark_seen
from stenolog.sessions.folders import locate_sessions
from stenolog.sessions.session_manager import SessionManager
from stenolog.sessions.session_store import SessionStore, fallback_reason
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store
from stenolog.transfer import open_sessions, session_import
from stenolog.transfer.fallback import FallbackStore

TESTS: Final = Path(__file__).resolve().parents[2]

_STEPS: Final = frozenset(
    {
        *("write", "pwrite", "fsync", "fdatasync", "rename", "unlink", "mkdir", "link", "open"),
        *("flock", "ftruncate", "truncate", "fchmod"),
        # SQLite, through its driver.
        *("execute", "executemany"),
    }
)

KEYS: Final = ("telegram:91001", "agent:main:slack:1001", "telegram:1001", "new:1")
"""Sessions of the fallback store: a legacy one, an alias, one without a JSON file, a new one."""


class Runner:
    """Runs programs in forked processes. A context manager."""

    def __init__(self, module: str = "support.crash.migration_worker") -> None:
        """Run the programs of this module, which serves them when it is executed."""
        path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        self._server = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def run(self, program: str, where: str, *, kill_at: int = 0) -> int:
        """Run a program; return its number of steps, or 0 if killed before step `kill_at`."""
        steps = self._ask(program, where, kill_at, "")
        assert isinstance(steps, int), steps
        return steps

    def watch(self, program: str, where: str, folder: Path) -> list[int]:
        """Run a program to its end and return the steps before which the folder had changed.

        A kill at any other step leaves the same files as a kill at the last of these.
        """
        steps = self._ask(program, where, 0, str(folder))
        assert isinstance(steps, list), steps
        return steps

    def _ask(self, *wanted: object) -> object:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(wanted) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.communicate()


# --- server side -----------------------------------------------------------------------------


def start(where: str) -> None:
    """Start as an agent does."""
    sessions = open_sessions.open_sessions(where)
    assert fallback_reason(sessions.store) is None, sessions.health().problems
    sessions.close()


def fail(where: str) -> None:
    """Start with sessions that cannot all be imported, and use the fallback store."""
    open_sessions.open_store = _open_full  # type: ignore[attr-defined]
    sessions = open_sessions.open_sessions(where)
    assert isinstance(sessions.store, FallbackStore)
    _talk(sessions)
    sessions.close()


def write_json(where: str) -> None:
    """Write JSON files, as the fallback store of version 0.1 did."""
    place = locate_sessions(where, None)
    assert place.json_fallback is not None
    old = None if place.old == place.json_fallback else place.old
    _talk(SessionManager(place.json_fallback, reason="a test wants it", old=old))


def _talk(sessions: SessionStore) -> None:
    for key in KEYS:
        seq: int | None = None
        for number in range(3):
            message: dict[str, Any] = {"role": "user", "content": f"said {number}"}
            if seq and number == 2:  # the answer to the message before
                message = mark_seen({**message, "role": "assistant"}, seen=seq, answers=[seq])
            seq = sessions.add_full_message(key, message, once=f"t{number}")
            assert seq, sessions.health()
        sessions.save(key)
    last = len(sessions.get_history("telegram:91001", full=True))
    assert sessions.checkpoint("telegram:91001", summary="by the fallback", upto=last - 1)


def _open_full(where: Any, **options: Any) -> Store:
    """Return a store whose disk is full when it writes one of the sessions."""
    store = open_store(where, **options)
    add = store.add_messages

    def add_messages(key: str, *arguments: Any, **given: Any) -> list[int]:
        if key == "telegram_1001_alice":
            raise NotStored("no space left on device; free some space, then try again")
        return add(key, *arguments, **given)

    store.add_messages = add_messages  # type: ignore[method-assign]
    return store


PROGRAMS: Final[dict[str, Callable[[str], None]]] = {
    "start": start,
    "fail": fail,
    "json": write_json,
}


def _play(program: Callable[[str], None], where: str, kill_at: int, folder: str) -> int | list[int]:
    made = 0
    telling: list[int] = []
    before: object = None

    def count(_frame: object, event: str, called: Any) -> None:
        nonlocal made, before
        if event == "c_call" and getattr(called, "__name__", "") in _STEPS:
            made += 1
            if made == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if folder and (now := _files(folder)) != before:
                telling.append(made)
                before = now

    sys.setprofile(count)
    program(where)
    sys.setprofile(None)
    return telling if folder else made


def _files(folder: str) -> dict[str, tuple[object, ...]]:
    """Return what a kill would leave: every file with its bytes, and every folder."""
    found: dict[str, tuple[object, ...]] = {}
    for path in Path(folder).rglob("*"):
        if path.is_dir():
            found[str(path)] = ()
        # The first process that opens the database creates its log index again.
        elif not path.name.endswith("-shm"):
            about = path.stat()
            found[str(path)] = (about.st_ino, about.st_mode, zlib.crc32(path.read_bytes()))
    return found


def serve(programs: Mapping[str, Callable[[str], None]]) -> None:
    """Run a program in its own process for each requested line."""
    logging.disable()
    for line in sys.stdin:
        wanted = json.loads(line)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(read)
                answer: object = _play(programs[wanted[0]], *wanted[1:])
                code = 0
            except BaseException as error:  # noqa: BLE001 - told, before the child ends here
                sys.setprofile(None)
                answer = repr(error)
            finally:
                os.write(write, json.dumps(answer).encode())
                os._exit(code)
        os.close(write)
        with os.fdopen(read, "rb") as told:
            answer = json.loads(told.read() or "0")
        os.waitpid(pid, 0)
        print(json.dumps(answer), flush=True)


def _warm_up() -> None:
    """Do everything that is imported or read on first use, so that children do not repeat it."""
    import tempfile

    from stenolog.stores.sqlite import SQLiteStore

    with tempfile.TemporaryDirectory() as folder:
        SQLiteStore(Path(folder) / "x.db").close()
        open_sessions.open_sessions(folder).close()


if __name__ == "__main__":
    _warm_up()
    # So that the samples need several batches.
    session_import.BATCH_MESSAGES = 7  # type: ignore[misc]
    serve(PROGRAMS)
