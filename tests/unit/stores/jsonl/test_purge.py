"""Tests that a purge removes every byte of the purged messages, and nothing else."""

import contextlib
import errno
import gzip
import itertools
import json
import os
import shutil
from binascii import crc32
from pathlib import Path
from typing import Any

import pytest

from stenolog import (
    DamagedStore,
    JSONLStore,
    MaybeStored,
    NoSuchSession,
    NotStored,
    StoreBusy,
    StoreUnavailable,
)
from stenolog.errors import ForeignLog, NewerFormat
from stenolog.maintenance.log_damage import Kind
from stenolog.maintenance.repair import repair
from stenolog.maintenance.workspace_check import examine
from stenolog.stores.disk import lock_until
from stenolog.stores.jsonl import trash
from stenolog.stores.jsonl.directory import Directory

KEY = "a"


def everywhere(place: Path) -> bytes:
    """Return all bytes below a folder, including names and uncompressed archives."""
    found = []
    for path in sorted(place.rglob("*")):
        found.append(str(path.relative_to(place)).encode())
        if path.is_file() and not path.is_symlink():
            text = path.read_bytes()
            found.append(gzip.decompress(text) if path.suffix == ".gz" else text)
    return b"\n".join(found)


def say(store: JSONLStore, *numbers: int, key: str = KEY) -> None:
    for number in numbers:
        store.add_message(key, "user", f"secret-{number}-", once=f"token-{number}-")


def live(place: Path) -> Path:
    return place / "sessions" / "a.jsonl"


def archives(place: Path) -> list[Path]:
    return sorted(place.rglob("*.gz"))


def seqs(store: JSONLStore, *, full: bool = True) -> list[int]:
    return [message.seq for message in store.get_history(KEY, full=full)]


def states(place: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in live(place).read_bytes().splitlines()]
    return [line["body"] for line in lines if line["kind"] == "state"]


def tell(place: Path) -> None:
    """Store twelve messages in three archives and a log, with a torn write, changes and damage."""
    with JSONLStore(place) as store:
        for first in (1, 4, 7):
            say(store, first, first + 1, first + 2)
            store.add_messages(
                "other", [{"role": "user", "content": "stays"}], once=f"other {first}"
            )
            store.checkpoint(KEY, summary=f"old-summary-{first}-", upto=first)
            if first == 4:
                with live(place).open("ab") as log:
                    log.write(b'{"kind":"message","seq":7,"at":"torn-bytes-')
            store.truncate_history(KEY, 1)
            store.compact(KEY)
        say(store, 10, 11)
        with live(place).open("ab") as log:
            log.write(b'{"kind":"message","seq":12,"at":"torn-bytes-')
        say(store, 12)
        store.set_summary(KEY, "new summary")
        store.set_meta(KEY, title="a talk")


@pytest.mark.parametrize("before", range(2, 14))
def test_no_byte_of_a_purged_message_remains(tmp_path: Path, before: int) -> None:
    tell(tmp_path)
    with JSONLStore(tmp_path) as store:
        whole = {m.seq: m.to_json() for m in store.get_history(KEY, full=True)}
        assert sorted(whole) == list(range(1, 13))
        assert store.admin.purge(KEY, before=before).messages == before - 1
        kept = list(range(before, 13))
        assert seqs(store) == kept
    text = everywhere(tmp_path)
    for number in range(1, 13):
        present = f"secret-{number}-".encode() in text
        assert present == (number >= before)
        # The idempotency key of an archived message is in two states as well.
        assert (f"token-{number}-".encode() in text) == (number >= before)
    for word in (b"torn-bytes", b"old-summary"):
        assert word not in text
    with JSONLStore(tmp_path) as store:
        assert {m.seq: m.to_json() for m in store.get_history(KEY, full=True)} == {
            seq: whole[seq] for seq in kept
        }
        info = store.info(KEY)
        assert (info.lost, info.damaged, info.void_bytes, info.last_seq) == (0, 0, 0, 12)
        assert (info.summary, info.meta) == ("new summary", {"title": "a talk"})
        assert store.get_history("other")
        for number in kept:
            assert store.add_message(KEY, "user", f"secret-{number}-", once=f"token-{number}-") == (
                number
            )
        assert store.add_message(KEY, "user", "x", once="token-1-") == 13
    assert examine(tmp_path).findings == ()


