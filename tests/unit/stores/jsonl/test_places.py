"""Tests P8 and P11: unsuitable paths raise typed errors and are left unchanged."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from stenolog import (
    DamagedStore,
    JSONLStore,
    NotStored,
    StenologError,
    StoreUnavailable,
    UsageError,
)
from support import needs

KEY = "a"


def test_p11_created_files_and_folders_are_private_with_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with JSONLStore(tmp_path / "new" / "workspace") as store:
            store.add_message(KEY, "user", "hello")
            store.clear(KEY)
            store.compact(KEY)
            store.lease(KEY, ttl=60).release()
            # A compaction writes a new file; this one is as the first append created it.
            store.add_message("b", "user", "hello")
    finally:
        os.umask(before)
    for path in sorted((tmp_path / "new").rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert list((tmp_path / "new").rglob("*.jsonl.gz"))


def test_p11_folder_open_to_others_causes_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sessions").mkdir()
    (tmp_path / "sessions").chmod(0o755)
    with JSONLStore(tmp_path) as store:
        assert "chmod 700" in caplog.text
        assert any("chmod 700" in problem for problem in store.admin.health().problems)
        assert store.admin.health().ok


def test_p11_the_workspace_may_be_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with JSONLStore(tmp_path / "link") as store:
        store.add_message(KEY, "user", "hello")
    assert (tmp_path / "real" / "sessions" / "a.jsonl").is_file()


def test_p11_symlinks_inside_the_workspace_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside.jsonl"
    outside.write_bytes(b"")
    with JSONLStore(tmp_path / "w") as store:
        (tmp_path / "w" / "sessions" / "a.jsonl").symlink_to(outside)
        for call in (
            lambda: store.add_message(KEY, "user", "hello"),
            lambda: store.get_history(KEY),
            lambda: store.clear(KEY),
        ):
            with pytest.raises(DamagedStore, match="symbolic link"):
                call()
        assert store.list_sessions() == []
    assert outside.read_bytes() == b""
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "sessions").symlink_to(tmp_path / "w" / "sessions")
    with pytest.raises(StenologError):
        JSONLStore(tmp_path / "v")


def test_p11_archives_behind_a_symlink_are_not_written(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    with JSONLStore(tmp_path / "w") as store:
        store.add_message(KEY, "user", "hello")
        store.clear(KEY)
        (tmp_path / "w" / "sessions" / "archive").symlink_to(outside)
        with pytest.raises(StenologError):
            store.compact(KEY)
        assert len(store.get_history(KEY, full=True)) == 1
    assert list(outside.iterdir()) == []


def test_p8_folder_instead_of_a_log_raises_damaged_store(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        (tmp_path / "sessions" / "a.jsonl").mkdir()
        with pytest.raises(DamagedStore):
            store.add_message(KEY, "user", "hello")
        with pytest.raises(DamagedStore):
            store.get_history(KEY)
        assert store.list_sessions() == []


def test_p8_pipe_instead_of_a_log_does_not_hang(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        os.mkfifo(tmp_path / "sessions" / "a.jsonl")
        with pytest.raises(DamagedStore):
            store.add_message(KEY, "user", "hello")


def test_p8_log_replaced_by_a_folder_raises_damaged_store(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_message(KEY, "user", "hello")
        path = tmp_path / "sessions" / "a.jsonl"
        path.unlink()
        path.mkdir()
        with pytest.raises(DamagedStore):
            store.add_message(KEY, "user", "hello")


def test_p8_removed_folder_raises_and_is_not_recreated(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_message(KEY, "user", "hello")
        shutil.rmtree(tmp_path / "sessions")
        with pytest.raises(StoreUnavailable, match="gone"):
            store.add_message(KEY, "user", "again")
        assert not store.admin.health().ok
        assert not (tmp_path / "sessions").exists()


def test_p8_read_only_store_does_not_create_a_missing_workspace(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable):
        JSONLStore(tmp_path / "none", read_only=True)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("namespace", ["", ".", "..", "a/b", "/etc", "\ud800", "a\0b"])
def test_p8_namespace_that_is_not_a_folder_name_is_rejected(namespace: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        JSONLStore(tmp_path, namespace=namespace)


def child(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in its own process."""
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_p8_permission_error_says_what_to_do(fast_path: Path) -> None:
    needs.root()  # to create files of another user
    script = """
import json, os, sys
from stenolog import JSONLStore, StenologError
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
said = []
def tried(name, call):
    try:
        said.append([name, "ok", len(call() or [])])
    except StenologError as error:
        said.append([name, type(error).__name__, str(error)])
with JSONLStore(sys.argv[1]) as store:
    tried("read", lambda: store.get_history("a"))
    tried("append", lambda: store.add_message("a", "user", "x"))
    tried("create", lambda: store.add_message("b", "user", "x"))
    said.append(["health", store.admin.health().ok, store.admin.health().problems[0]])
tried("open", lambda: JSONLStore(sys.argv[1] + "/closed"))
print(json.dumps(said))
"""
    with JSONLStore(fast_path) as store:
        store.add_message(KEY, "user", "hello")
    fast_path.chmod(0o755)
    (fast_path / "closed").mkdir(mode=0o700)
    (fast_path / "sessions").chmod(0o755)
    (fast_path / "sessions" / "a.jsonl").chmod(0o644)
    before = (fast_path / "sessions" / "a.jsonl").read_bytes()
    done = child(script, str(fast_path))
    assert done.returncode == 0, done.stderr
    said = {name: (kind, text) for name, kind, text in json.loads(done.stdout)}
    assert said["read"] == ("ok", 1)
    assert said["append"][0] == "NotStored"
    assert "permissions" in said["append"][1]
    assert said["create"][0] == "NotStored"
    assert "permissions" in said["create"][1]
    assert said["open"][0] == "StoreUnavailable"
    assert said["health"][0] is False
    assert said["health"][1].startswith(f"{fast_path}/sessions: no write permission; ")
    assert (fast_path / "sessions" / "a.jsonl").read_bytes() == before
    assert not (fast_path / "sessions" / "b.jsonl").exists()


