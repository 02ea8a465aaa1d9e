"""Tests the legacy store: its files, which the reference can read, and that it loses nothing."""

import json
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.codec import encode_object
from stenolog.errors import (
    LeaseLost,
    NoSuchSession,
    OnceConflict,
    StoreBusy,
    StoreClosed,
    UsageError,
)
from stenolog.sessions.session_manager import SessionManager
from stenolog.stores import json_file
from stenolog.stores.base import Store
from stenolog.stores.json_file import JSONMessage, JSONSession
from support import needs
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
    assert (tmp_path / "a.json.original").read_bytes() == original
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
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    names = ("a.json.original", "a.json.original-2", "a.json.original-3")
    assert kept == dict(zip(names, texts, strict=True))


def test_p4_reference_file_with_the_name_of_another_session_is_kept(
    tmp_path: Path,
) -> None:
    """Its file names are ambiguous: `telegram:1` and `telegram_1` have the same one."""
    text = '{"key":"telegram:1","messages":[{"role":"user","content":"old"}],"extra":1}'
    (tmp_path / "telegram_1.json").write_text(text)
    for sessions in (SessionManager(tmp_path), SessionManager(tmp_path)):
        assert sessions.add_message("telegram_1", "user", "mine")
        assert _contents(sessions, "telegram:1") == ["old"]
    again = SessionManager(tmp_path)
    assert again.list_sessions() == ["telegram:1", "telegram_1"]
    assert _contents(again, "telegram_1") == ["mine", "mine"]
    assert _contents(again, "telegram:1") == ["old"]
    assert text in [path.read_text() for path in tmp_path.iterdir()]
    assert len(list(tmp_path.iterdir())) == 2


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


def test_p7_concurrent_processes_lose_no_messages(tmp_path: Path) -> None:
    place = tmp_path / "sessions"
    writers = [_writer(place, name, 30) for name in "abc"]
    for writer in writers:
        assert writer.communicate()[0].count("\n") == 30
    found = _contents(SessionManager(place))
    assert len(found) == 90
    for name in "abc":
        assert [text for text in found if text[0] == name] == [f"{name}.{n}" for n in range(30)]


def test_p8_failed_write_is_absent_and_can_be_repeated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "sessions"
    sessions = SessionManager(place)
    assert sessions.add_message("k", "user", "a") == 1
    # Blocks the temporary file of the rename.
    (place / ".k.json.new").mkdir()

    assert sessions.add_message("k", "user", "b", once="b") is None
    assert _contents(sessions) == ["a"]
    assert not sessions.health().ok
    assert "writing" in caplog.text

    (place / ".k.json.new").rmdir()
    assert sessions.add_message("k", "user", "b", once="b") == 2
    assert sessions.health().ok
    assert _contents(SessionManager(place)) == ["a", "b"]


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


def test_save_writes_a_missing_file_again(tmp_path: Path) -> None:
    sessions = SessionManager(tmp_path)
    sessions.add_message("k", "user", "a")
    (tmp_path / "k.json").unlink()
    sessions.save("k")
    assert _contents(SessionManager(tmp_path)) == ["a"]


def test_health_of_fallback_gives_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    sessions = SessionManager(tmp_path, because="StoreUnavailable: no disk")
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


def test_store_of_a_session_manager_supports_the_calls_that_files_allow(tmp_path: Path) -> None:
    sessions = SessionManager(tmp_path)
    store = sessions.store
    assert isinstance(store, Store)
    assert store.add_messages("k", [_user("a"), _user("b")], once="t") == [1, 2]
    assert store.add_messages("k", [_user("a"), _user("b")], once="t") == [1, 2]
    with pytest.raises(OnceConflict):
        store.add_messages("k", [_user("a"), _user("other")], once="t")
    popped = store.pop("k")
    assert popped is not None
    assert popped.content == "b"
    assert _contents(sessions) == ["a"]
    store.hide("k", -5, 10**12)
    assert _contents(sessions) == []
    store.add_message("k", "user", "c")
    store.set_summary("k", "an abc")
    store.clear("k", upto=2)
    assert (_contents(sessions), store.get_summary("k")) == (["c"], "")
    store.set_meta("k", title="Letters")
    info = store.info("k")
    assert (info.last_seq, info.floor, info.visible, info.meta) == (3, 2, 1, {"title": "Letters"})
    (news,) = store.follow("k", after=2, uid=info.uid, timeout=0)
    assert news.content == "c"
    before = store.stamps()
    SessionManager(tmp_path).add_message("k", "user", "from another process")
    assert store.stamps() != before
    with pytest.raises(NoSuchSession):
        store.info("unknown")
    with pytest.raises(UsageError, match="undo is not available"):
        store.undo("k")
    assert SessionManager(tmp_path).store.get_history("k") == store.get_history("k")


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
    with store.lease("k", ttl=10, wait=0) as other:
        assert other.epoch > lease.epoch
    sessions.close()
    with pytest.raises(StoreClosed):
        other.store.get_history("k")


def test_view_shows_changes_other_than_appends(tmp_path: Path) -> None:
    sessions, other = SessionManager(tmp_path), SessionManager(tmp_path)
    sessions.add_message("a", "user", "1")
    view = sessions.store.view("a")
    other.add_message("a", "user", "2")
    newer = sessions.store.refresh(view)
    assert view.matches(newer.uid, newer.generation, newer.change)
    other.store.clear("a")
    cleared = sessions.store.refresh(newer)
    assert not newer.matches(cleared.uid, cleared.generation, cleared.change)
    sessions.store.set_meta("a", name="b")
    named = sessions.store.refresh(cleared)
    assert not cleared.matches(named.uid, named.generation, named.change)


def test_view_works_while_session_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions, other = SessionManager(tmp_path), SessionManager(tmp_path)
    sessions.add_message("a", "user", "0")
    read: Any = sessions.store.get_history

    def read_and_change(*values: Any, **named: Any) -> Any:
        other.add_message("a", "user", "more")
        assert len(other.get_history("a")) < 5, "it never ends"
        return read(*values, **named)

    monkeypatch.setattr(sessions.store, "get_history", read_and_change)
    view = sessions.store.view("a")
    assert view.info.visible == len(view.messages)


def test_store_of_a_session_manager_has_views(tmp_path: Path) -> None:
    with SessionManager(tmp_path) as sessions:
        sessions.add_message("a", "user", "1")
        sessions.set_summary("a", "so far")
        view = sessions.store.view("a")
        assert (view.summary, [m.content for m in view.messages]) == ("so far", ["1"])
        sessions.add_message("a", "user", "2")
        newer = view.merged(sessions.store.refresh(view))
        assert newer == sessions.store.view("a")
        assert [m.content for m in sessions.store.view("a", 1).messages] == ["2"]
