"""Tests P3 and P4: damage does not change when the log is compacted or rewritten."""

import errno
import os
from pathlib import Path

import pytest

from stenolog import JSONLStore, NotStored

KEY = "a"


def path_of(workspace: Path) -> Path:
    return workspace / "sessions" / "a.jsonl"


def flip(workspace: Path, needle: bytes) -> None:
    text = path_of(workspace).read_bytes()
    place = text.index(needle)
    path_of(workspace).write_bytes(text[:place] + b"#" + text[place + 1 :])


def seqs(store: JSONLStore) -> list[int]:
    return [message.seq for message in store.get_history(KEY, full=True)]


def renew(store: JSONLStore, patch: pytest.MonkeyPatch) -> None:
    """Let one sync fail, so that the log is written into a new file."""
    real = os.fdatasync
    failed: list[int] = []

    def fdatasync(descriptor: int) -> None:
        if not failed:
            failed.append(descriptor)
            raise OSError(errno.EIO, "input/output error")
        real(descriptor)

    store.add_message(KEY, "user", "synced by this process")
    with patch.context() as once:
        once.setattr(os, "fdatasync", fdatasync)
        with pytest.raises(NotStored):
            store.add_message(KEY, "user", "fails")


def test_p3_compaction_does_not_spread_damage_within_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_message(KEY, "user", "1")
        store.add_messages(KEY, [{"n": 2}, {"n": 3}, {"n": 4}])
        store.add_message(KEY, "user", "5")
    flip(tmp_path, b'{"n":3}')
    with JSONLStore(tmp_path) as store:
        assert seqs(store) == [1, 2, 4, 5]
        store.checkpoint(KEY, summary="", upto=4)
        store.compact(KEY)
        assert seqs(store) == [1, 2, 4, 5]
        renew(store, monkeypatch)
        assert seqs(store) == [1, 2, 4, 5, 6]
        store.clear(KEY)
        store.compact(KEY)
    with JSONLStore(tmp_path) as store:
        assert seqs(store) == [1, 2, 4, 5, 6]
        assert store.info(KEY).lost == 1


@pytest.mark.parametrize("then", ["compact", "renew"])
def test_p4_damaged_first_lines_do_not_orphan_the_archives(
    then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JSONLStore(tmp_path) as store:
        for number in range(6):
            store.add_message(KEY, "user", str(number))
        store.checkpoint(KEY, summary="", upto=4)
        store.compact(KEY)
        for number in range(6, 9):
            store.add_message(KEY, "user", str(number))
    text = path_of(tmp_path).read_bytes()
    first = text.index(b"\n") + 1
    second = text.index(b"\n", first) + 1
    path_of(tmp_path).write_bytes(b"#" * (second - 1) + text[second - 1 :])
    with JSONLStore(tmp_path) as store:
        assert seqs(store) == list(range(1, 10))
        if then == "renew":
            renew(store, monkeypatch)
        store.checkpoint(KEY, summary="", upto=5)
        assert store.compact(KEY).archived == 1, "what stands before the next intact state"
    with JSONLStore(tmp_path) as store:
        assert seqs(store)[:9] == list(range(1, 10))
        assert store.info(KEY).lost == 0
        store.undo(KEY)
        store.undo(KEY)
        assert [m.seq for m in store.get_history(KEY)][:9] == list(range(1, 10))


def test_p3_duplicate_record_counts_once_and_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with JSONLStore(tmp_path) as store:
        for number in range(3):
            store.add_message(KEY, "user", str(number))
    text = path_of(tmp_path).read_bytes()
    last = text[text.rindex(b'{"kind"') :]
    path_of(tmp_path).write_bytes(text + last)
    with JSONLStore(tmp_path) as store:
        assert seqs(store) == [1, 2, 3]
        assert store.info(KEY).damaged == 1
        assert caplog.records
        assert store.add_message(KEY, "user", "on") == 4


def test_p12_idempotency_key_of_a_damaged_batch_is_known(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_messages(KEY, [{"n": 1}, {"n": 2}, {"n": 3}], once="t")
        store.add_message(KEY, "user", "proof")
    flip(tmp_path, b'{"n":2}')
    with JSONLStore(tmp_path) as store:
        assert store.add_messages(KEY, [{"n": 1}, {"n": 2}, {"n": 3}], once="t") == [1, 2, 3]
        assert seqs(store) == [1, 3, 4]


def test_p9_many_damaged_lines_are_read_in_linear_time(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_messages(KEY, [{"n": n} for n in range(20_000)])
    path_of(tmp_path).write_bytes(path_of(tmp_path).read_bytes().replace(b"\n", b"\r\n"))
    with JSONLStore(tmp_path) as store:
        assert len(store.get_history(KEY)) == 20_000
