"""The fallback: legacy sessions are visible, every call works, and it is merged back once."""

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

import stenolog
from stenolog.errors import DamagedStore, NoSuchSession, ReadOnly, StoreUnavailable
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


@contextmanager
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No store can be opened meanwhile."""

    def refuse(*_: object, **__: object) -> Store:
        raise StoreUnavailable("the disk is away")

    with monkeypatch.context() as patched:
        patched.setattr(opening, "open_store", refuse)
        yield


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


def test_undo_and_the_other_calls_of_a_store_work_in_the_fallback(
    workspace: Path, fallback: Fallback
) -> None:
    legacy(workspace)
    with fallback() as sessions:
        store = sessions.store
        store.clear(KEY)
        assert contents(sessions) == []
        store.undo(KEY)
        assert contents(sessions) == LEGACY
        store.fork(KEY, "copy")
        store.delete("copy")
        store.restore("copy")
        with store.lease(KEY, ttl=10) as lease:
            lease.store.add_message(KEY, "user", "leased")
        assert contents(store, after=5) == ["leased"]


def test_session_deleted_in_the_fallback_is_not_imported_again(
    workspace: Path, fallback: Fallback
) -> None:
    legacy(workspace)
    with fallback() as sessions:
        sessions.store.delete(KEY)
    with fallback() as again:
        assert again.list_sessions() == ["discord:1001:77"]


def test_p11_the_fallback_is_private(fallback: Fallback) -> None:
    with fallback() as sessions:
        sessions.add_message("k", "user", "secret")
        sessions.store.purge("k")
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
        sessions.store.hide(KEY, 2, 2)
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
        sessions.store.hide(KEY, 4, 4)
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


def test_p7_fallback_in_use_is_merged_incrementally(where: str, fallback: Fallback) -> None:
    running = fallback()
    for number in range(3):
        assert running.add_message(KEY, "user", f"said {number}")
        with open_sessions(where) as good:
            assert good.add_message(KEY, "user", f"there {number}")
    assert running.add_message(KEY, "user", "the last")
    folder = running.store.folder  # type: ignore[attr-defined]
    assert folder.is_dir()
    running.close()
    with open_sessions(where) as good:
        assert contents(good) == [
            *("said 0", "there 0", "said 1", "there 1", "said 2", "there 2", "the last"),
        ]
    assert not folder.exists()


def test_two_processes_use_one_fallback(fallback: Fallback) -> None:
    with fallback() as one, fallback() as other:
        assert one.add_message(KEY, "user", "one") == 1
        assert other.add_message(KEY, "user", "two") == 2


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


@pytest.mark.parametrize("from_legacy", [True, False])
def test_p7_a_session_that_was_merged_and_then_purged_stays_purged(
    where: str, workspace: Path, fallback: Fallback, from_legacy: bool
) -> None:
    if from_legacy:
        legacy(workspace)
    running = fallback()
    running.add_message(KEY, "user", "a secret")
    running.store.set_summary(KEY, "about a secret")
    running.store.set_meta(KEY, title="secret")
    with open_sessions(where) as good:
        assert contents(good)[-1:] == ["a secret"]
        good.store.purge(KEY)
    for _ in range(2):
        with open_sessions(where) as good:
            assert KEY not in good.list_sessions()
            assert good.store.list_trash() == []
    # Messages that are added to the fallback afterwards are merged, and only those.
    for number in range(2):
        running.add_message(KEY, "user", f"later {number}")
        with open_sessions(where) as good:
            assert contents(good, full=True) == [f"later {n}" for n in range(number + 1)]
            assert good.get_summary(KEY) == ""
            assert "title" not in good.store.info(KEY).meta
    running.close()
    open_sessions(where).close()
    assert not running.store.folder.exists()  # type: ignore[attr-defined]
    assert not list(workspace.rglob("merged"))


def test_p7_a_deleted_session_gets_no_messages_that_were_merged_before(
    where: str, fallback: Fallback
) -> None:
    with fallback() as running:
        running.add_message(KEY, "user", "merged")
        with open_sessions(where) as good:
            good.store.delete(KEY)
            good.add_message(KEY, "user", "a new beginning")
        running.add_message(KEY, "user", "later")
        with open_sessions(where) as good:
            assert contents(good, full=True) == ["a new beginning", "later"]


def test_purge_of_the_trash_does_not_restore_a_session_of_the_fallback(
    where: str, workspace: Path, fallback: Fallback
) -> None:
    folder = legacy(workspace)
    text = (folder / "telegram_91001.json").read_bytes()
    with open_sessions(where) as good:
        good.store.delete(KEY)
    (folder / "telegram_91001.json").write_bytes(text)
    os.utime(folder / "telegram_91001.json", (1_700_000_000, 1_700_000_000))
    with fallback():
        with open_sessions(where) as good:
            assert KEY not in good.list_sessions()
            good.store.purge(KEY)
        with open_sessions(where) as good:
            assert KEY not in good.list_sessions()


def test_a_deletion_in_the_fallback_is_repeated_once(where: str, fallback: Fallback) -> None:
    with open_store(where) as store:
        store.add_message(KEY, "user", "in the store")
    with fallback() as running:
        running.add_message(KEY, "user", "in the fallback")
        running.store.delete(KEY)
        with open_sessions(where) as good:
            assert good.list_sessions() == []
            good.store.restore(KEY)
        with open_sessions(where) as good:
            assert contents(good) == ["in the store"]


def test_p2_merge_killed_before_its_record_is_not_repeated(
    where: str, fallback: Fallback, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with fallback() as running:
        running.add_message(KEY, "user", "hello")
        running.add_message(KEY, "assistant", "hello")
        with monkeypatch.context() as patched:
            patched.setattr(fallbacks, "_write_json", killed)
            with pytest.raises(KeyboardInterrupt):
                open_sessions(where)
        with open_store(where) as store:
            assert contents(store) == ["hello", "hello"]
        for _ in range(2):
            with open_sessions(where) as good:
                assert contents(good, full=True) == ["hello", "hello"]
                assert good.list_sessions() == [KEY]


def test_a_purge_in_the_fallback_deletes_the_record_of_the_merge(
    where: str, workspace: Path, fallback: Fallback
) -> None:
    with fallback() as running:
        running.add_message(KEY, "user", "a secret")
        open_sessions(where).close()
        assert list(workspace.rglob("merged/*.json"))
        running.store.purge(KEY)
        with open_sessions(where) as good:
            assert good.list_sessions() == []
        assert not list(workspace.rglob("merged/*.json"))


def test_session_with_an_unreadable_merge_record_is_not_merged(
    where: str, workspace: Path, fallback: Fallback, caplog: pytest.LogCaptureFixture
) -> None:
    with fallback() as sessions:
        sessions.add_message(KEY, "user", "a secret")
        with open_sessions(where) as good:
            good.store.purge(KEY)
    (record,) = workspace.rglob("merged/*.json")
    record.write_text("{")
    with open_sessions(where) as good:
        assert good.health().ok
        assert good.list_sessions() == []
    assert "the record of its merge cannot be read" in caplog.text
    assert sessions.store.folder.exists()  # type: ignore[attr-defined]


def test_unwritable_merge_record_does_not_prevent_opening(
    where: str, fallback: Fallback, caplog: pytest.LogCaptureFixture
) -> None:
    with fallback() as sessions:
        sessions.add_message(KEY, "user", "hello")
        sessions.add_message("deleted", "user", "hello")
        sessions.store.delete("deleted")
        folder = sessions.store.folder  # type: ignore[attr-defined]
        (folder.parent / "merged").write_text("in the way")
        with open_sessions(where) as good:
            assert good.health().ok
            assert contents(good) == ["hello"]
    assert f"the merge of {KEY!r} cannot be recorded" in caplog.text


# --- purges ----------------------------------------------------------------------------------


def texts_below(folder: Path) -> str:
    """Everything that files below a folder hold, but for the originals of the reference."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    old = (".json", ".migrated")
    return "\n".join(p.read_bytes().decode(errors="replace") for p in paths if p.suffix not in old)


