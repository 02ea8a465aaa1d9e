"""Tests P9: memory of a process does not grow with the number of sessions it has used."""

import gc
import threading
import tracemalloc
from pathlib import Path

from stenolog import JSONLStore
from stenolog.stores.jsonl import open_logs
from stenolog.stores.jsonl.log import Log
from stenolog.stores.jsonl.write_queue import MAX_GATES
from support.reachable_objects import hanging_on

KEYS = 100_000
WRITTEN = 9_000
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


def _touch(store: JSONLStore, first: int, end: int) -> None:
    """Lock missing sessions as a writer does; read one in ten."""
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
        assert len(store._queue._gates) <= MAX_GATES == 1_024
        assert sum(hanging_on(store)[kind] for kind in _LOCKS) <= MAX_GATES + 8
        assert hanging_on(store).total() <= before.total() + 8


def test_p9_cached_state_of_written_sessions_is_bounded(fast_path: Path) -> None:
    with JSONLStore(fast_path, cache_bytes=100_000) as store:
        for number in range(WRITTEN):
            store.add_message(f"user:{number}", "user", "x" * 100)
            if number % 3 == 0:
                assert len(store.get_history(f"user:{number}")) == 1
        logs, kinds = store._logs, hanging_on(store)
        assert len(store.list_sessions()) == WRITTEN > open_logs._MAX_SYNCED_ENTRIES
        assert len(logs._open_logs) <= open_logs._MAX_OPEN_LOGS
        assert len(logs.synced_entries) <= open_logs._MAX_SYNCED_ENTRIES
        assert sum(log.memory_bytes for log in logs._open_logs.values()) <= 100_000
        assert logs._locked_logs == {}
        assert logs.suspect_names == set()
        assert kinds[Log] <= open_logs._MAX_OPEN_LOGS
        # One for each gate, one for each open log, and those of the store.
        assert sum(kinds[kind] for kind in _LOCKS) <= MAX_GATES + open_logs._MAX_OPEN_LOGS + 8
