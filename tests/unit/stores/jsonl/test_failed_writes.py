"""Tests P8: a failed write or sync is not acknowledged, and the error says if it may be stored."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stenolog import JSONLStore, MaybeStored, NotStored, StoreUnavailable

KEY = "a"


class Fault:
    """Makes a system call fail a number of times, from its n-th call on."""

    def __init__(
        self, patch: pytest.MonkeyPatch, name: str, code: int, *, skip: int = 0, times: int = 1
    ) -> None:
        self.failed = 0
        real: Callable[..., object] = getattr(os, name)
        calls = 0

        def call(*arguments: object, **named: object) -> object:
            nonlocal calls
            calls += 1
            if skip < calls <= skip + times:
                self.failed += 1
                raise OSError(code, os.strerror(code))
            return real(*arguments, **named)

        patch.setattr(os, name, call)


def fill_up(patch: pytest.MonkeyPatch, room: Callable[[bytes], int]) -> None:
    """Let the next write be short, as on a full disk, and the one after it fail."""
    real = os.write
    calls = 0

    def write(descriptor: int, text: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.ENOSPC, "full")
        return real(descriptor, text[: room(text)])

    patch.setattr(os, "write", write)


def contents(path: Path) -> list[str]:
    with JSONLStore(path) as store:
        return [m.content for m in store.get_history(KEY)]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_p8_message_is_absent_after_a_failed_sync(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_message(KEY, "user", "kept")
        with monkeypatch.context() as patch:
            fault = Fault(patch, "fdatasync", code)
            with pytest.raises(NotStored, match="Nothing of it was stored"):
                store.add_message(KEY, "user", "lost")
            assert fault.failed == 1
        assert store.info(KEY).generation == 2, "what came before was put into a fresh file"
        assert store.add_message(KEY, "user", "next") == 2
    assert contents(tmp_path) == ["kept", "next"]


def test_p8_repeated_sync_failure_raises_maybe_stored_and_blocks_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_message(KEY, "user", "kept")
        with monkeypatch.context() as patch:
            Fault(patch, "fdatasync", errno.EIO, times=100)
            Fault(patch, "fsync", errno.EIO, times=100)
            with pytest.raises(MaybeStored, match="same idempotency key"):
                store.add_message(KEY, "user", "maybe", once="t")
            with pytest.raises(StoreUnavailable):
                store.add_message(KEY, "user", "refused")
            assert not store.admin.health().ok
        assert store.add_message(KEY, "user", "maybe", once="t") == 2
        assert store.admin.health().ok
    assert contents(tmp_path) == ["kept", "maybe"]


def test_p8_a_failed_sync_of_the_first_message_leaves_no_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JSONLStore(tmp_path) as store:
        with monkeypatch.context() as patch:
            Fault(patch, "fdatasync", errno.EIO)
            with pytest.raises(NotStored):
                store.add_message(KEY, "user", "lost")
        assert store.list_sessions() == []
        assert store.add_message(KEY, "user", "first") == 1
    assert contents(tmp_path) == ["first"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_p8_failed_write_leaves_the_file_unchanged(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_message(KEY, "user", "kept")
        before = (tmp_path / "sessions" / "a.jsonl").read_bytes()
        with monkeypatch.context() as patch:
            Fault(patch, "write", code)
            with pytest.raises(NotStored):
                store.add_message(KEY, "user", "lost")
        assert (tmp_path / "sessions" / "a.jsonl").read_bytes() == before
        assert store.add_message(KEY, "user", "next") == 2


def test_p8_short_write_is_voided_before_the_next_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_message(KEY, "user", "kept")
        with monkeypatch.context() as patch:
            fill_up(patch, lambda text: len(text) // 2)
            with pytest.raises(NotStored):
                store.add_message(KEY, "user", "lost")
        assert store.add_message(KEY, "user", "next") == 2
        assert store.info(KEY).void_bytes > 0
    assert contents(tmp_path) == ["kept", "next"]


def test_p2_short_write_of_a_batch_stores_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_message(KEY, "user", "kept")
        with monkeypatch.context() as patch:
            fill_up(patch, lambda text: text.index(b'"b"'))
            with pytest.raises(NotStored):
                store.add_messages(KEY, [{"content": text} for text in "abc"])
        seq = store.add_message(KEY, "user", "next")
        assert seq == 3, "the seq that stood in the unfinished write is not given out again"
        assert store.info(KEY).lost == 0, "nothing that was acknowledged is missing"
    assert contents(tmp_path) == ["kept", "next"]


def test_p8_failed_folder_sync_raises_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JSONLStore(tmp_path) as store:
        with monkeypatch.context() as patch:
            Fault(patch, "fsync", errno.EIO)
            with pytest.raises(NotStored):
                store.add_message(KEY, "user", "lost")
        assert store.get_history(KEY) == []
        assert store.add_message(KEY, "user", "first") == 1
