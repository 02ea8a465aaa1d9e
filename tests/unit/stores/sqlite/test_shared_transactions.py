"""Tests appends that share a transaction: each has its own timeout and its own errors."""

import fcntl
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stenolog import DamagedStore, SQLiteStore, StoreBusy
from stenolog.stores.sqlite.gate import QueuedWrite
from stenolog.stores.sqlite.transactions import Transaction


@contextmanager
def _gate_held(file: Path) -> Iterator[None]:
    """Hold the lock file, as another writing process does."""
    descriptor = os.open(file.with_name(f"{file.name}-gate"), os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@pytest.fixture
def spoilt(store: SQLiteStore) -> SQLiteStore:
    """Return a store in which every append to one of two sessions must fail."""
    for key in ("bad", "good"):
        store.add_messages(key, [{"role": "user", "content": "x"}] * 3)
    with store.database.write_transaction() as transaction:
        transaction.execute("UPDATE session SET last_seq = 1 WHERE key = 'bad'")
    return store


def test_p3_damaged_session_does_not_prevent_appends_to_others(
    spoilt: SQLiteStore,
) -> None:
    found: dict[str, object] = {}

    def append(name: str, key: str) -> None:
        try:
            found[name] = spoilt.add_message(key, "user", name)
        except DamagedStore as error:
            found[name] = type(error)

    outcomes = {"1": "good", "2": "bad", "3": "good", "4": "bad"}
    threads = [threading.Thread(target=append, args=one) for one in outcomes.items()]
    with spoilt.database.write_transaction():
        # All of them are in the queue, so they share one transaction.
        for number, thread in enumerate(threads, start=1):
            thread.start()
            while len(spoilt.database._queue.waiting) < number:
                pass
    for thread in threads:
        thread.join(20)
    assert found == {"1": 4, "2": DamagedStore, "3": 5, "4": DamagedStore}
    assert [message.content for message in spoilt.get_history("good")][3:] == ["1", "3"]


def _caller(deadline: float) -> QueuedWrite:
    caller = QueuedWrite(lambda _: "done")
    caller.deadline = deadline
    return caller


def test_p8_only_expired_callers_of_a_group_give_up(store: SQLiteStore, file: Path) -> None:
    store.add_message("a", "user", "x")
    passed = time.monotonic()
    first, second, third = group = [_caller(at) for at in (passed, passed, math.inf)]
    with _gate_held(file):
        store.database._run_group(group)
    assert [type(one.error) for one in (first, second)] == [StoreBusy, StoreBusy]
    assert first.error is not second.error
    assert not third.done
    store.database._run_group([third])
    assert (third.done, third.error, third.result) == (True, None, "done")


def test_p8_leader_of_a_group_keeps_its_own_deadline(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: list[float] = []
    with SQLiteStore(file, busy_timeout=20) as store:
        writer = store.database._writer
        begin = writer.begin

        def noting(deadline: float) -> Transaction:
            allowed.append(deadline)
            return begin(deadline)

        monkeypatch.setattr(writer, "begin", noting)
        second = threading.Thread(target=store.add_message, args=("a", "user", "second"))
        with store.database.write_transaction():
            second.start()
            while not store.database._queue.waiting:
                pass
            # Its deadline is set when it has looked for its turn and starts to wait.
            while store.database._queue.waiting[0].deadline == math.inf:
                pass
            waits_since = time.monotonic()
        second.join(20)
    assert allowed[-1] <= waits_since + 20
