"""The fallback: legacy sessions are visible, every call works, and it is merged back once."""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Final

import pytest

import stenolog
from stenolog.errors import NoSuchSession, StoreUnavailable
from stenolog.records import SessionInfo
from stenolog.sessions.session_manager import SessionManager
from stenolog.sessions.session_store import SessionStore
from stenolog.stores.base import Store
from stenolog.stores.jsonl import JSONLStore
from stenolog.stores.open_store import open_store
from stenolog.transfer import fallback as fallbacks
from stenolog.transfer import open_sessions as opening
from stenolog.transfer.fallback import FallbackStore
from stenolog.transfer.migration import migrate_from_json
from stenolog.transfer.open_sessions import open_sessions
from support import temporary_folders
from support.merge_steps import broken, merge_killed, steps

SAMPLES: Final = Path(__file__).parents[2] / "samples"
VERSION_0_1: Final = SAMPLES / "fallback-0.1"
WHERE: Final = {"jsonl": "{}", "sqlite": "sqlite:{}/steno.db"}
KEY: Final = "telegram:91001"
LEGACY: Final = [f"legacy 0/{n}" for n in range(5)]
"""The messages of KEY in the samples."""


BATCH: Final = [{"role": "user", "content": 1}, {"role": "assistant", "content": 2}]


@pytest.fixture
def workspace() -> Iterator[Path]:
    with temporary_folders.folder() as path:
        yield path / "w"


@pytest.fixture(params=WHERE)
def where(request: pytest.FixtureRequest, workspace: Path) -> str:
    workspace.mkdir(mode=0o700)
    return WHERE[request.param].format(workspace)


def legacy(workspace: Path) -> Path:
    shutil.copytree(SAMPLES / "picoclaw-legacy", workspace / "sessions")
    return workspace / "sessions"


def contents(sessions: SessionStore | Store, key: str = KEY, **options: Any) -> list[Any]:
    return [message.content for message in sessions.get_history(key, **options)]


@pytest.fixture
def fallback(where: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], SessionStore]:
    """Open the fallback of the place."""

    def opened() -> SessionStore:
        with broken(monkeypatch):
            sessions = open_sessions(where)
        assert isinstance(sessions.store, FallbackStore)
        return sessions

    return opened


Fallback = Callable[[], SessionStore]


# --- what the fallback shows -----------------------------------------------------------------


