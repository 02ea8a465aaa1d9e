"""Tests P2 and P4: a deleted log is complete, in one place, and is restored unchanged."""

import errno
import itertools
import os
import re
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stenolog import (
    DamagedStore,
    JSONLStore,
    MaybeStored,
    NoSuchSession,
    NotStored,
    StenologError,
    StoreUnavailable,
)
from stenolog.errors import SessionExists
from stenolog.maintenance.log_damage import Kind
from stenolog.maintenance.repair import repair
from stenolog.maintenance.workspace_check import examine
from stenolog.stores import file_names

KEY = "telegram:123"
NAME = "telegram%3A123.jsonl"


def fill(store: JSONLStore, *texts: str, key: str = KEY) -> None:
    for text in texts:
        store.add_message(key, "user", text, once=text)


def shown(store: JSONLStore, key: str = KEY) -> list[str]:
    return [message.content for message in store.get_history(key)]


def live(place: Path) -> list[str]:
    return sorted(path.name for path in (place / "sessions").iterdir() if path.is_file())


def trashed(place: Path) -> list[Path]:
    return sorted((place / "sessions" / "trash").iterdir())


@contextmanager
def failing(call: str, error: int, *, after: int = 0) -> Iterator[None]:
    """Let a function of os fail from its n-th call on."""
    real, calls = getattr(os, call), itertools.count()

    def fail(*arguments: Any, **options: Any) -> Any:
        if next(calls) >= after:
            raise OSError(error, os.strerror(error))
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, fail)
        yield