def test_p7_a_purge_in_the_fallback_is_repeated_at_the_merge(
    where: str, workspace: Path, fallback: Fallback
) -> None:
    legacy(workspace)
    with open_store(where) as store:
        store.add_message("mine", "user", "a secret of mine")
        store.add_message("other", "user", "stays")
    with fallback() as sessions:
        sessions.add_message("mine", "user", "more secrets")
        sessions.add_message(KEY, "user", "more secrets")
        sessions.store.purge("mine")
        sessions.store.purge(KEY)
        with pytest.raises(NoSuchSession):
            sessions.store.purge("other")
    with fallback() as again:
        assert KEY not in again.list_sessions()
        assert again.add_message(KEY, "user", "a new beginning") == 1
    for _ in range(2):
        with open_sessions(where) as good:
            assert good.list_sessions() == ["discord:1001:77", "other", KEY]
            assert contents(good, full=True) == ["a new beginning"]
            assert good.store.list_trash() == []
            if where == str(workspace):
                assert "secret" not in texts_below(workspace)
            good.store.compact(KEY)
    assert not [path for path in workspace.rglob("*") if path.parent.name == "purges"]


def test_messages_that_were_stored_after_a_purge_in_the_fallback_stay(
    where: str, fallback: Fallback
) -> None:
    with open_store(where) as store:
        store.add_message(KEY, "user", "deleted long ago")
        store.delete(KEY)
        store.add_message(KEY, "user", "old")
    with fallback() as sessions:
        sessions.add_message(KEY, "user", "in the fallback")
        sessions.store.purge(KEY)
    with open_store(where) as store:
        store.add_message(KEY, "user", "newer")
    with open_sessions(where) as good:
        assert contents(good, full=True) == ["newer"]
        assert good.store.list_trash() == []