def test_legacy_histories_are_visible_and_their_files_stay(
    workspace: Path, fallback: Fallback
) -> None:
    folder = legacy(workspace)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with fallback() as sessions:
        assert sessions.list_sessions() == ["discord:1001:77", KEY]
        assert contents(sessions) == LEGACY
        assert sessions.get_summary(KEY) == "An older talk."
        assert sessions.add_message(KEY, "user", "new") == 6
        assert "the disk is away" in sessions.health().problems[0]
        assert not sessions.health().ok
    with fallback() as again:
        assert contents(again) == [*LEGACY, "new"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_p4_the_fallback_refuses_to_delete_and_to_purge(where: str, fallback: Fallback) -> None:
    with open_store(where) as regular:
        regular.add_message(KEY, "user", "in the store")
    with fallback() as sessions:
        store = sessions.store
        assert isinstance(store, FallbackStore)
        store.add_message(KEY, "user", "said")
        lease = store.lease(KEY, ttl=10)
        for refused in (
            lambda: store.delete(KEY),
            lambda: store.admin.delete_unchanged(store.info(KEY)),
            lambda: store.admin.purge(KEY),
            lambda: store.admin.purge(KEY, before=2),
            lambda: store.admin.purge(KEY, trash=[("uid", datetime.now(UTC))]),
            lambda: store.admin.finish_purge("uid"),
            lambda: lease.store.delete(KEY),
            lambda: lease.store.admin.purge(KEY),
        ):
            with pytest.raises(StoreUnavailable, match="this is a fallback store"):
                refused()
        assert contents(store, full=True) == ["said"]
    with open_sessions(where) as good:
        assert contents(good) == ["in the store", "said"]


def test_p11_the_fallback_is_private(fallback: Fallback) -> None:
    with fallback() as sessions:
        sessions.add_message("k", "user", "secret")
        folder = Path(str(sessions.store.folder)).parent  # type: ignore[attr-defined]
    for path in (folder, *folder.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


# --- merging it back -------------------------------------------------------------------------


def test_p12_fallback_messages_are_merged_once(
    where: str, workspace: Path, fallback: Fallback, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    legacy(workspace)
    with fallback() as sessions:
        assert sessions.add_message(KEY, "user", "hello", once="t") == 6
        assert sessions.add_message(KEY, "assistant", "hello") == 7
        assert sessions.store.add_messages(KEY, BATCH, once="batch") == [8, 9]
        assert sessions.add_message("new", "user", "hi") == 1
        said = sessions.get_history(KEY)
        folder = sessions.store.folder  # type: ignore[attr-defined]
    for _ in range(2):
        with open_sessions(where) as good:
            assert good.health().ok
            assert [m.to_json() for m in good.get_history(KEY)] == [m.to_json() for m in said]
            assert [m.at for m in good.get_history(KEY, after=5)] == [m.at for m in said[5:]]
            assert contents(good, "new") == ["hi"]
            assert good.list_sessions() == ["discord:1001:77", "new", KEY]
            # Idempotency keys are merged too.
            assert good.add_message(KEY, "user", "hello", once="t") == 6
            assert good.store.add_messages(KEY, BATCH, once="batch") == [8, 9]
            assert good.store.info(KEY).last_seq == 9
    assert not folder.exists()
    (moved,) = folder.parent.glob("sessions.merged-*")
    with open_store(folder.parent, namespace=moved.name, read_only=True) as kept:
        assert contents(kept, full=True)[:6] == [*LEGACY, "hello"]
    assert str(moved) in caplog.text


def test_messages_of_the_fallback_come_after_those_of_the_store(
    where: str, fallback: Fallback
) -> None:
    with open_sessions(where) as good:
        good.add_message(KEY, "user", "before")
        good.store.set_summary(KEY, "what was before")
    with fallback() as sessions:
        assert contents(sessions) == []
        sessions.add_message(KEY, "user", "meanwhile")
        sessions.add_message(KEY, "assistant", "wrong answer")
        sessions.add_message(KEY, "user", "the last")
        sessions.store.admin.hide(KEY, 2, 2)
        sessions.store.set_summary(KEY, "what was meanwhile")
    with open_sessions(where) as good:
        assert contents(good) == ["before", "meanwhile", "the last"]
        assert contents(good, full=True) == ["before", "meanwhile", "wrong answer", "the last"]
        assert good.get_summary(KEY) == "what was before"


@pytest.mark.parametrize("says_more", [True, False])
def test_a_summary_and_meta_of_the_fallback_are_merged(
    where: str, workspace: Path, fallback: Fallback, says_more: bool
) -> None:
    legacy(workspace)
    with fallback() as sessions:
        if says_more:
            sessions.add_message(KEY, "user", "new")
        sessions.store.admin.hide(KEY, 4, 4)
        sessions.checkpoint(KEY, summary="A newer talk.", upto=2)
        sessions.store.set_meta(KEY, title="A talk", requests=[["r", 1]], compacted=2)
    with open_sessions(where) as good:
        info = good.store.info(KEY)
        assert contents(good) == ["legacy 0/2", "legacy 0/4", *(["new"] if says_more else [])]
        assert (good.get_summary(KEY), info.floor) == ("A newer talk.", 2)
        assert info.meta["title"] == "A talk"
        assert not {"requests", "compacted", "importing"} & set(info.meta)


def test_newer_metadata_of_the_store_is_kept(where: str, fallback: Fallback) -> None:
    with fallback() as sessions:
        sessions.add_message(KEY, "user", "meanwhile")
        sessions.store.set_meta(KEY, title="of the fallback", tags=["x"])
    with open_store(where) as store:
        store.add_message(KEY, "user", "newer")
        store.set_meta(KEY, title="of the store")
    with open_sessions(where) as good:
        meta = good.store.info(KEY).meta
        assert (meta["title"], meta["tags"]) == ("of the store", ["x"])
        assert contents(good) == ["newer", "meanwhile"]


def test_a_legacy_session_that_was_deleted_in_the_store_stays_deleted(
    where: str, workspace: Path, fallback: Fallback
) -> None:
    folder = legacy(workspace)
    text = (folder / "telegram_91001.json").read_bytes()
    with open_sessions(where) as good:
        good.store.delete(KEY)
    # The reference ran again, and left its old file.
    (folder / "telegram_91001.json").write_bytes(text)
    os.utime(folder / "telegram_91001.json", (1_700_000_000, 1_700_000_000))
    with fallback() as sessions:
        assert contents(sessions) == LEGACY
    with open_sessions(where) as good:
        assert KEY not in good.list_sessions()


def test_new_messages_of_a_deleted_legacy_session_arrive_without_its_summary(
    where: str, workspace: Path, fallback: Fallback
) -> None:
    folder = legacy(workspace)
    text = (folder / "telegram_91001.json").read_bytes()
    with open_sessions(where) as good:
        good.store.delete(KEY)
    (folder / "telegram_91001.json").write_bytes(text)
    os.utime(folder / "telegram_91001.json", (1_700_000_000, 1_700_000_000))
    with fallback() as sessions:
        assert sessions.get_summary(KEY) == "An older talk."
        sessions.add_message(KEY, "user", "new")
        sessions.store.set_meta(KEY, title="An older talk")
    with open_sessions(where) as good:
        info = good.store.info(KEY)
        assert (contents(good, full=True), info.summary, info.meta) == (["new"], "", {})


@pytest.mark.parametrize("once", [None, "t"])
def test_p4_cleared_messages_stay_hidden_after_the_merge(
    where: str, fallback: Fallback, once: str | None
) -> None:
    with open_store(where) as store:
        store.add_message(KEY, "user", "before")
    with fallback() as sessions:
        sessions.add_message(KEY, "user", "cleared", once=once)
        sessions.store.clear(KEY)
        sessions.add_message(KEY, "user", "after")
    with open_sessions(where) as good:
        assert contents(good) == ["before", "after"]
        assert contents(good, full=True) == ["before", "cleared", "after"]


def test_a_fallback_without_its_lock_file_is_merged(where: str, fallback: Fallback) -> None:
    with fallback() as sessions:
        sessions.add_message(KEY, "user", "said")
        folder = sessions.store.folder  # type: ignore[attr-defined]
    (folder.parent / "fallback.lock").unlink()
    with open_sessions(where) as good:
        assert contents(good) == ["said"]


def test_p7_a_fallback_in_use_is_merged_after_its_use(
    where: str, fallback: Fallback, caplog: pytest.LogCaptureFixture
) -> None:
    running = fallback()
    for number in range(2):
        assert running.add_message(KEY, "user", f"said {number}")
        with open_sessions(where) as good:
            assert good.add_message(KEY, "user", f"there {number}")
            assert contents(good)[-1] == f"there {number}"
    folder = running.store.folder  # type: ignore[attr-defined]
    assert f"{folder.parent} is used by another process" in caplog.text
    running.close()
    with open_sessions(where) as good:
        assert contents(good) == ["there 0", "there 1", "said 0", "said 1"]
    assert not folder.exists()


def test_p7_a_forked_child_keeps_the_fallback_in_use(where: str, fallback: Fallback) -> None:
    sessions = fallback()
    sessions.add_message(KEY, "user", "said")
    go, write = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            os.close(write)
            os.read(go, 1)
            sessions.add_message(KEY, "user", "by the child")
        os._exit(0)
    os.close(go)
    sessions.close()
    with open_sessions(where) as good:
        assert good.list_sessions() == []
    os.close(write)
    os.waitpid(child, 0)
    with open_sessions(where) as good:
        assert contents(good) == ["said", "by the child"]


def test_failed_merge_leaves_the_fallback_unchanged(
    where: str, fallback: Fallback, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fallback() as sessions:
        for number in range(4):
            sessions.add_message(KEY, "user", f"said {number}")

    def failing(place: Any, **options: Any) -> Store:
        store = open_store(place, **options)
        add, left = store.add_messages, iter(range(2))

        def add_messages(*arguments: Any, **given: Any) -> list[int]:
            if next(left, None) is None:
                raise stenolog.NotStored("no space left on device")
            return add(*arguments, **given)

        store.add_messages = add_messages  # type: ignore[method-assign]
        return store

    with monkeypatch.context() as patched:
        patched.setattr(opening, "open_store", failing)
        with open_sessions(where) as sessions:
            assert isinstance(sessions.store, FallbackStore)
            assert "no space left" in sessions.health().problems[0]
            assert sessions.add_message(KEY, "user", "said 4") == 5
    with open_sessions(where) as good:
        assert contents(good) == [f"said {number}" for number in range(5)]


def test_p6_each_store_merges_its_own_fallback_and_no_other(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schemes = ("{}", "sqlite:{}/a.db", "sqlite:{}/b.db", "sqlite:{}/sessions/c.db")
    places = [
        (scheme.format(workspace), agent) for scheme in schemes for agent in (None, "ada", "eve")
    ]
    for where, agent in places:
        with open_sessions(where, agent=agent) as sessions:
            assert sessions.add_message(KEY, "user", f"first {where} {agent}") == 1
    with broken(monkeypatch):
        for where, agent in places:
            with open_sessions(where, agent=agent) as sessions:
                assert isinstance(sessions.store, FallbackStore)
                assert sessions.add_message(KEY, "user", f"to {where} {agent}")
                assert contents(sessions) == [f"to {where} {agent}"]
    for where, agent in reversed(places):
        with open_sessions(where, agent=agent) as sessions:
            assert contents(sessions) == [f"first {where} {agent}", f"to {where} {agent}"]


# --- merging a folder that stays -------------------------------------------------------------


def outage(fallback: Fallback, *messages: str, key: str = KEY) -> Path:
    """Use the fallback once, and return its folder."""
    with fallback() as sessions:
        for text in messages:
            assert sessions.add_message(key, "user", text)
        folder: Path = sessions.store.folder  # type: ignore[attr-defined]
    return folder


def keep(folder: Path) -> Path:
    """Put a damaged log into the folder of the fallback, which keeps the name of the folder."""
    (folder / "damaged.jsonl").write_text("not a record\n" * 2)
    return folder / "damaged.jsonl"


@pytest.mark.parametrize("from_legacy", [True, False])
def test_p7_a_session_that_was_merged_and_then_purged_stays_purged(
    where: str, workspace: Path, fallback: Fallback, from_legacy: bool
) -> None:
    if from_legacy:
        legacy(workspace)
    folder = outage(fallback, "a secret")
    damaged_log = keep(folder)
    with fallback() as sessions:
        sessions.store.set_summary(KEY, "about a secret")
        sessions.store.set_meta(KEY, title="secret")
    with open_sessions(where) as good:
        assert contents(good)[-1:] == ["a secret"]
        good.store.admin.purge(KEY)
    for _ in range(2):
        with open_sessions(where) as good:
            assert KEY not in good.list_sessions()
            assert good.store.admin.list_trash() == []
    # Messages that are added to the fallback afterwards are merged, and only those.
    for number in range(2):
        outage(fallback, f"later {number}")
        with open_sessions(where) as good:
            assert contents(good, full=True) == [f"later {n}" for n in range(number + 1)]
            assert good.get_summary(KEY) == ""
            assert "title" not in good.store.info(KEY).meta
    damaged_log.unlink()
    open_sessions(where).close()
    assert not folder.exists()
    assert not list(workspace.rglob("merged"))


def test_session_with_an_unreadable_merge_record_is_not_merged(
    where: str, workspace: Path, fallback: Fallback, caplog: pytest.LogCaptureFixture
) -> None:
    folder = outage(fallback, "a secret")
    keep(folder)
    with open_sessions(where) as good:
        good.store.admin.purge(KEY)
    (record,) = workspace.rglob("merged/*.json")
    record.write_text("{")
    with open_sessions(where) as good:
        assert good.health().ok
        assert good.list_sessions() == []
    assert "the record of its merge cannot be read" in caplog.text
    assert folder.exists()


def test_p7_nothing_is_merged_without_a_merge_record(
    where: str, fallback: Fallback, caplog: pytest.LogCaptureFixture
) -> None:
    folder = outage(fallback, "hello")
    (folder.parent / "merged").write_text("in the way")
    with open_sessions(where) as good:
        assert good.health().ok
        assert good.list_sessions() == []
    assert "the record of its merge cannot be read" in caplog.text
    (folder.parent / "merged").unlink()
    with JSONLStore(folder.parent, namespace=folder.name, read_only=True) as store:
        uid = store.info(KEY).uid
    in_the_way = folder.parent / "merged" / f".{uid}.json.new"
    in_the_way.mkdir(parents=True)
    with open_sessions(where) as good:
        assert good.list_sessions() == []
    assert "the record of its merge cannot be written" in caplog.text
    in_the_way.rmdir()
    with open_sessions(where) as good:
        assert contents(good) == ["hello"]
    assert not folder.exists()


# --- merging beside other processes, and merges that are killed ------------------------------


def everything(where: str, key: str = KEY) -> list[Any]:
    """Return the contents of all sessions with this key, the deleted ones first."""
    with open_store(where) as store:
        found: list[Any] = []
        for trashed in reversed(store.admin.list_trash()):
            if trashed.key == key:
                store.admin.restore(key, uid=trashed.uid, as_key="looked at")
                found += contents(store, "looked at", full=True)
                store.delete("looked at")
        return found + contents(store, key, full=True)


@pytest.mark.parametrize("ahead", [0, 7200])
@pytest.mark.parametrize("deletes_first", [True, False])
def test_p1_fallback_messages_arrive_although_their_session_was_deleted(
    where: str,
    fallback: Fallback,
    monkeypatch: pytest.MonkeyPatch,
    ahead: int,
    deletes_first: bool,
) -> None:
    with open_store(where) as store:
        store.add_message(KEY, "user", "old")

    def delete() -> None:
        """Delete the session, while the clock is `ahead` seconds ahead."""
        with monkeypatch.context() as patched, open_store(where) as store:
            patched.setattr(time, "time_ns", partial(_later, time.time_ns, ahead * 10**9))
            store.delete(KEY)

    if deletes_first:
        delete()
    with fallback() as sessions:
        assert sessions.add_message(KEY, "user", "meanwhile", once="update-9") == 1
        if not deletes_first:
            delete()
    with open_sessions(where) as good:
        assert contents(good, full=True) == ["meanwhile"]
        assert good.add_message(KEY, "user", "meanwhile", once="update-9") == 1
        assert [(trashed.key, trashed.count) for trashed in good.store.admin.list_trash()] == [
            (KEY, 1)
        ]


def _later(now: Callable[[], int], nanoseconds: int) -> int:
    return now() + nanoseconds


@pytest.mark.parametrize("once", [None, "t"])
def test_p7_the_trash_of_the_store_has_no_messages_of_the_fallback_if_it_is_older(
    where: str, fallback: Fallback, monkeypatch: pytest.MonkeyPatch, once: str | None
) -> None:
    with open_store(where) as store:
        store.add_message(KEY, "user", "the same", once=once)
        store.delete(KEY)
    with fallback() as sessions:
        sessions.add_message(KEY, "user", "the same", once=once)
    assert merge_killed(where, monkeypatch, 2)
    with open_sessions(where) as good:
        assert contents(good) == ["the same"]


def test_p7_a_second_start_does_not_merge_what_another_start_merges(
    where: str,
    fallback: Fallback,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    outage(fallback, "a1", key="a")
    outage(fallback, "m1", "m2")
    monkeypatch.setattr(fallbacks, "LOCK_TIMEOUT", 0.0)

    def second_start(step: int) -> None:
        if step == 4:
            open_sessions(where).close()
            with open_store(where) as store, suppress(NoSuchSession):
                store.delete(KEY)
            with open_store(where) as store, suppress(NoSuchSession):
                store.delete("a")

    with steps(monkeypatch, second_start):
        open_sessions(where).close()
    assert "another process is still merging it" in caplog.text
    assert everything(where) == ["m1", "m2"]
    assert everything(where, "a") == ["a1"]


def test_a_second_start_waits_for_the_merge_of_another_start(
    where: str, fallback: Fallback, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage(fallback, "m1", "m2")
    seen: list[Any] = []

    def second_start() -> None:
        with open_sessions(where) as sessions:
            seen.extend(contents(sessions))

    thread = Thread(target=second_start)

    def start_thread(step: int) -> None:
        if step == 2:
            thread.start()

    with steps(monkeypatch, start_thread):
        open_sessions(where).close()
    thread.join()
    assert seen == ["m1", "m2"]


@pytest.mark.quick(4)
@pytest.mark.parametrize("at", range(1, 7))
def test_p7_messages_of_a_session_that_was_deleted_during_its_merge_stay_deleted(
    where: str, fallback: Fallback, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    folder = outage(fallback, "m1", "m2")
    with fallback() as sessions:
        sessions.store.set_meta(KEY, title="a title")
    damaged_log = keep(folder)

    def delete_and_begin(step: int) -> None:
        if step == at:
            with open_store(where) as store:
                if KEY in store.list_sessions():
                    store.delete(KEY)
                store.add_message(KEY, "user", "new")

    with steps(monkeypatch, delete_and_begin) as done:
        open_sessions(where).close()
    assert len(done) >= 5, done
    outage(fallback, "m3")
    damaged_log.unlink()
    open_sessions(where).close()
    found = everything(where)
    assert sorted(found) == [*("m1", "m2", "m3"), *(["new"] if "new" in found else [])]
    assert [text for text in found if text != "new"] == ["m1", "m2", "m3"]
    with open_store(where) as store:
        live = contents(store, full=True)
    assert live[-1] == "m3"
    assert at < 5 or live in (["m3"], ["new", "m3"]), "messages that were merged came back"


@pytest.mark.quick(4)
@pytest.mark.parametrize("restored_as", [None, "elsewhere"])
@pytest.mark.parametrize("later", [True, False])
@pytest.mark.parametrize("once", [True, False])
def test_p7_messages_of_a_killed_merge_that_were_deleted_stay_deleted(
    where: str,
    fallback: Fallback,
    monkeypatch: pytest.MonkeyPatch,
    once: bool,
    later: bool,
    restored_as: str | None,
) -> None:
    """The merge is killed before each of its steps; then the session is deleted."""
    with open_store(where) as store:
        store.add_message(KEY, "user", "old", once="t0")
    for number in range(1, 12):
        with fallback() as sessions:
            said = [f"{number}.{n}" for n in range(3)]
            for n, text in enumerate(said):
                body: dict[str, Any] = {"role": "user", "content": text}
                if n == 1:  # its seqs differ in the store
                    body = {**body, "role": "assistant", "stenolog": {"seen": 1, "answers": [1]}}
                sessions.store.add_full_message(KEY, body, once=f"t{n}" if once else None)
            sessions.store.admin.hide(KEY, 2, 2)
        if not merge_killed(where, monkeypatch, number):
            break
        is_known = True
        with open_store(where) as store:
            if KEY in store.list_sessions():
                merged = contents(store, full=True)
                store.delete(KEY)
                if restored_as is not None:
                    store.admin.restore(KEY, as_key=f"{restored_as} {number}")
                    # A merge that created a session knows its uid only after this step.
                    is_known = number != 3
            else:
                merged = []
        if later:
            outage(fallback, f"{number} later")
        open_sessions(where).close()
        said += [f"{number} later"] if later else []
        with open_store(where) as store:
            live = contents(store, full=True)
            if live:
                store.delete(KEY)
        if is_known:
            assert [text for text in merged if text in said] + live == said
    else:
        pytest.fail("the merge has more steps")


def test_p7_a_new_session_gets_no_meta_of_messages_that_were_deleted(
    where: str, fallback: Fallback, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fallback() as sessions:
        sessions.add_message(KEY, "user", "m1")
        sessions.checkpoint(KEY, summary="about m1", upto=1)
        sessions.store.set_meta(KEY, title="about m1")

    def delete_and_begin(step: int) -> None:
        if step == 3:
            with open_store(where) as store:
                store.delete(KEY)
                store.add_message(KEY, "user", "new")

    with steps(monkeypatch, delete_and_begin):
        open_sessions(where).close()
    with open_store(where) as store:
        info = store.info(KEY)
        assert (contents(store), info.meta, info.summary) == (["new"], {}, "")


def test_p12_another_message_with_the_same_idempotency_key_is_merged_too(
    where: str, fallback: Fallback, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(where) as store:
        store.add_message(KEY, "user", "in the store", once="t")
    with fallback() as sessions:
        sessions.add_message(KEY, "user", "in the fallback", once="t")
        sessions.store.add_messages(KEY, BATCH, once="batch")
    assert merge_killed(where, monkeypatch, 4)
    for _ in range(2):
        with open_sessions(where) as good:
            assert contents(good) == ["in the store", "in the fallback", 1, 2]


def test_a_fork_in_the_fallback_is_merged_as_a_session_of_its_own(
    where: str, workspace: Path, fallback: Fallback
) -> None:
    legacy(workspace)
    with fallback() as sessions:
        sessions.add_message(KEY, "user", "new")
        sessions.store.fork(KEY, "fork")
        sessions.add_message("fork", "user", "forked")
    with open_sessions(where) as good:
        assert contents(good) == [*LEGACY, "new"]
        assert contents(good, "fork") == [*LEGACY, "new", "forked"]


def test_messages_before_a_copy_of_a_legacy_file_are_merged(
    where: str, workspace: Path, fallback: Fallback
) -> None:
    outage(fallback, "legacy 0/0")
    legacy(workspace)
    with fallback() as sessions:
        assert contents(sessions) == LEGACY
    with open_sessions(where) as good:
        assert contents(good) == [*LEGACY, "legacy 0/0"]


# --- what cannot be written, and what older versions left ------------------------------------


@pytest.mark.parametrize("says", [False, True])
def test_json_files_left_by_version_0_1_are_merged(
    where: str, workspace: Path, fallback: Fallback, says: bool
) -> None:
    left = "sessions" if where == str(workspace) else "steno.db.sessions"
    legacy(workspace)
    shutil.copytree(VERSION_0_1, workspace / left, dirs_exist_ok=True)
    with open_store(where) as store:
        store.add_message("new:1", "user", "in the store")
    if says:
        with fallback() as sessions:
            assert contents(sessions) == ["legacy 0/4", "said 0", "said 1"]
            sessions.add_message(KEY, "user", "in the fallback")
    expected = ["legacy 0/4", "said 0", "said 1", *(["in the fallback"] if says else [])]
    for _ in range(2):
        with open_sessions(where) as good:
            assert contents(good) == expected
            assert contents(good, full=True) == [*LEGACY, *expected[1:]]
            assert good.get_summary(KEY) == "by version 0.1"
            assert contents(good, "new:1") == ["in the store", "said 0", "said 1"]
            assert good.add_message(KEY, "user", "said 0", once="t0") == 6
    assert not list((workspace / left).glob("*.json")) or left == "sessions"


def test_p7_copies_of_json_files_are_not_merged_again(
    where: str, workspace: Path, fallback: Fallback
) -> None:
    left = workspace / ("sessions" if where == str(workspace) else "steno.db.sessions")
    shutil.copytree(VERSION_0_1, left)
    with fallback() as sessions:
        assert contents(sessions)[-2:] == ["said 0", "said 1"]
        sessions.add_message(KEY, "user", "in the fallback")
    with open_store(where) as store:
        migrate_from_json(left, store)
        assert contents(store)[-2:] == ["said 0", "said 1"]
        store.delete(KEY)
    with open_sessions(where) as good:
        assert contents(good, full=True) == ["in the fallback"]


@pytest.mark.parametrize("is_imported", [True, False])
def test_p1_messages_in_json_files_arrive_although_their_session_was_deleted(
    where: str, workspace: Path, monkeypatch: pytest.MonkeyPatch, is_imported: bool
) -> None:
    with open_store(where) as store:
        store.add_message(KEY, "user", "old")
    name = "sessions.fallback" if where == str(workspace) else "steno.db.fallback"
    (workspace / name).write_text("in the way")
    with broken(monkeypatch), open_sessions(where) as sessions:
        assert isinstance(sessions, SessionManager)
        assert sessions.add_message(KEY, "user", "meanwhile")
        (path,) = sessions.directory.glob("*.json")
    if is_imported:
        text = path.read_bytes()
        open_sessions(where).close()
        path.write_bytes(text)  # as if the start had been killed before it renamed the file
    with open_store(where) as store:
        store.delete(KEY)
    for _ in range(2):
        with open_sessions(where) as good:
            assert contents(good, full=True) == ([] if is_imported else ["meanwhile"])


def test_a_fallback_that_cannot_be_written_is_replaced_by_json_files(
    workspace: Path, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    legacy(workspace)
    name = "sessions.fallback" if where == str(workspace) else "steno.db.fallback"
    (workspace / name).write_text("in the way")
    with broken(monkeypatch), open_sessions(where) as sessions:
        assert isinstance(sessions, SessionManager)
        assert contents(sessions) == LEGACY
        assert sessions.add_message(KEY, "user", "new") == 6
        assert "JSON files in" in sessions.health().problems[0]
    assert "sessions are kept as JSON files in" in caplog.text
    with open_sessions(where) as good:
        assert contents(good) == [*LEGACY, "new"]
        assert good.health().ok
    assert (workspace / name).read_text() == "in the way"


def test_p11_a_fallback_folder_that_is_a_link_is_not_followed(
    workspace: Path, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = workspace.parent / "elsewhere"
    with open_store(elsewhere) as planted:
        planted.add_message(KEY, "user", "planted")
    (elsewhere / "fallback.lock").touch()
    name = "sessions.fallback" if where == str(workspace) else "steno.db.fallback"
    (workspace / name).symlink_to(elsewhere)
    with open_sessions(where) as good:
        assert good.health().ok
        assert good.list_sessions() == []
    assert "the folder is a symbolic link" in caplog.text
    with broken(monkeypatch), open_sessions(where) as sessions:
        assert isinstance(sessions, SessionManager)
    with open_store(elsewhere) as planted:
        assert contents(planted) == ["planted"]


def test_unreadable_fallback_does_not_prevent_opening(
    where: str, fallback: Fallback, caplog: pytest.LogCaptureFixture
) -> None:
    with fallback() as sessions:
        sessions.add_message(KEY, "user", "meanwhile")
        folder = sessions.store.folder.parent  # type: ignore[attr-defined]
    (folder / "fallback.lock").rename(folder / "lock")
    (folder / "fallback.lock").mkdir()
    with open_sessions(where) as good:
        assert good.health().ok
    assert "cannot be merged" in caplog.text
    (folder / "fallback.lock").rmdir()
    (folder / "lock").rename(folder / "fallback.lock")
    with open_sessions(where) as good:
        assert contents(good) == ["meanwhile"]


def test_json_files_of_another_store_are_reported_and_unchanged(
    workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SessionManager(workspace / "sessions").add_message(KEY, "user", "of the folder")
    with open_sessions(f"sqlite:{workspace}/steno.db") as sessions:
        assert sessions.list_sessions() == []
    assert (
        "telegram%3A91001.json was not imported: the file belongs to the fallback of another store"
        in caplog.text
    )
    assert "steno import" in caplog.text
    assert (workspace / "sessions" / "telegram%3A91001.json").exists()


def test_p3_a_folder_with_a_damaged_message_keeps_its_name(
    where: str, fallback: Fallback, caplog: pytest.LogCaptureFixture
) -> None:
    folder = outage(fallback, "hello 0", "hello 1", "hello 2")
    log = folder / "telegram%3A91001.jsonl"
    text = log.read_bytes()
    log.write_bytes(text.replace(b"hello 1", b"hellX 1"))
    for _ in range(2):
        with open_sessions(where) as good:
            assert contents(good) == ["hello 0", "hello 2"]
    assert "1 of its messages cannot be read, and the others were merged" in caplog.text
    assert folder.exists()


@pytest.mark.quick(6)
@pytest.mark.parametrize("lost", [["b1"], ["b2"], ["c"], ["a", "b1", "b2", "b3", "c"]], ids=str)
@pytest.mark.parametrize("kill_at", [0, 1, 2, 3, 4, 5])
def test_p1_a_message_of_the_fallback_that_was_repaired_is_merged(
    where: str,
    fallback: Fallback,
    monkeypatch: pytest.MonkeyPatch,
    lost: list[str],
    kill_at: int,
) -> None:
    with open_store(where) as store:
        store.add_message(KEY, "user", "before")
    with fallback() as sessions:
        store = sessions.store
        store.add_message(KEY, "user", "a", once="a")
        batch = [{"role": "user", "content": text} for text in ("b1", "b2", "b3")]
        store.add_messages(KEY, batch, once="b")
        store.add_message(KEY, "user", "c", once="c")
        store.admin.hide(KEY, 3, 3)
        folder = store.folder  # type: ignore[attr-defined]
    [log] = folder.glob("*.jsonl")
    intact = log.read_bytes()
    damaged = intact
    for text in lost:
        damaged = damaged.replace(f'"{text}"}}'.encode(), f'"{text[:-1]}\xff"}}'.encode("latin-1"))
    assert damaged != intact
    log.write_bytes(damaged)
    with open_sessions(where) as good:
        assert {"before", *["a", "b1", "b2", "b3", "c"]} - {*contents(good, full=True)} == {*lost}
    log.write_bytes(intact)
    killed = kill_at and merge_killed(where, monkeypatch, kill_at)
    with open_sessions(where) as good:
        assert sorted(contents(good, full=True)) == ["a", "b1", "b2", "b3", "before", "c"]
        assert "b2" not in contents(good)
    assert killed or not kill_at or kill_at > 4
    assert not folder.exists()


@pytest.mark.parametrize("name", ["damaged.jsonl", "No key has this name.jsonl"])
def test_p3_a_folder_with_a_log_that_cannot_be_read_keeps_its_name(
    where: str, fallback: Fallback, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    folder = outage(fallback, "hello")
    (folder / "empty.jsonl").touch()
    damaged_log = keep(folder).rename(folder / name)
    for _ in range(2):
        with open_sessions(where) as good:
            assert contents(good) == ["hello"]
            assert good.list_sessions() == [KEY]
    assert f"{damaged_log} was not merged completely, so the folder is kept" in caplog.text
    damaged_log.unlink()
    open_sessions(where).close()
    assert not folder.exists()


def test_fallback_with_an_unreadable_session_is_kept(
    where: str,
    fallback: Fallback,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    outage(fallback, "hello", key="good")
    folder = outage(fallback, "hello", key="bad")
    info = JSONLStore.info

    def fails(store: JSONLStore, key: str) -> SessionInfo:
        if key == "bad" and store.folder == folder:
            raise StoreUnavailable("the disk fails")
        return info(store, key)

    with monkeypatch.context() as patched:
        patched.setattr(JSONLStore, "info", fails)
        with open_sessions(where) as good:
            assert good.list_sessions() == ["good"]
    assert "bad.jsonl was not merged completely, so the folder is kept: the disk" in caplog.text
    with open_sessions(where) as good:
        assert good.list_sessions() == ["bad", "good"]
    assert not folder.exists()
