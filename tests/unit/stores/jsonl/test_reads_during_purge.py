"""Tests that reads during a purge return every remaining message and report no damage."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stenolog import JSONLStore, NoSuchSession, StoreBusy
from stenolog.errors import SessionDeleted

KEY = "a"

JustThen = Callable[[Callable[[], object]], None]


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[tuple[JSONLStore, JSONLStore]]:
    """Yield a reader and a purger of twenty messages, fifteen of them in two archives."""
    with JSONLStore(tmp_path) as reader, JSONLStore(tmp_path) as purger:
        for number in range(1, 11):
            purger.add_message(KEY, "user", f"question {number}")
            purger.add_message(KEY, "assistant", f"answer {number}")
        for upto in (8, 15):
            purger.checkpoint(KEY, summary="compacted", upto=upto)
            purger.compact(KEY)
        yield reader, purger


@pytest.fixture
def just_then(monkeypatch: pytest.MonkeyPatch) -> JustThen:
    """Return a function that schedules work between reading the log and opening an archive."""
    opened = os.open

    def arm(work: Callable[[], object]) -> None:
        def open_late(path: Any, *args: Any, **options: Any) -> int:
            if str(path).endswith(".jsonl.gz"):
                monkeypatch.setattr(os, "open", opened)
                work()
            return opened(path, *args, **options)

        monkeypatch.setattr(os, "open", open_late)

    return arm


def seqs(store: JSONLStore, key: str = KEY) -> list[int]:
    return [message.seq for message in store.get_history(key, full=True)]


@pytest.mark.parametrize("before", [4, 9, 12, 18])
def test_p4_reader_gets_all_remaining_messages_during_a_purge(
    stores: tuple[JSONLStore, JSONLStore],
    just_then: JustThen,
    caplog: pytest.LogCaptureFixture,
    before: int,
) -> None:
    reader, purger = stores
    just_then(lambda: purger.admin.purge(KEY, before=before))
    assert seqs(reader) == list(range(before, 21))
    assert (reader.info(KEY).lost, reader.info(KEY).damaged) == (0, 0)
    assert caplog.text == ""


def test_p4_messages_shown_by_undo_are_read_during_a_purge(
    stores: tuple[JSONLStore, JSONLStore], just_then: JustThen
) -> None:
    reader, purger = stores
    purger.undo(KEY)
    purger.undo(KEY)
    just_then(lambda: purger.admin.purge(KEY, before=6))
    assert [message.seq for message in reader.get_history(KEY, last=18)] == list(range(6, 21))


def test_p4_follow_skips_no_remaining_message_during_a_purge(
    stores: tuple[JSONLStore, JSONLStore], just_then: JustThen, caplog: pytest.LogCaptureFixture
) -> None:
    reader, purger = stores
    just_then(lambda: purger.admin.purge(KEY, before=6))
    followed = [message.seq for message in reader.follow(KEY, timeout=0)]
    assert followed == list(range(6, 21))
    assert caplog.text == ""


def test_p4_fork_during_a_purge_has_the_rest_and_reports_no_damage(
    stores: tuple[JSONLStore, JSONLStore], just_then: JustThen, caplog: pytest.LogCaptureFixture
) -> None:
    reader, purger = stores
    purger.undo(KEY)
    purger.undo(KEY)
    just_then(lambda: purger.admin.purge(KEY, before=6))
    reader.fork(KEY, "b")
    assert seqs(reader, "b") == list(range(6, 21))
    assert caplog.text == ""


def test_reads_of_a_session_purged_meanwhile_find_no_session(
    stores: tuple[JSONLStore, JSONLStore], just_then: JustThen, caplog: pytest.LogCaptureFixture
) -> None:
    reader, purger = stores
    following = reader.follow(KEY, after=19)
    assert next(following).seq == 20
    just_then(lambda: purger.admin.purge(KEY))
    assert seqs(reader) == []
    with pytest.raises(SessionDeleted):
        next(following)
    with pytest.raises(NoSuchSession):
        reader.info(KEY)
    assert caplog.text == ""


def test_read_during_a_purge_raises_store_busy_after_the_timeout(
    tmp_path: Path, stores: tuple[JSONLStore, JSONLStore], just_then: JustThen
) -> None:
    _, purger = stores
    with JSONLStore(tmp_path, busy_timeout=0) as hasty:
        just_then(lambda: purger.admin.purge(KEY, before=4))
        with pytest.raises(StoreBusy):
            hasty.get_history(KEY, full=True)
        assert seqs(hasty) == list(range(4, 21))


def test_p3_missing_archive_without_a_purge_is_reported(
    tmp_path: Path,
    stores: tuple[JSONLStore, JSONLStore],
    just_then: JustThen,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader, _ = stores

    def lose() -> None:
        for path in tmp_path.rglob("1-8.jsonl.gz"):
            path.unlink()

    just_then(lose)
    assert seqs(reader) == list(range(9, 21))
    assert reader.info(KEY).lost == 8
    assert "8 messages are in missing or damaged archives" in caplog.text
