"""An index is always what a full scan says, and reads no more than it must for it."""

import logging
import os
import random
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import stenolog
from stenolog.catalog import Catalog, indexing, open_catalog, steps
from stenolog.catalog.catalog_database import Transaction
from stenolog.catalog.indexing import Indexer, SessionReader
from stenolog.records import Message, SessionInfo
from stenolog.stores.base import Store
from stenolog.stores.jsonl import JSONLStore
from stenolog.stores.jsonl.session_list import write_time
from support.catalog_scan import catalogued, differences, found_words, full_scan, words_said
from support.random_operations import WORDS, fill_three_sessions, operate

ROLES = ["system", "assistant", "user", "tool", "user", "assistant"]


def _agree(store: Store, catalog: Catalog) -> None:
    assert differences(catalogued(catalog), full_scan(store)) == {}


def _walk(stores: Sequence[Store], catalogs: Sequence[Catalog], *, seed: int, steps: int) -> None:
    """Many operations by several writers, and now and then a look by one of the catalogs."""
    chance = random.Random(seed)
    done: Counter[str] = Counter()
    for step in range(steps):
        done[operate(chance.choice(stores), chance)] += 1
        if chance.random() < 0.3 or step == steps - 1:
            _agree(stores[0], chance.choice(catalogs))
    for catalog in catalogs:
        _agree(stores[0], catalog)
        for word in WORDS:
            assert found_words(catalog, word) == words_said(stores[0], word)
        assert catalog.problems == ()
    assert len(done) > 10, "too little happened"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("where", ["{0}", "sqlite:{0}/s.db"])
def test_catalog_equals_a_full_scan_after_any_operations(
    tmp_path: Path, where: str, seed: int
) -> None:
    with ExitStack() as opened:
        place = where.format(tmp_path)
        stores = [opened.enter_context(stenolog.open_store(place)) for _ in range(2)]
        catalogs = [opened.enter_context(open_catalog(store)) for store in stores]
        _walk(stores, catalogs, seed=seed, steps=120)


@pytest.mark.parametrize("seed", range(4))
def test_catalog_in_memory_equals_a_full_scan(seed: int) -> None:
    with stenolog.InMemoryStore() as store, open_catalog(store) as catalog:
        _walk([store], [catalog], seed=seed, steps=250)


@pytest.mark.full
@pytest.mark.parametrize("where", ["{0}", "sqlite:{0}/s.db"])
def test_catalog_equals_a_full_scan_after_ten_thousand_operations(
    tmp_path: Path, where: str
) -> None:
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")
    for part in range(20):
        with ExitStack() as opened:
            place = where.format(tmp_path / str(part))
            stores = [opened.enter_context(stenolog.open_store(place)) for _ in range(2)]
            catalogs = [opened.enter_context(open_catalog(store)) for store in stores]
            _walk(stores, catalogs, seed=seed + part, steps=500)


def test_imported_messages_of_an_indexed_empty_session_keep_their_times(
    store: Store, catalog: Catalog
) -> None:
    store.set_meta("cli:0", tags=["empty"])
    _agree(store, catalog)
    store.add_messages(
        "cli:0", [{"role": "user", "content": "old"}], at=[datetime(2025, 1, 1, tzinfo=UTC)]
    )
    _agree(store, catalog)


@pytest.mark.quick(1)
def test_small_transactions_give_the_same_catalog(
    store: Store, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "MAX_MESSAGES", 2)
    monkeypatch.setattr(steps, "MAX_CHARACTERS", 60)
    _walk([store], [catalog], seed=7, steps=120)


def _said(roles: Sequence[str]) -> list[dict[str, str]]:
    return [{"role": role, "content": f"allmessages {number}"} for number, role in enumerate(roles)]


class Cut(Exception):
    """Stands for the end of a process."""


