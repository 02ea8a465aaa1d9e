"""Tests of session copies: written in one step even if system calls fail, read, and listed."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from stenolog import JSONLStore, StenologError
from stenolog.stores.jsonl.directory import Directory
from stenolog.transfer.copy import copy_snapshots
from support.copied_stores import digests

CALLS: Final = ("rename", "link", "unlink", "fdatasync", "fsync", "write")


class Faults:
    """Lets the n-th system call that changes something fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.left = number
        for name in CALLS:
            monkeypatch.setattr(os, name, self._failing(getattr(os, name)))

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise OSError(errno.EIO, "it fails")
            return call(*args, **options)

        return failing


def _fill(store: JSONLStore) -> None:
    for key in "abcd":
        for text in ("one", "two", "three"):
            store.add_message(key, "user", f"{text} of {key}")
    for key in "cd":
        store.truncate_history(key, 1)
        store.compact(key)
    for key in "bd":
        store.delete(key)


def test_p2_failed_system_call_during_a_copy_leaves_whole_sessions(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JSONLStore(fast_path / "source") as source:
        _fill(source)
        wanted = digests(source)
        number = 0
        while True:
            number += 1
            with JSONLStore(fast_path / "target") as target:
                with monkeypatch.context() as patch:
                    faults = Faults(patch, number)
                    with suppress(StenologError):
                        copy_snapshots(source, target)
                assert digests(target).items() <= wanted.items(), f"call {number} failed"
                assert copy_snapshots(source, target).problems == (), f"call {number} failed"
                assert digests(target) == wanted, f"call {number} failed"
                assert [*(fast_path / "target/sessions").glob(".*.copy")] == []
            shutil.rmtree(fast_path / "target")
            if faults.left > 0:
                break
    assert number > 30, "so many calls there are at the least"


def test_incomplete_record_is_void_in_a_snapshot_unless_a_writer_holds_the_log(
    fast_path: Path,
) -> None:
    with JSONLStore(fast_path) as store:
        store.add_message("a", "user", "one")
        store.add_messages("a", [{"n": number} for number in range(3)])
    log = fast_path / "sessions/a.jsonl"
    log.write_bytes(log.read_bytes()[:-9])
    with JSONLStore(fast_path) as store, log.open("rb") as writer:
        [mark] = store.admin.list_snapshots()
        fcntl.flock(writer, fcntl.LOCK_EX)
        with store.admin.read_snapshot(mark) as reading:
            assert (reading.snapshot.last_seq, reading.snapshot.void) == (1, [])
        fcntl.flock(writer, fcntl.LOCK_UN)
        with store.admin.read_snapshot(mark) as reading:
            last_seq = store.info("a").last_seq
            assert (reading.snapshot.last_seq, reading.snapshot.void) == (last_seq, [(2, last_seq)])
        assert [message.content for message in store.get_history("a")] == ["one"]


def test_session_that_is_deleted_during_the_listing_is_listed(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JSONLStore(fast_path) as store, JSONLStore(fast_path) as other:
        store.add_message("a", "user", "one")
        list_names = Directory.list_names

        def list_after_delete(directory: Directory) -> list[str]:
            monkeypatch.undo()
            other.delete("a")
            return list_names(directory)

        monkeypatch.setattr(Directory, "list_names", list_after_delete)
        [mark] = store.admin.list_snapshots()
        assert (mark.key, mark.deleted is None) == ("a", False)
