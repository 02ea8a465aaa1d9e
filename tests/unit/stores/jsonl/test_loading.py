"""Tests logs that several threads share while one of them loads or fails to load."""

import errno
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stenolog import DamagedStore, JSONLStore, StenologError, StoreUnavailable
from stenolog.errors import ForeignLog, NewerFormat, SessionExists
from stenolog.stores.arguments import make_batch
from stenolog.stores.jsonl import log as log_module
from stenolog.stores.jsonl import scan
from stenolog.stores.jsonl.log import Log
from support.crash.interleaving import Scheduler, TracedLock, traced_engine
from support.group_appends import append_as_group

KEY = "a"


def _path(workspace: Path) -> Path:
    return workspace / "sessions" / "a.jsonl"


def _write(workspace: Path, count: int = 20) -> None:
    with JSONLStore(workspace) as store:
        for number in range(1, count + 1):
            store.add_message(KEY, "user", f"message {number}")
        store.add_message("b", "user", "another session")


def _make_newer(workspace: Path) -> None:
    lines = _path(workspace).read_bytes().replace(b'"format":1', b'"format":99').splitlines()
    bodies = [line[: line.rindex(b',"crc":')] for line in lines]
    text = b"".join(body + b',"crc":"%08x"}\n' % zlib.crc32(body) for body in bodies)
    _path(workspace).write_bytes(text)


def _make_foreign(workspace: Path) -> None:
    _path(workspace).write_bytes(b'{"role":"user","content":"of another program"}\n' * 50)


def _make_copied(workspace: Path) -> None:
    _path(workspace).write_bytes((workspace / "sessions" / "b.jsonl").read_bytes())


