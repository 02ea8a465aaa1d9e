"""P9: what a process holds does not grow with the number of sessions it has met."""

import gc
import threading
import tracemalloc
from pathlib import Path

from stenolog import JSONLStore
from stenolog.stores.jsonl import open_logs
from stenolog.stores.jsonl.log import Log
from stenolog.stores.jsonl.write_queue import GATES
from support.reachable_objects import hanging_on

KEYS = 100_000
WRITTEN = 9_000
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


def _touch(store: JSONLStore, first: int, end: int) -> None:
    """Through the locks, as a writer goes, of sessions that are not there; one in ten is read."""
    for number in range(first, end):
        store.clear(f"user:{number}")
        if number % 10 == 0:
            assert store.get_history(f"user:{number}") == []


def test_p9_locks_and_memory_do_not_grow_with_the_number_of_keys(fast_path: Path) -> None:
    with JSONLStore(fast_path) as store:
        _touch(store, 0, KEYS // 2)
        before = hanging_on(store)
        tracemalloc.start()
        try:
            _touch(store, KEYS // 2, KEYS)
            gc.collect()
            grown, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert grown < 1_000_000
        assert len(store._queue._gates) <= GATES == 1_024
        assert sum(hanging_on(store)[kind] for kind in _LOCKS) <= GATES + 8
        assert hanging_on(store).total() <= before.total() + 8


def test_p9_cached_state_of_written_sessions_is_bounded(fast_path: Path) -> None:
    with JSONLStore(fast_path, cache_bytes=100_000) as store:
        for number in range(WRITTEN):
            store.add_message(f"user:{number}", "user", "x" * 100)
            if number % 3 == 0:
                assert len(store.get_history(f"user:{number}")) == 1
        logs, kinds = store._logs, hanging_on(store)
        assert len(store.list_sessions()) == WRITTEN > open_logs._MAX_ENTRIES
        assert len(logs._open) <= open_logs._MAX_OPEN
        assert len(logs.entries) <= open_logs._MAX_ENTRIES
        assert sum(log.weight for log in logs._open.values()) <= 100_000
        assert logs._locked == {}
        assert logs.suspects == set()
        assert kinds[Log] <= open_logs._MAX_OPEN
        # One for each gate, one for each open log, and those of the store.
        assert sum(kinds[kind] for kind in _LOCKS) <= GATES + open_logs._MAX_OPEN + 8
