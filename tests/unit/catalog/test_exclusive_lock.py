"""Threads use a connection in the order in which they asked for it."""

import threading
import time

import pytest

from stenolog.catalog import catalog_files
from stenolog.catalog.catalog_files import ExclusiveLock, ExclusiveUse

PATIENCE = 120


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no thread lose its place because the machine is busy."""
    monkeypatch.setattr(catalog_files, "_STALE_SECONDS", 10 * PATIENCE)


def _wait_for_waiters(lock: ExclusiveLock, count: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while len(lock._queue) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_returning_thread_does_not_overtake_waiting_ones() -> None:
    lock, order = ExclusiveLock("it"), list[str]()

    def use(name: str) -> None:
        use = ExclusiveUse()
        lock.begin(use, timeout=PATIENCE)
        order.append(name)
        lock.end(use)

    first = ExclusiveUse()
    lock.begin(first, timeout=0)
    threads = [threading.Thread(target=use, args=[name]) for name in ("second", "third")]
    for count, thread in enumerate(threads, start=1):
        thread.start()
        _wait_for_waiters(lock, count)
    lock.end(first)
    use("first again")
    for thread in threads:
        thread.join(PATIENCE)

    assert order == ["second", "third", "first again"]


def test_end_of_a_use_wakes_the_waiting_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_files, "_CHECK_INTERVAL_SECONDS", PATIENCE)
    lock, first, second = ExclusiveLock("it"), ExclusiveUse(), threading.Event()

    def use() -> None:
        use = ExclusiveUse()
        lock.begin(use, timeout=PATIENCE)
        second.set()
        lock.end(use)

    lock.begin(first, timeout=0)
    thread = threading.Thread(target=use)
    thread.start()
    _wait_for_waiters(lock, 1)
    lock.end(first)

    assert second.wait(PATIENCE / 2)
    thread.join(PATIENCE)


def test_thread_that_gives_up_does_not_block_the_next() -> None:
    lock, first, next_use, given_up = (
        ExclusiveLock("it"),
        ExclusiveUse(),
        ExclusiveUse(),
        list[ExclusiveUse](),
    )
    lock.begin(first, timeout=0)

    def ask() -> None:
        given_up.append(ExclusiveUse())
        lock._try_begin(given_up[0])

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(PATIENCE)
    assert len(lock._queue) == 1

    lock.end(given_up[0])
    lock.end(first)

    lock.begin(next_use, timeout=0)
    assert lock.is_active(next_use)
