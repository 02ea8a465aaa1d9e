"""Tests P8: Ctrl-C at any place of a call leaves the store usable by every thread."""

import contextlib
import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stenolog import SQLiteStore
from stenolog.stores import locks, log_reports
from stenolog.stores.sql import leases
from stenolog.stores.sqlite import (
    connections,
    database,
    database_file,
    gate,
    lease_holders,
    transactions,
)
from stenolog.stores.sqlite import store as sqlite_store
from support.interrupts import Striking

SECONDS = 20
_MODULES = (
    connections,
    database,
    gate,
    lease_holders,
    leases,
    sqlite_store,
    transactions,
    log_reports,
    locks,
    threading,
    contextlib,
)

Call = Callable[[SQLiteStore], object]


def _lease(store: SQLiteStore) -> None:
    with store.lease("a", ttl=0.05, wait=0):
        pass


CALLS: dict[str, Call] = {
    "read": lambda store: store.get_history("a", last=2),
    "append": lambda store: store.add_message("a", "user", "x"),
    "change": lambda store: store.set_meta("a", title="x"),
    "lease": _lease,  # a lease that is acquired and lost is free after its ttl
}


class _Thread(threading.Thread):
    """Makes calls in a daemon thread, so that a hanging call does not block the test run."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.error: BaseException | None = None
        self._call = call
        self.start()
        self.join(SECONDS)

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            # Without its frames, which would keep lost objects alive.
            self.error = error.with_traceback(None)


def _strike_at(number: int, store: SQLiteStore, call: Call) -> str:
    strike = Striking(number, _MODULES)

    def struck() -> None:
        with strike.watching():
            strike.armed.set()
            try:
                call(store)
            finally:
                strike.armed.clear()

    def use() -> None:
        seq = store.add_message("a", "user", "after")
        assert store.get_history("a", last=1)[0].seq == seq
        store.lease("a", ttl=60).release()

    thread = _Thread(struck)
    assert not thread.is_alive(), f"the call hangs: {strike.where}"
    assert isinstance(thread.error, KeyboardInterrupt) == bool(strike.where), strike.where
    after = _Thread(use)
    assert not after.is_alive(), f"the store hangs: {strike.where}"
    assert after.error is None, f"{after.error!r}: {strike.where}"
    return strike.where


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *((name, 3) for name in CALLS),
        *(pytest.param(name, 1, marks=pytest.mark.full) for name in CALLS),
    ],
)
def test_p8_ctrl_c_anywhere_in_a_call_leaves_the_store_usable(
    file: Path, name: str, step: int
) -> None:
    struck: list[str] = []
    # As few connections as possible, so that a lost one is missing immediately.
    with pytest.MonkeyPatch.context() as patched, SQLiteStore(file, busy_timeout=1) as store:
        patched.setattr(connections, "MAX_READERS", 1)
        store.add_message("a", "user", "x")
        while where := _strike_at(step * len(struck) + 1, store, CALLS[name]):
            struck.append(where)
    assert len(struck) > 10


def _open_files(folder: Path) -> list[str]:
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.append(str(descriptor.readlink()))
    return sorted(path for path in found if path.startswith(str(folder)))


def test_p8_ctrl_c_while_a_store_is_opened_leaves_no_file_open(tmp_path: Path) -> None:
    # Cached before the first interrupt: every round must count the same places.
    database_file.empty_database()
    number, where = 1, "first"
    while where:
        folder = tmp_path / f"{number}"
        strike = Striking(number, (gate, database_file))
        strike.armed.set()
        store: SQLiteStore | None = None
        with contextlib.suppress(KeyboardInterrupt), strike.watching():
            store = SQLiteStore(folder / "sessions.db")
        where = strike.where
        if store is not None:
            store.close()
        if _open_files(folder):
            gc.collect()
        assert _open_files(folder) == [], where
        number += 1
    assert number > 10
