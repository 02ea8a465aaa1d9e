"""Tests the database layer: forks, bounded memory, following, and the cost of reads."""

import gc
import os
import subprocess
import sys
import threading
import tracemalloc
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any

import apsw
import pytest

from stenolog import SQLiteStore, StoreBusy
from stenolog.stores.sqlite import connections
from stenolog.stores.sqlite import store as sqlite_store
from stenolog.stores.sqlite.transactions import Transaction
from support.reachable_objects import hanging_on

# --- forks -----------------------------------------------------------------------------------

_FORKING = """
import os, sys, threading
import stenolog

store = stenolog.SQLiteStore(sys.argv[1])
store.add_message("a", "user", "parent before")
store.get_history("a")
pid = os.fork()
if pid == 0:
    assert [m.content for m in store.get_history("a")] == ["parent before"]
    store.add_message("a", "user", "child")
    assert store.database._writer._connection is not None
    sys.exit(7)  # as a program ends: everything is cleared
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
store.add_message("a", "user", "parent after")
print([m.content for m in store.get_history("a")])
store.close()
"""


def test_p7_forked_child_uses_the_store_without_disturbing_its_parent(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", _FORKING, str(file)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "['parent before', 'child', 'parent after']\n"
    assert "Error" not in done.stderr


_ABANDONING = """
import gc, os, sys, weakref
import stenolog

store = stenolog.SQLiteStore(sys.argv[1])
store.add_message("a", "user", "x")
store.get_history("a")
database = store.database
connections = [database._writer._connection, database._readers._idle[0].connection]
known = [weakref.ref(connection) for connection in connections]
pid = os.fork()
if pid == 0:
    # They work on the parent's files and locks, so they must outlive all that the child does.
    connections.clear()
    store.close()
    del store, database
    gc.collect()
    os._exit(sum(ref() is None for ref in known))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_forked_child_does_not_close_connections_of_its_parent(file: Path) -> None:
    subprocess.run([sys.executable, "-c", _ABANDONING, str(file)], check=True, timeout=60)


def test_no_thread_is_inside_sqlite_while_the_process_forks(file: Path) -> None:
    with SQLiteStore(file, busy_timeout=0.05) as store:
        database = store.database
        stopped = database.before_fork()
        assert stopped
        assert database._queue.lock.locked()
        with pytest.raises(StoreBusy):
            store.list_sessions()
        database.after_fork_in_parent(stopped=stopped)
        assert store.add_message("a", "user", "x") == 1
        assert len(store.get_history("a")) == 1


def test_fork_inside_a_transaction_does_not_deadlock(store: SQLiteStore) -> None:
    with store.database.write_transaction() as transaction:
        transaction.execute("INSERT INTO purge (begun) VALUES ('x')")
        pid = os.fork()
        if pid == 0:
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        transaction.execute("DELETE FROM purge")
    assert store.add_message("a", "user", "x") == 1


# --- memory ----------------------------------------------------------------------------------


_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.BoundedSemaphore)


def test_p9_locks_connections_and_memory_do_not_grow_with_the_number_of_keys(file: Path) -> None:
    with SQLiteStore(file, synchronous="normal") as store:
        _touch(store, 0, 50_000)
        before = hanging_on(store)
        tracemalloc.start()
        try:
            _touch(store, 50_000, 100_000)
            gc.collect()
            grown, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert grown < 1_000_000
        assert hanging_on(store) == before
        assert sum(before[kind] for kind in _LOCKS) <= 64
        assert len(store.list_sessions()) == 4_000
        assert len(store.database._readers._idle) == 1
        assert store.database._queue.waiting == []


def _touch(store: SQLiteStore, first: int, end: int) -> None:
    """Look up each session; create one in twenty-five."""
    for number in range(first, end):
        key = f"user:{number}"
        if number % 25 == 0:
            store.add_message(key, "user", "x")
        assert len(store.get_history(key)) == (number % 25 == 0)


def test_p9_log_size_is_bounded_while_readers_overlap(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_CHECKPOINT_PAGES", 20)
    monkeypatch.setattr(connections, "_LOG_RESTART_PAGES", 100)
    inside: list[AbstractContextManager[Transaction]] = []

    def leave(_writer: connections.WriteConnection, _times: int) -> bool:
        """Let all readers end while the writer waits for them."""
        while inside:
            inside.pop().__exit__(None, None, None)
        return True

    monkeypatch.setattr(connections.WriteConnection, "_on_busy", leave)
    with SQLiteStore(file, synchronous="normal") as store:
        largest = 0
        for number in range(300):
            store.add_message("a", "user", f"{number} " * 500)
            # The next reader starts before the last one ends, so that there always is one.
            inside.append(store.database.read_transaction())
            list(inside[-1].__enter__().execute("SELECT 1 FROM session"))
            if len(inside) > 1:
                inside.pop(0).__exit__(None, None, None)
            largest = max(largest, file.with_name(f"{file.name}-wal").stat().st_size)
        leave(store.database._writer, 0)
    assert largest < 200 * 4120


# --- following -------------------------------------------------------------------------------


def test_a_follower_is_woken_by_a_writer_of_this_process(
    store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_store, "FOLLOW_POLL_SECONDS", 60.0)
    following = store.follow("a")
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.extend(m.content for m in islice(following, 2)))
    reader.start()
    while not store.database.commit_events:
        pass
    store.add_message("a", "user", "1")
    store.add_messages("a", [{"content": "2"}])
    reader.join(20)
    assert found == ["1", "2"]


def test_followers_unregister_their_events(store: SQLiteStore) -> None:
    store.add_message("a", "user", "1")
    for _ in range(3):
        following = store.follow("a")
        next(following)
        del following
    gc.collect()
    assert store.database.commit_events == []


# --- stored data -----------------------------------------------------------------------------


def test_p10_payload_is_stored_byte_for_byte(store: SQLiteStore) -> None:
    store.add_full_message("a", {"b": 1.50, "a": "\u00e9\0", "n": 10**400})
    with store.database.read_transaction() as transaction:
        [(kind, body)] = transaction.execute("SELECT typeof(body), body FROM message")
    assert kind == "blob"
    assert body == store.get_history("a")[0].to_json()


def test_p9_read_fetches_only_visible_rows(
    store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add_messages("a", [{"content": number} for number in range(5_000)])
    store.admin.hide("a", 10, 4_990)
    found: list[object] = []

    class Counting(Transaction):
        def __init__(self, connection: apsw.Connection) -> None:
            super().__init__(connection)
            self.execute = self._counted

        def _counted(self, *call: Any) -> list[tuple[Any, ...]]:
            rows = list(self._connection.execute(*call))
            found.extend(rows)
            return rows

    monkeypatch.setattr(connections, "Transaction", Counting)
    assert len(store.get_history("a")) == 19
    assert len(found) == 20


def test_p8_arguments_beyond_64_bits_are_accepted(store: SQLiteStore) -> None:
    store.add_messages("a", [{"content": number} for number in range(3)])
    huge = 10**30
    assert len(store.get_history("a", last=huge)) == 3
    assert len(store.get_history("a", last=huge, full=True)) == 3
    assert store.get_history("a", after=huge) == store.get_history("a", after=huge, full=True) == []
    assert len(store.get_history("a", after=-huge, full=True)) == 3
    assert list(store.follow("a", after=huge, timeout=0)) == []
    assert store.list_sessions(limit=huge) == ["a"]
    store.truncate_history("a", huge)
    assert store.admin.purge("a", before=-huge).messages == 0
    store.admin.hide("a", -huge, huge)
    assert store.get_history("a") == []
    assert store.admin.purge("a", before=huge).messages == 3