def syncs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the inodes of the folders that are synced."""
    synced: list[int] = []
    sync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    return synced


def test_a_deleted_log_is_the_same_file_under_another_name(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        fill(store, "1", "2")
        uid = store.info(KEY).uid
        log = tmp_path / "sessions" / NAME
        before, inode = log.read_bytes(), log.stat().st_ino
        deleted = store.delete(KEY).deleted
    [path] = trashed(tmp_path)
    assert re.fullmatch(rf"{uid}\.\d{{8}}T\d{{6}}\.\d{{6}}Z\.jsonl", path.name)
    assert f"{deleted:%Y%m%dT%H%M%S.%fZ}" in path.name
    assert (path.read_bytes(), path.stat().st_ino) == (before, inode)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert live(tmp_path) == []


def test_p4_archives_of_a_deleted_session_stay_in_place(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        fill(store, *"12345")
        store.truncate_history(KEY, 2)
        store.compact(KEY)
        archives = sorted(tmp_path.rglob("*.gz"))
        store.delete(KEY)
        assert sorted(tmp_path.rglob("*.gz")) == archives
        store.admin.restore(KEY, as_key="other")
        assert [m.content for m in store.get_history("other", full=True)] == [*"12345"]
        store.undo("other")
        assert shown(store, "other") == [*"12345"]


def test_restored_log_exists_only_under_its_key(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        fill(store, "1")
        before = store.info(KEY)
        store.delete(KEY)
        store.admin.restore(KEY)
        assert (live(tmp_path), trashed(tmp_path)) == ([NAME], [])
        again = store.info(KEY)
        assert (again.uid, again.updated) == (before.uid, before.updated)
        assert again.generation == before.generation + 1
        store.delete(KEY)
        store.admin.restore(KEY, as_key="other")
        assert (live(tmp_path), trashed(tmp_path)) == (["other.jsonl"], [])
    assert b"telegram" not in (tmp_path / "sessions" / "other.jsonl").read_bytes()
    with JSONLStore(tmp_path) as store:
        assert store.list_sessions() == ["other"]
        assert shown(store, "other") == ["1"]


def test_p1_store_with_the_log_open_syncs_the_folder_after_a_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other process may have been killed before the sync, and a power cut would undo the move.
    with JSONLStore(tmp_path) as one, JSONLStore(tmp_path) as two:
        fill(one, "1", "2")
        two.delete(KEY)
        two.admin.restore(KEY)
        synced = syncs(monkeypatch)
        fill(one, "3")
        assert (tmp_path / "sessions").stat().st_ino in synced
        synced.clear()
        fill(one, "4")
        assert synced == []
        assert shown(two) == [*"1234"]


def test_p1_folder_is_synced_if_the_known_log_became_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Inode numbers are reused: the name of this file may not be synced yet.
    with JSONLStore(tmp_path) as store:
        fill(store, "1")
        (tmp_path / "sessions" / NAME).write_bytes(b"")
        synced = syncs(monkeypatch)
        assert store.add_message(KEY, "user", "anew") == 1
        assert (tmp_path / "sessions").stat().st_ino in synced


@pytest.mark.parametrize("rest", [b"", b'{"kind":"state","seq":1,"at"', b"\0" * 40])
def test_leftover_of_a_killed_creator_does_not_block_restore_or_fork(
    tmp_path: Path, rest: bytes
) -> None:
    with JSONLStore(tmp_path) as store:
        fill(store, "1", key="a")
        store.delete("a")
        (tmp_path / "sessions" / "a.jsonl").write_bytes(rest)
        (tmp_path / "sessions" / "b.jsonl").write_bytes(rest)
        store.admin.restore("a")
        store.fork("a", "b")
        assert (shown(store, "a"), shown(store, "b")) == (["1"], ["1"])
        assert store.info("a").void_bytes == 0


def test_p4_a_damaged_session_is_not_replaced(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        fill(store, "1", key="a")
        fill(store, "2", key="b")
        store.delete("a")
    log = tmp_path / "sessions" / "b.jsonl"
    # Every line is damaged, so only the existence of lines shows that there was a session.
    log.write_bytes(log.read_bytes().replace(b'"crc":"', b'"crc":"#'))
    damaged = log.read_bytes()
    with JSONLStore(tmp_path) as store:
        with pytest.raises(SessionExists, match="damaged"):
            store.admin.restore("a", as_key="b")
        assert log.read_bytes() == damaged
        assert len(store.admin.list_trash()) == 1


def test_p8_a_log_of_another_program_is_not_replaced(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        fill(store, "1", key="a")
        store.delete("a")
        foreign = tmp_path / "sessions" / "b.jsonl"
        foreign.write_bytes(b'{"role":"user","content":"not ours"}\n')
        with pytest.raises(DamagedStore):
            store.admin.restore("a", as_key="b")
        with pytest.raises(DamagedStore):
            store.delete("b")
        assert foreign.read_bytes() == b'{"role":"user","content":"not ours"}\n'


def test_interrupted_write_is_voided_after_a_restore(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        fill(store, "1", "2")
        with (tmp_path / "sessions" / NAME).open("ab") as log:
            log.write(b'{"kind":"message","seq":3')
        assert store.delete(KEY).count == 2
    with JSONLStore(tmp_path) as store:
        assert [t.count for t in store.admin.list_trash()] == [2]
        store.admin.restore(KEY)
        assert shown(store) == ["1", "2"]
        assert store.info(KEY).void_bytes == 26
        assert store.add_message(KEY, "user", "3") == 3


def test_other_files_in_the_trash_are_not_sessions(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        fill(store, "1")
        kept = store.delete(KEY)
        place = tmp_path / "sessions" / "trash"
        (place / "README").write_text("mine")
        (place / ("0" * 16 + ".20260101T000000.000000Z.jsonl")).write_text("no log\n")
        (place / ("1" * 16 + ".20269999T000000.000000Z.jsonl")).write_text("no time\n")
        (place / ("2" * 16 + ".20260101T000000.000000Z.jsonl")).mkdir()
        (place / ("3" * 16 + ".20260101T000000.000000Z.jsonl")).symlink_to(place / "README")
        renamed = place / ("4" * 16 + ".20260101T000000.000000Z.jsonl")
        [log] = place.glob(f"{kept.uid}.*")
        renamed.write_bytes(log.read_bytes())
        assert store.admin.list_trash() == [kept]
        store.admin.restore(KEY)
        assert shown(store) == ["1"]


@pytest.mark.parametrize("target", ["trash", "trash/../../outside"])
def test_p11_symlinked_trash_folder_is_rejected(tmp_path: Path, target: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    with JSONLStore(tmp_path / "w") as store:
        fill(store, "1")
        (tmp_path / "w" / "sessions" / "trash").symlink_to(outside if target == "trash" else target)
        for call in (
            lambda: store.delete(KEY),
            store.admin.list_trash,
            lambda: store.admin.restore(KEY),
        ):
            with pytest.raises(StenologError):
                call()
        with pytest.raises(StenologError):
            store.admin.purge(KEY)
        assert shown(store) == ["1"]
    assert list(outside.iterdir()) == []


def test_p8_delete_with_a_failed_folder_sync_raises_maybe_stored(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        fill(store, "1")
        # The first sync is of the folder in which the trash was just created.
        with failing("fsync", errno.EIO, after=1), pytest.raises(MaybeStored):
            store.delete(KEY)
        assert store.list_sessions() == []
        assert len(store.admin.list_trash()) == 1


def test_p8_delete_with_a_failed_rename_changes_nothing(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        fill(store, "1")
        with failing("rename", errno.EACCES), pytest.raises(NotStored):
            store.delete(KEY)
        assert shown(store) == ["1"]
        assert store.admin.list_trash() == []


@pytest.mark.parametrize("call", ["write", "fdatasync", "rename"])
def test_p8_failed_restore_leaves_the_session_in_the_trash(tmp_path: Path, call: str) -> None:
    with JSONLStore(tmp_path) as store:
        fill(store, "1")
        deleted = store.delete(KEY)
        with failing(call, errno.ENOSPC), pytest.raises(NotStored):
            store.admin.restore(KEY)
        assert store.admin.list_trash() == [deleted]
        assert live(tmp_path) == [], "not even an empty file"
        store.admin.restore(KEY)
        assert shown(store) == ["1"]
        assert trashed(tmp_path) == []


CALLS = ("open", "write", "fdatasync", "fsync", "rename", "unlink", "mkdir")


def killed(workspace: Path, number: int, work: Callable[[JSONLStore], None]) -> bool:
    """Run work in a process that is killed before its n-th call; return whether it was killed."""
    pid = os.fork()
    if pid == 0:
        try:
            counter = itertools.count(1)

            def kill_at_call(real: Callable[..., Any]) -> Callable[..., Any]:
                def call(*arguments: Any, **options: Any) -> Any:
                    if next(counter) == number:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*arguments, **options)

                return call

            store = JSONLStore(workspace)
            for name in CALLS:
                setattr(os, name, kill_at_call(getattr(os, name)))
            work(store)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def places(store: JSONLStore) -> list[tuple[str, str]]:
    """Return state and key of all sessions."""
    return [
        *(("alive", key) for key in store.list_sessions()),
        *(("deleted", trashed.key) for trashed in store.admin.list_trash()),
    ]


def test_p2_killed_restore_under_another_key_is_complete_or_absent(
    tmp_path: Path,
) -> None:
    found = list[tuple[str, str]]()
    for number in itertools.count(1):
        place = tmp_path / f"{number}"
        with JSONLStore(place) as store:
            fill(store, *"123", key="a")
            store.truncate_history("a", 1)
            store.delete("a")
        cut = killed(place, number, lambda store: store.admin.restore("a", as_key="b"))
        with JSONLStore(place) as store:
            [where] = places(store)
            found.append(where)
            if where[0] == "deleted":
                store.admin.restore(where[1], as_key=("a", "b", "c")[number % 3])
            [(_, key)] = places(store)
            assert [m.content for m in store.get_history(key, full=True)] == [*"123"]
            assert shown(store, key) == ["3"]
            assert store.add_message(key, "user", "4") == 4
            # The intermediate file names of the restore no longer matter.
            assert store.delete(key).key == key
            assert places(store) == [("deleted", key)]
            store.admin.restore(key)
            repair(place)
            assert [f for f in examine(place).findings if f.kind is not Kind.WIDE_PERMISSIONS] == []
        if not cut:
            break
    steps = [("deleted", "a"), ("deleted", "b"), ("alive", "b")]
    assert [step for step, _ in itertools.groupby(found)] == steps, "once it is back, it is back"


def test_p4_purge_finds_a_session_after_a_killed_restore_under_another_key(
    tmp_path: Path,
) -> None:
    for number in itertools.count(1):
        place = tmp_path / f"{number}"
        with JSONLStore(place) as store:
            fill(store, "secret", key="a")
            store.delete("a")
        cut = killed(place, number, lambda store: store.admin.restore("a", as_key="b"))
        with JSONLStore(place) as store:
            [(_, key)] = places(store)
            store.admin.purge(key)
            assert places(store) == []
        assert not [path for path in place.rglob("*") if _contains(path, b"secret")]
        if not cut:
            break


def _contains(path: Path, text: bytes) -> bool:
    return path.is_file() and text in path.read_bytes()


@pytest.mark.parametrize("call", ["write", "rename"])
def test_p8_failed_fork_leaves_no_file(tmp_path: Path, call: str) -> None:
    with JSONLStore(tmp_path) as store:
        fill(store, "1", key="a")
        with failing(call, errno.ENOSPC), pytest.raises(NotStored):
            store.fork("a", "b")
        assert "b.jsonl" not in live(tmp_path)
        store.fork("a", "b")
        assert shown(store, "b") == ["1"]
        assert live(tmp_path) == ["a.jsonl", "b.jsonl"]


def test_p8_fork_with_a_failed_folder_sync_raises_maybe_stored(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        fill(store, "1", key="a")
        # The first sync is for the empty file that it replaces.
        with failing("fsync", errno.EIO, after=1), pytest.raises(MaybeStored):
            store.fork("a", "b")
        assert shown(store, "b") == ["1"]


def test_p8_unreadable_trash_raises(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        fill(store, "1")
        deleted = store.delete(KEY)
        with failing("pread", errno.EIO):
            for call in (
                store.admin.list_trash,
                lambda: store.admin.restore(KEY),
                lambda: store.admin.purge(KEY),
            ):
                with pytest.raises(StoreUnavailable, match="Input/output error"):
                    call()
        assert store.admin.list_trash() == [deleted]


def test_session_with_a_long_key_can_be_deleted_and_restored(tmp_path: Path) -> None:
    key = "Ä" * 500
    with JSONLStore(tmp_path) as store:
        fill(store, "1", key=key)
        store.delete(key)
        assert [t.key for t in store.admin.list_trash()] == [key]
        store.admin.restore(key)
        assert store.list_sessions() == [key]
        assert live(tmp_path) == [file_names.log_name(key)]


def test_p8_session_restored_by_another_store_is_not_restored_twice(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as one, JSONLStore(tmp_path) as two:
        fill(one, "1")
        uid = one.delete(KEY).uid
        two.admin.restore(KEY, as_key="b")
        with pytest.raises(NoSuchSession):
            one.admin.restore(KEY, uid=uid)
        assert one.list_sessions() == ["b"]
        assert live(tmp_path) == ["b.jsonl"]
