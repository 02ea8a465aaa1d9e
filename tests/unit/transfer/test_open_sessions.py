"""`open_sessions`: opens, takes old sessions in, and uses the fallback where it must."""

import json
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, Final

import pytest

import stenolog
from stenolog.errors import ForeignLog, StoreUnavailable, UsageError
from stenolog.sessions.folders import locate_sessions
from stenolog.sessions.session_manager import SessionManager
from stenolog.sessions.session_store import JSONLBackend
from stenolog.stores.disk import READ_ONLY_DISK
from stenolog.stores.file_names import escape_key
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.jsonl import JSONLStore
from stenolog.stores.jsonl.admin import JSONLAdmin
from stenolog.transfer.fallback import FallbackStore
from stenolog.transfer.open_sessions import open_sessions
from support import needs, temporary_folders

SAMPLES: Final = Path(__file__).parents[2] / "samples"
WHERE: Final = {"jsonl": "{}", "sqlite": "sqlite:{}/steno.db"}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: what is asked here is what is stored, not how safely."""
    with temporary_folders.folder() as path:
        yield path


@pytest.fixture(params=WHERE)
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place; the old sessions are in `sessions` there."""
    return WHERE[request.param].format(tmp_path)


def put(workspace: Path) -> None:
    for layout in ("picoclaw", "picoclaw-legacy", "zeroclaw"):
        shutil.copytree(SAMPLES / layout, workspace / "sessions", dirs_exist_ok=True)


def contents(sessions: stenolog.SessionStore, key: str) -> list[Any]:
    return [message.content for message in sessions.get_history(key)]