def test_no_byte_of_a_purged_session_remains(tmp_path: Path) -> None:
    tell(tmp_path)
    sessions = tmp_path / "sessions"
    with JSONLStore(tmp_path) as store:
        first = store.delete(KEY).uid
        say(store, 1)
        store.delete(KEY)
        say(store, 1, 2, 3)
        store.truncate_history(KEY, 1)
        store.compact(KEY)
        store.lease(KEY, ttl=60).release()
        # Files that crashes and the doctor may have left of it.
        (sessions / ".a.jsonl.new").write_bytes(b"secret-1-")
        (sessions / "aside").mkdir(mode=0o700)
        for name in (
            "a.jsonl.2026-11-15T124523.725409Z",
            "a.jsonl.new.2026-11-15T124523.725409Z",
            f"{first}-1-3.jsonl.gz.2026-11-15T124523.725409Z",
        ):
            (sessions / "aside" / name).write_bytes(b"secret-1-")
        other = sessions / "aside" / "other.jsonl.2026-11-15T124523.725409Z"
        other.write_bytes(b"stays")
        for trashed in (sessions / "trash").iterdir():
            (trashed.parent / f".{trashed.name}.new").write_bytes(b"secret-1-")
        purged = store.admin.purge(KEY)
        assert (purged.messages, purged.first, purged.last) == (16, 1, 12)
        assert purged.not_reached == ()
        with pytest.raises(NoSuchSession):
            store.admin.purge(KEY)
        assert store.get_history("other")
    text = everywhere(tmp_path)
    for word in (b"secret", b"token-", b"old-summary", b"torn-bytes", first.encode(), b"a.jsonl"):
        assert word not in text
    assert other.read_bytes() == b"stays"
    assert examine(tmp_path).findings == ()


@pytest.mark.parametrize("only_trash", [False, True])
def test_purge_of_a_deleted_session_deletes_its_interrupted_rewrite(
    tmp_path: Path, only_trash: bool
) -> None:
    with JSONLStore(tmp_path) as store:
        say(store, 1)
        (tmp_path / "sessions" / ".a.jsonl.new").write_bytes(b"secret-1-")
        deleted = store.delete(KEY)
        store.admin.purge(KEY, trash=[(deleted.uid, deleted.deleted)] if only_trash else None)
    assert b"secret" not in everywhere(tmp_path)


