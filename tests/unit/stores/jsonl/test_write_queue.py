"""Tests the write queue: order of callers, timeouts and Ctrl-C."""

import fcntl
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from stenolog import JSONLStore, MaybeStored, StoreBusy
from stenolog.stores.arguments import Batch
from stenolog.stores.jsonl import open_logs, write_queue
from stenolog.stores.jsonl.write_queue import Gate, Waiter
from support.interrupts import Striking

SECONDS = 20


def _append(key: str) -> Waiter:
    return Waiter(key, Batch((b"{}",)))


def test_group_contains_only_appends_to_the_same_session() -> None:
    gate = Gate()
    mine, other, alone, along = _append("a"), _append("b"), Waiter("a"), _append("a")
    gate.waiting += [mine, other, alone, along]
    assert gate._take_group(mine) == [mine, along]
    assert gate.waiting == [other, alone]


def test_p7_only_the_first_in_the_queue_may_lead() -> None:
    gate = Gate()
    first, second = _append("a"), _append("a")
    gate.waiting += [first, second]
    assert gate._may_lead(first)
    assert not gate._may_lead(second)
    with gate.lock:
        assert not gate._may_lead(first)


def test_p8_append_started_by_an_interrupted_leader_is_not_repeated() -> None:
    gate, mine, fresh = Gate(), _append("a"), _append("a")
    led = list[Waiter]()
    mine.is_started = True
    gate._lead_group(mine, led.extend)
    assert isinstance(mine.error, MaybeStored)
    gate._lead_group(fresh, led.extend)
    assert led == [fresh]
    assert fresh.is_started


class InterruptedCaller(Waiter):
    """A waiting caller that is interrupted by Ctrl-C."""

    def wait(self) -> None:
        raise KeyboardInterrupt


def test_p8_caller_interrupted_twice_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    leave, strikes = gate._leave, iter([True])

    def interrupted_again(mine: Waiter) -> None:
        if next(strikes, False):
            raise KeyboardInterrupt
        leave(mine)

    monkeypatch.setattr(gate, "_leave", interrupted_again)
    with gate.lock, pytest.raises(KeyboardInterrupt):
        gate.enter(InterruptedCaller("a"), lambda _: None, time.monotonic() + SECONDS)
    assert gate.waiting == []


