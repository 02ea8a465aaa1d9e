"""Tests P7: calls that lock a session and its lease never deadlock."""

import threading
import time
from collections.abc import Callable

import psycopg
import pytest

from stenolog import LeaseLost, PostgresStore

ROUNDS = 12
SECONDS = 60

_WAITING = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock'
"""
_DEADLOCKS = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"

Write = Callable[[PostgresStore], object]

WRITES: dict[str, Write] = {
    "append": lambda store: store.add_message("a", "user", "x"),
    "append with a token": lambda store: store.add_message("a", "user", "x", once="t"),
    "change": lambda store: store.set_summary("a", "text"),
    "delete": lambda store: store.delete("a"),
}


def _start(call: Callable[[], object], results: list[object]) -> threading.Thread:
    def run() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def _wait_until_blocked(watcher: psycopg.Connection, calls: int) -> None:
    limit = time.monotonic() + SECONDS
    while watcher.execute(_WAITING).fetchone() != (calls,):
        assert time.monotonic() < limit, "the call never waits for the lock"
        time.sleep(0.001)


def _deadlocks(url: str) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(_DEADLOCKS).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("name", WRITES)
def test_p7_purge_during_a_writing_turn_causes_no_deadlock(postgres_url: str, name: str) -> None:
    before = _deadlocks(postgres_url)
    with (
        PostgresStore(postgres_url, busy_timeout=SECONDS) as store,
        psycopg.connect(postgres_url) as holder,
        psycopg.connect(postgres_url, autocommit=True) as watcher,
    ):
        for _ in range(ROUNDS):
            store.add_message("a", "user", "1")
            lease = store.lease("a", ttl=60)
            purged: list[object] = []
            written: list[object] = []
            holder.execute("SELECT FROM stenolog.session WHERE key = 'a' FOR UPDATE")
            # The purge is first in the queue for the session, and a writer waits after it.
            purge = _start(lambda: store.admin.purge("a"), purged)
            _wait_until_blocked(watcher, 1)
            write = _start(lambda: WRITES[name](lease.store), written)  # noqa: B023
            _wait_until_blocked(watcher, 2)
            holder.rollback()
            for thread in (purge, write):
                thread.join(SECONDS)
                assert not thread.is_alive()
            assert [type(one).__name__ for one in purged] == ["PurgeResult"]
            assert [type(one) for one in written] == [LeaseLost]
            assert store.list_sessions() == []
    # The server updates its counters when a connection ends.
    assert _deadlocks(postgres_url) == before