def _keep_shared_log(store: JSONLStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every call use one Log object, as a thread that got it before another one failed."""
    log = store._logs._get_log(KEY, create=False)
    monkeypatch.setattr(store._logs, "_get_log", lambda *_, **__: log)


@pytest.mark.parametrize(
    ("make", "error"),
    [(_make_newer, NewerFormat), (_make_foreign, ForeignLog), (_make_copied, DamagedStore)],
)
def test_p4_p13_append_is_rejected_after_another_thread_failed_to_load(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], None],
    error: type[StenologError],
) -> None:
    _write(tmp_path)
    make(tmp_path)
    before = _path(tmp_path).read_bytes()
    with JSONLStore(tmp_path) as store:
        _keep_shared_log(store, monkeypatch)
        for call in (store.get_history, store.clear, store.info, store.delete):
            with pytest.raises(error):
                call(KEY)
            with pytest.raises(error):
                store.add_message(KEY, "user", "ours")
    assert _path(tmp_path).read_bytes() == before


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), OSError(errno.EIO, "EIO")])
def test_p1_p4_append_continues_the_session_after_a_reader_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    _write(tmp_path)
    real = scan.find_state

    def fail(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(log_module, "find_state", real)
        raise error

    with JSONLStore(tmp_path) as store:
        uid = store.info(KEY).uid
        store._logs._open_logs.clear()
        _keep_shared_log(store, monkeypatch)
        monkeypatch.setattr(log_module, "find_state", fail)
        expected = StoreUnavailable if isinstance(error, OSError) else type(error)
        with pytest.raises(expected):
            store.get_history(KEY)
        assert store.add_message(KEY, "user", "next") == 21
        assert store.info(KEY).uid == uid
    with JSONLStore(tmp_path) as store:
        assert [message.seq for message in store.get_history(KEY)] == list(range(1, 22))


@pytest.mark.parametrize(
    "step", ["_apply_records", "_apply_scan", "_parse_earlier_bytes", "read_bytes"]
)
def test_p1_a_failed_update_of_a_loaded_log_is_repeated_by_the_next_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    _write(tmp_path, 300)
    with JSONLStore(tmp_path) as store, JSONLStore(tmp_path) as other:
        store.get_history(KEY, last=1)
        other.add_message(KEY, "user", "message 301")
        _keep_shared_log(store, monkeypatch)
        real = getattr(Log, step)

        def fail(*args: Any, **options: Any) -> Any:
            monkeypatch.setattr(Log, step, real)
            if step != "read":
                real(*args, **options)
            raise KeyboardInterrupt

        monkeypatch.setattr(Log, step, fail)
        if step == "_apply_scan":
            with _path(tmp_path).open("ab") as file:
                file.write(b'{"kind":"message","seq":302,"at":"20')
        with pytest.raises(KeyboardInterrupt):
            store.get_history(KEY, full=True)
        assert [message.seq for message in store.get_history(KEY)] == list(range(1, 302))
        assert store.add_message(KEY, "user", "next") == 302
        assert len(store.get_history(KEY)) == 302


@pytest.mark.parametrize("call", ["fork", "restore"])
def test_p4_session_created_after_the_check_is_not_replaced(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    _write(fast_path)
    calls: dict[str, Callable[[JSONLStore], None]] = {
        "fork": lambda store: store.fork(KEY, "new"),
        "restore": lambda store: store.admin.restore("b", as_key="new"),
    }
    with JSONLStore(fast_path) as other:
        other.delete("b")
        other.add_message("new", "user", "begun by another process")
    with traced_engine() as engine:
        with JSONLStore(fast_path) as store:
            scheduler = engine.scheduler = Scheduler()
            scheduler.run(lambda: store.get_history("new"))
            labels = [point.label for point in scheduler.points]
        read = next(n for n, label in enumerate(labels, 1) if label.endswith("pread"))
        with JSONLStore(fast_path) as store:
            # The key was free when it was checked, and a reader loads the log by now.
            monkeypatch.setattr(store._lifecycle, "_check_key_unused", lambda _: None)
            engine.scheduler = Scheduler(read)
            found, result = engine.scheduler.run(
                lambda: store.get_history("new"), lambda: calls[call](store)
            )
    assert isinstance(result, SessionExists)
    assert [message.content for message in found] == ["begun by another process"]
    with JSONLStore(fast_path) as store:
        assert store.get_history("new") == found


# --- every field under the mutex -------------------------------------------------------------

_GUARDED = {
    "_archive_gaps",
    "_reported_damage",
    "_tokens",
    "_visible_cache",
    "bytes_since_state",
    "end_offset",
    "ends_line",
    "first_loaded_seq",
    "has_state_record",
    "is_suspect",
    "keeps_messages",
    "last_memory_bytes",
    "lines_since_state",
    "loaded_offset",
    "messages",
    "next_seq",
    "phase",
    "size",
    "state",
    "state_bytes",
    "synced_offset",
    "tail",
    "updated",
}


def test_p7_no_field_of_a_log_is_used_without_its_mutex(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, seen = set[str](), set[str]()

    def check(log: Log, name: str, action: str) -> None:
        mutex: Any = log.__dict__.get("mutex")
        complete = "_reported_damage" in log.__dict__ and isinstance(mutex, TracedLock)
        if complete and name in _GUARDED and mutex.owner != threading.get_ident():
            wrong.add(f"{action} {name}")

    def get(log: Log, name: str) -> Any:
        if name in _GUARDED:
            seen.add(name)
            check(log, name, "read")
        return object.__getattribute__(log, name)

    def put(log: Log, name: str, value: Any) -> None:
        check(log, name, "write")
        object.__setattr__(log, name, value)

    monkeypatch.setattr(Log, "__getattribute__", get)
    monkeypatch.setattr(Log, "__setattr__", put)
    with traced_engine(), JSONLStore(fast_path / "a") as store:
        _use_everything(store)
        _copy(store, fast_path / "b")
    assert not wrong
    assert seen == _GUARDED


def _use_everything(store: JSONLStore) -> None:
    batch = [{"role": "user", "content": "x" * 100}] * 3
    for _ in range(2):
        store.add_messages(KEY, batch, once="once")
        for _ in range(4):
            store.add_message(KEY, "user", "one")
        store.get_history(KEY)
        store.add_message(KEY, "user", "two")
        encoded = make_batch(batch, None, None)
        append_as_group(store, KEY, [encoded, replace(encoded, once="group")])
        store.checkpoint(KEY, summary="s", upto=2)
        store.compact(KEY)
        store.get_history(KEY, full=True)
        store.set_history(KEY, batch)
        store.undo(KEY)
        store.truncate_history(KEY, 2)
        store.pop(KEY)
        store.set_meta(KEY, a=1)
        store._logs.suspect_names.add("a.jsonl")
        store.add_message(KEY, "user", "after a failed sync")
        store.info(KEY)
        list(store.follow(KEY, after=1, timeout=0))
        with store.lease(KEY, ttl=9) as lease:
            lease.store.add_message(KEY, "user", "leased")
        store.admin.purge(KEY, before=2)
        store.fork(KEY, "fork")
        with pytest.raises(SessionExists):
            store.fork(KEY, "fork")
        store.delete("fork")
        store.admin.restore("fork")
        store.admin.restore(store.delete("fork").key, as_key="back")
        store.admin.purge("back")
        store.clear("none")
        store.delete(KEY)


def _copy(store: JSONLStore, place: Path) -> None:
    store.add_message("c", "user", "copied")
    with JSONLStore(place) as target:
        for mark in store.admin.list_snapshots():
            with (
                store.admin.read_snapshot(mark) as reading,
                target.admin.snapshot_writer() as writing,
            ):
                writing.write(reading.snapshot, reading.messages)