def open_files() -> Counter[str]:
    """What this process holds open, and its threads; those of earlier tests may end any time."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a path would be opened for it
        try:
            found.append(str(Path(f"/proc/self/fd/{name}").readlink()))
        except FileNotFoundError:
            continue
    return Counter(found) + Counter(thread.name for thread in threading.enumerate())


# --- where all is well -----------------------------------------------------------------------


def test_old_sessions_are_imported_at_start_and_logged(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    put(tmp_path)
    sessions = open_sessions(where)
    assert len(sessions.list_sessions()) == 6
    assert contents(sessions, "telegram:1001")[-1] == "photo"
    assert contents(sessions, "telegram_1001_alice") == contents(sessions, "telegram:1001:alice")
    assert "imported 6 old sessions with 52 messages" in caplog.text
    assert "broken.json was not imported: it is not JSON" in caplog.text
    assert "line 2 is not JSON" in caplog.text
    sessions.close()
    caplog.clear()

    again = open_sessions(where)
    assert "old sessions" not in caplog.text
    assert "broken.json" not in caplog.text  # it was a warning once
    again.close()


def test_in_memory_store_imports_nothing(tmp_path: Path) -> None:
    put(tmp_path)
    sessions = open_sessions("memory:")
    assert isinstance(sessions.store, InMemoryStore)
    assert sessions.list_sessions() == []
    sessions.close()


@pytest.mark.parametrize(
    ("where", "agent", "fallback", "json_files"),
    [
        ("w", None, "w/sessions.fallback", "w/sessions"),
        ("w/", "ada", "w/agents/ada/sessions.fallback", "w/agents/ada/sessions"),
        ("sqlite:w/steno.db", None, "w/steno.db.fallback", "w/steno.db.sessions"),
        (
            "sqlite:w/sessions/steno.db?cache_kb=9",
            None,
            "w/sessions/steno.db.fallback",
            "w/sessions/steno.db.sessions",
        ),
        (
            "sqlite:w/steno.db",
            "a" * 500,
            f"w/steno.db.fallback/agents/{escape_key('a' * 500)}",
            f"w/steno.db.agents/{escape_key('a' * 500)}",
        ),
        ("memory:", None, "None", "None"),
        ("postgresql://host/x", None, "None", "None"),
    ],
)
def test_p6_each_store_has_a_separate_fallback_folder(
    where: str, agent: str | None, fallback: str, json_files: str
) -> None:
    found = locate_sessions(where, agent)
    assert (str(found.fallback), str(found.json_fallback)) == (fallback, json_files)


@pytest.mark.parametrize(
    ("where", "agent", "old"),
    [
        ("w", None, "w/sessions"),
        ("w", "ada", "w/agents/ada/sessions"),
        ("w", "../x", "w/agents/%2E./x/sessions"),
        ("sqlite:w/steno.db", None, "w/sessions"),
        ("sqlite:w/sessions/steno.db?cache_kb=9", None, "w/sessions"),
        ("sqlite:w/steno.db", "ada", "w/agents/ada/sessions"),
        ("memory:", None, None),
        ("postgresql://host/x", None, None),
    ],
)
def test_folders_searched_for_old_sessions(where: str, agent: str | None, old: str | None) -> None:
    found = locate_sessions(where, agent).old
    expected = None if old is None else old.replace("%2E./x", "%2E.%2Fx")
    assert (None if found is None else str(found)) == expected


def test_each_agent_has_separate_sessions(where: str, tmp_path: Path) -> None:
    names = [None, "ada", "Ada", "a/b", "..", "日本"]
    opened = [open_sessions(where, agent=name) for name in names]
    for number, sessions in enumerate(opened):
        assert sessions.add_message("cli:default", "user", number) == 1
    for number, sessions in enumerate(opened):
        assert contents(sessions, "cli:default") == [number]
        sessions.close()
    # What an agent of that name had before is taken in for it alone.
    old = tmp_path / "agents" / "ada" / "sessions"
    old.mkdir(parents=True, exist_ok=True)
    shutil.copy(SAMPLES / "picoclaw-legacy" / "telegram_91001.json", old)
    ada = open_sessions(where, agent="ada")
    assert ada.list_sessions() == ["cli:default", "telegram:91001"]
    ada.close()
    main = open_sessions(where)
    assert main.list_sessions() == ["cli:default"]
    main.close()
    with pytest.raises(UsageError):
        open_sessions(where, agent="")


# --- where it is not -------------------------------------------------------------------------


def test_a_store_that_cannot_be_opened_is_replaced_by_its_fallback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(SAMPLES / "picoclaw-legacy", tmp_path / "sessions")
    (tmp_path / "steno.db").symlink_to("elsewhere.db")
    before = open_files()

    sessions = open_sessions(f"sqlite:{tmp_path}/steno.db")

    assert isinstance(sessions.store, FallbackStore)
    assert contents(sessions, "telegram:91001") == [f"legacy 0/{n}" for n in range(5)]
    assert sessions.add_message("telegram:91001", "user", "in between") == 6
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert "steno.db" in errors[0].getMessage()
    assert str(tmp_path / "steno.db.fallback") in errors[0].getMessage()
    health = sessions.health()
    assert not health.ok
    assert "steno.db" in health.problems[0]
    sessions.close()
    sessions.close()
    assert open_files() - before == Counter()

    (tmp_path / "steno.db").unlink()
    good = open_sessions(f"sqlite:{tmp_path}/steno.db")
    assert contents(good, "telegram:91001")[-2:] == ["legacy 0/4", "in between"]
    assert good.get_summary("telegram:91001") == "An older talk."
    assert good.health().ok
    good.close()


def test_error_is_logged_if_nothing_can_be_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("sessions", "sessions.fallback"):
        (tmp_path / name).write_text("no folder")

    sessions = open_sessions(tmp_path)

    told = f"the store is unusable (DamagedStore: opening {tmp_path}/sessions: "
    (error,) = [r.getMessage() for r in caplog.records if r.name == "stenolog"][-1:]
    assert error.startswith(f"nothing can be stored: {told}")
    assert error.endswith(f", and so are JSON files in {tmp_path}/sessions (it may not be written)")
    assert "are kept as JSON files" not in caplog.text
    assert sessions.add_message("cli:default", "user", "hello") is None
    health = sessions.health()
    assert not health.ok
    assert health.problems[0] == error
    sessions.close()


def test_permanent_open_errors_are_raised_without_fallback(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for agent in (None, "ada"):
        with pytest.raises(UsageError, match=r"/file is a file, not a folder"):
            open_sessions(tmp_path / "file", agent=agent)

    theirs = tmp_path / "mine.db"
    with closing(sqlite3.connect(theirs)) as database:
        database.execute("CREATE TABLE guests (name TEXT)")
    before = theirs.read_bytes()
    with pytest.raises(ForeignLog, match="was not written by stenolog"):
        open_sessions(f"sqlite:{theirs}")
    assert theirs.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine.db"]


def _mounted_read_only(place: Path, seen: Path) -> None:
    seen.mkdir()
    subprocess.run(["mount", "--bind", str(place), str(seen)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(seen)], check=True)


def test_p8_read_only_workspace_is_opened_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    needs.kernel("mount")
    place, seen = tmp_path / "place", tmp_path / "seen"
    with stenolog.open_store(place) as store:
        store.add_message("telegram:1", "user", "hello")
    file = f"sqlite:{place}/steno.db"
    with stenolog.open_store(file) as store:
        store.add_message("telegram:1", "user", "hello")
    _mounted_read_only(place, seen)
    try:
        sessions = open_sessions(seen)
        assert isinstance(sessions, JSONLBackend)
        (problem,) = sessions.health().problems
        assert problem == f"{seen}/sessions: {READ_ONLY_DISK}"
        assert not sessions.health().ok
        assert caplog.messages == [f"the store has a problem: {problem}"]
        assert contents(sessions, "telegram:1") == ["hello"]
        assert sessions.add_message("telegram:1", "user", "lost") is None
        assert READ_ONLY_DISK in str(sessions.health().last_error)
        sessions.close()
        with stenolog.open_store(seen, read_only=True) as looking:
            assert looking.admin.health().ok  # who does not write misses nothing

        manager = open_sessions(f"sqlite:{seen}/steno.db")
        assert isinstance(manager, SessionManager)
        assert READ_ONLY_DISK in manager.health().problems[0]
        manager.close()

    finally:
        subprocess.run(["umount", "--lazy", str(seen)], check=True)


# In a process of its own: the limit on the size of files holds for all of it.
_FULL: Final = """
import json, os, resource, signal, sys, threading
from pathlib import Path
import stenolog

