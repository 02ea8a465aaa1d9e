"""Tests the tables: content byte for byte, nothing left after a purge, and reported damage."""

import gc
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from queue import SimpleQueue
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from stenolog import DamagedStore, MaybeStored, NoSuchSession, NotStored, PostgresStore, StoreBusy
from stenolog.errors import SessionExists
from stenolog.maintenance.workspace_check import examine
from stenolog.stores.base import SessionView
from stenolog.stores.postgres import store as postgres_store
from support.postgres_proxy import Exchange, Proxy
from support.postgres_server import Databases

TABLES = ("session", "message", "token", "change", "lease")


def rows(server: psycopg.Connection, table: str) -> int:
    [(count,)] = server.execute(f"SELECT count(*) FROM stenolog.{table}")  # noqa: S608
    return int(count)


def test_p10_message_is_stored_as_encoded(store: PostgresStore, server: psycopg.Connection) -> None:
    odd = {"role": "user", "content": "a\0b \ud83d €", "n": 10**400, "z": 1, "a": [True, None]}
    store.add_full_message("k\0ey", odd)
    [message] = store.get_history("k\0ey")
    assert message.to_dict() == odd
    [(body,)] = server.execute("SELECT body FROM stenolog.message")
    assert body.encode() == message.to_json()
    assert "\\u0000" in body
    assert list(message.to_dict()) == list(odd)


def test_p8_lease_waits_for_a_purge_and_survives_it(
    store: PostgresStore, server: psycopg.Connection
) -> None:
    store.add_message("k", "user", "secret")
    with ThreadPoolExecutor(1) as other, server.transaction():
        # As a purge does before its commit.
        server.execute("DELETE FROM stenolog.message")
        server.execute("DELETE FROM stenolog.session")
        asking = other.submit(store.lease, "k", ttl=60, wait=0)
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        for _ in range(500):
            if asking.done() or server.execute(waits).fetchone() != (0,):
                break
            time.sleep(0.01)
        assert not asking.done(), "it does not wait"
    with pytest.raises(NoSuchSession):
        asking.result()
    assert rows(server, "lease") == 0


def test_p4_no_table_has_rows_of_a_purged_session(
    store: PostgresStore, server: psycopg.Connection
) -> None:
    for key in ("gone", "stays"):
        store.add_message(key, "user", "secret", once="t")
        store.set_summary(key, "about the secret")
        store.delete(key)
        store.add_message(key, "user", "again", once="t")
        store.set_meta(key, title="x")
        store.lease(key, ttl=60)
    before = {table: rows(server, table) for table in TABLES}
    store.admin.purge("gone")
    assert {table: rows(server, table) for table in TABLES} == {
        table: count // 2 for table, count in before.items()
    }
    assert server.execute(
        "SELECT count(*) FROM stenolog.message WHERE body LIKE '%secret%'"
    ).fetchall() == [(1,)]


