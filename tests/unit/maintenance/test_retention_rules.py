"""Tests retention: which sessions a rule selects, and that its steps are executed safely."""

import errno
import json
import os
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stenolog.catalog import Catalog, open_catalog
from stenolog.catalog.entries import Entry
from stenolog.errors import StoreUnavailable
from stenolog.maintenance.retention_rules import (
    RESTORED_FIELD,
    Action,
    Rule,
    may_delete,
    must_delete,
    restore_for_user,
)
from stenolog.maintenance.retention_runs import (
    RetentionResult,
    apply_rules,
    apply_rules_everywhere,
)
from stenolog.records import SessionInfo
from stenolog.sessions.folders import locate_sessions
from stenolog.stores.base import Store
from stenolog.stores.jsonl.admin import JSONLAdmin
from stenolog.stores.jsonl.log import STATE_EVERY_LINES
from stenolog.stores.open_store import open_store
from stenolog.stores.snapshots import SnapshotMark, SnapshotReading
from stenolog.transfer.migration import migrate_from_json

NOW = datetime(2026, 11, 16, 12, tzinfo=UTC)
DAY = timedelta(days=1)


def _entry(key: str, *, days: float, tags: tuple[str, ...] = (), **fields: Any) -> Entry:
    given: dict[str, Any] = {
        "key": key,
        "uid": f"uid of {key}",
        "title": "",
        "prompt": "",
        "state": "idle",
        "visible": 1,
        "count": 2,
        "tokens": 1,
        "created": NOW - 1000 * DAY,
        "updated": NOW - days * DAY,
        "tags": tags,
        "agent": None,
        "channel": None,
        "lost": 0,
        "damaged": 0,
        "problem": None,
    }
    return Entry(**{**given, **fields})


def _info(key: str, **fields: Any) -> SessionInfo:
    given: dict[str, Any] = {
        "key": key,
        "uid": f"uid of {key}",
        "created": NOW - 1000 * DAY,
        "updated": NOW,
        "last_seq": 2,
        "floor": 2,
        "visible": 1,
        "count": 2,
        "damaged": 0,
        "void_bytes": 0,
        "archived": 0,
        "generation": 1,
        "bytes": 100,
        "undoable": 0,
        "summary": "",
        "meta": {},
        "forked_from": None,
    }
    return SessionInfo(**{**given, **fields})


def _deleted(
    entries: list[Entry], rule: Rule, *, infos: dict[str, SessionInfo] | None = None
) -> list[str]:
    """Return the keys of the sessions that a rule deletes."""
    known = infos or {}
    return [
        entry.key
        for entry in entries
        if may_delete(rule, entry, NOW)
        and must_delete(
            rule,
            known.get(entry.key)
            or _info(entry.key, updated=entry.updated, meta={"tags": list(entry.tags)}),
            NOW,
        )
    ]


# --- selection -------------------------------------------------------------------------------


def test_age_of_a_session_is_counted_from_its_last_change() -> None:
    rule = Rule(name="r", older_than=30 * DAY)
    entries = [_entry("old", days=30.1), _entry("new", days=29.9), _entry("future", days=-5)]
    assert _deleted(entries, rule) == ["old"]
    # The catalog may not have the last change yet.
    assert _deleted(entries, rule, infos={"old": _info("old", updated=NOW)}) == []


def test_all_conditions_of_a_rule_must_hold() -> None:
    rule = Rule(name="r", older_than=DAY, tag="x", exclude_tag="keep")
    entries = [
        _entry("right", days=2, tags=("x",)),
        _entry("new", days=0, tags=("x",)),
        _entry("untagged", days=2),
        _entry("spared", days=2, tags=("keep", "x")),
    ]
    assert _deleted(entries, rule) == ["right"]
    infos = {"right": _info("right", updated=NOW - 2 * DAY, meta={"tags": ["keep", "x"]})}
    assert _deleted(entries, rule, infos=infos) == [], "it was tagged just now"


def test_running_and_unreadable_sessions_are_left_alone() -> None:
    rule = Rule(name="r", older_than=DAY)
    entries = [
        _entry("running", days=9, state="running"),
        _entry("broken", days=9, problem="it is damaged", updated=None),
        _entry("interrupted", days=9, state="interrupted"),
    ]
    assert _deleted(entries, rule) == ["interrupted"]