def test_p9_a_thousand_sessions_need_at_most_sixty_four_descriptors(fast_path: Path) -> None:
    script = """
import os, resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from stenolog import JSONLStore
with JSONLStore(sys.argv[1]) as store:
    keys = [f"session {n}" for n in range(1000)]
    for key in keys:
        store.add_message(key, "user", key)
    def use(start):
        for key in keys[start::8]:
            store.add_message(key, "assistant", "again")
            assert [m.content for m in store.get_history(key)] == [key, "again"]
    threads = [threading.Thread(target=use, args=(n,)) for n in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert all(len(store.get_history(key)) == 2 for key in keys)
    assert store.list_sessions(limit=2) == ["session 0", "session 1"]
    open_now = len(os.listdir("/proc/self/fd"))
    assert open_now < 40, open_now
print("done", len(os.listdir("/proc/self/fd")))
"""
    done = child(script, str(fast_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("done")
    assert int(done.stdout.split()[1]) < 12, "closing lets go of every descriptor"


def test_p7_descriptors_that_other_threads_free_are_waited_for(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_message(KEY, "user", "hello")
    script = """
import os, resource, sys, threading
from stenolog import JSONLStore
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with JSONLStore(sys.argv[1]) as store:
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    open_log, attempts = store._directory.open_log, []
    def open_third_time(*values, **options):
        attempts.append(values)
        if len(attempts) == 3:
            for descriptor in held:
                os.close(descriptor)
        return open_log(*values, **options)
    store._directory.open_log = open_third_time
    print(len(store.get_history("a")))
"""
    done = child(script, str(tmp_path))
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_p8_health_reports_low_disk_space_before_writes_fail(tmp_path: Path) -> None:
    needs.root()
    needs.kernel("mount")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], check=True)
    try:
        with JSONLStore(place / "w") as store:
            store.add_message(KEY, "user", "hello")
            health = store.admin.health()
            assert not health.ok
            assert "free some space" in health.problems[0]
            filler = place / "filler"
            filler.write_bytes(bytes(64 * 1024))
            with pytest.raises(NotStored, match="free some space"):
                store.add_message(KEY, "user", "x" * 400_000)
            with pytest.raises(NotStored, match="free some space"):
                store.add_message(KEY, "user", "not now")
            filler.unlink()
            assert store.add_message(KEY, "user", "fits again") == 2
            assert [m.seq for m in store.get_history(KEY)] == [1, 2]
    finally:
        subprocess.run(["umount", str(place)], check=True)