def test_p3_missing_message_hides_only_itself_and_is_reported(
    store: PostgresStore,
    server: psycopg.Connection,
    postgres_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store.add_messages("a", [{"role": "user", "content": n} for n in range(5)])
    server.execute("DELETE FROM stenolog.message WHERE seq = 3")
    with caplog.at_level(logging.WARNING, "stenolog"):
        assert [message.seq for message in store.get_history("a")] == [1, 2, 4, 5]
        assert [message.seq for message in store.get_history("a", last=3)] == [2, 4, 5]
    assert "skipped message 3," in caplog.text
    assert store.info("a").lost == 1
    [finding] = examine(postgres_url).findings
    assert (finding.kind, finding.key, finding.lost) == ("missing message", "a", ((3, 3),))


def test_p3_a_damaged_key_hides_only_its_own_session(
    store: PostgresStore, server: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    for key in ("a", "b", "c"):
        store.add_message(key, "user", "x")
    store.delete("c")
    server.execute("UPDATE stenolog.session SET key = '\\xff' WHERE key IN ('b', 'c')")
    assert store.list_sessions() == ["a"]
    assert list(store.admin.stamps()) == ["a"]
    assert store.admin.list_trash() == []
    assert [mark.key for mark in store.admin.list_snapshots()] == ["\\xff", "a", "\\xff"]
    damaged = store.admin.list_snapshots()[2]
    with pytest.raises(DamagedStore), store.admin.read_snapshot(damaged):
        pass
    assert "the session with the key b'\\xff' cannot be read" in caplog.text


def test_doctor_reports_damage_in_the_tables(
    store: PostgresStore, server: psycopg.Connection, postgres_url: str
) -> None:
    for key in ("state", "body", "past"):
        store.add_message(key, "user", "x")
    assert examine(postgres_url).findings == ()
    server.execute("UPDATE stenolog.session SET state = '{' WHERE key = 'state'")
    server.execute(
        "UPDATE stenolog.message SET body = 'no JSON' FROM stenolog.session "
        "WHERE session.id = message.session AND key = 'body'"
    )
    server.execute("UPDATE stenolog.session SET last_seq = 0 WHERE key = 'past'")
    server.execute("INSERT INTO stenolog.token VALUES (99999, 't', 1, 1)")
    found = examine(postgres_url)
    assert found.sessions == 3
    assert sorted((one.kind, one.key) for one in found.findings if one.key) == [
        ("damaged message", "body"),
        ("damaged state", "state"),
        ("stray row", "past"),
    ]
    [stray] = [one for one in found.findings if one.key is None]
    assert "rows belong to sessions that do not exist" in stray.meaning


def test_p8_wait_for_a_locked_session_ends_with_store_busy(
    postgres_url: str, server: psycopg.Connection
) -> None:
    with PostgresStore(postgres_url, busy_timeout=0.2) as store:
        store.add_message("a", "user", "x")
        with server.transaction():
            server.execute("SELECT * FROM stenolog.session FOR UPDATE")
            for call in (
                lambda: store.add_message("a", "user", "y"),
                lambda: store.add_message("a", "user", "y", once="t"),
                lambda: store.clear("a"),
            ):
                with pytest.raises(StoreBusy, match="held the session too long"):
                    call()
            # Readers do not wait, and other sessions are not affected.
            assert len(store.get_history("a")) == 1
            assert store.add_message("b", "user", "y") == 1
        assert store.add_message("a", "user", "y") == 2


def test_p12_concurrent_appends_with_one_token_store_once(store: PostgresStore) -> None:
    store.add_message("a", "user", "first")
    together = threading.Barrier(8)

    def say() -> list[int]:
        seqs = []
        try:
            for number in range(10):
                together.wait()
                seqs.append(store.add_message("a", "user", number, once=f"t{number}"))
        finally:
            if len(seqs) < 10:
                together.abort()  # otherwise the others would wait for the failed one
        return seqs

    with ThreadPoolExecutor(8) as threads:
        saying = [threads.submit(say) for _ in range(8)]
    failed = [error for one in saying if (error := one.exception()) is not None]
    assert [error for error in failed if not isinstance(error, threading.BrokenBarrierError)] == []
    seqs = [seq for one in saying for seq in one.result()]
    assert sorted(seqs) == sorted(list(range(2, 12)) * 8)
    assert [message.content for message in store.get_history("a")] == ["first", *range(10)]


def stored(seen: Sequence[Exchange], *, after: int) -> bool:
    """Return whether something was stored after `after` exchanges."""
    return any(".message" in one.text for one in seen[after:])


def test_p9_append_takes_one_round_trip(postgres_databases: Databases) -> None:
    url = urlsplit(postgres_databases.new())
    assert url.port is not None
    with Proxy(url.port) as proxy:
        there = url._replace(netloc=url.netloc.replace(str(url.port), str(proxy.port)))
        with PostgresStore(urlunsplit(there)) as store:
            store.add_message("a", "user", "x")
            lease = store.lease("a", ttl=60)
            calls: list[Callable[[], object]] = [
                lambda: store.add_message("a", "user", "y"),
                lambda: store.add_message("a", "user", "y", once="new"),
                lambda: store.add_messages("a", [{"role": "user"}] * 3),
                lambda: lease.store.add_message("a", "user", "y"),
            ]
            for call in calls:
                before = len(proxy.seen)
                call()
                assert proxy.wait_until(partial(stored, after=before))
                [made] = proxy.seen[before:]
                assert made.status == "I"


def test_p9_view_is_two_round_trips_and_an_empty_refresh_is_one(
    postgres_databases: Databases,
) -> None:
    url = urlsplit(postgres_databases.new())
    assert url.port is not None
    with Proxy(url.port) as proxy:
        there = url._replace(netloc=url.netloc.replace(str(url.port), str(proxy.port)))
        with PostgresStore(urlunsplit(there)) as store:
            store.add_message("a", "user", "x")
            store.set_summary("a", "text")
            assert proxy.wait_until(partial(stored, after=0))

            def exchanges(call: Callable[[], SessionView]) -> tuple[SessionView, int]:
                before = len(proxy.seen)
                found = call()
                store.admin.read_marker(
                    "end"
                )  # on the same connection, after everything of the call
                assert proxy.wait_until(lambda seen: any(".mark" in x.text for x in seen[before:]))
                texts = [one.text for one in proxy.seen[before:]]
                assert not any("BEGIN" in text for text in texts)
                return found, sum(".session" in text or ".message" in text for text in texts)

            view, count = exchanges(lambda: store.view("a"))
            assert (view.summary, len(view.messages), count) == ("text", 1, 2)
            tail, count = exchanges(lambda: store.view(view.key, since=view))
            assert (tail.is_tail, tail.messages, count) == (True, (), 1)
            before = len(proxy.seen)
            store.add_message("a", "user", "y")
            assert proxy.wait_until(partial(stored, after=before))
            tail, count = exchanges(lambda: store.view(view.key, since=view))
            assert ([message.content for message in tail.messages], count) == (["y"], 2)


def test_p8_statements_are_prepared_again_after_a_rollback(postgres_url: str) -> None:
    with PostgresStore(postgres_url, connections=1) as store:
        for number in range(1, 4):
            assert store.add_message("a", "user", number) == number
            with pytest.raises(SessionExists):
                store.fork("a", "a")


def test_p8_unexpected_rows_raise_damaged_store_without_endless_retries(
    store: PostgresStore, server: psycopg.Connection
) -> None:
    for key in ("stray", "format"):
        store.add_message(key, "user", "x")
    server.execute(
        "INSERT INTO stenolog.message SELECT id, 2, created, '{}' FROM stenolog.session "
        "WHERE key = 'stray'"
    )
    server.execute("UPDATE stenolog.session SET format = 0 WHERE key = 'format'")
    for key in ("stray", "format"):
        for call in (
            lambda key=key: store.add_message(key, "user", "y"),
            lambda key=key: store.add_message(key, "user", "y", once="t"),
            lambda key=key: store.add_messages(key, [{"role": "user"}] * 2),
        ):
            with pytest.raises((DamagedStore, NotStored)):
                call()


def test_p8_connection_lost_after_sending_raises_maybe_stored(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add_message("a", "user", "x")
    wait = psycopg.Connection.wait

    def broken(self: psycopg.Connection, *rest: object, **named: object) -> object:
        wait(self, *rest, **named)  # type: ignore[arg-type]
        raise OSError(24, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(psycopg.Connection, "wait", broken)
        with pytest.raises(MaybeStored):
            store.add_message("a", "user", "y")
    assert len(store.get_history("a")) == 2


def test_p8_transaction_with_an_ignored_error_raises_not_stored(
    store: PostgresStore,
) -> None:
    def fail() -> None:
        with store.database.write_transaction() as transaction:
            transaction.run("change_mark", "sessions", "m")
            with suppress(psycopg.Error):
                transaction.execute("SELECT 1 / 0")

    with pytest.raises(NotStored):
        fail()
    assert store.admin.read_marker("m") == ""


def test_a_follower_is_woken_by_a_writer_of_this_process(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_store, "FOLLOW_POLL_SECONDS", 60.0)
    arrived = SimpleQueue[str]()

    def follow() -> None:
        for message in islice(store.follow("a"), 6):
            arrived.put(message.content)

    with ThreadPoolExecutor(1) as other:
        other.submit(follow)
        while not store.database.followers:
            pass
        for number in range(6):
            once = None if number % 2 else f"{number}"
            store.add_message("a", "user", f"{number}", once=once)
            assert arrived.get(timeout=20) == f"{number}"
    gc.collect()
    assert store.database.followers == []


def test_p4_purge_reports_remaining_bytes_without_vacuum_permission(
    postgres_url: str, server: psycopg.Connection
) -> None:
    PostgresStore(postgres_url).close()
    role = f"low_{secrets.token_hex(4)}"
    server.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
    try:
        server.execute(f"GRANT USAGE ON SCHEMA stenolog TO {role}")
        every = "SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA stenolog"
        server.execute(f"GRANT {every} TO {role}")
        server.execute(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA stenolog TO {role}")
        url = urlsplit(postgres_url)
        there = url._replace(netloc=f"{role}:x@{url.netloc.rpartition('@')[2]}")
        with PostgresStore(urlunsplit(there)) as store:
            store.add_message("a", "user", "secret")
            store.lease("a", ttl=60).release()
            [left] = store.admin.purge("a").not_reached
        assert "until their owner vacuums them" in left
    finally:
        server.execute(f"DROP OWNED BY {role}")
        server.execute(f"DROP ROLE {role}")


def test_session_deleted_after_listing_can_be_read(store: PostgresStore) -> None:
    store.add_message("a", "user", "x")
    [mark] = store.admin.list_snapshots()
    store.delete("a")
    with store.admin.read_snapshot(mark) as found:
        assert found.snapshot.deleted is not None
        assert [message.content for message in found.messages] == ["x"]
