"""Tests the stamps that tell a catalog which logs changed: fast, and never missing a change."""

import os
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import stenolog
from stenolog.stores import file_names
from stenolog.stores.jsonl import JSONLStore, session_list
from support.strategies import hostile_keys

WORKSPACE = "w"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JSONLStore]:
    with JSONLStore(tmp_path / WORKSPACE) as opened:
        yield opened


def _look(store: JSONLStore) -> dict[str, str]:
    """Compute the stamps from every file."""
    found = {}
    for path in store.folder.glob("*.jsonl"):
        key = file_names.key_of_log(path.name) or session_list._key_in_file(
            store._directory, path.name
        )
        at = path.lstat()
        if key is not None and at.st_size:
            found[key] = f"{at.st_ino}:{at.st_size}:{at.st_mtime_ns}"
    return found


def test_sessions_with_hostile_keys_have_stamps(store: JSONLStore) -> None:
    for key in hostile_keys():
        store.add_message(key, "user", "x")
    for _ in range(3):
        assert set(store.admin.stamps()) == set(store.list_sessions())


def test_other_files_have_no_stamp(store: JSONLStore) -> None:
    store.add_message("k", "user", "x")
    (store.folder / "empty.jsonl").touch()
    (store.folder / "UPPER.jsonl").write_text("x")
    (store.folder / "a%2Eb.jsonl").write_text("x")
    (store.folder / "notes.txt").write_text("x")
    (store.folder / "folder.jsonl").mkdir()
    (store.folder / "link.jsonl").symlink_to("k.jsonl")
    assert list(store.admin.stamps()) == ["k"]


def test_stamps_reflect_changes_of_other_stores_immediately(
    store: JSONLStore, tmp_path: Path
) -> None:
    chance = random.Random(1)
    with JSONLStore(tmp_path / WORKSPACE) as other:
        for _ in range(300):
            key = f"telegram:{chance.randrange(5)}"
            try:
                match chance.randrange(8):
                    case 0:
                        other.delete(key)
                    case 1:
                        other.admin.restore(key)
                    case 2:
                        other.admin.purge(key)
                    case 3:
                        other.fork(key, f"fork:{chance.randrange(5)}")
                    case _:
                        other.add_message(key, "user", "x")
            except stenolog.StenologError:
                pass
            if chance.random() < 0.5:
                assert store.admin.stamps() == _look(store)


def test_folder_watch_avoids_listing_the_folder(store: JSONLStore) -> None:
    store.add_message("k", "user", "x")
    assert store.admin.stamps() == store.admin.stamps() == store.admin.stamps()
    seen = store._stamp_cache
    if seen._watch is None:
        pytest.skip("NOT RUN (kernel): folders cannot be watched here")
    looks = seen._listing_count
    for number in range(20):
        store.add_message(f"k{number}", "user", "x")
        assert store.admin.stamps() == _look(store)
    assert seen._listing_count == looks


def test_overflow_of_the_event_queue_is_harmless(store: JSONLStore) -> None:
    store.add_message("k", "user", "x")
    for _ in range(3):
        store.admin.stamps()
    limit = Path("/proc/sys/fs/inotify/max_queued_events")
    with (store.folder / "a.txt").open("wb") as one, (store.folder / "b.txt").open("wb") as two:
        for _ in range(int(limit.read_text()) if limit.exists() else 1):
            # Alternating, because the system reports repeated events only once.
            os.write(one.fileno(), b"x")
            os.write(two.fileno(), b"x")
    store.add_message("other", "user", "x")
    assert store.admin.stamps() == _look(store)
    assert store.admin.stamps() == _look(store)


def test_moved_folder_is_still_watched(store: JSONLStore, tmp_path: Path) -> None:
    store.add_message("k", "user", "x")
    for _ in range(3):
        store.admin.stamps()
    (tmp_path / WORKSPACE).rename(tmp_path / "elsewhere")
    with JSONLStore(tmp_path / "elsewhere") as moved:
        moved.add_message("k", "user", "y")
        assert store.admin.stamps() == moved.admin.stamps()


def test_forked_child_does_not_consume_events_of_its_parent(store: JSONLStore) -> None:
    store.add_message("k", "user", "x")
    for _ in range(3):
        store.admin.stamps()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            store.add_message("child", "user", "x")
            code = 0 if sorted(store.admin.stamps()) == ["child", "k"] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert sorted(store.admin.stamps()) == ["child", "k"]


def test_stamps_can_be_read_by_concurrent_threads(store: JSONLStore) -> None:
    for number in range(200):
        store.add_message(f"k{number}", "user", "x")
    wrong: list[int] = []

    def ask() -> None:
        for _ in range(20):
            found = len(store.admin.stamps())
            if found != 200:
                wrong.append(found)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_closed_store_ends_its_folder_watch(tmp_path: Path) -> None:
    before = len(list(Path("/dev/fd").iterdir()))
    store = JSONLStore(tmp_path / WORKSPACE)
    store.add_message("k", "user", "x")
    seen = [store.admin.stamps() for _ in range(3)]
    assert seen[0] == seen[2]
    held = store._stamp_cache
    store.close()
    assert held is not None
    assert len(list(Path("/dev/fd").iterdir())) <= before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_useless_folder_watch_is_closed(tmp_path: Path) -> None:
    with JSONLStore(tmp_path / WORKSPACE) as store:
        store.add_message("k", "user", "x")
        for _ in range(2):
            store.admin.stamps()
        held = store._stamp_cache._watch
        if held is None:
            pytest.skip("this file system may not tell all")
        store.folder.rename(tmp_path / "moved")
        store.admin.stamps()
        assert held._events == -1


def test_grew_compares_two_stamps() -> None:
    assert session_list.has_grown("1:10:5", "1:11:6")
    assert not session_list.has_grown("1:10:5", "1:10:6")
    assert not session_list.has_grown("1:10:5", "1:9:6")
    assert not session_list.has_grown("1:10:5", "2:11:6")
    assert session_list.write_time("1:10:5") == 5
