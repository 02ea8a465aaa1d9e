"""Tests that calls end with an error if a PostgreSQL server never answers a statement."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Final

import pytest

from stenolog import MaybeStored, NotStored, PostgresStore, StenologError, StoreUnavailable
from stenolog.catalog import open_catalog
from stenolog.stores.base import Lease
from support.contract.open_store_base import user_message, visible_texts
from support.postgres_proxy import Proxy
from support.postgres_server import Installation, Server

PATIENCE: Final = 60.0
"""Seconds until a call counts as hanging; its own limit is below one second."""
SILENCE: Final = 0.3
_TYPED: Final = (StoreUnavailable, MaybeStored, NotStored)


@pytest.fixture
def proxy(postgres: Server) -> Iterator[Proxy]:
    with Proxy(postgres.port) as standing:
        yield standing


@pytest.fixture
def store(own_url: str, postgres: Server, proxy: Proxy) -> Iterator[PostgresStore]:
    """Open a store behind the proxy with a short answer timeout."""
    url = own_url.replace(f":{postgres.port}/", f":{proxy.port}/")
    with PostgresStore(url, answer_timeout=SILENCE, busy_timeout=0.2, connections=64) as opened:
        yield opened


def _begin(call: Callable[[], Any]) -> "Future[Any]":
    """Run a call in a thread that may outlive the test."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def _connect(store: PostgresStore, count: int) -> None:
    """Open `count` idle connections, so that statements hit the silent server, not connects."""
    together = threading.Barrier(count)
    looks = [
        _begin(lambda: store.database.run_read(lambda _: together.wait())) for _ in range(count)
    ]
    for look in looks:
        look.result(PATIENCE)


def _calls(store: PostgresStore, lease: Lease, other: Lease) -> dict[str, Callable[[], Any]]:
    catalog = open_catalog(store)
    [mark] = [mark for mark in store.admin.list_snapshots() if mark.key == "a"]

    def read_snapshot() -> None:
        with store.admin.read_snapshot(mark):
            pass

    def write_snapshots() -> None:
        with store.admin.snapshot_writer():
            pass

    return {
        "add_message": lambda: store.add_message("a", "user", "x"),
        "add_message once": lambda: store.add_message("a", "user", "x", once="t"),
        "add_message new": lambda: store.add_message("new", "user", "x"),
        "add_full_message": lambda: store.add_full_message("a", user_message("x")),
        "add_messages": lambda: store.add_messages("a", [user_message("x"), user_message("y")]),
        "get_history": lambda: store.get_history("a"),
        "get_history full": lambda: store.get_history("a", full=True),
        "get_summary": lambda: store.get_summary("a"),
        "set_summary": lambda: store.set_summary("a", "s"),
        "truncate_history": lambda: store.truncate_history("a", 1),
        "clear": lambda: store.clear("a"),
        "set_history": lambda: store.set_history("a", [user_message("x")]),
        "hide": lambda: store.admin.hide("a", 1, 1),
        "pop": lambda: store.pop("a"),
        "checkpoint": lambda: store.checkpoint("a", summary="s", upto=1),
        "undo": lambda: store.undo("a"),
        "compact": lambda: store.compact("a"),
        "fork": lambda: store.fork("a", "b"),
        "delete": lambda: store.delete("a"),
        "restore": lambda: store.admin.restore("gone"),
        "list_trash": store.admin.list_trash,
        "purge": lambda: store.admin.purge("a"),
        "purge before": lambda: store.admin.purge("a", before=1),
        "lease": lambda: store.lease("a", ttl=5),
        "lease.lost": lambda: lease.lost,
        "lease.renew": lease.renew,
        "lease.release": other.release,
        "lease.store": lambda: lease.store.add_message("held", "user", "x"),
        "stamps": store.admin.stamps,
        "info": lambda: store.info("a"),
        "list_sessions": store.list_sessions,
        "set_meta": lambda: store.set_meta("a", title="t"),
        "follow": lambda: next(store.follow("a", after=1)),
        "mark": lambda: store.admin.read_marker("m"),
        "change_mark": lambda: store.admin.update_marker("m"),
        "namespaces": store.namespaces,
        "list_snapshots": store.admin.list_snapshots,
        "read_snapshot": read_snapshot,
        "snapshot_writer": write_snapshots,
        "catalog.list": catalog.list,
        "catalog.search": lambda: catalog.search("x"),
        "catalog.refresh": catalog.refresh,
        "open": lambda: PostgresStore(
            store.database.settings.conninfo,
            answer_timeout=SILENCE,
            busy_timeout=0.1,
        ).close(),
    }