def test_interrupted_refresh_can_be_continued_by_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "MAX_MESSAGES", 1)
    flush = indexing.CatalogWriter.flush
    left = 0

    def cut_off(writer: indexing.CatalogWriter) -> None:
        nonlocal left
        if left == 0:
            raise Cut
        left -= 1
        flush(writer)

    with stenolog.open_store(tmp_path) as store:
        store.add_messages("k", _said(ROLES))
        for length in range(1, 30):
            left = length % 10
            with open_catalog(store) as catalog:
                monkeypatch.setattr(indexing.CatalogWriter, "flush", cut_off)
                with suppress(Cut):
                    catalog.refresh()
                monkeypatch.setattr(indexing.CatalogWriter, "flush", flush)
                if length % 4 == 0:
                    _agree(store, catalog)
            if length % 5 == 0:
                # Another life of the key: what was taken in of this one has to go first.
                store.delete("k")
                store.add_messages("k", _said(ROLES[length // 5 :] + ROLES[: length // 5]))
        with open_catalog(store) as catalog:
            _agree(store, catalog)


@pytest.mark.parametrize("left", range(5))
def test_first_prompt_is_found_by_the_process_that_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    monkeypatch.setattr(steps, "MAX_MESSAGES", 1)
    flush = indexing.CatalogWriter.flush

    def cut_off(writer: indexing.CatalogWriter) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Cut
        flush(writer)

    with stenolog.open_store(tmp_path) as store:
        store.add_message("k", "assistant", "allmessages")
        with open_catalog(store) as catalog:
            catalog.refresh()
            store.add_messages("k", _said(["user", "assistant", "assistant"]))
            monkeypatch.setattr(indexing.CatalogWriter, "flush", cut_off)
            with suppress(Cut):
                catalog.refresh()
            monkeypatch.setattr(indexing.CatalogWriter, "flush", flush)
            _agree(store, catalog)


# --- what is read ----------------------------------------------------------------------------


class Watched(stenolog.InMemoryStore):
    """A store that remembers which messages were read from it."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def get_history(self, key: str, *, full: bool = False, **how: Any) -> list[Message]:
        found = super().get_history(key, full=full, **how)
        if full:
            self.read += [message.seq for message in found]
        return found

    def taken(self) -> list[int]:
        """What was read in full since the last time."""
        read, self.read = self.read, []
        return read


class _RecordingStore(JSONLStore):
    """A store that records the sessions whose messages were read, in the order of the reads."""

    read_keys: list[str]

    def get_history(self, key: str, **options: Any) -> list[Message]:
        if key not in self.read_keys:
            self.read_keys.append(key)
        return super().get_history(key, **options)


def test_sessions_written_last_are_indexed_first(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        for number in range(20):
            store.add_message(f"cli:{number}", "user", "a question")
    with _RecordingStore(tmp_path) as store:
        store.read_keys = []
        files = sorted(tmp_path.rglob("*.jsonl"))
        assert len(files) == 20
        random.Random(1).shuffle(files)
        for seconds, file in enumerate(files):
            os.utime(file, (seconds, seconds))
        keys = sorted(store.list_sessions(), key=lambda key: write_time(store.admin.stamps()[key]))
        with open_catalog(store) as catalog:
            catalog.refresh()
        assert store.read_keys == keys[::-1]


def test_only_new_messages_are_read() -> None:
    with Watched() as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
        catalog.refresh()
        assert sorted(store.taken()) == [1, 1, 1, 2, 2, 2]
        catalog.refresh()
        assert store.taken() == []
        store.add_message("cli:default", "user", "more")
        catalog.refresh()
        assert store.taken() == [3]
        store.truncate_history("cli:default", 1)
        store.compact("cli:default")
        store.set_meta("cli:default", title="t")
        catalog.refresh()
        assert store.taken() == []


def test_session_with_another_uid_is_read_from_its_start() -> None:
    with Watched() as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
        catalog.refresh()
        store.delete("cli:default")
        for number in range(5):
            store.add_message("cli:default", "user", f"allmessages {number}")
        store.taken()
        catalog.refresh()
        assert store.taken() == [1, 2, 3, 4, 5]
        _agree(store, catalog)


def test_purged_messages_are_removed_and_the_others_read_again() -> None:
    with Watched() as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
        catalog.refresh()
        store.add_message("cli:default", "user", "allmessages third")
        store.admin.purge("cli:default", before=2)
        store.taken()
        assert catalog.search("hello cli", prefix="cli:").count == 0
        assert store.taken() == [2, 3]
        _agree(store, catalog)


def test_progress_counts_sessions(store: Store, catalog: Catalog) -> None:
    fill_three_sessions(store)
    told: list[tuple[int, int]] = []
    catalog.refresh(lambda done, total: told.append((done, total)))
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    told.clear()
    catalog.list(progress=lambda done, total: told.append((done, total)))
    assert told == []


# --- several at once -------------------------------------------------------------------------


class Meddling(stenolog.InMemoryStore):
    """A store that lets something happen while a refresher reads from it."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: list[Any] = []

    def info(self, key: str) -> stenolog.SessionInfo:
        found = super().info(key)
        if self.meanwhile:
            self.meanwhile.pop(0)(key)
        return found


def _written_between(store: Meddling, catalog: Catalog, *happens: Any) -> None:
    fill_three_sessions(store)
    catalog.refresh()
    store.add_message("cli:default", "user", "allmessages new")
    store.meanwhile = list(happens)
    catalog.refresh()
    assert not store.meanwhile
    _agree(store, catalog)


def _remade(store: Store, key: str) -> None:
    store.delete(key)
    for number in range(9):
        store.add_message(key, "user", f"allmessages other {number}")


def test_changes_during_a_read_are_not_missed() -> None:
    for happens in (
        lambda store, key: store.add_message(key, "user", "allmessages meanwhile"),
        lambda store, key: store.truncate_history(key, 1),
        lambda store, key: store.admin.purge(key, before=2),
        lambda store, key: store.delete(key),
        _remade,
        lambda store, key: store.admin.purge(key),
    ):
        for skipped in (0, 1):
            with Meddling() as store, open_catalog(store) as catalog:
                nothing = [lambda _key: None] * skipped

                def now(key: str, happens: Any = happens, store: Store = store) -> None:
                    happens(store, key)

                _written_between(store, catalog, *nothing, now)


def _after_each_look(
    catalog: Catalog, then: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let something happen whenever this catalog has read a session and not yet stored it."""
    begin, look = Indexer.__init__, SessionReader._read_content
    readers: weakref.WeakSet[SessionReader] = weakref.WeakSet()

    def begun(intake: Indexer, *what: Any, **more: Any) -> None:
        begin(intake, *what, **more)
        if intake._database is catalog._active.database:
            readers.add(intake._sessions)

    def looked(reader: SessionReader, *what: Any) -> Any:
        seen = look(reader, *what)
        if reader in readers:
            then()
        return seen

    monkeypatch.setattr(Indexer, "__init__", begun)
    monkeypatch.setattr(SessionReader, "_read_content", looked)


def test_concurrent_refreshes_of_a_session_do_not_duplicate_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="stenolog")
    with (
        stenolog.open_store(tmp_path) as store,
        open_catalog(store) as one,
        open_catalog(store) as other,
    ):
        fill_three_sessions(store)
        _after_each_look(one, other.refresh, monkeypatch)
        _agree(store, one)
        store.add_message("cli:default", "user", "allmessages late")
        store.delete("telegram:1")
        _agree(store, one)
        _agree(store, other)
        assert [record.message for record in caplog.records if "rebuilding" in record.message] == [
            f"rebuilding the catalog: {tmp_path}/sessions/catalog.db is missing"
        ]


def _slow(catalog: Catalog) -> Indexer:
    """A refresher that has looked at the rows, and takes its time."""
    current = catalog._active
    known = current._read_known_stamps()
    return Indexer(
        catalog._store,
        current.database,
        catalog_id=known.catalog_id,
        known_stamps=known.stamps,
    )


def test_refresh_overtaken_by_an_older_one_repeats_its_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stenolog.open_store(tmp_path) as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
        catalog.refresh()
        store.add_message("cli:default", "user", "third")
        slow = _slow(catalog)
        slow._index_session("cli:default", store.admin.stamps()["cli:default"])
        store.add_message("cli:default", "user", "fourth")
        _after_each_look(catalog, slow._writer.flush, monkeypatch)
        assert catalog.list(prefix="cli:").entries[0].count == 4


def test_slow_refresh_does_not_remove_a_restored_session(tmp_path: Path) -> None:
    with stenolog.open_store(tmp_path) as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
        catalog.refresh()
        store.delete("telegram:1")
        slow = _slow(catalog)
        gone = slow._known_stamps.keys() - store.admin.stamps().keys()
        store.admin.restore("telegram:1")
        catalog.refresh()
        slow.remove_sessions(gone)
        assert "telegram:1" in catalog._active._read_known_stamps().stamps


def test_slow_refresh_does_not_replace_newer_rows(
    tmp_path: Path,
) -> None:
    with stenolog.open_store(tmp_path) as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
        catalog.refresh()
        store.add_message("cli:default", "user", "third")
        slow, stamp = _slow(catalog), store.admin.stamps()["cli:default"]
        store.add_message("cli:default", "user", "fourth")
        catalog.refresh()
        before = catalog._active._read_known_stamps()
        slow.index({"cli:default": stamp}, lambda _done, _total: None)
        assert slow.missed_keys
        assert catalog._active._read_known_stamps() == before


def test_steps_for_a_discarded_catalog_are_not_applied_to_the_next(
    tmp_path: Path,
) -> None:
    with stenolog.open_store(tmp_path) as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
        catalog.refresh()
        store.add_message("cli:default", "user", "allmessages third")
        slow = _slow(catalog)
        slow._index_session("cli:default", store.admin.stamps()["cli:default"])
        # The next one gets to the same version, by another way.
        (tmp_path / "sessions" / "catalog.db").unlink()
        store.admin.hide("cli:default", 3, 3)
        catalog.refresh()
        slow._writer.flush()
        assert slow.missed_keys
        _agree(store, catalog)


# --- what it costs ---------------------------------------------------------------------------


class _Counting:
    """How many messages a store has handed out."""

    handed_out = 0

    def get_history(self, key: str, **how: Any) -> list[Message]:
        found: list[Message] = super().get_history(key, **how)  # type: ignore[misc]
        self.handed_out += len(found)
        return found


class _CountingLogs(_Counting, stenolog.JSONLStore):
    """JSONLStore."""


class _CountingDatabase(_Counting, stenolog.SQLiteStore):
    """SQLiteStore."""


@pytest.mark.parametrize("kind", [_CountingLogs, _CountingDatabase])
@pytest.mark.slow
def test_p9_indexing_an_append_does_not_depend_on_the_length_of_the_history(
    tmp_path: Path, kind: type[_CountingLogs | _CountingDatabase]
) -> None:
    with kind(tmp_path / "place") as store, open_catalog(store) as catalog:
        store.add_messages("k", _said(["tool", "assistant"] * 2_500))
        store.admin.hide("k", 100, 200)
        catalog.refresh()
        for role in ("user", "assistant"):
            store.handed_out = 0
            store.add_message("k", role, "allmessages more")
            catalog.refresh()
            assert store.handed_out <= 1 + 32, "the new one, and the tail that tells the state"
        _agree(store, catalog)


def test_messages_hidden_during_an_append_are_noticed(store: Store, catalog: Catalog) -> None:
    store.add_messages("k", _said(["user", "assistant"] * 4))
    store.admin.hide("k", 3, 3)
    catalog.refresh()
    store.undo("k")
    store.admin.hide("k", 4, 4)
    store.add_message("k", "user", "allmessages again")
    _agree(store, catalog)
    store.checkpoint("k", summary="s", upto=5)
    _agree(store, catalog)


def test_catalog_emptied_before_a_read_is_filled_again(store: Store, catalog: Catalog) -> None:
    fill_three_sessions(store)
    catalog.refresh()
    database = catalog._active.database
    read, looks = database.read_transaction, 0

    def purge_before_the_look() -> AbstractContextManager[Transaction]:
        nonlocal looks
        looks += 1
        if looks == 2:
            store.admin.purge("telegram:1")
        return read()

    database.read_transaction = purge_before_the_look  # type: ignore[method-assign]
    assert [entry.key for entry in catalog.list().entries][:2] == ["cli:default", "telegram:2"]
    assert looks >= 2
    database.read_transaction = read  # type: ignore[method-assign]
    _agree(store, catalog)


# --- losing every time -----------------------------------------------------------------------


class _Overtaken(stenolog.JSONLStore):
    """A store in which another refresher is quicker than whoever looks at a session."""

    overtake: Callable[[], None] | None = None

    def info(self, key: str) -> SessionInfo:
        found = super().info(key)
        if self.overtake is not None:
            overtake, self.overtake = self.overtake, None
            overtake()
            self.overtake = overtake
        return found


def test_refresh_that_is_always_overtaken_continues_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        _Overtaken(tmp_path) as store,
        open_catalog(store) as catalog,
        open_catalog(store) as quicker,
    ):
        fill_three_sessions(store)
        store.add_message("k", "user", "allmessages before the call")

        def overtake() -> None:
            quicker.refresh()
            store.add_message("k", "user", "allmessages meanwhile")

        store.overtake = overtake
        assert "k" in [entry.key for entry in catalog.list().entries]
        assert [hit.seq for hit in catalog.search("before").hits] == [1]
        [problem] = catalog.problems
        assert "other processes kept changing" in problem
        assert problem in caplog.text
        store.overtake = None
        assert quicker.problems == ()
        _agree(store, catalog)


def test_refresh_that_was_overtaken_indexes_only_missed_sessions(tmp_path: Path) -> None:
    with (
        _Overtaken(tmp_path) as store,
        open_catalog(store) as catalog,
        open_catalog(store) as quicker,
    ):
        fill_three_sessions(store)
        looks: list[int] = []

        def overtake() -> None:
            if not looks:
                looks.append(0)
                quicker.refresh()
                # What comes after the call began is for the next one.
                store.add_message("cli:default", "user", "allmessages meanwhile")
                store.add_message("telegram:1", "user", "allmessages meanwhile")
                store.add_message("telegram:2", "user", "allmessages meanwhile")

        store.overtake = overtake
        catalog.refresh(lambda done, total: looks.append(total) if done == total else None)
        store.overtake = None
        assert looks == [0, 3, 1]
        _agree(store, catalog)
