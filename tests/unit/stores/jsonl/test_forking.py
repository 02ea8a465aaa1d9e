"""Tests that a fork is a complete log, in which omitted messages are not damage."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from stenolog import JSONLStore, NoSuchSession
from stenolog.maintenance.workspace_check import examine
from stenolog.records import PurgeResult
from stenolog.stores.jsonl import lifecycle

KEY = "a"


def talk(store: JSONLStore) -> None:
    """Store ten messages; 1, 2, 5 and 8 are hidden, two of them in an archive."""
    for number in range(1, 11):
        store.add_message(KEY, "user", f"m{number}", once=f"t{number}")
    store.checkpoint(KEY, summary="two of them", upto=2)
    store.compact(KEY)
    store.admin.hide(KEY, 5, 5)
    store.admin.hide(KEY, 8, 8)


def seqs(store: JSONLStore, key: str = "b", *, full: bool = False) -> list[int]:
    return [message.seq for message in store.get_history(key, full=full)]


def log(place: Path, key: str = "b") -> Path:
    return place / "sessions" / f"{key}.jsonl"


def test_log_of_a_fork_has_state_records_at_start_and_end(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        talk(store)
        store.fork(KEY, "b", at=9)
        source = store.info(KEY)
    lines = [json.loads(line) for line in log(tmp_path).read_bytes().splitlines()]
    assert [line["kind"] for line in lines] == ["state"] * 2 + ["message"] * 5 + ["state"]
    assert [line["seq"] for line in lines] == [3, 3, 3, 4, 6, 7, 9, 10]
    assert lines[0]["body"] == lines[1]["body"] == lines[-1]["body"]
    state = lines[0]["body"]
    assert (state["key"], state["forked_from"], state["generation"]) == ("b", KEY, 1)
    assert state["uid"] != source.uid
    assert state["purged"] == [[1, 2], [5, 5], [8, 8]]
    assert {"undo", "archive", "tokens", "hidden", "lost"} & state.keys() == set()


def test_fork_contains_no_hidden_text(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        talk(store)
        store.set_summary(KEY, "an older one")
        store.set_summary(KEY, "the newest")
        store.fork(KEY, "b")
    text = log(tmp_path).read_bytes()
    for word in (b'"m1"', b'"m2"', b'"m5"', b'"m8"', b'"t3"', b"older", b"two of them"):
        assert word not in text
    assert b'"m3"' in text


def test_gaps_of_a_fork_are_not_reported_as_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with JSONLStore(tmp_path) as store:
        talk(store)
        store.fork(KEY, "b")
        store.add_message("b", "user", "after")
    with JSONLStore(tmp_path) as store:
        assert seqs(store) == seqs(store, full=True) == [3, 4, 6, 7, 9, 10, 11]
        assert [m.seq for m in store.follow("b", timeout=0)] == [3, 4, 6, 7, 9, 10, 11]
        store.truncate_history("b", 3)
        store.compact("b")
        assert seqs(store, full=True) == [3, 4, 6, 7, 9, 10, 11]
        info = store.info("b")
        assert (info.lost, info.damaged, info.count, info.archived) == (0, 0, 7, 7)
        store.undo("b")
        store.fork("b", "c")
        assert seqs(store, "c") == [3, 4, 6, 7, 9, 10, 11]
    assert examine(tmp_path).findings == ()
    assert caplog.text == ""


def test_p8_failed_sync_in_a_fork_reports_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JSONLStore(tmp_path) as store:
        talk(store)
        store.fork(KEY, "b")
        sync = os.fdatasync
        with monkeypatch.context() as patch:

            def once(_: int) -> None:
                patch.setattr(os, "fdatasync", sync)
                raise OSError(5, "failed")

            patch.setattr(os, "fdatasync", once)
            with pytest.raises(Exception, match="Nothing of it was stored"):
                store.add_message("b", "user", "x")
        assert store.info("b").generation == 2
        assert store.info("b").lost == 0
        assert store.add_message("b", "user", "x") == 11
    assert examine(tmp_path).findings == ()


def test_damaged_messages_are_left_out_of_a_fork(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        talk(store)
    text = log(tmp_path, KEY).read_bytes()
    log(tmp_path, KEY).write_bytes(text.replace(b'"m6"', b'"#6"'))
    with JSONLStore(tmp_path) as store:
        assert seqs(store, KEY) == [3, 4, 7, 9, 10]
        store.fork(KEY, "b")
        info = store.info("b")
        assert (seqs(store, full=True), info.lost, info.count) == ([3, 4, 7, 9, 10], 0, 5)


def test_messages_of_an_unreadable_archive_are_left_out_of_a_fork(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        talk(store)
        for _ in range(3):
            store.undo(KEY)
        [archive] = tmp_path.rglob("*.gz")
        archive.unlink()
    with JSONLStore(tmp_path) as store:
        store.fork(KEY, "b")
        info = store.info("b")
        assert (seqs(store, full=True), info.lost) == (list(range(3, 11)), 0)
        assert info.last_seq == 10


@pytest.mark.parametrize("before", [None, 2])
def test_fork_does_not_copy_messages_purged_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int | None
) -> None:
    composed = lifecycle.compose_forked_log
    purged: list[PurgeResult] = []

    def purge_just_then(*args: Any) -> bytes:
        if not purged:
            purged.append(other.admin.purge("k", before=before))
        return composed(*args)

    monkeypatch.setattr(lifecycle, "compose_forked_log", purge_just_then)
    with JSONLStore(tmp_path) as store, JSONLStore(tmp_path) as other:
        store.add_message("k", "user", "secret")
        store.add_message("k", "user", "known")
        if before is None:
            with pytest.raises(NoSuchSession):
                store.fork("k", "f")
            assert store.list_sessions() == []
        else:
            store.fork("k", "f")
            assert [message.content for message in store.get_history("f")] == ["known"]
    assert not any(b"secret" in path.read_bytes() for path in tmp_path.rglob("*.jsonl"))
