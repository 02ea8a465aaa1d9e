"""Tests the log in one process and in two: its records, and when it is synced."""

import errno
import json
import os
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from stenolog import JSONLStore, StoreBusy, UsageError
from stenolog.codec import control_line
from stenolog.errors import NewerFormat
from stenolog.stores.jsonl import rewrite

KEY = "a"


def path_of(workspace: Path) -> Path:
    return workspace / "sessions" / "a.jsonl"


def lines(workspace: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path_of(workspace).read_bytes().split(b"\n")[:-1]]


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of the synced files."""
    names: list[str] = []
    real = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        names.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    return names


def test_p3_damaged_first_line_loses_no_message(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_message(KEY, "user", "one")
        store.set_meta(KEY, title="T")
        before = store.info(KEY)
    text = path_of(tmp_path).read_bytes()
    path_of(tmp_path).write_bytes(b"#" + text[1:])
    with JSONLStore(tmp_path) as store:
        after = store.info(KEY)
        assert (after.uid, after.created, after.meta) == (before.uid, before.created, before.meta)
        assert store.list_sessions() == [KEY]


def test_p9_state_is_written_at_least_every_256_lines_and_never_inside_a_write(
    tmp_path: Path,
) -> None:
    with JSONLStore(tmp_path) as store:
        for number in range(700):
            store.add_message(KEY, "user", str(number))
    kinds = [line["kind"] for line in lines(tmp_path)]
    places = [index for index, kind in enumerate(kinds) if kind == "state"]
    assert max(b - a for a, b in pairwise(places)) <= 257
    assert len(places) == 4
    assert all("joined" not in lines(tmp_path)[index] for index in places[2:])


def test_p9_state_interval_grows_with_the_size_of_the_state(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        store.set_summary(KEY, "s" * 600_000)
        for _ in range(40):
            store.add_message(KEY, "user", "x" * 100_000)
    assert [line["kind"] for line in lines(tmp_path)].count("state") in (3, 4)


def test_p1_records_state_which_earlier_records_were_synced(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as one, JSONLStore(tmp_path) as other:
        one.add_message(KEY, "user", "first")
        one.add_message(KEY, "user", "proves the first")
        other.add_message(KEY, "user", "has not synced the second")
        other.add_message(KEY, "user", "has synced them all")
    joined = [line.get("joined", False) for line in lines(tmp_path) if line["kind"] == "message"]
    assert joined == [True, False, True, False]


def test_p1_follower_syncs_messages_of_others_before_returning_them(
    tmp_path: Path, syncs: list[str]
) -> None:
    with JSONLStore(tmp_path) as writer, JSONLStore(tmp_path) as reader:
        writer.add_message(KEY, "user", "hello")
        del syncs[:]
        following = reader.follow(KEY)
        assert next(following).content == "hello"
        assert syncs == ["a.jsonl"]


def test_p2_change_syncs_earlier_messages_of_others_first(tmp_path: Path, syncs: list[str]) -> None:
    with JSONLStore(tmp_path) as one, JSONLStore(tmp_path) as other:
        one.add_message(KEY, "user", "hello")
        del syncs[:]
        other.clear(KEY)
        assert syncs == ["a.jsonl", "a.jsonl"], "what stood there, then the change"
        del syncs[:]
        other.set_summary(KEY, "x")
        assert syncs == ["a.jsonl"]
        del syncs[:]
        one.clear(KEY)
        one.set_summary(KEY, "x")
        del syncs[:]
        other.set_summary(KEY, "x")
        assert syncs == ["a.jsonl"], "it is so already, and must stay so"


def test_p12_known_idempotency_key_is_synced_before_the_call_returns(
    tmp_path: Path, syncs: list[str]
) -> None:
    with JSONLStore(tmp_path) as one, JSONLStore(tmp_path) as other:
        one.add_message(KEY, "user", "hello", once="t")
        del syncs[:]
        assert other.add_message(KEY, "user", "hello", once="t") == 1
        assert syncs == ["a.jsonl"]


def test_p1_writer_syncs_the_folder_of_a_file_created_by_another_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JSONLStore(tmp_path) as one, JSONLStore(tmp_path) as other:
        one.add_message(KEY, "user", "hello")
        folders: list[str] = []
        real = os.fsync

        def fsync(descriptor: int) -> None:
            folders.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        other.add_message(KEY, "user", "mine")
        other.add_message(KEY, "user", "mine again")
        assert folders[-1] == "sessions"
        assert folders.count("sessions") == 1


def test_p7_readers_do_not_wait_for_a_blocked_writer(tmp_path: Path) -> None:
    script = """