def test_a_purge_of_old_messages_in_the_fallback_is_repeated_at_the_merge(
    where: str, workspace: Path, fallback: Fallback
) -> None:
    legacy(workspace)
    with fallback() as sessions:
        sessions.add_message(KEY, "user", "new")
        sessions.store.purge(KEY, before=4)
        assert contents(sessions) == [*LEGACY[3:], "new"]
    with open_sessions(where) as good:
        assert contents(good, full=True) == [*LEGACY[3:], "new"]


def test_a_purge_from_the_trash_of_the_fallback_is_repeated_at_the_merge(
    where: str, workspace: Path, fallback: Fallback
) -> None:
    legacy(workspace)
    with fallback() as sessions:
        store = sessions.store
        assert isinstance(store, FallbackStore)
        trashed = store.delete(KEY)
        store.purge_trash(KEY, [(trashed.uid, trashed.deleted)])
    with open_sessions(where) as good:
        assert KEY not in good.list_sessions()


def test_a_session_that_was_deleted_in_the_fallback_is_deleted_at_the_merge(
    where: str, workspace: Path, fallback: Fallback
) -> None:
    legacy(workspace)
    with open_store(where) as store:
        for key in ("mine", "newer", "again"):
            store.add_message(key, "user", "in the store")
    with fallback() as sessions:
        for key in ("mine", "newer", "again"):
            sessions.add_message(key, "user", "in the fallback")
        for key in ("mine", "newer", "again", KEY):
            sessions.store.delete(key)
        sessions.add_message("again", "user", "a new beginning")
    with open_store(where) as store:
        store.add_message("newer", "user", "since then")
    for _ in range(2):
        with open_sessions(where) as good:
            assert good.list_sessions() == ["again", "discord:1001:77", "newer"]
            assert contents(good, "again") == ["in the store", "a new beginning"]
            assert contents(good, "newer") == ["in the store", "since then"]
            assert {one.key for one in good.store.list_trash()} == {KEY, "mine"}


@pytest.mark.parametrize("error", [stenolog.StoreBusy, ReadOnly])
@pytest.mark.parametrize("before", [None, 2])
def test_p7_purge_rejected_in_the_fallback_is_not_repeated(
    where: str,
    workspace: Path,
    fallback: Fallback,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
    before: int | None,
) -> None:
    legacy(workspace)

    def refuse(*_: object, **__: object) -> None:
        raise error("refused")

    with fallback() as sessions:
        sessions.add_message(KEY, "user", "new")
        with monkeypatch.context() as patched:
            patched.setattr(JSONLStore, "purge", refuse)
            with pytest.raises(error):
                sessions.store.purge(KEY, before=before)
    with open_sessions(where) as good:
        assert contents(good, full=True) == [*LEGACY, "new"]
    assert not list(workspace.rglob("purges/*"))


