"""Tests that Ctrl-C at every step of a call leaves no descriptor open and no lock held."""

import contextlib
import gc
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

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
"""Interrupt only every n-th place: there are about a thousand."""
_FINALIZER = ("close,", "__del__,")
"""Places in a finalizer, where Python ignores an exception and the descriptor stays open."""


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


def _interrupt(strike: Striking, call: Callable[[], object]) -> KeyboardInterrupt | None:
    """Return the exception with its traceback, as interactive programs keep it."""
    try:
        with strike.watching():
            call()
    except KeyboardInterrupt as error:
        return error
    return None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "call",
    [lambda store: store.admin.purge(KEY, before=2), lambda store: store.admin.restore("new")],
)
def test_p7_a_kept_traceback_of_ctrl_c_does_not_lock_the_new_file_of_a_log(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[JSONLStore], None]
) -> None:
    rename = os.rename
    number, where = 1, "first"
    while where and number < 60:  # the later steps do not use the file
        place = fast_path / f"{number}"
        strike = Striking(number, (contextlib, disk))

        def rename_and_arm(
            *args: Any, _armed: threading.Event = strike.armed, **folders: Any
        ) -> None:
            rename(*args, **folders)
            _armed.set()

        with JSONLStore(place) as store:
            for key in (KEY, KEY, "new"):
                store.add_message(key, "user", "text")
            store.delete("new")
            monkeypatch.setattr(os, "rename", rename_and_arm)
            kept = _interrupt(strike, lambda: call(store))
            where = strike.where
            monkeypatch.setattr(os, "rename", rename)
            with JSONLStore(place, busy_timeout=0) as other:
                for key in other.list_sessions():
                    other.add_message(key, "user", where or "last")
        del kept
        number += 1
    assert number > 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_p7_a_kept_traceback_of_ctrl_c_does_not_hold_a_lease(fast_path: Path) -> None:
    number, where = 1, "first"
    with JSONLStore(fast_path) as store, JSONLStore(fast_path) as other:
        store.add_message(KEY, "user", "text")
        while where and not where.startswith(_FINALIZER):
            strike = Striking(number, (leases,))
            strike.armed.set()
            kept = _interrupt(strike, lambda: store.lease(KEY, ttl=60))
            where = strike.where
            if not where.startswith(_FINALIZER):
                other.lease(KEY, ttl=60, wait=0).release()
            del kept
            number += 1
    assert number > 20


def test_p8_ctrl_c_at_any_step_leaks_no_folder_watch(fast_path: Path) -> None:
    before = _count_descriptors()
    number, where = 1, "first"
    while where:
        strike = Striking(number, (session_list,))
        strike.armed.set()
        with JSONLStore(fast_path) as store:
            with suppress(KeyboardInterrupt), strike.watching():
                store.admin.stamps()
                store.admin.stamps()  # the first call does not start a watch
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