import fcntl, sys
file = open(sys.argv[1], "rb+")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""
    with JSONLStore(tmp_path, busy_timeout=0.3) as store:
        store.add_message(KEY, "user", "hello")
        holder = subprocess.Popen(
            [sys.executable, "-c", script, str(path_of(tmp_path))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"locked\n"
            failed: list[BaseException] = []

            def write() -> None:
                try:
                    store.add_message(KEY, "user", "waits")
                except StoreBusy as error:
                    failed.append(error)

            writers = [threading.Thread(target=write) for _ in range(3)]
            for thread in writers:
                thread.start()
            reads = 0
            while any(thread.is_alive() for thread in writers):
                assert [m.content for m in store.get_history(KEY)] == ["hello"]
                reads += 1
            for thread in writers:
                thread.join()
            assert len(failed) == 3
            assert len(set(map(id, failed))) == 3, "one object each"
            assert reads > 10
        finally:
            holder.communicate()
        assert store.add_message(KEY, "user", "now") == 2


def test_p7_compaction_gives_up_after_a_concurrent_undo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JSONLStore(tmp_path) as store, JSONLStore(tmp_path) as other:
        for number in range(4):
            store.add_message(KEY, "user", str(number))
        store.clear(KEY)
        real = rewrite.prepare_archive

        def prepare(*arguments: object) -> object:
            made = real(*arguments)  # type: ignore[arg-type]
            other.undo(KEY)
            other.add_message(KEY, "user", "meanwhile")
            return made

        monkeypatch.setattr(rewrite, "prepare_archive", prepare)
        assert store.compact(KEY).archived == 0
        assert [m.seq for m in store.get_history(KEY)] == [1, 2, 3, 4, 5]
        assert store.info(KEY).generation == 1


def test_p9_message_cache_stays_within_its_limit(tmp_path: Path) -> None:
    with JSONLStore(tmp_path, cache_bytes=200_000) as store:
        for session in range(30):
            store.add_messages(f"s{session}", [{"c": "x" * 1000} for _ in range(20)])
        for _ in range(4):
            for session in range(30):
                assert len(store.get_history(f"s{session}")) == 20
        held = sum(log.memory_bytes for log in store._logs._open_logs.values())
        assert held < 3 * 200_000


def test_p9_writer_that_never_reads_caches_no_messages(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        for number in range(300):
            store.add_message(KEY, "user", str(number))
        assert store._logs._open_logs[KEY].messages == []
        assert [m.content for m in store.get_history(KEY, last=2)] == ["298", "299"]


def test_p8_file_truncated_by_another_program_is_read_again(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        for number in range(5):
            store.add_message(KEY, "user", str(number))
        assert len(store.get_history(KEY)) == 5
        text = path_of(tmp_path).read_bytes()
        with path_of(tmp_path).open("rb+") as file:
            file.truncate(text.rindex(b'{"kind"'))
        assert [m.content for m in store.get_history(KEY)] == ["0", "1", "2", "3"]
        assert store.add_message(KEY, "user", "on") == 5


def test_p8_failed_read_raises_a_typed_error_and_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_message(KEY, "user", "hello")
    with JSONLStore(tmp_path) as store:
        with monkeypatch.context() as patch:

            def pread(*_: object) -> bytes:
                raise OSError(errno.EIO, "input/output error")

            patch.setattr(os, "pread", pread)
            with pytest.raises(Exception, match="disk"):
                store.get_history(KEY)
            with pytest.raises(Exception, match="disk"):
                store.add_message(KEY, "user", "no")
        assert [m.content for m in store.get_history(KEY)] == ["hello"]
        assert store.add_message(KEY, "user", "yes") == 2


def test_p7_read_during_a_partial_write_is_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    with JSONLStore(tmp_path) as store:
        store.add_message(KEY, "user", "first")
        store.add_message(KEY, "user", "second")

        def in_halves(descriptor: int, text: bytes) -> int:
            half = real(descriptor, bytes(text[: len(text) // 2]))
            assert store.info(KEY).last_seq == 2
            assert store.get_summary(KEY) == ""
            return half + real(descriptor, bytes(text[half:]))

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", in_halves)
            assert store.add_message(KEY, "user", "third") == 3
        assert store.add_message(KEY, "user", "fourth") == 4
        assert store.info(KEY).void_bytes == 0
    with JSONLStore(tmp_path) as store:
        assert [m.content for m in store.get_history(KEY)] == ["first", "second", "third", "fourth"]


def test_p7_append_detects_a_replaced_file_of_the_same_size(
    tmp_path: Path,
) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_message(KEY, "user", "one")
        store.add_message(KEY, "user", "two")
        copy = path_of(tmp_path).read_bytes()
        path_of(tmp_path).with_name("copy").write_bytes(copy)
        path_of(tmp_path).with_name("copy").rename(path_of(tmp_path))
        assert store.add_message(KEY, "user", "three") == 3
    with JSONLStore(tmp_path) as store:
        assert [m.content for m in store.get_history(KEY)] == ["one", "two", "three"]


def test_p8_session_starts_again_after_its_log_was_moved_away(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_message(KEY, "user", "one")
        store.add_message(KEY, "user", "two")
        path_of(tmp_path).rename(tmp_path / "taken away")
        assert store.get_history(KEY) == []
        assert store.add_message(KEY, "user", "anew") == 1


def test_p7_two_stores_on_one_folder_never_assign_a_seq_twice(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as one, JSONLStore(tmp_path) as other:
        seqs = [
            store.add_message(KEY, "user", "x") for _ in range(5) for store in (one, one, other)
        ]
        assert seqs == list(range(1, 16))


def test_p3_voided_bytes_are_not_damage_wherever_a_read_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_messages("a", [{"role": "user", "content": "x" * 40}] * 300)
    file = tmp_path / "sessions" / "a.jsonl"
    with file.open("ab") as log:
        log.write(b'{"kind":"message","seq":301,"at"')
    with JSONLStore(tmp_path) as store:
        store.add_messages("a", [{"role": "user", "content": "y" * 40}] * 300)
        store.add_message("a", "user", "behind a state")
    caplog.clear()
    found = set()
    # For some chunk length, a chunk that is read backwards starts right at the void.
    for length in range(150, 60_000, 97):
        monkeypatch.setattr("stenolog.stores.jsonl.log._FIRST_CHUNK_BYTES", length)
        with JSONLStore(tmp_path, read_only=True) as store:
            assert len(store.get_history("a", last=600)) == 600
            found.add((store.info("a").damaged, store.info("a").lost))
    assert found == {(0, 0)}
    assert not caplog.records


def test_p8_checkpoint_in_the_leftover_of_a_killed_creator_is_rejected(
    tmp_path: Path,
) -> None:
    with JSONLStore(tmp_path) as store:
        (tmp_path / "sessions" / "a.jsonl").write_bytes(b'{"kind":"state","se')
        assert store.get_history("a") == []
        with pytest.raises(UsageError, match="at most 0, the last seq"):
            store.checkpoint("a", summary="", upto=1)
        assert store.list_sessions() == []


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of bytes of each read."""
    counts: list[int] = []
    real = os.pread

    def pread(descriptor: int, length: int, offset: int) -> bytes:
        found = real(descriptor, length, offset)
        counts.append(len(found))
        return found

    monkeypatch.setattr(os, "pread", pread)
    return counts


def test_p9_p12_appends_with_once_read_old_messages_only_the_first_time(
    tmp_path: Path, bytes_read: list[int]
) -> None:
    with JSONLStore(tmp_path) as store:
        for number in range(50):
            store.add_message(KEY, "user", "x" * 2_000, once=f"old {number}")
    with JSONLStore(tmp_path) as store, JSONLStore(tmp_path) as other:
        store.add_message(KEY, "user", "first", once="first")
        bytes_read.clear()
        for number in range(20):
            store.add_message(KEY, "user", "next", once=f"next {number}")
            store.add_message(KEY, "user", "plain")
        assert sum(bytes_read) == 0
        assert store._logs._open_logs[KEY].messages == []
        other.add_message(KEY, "user", "elsewhere", once="elsewhere")
        bytes_read.clear()
        assert store.add_message(KEY, "user", "elsewhere", once="elsewhere") == 92
        assert 0 < sum(bytes_read) < 1_000
        assert store.add_message(KEY, "user", "x" * 2_000, once="old 7") == 8
        assert store.add_message(KEY, "user", "next", once="next 3") == 58


def test_p13_record_of_an_unknown_kind_is_rejected_like_a_newer_format(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_message(KEY, "user", "one")
        with path_of(tmp_path).open("ab") as log:
            log.write(control_line("future", 2, "2026-11-20T00:00:00.000000Z", msgspec.Struct()))
        for call in (store.get_history, store.info, store.compact, store.delete):
            with pytest.raises(NewerFormat, match="'future'"):
                call(KEY)
        with pytest.raises(NewerFormat, match="'future'"):
            store.add_message(KEY, "user", "two")
