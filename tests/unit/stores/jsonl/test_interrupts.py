"""Ctrl-C at every step of a call: no descriptor stays open, no lock is kept."""

import gc
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from stenolog import JSONLStore
from stenolog.stores import disk
from stenolog.stores.jsonl import (
    archive,
    directory,
    leases,
    open_logs,
    rewrite,
    session_list,
)
from support.interrupts import Striking

KEY = "a"
_MODULES = (archive, directory, disk, leases, rewrite, open_logs)
_STEP = 17
"""Not every place is struck: there are about a thousand."""
_FINALIZER = ("close,", "__del__,")
"""Places in a finalizer, where Python ignores an exception; then the descriptor stays open."""


def _lease(store: JSONLStore) -> None:
    with store.lease(KEY, ttl=60) as lease:
        lease.renew()


def _count_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _change_all(store: JSONLStore) -> None:
    store.add_message(KEY, "user", "third")
    store.checkpoint(KEY, summary="s", upto=2)
    store.compact(KEY)
    store.get_history(KEY, full=True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("call", [_lease, _change_all])
def test_p8_ctrl_c_at_any_step_leaks_no_descriptor_or_lock(
    fast_path: Path, call: Callable[[JSONLStore], None]
) -> None:
    before = _count_descriptors()
    number, where = 1, "first"
    while where:
        place = fast_path / f"{number}"
        with JSONLStore(place, busy_timeout=5) as store:
            for text in ("first", "second"):
                store.add_message(KEY, "user", text)
        strike = Striking(number, _MODULES)
        strike.armed.set()
        with JSONLStore(place, busy_timeout=5) as store:
            with suppress(KeyboardInterrupt), strike.watching():
                call(store)
            where = strike.where
            call(store)
            with JSONLStore(place, busy_timeout=5) as other:
                call(other)
        if (after := _count_descriptors()) > before:
            gc.collect()
            after = _count_descriptors()
        if where.startswith(_FINALIZER):
            before = after
        assert after == before, where
        number += _STEP
    assert number > 30


def test_p8_ctrl_c_at_any_step_leaks_no_folder_watch(fast_path: Path) -> None:
    before = _count_descriptors()
    number, where = 1, "first"
    while where:
        strike = Striking(number, (session_list,))
        strike.armed.set()
        with JSONLStore(fast_path) as store:
            with suppress(KeyboardInterrupt), strike.watching():
                store.stamps()
                store.stamps()  # the first call does not begin a watch
            where = strike.where
        assert _count_descriptors() == before, where
        number += 1
    assert number > 5


def test_p8_interrupted_writes_release_their_descriptors(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fdatasync

    def interrupted(descriptor: int) -> None:
        real(descriptor)
        monkeypatch.setattr(os, "fdatasync", real)
        raise KeyboardInterrupt

    with JSONLStore(fast_path) as store:
        store.add_message(KEY, "user", "first")
        before = _count_descriptors()
        for number in range(5):
            monkeypatch.setattr(os, "fdatasync", interrupted)
            with suppress(KeyboardInterrupt):
                store.set_meta(KEY, number=number)
            store.add_message(KEY, "user", f"after {number}")
        gc.collect()
        assert _count_descriptors() == before
