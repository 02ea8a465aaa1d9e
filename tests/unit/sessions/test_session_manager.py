"""Tests the legacy store: its files, which the reference can read, and that it loses nothing."""

import errno
import json
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stenolog.codec import encode_object
from stenolog.errors import (
    LeaseLost,
    MaybeStored,
    NoSuchSession,
    NotStored,
    StoreBusy,
    StoreClosed,
    UsageError,
)
from stenolog.sessions.session_manager import SessionManager
from stenolog.stores import json_file
from stenolog.stores.base import Store, find_info
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.json_file import JSONMessage, JSONSession
from support import needs, temporary_folders
from support.full_disks import KINDS, LONG, full_disk
from support.strategies import messages, texts

SAMPLES = Path(__file__).parents[2] / "samples" / "picoclaw-legacy"

OURS: dict[str, Any] = {
    "first": 1,
    "tokens": ["t"],
    "times": [None],
    "hidden": [],
    "began_with": "",
}
"""Our field of a file with one message, as stored."""

_WRITER = """
import sys
from stenolog.sessions.session_manager import SessionManager

sessions = SessionManager(sys.argv[1])
for number in range(int(sys.argv[3])):
    seq = sessions.add_message("k", "user", f"{sys.argv[2]}.{number}")
    print(seq, f"{sys.argv[2]}.{number}", flush=True)
"""


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _fail(descriptor: int) -> None:
    del descriptor
    raise OSError(errno.EIO, os.strerror(errno.EIO))


_CALLS = (
    *("add", "add once", "batch", "truncate", "replace", "hide", "show", "pop", "checkpoint"),
    *("clear", "meta", "undo", "restart"),
)


def _call(store: Store, name: str, n: int) -> object:
    """Return the result of a call, or the type of its error. `n` varies the arguments."""
    calls: dict[str, Callable[[], object]] = {
        "add": lambda: store.add_message("k", "user", n),
        "add once": lambda: store.add_message("k", "user", n, once=f"t{n % 3}"),
        "batch": lambda: store.add_messages("k", [_user(n), _user("x")], once=f"b{n}"),
        "truncate": lambda: store.truncate_history("k", n),
        "replace": lambda: store.set_history("k", [*store.get_history("k")[:n], _user(n)]),
        "hide": lambda: store.admin.hide("k", n, n + 1),
        "show": lambda: store.admin.show("k", n, n),
        "pop": lambda: store.pop("k") is not None,
        "checkpoint": lambda: store.checkpoint("k", summary=f"up to {n}", upto=n),
        "clear": lambda: store.clear("k", upto=n),
        "meta": lambda: store.set_meta("k", title="x" * n or None),
        "undo": lambda: store.undo("k"),
    }
    try:
        return calls[name]()
    except UsageError as error:
        return type(error)


def _state(store: Store) -> object:
    """Return everything about the session but its times and its uid."""
    history = [
        (message.seq, message.to_json(), message.hidden)
        for message in store.get_history("k", full=True)
    ]
    info = find_info(store, "k")
    if info is None:
        return history
    facts = (info.last_seq, info.floor, info.visible_spans, info.undoable, info.change)
    return history, facts, info.summary, info.meta, info.generation


def _contents(sessions: SessionManager, key: str = "k", **options: Any) -> list[Any]:
    return [message.content for message in sessions.get_history(key, **options)]


def _writer(place: Path, name: str, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(place), name, str(count)],
        stdout=subprocess.PIPE,
        text=True,
    )


# --- files -----------------------------------------------------------------------------------


def test_file_has_the_five_reference_fields_and_a_stenolog_field(tmp_path: Path) -> None:
    sessions = SessionManager(tmp_path / "sessions")
    for content in "abc":
        sessions.add_message("telegram:1001", "user", content, once=f"update-{content}")
    sessions.checkpoint("telegram:1001", summary="an a", upto=1)

    file = json.loads((tmp_path / "sessions" / "telegram%3A1001.json").read_bytes())

    assert list(file) == ["key", "messages", "summary", "created", "updated", "stenolog"]
    assert file["key"] == "telegram:1001"
    assert file["messages"] == [{"role": "user", "content": "b"}, {"role": "user", "content": "c"}]
    assert file["summary"] == "an a"
    assert datetime.fromisoformat(file["created"]) <= datetime.fromisoformat(file["updated"])
    assert file["stenolog"]["first"] == 2
    assert file["stenolog"]["tokens"] == ["update-b", "update-c"]