def test_damaged_sessions_are_not_deleted() -> None:
    entries = [_entry("a", days=9), _entry("b", days=9, lost=1), _entry("c", days=9, damaged=1)]
    rule = Rule(name="r", older_than=DAY)
    old = NOW - 9 * DAY
    assert _deleted(entries, rule) == ["a"]
    lost, damaged = (
        _info("a", updated=old, lost_spans=((1, 1),)),
        _info("a", updated=old, damaged=1),
    )
    assert _deleted(entries, rule, infos={"a": lost}) == []
    assert _deleted(entries, rule, infos={"a": damaged}) == []


def test_imported_session_is_no_older_than_its_import() -> None:
    rule = Rule(name="r", older_than=30 * DAY)
    entries = [_entry("a", days=400)]

    def deleted(*receipts: dict[str, Any]) -> list[str]:
        meta = {"imported": list(receipts)}
        return _deleted(entries, rule, infos={"a": _info("a", updated=NOW - 400 * DAY, meta=meta)})

    new, old = ({"taken": (NOW - days * DAY).isoformat(), "last_seq": 2} for days in (10, 40))
    assert deleted(old) == ["a"]
    assert deleted(new) == deleted(new, old) == deleted(old, new) == []
    assert deleted({"taken": 7}, new) == []


def test_restored_session_is_kept_for_another_period() -> None:
    entries = [_entry("a", days=400, tags=("x",))]
    by_age, by_tag = Rule(name="r", older_than=30 * DAY), Rule(name="r", tag="x")
    for days, deleted in ((10, []), (40, ["a"])):
        meta = {RESTORED_FIELD: (NOW - days * DAY).isoformat(), "tags": ["x"]}
        infos = {"a": _info("a", updated=NOW - 400 * DAY, meta=meta)}
        assert _deleted(entries, by_age, infos=infos) == deleted
        assert _deleted(entries, by_tag) == ["a"]
        assert _deleted(entries, by_tag, infos=infos) == []


def test_retention_time_without_a_zone_is_read_as_utc() -> None:
    rule = Rule(name="r", older_than=30 * DAY)
    for days, deleted in ((29.99, []), (30.01, ["a"])):
        meta = {RESTORED_FIELD: (NOW - days * DAY).replace(tzinfo=None).isoformat()}
        infos = {"a": _info("a", updated=NOW - 400 * DAY, meta=meta)}
        assert _deleted([_entry("a", days=400)], rule, infos=infos) == deleted


# --- execution -------------------------------------------------------------------------------