def test_p8_every_call_raises_if_the_server_stops_responding(
    store: PostgresStore, proxy: Proxy
) -> None:
    for key in ("a", "held", "held too", "gone"):
        store.add_message(key, "user", "x")
    store.delete("gone")
    begun = _calls(store, store.lease("held", ttl=60), store.lease("held too", ttl=60))
    _connect(store, len(begun) + 1)
    proxy.cut("unanswered", lambda _: True, times=1_000_000)
    health = _begin(store.admin.health)
    running = {name: _begin(call) for name, call in begun.items()}
    found = {name: future.exception(PATIENCE) for name, future in running.items()}
    assert {name: error for name, error in found.items() if not isinstance(error, _TYPED)} == {}
    assert not health.result(PATIENCE).ok
    # Later calls work when the server answers again.
    proxy.forget_cuts()
    store.add_message("after", "user", "x")
    assert visible_texts(store, "after") == ["x"]


def test_p8_append_without_a_response_raises_maybe_stored(
    store: PostgresStore, proxy: Proxy, own_url: str
) -> None:
    store.add_message("a", "user", "before")
    proxy.cut("unanswered", lambda exchange: "insert" in exchange.text.lower())
    error = _begin(lambda: store.add_message("a", "user", "x")).exception(PATIENCE)
    assert isinstance(error, MaybeStored), error
    assert "did not answer" in str(error)
    assert proxy.cuts() == 1
    # The connection is not reused: a late response would be read by another call.
    assert store.add_message("a", "user", "y") == 3
    with PostgresStore(own_url) as beside:
        assert visible_texts(beside, "a") == ["before", "x", "y"]


def test_p12_append_with_an_idempotency_key_and_no_response_is_stored_once(
    store: PostgresStore, proxy: Proxy
) -> None:
    store.add_message("a", "user", "before")
    proxy.cut("unanswered", lambda exchange: "insert" in exchange.text.lower())
    error = _begin(lambda: store.add_message("a", "user", "x", once="t")).exception(PATIENCE)
    assert isinstance(error, MaybeStored), error
    assert store.add_message("a", "user", "x", once="t") == 2
    assert visible_texts(store, "a") == ["before", "x"]


def test_p8_call_to_a_stopped_server_process_raises(own_url: str) -> None:
    with PostgresStore(own_url, answer_timeout=SILENCE, busy_timeout=0.2) as store:
        store.add_message("a", "user", "x")
        backend = store.database.run_read(
            lambda found: found.connection.pgconn.backend_pid,
        )
        os.kill(backend, signal.SIGSTOP)
        try:
            error = _begin(lambda: store.get_history("a")).exception(PATIENCE)
            assert isinstance(error, StoreUnavailable), error
        finally:
            os.kill(backend, signal.SIGCONT)
        assert visible_texts(store, "a") == ["x"]


def test_slow_response_within_the_timeout_is_accepted(
    own_url: str, postgres: Server, proxy: Proxy
) -> None:
    url = own_url.replace(f":{postgres.port}/", f":{proxy.port}/")
    with PostgresStore(url, answer_timeout=PATIENCE) as store:
        store.add_message("a", "user", "x")
        # Longer than the interval at which the driver checks the connection.
        proxy.delay = 0.2
        assert visible_texts(store, "a") == ["x"]


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_invalid_answer_timeout_is_rejected(seconds: float) -> None:
    with pytest.raises(StenologError, match="answer_timeout must be more than 0"):
        PostgresStore("postgresql://127.0.0.1:1/none", answer_timeout=seconds)


@pytest.mark.slow
def test_p8_append_waiting_for_a_lost_standby_raises_maybe_stored(
    postgres_installation: Installation,
) -> None:
    primary = postgres_installation.server().start()
    standby = primary.standby()
    with PostgresStore(primary.url(), answer_timeout=SILENCE, busy_timeout=0.2) as store:
        store.add_message("a", "user", "x")
        standby.kill9()
        # The primary commits, and answers only after the standby has the commit too.
        error = _begin(lambda: store.add_message("a", "user", "y")).exception(PATIENCE)
        assert isinstance(error, MaybeStored), error
    primary.stop("immediate")