def test_p7_a_purge_without_the_lease_is_not_repeated(where: str, fallback: Fallback) -> None:
    with open_store(where) as store:
        store.add_message(KEY, "user", "precious")
    with fallback() as sessions:
        sessions.add_message(KEY, "user", "in the fallback")
        lease = sessions.store.lease(KEY, ttl=5)
        lease.release()
        with pytest.raises(stenolog.LeaseLost):
            lease.store.purge(KEY)
    with open_sessions(where) as good:
        assert contents(good) == ["precious", "in the fallback"]


@pytest.mark.parametrize("before", [None, 4])
def test_p7_purge_killed_before_its_record_was_finished_is_repeated(
    where: str,
    workspace: Path,
    fallback: Fallback,
    monkeypatch: pytest.MonkeyPatch,
    before: int | None,
) -> None:
    legacy(workspace)
    purge = JSONLStore.purge

    def killed(store: JSONLStore, key: str, *, before: int | None = None) -> None:
        purge(store, key, before=before)
        raise KeyboardInterrupt

    with fallback() as sessions, monkeypatch.context() as patched:
        patched.setattr(JSONLStore, "purge", killed)
        with pytest.raises(KeyboardInterrupt):
            sessions.store.purge(KEY, before=before)
    with open_sessions(where) as good:
        assert contents(good, full=True) == ([] if before is None else LEGACY[3:])


def test_p7_a_session_that_was_merged_while_it_was_purged_is_purged(
    where: str, fallback: Fallback, monkeypatch: pytest.MonkeyPatch
) -> None:
    purge = JSONLStore.purge

    def slow(store: JSONLStore, key: str, *, before: int | None = None) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(JSONLStore, "purge", purge)
            open_sessions(where).close()
        return purge(store, key, before=before)

    with fallback() as sessions:
        sessions.add_message(KEY, "user", "secret")
        with monkeypatch.context() as patched:
            patched.setattr(JSONLStore, "purge", slow)
            sessions.store.purge(KEY)
    with open_sessions(where) as good:
        assert good.list_sessions() == []
        assert good.store.list_trash() == []


def test_p7_purge_from_the_trash_does_not_change_other_sessions_of_the_key(
    where: str, fallback: Fallback
) -> None:
    with open_store(where) as store:
        for number in range(3):
            store.add_message(KEY, "user", f"precious {number}")
    with fallback() as sessions:
        store = sessions.store
        assert isinstance(store, FallbackStore)
        store.add_message(KEY, "user", "question")
        store.delete(KEY)
        store.add_message(KEY, "assistant", "late answer")
        late = store.delete(KEY)
        store.purge_trash(KEY, [(late.uid, late.deleted)])
        assert [one.count for one in store.list_trash()] == [1]
    with open_sessions(where) as good:
        assert [(one.key, one.count) for one in good.store.list_trash()] == [(KEY, 3)]
        good.store.restore(KEY)
        assert contents(good) == [f"precious {number}" for number in range(3)]


def test_p7_a_purge_from_the_trash_spares_a_session_that_the_store_continued(
    where: str, workspace: Path, fallback: Fallback, caplog: pytest.LogCaptureFixture
) -> None:
    legacy(workspace)
    with fallback() as sessions:
        store = sessions.store
        assert isinstance(store, FallbackStore)
        trashed = store.delete(KEY)
        with open_store(where) as other:
            migrate_from_json(workspace / "sessions", other)
            other.add_message(KEY, "user", "continued")
        store.purge_trash(KEY, [(trashed.uid, trashed.deleted)])
    with open_sessions(where) as good:
        assert contents(good) == [*LEGACY, "continued"]
    assert f"not fully repeated for {KEY!r}: the session was also used in the store" in caplog.text
    assert len(list(workspace.rglob("purges/*.left"))) == 1


@pytest.mark.parametrize("is_live", [True, False])
def test_p7_a_repeated_purge_spares_newer_sessions_in_the_trash(
    where: str, fallback: Fallback, is_live: bool
) -> None:
    with open_store(where) as store:
        store.add_message(KEY, "user", "secret")
        old = store.delete(KEY)
    with fallback() as sessions:
        sessions.add_message(KEY, "user", "secret")
        sessions.store.purge(KEY)
    with open_store(where) as store:
        store.add_message(KEY, "user", "newer")
        store.delete(KEY)
        if is_live:
            store.restore(KEY, uid=old.uid)
    with open_sessions(where) as good:
        assert [(one.key, one.count) for one in good.store.list_trash()] == [(KEY, 1)]
        assert good.list_sessions() == []
        good.store.restore(KEY)
        assert contents(good) == ["newer"]