class LockTakenLate:
    """A lock that another thread takes after it looked free."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def locked(self) -> bool:
        return False


@pytest.mark.parametrize("call", ["add_message", "clear"])
def test_p8_wait_for_a_gate_respects_the_timeout(tmp_path: Path, call: str) -> None:
    with JSONLStore(tmp_path, busy_timeout=0.05) as store:
        store.add_message("a", "user", "opens the log")
        gate = store._queue._get_gate("a")
        real, gate.lock = gate.lock, cast("Any", LockTakenLate())
        told: list[object] = []

        calls: dict[str, Callable[[], object]] = {
            "add_message": lambda: store.add_message("a", "user", "waits"),
            "clear": lambda: store.clear("a"),
        }

        def caller() -> None:
            try:
                told.append(calls[call]())
            except StoreBusy as error:
                told.append(error)

        thread = threading.Thread(target=caller, daemon=True)
        thread.start()
        thread.join(SECONDS)
        hangs = thread.is_alive()
        gate.lock.release()
        thread.join(SECONDS)
        gate.lock = real
        assert not hangs
        assert isinstance(told[0], StoreBusy)


# --- Ctrl-C ----------------------------------------------------------------------------------

_MODULES = (write_queue, open_logs)


class Caller(threading.Thread):
    """A thread that makes one call, and the result of the call."""

    def __init__(self, append: Callable[[], int | None], strike: Striking | None = None) -> None:
        super().__init__()
        self.told: int | BaseException | None = None
        self._append, self._strike = append, strike

    def run(self) -> None:
        try:
            with self._strike.watching() if self._strike is not None else nullcontext():
                self.told = self._append()
        except BaseException as error:  # noqa: BLE001  it is what the test looks at
            self.told = error


def _strike_at(number: int, store: JSONLStore, path: Path) -> str:
    """Interrupt the leader of three callers; return the place, or "" if there was no interrupt."""
    key, strike = f"{number}", Striking(number, _MODULES)
    store.add_message(key, "user", "before")
    gate = store._queue._get_gate(key)
    callers = [
        Caller(lambda: store.add_message(key, "user", "leader"), strike),
        Caller(lambda: store.add_message(key, "user", "second")),
        Caller(lambda: store.add_message(key, "user", "third")),
    ]
    with gate.lock:
        for waiting, caller in enumerate(callers, 1):
            caller.start()
            while len(gate.waiting) < waiting:
                time.sleep(0)
        strike.armed.set()
    gate.wake_next()
    for caller in callers:
        caller.join(SECONDS)
    assert not any(caller.is_alive() for caller in callers), strike.where
    _check_results([caller.told for caller in callers], store, key, strike.where)
    assert not gate.waiting, strike.where
    assert not gate.lock.locked(), strike.where
    _check_free(path, key)
    assert store.add_message(key, "user", "after")
    return strike.where


def _check_free(path: Path, key: str) -> None:
    """Raise BlockingIOError if another process would have to wait."""
    with (path / "sessions" / f"{key}.jsonl").open("rb") as log:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _check_results(told: list[Any], store: JSONLStore, key: str, where: str) -> None:
    """Check that acknowledged messages are stored once, and uncertain ones at most once."""
    found = {m.seq: m.content for m in store.get_history(key)}
    assert max(Counter(found.values()).values()) == 1, where
    for name, answer in zip(("leader", "second", "third"), told, strict=True):
        if isinstance(answer, int):
            assert found[answer] == name, where
        elif name == "leader":
            assert isinstance(answer, KeyboardInterrupt), (where, answer)
        else:
            assert isinstance(answer, MaybeStored), (where, answer)


def test_p7_p8_ctrl_c_anywhere_in_the_leader_does_not_affect_other_callers(
    fast_path: Path,
) -> None:
    struck = list[str]()
    with JSONLStore(fast_path, busy_timeout=5) as store:
        while where := _strike_at(len(struck) + 1, store, fast_path):
            struck.append(where)
    assert {"_take_group", "_lead_group", "enter", "_run_group"} <= {
        where.partition(",")[0] for where in struck
    }


def test_p7_p8_ctrl_c_anywhere_in_an_append_leaves_no_lock(fast_path: Path) -> None:
    struck = list[str]()
    with JSONLStore(fast_path) as store:
        while not struck or struck[-1]:
            key, strike = f"{len(struck)}", Striking(len(struck) + 1, _MODULES)
            for _ in range(2):  # so that the last of three has the shortest path
                store.add_message(key, "user", "before")
            strike.armed.set()
            caller = Caller(partial(store.add_message, key, "user", "x"), strike)
            caller.start()
            caller.join(SECONDS)
            _check_free(fast_path, key)
            assert [m.content for m in store.get_history(key)][2:] in ([], ["x"]), strike.where
            assert store.add_message(key, "user", "after") in (3, 4), strike.where
            struck.append(strike.where)
    assert {"try_fast_append", "fast_append"} == {where.partition(",")[0] for where in struck[:-1]}


def test_p7_p8_ctrl_c_anywhere_in_a_change_leaves_no_lock(fast_path: Path) -> None:
    struck = list[str]()
    with JSONLStore(fast_path) as store:
        while not struck or struck[-1]:
            key, strike = f"{len(struck)}", Striking(len(struck) + 1, _MODULES)
            store.add_message(key, "user", "before")
            strike.armed.set()
            caller = Caller(partial(store.set_summary, key, "x"), strike)
            caller.start()
            caller.join(SECONDS)
            _check_free(fast_path, key)
            assert store.get_summary(key) in ("", "x"), strike.where
            store.set_summary(key, "after")
            struck.append(strike.where)
    assert {"run_exclusive", "_run_work"} <= {where.partition(",")[0] for where in struck}