def held():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return sorted(found) + sorted(thread.name for thread in threading.enumerate())

where, limit = sys.argv[1], int(sys.argv[2])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
stenolog.open_sessions("memory:").close()
if where.startswith("sqlite:"):
    stenolog.open_store(where).close()
before = held()
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
sessions = stenolog.open_sessions(where)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
leaked = [name for name in held() if name not in before]
seqs = [sessions.add_message(key, "user", "in between", once="t") for key in sys.argv[3:]]
problems = sessions.health().problems
sessions.close()
sessions.close()
print(json.dumps([type(sessions).__name__, leaked, seqs, problems]))
"""


def _run_full(where: str, limit: int, *keys: str) -> list[Any]:
    child = subprocess.run(
        [sys.executable, "-c", _FULL, where, str(limit), *keys],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    found: list[Any] = json.loads(child.stdout)
    return found


def test_p1_messages_after_failed_migration_are_merged_at_next_start(
    where: str, tmp_path: Path
) -> None:
    put(tmp_path)
    if where.startswith("sqlite:"):
        stenolog.open_store(where).close()
    before = {path.name: path.read_bytes() for path in (tmp_path / "sessions").iterdir()}
    # Enough for the first sessions, but not for the longest one; beside a database there is room
    # for the fallback.
    limit = 4_000 if where == str(tmp_path) else (tmp_path / "steno.db").stat().st_size + 2_000

    kind, leaked, seqs, problems = _run_full(where, limit, "telegram:91001", "new:1")

    # Where the fallback has no room either, sessions are JSON files.
    assert kind == ("SessionManager" if where == str(tmp_path) else "JSONLBackend")
    assert kind == "JSONLBackend" or leaked == []
    assert seqs == [6, 1]
    assert "NotStored" in problems[0] or "MaybeStored" in problems[0]
    after = {path.name: path.read_bytes() for path in (tmp_path / "sessions").iterdir()}
    assert before.items() <= after.items()

    sessions = open_sessions(where)
    assert isinstance(sessions, JSONLBackend)
    assert len(sessions.list_sessions()) == 7
    assert contents(sessions, "telegram:91001")[-2:] == ["legacy 0/4", "in between"]
    assert contents(sessions, "new:1") == ["in between"]
    assert len(sessions.get_history("slack:C1001/1700000000.000100", full=True)) == 30
    # A redelivered message is known, although another store first took it.
    assert sessions.add_message("telegram:91001", "user", "in between", once="t") == 6
    sessions.close()
    again = open_sessions(where)
    assert len(again.get_history("telegram:91001")) == 6
    again.close()


def test_no_fallback_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> stenolog.Store:
        raise StoreUnavailable("the server is down")

    monkeypatch.setattr("stenolog.transfer.open_sessions.open_store", refuse)
    with pytest.raises(StoreUnavailable):
        open_sessions("postgresql://host/x")


class _FailingAdmin(JSONLAdmin):
    def stamps(self) -> dict[str, str]:
        raise StoreUnavailable("no")


class Unclosable(JSONLStore):
    """A store whose migration fails, and then its close, too."""

    @property
    def admin(self) -> JSONLAdmin:
        return _FailingAdmin(self)

    def close(self) -> None:
        super().close()
        raise OSError("not even that")


@pytest.mark.parametrize(
    "failure", [StoreUnavailable("no"), OSError("no"), stenolog.DamagedStore("no")]
)
def test_close_after_a_failed_migration_may_fail_too(
    tmp_path: Path,
    failure: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    put(tmp_path)

    def fails(*_: object, **__: object) -> list[int]:
        raise failure

    monkeypatch.setattr(Unclosable, "add_messages", fails)
    opened: Callable[..., Unclosable] = lambda where, **_: Unclosable(where)  # noqa: E731
    monkeypatch.setattr("stenolog.transfer.open_sessions.open_store", opened)
    before = open_files()
    sessions = open_sessions(tmp_path)
    falls_back = not isinstance(failure, stenolog.DamagedStore)
    assert isinstance(sessions.store, FallbackStore) == falls_back
    if falls_back:
        assert "closing the unusable store failed" in caplog.text
    with nullcontext() if falls_back else pytest.raises(OSError, match="not even that"):
        sessions.close()
    assert open_files() - before == Counter()
    assert (tmp_path / "sessions" / "telegram_91001.json").exists()