def test_p11_files_and_folders_are_private(tmp_path: Path) -> None:
    os.umask(0)
    SessionManager(tmp_path / "new" / "sessions").add_message("k", "user", "x")
    os.umask(0o022)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").rglob("*")}
    assert modes == {"sessions": 0o700, "k.json": 0o600}
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_reference_sessions_are_read_and_their_files_unchanged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "sessions"
    shutil.copytree(SAMPLES, place)
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    sessions = SessionManager(place)

    assert sessions.list_sessions() == ["discord:1001:77", "telegram:91001"]
    assert _contents(sessions, "telegram:91001") == [f"legacy 0/{n}" for n in range(5)]
    assert sessions.get_summary("telegram:91001") == "An older talk."
    assert sessions.add_message("telegram:91001", "user", "new") == 6
    assert any("broken.json" in problem for problem in sessions.health().problems)
    assert sessions.health().ok
    assert not caplog.records

    assert before.items() <= {path.name: path.read_bytes() for path in place.iterdir()}.items()
    assert _contents(SessionManager(place), "telegram:91001")[-1] == "new"


def test_reference_file_with_our_name_is_copied_first(tmp_path: Path) -> None:
    original = b'{"key":"a","messages":[{"role":"user","content":"old"}, 7],"x":1}'
    (tmp_path / "a.json").write_bytes(original)
    sessions = SessionManager(tmp_path)
    assert sessions.add_message("a", "user", "new") == 2
    assert sessions.add_message("a", "user", "newer") == 3
    [copy] = tmp_path.glob("a.json.*.original")
    assert copy.read_bytes() == original
    assert _contents(SessionManager(tmp_path), "a") == ["old", "new", "newer"]
    assert SessionManager(tmp_path).list_sessions() == ["a"]


def test_p4_each_reference_file_with_our_name_is_copied_once(
    tmp_path: Path,
) -> None:
    texts = [f'{{"key":"a","messages":[],"extra":{number}}}'.encode() for number in range(3)]
    for text in (*texts, texts[0]):
        (tmp_path / "a.json").write_bytes(text)
        sessions = SessionManager(tmp_path)
        assert sessions.add_message("a", "user", "new") == 1
        (tmp_path / "a.json").unlink()  # imported by a start; then the reference ran again
    assert sorted(path.read_bytes() for path in tmp_path.glob("a.json.*.original")) == texts


