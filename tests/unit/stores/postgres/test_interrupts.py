"""Tests that after Ctrl-C at any moment of a call no later call hangs and no connection is lost."""

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Final

import pytest
from psycopg.pq import ExecStatus

from stenolog import PostgresStore
from stenolog.stores.postgres import connections, database, transactions
from stenolog.stores.postgres import store as postgres_store
from stenolog.stores.postgres.transactions import Transaction
from stenolog.stores.sql import leases
from stenolog.stores.sql import store as sql_store
from support.interrupts import Striking

PATIENCE: Final = 60.0
"""Seconds until a call counts as hanging."""
_MODULES: Final = (
    connections,
    database,
    postgres_store,
    transactions,
    leases,
    sql_store,
    threading,
)


def _run(strike: Striking, call: Callable[[], Any]) -> None:
    """Make a call that is interrupted."""
    try:
        with strike.watching():
            strike.armed.set()
            try:
                call()
            finally:
                strike.armed.clear()
    except BaseException as error:
        # If the interrupt hits Thread.start, a lock of Python may raise instead.
        if not strike.where or not isinstance(error, KeyboardInterrupt | RuntimeError):
            raise


def _in_a_thread(call: Callable[[], Any]) -> Any:
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(PATIENCE)


@pytest.fixture(autouse=True)
def _dropped_connections() -> Iterator[None]:
    """Ignore the warnings about connections that lost their owner in an interrupt."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


def _strikes(every: int) -> Iterator[Striking]:
    """Yield interrupts at every n-th place of a call, until the call has fewer places."""
    number = 1
    while True:
        strike = Striking(number, _MODULES)
        yield strike
        if not strike.where:
            assert number > every, "no place was reached"
            return
        number += every


def _follow(store: PostgresStore, heard: list[int]) -> threading.Thread:
    def run() -> None:
        for message in store.follow("a"):
            heard.append(message.seq)
            if message.content == "end":
                return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "every", [2, pytest.param(1, marks=pytest.mark.full)], ids=["sample", "all"]
)
def test_p8_interrupted_append_leaves_the_store_usable(postgres_url: str, every: int) -> None:
    heard: list[int] = []
    # Two connections, so that one that is not returned is soon missing.
    with PostgresStore(postgres_url, connections=2) as store:
        first = store.add_message("a", "user", "x")
        follower = _follow(store, heard)
        for strike in _strikes(every):
            _run(strike, lambda: store.add_message("a", "user", "x"))
            _in_a_thread(lambda: store.add_message("a", "user", "y"))
            _in_a_thread(lambda: store.get_history("a", last=1))
        last = store.add_message("a", "user", "end")
        follower.join(PATIENCE)
    assert heard == list(range(first, last + 1))


@pytest.mark.parametrize(
    "every", [37, pytest.param(1, marks=pytest.mark.full)], ids=["sample", "all"]
)
def test_p8_interrupted_first_append_leaves_the_store_usable(postgres_url: str, every: int) -> None:
    PostgresStore(postgres_url).close()
    for count, strike in enumerate(_strikes(every)):
        with PostgresStore(postgres_url, connections=2) as store:
            key = f"session {count}"  # a longer session would have more places in each round

            def use(store: PostgresStore = store, key: str = key) -> None:
                store.add_message(key, "user", "x")
                list(store.follow(key, timeout=0))
                store.lease(key, ttl=0.01).release()

            def use_again(store: PostgresStore = store, key: str = key) -> None:
                store.add_message(key, "user", "y")

            def follow(store: PostgresStore = store, key: str = key) -> None:
                next(store.follow(key))

            _run(strike, use)
            _in_a_thread(use_again)
            _in_a_thread(follow)


@pytest.mark.parametrize(
    "every", [2, pytest.param(1, marks=pytest.mark.full)], ids=["sample", "all"]
)
def test_p8_waiting_for_a_connection_can_be_interrupted_anywhere(
    postgres_url: str, every: int
) -> None:
    with PostgresStore(postgres_url, connections=1, busy_timeout=PATIENCE) as store:
        store.add_message("a", "user", "x")
        for strike in _strikes(every):
            taken, give_back = threading.Event(), threading.Event()

            def hold(
                taken: threading.Event = taken, give_back: threading.Event = give_back
            ) -> None:
                def look(_: object) -> None:
                    taken.set()
                    give_back.wait(PATIENCE)

                store.database.run_read(look)

            holding = threading.Thread(target=hold, daemon=True)
            holding.start()
            assert taken.wait(PATIENCE)
            # Returned while the caller waits for it.
            threading.Timer(0.01, give_back.set).start()
            _run(strike, lambda: store.get_history("a"))
            give_back.set()
            holding.join(PATIENCE)
            assert len(_in_a_thread(lambda: store.get_history("a"))) == 1


def test_p8_connection_interrupted_after_a_prepare_is_not_reused(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result_of = Transaction._fetch_result

    def interrupt(transaction: Transaction, expected: ExecStatus) -> Any:
        result = result_of(transaction, expected)
        if expected == ExecStatus.COMMAND_OK:
            # The server has prepared the statement, but the connection does not know it yet.
            monkeypatch.undo()
            raise KeyboardInterrupt
        return result

    with PostgresStore(postgres_url, connections=1) as store:
        store.set_meta("a", title="A session that exists")
        monkeypatch.setattr(Transaction, "_fetch_result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.add_message("a", "user", "x")
        store.add_message("a", "user", "y")
        assert [message.content for message in store.get_history("a")] == ["y"]
