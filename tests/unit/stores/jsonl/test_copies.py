"""Tests that copied sessions replace a session in one step, even if system calls fail."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from stenolog import JSONLStore, Message, StenologError, StoreBusy
from stenolog.transfer.copy import copy_snapshots
from support.copied_stores import digests, mark_of

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


def _append(store: JSONLStore) -> None:
    store.add_message("a", "user", "by itself")


def _delete(store: JSONLStore) -> None:
    store.delete("a")


@pytest.mark.parametrize("meanwhile", [_append, _delete])
@pytest.mark.parametrize("moved", [False, True])
def test_copy_changed_during_its_replacement_is_not_replaced(
    fast_path: Path, meanwhile: Callable[[JSONLStore], None], moved: bool
) -> None:
    with JSONLStore(fast_path / "source") as source, JSONLStore(fast_path / "target") as target:
        source.add_message("a", "user", "one")
        copy_snapshots(source, target)
        outdated = mark_of(target, "a")
        if moved:
            source.delete("a")
            source.restore("a", as_key="b")
        source.add_message("b" if moved else "a", "user", "two")
        [mark] = source.list_snapshots()

        def messages(found: Iterator[Message]) -> Iterator[Message]:
            yield from found
            meanwhile(target)

        with (
            source.read_snapshot(mark) as reading,
            target.snapshot_writer() as writer,
            pytest.raises(StoreBusy),
        ):
            writer.write(reading.snapshot, messages(reading.messages), instead_of=outdated.stamp)
        [left] = target.list_snapshots()
        assert (left.key, left.uid) == ("a", mark.uid)
        with target.read_snapshot(left) as reading:
            said = [message.content for message in reading.messages]
        assert said == (["one", "by itself"] if meanwhile is _append else ["one"])


def test_incomplete_record_is_void_in_a_snapshot_unless_a_writer_holds_the_log(
    fast_path: Path,
) -> None:
    with JSONLStore(fast_path) as store:
        store.add_message("a", "user", "one")
        store.add_messages("a", [{"n": number} for number in range(3)])
    log = fast_path / "sessions/a.jsonl"
    log.write_bytes(log.read_bytes()[:-9])
    with JSONLStore(fast_path) as store, log.open("rb") as writer:
        [mark] = store.list_snapshots()
        fcntl.flock(writer, fcntl.LOCK_EX)
        with store.read_snapshot(mark) as reading:
            assert (reading.snapshot.last_seq, reading.snapshot.void) == (1, [])
        fcntl.flock(writer, fcntl.LOCK_UN)
        with store.read_snapshot(mark) as reading:
            last_seq = store.info("a").last_seq
            assert (reading.snapshot.last_seq, reading.snapshot.void) == (last_seq, [(2, last_seq)])
        assert [message.content for message in store.get_history("a")] == ["one"]