def test_p7_a_repeated_purge_spares_a_session_that_was_imported_since(
    where: str, workspace: Path, fallback: Fallback
) -> None:
    with fallback() as sessions:
        sessions.add_message(KEY, "user", "secret")
        sessions.store.purge(KEY)
    with open_store(where) as store:
        migrate_from_json(shutil.copytree(SAMPLES / "picoclaw-legacy", workspace / "other"), store)
    with open_sessions(where) as good:
        assert contents(good) == LEGACY


@pytest.mark.parametrize("before", [None, 2])
@pytest.mark.parametrize("error", [DamagedStore, stenolog.UsageError, StoreUnavailable])
def test_failed_repetition_of_a_purge_does_not_prevent_opening(
    where: str,
    workspace: Path,
    fallback: Fallback,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type[Exception],
    before: int | None,
) -> None:
    legacy(workspace)
    with fallback() as sessions:
        sessions.store.purge(KEY, before=before)
        sessions.add_message("other", "user", "hello")

    def failing(*_: object) -> None:
        raise error("it is damaged")

    with monkeypatch.context() as patched:
        patched.setattr(fallbacks, "_repeat_purge", failing)
        for _ in range(2):
            with open_sessions(where) as good:
                assert good.health().ok
                assert contents(good, "other") == ["hello"]
    assert (
        f"{KEY!r} was purged in the fallback, but cannot be purged in the store yet: it is damaged"
        in caplog.text
    )
    with open_sessions(where) as good:
        assert contents(good, full=True) == ([] if before is None else LEGACY[1:])


def test_failed_repetition_of_a_deletion_does_not_prevent_opening(
    where: str,
    fallback: Fallback,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with open_store(where) as store:
        store.add_message(KEY, "user", "hello")
        kind = type(store)
    with fallback() as sessions:
        sessions.add_message(KEY, "user", "hello")
        sessions.store.delete(KEY)

    def failing(*_: object) -> None:
        raise stenolog.UsageError("not this one")

    with monkeypatch.context() as patched:
        patched.setattr(kind, "delete", failing)
        with open_sessions(where) as good:
            assert good.health().ok
            assert contents(good) == ["hello"]
    assert f"the deletion of {KEY!r} cannot be repeated: not this one" in caplog.text


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


def test_damaged_message_of_the_fallback_is_reported_and_others_are_merged(
    where: str, fallback: Fallback, caplog: pytest.LogCaptureFixture
) -> None:
    with fallback() as sessions:
        for number in range(3):
            sessions.add_message("k", "user", f"hello {number}")
        folder = sessions.store.folder  # type: ignore[attr-defined]
    text = (folder / "k.jsonl").read_bytes().replace(b"hello 1", b"hellX 1")
    (folder / "k.jsonl").write_bytes(text)
    with open_sessions(where) as good:
        assert contents(good, "k") == ["hello 0", "hello 2"]
    assert "1 messages of the fallback cannot be read" in caplog.text
    (moved,) = folder.parent.glob("sessions.merged-*")
    assert (moved / "k.jsonl").read_bytes() == text


def test_fallback_with_an_unreadable_session_is_kept(
    where: str,
    fallback: Fallback,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with fallback() as sessions:
        sessions.add_message("good", "user", "hello")
        sessions.add_message("bad", "user", "hello")
        folder = sessions.store.folder  # type: ignore[attr-defined]
    info = JSONLStore.info

    def fails(store: JSONLStore, key: str) -> SessionInfo:
        if key == "bad" and store.folder == folder:
            raise DamagedStore("a newer version wrote it")
        return info(store, key)

    with monkeypatch.context() as patched:
        patched.setattr(JSONLStore, "info", fails)
        with open_sessions(where) as good:
            assert good.list_sessions() == ["good"]
    assert "bad.jsonl was not imported: a newer version wrote it" in caplog.text
    with open_sessions(where) as good:
        assert good.list_sessions() == ["bad", "good"]
        assert contents(good, "good") == ["hello"]
    assert not folder.exists()
