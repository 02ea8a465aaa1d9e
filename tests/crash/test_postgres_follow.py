"""Tests that followers of a PostgreSQL session get each message once despite connection failures.

Also tests that many processes can open an empty database at once.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg

import stenolog
from stenolog.stores.base import Store
from stenolog.stores.postgres import schema
from support.crash.postgres_processes import Writer, until
from support.pgbouncer import Bouncer
from support.postgres_server import Installation, attempts, execute

_END_READERS = (
    "select pg_terminate_backend(pid) from pg_stat_activity "
    "where datname = current_database() and application_name = 'reads'"
)
_WAITING = (
    "select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
)


class _Follower(threading.Thread):
    """Follows a session and records what it receives."""

    def __init__(self, store: Store, key: str, *, after: int = 0) -> None:
        super().__init__(daemon=True)
        self._messages = store.follow(key, after=after, timeout=60)
        self._more = threading.Condition()
        self._got: list[tuple[int, Any]] = []
        self._failure: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            for message in self._messages:
                with self._more:
                    self._got.append((message.seq, message.content))
                    self._more.notify()
        except Exception as error:  # noqa: BLE001 - told to whoever waits
            with self._more:
                self._failure = error
                self._more.notify()

    def until(self, count: int) -> list[tuple[int, Any]]:
        """Wait until `count` messages were received and return them. Raises its error."""
        with self._more:
            self._more.wait_for(lambda: len(self._got) >= count or self._failure is not None, 30)
            if self._failure is not None:
                raise self._failure
            return list(self._got)


@contextmanager
def _following(reading: str, writing: str) -> Iterator[tuple[Store, _Follower]]:
    """Yield a store to write with, and a follower in another store."""
    with (
        stenolog.open_store(reading) as read,
        stenolog.open_store(f"{writing}?application_name=writes") as write,
    ):
        yield write, _Follower(read, "a")


def _say(store: Store, first: int, last: int) -> list[tuple[int, Any]]:
    return [
        (store.add_message("a", "user", f"{n}", once=f"{n}"), f"{n}")
        for n in range(first, last + 1)
    ]


def test_p7_follow_loses_nothing_if_its_connection_ends(postgres_url: str) -> None:
    with _following(f"{postgres_url}?application_name=reads", postgres_url) as (store, follower):
        said = _say(store, 1, 3)
        assert follower.until(3) == said
        for turn in range(3):
            said += _say(store, 10 * turn + 10, 10 * turn + 12)
            assert execute(postgres_url, _END_READERS)
            said += _say(store, 10 * turn + 13, 10 * turn + 15)
            assert follower.until(len(said)) == said


def test_p7_follow_loses_nothing_across_a_server_restart(
    postgres_installation: Installation,
) -> None:
    server = postgres_installation.server().start()
    with _following(server.url(), server.url()) as (store, follower):
        said = _say(store, 1, 3)
        assert follower.until(3) == said
        server.restart()
        said += _say(store, 4, 6)
        assert follower.until(6) == said
        server.kill9()
        server.start()
        said += _say(store, 7, 9)
        assert follower.until(9) == said
    server.stop("immediate")


# --- through PgBouncer --------------------------------------------------------------------------


def test_p7_follow_works_through_pgbouncer(bouncer: Bouncer, own_url: str) -> None:
    through = bouncer.url(own_url)
    with _following(through, own_url) as (store, follower):
        said = _say(store, 1, 5)
        assert follower.until(5) == said
        said += _say(store, 6, 8)
        assert follower.until(8) == said


def test_p7_through_pgbouncer_many_writers_share_few_connections(
    bouncer: Bouncer, own_url: str
) -> None:
    through = bouncer.url(own_url)

    failed: list[Exception] = []

    def write(name: str) -> None:
        try:
            write_all(name)
        except Exception as error:  # noqa: BLE001 - told by whoever waits
            failed.append(error)

    def write_all(name: str) -> None:
        with stenolog.open_store(f"{through}?connections=2") as store:
            for number in range(20):
                text = f"{name}.{number}"
                store.add_message("a", "user", text, once=text if number % 2 else None)

    threads = [threading.Thread(target=write, args=(f"t{n}",)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    with stenolog.open_store(own_url) as store:
        found = [message.content for message in store.get_history("a")]
    assert len(found) == len(set(found)) == 240


# --- concurrent opening -------------------------------------------------------------------------


def test_ten_processes_can_open_an_empty_database_concurrently(
    postgres_url: str,
) -> None:
    with ExitStack() as stack:
        openers = [
            stack.enter_context(Writer("open", postgres_url, f"w{number}")) for number in range(10)
        ]
        until(openers, lambda opener: opener.count("ready") == 1)
        with psycopg.connect(postgres_url) as first:
            first.execute("select pg_advisory_xact_lock(%s)", (schema._TABLES_LOCK,))
            for opener in openers:
                opener.go()
            # Some of them wait in line, and then all start at the same moment.
            assert any(len(execute(postgres_url, _WAITING)) >= 3 for _ in attempts())
        for opener in openers:
            opener.stop()
        assert [opener.count("stored") for opener in openers] == [1] * 10
    with stenolog.open_store(postgres_url) as store:
        found = {message.content for message in store.get_history("everybody")}
    assert found == {opener.name for opener in openers}