def test_purge_names_what_an_interrupted_fork_left(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        say(store, 1)
        store.fork(KEY, "fork")
        sessions = tmp_path / "sessions"
        (sessions / "fork.jsonl").rename(sessions / ".fork.jsonl.new")
        assert store.admin.purge(KEY).not_reached == (
            ".fork.jsonl.new is left of an interrupted fork; delete it",
        )


def test_purge_deletes_the_catalog_files(tmp_path: Path) -> None:
    tell(tmp_path)
    with JSONLStore(tmp_path) as store:
        for before in (3, None):
            for name in ("catalog.db", "catalog.db-journal"):
                (tmp_path / "sessions" / name).write_bytes(b"secret-1-")
            store.admin.purge(KEY, before=before)
            assert not list(tmp_path.rglob("catalog.db*"))[1:]
            assert b"secret-1-" not in everywhere(tmp_path)


def test_purge_deletes_earlier_archives_and_rewrites_the_partial_one(tmp_path: Path) -> None:
    tell(tmp_path)
    before = archives(tmp_path)
    assert [path.name for path in before] == ["1-2.jsonl.gz", "3-5.jsonl.gz", "6-8.jsonl.gz"]
    with JSONLStore(tmp_path) as store:
        store.admin.purge(KEY, before=5)
        generation = store.info(KEY).generation
        assert store.info(KEY).archived == 8
        assert seqs(store) == list(range(5, 13))
    assert [path.name for path in archives(tmp_path)] == [
        f"5-5.{generation}.jsonl.gz",
        f"6-8.{generation}.jsonl.gz",
    ]
    with JSONLStore(tmp_path) as store:
        store.admin.purge(KEY, before=7)
        store.admin.purge(KEY, before=7)
        assert [path.name for path in archives(tmp_path)] == [f"7-8.{generation + 2}.jsonl.gz"]
        assert seqs(store) == list(range(7, 13))
        store.admin.purge(KEY, before=9)
        assert archives(tmp_path) == []
        assert store.info(KEY).archived == 0
        store.clear(KEY)
        store.compact(KEY)
        assert seqs(store) == [9, 10, 11, 12]
    assert examine(tmp_path).findings == ()


def test_repeated_purge_removes_leftovers_of_a_crash(tmp_path: Path) -> None:
    tell(tmp_path)
    old = {path: path.read_bytes() for path in archives(tmp_path)}
    with JSONLStore(tmp_path) as store:
        store.admin.purge(KEY, before=8)
        # As after a kill before the last step, and one in the middle of the first.
        for path, text in old.items():
            path.write_bytes(text)
        (archives(tmp_path)[0].parent / ".7-8.9.jsonl.gz.new").write_bytes(b"secret-1-")
        for path in archives(tmp_path)[0].parent.iterdir():
            path.chmod(0o600)
        assert {f.kind for f in examine(tmp_path).findings} == {Kind.UNREFERENCED_ARCHIVE}
        assert store.admin.purge(KEY, before=8).messages == 0
        assert b"secret-1-" not in everywhere(tmp_path)
        assert seqs(store) == [8, 9, 10, 11, 12]
    assert examine(tmp_path).findings == ()


def test_summary_is_removed_by_a_second_purge(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        say(store, 1, 2, 3)
        store.checkpoint(KEY, summary="it told secret-1-", upto=1)
        [told] = store.admin.purge(KEY, before=2).not_reached
        assert "summary" in told
        assert b"secret-1-" in everywhere(tmp_path)
        store.set_summary(KEY, "")
        assert b"secret-1-" in everywhere(tmp_path)
        assert store.admin.purge(KEY, before=2).not_reached == ()
        assert b"secret-1-" not in everywhere(tmp_path)


def test_interrupted_purge_is_listed_and_can_be_finished(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        say(store, 1, 2)
        gone = store.delete(KEY)
        say(store, 3)
        lease = store.lease(KEY, ttl=60)
        [log] = (tmp_path / "sessions" / "trash").iterdir()
        log.rename(f"{log}.purged")
        aside = tmp_path / "sessions" / "aside"
        aside.mkdir(mode=0o700)
        of_live = aside / "a.jsonl.2026-11-15T124523.725409Z"
        of_gone = aside / f"{gone.uid}.{log.name.partition('.')[2]}"
        for copy in (of_live, of_gone):
            shutil.copy(live(tmp_path), copy)
        assert store.admin.list_trash(unfinished=True) == [gone]
        assert store.admin.list_trash() == []
        assert store.admin.finish_purge(gone.uid).messages == 2
        assert store.admin.list_trash(unfinished=True) == []
        with pytest.raises(NoSuchSession):
            store.admin.finish_purge(gone.uid)
        # The lease and the files of the live session are not changed.
        assert not lease.lost
        assert list(aside.iterdir()) == [of_live]
        assert seqs(store) == [1]
        assert not list((tmp_path / "sessions" / "trash").iterdir())


def test_damaged_leftover_of_an_interrupted_purge_is_reported(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        say(store, 1, 2)
        store.delete(KEY)
        [log] = (tmp_path / "sessions" / "trash").iterdir()
        first, second, *rest = log.read_bytes().splitlines(keepends=True)
        log.write_bytes(b"".join([first, second.replace(b'"format":1', b'"format":9'), *rest]))
        log.rename(f"{log}.purged")
        [left] = store.admin.list_trash(unfinished=True)
        assert left.key == KEY
        assert store.admin.purge(KEY).messages >= 0
        assert store.admin.list_trash(unfinished=True) == []


def test_purge_report_names_copies_moved_aside_by_the_doctor(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        say(store, 1, 2)
        (tmp_path / "sessions" / "aside").mkdir(mode=0o700)
        copy = tmp_path / "sessions" / "aside" / "a.jsonl.2026-11-15T124523.725409Z"
        shutil.copy(live(tmp_path), copy)
        [told] = store.admin.purge(KEY, before=2).not_reached
        assert copy.name in told


def test_p7_session_deleted_while_the_trash_is_scanned_is_purged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, moved = trash.entries_with_keys, list[int]()

    def delete_then(*arguments: Any, **options: Any) -> list[tuple[trash.Entry, str]]:
        found = list(keys(*arguments, **options))
        if not moved:
            moved.append(1)
            with contextlib.suppress(StoreBusy):
                other.delete(KEY)
        return found

    with JSONLStore(tmp_path) as store, JSONLStore(tmp_path, busy_timeout=0.05) as other:
        say(store, 1)
        store.delete(KEY)
        say(store, 2)
        monkeypatch.setattr(trash, "entries_with_keys", delete_then)
        assert store.admin.purge(KEY).messages == 2
        assert moved
        assert store.admin.list_trash() == []
    assert b"secret" not in everywhere(tmp_path)


def test_key_with_a_foreign_log_can_be_purged(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_message("x:y", "user", "secret-1-")
        store.lease("x:y", ttl=60).release()
        store.delete("x:y")
        foreign = tmp_path / "sessions" / "x_y.jsonl"
        foreign.write_bytes(b'{"role":"user","content":"theirs"}\n')
        with pytest.raises(ForeignLog):
            store.add_message("x:y", "user", "2")
        assert store.admin.purge("x:y").messages == 1
        with pytest.raises(NoSuchSession):
            store.admin.purge("x:y")
        assert not list((tmp_path / "sessions" / "locks").glob("*.lock"))
        assert b"theirs" in foreign.read_bytes()


def test_p8_failed_purge_keeps_the_archives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(tmp_path)
    before = archives(tmp_path)

    def fail(_: Directory) -> None:
        raise StoreUnavailable("the disk does not answer")

    with JSONLStore(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(trash, "sync_renames", fail)
            with pytest.raises(MaybeStored):
                store.admin.purge(KEY)
        assert archives(tmp_path) == before
        assert store.admin.purge(KEY).messages == 12
    assert archives(tmp_path) == []


def test_purge_of_an_unknown_session_creates_no_file(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        with pytest.raises(NoSuchSession):
            store.admin.purge(KEY)
        assert not list((tmp_path / "sessions").iterdir())


def test_p3_purge_keeps_damage_in_remaining_messages_visible(tmp_path: Path) -> None:
    tell(tmp_path)
    live(tmp_path).write_bytes(live(tmp_path).read_bytes().replace(b"secret-11-", b"edited-11-"))
    with JSONLStore(tmp_path) as store:
        assert store.admin.purge(KEY, before=4).messages == 3
        assert seqs(store) == [4, 5, 6, 7, 8, 9, 10, 12]
        info = store.info(KEY)
        assert (info.lost, info.count) == (1, 8)
    assert b"edited-11-" in live(tmp_path).read_bytes(), "a person may still want to accept it"
    assert [finding.kind for finding in examine(tmp_path).findings] == [Kind.HAND_EDIT]
    with JSONLStore(tmp_path) as store:
        # Below the seq, damage is removed by the purge as well.
        assert store.admin.purge(KEY, before=12).messages == 7
        assert (store.info(KEY).lost, seqs(store)) == (0, [12])
    assert b"edited" not in everywhere(tmp_path)
    assert examine(tmp_path).findings == ()


def test_p3_purge_splits_lines_that_lost_their_newline(tmp_path: Path) -> None:
    tell(tmp_path)
    lines = live(tmp_path).read_bytes().split(b"\n")
    place = next(i for i, line in enumerate(lines) if b"secret-10-" in line)
    lines[place : place + 2] = [lines[place] + b" " + lines[place + 1]]
    live(tmp_path).write_bytes(b"\n".join(lines))
    with JSONLStore(tmp_path) as store:
        store.admin.purge(KEY, before=11)
        assert seqs(store) == [11, 12]
    assert b"secret-10-" not in everywhere(tmp_path)
    assert examine(tmp_path).findings == ()


def test_p3_purge_removes_garbage_at_the_end(tmp_path: Path) -> None:
    for garbage in (b"garbage without end", b"a garbage line\n", b"\0" * 50, b"x\ngarbage\ny"):
        place = tmp_path / str(len(garbage))
        with JSONLStore(place) as store:
            say(store, 1, 2, 3)
            with live(place).open("ab") as log:
                log.write(garbage)
            store.admin.purge(KEY, before=2)
            assert seqs(store) == [2, 3]
        assert b"garbage" not in everywhere(place)
        with JSONLStore(place) as store:
            assert store.add_message(KEY, "user", "next") >= 4
            assert seqs(store)[:2] == [2, 3]


def test_p2_first_half_of_a_batch_can_be_purged(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_messages(KEY, [{"role": "user", "content": n} for n in range(1, 5)], once="one")
        store.add_messages(KEY, [{"role": "user", "content": n} for n in range(5, 8)], once="two")
        store.set_history(KEY, [*store.get_history(KEY)[:5], {"role": "user", "content": 8}])
        store.admin.purge(KEY, before=3)
    lines = [json.loads(line) for line in live(tmp_path).read_bytes().splitlines()]
    assert [(line["seq"], line.get("part")) for line in lines if line["kind"] == "message"] == [
        (3, None),
        (4, None),
        (5, [1, 3]),
        (6, [2, 3]),
        (7, [3, 3]),
        (8, None),
    ]
    with JSONLStore(tmp_path) as store:
        assert seqs(store) == [3, 4, 5, 6, 7, 8]
        assert [m.seq for m in store.get_history(KEY)] == [3, 4, 5, 8]
        same = [{"role": "user", "content": n} for n in range(5, 8)]
        assert store.add_messages(KEY, same, once="two") == [5, 6, 7]
        assert store.undo(KEY).op == "replace"
        assert [m.seq for m in store.get_history(KEY)] == [3, 4, 5, 6, 7]
        assert store.add_messages(KEY, same, once="one") == [9, 10, 11]
    assert examine(tmp_path).findings == ()


def test_p4_undo_steps_too_long_for_a_state_work_after_a_purge(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_messages(KEY, [{"role": "user", "content": n} for n in range(1, 1201)])
        for seq in range(102, 1000, 2):
            store.admin.hide(KEY, seq, seq)
        store.admin.hide(KEY, 100, 1100)
        store.admin.purge(KEY, before=50)
    # More than fits into a state: the state refers to a change, which is kept for it.
    assert [entry.get("elsewhere", False) for entry in states(tmp_path)[-1]["undo"]] == [
        *[False] * 7,
        True,
    ]
    assert live(tmp_path).read_bytes().count(b'{"kind":"change"') == 1
    for _ in range(2):
        with JSONLStore(tmp_path) as store:
            assert store.info(KEY).undoable == 8
            store.admin.purge(KEY, before=60)
    with JSONLStore(tmp_path) as store:
        assert store.undo(KEY).shown == 1001 - 449
        assert store.undo(KEY).shown == 1
        assert len(store.get_history(KEY)) == 1141 - 448
    assert examine(tmp_path).findings == ()


@pytest.mark.parametrize("line", [0, 1, -1])
def test_p3_damaged_state_of_a_purged_log_loses_no_message(tmp_path: Path, line: int) -> None:
    tell(tmp_path)
    with JSONLStore(tmp_path) as store:
        store.admin.purge(KEY, before=10)
        store.admin.hide(KEY, 11, 11)
        store.admin.purge(KEY, before=10)
    lines = live(tmp_path).read_bytes().splitlines(keepends=True)
    lines[line] = lines[line].replace(b'"format"', b'"formed"')
    live(tmp_path).write_bytes(b"".join(lines))
    with JSONLStore(tmp_path) as store:
        assert seqs(store) == [10, 11, 12]
        info = store.info(KEY)
        assert (info.lost, info.floor, info.summary, info.undoable) == (0, 9, "new summary", 1)
        assert store.undo(KEY).shown == 1


def test_p8_purge_stops_if_a_needed_archive_is_missing(tmp_path: Path) -> None:
    tell(tmp_path)
    for name in ("6-8.jsonl.gz", "3-5.jsonl.gz"):
        place = tmp_path / name
        shutil.copytree(tmp_path / "sessions", place / "sessions")
        [lost] = place.rglob(name)
        text = lost.read_bytes()
        lost.unlink()
        with JSONLStore(place) as store:
            before = everywhere(place)
            with pytest.raises(DamagedStore, match="missing or damaged"):
                store.admin.purge(KEY, before=4)
            assert seqs(store)
            assert everywhere(place).count(b"secret") >= before.count(b"secret")
            # With the archive restored, or if it is to be purged, the purge works.
            lost.write_bytes(text)
            store.admin.purge(KEY, before=4)
            assert seqs(store) == list(range(4, 13))
    [lost] = (tmp_path / "sessions").rglob("3-5.jsonl.gz")
    lost.write_bytes(lost.read_bytes()[:-30])
    with JSONLStore(tmp_path) as store:
        assert store.admin.purge(KEY, before=6).messages == 5
        assert seqs(store) == list(range(6, 13))
    assert b"secret-1-" not in everywhere(tmp_path)


def test_p7_another_store_sees_the_purge(tmp_path: Path) -> None:
    tell(tmp_path)
    with JSONLStore(tmp_path) as one, JSONLStore(tmp_path) as two:
        assert len(two.get_history(KEY, full=True)) == 12
        following = two.follow(KEY, after=11)
        assert next(following).seq == 12
        one.admin.purge(KEY, before=9)
        assert seqs(two) == [9, 10, 11, 12]
        assert two.add_message(KEY, "user", "13") == 13
        assert next(following).seq == 13
        assert seqs(one) == [9, 10, 11, 12, 13]
        two.admin.purge(KEY)
        assert seqs(one) == []
        assert one.add_message(KEY, "user", "anew") == 1


def test_p7_compaction_does_nothing_if_the_session_was_replaced_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JSONLStore(tmp_path) as one, JSONLStore(tmp_path) as two:
        say(one, 1, 2, 3)
        one.clear(KEY)

        def replaced_meanwhile(*arguments: Any) -> None:
            monkeypatch.undo()
            two.admin.purge(KEY)
            say(two, 1, 2)
            two.clear(KEY)
            lock_until(*arguments)

        monkeypatch.setattr("stenolog.stores.jsonl.archive.lock_until", replaced_meanwhile)
        assert one.compact(KEY).archived == 0
        assert archives(tmp_path) == []
        assert one.compact(KEY).archived == 2
        assert seqs(two) == [1, 2]
    assert examine(tmp_path).findings == ()


def test_purge_removes_files_that_a_repair_moved_aside(tmp_path: Path) -> None:
    tell(tmp_path)
    with JSONLStore(tmp_path) as store:
        uid = store.info(KEY).uid
    folder = tmp_path / "sessions" / "archive" / uid
    shutil.copy(folder / "1-2.jsonl.gz", folder / "1-1.jsonl.gz")
    live(tmp_path).write_bytes(live(tmp_path).read_bytes() + b"secret-torn")
    assert all(one.done for one in repair(tmp_path))
    with JSONLStore(tmp_path) as store:
        store.admin.purge(KEY)
    assert b"secret" not in everywhere(tmp_path)


def test_p8_purge_report_names_unreadable_logs_as_possible_forks(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        say(store, 1)
        (tmp_path / "sessions" / "b.jsonl").mkdir()
        [told] = store.admin.purge(KEY).not_reached
        assert "b.jsonl may be a fork" in told


def test_p8_purge_report_names_deleted_logs_with_unreadable_keys(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        say(store, 1)
        store.delete(KEY)
        say(store, 1)
        store.add_message("other", "user", "x")
        store.delete("other")
        say(store, 2)
        for log in (tmp_path / "sessions" / "trash").iterdir():
            if b'"key":"other"' not in log.read_bytes():
                log.write_bytes(log.read_bytes().replace(b'"kind":"state"', b'"kind":"stat#"'))
                damaged = log
        [told] = store.admin.purge(KEY, before=2).not_reached
        assert f"trash/{damaged.name} may be a session of {KEY!r}" in told
        assert store.admin.purge(KEY).not_reached == (told,)
        assert b"secret-1-" in damaged.read_bytes()
        hidden = damaged.rename(damaged.with_name(f"{damaged.name}.purged"))
        say(store, 1)
        [told] = store.admin.purge(KEY).not_reached
        assert hidden.name in told
        hidden.unlink()
        say(store, 1)
        assert store.admin.purge(KEY).not_reached == ()


def _put_two_sessions_into_trash(place: Path) -> Path:
    """Delete a session with an archive, then a second one of the same key. Return the first log."""
    with JSONLStore(place) as store:
        say(store, 1, 2, 3)
        store.truncate_history(KEY, 1)
        store.compact(KEY)
        store.delete(KEY)
        [older_log] = (place / "sessions" / "trash").iterdir()
        say(store, 4)
        store.delete(KEY)
        say(store, 5)
    return older_log


def test_p8_purge_of_a_key_with_a_damaged_older_session_in_the_trash_finishes(
    tmp_path: Path,
) -> None:
    older_log = _put_two_sessions_into_trash(tmp_path)
    uid, _, rest = older_log.name.partition(".")
    older_log.rename(older_log.with_name(f"{'0' * 16}.{rest}"))
    with JSONLStore(tmp_path) as store:
        assert store.admin.purge(KEY).not_reached == ()
        assert store.admin.list_trash() == []
        with pytest.raises(NoSuchSession):
            store.admin.purge(KEY)
        assert store.admin.list_trash(unfinished=True) == []
    assert [path.parent.name for path in archives(tmp_path)] == [uid]
    assert [finding.kind for finding in examine(tmp_path).findings] == [Kind.UNREFERENCED_ARCHIVE]


def test_p8_session_of_a_newer_format_in_the_trash_stops_a_purge_before_its_first_effect(
    tmp_path: Path,
) -> None:
    older_log = _put_two_sessions_into_trash(tmp_path)
    lines = older_log.read_bytes().splitlines(keepends=True)
    last_state = max(index for index, line in enumerate(lines) if b'"kind":"state"' in line)
    body = lines[last_state].rpartition(b',"crc":"')[0].replace(b'"format":1', b'"format":2')
    newer_state = b'%b,"crc":"%08x"}\n' % (body, crc32(body))
    older_log.write_bytes(b"".join([*lines, newer_state]))
    before = everywhere(tmp_path)
    with JSONLStore(tmp_path) as store:
        for _ in range(2):
            with pytest.raises(NewerFormat):
                store.admin.purge(KEY)
            assert everywhere(tmp_path) == before


@pytest.mark.parametrize("damage", ["cut", "empty", "NUL bytes"])
def test_p8_unreadable_session_in_the_trash_can_be_purged_by_its_uid(
    tmp_path: Path, damage: str
) -> None:
    older_log = _put_two_sessions_into_trash(tmp_path)
    older_log.write_bytes(
        {"cut": older_log.read_bytes()[:41], "empty": b"", "NUL bytes": b"\0" * 900}[damage]
    )
    uid = older_log.name.partition(".")[0]
    with JSONLStore(tmp_path) as store:
        [told] = store.admin.purge(KEY).not_reached
        assert f"purge {uid}" in told
        assert older_log.exists()
        assert store.admin.purge(uid).not_reached == ()
    assert examine(tmp_path).findings == ()
    assert b"secret" not in everywhere(tmp_path)


@pytest.mark.parametrize("call", ["unlink", "rmdir", "fsync"])
def test_p8_failed_purge_raises_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    tell(tmp_path)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "failed")

    with JSONLStore(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(StoreUnavailable) as raised:
                store.admin.purge(KEY)
        if call == "fsync":
            assert type(raised.value) is NotStored, "before anything had happened"
            assert len(seqs(store)) == 12
        else:
            assert type(raised.value) is MaybeStored
            # The session is not listed, and half of it cannot be restored.
            assert store.list_sessions() == ["other"]
            assert store.admin.list_trash() == []
            with pytest.raises(NoSuchSession):
                store.admin.restore(KEY)
            [finding] = examine(tmp_path).findings
            assert (finding.kind, finding.key) == (Kind.LEFTOVER, KEY)
            assert "Purge the session again" in finding.advice
            assert repair(tmp_path) == []
        assert store.admin.purge(KEY).messages == 12
        assert examine(tmp_path).findings == ()
    assert b"secret" not in everywhere(tmp_path)


@pytest.mark.parametrize("after", range(12))
def test_p8_failed_purge_before_a_seq_can_be_repeated(tmp_path: Path, after: int) -> None:
    tell(tmp_path)
    real, calls = os.unlink, itertools.count()

    def fail(*arguments: Any, **options: Any) -> None:
        if next(calls) >= after:
            raise OSError(errno.EIO, "failed")
        real(*arguments, **options)

    with JSONLStore(tmp_path) as store:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "unlink", fail)
            with contextlib.suppress(StoreUnavailable):
                store.admin.purge(KEY, before=5)
        assert seqs(store) in (list(range(1, 13)), list(range(5, 13)))
        store.admin.purge(KEY, before=5)
        assert seqs(store) == list(range(5, 13))
    text = everywhere(tmp_path)
    assert not any(f"secret-{number}-".encode() in text for number in range(1, 5))