@pytest.fixture(params=["folder", "sqlite"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a workspace of each kind, with two sessions and one of another agent."""
    where = f"{tmp_path}/ws" if request.param == "folder" else f"sqlite:{tmp_path}/x.db"
    _fill(where)
    return where


def _fill(where: str) -> None:
    for agent, keys in ((None, ("a", "b")), ("ada", ("c",))):
        place = locate_sessions(where, agent)
        with open_store(place.where, namespace=place.namespace) as store:
            for key in keys:
                for number in range(4):
                    store.add_message(key, "user", f"{number}")
                store.checkpoint(key, summary="said", upto=2)


EVERY = timedelta(microseconds=1)


def _open(where: str) -> Store:
    return open_store(locate_sessions(where, None).where)


def _all_keys(where: str, agent: str | None = None) -> list[str]:
    place = locate_sessions(where, agent)
    with open_store(place.where, namespace=place.namespace) as store:
        return store.list_sessions()


def test_dry_run_reports_what_is_due_and_does_nothing(where: str) -> None:
    rule = Rule(name="r", action="delete", older_than=EVERY)
    found = apply_rules(where, [rule], dry_run=True)
    assert [(one.outcome, one.agent, one.key) for one in found] == [
        ("due", None, "a"),
        ("due", None, "b"),
        ("due", "ada", "c"),
    ]
    assert _all_keys(where) == ["a", "b"]


def test_deleted_sessions_of_every_agent_are_in_the_trash(where: str) -> None:
    found = apply_rules(where, [Rule(name="r", action="delete", older_than=EVERY)])
    assert {one.outcome for one in found} == {"done"}
    assert _all_keys(where) == _all_keys(where, "ada") == []
    with _open(where) as store:
        assert {one.key for one in store.admin.list_trash()} == {"a", "b"}
        restore_for_user(store, "a", uid=None, as_key=None)
        assert store.info("a").count == 4
        store.set_meta("a", tags=["x"])
    by_tag = Rule(name="r", action="delete", tag="x")
    assert apply_rules(where, [by_tag]) == [], "a user restored it"


def test_only_purge_deletes_permanently_and_only_from_trash(where: str) -> None:
    with _open(where) as store:
        store.delete("b")
        store.add_message("b", "user", "another life")
        store.delete("b")
    found = apply_rules(where, [Rule(name="r", action="purge", older_than=EVERY)], agent=None)
    assert [(one.key, one.outcome) for one in found] == [("b", "done"), ("b", "done")]
    with _open(where) as store:
        assert store.admin.list_trash() == []
        assert store.list_sessions() == ["a"]
    assert _all_keys(where, "ada") == ["c"]


def test_missing_database_is_reported_and_not_created(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="there is no such file"):
        apply_rules(f"sqlite:{tmp_path}/x.db", [Rule(name="r", older_than=EVERY)])
    assert not any(tmp_path.iterdir())


def test_session_with_running_turn_is_left_alone(where: str) -> None:
    rule = Rule(name="r", action="delete", older_than=EVERY)
    with _open(where) as store, store.lease("a", ttl=60):
        found = apply_rules(where, [rule])
        assert [one.key for one in found] == ["b", "c"]
    assert _all_keys(where) == ["a"]


def test_rule_without_condition_applies_to_no_session(where: str) -> None:
    with _open(where) as store:
        store.set_meta("a", tags=["x"])
        store.delete("a")
    rules = [
        Rule(name="r"),
        Rule(name="r", action="purge"),
        Rule(name="r", action="purge", tag="x"),
    ]
    assert apply_rules(where, []) == apply_rules(where, rules) == []


def test_session_is_deleted_by_the_first_rule_that_applies(where: str) -> None:
    rules = [
        Rule(name="0", older_than=DAY),
        Rule(name="1", tag="x"),
        Rule(name="2", older_than=EVERY, exclude_tag="keep"),
        Rule(name="3", older_than=EVERY),
        Rule(name="4", action="purge", older_than=EVERY),
    ]
    with _open(where) as store:
        store.set_meta("a", tags=["keep"])
    for outcome in ("due", "done"):
        results = apply_rules(where, rules, dry_run=outcome == "due")
        found = [(result.key, result.rule, result.outcome) for result in results]
        assert found == [("b", "2", outcome), ("a", "3", outcome), ("c", "2", outcome)]
    with _open(where) as store:
        assert {session.key for session in store.admin.list_trash()} == {"a", "b"}, (
            "nothing is purged"
        )


@pytest.mark.parametrize("change", ["message", "tag"])
def test_p1_session_that_changes_during_a_deletion_is_never_in_the_trash(
    where: str, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    with _open(where) as store, _open(where) as other_store:
        info = store.info("a")
        delete_unchanged: Any = type(store.admin).delete_unchanged

        def change_first(admin: Any, info: SessionInfo) -> Any:
            if info.key == "a" and change == "message":
                other_store.add_message("a", "user", "one more")
            elif info.key == "a":
                other_store.set_meta("a", tags=["keep"])
            return delete_unchanged(admin, info)

        monkeypatch.setattr(type(store.admin), "delete_unchanged", change_first)
        # A session that may have changed is not deleted.
        monkeypatch.setattr(type(store), "delete", None)
        # A deletion that is taken back would fail if the key is in use again at that moment.
        monkeypatch.setattr(type(store.admin), "restore", None)
        results = apply_rules(where, [Rule(name="r", older_than=EVERY)])
        outcomes = {result.key: (result.outcome, result.message) for result in results}
        assert outcomes["a"] == ("skipped", "the session has just changed")
        assert [session.key for session in store.admin.list_trash()] == ["b"]
        assert other_store.info("a").uid == info.uid


def test_p1_rules_beside_writers_lose_no_message_and_no_step_fails(where: str) -> None:
    told = [f"message {number}" for number in range(60)]

    def write() -> None:
        with _open(where) as store:
            for text in told:
                store.add_message("a", "user", text)

    rule = Rule(name="r", older_than=EVERY)
    results: list[RetentionResult] = []
    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        while not writer.done():
            results += apply_rules(where, [rule])
        writer.result()
    assert {result.outcome for result in results} <= {"done", "skipped"}
    with _open(where) as store:
        sessions = [store.get_history("a", full=True)] if "a" in store.list_sessions() else []
        for entry in (entry for entry in store.admin.list_trash() if entry.key == "a"):
            store.admin.restore("a", uid=entry.uid, as_key=entry.uid)
            sessions.append(store.get_history(entry.uid, full=True))
    stored = [message.content for session in sessions for message in session]
    assert sorted(text for text in stored if str(text).startswith("message")) == sorted(told)


def test_failed_deletion_is_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(folder) as store:
        [key] = store.list_sessions()
    real_rename = os.rename

    def fail_in_trash(*paths: Any, dst_dir_fd: int | None = None, **options: Any) -> None:
        if dst_dir_fd is not None:
            raise OSError(errno.EIO, "failed")
        real_rename(*paths, **options)

    rule = Rule(name="r", action="delete", older_than=EVERY)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail_in_trash)
        [failed] = apply_rules(str(folder), [rule])
    assert (failed.key, failed.outcome) == (key, "failed")
    [done] = apply_rules(str(folder), [rule])
    assert (done.key, done.outcome) == (key, "done")


PURGE = Rule(name="r", action="purge", older_than=EVERY, exclude_tag="keep")


def test_purge_changes_no_other_session_of_the_key(where: str) -> None:
    with _open(where) as store:
        store.delete("a")
        store.add_message("a", "user", "another life")
        store.set_meta("a", tags=["keep"])
        again = store.delete("a")
        store.add_message("a", "user", "in use")
        [result] = apply_rules(where, [PURGE])
        assert (result.key, result.outcome) == ("a", "done")
        assert store.admin.list_trash() == [again]
        assert [message.content for message in store.get_history("a")] == ["in use"]


@pytest.mark.parametrize("is_deleted_again", [False, True])
def test_session_that_is_restored_meanwhile_is_not_purged(
    where: str, monkeypatch: pytest.MonkeyPatch, is_deleted_again: bool
) -> None:
    with _open(where) as store:
        gone = store.delete("a")
        purge: Any = type(store.admin).purge

        def restore_first(other: Any, key: str, *, trash: Any) -> Any:
            store.admin.restore("a")
            if is_deleted_again:
                assert store.delete("a").uid == gone.uid
            return purge(other, key, trash=trash)

        monkeypatch.setattr(type(store.admin), "purge", restore_first)
        [result] = apply_rules(where, [PURGE])
        assert (result.outcome, result.message) == ("skipped", "the session is not there any more")
        assert len(store.admin.list_trash()) == is_deleted_again
        assert ("a" in store.list_sessions()) != is_deleted_again


DELETE_MESSAGE = "DELETE FROM message WHERE seq = 3 AND session = ?"
DAMAGE_STATE = "UPDATE state SET body = x'00' WHERE session = ?"
DAMAGE_UNDO_STEP = "UPDATE change SET body = x'00' WHERE number = 3 AND session = ?"


@pytest.mark.quick(4)
@pytest.mark.parametrize("exclude_tag", ["", "keep"])
@pytest.mark.parametrize(
    ("text", "statement"),
    [
        (b'"content":"2"', DELETE_MESSAGE),
        (b'"old_summary":"long', DAMAGE_UNDO_STEP),
        (b'{"tags":["keep"]}', DAMAGE_STATE),
    ],
    ids=["message", "change", "last change"],
)
def test_damaged_session_in_the_trash_is_not_purged(
    where: str, text: bytes, statement: str, exclude_tag: str
) -> None:
    with _open(where) as store:
        for key in ("a", "b"):
            store.set_summary(key, "long" * 10_000)
            store.checkpoint(key, summary="short", upto=3)
        store.set_meta("a", tags=["keep"])
        damaged = store.delete("a")
        store.delete("b")
    if where.startswith("sqlite:"):
        with closing(sqlite3.connect(where.removeprefix("sqlite:"))) as database, database:
            [[session]] = database.execute("SELECT id FROM session WHERE key = 'a'")
            database.execute("DELETE FROM change WHERE number = 4 AND session = ?", (session,))
            database.execute(statement, (session,))
    else:
        [log] = Path(where, "sessions", "trash").glob(f"{damaged.uid}.*")
        content = log.read_bytes()
        assert text in content
        log.write_bytes(content.replace(text, text.swapcase(), 1))
    rule = Rule(name="r", action="purge", older_than=EVERY, exclude_tag=exclude_tag)
    assert [one.key for one in apply_rules(where, [rule])] == ["b"]
    with _open(where) as store:
        assert [one.uid for one in store.admin.list_trash()] == [damaged.uid]


def test_session_with_a_damaged_change_in_its_archive_is_not_purged(folder: Path) -> None:
    with open_store(folder) as store:
        store.add_message("a", "user", "1")
        store.set_meta("a", tags=["keep"])
        store.add_message("a", "user", "2")
        store.add_message("a", "user", "3")
        store.checkpoint("a", summary="said", upto=2)
    [log] = folder.rglob("a.jsonl")
    log.write_bytes(log.read_bytes().replace(b"keep", b"KEEP"))
    with open_store(folder) as store:
        assert store.compact("a").archived == 2
        assert b"KEEP" not in log.read_bytes()
        store.delete("a")
    assert apply_rules(str(folder), [Rule(name="r", action="purge", older_than=EVERY)]) == []


def test_session_with_a_damaged_change_before_its_first_message_is_not_purged(folder: Path) -> None:
    with open_store(folder) as store:
        store.set_meta("a", tags=["keep"])
        store.set_meta("a", number=0)
    [log] = folder.rglob("a.jsonl")
    log.write_bytes(log.read_bytes().replace(b"keep", b"KEEP", 1))
    with open_store(folder) as store:
        for number in range(STATE_EVERY_LINES):
            store.set_meta("a", number=number)
        store.add_message("a", "user", "hello")
        store.delete("a")
    assert apply_rules(str(folder), [Rule(name="r", action="purge", older_than=EVERY)]) == []


@pytest.mark.parametrize("damage", [(b"keep", b"KEEP"), (b'"crc":', b'"CRC":')])
def test_session_with_a_damaged_change_that_was_marked_void_is_not_purged(
    folder: Path, damage: tuple[bytes, bytes]
) -> None:
    with open_store(folder) as store:
        store.add_message("a", "user", "1")
        store.set_meta("a", tags=["keep"])
    [log] = folder.rglob("a.jsonl")
    *lines, last_line = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines, last_line.replace(*damage)]))
    with open_store(folder) as store:
        store.add_message("a", "user", "2")
        store.delete("a")
    assert apply_rules(str(folder), [Rule(name="r", action="purge", older_than=EVERY)]) == []


def test_incomplete_write_does_not_prevent_a_purge(folder: Path) -> None:
    with open_store(folder) as store:
        store.add_message("a", "user", "1")
    [log] = folder.rglob("a.jsonl")
    for number in range(2):
        with log.open("ab") as file:
            file.write(b'{"kind":"message","seq":')
        with open_store(folder) as store:
            if number == 0:
                store.add_message("a", "user", "2")
            else:
                store.delete("a")
    [result] = apply_rules(str(folder), [Rule(name="r", action="purge", older_than=EVERY)])
    assert (result.key, result.outcome) == ("a", "done")


def test_purge_rules_read_messages_once_and_not_of_sessions_with_the_excluded_tag(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(folder) as store:
        for key in ("a", "b"):
            store.add_message(key, "user", "hello")
        store.set_meta("a", tags=["keep"])
        for key in ("a", "b"):
            store.delete(key)
    original = JSONLAdmin.read_snapshot
    read_keys: list[str] = []

    @contextmanager
    def read_snapshot(
        admin: JSONLAdmin, mark: SnapshotMark, *, after: int = 0
    ) -> Iterator[SnapshotReading]:
        def is_damaged() -> bool:
            read_keys.append(mark.key)
            return reading.is_damaged()

        with original(admin, mark, after=after) as reading:
            yield replace(reading, is_damaged=is_damaged)

    monkeypatch.setattr(JSONLAdmin, "read_snapshot", read_snapshot)
    rule = Rule(name="r", action="purge", older_than=EVERY, exclude_tag="keep")
    apply_rules(str(folder), [rule, replace(rule, name="s")], dry_run=True)
    assert read_keys == ["b"]


def test_next_purge_rule_finishes_an_interrupted_purge(where: str) -> None:
    _interrupt(where, "a")
    with _open(where) as store:
        store.add_message("a", "user", "another life")
        assert len(store.admin.list_trash(unfinished=True)) == 1
    old = Rule(name="r", action="purge", older_than=1000 * DAY)
    assert apply_rules(where, [Rule(name="d", action="delete", older_than=1000 * DAY)]) == []
    assert [one.outcome for one in apply_rules(where, [old], dry_run=True)] == ["due"]
    [done] = apply_rules(where, [old])
    assert (done.outcome, done.message) == ("done", "completed an interrupted purge")
    assert apply_rules(where, [old]) == []
    with _open(where) as store:
        assert store.admin.list_trash(unfinished=True) == []
        assert [message.content for message in store.get_history("a")] == ["another life"]


def _interrupt(where: str, key: str) -> None:
    """Leave the state of a killed purge."""
    with _open(where) as store:
        store.delete(key)
        if where.startswith("sqlite:"):
            store.admin.purge(key)
    if where.startswith("sqlite:"):
        with closing(sqlite3.connect(where.removeprefix("sqlite:"))) as database, database:
            database.execute("INSERT INTO purge (begun) VALUES ('2026-11-05T10:00:00.000000Z')")
    else:
        [log] = Path(where, "sessions", "trash").iterdir()
        log.rename(f"{log}.purged")


def test_retention_can_be_stopped_between_two_steps(where: str) -> None:
    asked = iter([False, True, True])
    rule = Rule(name="r", action="delete", older_than=EVERY)
    assert len(apply_rules(where, [rule], should_stop=lambda: next(asked))) == 1
    assert _all_keys(where) == ["b"]


def test_daemon_continues_after_unreadable_place(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rule = Rule(name="r", action="delete", older_than=EVERY)
    (tmp_path / "file").write_text("no folder")
    done = apply_rules_everywhere([str(tmp_path / "file"), "memory:", where, where], [rule])
    assert [one.key for one in done] == ["a", "b", "c"]
    assert "retention: nothing was done" in caplog.text
    assert apply_rules_everywhere([where], []) == []


def test_failure_of_one_agent_does_not_stop_the_others(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked: list[int] = []

    def faulty(*given: Any, **named: Any) -> Catalog:
        looked.append(1)
        if len(looked) == 1:
            raise TypeError("what nobody thought of")
        return open_catalog(*given, **named)

    monkeypatch.setattr("stenolog.maintenance.retention_runs.open_catalog", faulty)
    rule = Rule(name="r", action="delete", older_than=EVERY)
    assert [one.key for one in apply_rules_everywhere([where], [rule])] == ["c"]
    assert "retention: nothing was done: TypeError: what nobody thought of" in caplog.text


def test_recently_imported_session_is_not_deleted(tmp_path: Path) -> None:
    old = tmp_path / "sessions" / "cli_old.json"
    old.parent.mkdir()
    when = "2020-01-01T00:00:00Z"
    said = [{"role": "user", "content": "hello"}]
    fields = {"key": "cli:old", "messages": said, "summary": "", "created": when, "updated": when}
    old.write_text(json.dumps(fields))
    with open_store(tmp_path / "ws") as store:
        assert migrate_from_json(old.parent, store).imported
        [key] = store.list_sessions()
        assert store.info(key).updated.year == 2020
    assert (
        apply_rules(str(tmp_path / "ws"), [Rule(name="r", action="delete", older_than=DAY)]) == []
    )
    rule = Rule(name="r", action="delete", older_than=EVERY)
    assert [one.outcome for one in apply_rules(str(tmp_path / "ws"), [rule])] == ["done"]


def test_rules_apply_in_postgresql(postgres_url: str) -> None:
    _fill(postgres_url)
    actions: tuple[Action, ...] = ("delete", "purge")
    for action in actions:
        rule = Rule(name="r", action=action, older_than=EVERY)
        found = apply_rules(postgres_url, [rule])
        assert [(one.key, one.outcome) for one in found if one.agent is None] == [
            ("a", "done"),
            ("b", "done"),
        ], action
    with open_store(postgres_url) as store:
        assert (store.list_sessions(), store.admin.list_trash()) == ([], [])


# --- the log ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a workspace folder with one session of an unusual key."""
    with open_store(tmp_path / "ws") as store:
        store.add_message("odd\nkey\t\ud800"[:8], "user", "hello")
    return tmp_path / "ws"


def test_each_executed_step_is_one_line_of_the_log(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "stenolog")
    [done] = apply_rules(str(folder), [Rule(name="weekly", action="delete", older_than=EVERY)])
    [line] = [record.getMessage() for record in caplog.records if "retention" in record.msg]
    parts = line.removeprefix("retention: ").split("\t")
    assert parts[:6] == ["done", "delete", "weekly", "sessions", r"odd\nkey\t", done.uid]
    assert parts[7] == "moved to the trash"
    assert not (folder / "retention.log").exists()


def test_skipped_sessions_are_not_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "stenolog")
    with open_store(folder) as store, store.lease(store.list_sessions()[0], ttl=60):
        results = apply_rules(str(folder), [Rule(name="r", older_than=EVERY)])
    assert {result.outcome for result in results} <= {"skipped"}
    assert "retention" not in caplog.text
