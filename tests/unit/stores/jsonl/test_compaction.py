"""Tests P4 and P7: moving the start of a log into an archive loses and doubles nothing."""

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from stenolog import JSONLStore, MaybeStored, NotStored, OnceConflict

KEY = "a"


def fill(store: JSONLStore, count: int, start: int = 1) -> None:
    for number in range(start, start + count):
        store.add_message(KEY, "user", f"m{number}", once=f"t{number}")


def seqs(store: JSONLStore, *, full: bool = False) -> list[int]:
    return [message.seq for message in store.get_history(KEY, full=full)]


def live(path: Path) -> bytes:
    return (path / "sessions" / "a.jsonl").read_bytes()


def test_p4_state_records_above_the_cut_do_not_hide_the_archive(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        fill(store, 600)  # there is a state at least every 256 lines
        store.checkpoint(KEY, summary="the first hundred", upto=100)
        assert store.compact(KEY).archived == 100
    assert live(tmp_path).count(b'{"kind":"state"') == 3, "twice at the start, once at the end"
    with JSONLStore(tmp_path) as store:
        assert seqs(store) == list(range(101, 601))
        assert seqs(store, full=True) == list(range(1, 601))
        assert [m.seq for m in islice(store.follow(KEY), 600)] == list(range(1, 601))
        undone = store.undo(KEY)
        assert (undone.op, undone.shown) == ("checkpoint", 100)
        assert seqs(store) == list(range(1, 601))
        assert store.get_history(KEY)[0].content == "m1"


def test_p12_idempotency_keys_survive_compaction(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        fill(store, 20)
        store.add_messages(KEY, [{"n": 1}, {"n": 2}], once="batch")
        store.clear(KEY)
        store.compact(KEY)
        store.add_message(KEY, "user", "later")
        store.clear(KEY)
        store.compact(KEY)
    with JSONLStore(tmp_path) as store:
        assert store.add_message(KEY, "user", "m7", once="t7") == 7
        assert store.add_messages(KEY, [{"n": 1}, {"n": 2}], once="batch") == [21, 22]
        with pytest.raises(OnceConflict):
            store.add_message(KEY, "user", "other", once="t7")
        assert store.info(KEY).last_seq == 23


def test_p12_idempotency_keys_of_a_thousand_messages_are_known_across_files(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_message(KEY, "user", "first", once="first")
        for start in range(0, 999, 111):
            store.add_messages(KEY, [{"n": n} for n in range(start, start + 111)])
        store.clear(KEY)
        store.compact(KEY)
    with JSONLStore(tmp_path) as store:
        assert store.add_message(KEY, "user", "first", once="first") == 1


def test_p4_undo_reads_a_very_long_summary_from_the_archive(tmp_path: Path) -> None:
    long = "what was said before " * 1_000
    with JSONLStore(tmp_path) as store:
        fill(store, 3)
        store.set_summary(KEY, long)
        store.checkpoint(KEY, summary="short", upto=2)
        fill(store, 3, start=4)
        store.truncate_history(KEY, 1)
        store.compact(KEY)
        assert b"what was said" not in live(tmp_path)
    with JSONLStore(tmp_path) as store:
        store.undo(KEY)
        store.undo(KEY)
        assert store.get_summary(KEY) == long


def test_p2_a_batch_is_never_split_between_archive_and_log(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        fill(store, 1)
        store.add_messages(KEY, [{"n": n} for n in range(3)])
        store.checkpoint(KEY, summary="", upto=3)
        store.compact(KEY)
        assert store.info(KEY).archived == 1
    with JSONLStore(tmp_path) as store:
        assert seqs(store) == [4]
        assert seqs(store, full=True) == [1, 2, 3, 4]


@pytest.mark.parametrize("rename", [1, 2])
def test_p2_crash_around_a_rename_neither_duplicates_nor_loses_messages(
    rename: int, tmp_path: Path
) -> None:
    script = """
import os, sys
from stenolog import JSONLStore
store = JSONLStore(sys.argv[1])
for number in range(1, 11):
    store.add_message("a", "user", f"m{number}")
store.checkpoint("a", summary="five", upto=5)
calls, real = [], os.rename
def rename(*arguments, **named):
    calls.append(1)
    if len(calls) == int(sys.argv[2]):
        os._exit(9)
    return real(*arguments, **named)
os.rename = rename
store.compact("a")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(rename)], check=False, timeout=60
    )
    assert done.returncode == 9
    with JSONLStore(tmp_path) as store:
        assert seqs(store) == [6, 7, 8, 9, 10]
        assert seqs(store, full=True) == list(range(1, 11))
        assert store.compact(KEY).archived == 5
        assert seqs(store, full=True) == list(range(1, 11))
        assert store.add_message(KEY, "user", "m11") == 11
    with JSONLStore(tmp_path) as store:
        assert seqs(store, full=True) == list(range(1, 12))
    assert len(list(tmp_path.rglob("*.jsonl.gz"))) == 1


def recorded(name: str, steps: list[str]) -> Callable[..., object]:
    """Return the system call of this name, with its calls recorded in `steps`."""
    real: Callable[..., object] = getattr(os, name)

    def call(target: int | str, *arguments: object, **named: object) -> object:
        path = Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else target
        steps.append(f"{name} {Path(path).name}")
        return real(target, *arguments, **named)

    return call


def test_archive_is_synced_before_the_log_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    for name in ("fdatasync", "fsync", "rename"):
        monkeypatch.setattr(os, name, recorded(name, steps))
    with JSONLStore(tmp_path) as store:
        fill(store, 5)
        store.clear(KEY)
        uid = store.info(KEY).uid
        del steps[:]
        store.compact(KEY)
    assert steps == [
        "fsync sessions",
        "fsync archive",
        "fdatasync .1-5.jsonl.gz.new",
        "rename .1-5.jsonl.gz.new",
        f"fsync {uid}",
        "fdatasync .a.jsonl.new",
        "rename .a.jsonl.new",
        "fsync sessions",
    ]


def test_p4_a_missing_archive_is_reported_and_the_rest_stays_readable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with JSONLStore(tmp_path) as store:
        fill(store, 5)
        store.truncate_history(KEY, 2)
        store.compact(KEY)
    for path in tmp_path.rglob("*.gz"):
        path.unlink()
    with JSONLStore(tmp_path) as store:
        assert seqs(store) == [4, 5]
        assert seqs(store, full=True) == [4, 5]
        assert store.info(KEY).lost == 3
        assert "1-3" in caplog.text
        assert store.add_message(KEY, "user", "on") == 6


def test_p8_failed_rename_leaves_the_log_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(5, "input/output error")

    with JSONLStore(tmp_path) as store:
        fill(store, 5)
        store.clear(KEY)
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", fails)
            with pytest.raises(NotStored):
                store.compact(KEY)
        assert seqs(store, full=True) == [1, 2, 3, 4, 5]
        assert store.add_message(KEY, "user", "m6") == 6
        assert store.compact(KEY).archived == 5


def test_p8_compaction_with_a_failed_folder_sync_after_the_rename_raises_maybe_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_rename, real_sync = os.rename, os.fsync

    def rename_then_fail_syncs(source: str, target: str, **folders: int) -> None:
        real_rename(source, target, **folders)
        if target == "a.jsonl":
            monkeypatch.setattr(os, "fsync", fails)

    def fails(_: int) -> None:
        raise OSError(5, "input/output error")

    with JSONLStore(tmp_path) as store:
        fill(store, 5)
        store.truncate_history(KEY, 2)
        monkeypatch.setattr(os, "rename", rename_then_fail_syncs)
        with pytest.raises(MaybeStored):
            store.compact(KEY)
        monkeypatch.setattr(os, "rename", real_rename)
        monkeypatch.setattr(os, "fsync", real_sync)
        assert seqs(store, full=True) == [1, 2, 3, 4, 5]
        assert store.add_message(KEY, "user", "m6") == 6
        assert seqs(store) == [4, 5, 6]


def test_compaction_archives_nothing_if_a_purge_removes_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JSONLStore(tmp_path) as store, JSONLStore(tmp_path) as other:
        for number in range(4):
            store.add_message("a", "user", f"message {number}")
        store.checkpoint("a", summary="s", upto=3)
        real = store._directory.subfolder

        def purged_meanwhile(*names: str, create: bool) -> Any:
            folder = real(*names, create=create)
            if names[0] == "archive" and create:
                monkeypatch.undo()
                del folder
                other.admin.purge("a")
                return real(*names, create=False)
            return folder

        monkeypatch.setattr(store._directory, "subfolder", purged_meanwhile)
        assert store.compact("a").archived == 0
        assert store.list_sessions() == []