def test_p4_reference_file_with_the_name_of_another_session_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its file names are ambiguous: `telegram:1` and `telegram_1` have the same one."""
    text = '{"key":"telegram:1","messages":[{"role":"user","content":"old"}],"extra":1}'
    (tmp_path / "telegram_1.json").write_text(text)
    sessions = SessionManager(tmp_path)
    assert sessions.add_message("telegram_1", "user", "mine") is None
    assert "telegram_1.json: the file has the session 'telegram:1'; move it away" in caplog.text
    assert (tmp_path / "telegram_1.json").read_text() == text
    assert sessions.add_message("telegram:1", "user", "new")
    assert _contents(SessionManager(tmp_path), "telegram:1") == ["old", "new"]


def test_reference_sessions_of_another_folder_are_continued(tmp_path: Path) -> None:
    place, old = tmp_path / "here", tmp_path / "old"
    shutil.copytree(SAMPLES, old)
    SessionManager(old).add_message("of another store", "user", "private")
    before = {path.name: path.read_bytes() for path in old.iterdir()}
    for seq in (6, 7):
        sessions = SessionManager(place, old=old)
        assert "of another store" not in sessions.list_sessions()
        assert sessions.get_history("of another store") == []
        assert sessions.add_message("telegram:91001", "user", "new") == seq
        assert sessions.list_sessions() == ["discord:1001:77", "telegram:91001"]
        assert sessions.get_summary("telegram:91001") == "An older talk."
        assert any("broken.json" in problem for problem in sessions.health().problems)
    assert {path.name: path.read_bytes() for path in old.iterdir()} == before
    assert [path.name for path in place.iterdir()] == ["telegram%3A91001.json"]
    assert SessionManager(place, old=tmp_path / "nowhere").list_sessions() == ["telegram:91001"]


@pytest.mark.parametrize(
    "text", [b'{"key": "x", "messages": [', b"[]", b'{"key":"x"}', b"\xff", b""]
)
def test_unreadable_file_is_never_overwritten(
    text: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "x.json").write_bytes(text)
    sessions = SessionManager(tmp_path)
    assert sessions.add_message("x", "user", "new") is None
    assert "move it away" in caplog.text
    assert sessions.add_message("y", "user", "new") == 1
    assert (tmp_path / "x.json").read_bytes() == text


def test_p11_symlinks_are_not_followed(tmp_path: Path) -> None:
    place, elsewhere = tmp_path / "sessions", tmp_path / "elsewhere"
    place.mkdir(mode=0o700)
    elsewhere.mkdir()
    (elsewhere / "k.json").write_text('{"key":"k","messages":[{"role":"user","content":"x"}]}')
    (place / "k.json").symlink_to(elsewhere / "k.json")
    assert SessionManager(place).list_sessions() == []
    linked = tmp_path / "linked"
    linked.symlink_to(elsewhere)
    assert SessionManager(linked).list_sessions() == []
    assert SessionManager(linked).add_message("new", "user", "x") is None
    assert [path.name for path in elsewhere.iterdir()] == ["k.json"]


def test_meta_files_and_imported_files_are_not_sessions(tmp_path: Path) -> None:
    text = '{"key":"k","messages":[]}'
    for name in ("a.meta.json", "a.json.migrated", ".a.json", "a.json.original", "a.jsonl"):
        (tmp_path / name).write_text(text)
    assert SessionManager(tmp_path).list_sessions() == []


@given(st.lists(messages(), max_size=6), st.data())
def test_p10_parse_is_inverse_of_compose(bodies: list[dict[str, Any]], data: st.DataObject) -> None:
    moment = datetime(2026, 11, 15, tzinfo=UTC)
    session = JSONSession(
        key="k",
        messages=tuple(
            JSONMessage(
                encode_object(body),
                moment + timedelta(microseconds=number),
                data.draw(st.none() | st.text(min_size=1, max_size=8)),
                data.draw(st.booleans()),
            )
            for number, body in enumerate(bodies)
        ),
        summary=data.draw(texts()),
        first_summary=data.draw(texts()),
        created=moment,
        updated=moment,
        is_ours=True,
    )
    assert json_file.parse(json_file.compose_file(session)) == session


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    "ours",
    [
        7,
        {},
        {"first": 1, "tokens": [], "times": [], "hidden": [], "began_with": ""},
        OURS | {"hidden": [[5, None, None, {}]]},
        OURS | {"first": 2, "hidden": [[1, "", None, {}]]},
        OURS | {"tokens": [7]},
        OURS | {"began_with": None},
        OURS | {"first": 2},
        OURS | {"first": "1"},
        OURS | {"first": 1, "hidden": [[1, None, None, {}]]},
        {name: value for name, value in OURS.items() if name != "first"},
    ],
)
def test_invalid_stenolog_field_is_skipped_and_reported(ours: Any) -> None:
    file = {"key": "k", "messages": [{"role": "user"}], "stenolog": ours}
    kept = json_file.parse(json.dumps(file).encode())
    assert [message.once for message in kept.messages] == [None]
    assert not kept.is_ours
    assert "stenolog" in kept.problems[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-15T09:15:41.5643977Z", datetime(2026, 11, 15, 9, 15, 41, 564397, tzinfo=UTC)),
        ("2026-05-06T07:08:09.123456789+02:00", datetime(2026, 5, 6, 5, 8, 9, 123456, tzinfo=UTC)),
        ("2026-05-06T07:08:09", datetime(2026, 5, 6, 7, 8, 9, tzinfo=UTC)),
        ("0001-01-01T00:00:00Z", None),
        ("0001-01-01T00:00:00+14:00", None),
        ("yesterday", None),
        (None, None),
        (1234, None),
    ],
)
def test_times_in_go_format_are_parsed(text: object, expected: datetime | None) -> None:
    assert json_file.parse_go_time(text) == expected


# --- nothing is lost -------------------------------------------------------------------------


def test_p1_every_acknowledged_message_survives_kill_9(tmp_path: Path) -> None:
    place = tmp_path / "sessions"
    with _writer(place, "a", 10_000) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(40)]
        os.kill(process.pid, signal.SIGKILL)
        said += process.stdout.readlines()
    acknowledged = [line.split()[1] for line in said if line.endswith("\n")]
    found = _contents(SessionManager(place))
    assert found[: len(acknowledged)] == acknowledged
    assert len(found) - len(acknowledged) in (0, 1)


def test_p1_file_and_folder_are_synced_before_the_call_returns(tmp_path: Path) -> None:
    needs.tool("strace")
    needs.kernel("ptrace")
    log, place = tmp_path / "calls", tmp_path / "sessions"
    command = [sys.executable, "-c", _WRITER, str(place), "a", "1"]
    traced = "trace=write,fdatasync,fsync,rename,renameat,renameat2"
    subprocess.run(
        ["strace", "-e", traced, "-o", str(log), *command],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=60,
    )
    calls = [line.partition("(")[0] for line in log.read_text().splitlines()]
    written = next(n for n, line in enumerate(log.read_text().splitlines()) if '{\\"key' in line)
    assert calls[written : written + 5] == ["write", "fdatasync", "renameat", "fsync", "write"]


def test_p1_file_that_another_process_changed_is_never_overwritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sessions, other = SessionManager(tmp_path), SessionManager(tmp_path)
    assert sessions.add_message("k", "user", "a") == 1
    assert other.add_message("k", "user", "lost") is None
    assert "only one process can use a SessionManager" in caplog.text
    assert _contents(other) == []
    with _writer(tmp_path, "b", 1) as process:
        assert process.communicate()[0] == "2 b.0\n"
    with pytest.raises(NotStored, match="changed by another process"):
        sessions.store.add_message("k", "user", "lost")
    # A session that no other process changes can be written.
    assert other.add_message("other", "user", "x") == 1
    assert _contents(SessionManager(tmp_path)) == ["a", "b.0"]


def test_p8_folder_that_cannot_be_created_is_a_failed_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    sessions = SessionManager(tmp_path / "file" / "sessions")
    assert sessions.add_message("k", "user", "a") is None
    assert sessions.get_history("k") == []
    assert not sessions.health().ok
    assert caplog.records


def test_file_imported_by_another_process_is_rewritten_completely(tmp_path: Path) -> None:
    sessions = SessionManager(tmp_path)
    sessions.add_message("k", "user", "a")
    (tmp_path / "k.json").rename(tmp_path / "k.json.migrated")
    assert sessions.add_message("k", "user", "b") == 2
    assert _contents(sessions) == _contents(SessionManager(tmp_path)) == ["a", "b"]


def test_health_of_fallback_gives_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    sessions = SessionManager(tmp_path, reason="StoreUnavailable: no disk")
    sessions.add_message("k", "user", "a")
    health = sessions.health()
    assert not health.ok
    assert "StoreUnavailable: no disk" in health.problems[0]
    assert str(tmp_path) in health.problems[0]
    assert health.free_bytes
    assert health.failed_writes == 0


def test_session_manager_leaks_no_descriptors(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the folder itself is open in it
    sessions = SessionManager(tmp_path)
    sessions.add_message("k", "user", "a")
    sessions.get_history("k")
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - as above


# --- the store of a session manager ----------------------------------------------------------


@settings(max_examples=60)
@given(calls=st.lists(st.tuples(st.sampled_from(_CALLS), st.integers(0, 7)), max_size=12))
def test_p4_p12_any_calls_and_restarts_leave_the_state_that_a_store_in_memory_has(
    calls: list[tuple[str, int]],
) -> None:
    model = InMemoryStore()
    with temporary_folders.folder() as place:
        store = SessionManager(place).store
        for name, number in calls:
            if name == "restart":
                store = SessionManager(place).store
            else:
                assert _call(store, name, number) == _call(model, name, number)
            assert _state(store) == _state(model)
        assert _state(SessionManager(place).store) == _state(model)


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.fork("k", "new"),
        lambda store: store.delete("k"),
        lambda store: store.admin.restore("k"),
        lambda store: store.admin.purge("k"),
        lambda store: store.admin.purge("k", before=1),
        lambda store: store.admin.delete_unchanged(store.info("k")),
        lambda store: store.admin.purge("k", trash=[]),
        lambda store: store.admin.snapshot_writer(),
    ],
)
def test_unsupported_calls_of_a_session_manager_change_nothing(
    tmp_path: Path, call: Callable[[Any], object]
) -> None:
    store = SessionManager(tmp_path).store
    store.add_message("k", "user", "a")
    before = (tmp_path / "k.json").read_bytes()
    with pytest.raises(UsageError, match="SessionManager keeps sessions as plain JSON files"):
        call(store)
    assert [message.content for message in store.get_history("k")] == ["a"]
    assert (tmp_path / "k.json").read_bytes() == before
    assert store.compact("k").archived == 0


def test_p8_file_that_could_not_be_synced_leaves_memory_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SessionManager(tmp_path).store
    store.add_message("k", "user", "a")
    view = store.view("k")
    with monkeypatch.context() as patches:
        patches.setattr(os, "fdatasync", _fail)
        with pytest.raises(NotStored, match="Input/output error"):
            store.add_message("k", "user", "b", once="b")
        with pytest.raises(NotStored):
            store.truncate_history("k", 0)
        with pytest.raises(NotStored):
            store.add_message("new", "user", "b")
    assert store.view("k") == view == SessionManager(tmp_path).store.view("k")
    assert store.list_sessions() == ["k"]
    assert [path.name for path in tmp_path.iterdir()] == ["k.json"]


def test_p8_folder_that_could_not_be_synced_leaves_the_message_uncertain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SessionManager(tmp_path).store
    store.add_message("k", "user", "a")
    with monkeypatch.context() as patches:
        patches.setattr(os, "fsync", _fail)
        with pytest.raises(MaybeStored, match="Input/output error"):
            store.add_message("k", "user", "b", once="b")
    assert [message.content for message in store.get_history("k")] == ["a"]
    for _ in range(2):  # in this process, then as after a crash
        assert store.add_message("k", "user", "b", once="b") == 2
        store = SessionManager(tmp_path).store
    assert [message.content for message in store.get_history("k")] == ["a", "b"]


@pytest.mark.parametrize("kind", KINDS)
def test_p8_full_disk_is_reported_and_a_retry_stores_the_message_once(
    tmp_path: Path, kind: str
) -> None:
    with full_disk(tmp_path, kind) as disk:
        place = disk.folder / "sessions"
        store = SessionManager(place).store
        store.add_message("k", "user", "a")
        disk.fill()
        with pytest.raises(NotStored):
            store.add_message("k", "user", LONG, once="b")
        assert [message.content for message in store.get_history("k")] == ["a"]
        disk.free()
        assert store.add_message("k", "user", LONG, once="b") == 2
        assert SessionManager(place).store.view("k") == store.view("k")


def test_copied_file_is_a_session_with_another_uid(tmp_path: Path) -> None:
    SessionManager(tmp_path).add_message("k", "user", "a")
    text = (tmp_path / "k.json").read_text().replace('"key":"k"', '"key":"copy"')
    (tmp_path / "copy.json").write_text(text)
    store = SessionManager(tmp_path).store
    assert store.list_sessions() == ["copy", "k"]
    assert store.info("copy").uid != store.info("k").uid


def test_a_lease_of_a_session_manager_has_one_holder_and_fences_its_writes(tmp_path: Path) -> None:
    sessions = SessionManager(tmp_path)
    store = sessions.store
    with pytest.raises(NoSuchSession):
        store.lease("k", ttl=10)
    store.set_meta("k", title="new")
    lease = store.lease("k", ttl=10)
    with pytest.raises(StoreBusy):
        store.lease("k", ttl=10, wait=0)
    assert lease.store.add_message("k", "user", "mine") == 1
    lease.renew()
    lease.release()
    assert lease.lost
    with pytest.raises(LeaseLost):
        lease.store.add_message("k", "user", "late")
    assert [message.content for message in store.get_history("k")] == ["mine"]
    with store.lease("k", ttl=10, wait=0) as other:
        assert other.epoch > lease.epoch
    sessions.close()
    with pytest.raises(StoreClosed):
        other.store.get_history("k")


def test_p1_message_that_arrives_while_a_thread_waits_for_a_lease_is_kept(tmp_path: Path) -> None:
    store = SessionManager(tmp_path).store
    store.add_message("k", "user", "a")
    held = store.lease("k", ttl=60)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.lease, "k", ttl=60, wait=0.2)
        number = 1
        while not waiting.done():
            number += 1
            assert store.add_message("k", "user", number) == number
        assert isinstance(waiting.exception(), StoreBusy)
    held.release()
    assert len(store.get_history("k")) == number
    assert SessionManager(tmp_path).store.view("k") == store.view("k")
