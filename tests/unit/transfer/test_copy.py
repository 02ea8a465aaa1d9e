"""Copying between all engines: everything is carried, nothing of anybody else is overwritten."""

import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import product
from pathlib import Path
from threading import Event, Thread

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stenolog import (
    JSONLStore,
    Message,
    NotStored,
    OnceConflict,
    SQLiteStore,
    StenologError,
    StoreBusy,
    StoreUnavailable,
)
from stenolog.errors import ReadOnly
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store
from stenolog.stores.snapshots import (
    Snapshot,
    SnapshotMark,
    SnapshotReading,
    SnapshotStore,
    SnapshotWriter,
)
from stenolog.testing.strategies import operations
from stenolog.transfer import copy
from stenolog.transfer.copy import CopyProblem, CopyStep, CopyTotals, copy_snapshots, preview_copy
from support import temporary_folders
from support.copied_stores import (
    LONG_KEY,
    digests,
    everything,
    fill,
    go_on,
    mark_of,
    now_of,
    opened,
    undone,
    whole,
)
from support.postgres_server import Databases, Server

ENGINES = ("jsonl", "sqlite", "memory")
PAIRS = [*product(ENGINES, repeat=2), ("jsonl", "postgresql"), ("postgresql", "sqlite")]
FEW = [("jsonl", "jsonl"), ("jsonl", "sqlite"), ("sqlite", "memory"), ("jsonl", "postgresql")]
"""For what is the same whatever comes together."""
Open = Callable[[str, str], Store]


@pytest.fixture
def place() -> Iterator[Path]:
    with temporary_folders.folder() as path:
        yield path


@pytest.fixture(scope="module")
def databases(postgres: Server) -> Iterator[dict[str, str]]:
    """One database to copy from and one to copy to; each test has a namespace of its own."""
    found = Databases(postgres.url())
    yield {"source": found.new(), "target": found.new()}
    found.close()


@pytest.fixture
def stores(place: Path, request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens the store of this engine and this name."""
    with ExitStack() as stack:

        def make(engine: str, name: str) -> Store:
            if engine == "postgresql":
                url = request.getfixturevalue("databases")[name]
                namespace = f"of {secrets.token_hex(4)}"
                return stack.enter_context(open_store(url, namespace=namespace))
            return stack.enter_context(opened(engine, place, name=name))

        yield make


def _copied(source: Store, target: Store) -> CopyTotals:
    found = copy_snapshots(whole(source), whole(target))
    assert found.problems == ()
    return found


def _refused(source: Store, target: Store) -> CopyProblem:
    """The one problem of a copy, which left the destination as it was."""
    before = everything(target), digests(target)
    [problem] = copy_snapshots(whole(source), whole(target)).problems
    assert (everything(target), digests(target)) == before
    return problem


# --- everything is carried -------------------------------------------------------------------


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_copy_has_identical_content(stores: Open, one: str, other: str) -> None:
    source, target = stores(one, "source"), stores(other, "target")
    fill(source)
    found = _copied(source, target)
    assert everything(target) == everything(source)
    assert digests(target) == digests(source)
    assert {(c.uid, c.digest) for c in found.copied} == {
        (uid, digest) for uid, (_, _, digest) in digests(source).items()
    }
    assert found.messages == sum(carried.messages for carried in found.copied)


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_undo_has_the_same_result_in_source_and_copy(stores: Open, one: str, other: str) -> None:
    source, target = stores(one, "source"), stores(other, "target")
    fill(source)
    _copied(source, target)
    steps = undone(source)
    assert undone(target) == steps
    assert sum(not isinstance(step[0], type) for step in steps["a"]) == 5  # type: ignore[index]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_idempotency_keys_are_copied(stores: Open, one: str, other: str) -> None:
    source, target = stores(one, "source"), stores(other, "target")
    fill(source)
    _copied(source, target)
    for store in (source, target):
        # The first of these lies in an archive.
        assert store.add_message("a", "user", "m0 \ud800", once="t0 \udfff") == 1
        assert store.add_message("a", "user", "m27 \ud800", once="t27 \udfff") == 28
        batch = [{"n": number} for number in range(4)]
        assert store.add_messages("a", batch, once="batch") == [31, 32, 33, 34]
        with pytest.raises(OnceConflict):
            store.add_messages("a", batch[:3], once="batch")
        with pytest.raises(OnceConflict):
            store.add_message("a", "user", "other", once="t3 \udfff")
        # That of a purged message is not.
        assert store.add_message("purged", "user", "0", once="p0") == 11
    assert len(target.get_history("a", full=True)) == len(source.get_history("a", full=True))


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_trash_is_copied_and_restorable(stores: Open, one: str, other: str) -> None:
    source, target = stores(one, "source"), stores(other, "target")
    fill(source)
    _copied(source, target)
    told = [[(t.key, t.uid, t.deleted, t.count) for t in s.list_trash()] for s in (source, target)]
    assert told[0] == told[1]
    assert len(told[0]) == 2
    oldest = source.list_trash()[-1].uid
    for store in (source, target):
        store.restore("b/\u00e9:X", uid=oldest, as_key="back")
        assert [m.content for m in store.get_history("back")] == ["first"]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_copy_keeps_the_deletion_times_of_sessions(stores: Open, one: str, other: str) -> None:
    source, target = stores(one, "source"), stores(other, "target")
    for key in ("a", "b"):
        source.add_message(key, "user", "hello")
    _copied(source, target)
    source.delete("b")
    source.delete("a")  # later, and copied before "b"
    _copied(source, target)
    times = [[(t.key, t.deleted) for t in store.list_trash()] for store in (source, target)]
    assert times[0] == times[1]
    # The next copy recognises what this one left.
    source.restore("b")
    source.add_message("b", "user", "again")
    _copied(source, target)
    assert digests(target) == digests(source)


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_second_copy_updates_changed_sessions(stores: Open, one: str, other: str) -> None:
    source, target = stores(one, "source"), stores(other, "target")
    fill(source)
    _copied(source, target)
    go_on(source)
    found = _copied(source, target)
    assert everything(target) == everything(source)
    assert digests(target) == digests(source)
    # What did not change is not written.
    untouched = {carried.key for carried in found.copied if not carried.written}
    assert LONG_KEY in untouched
    assert "a" not in untouched
    again = _copied(source, target)
    assert (again.messages, [c.key for c in again.copied if c.written]) == (0, [])
    source.restore("fork")
    source.delete("another key")
    source.restore("another key", as_key="yet another key")
    _copied(source, target)
    assert digests(target) == digests(source)
    assert undone(target) == undone(source)


@pytest.mark.parametrize(("one", "other"), FEW)
def test_copy_can_be_written_like_the_source(stores: Open, one: str, other: str) -> None:
    source, target = stores(one, "source"), stores(other, "target")
    fill(source)
    _copied(source, target)
    seen = []
    for store in (source, target):
        go_on(store)
        store.checkpoint("a", summary="all", upto=20)
        store.compact("a")
        told = everything(store)
        del told["trash"], told["new"], told["only meta"]
        for name in ("updated", "created"):
            for info, *_ in told.values():
                info.pop(name)
        seen.append({key: (info["count"], rest[-1]) for key, (info, *rest) in told.items()})
    assert seen[0] == seen[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_preview_reports_changes_and_writes_nothing(stores: Open, engine: str) -> None:
    source, target = stores(engine, "source"), stores(engine, "target")
    fill(source)
    found = preview_copy(whole(source), whole(target))
    assert digests(target) == {}
    made = _copied(source, target)
    assert (found.messages, len(found.copied)) == (made.messages, len(made.copied))
    source.add_message("a", "user", "more")
    before = digests(target)
    again = preview_copy(whole(source), whole(target))
    assert (again.messages, [c.key for c in again.copied if c.written]) == (1, ["a"])
    assert digests(target) == before


@pytest.mark.parametrize("engine", ["jsonl", "sqlite"])
@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    first=st.lists(operations(), max_size=14),
    then=st.lists(operations(), max_size=6),
    other=st.sampled_from(ENGINES),
)
def test_any_session_is_copied_and_updated(
    engine: str, first: list[object], then: list[object], other: str
) -> None:
    with (
        temporary_folders.folder() as place,
        opened(engine, place, name="source") as source,
        opened(other, place, name="target") as target,
        InMemoryStore() as back,
    ):
        for calls in (first, then):
            for call in calls:
                call.outcome(source, "a")  # type: ignore[attr-defined]
            _copied(source, target)
            assert everything(target) == everything(source)
            assert digests(target) == digests(source)
        _copied(target, back)
        assert everything(back) == everything(source)
        assert undone(target) == undone(source) == undone(back)


# --- damage ----------------------------------------------------------------------------------


def _damage(log: Path, text: bytes) -> None:
    whole_log = log.read_bytes()
    assert whole_log.count(text) == 1
    log.write_bytes(whole_log.replace(text, bytes([text[0] ^ 1]) + text[1:]))


@pytest.mark.parametrize("other", ENGINES)
def test_a_damaged_message_is_lost_in_the_copy_too(place: Path, other: str) -> None:
    with JSONLStore(place / "source") as store:
        for number in range(9):
            store.add_message("a", "user", f"number {number}", once=f"t{number}")
        store.hide("a", 8, 8)
    _damage(place / "source/sessions/a.jsonl", b"number 4")
    with JSONLStore(place / "source") as source, opened(other, place) as target:
        _copied(source, target)
        assert source.info("a").lost == target.info("a").lost == 1
        assert target.info("a").count == 8
        assert [m.seq for m in target.get_history("a")] == [1, 2, 3, 4, 6, 7, 9]
        source.add_message("a", "user", "more")
        _copied(source, target)
        assert everything(target) == everything(source)
        assert digests(target) == digests(source)


@pytest.mark.parametrize("other", ENGINES)
def test_a_damaged_row_is_lost_in_the_copy_too(place: Path, other: str) -> None:
    with SQLiteStore(place / "x.db") as store:
        for number in range(5):
            store.add_message("a", "user", f"number {number}")
        with store.database.write_transaction() as transaction:
            transaction.execute("UPDATE message SET body = X'7B7D' WHERE seq = 3")
    with SQLiteStore(place / "x.db") as source, opened(other, place, name="target") as target:
        _copied(source, target)
        assert [m.seq for m in target.get_history("a")] == [1, 2, 4, 5]
        assert target.info("a").lost == 1


@pytest.mark.parametrize("other", ENGINES)
def test_seqs_of_a_torn_write_are_used_up_in_the_copy_too(place: Path, other: str) -> None:
    with JSONLStore(place / "source") as store:
        store.add_message("a", "user", "one")
        store.add_messages("a", [{"n": number} for number in range(3)])
    log = place / "source/sessions/a.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-1]) + lines[-1][:40])
    with JSONLStore(place / "source") as source, opened(other, place) as target:
        _copied(source, target)
        assert source.info("a").last_seq == target.info("a").last_seq == 3
        assert source.add_message("a", "user", "next") == 4
        assert target.add_message("a", "user", "next") == 4


def test_messages_lost_in_the_source_are_not_restored_from_the_copy(place: Path) -> None:
    with JSONLStore(place / "source") as source, SQLiteStore(place / "x.db") as target:
        for number in range(9):
            source.add_message("a", "user", f"number {number}")
        _copied(source, target)
        source.add_message("a", "user", "more")
    _damage(place / "source/sessions/a.jsonl", b"number 4")
    with JSONLStore(place / "source") as source, SQLiteStore(place / "x.db") as target:
        assert "lost messages to damage" in _refused(source, target).reason


def test_unreadable_session_is_reported_and_others_are_copied(place: Path) -> None:
    with JSONLStore(place / "source") as source, InMemoryStore() as target:
        source.add_message("a", "user", "one")
        source.add_message("b", "user", "one")
        os.truncate(place / "source/sessions/b.jsonl", 0)
        (place / "source/sessions/b.jsonl").write_bytes(
            (place / "source/sessions/a.jsonl").read_bytes()
        )
        [problem] = copy_snapshots(source, target).problems
        assert (problem.key, target.list_sessions()) == ("b", ["a"])
        assert "steno doctor" in problem.reason


def test_missing_archive_loses_only_its_own_messages(place: Path) -> None:
    with JSONLStore(place / "source") as source, InMemoryStore() as target:
        for number in range(9):
            source.add_message("a", "user", f"number {number}")
        source.truncate_history("a", 4)
        source.compact("a")
        [archive] = (place / "source/sessions/archive").rglob("*.gz")
        archive.unlink()
        _copied(source, target)
        assert [m.seq for m in target.get_history("a", full=True)] == [6, 7, 8, 9]
        assert target.info("a").lost == 5


# --- what is not overwritten -----------------------------------------------------------------


@pytest.mark.parametrize(("one", "other"), FEW)
def test_different_session_with_same_key_is_not_overwritten(
    stores: Open, one: str, other: str
) -> None:
    source, target = stores(one, "source"), stores(other, "target")
    source.add_message("a", "user", "here")
    source.add_message("b", "user", "here")
    target.add_message("a", "user", "there")
    before = everything(target)["a"]
    [problem] = copy_snapshots(whole(source), whole(target)).problems
    assert problem.key == "a"
    assert "delete or rename that session there" in problem.reason
    assert everything(target)["a"] == before
    assert everything(target)["b"] == everything(source)["b"]


def _append(store: Store) -> None:
    store.add_message("a", "user", "by itself")


def _change(store: Store) -> None:
    store.set_summary("a", "by itself")


def _label(store: Store) -> None:
    store.set_meta("a", title="by itself")


def _delete(store: Store) -> None:
    store.delete("a")


@pytest.mark.parametrize("went_on", [_append, _change, _label, _delete])
@pytest.mark.parametrize(("one", "other"), FEW)
def test_newer_destination_is_not_overwritten(
    stores: Open, one: str, other: str, went_on: Callable[[Store], None]
) -> None:
    source, target = stores(one, "source"), stores(other, "target")
    for number in range(5):
        source.add_message("a", "user", str(number))
    source.hide("a", 2, 2)
    _copied(source, target)
    went_on(target)
    assert _refused(source, target).newer
    source.set_summary("a", "and the source")
    source.set_meta("a", title="went on, too")
    source.set_meta("a", title="and more")
    source.add_message("a", "user", "more")
    source.add_message("a", "user", "and more")
    problem = _refused(source, target)
    assert not problem.newer
    assert "The destination was not changed" in problem.reason


def test_diverged_copy_is_not_overwritten(place: Path) -> None:
    with (
        JSONLStore(place / "one") as one,
        JSONLStore(place / "two") as two,
        JSONLStore(place / "target") as target,
    ):
        one.add_message("a", "user", "first")
        _copied(one, two)
        two.add_message("a", "user", "said there")
        _copied(two, target)
        one.add_message("a", "user", "said here")
        one.add_message("a", "user", "and more")
        assert "different content" in _refused(one, target).reason


@pytest.mark.parametrize("engine", ["jsonl", "sqlite"])
def test_damaged_copy_is_reported(place: Path, engine: str) -> None:
    with JSONLStore(place / "source") as source:
        source.add_message("a", "user", "number 1")
        source.add_message("a", "user", "number 2")
        with opened(engine, place) as target:
            _copied(source, target)
            if isinstance(target, SQLiteStore):
                with target.database.write_transaction() as transaction:
                    transaction.execute("UPDATE message SET body = X'7B7D' WHERE seq = 1")
        if engine == "jsonl":
            _damage(place / "x/sessions/a.jsonl", b"number 1")
        with opened(engine, place) as target:
            source.add_message("a", "user", "more")
            [problem] = copy_snapshots(source, whole(target)).problems
            assert "the copy in the destination is damaged" in problem.reason


def test_session_only_in_destination_is_reported_and_kept(stores: Open) -> None:
    source, target = stores("jsonl", "source"), stores("sqlite", "target")
    source.add_message("a", "user", "one")
    source.add_message("b", "user", "one")
    target.add_message("c", "user", "one")
    _copied(source, target)
    source.purge("b")
    assert set(_copied(source, target).only_in_target) == {"b", "c"}
    assert target.list_sessions() == ["a", "b", "c"]


# --- beside writers --------------------------------------------------------------------------


class _Meddler:
    """Does something at a moment of the copy, once."""

    def __init__(self, at: Callable[[CopyStep], bool], doing: Callable[[], object]) -> None:
        self._at = at
        self._doing = doing
        self.done = 0

    def __call__(self, step: CopyStep) -> None:
        if not self.done and self._at(step):
            self.done += 1
            self._doing()


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_writes_between_passes_are_copied(stores: Open, one: str, other: str) -> None:
    source, target = stores(one, "source"), stores(other, "target")
    fill(source)

    meddler = _Meddler(
        lambda step: step.phase == "copying" and 0 < step.done == step.total,
        lambda: go_on(source),
    )
    found = copy_snapshots(whole(source), whole(target), progress=meddler)
    assert (found.problems, meddler.done) == ((), 1)
    assert digests(target) == digests(source)


@pytest.mark.parametrize(("one", "other"), FEW)
def test_last_pass_copies_latest_writes(stores: Open, one: str, other: str) -> None:
    source, target = stores(one, "source"), stores(other, "target")
    source.add_message("a", "user", "one")
    written = []

    def write(step: CopyStep) -> None:
        # Also after the last pass that goes without a lock.
        if step.phase == "copying" and step.done == step.total:
            written.append(source.add_message("a", "user", "more"))

    found = copy_snapshots(whole(source), whole(target), progress=write)
    assert found.problems == ()
    assert len(written) == copy.MAX_PASSES
    assert digests(target) == digests(source)


class _Watched:
    """A destination that looks whether the source can be written to while it is."""

    def __init__(self, target: SnapshotStore, source: Store) -> None:
        self._target = target
        self._source = source
        self.refused = 0
        self.list_snapshots = target.list_snapshots
        self.read_snapshot = target.read_snapshot
        self.hold_snapshot = target.hold_snapshot

    @contextmanager
    def snapshot_writer(self) -> Iterator[SnapshotWriter]:
        with self._target.snapshot_writer() as writer:
            self._writer = writer
            yield self

    def write(
        self, snapshot: Snapshot, messages: Iterable[Message], *, instead_of: str = ""
    ) -> None:
        try:
            self._source.add_message("a", "user", "beside it")
        except StoreBusy:
            self.refused += 1
        self._writer.write(snapshot, messages, instead_of=instead_of)


@pytest.mark.parametrize("engine", ["jsonl", "sqlite"])
def test_session_is_locked_during_last_pass(place: Path, engine: str) -> None:
    options = {"busy_timeout": 0.05}
    with opened(engine, place, name="source") as source:
        other: Store = (
            JSONLStore(place / "source", **options)  # type: ignore[arg-type]
            if engine == "jsonl"
            else SQLiteStore(place / "source.db", **options)  # type: ignore[arg-type]
        )
        with other, InMemoryStore() as target:
            source.add_message("a", "user", "one")
            watched = _Watched(target, other)
            found = copy_snapshots(whole(source), watched)
            # In each pass before it was written to, so there always was more to copy.
            assert watched.refused == 1
            assert found.passes == copy.MAX_PASSES + 1
            assert len(target.get_history("a")) == 1 + copy.MAX_PASSES
            assert digests(target) == digests(source)


def test_session_purged_during_the_copy_is_not_a_problem(stores: Open) -> None:
    source, target = stores("jsonl", "source"), stores("sqlite", "target")
    for key in ("a", "b"):
        source.add_message(key, "user", "one")
    meddler = _Meddler(lambda step: step.phase == "copying", lambda: source.purge("b"))
    found = copy_snapshots(whole(source), whole(target), progress=meddler)
    assert (found.problems, target.list_sessions()) == ((), ["a"])


@pytest.mark.parametrize("engine", ["jsonl", "sqlite"])
def test_destination_written_during_copy_is_not_overwritten(stores: Open, engine: str) -> None:
    source, target = stores("memory", "source"), stores(engine, "target")
    source.add_message("a", "user", "one")

    def both() -> None:
        source.add_message("a", "user", "here")
        target.add_message("a", "user", "there")

    meddler = _Meddler(lambda step: step.phase == "copying" and step.done == 1, both)
    [problem] = copy_snapshots(whole(source), whole(target), progress=meddler).problems
    assert problem.key == "a"
    assert [m.content for m in target.get_history("a")] == ["one", "there"]


@pytest.mark.parametrize("engine", ["jsonl", "sqlite"])
def test_concurrent_writers_lose_nothing_during_copy(stores: Open, engine: str) -> None:
    source, target = stores(engine, "source"), stores("sqlite", "target")
    stop = Event()

    def write(name: str) -> None:
        for number in range(2_000):
            source.add_message(f"{name}{number % 3}", "user", str(number))
            if stop.is_set():
                break

    threads = [Thread(target=write, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            found = copy_snapshots(whole(source), whole(target))
            assert found.problems == ()
            for key in target.list_sessions():
                copied = [m.to_json() for m in target.get_history(key)]
                assert copied == [m.to_json() for m in source.get_history(key)][: len(copied)]
                assert [m.seq for m in target.get_history(key)] == list(range(1, len(copied) + 1))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    _copied(source, target)
    assert digests(target) == digests(source)


# --- cut short -------------------------------------------------------------------------------


class _CutError(Exception):
    pass


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_interrupted_copy_is_continued(
    stores: Open, one: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = stores(one, "source"), stores(other, "target")
    fill(source)
    monkeypatch.setattr(copy, "GROUP_SNAPSHOTS", 2)

    def cut(step: CopyStep) -> None:
        if step.done >= 4:
            raise _CutError

    with pytest.raises(_CutError):
        copy_snapshots(whole(source), whole(target), progress=cut)
    there = {mark.uid for mark in whole(target).list_snapshots()}
    assert len(there) == 4
    found = _copied(source, target)
    assert {c.uid for c in found.copied if not c.written} == there
    assert digests(target) == digests(source)


class _Breaking:
    """A source whose messages break off, as on a disk that fails."""

    def __init__(self, source: SnapshotStore, after: int) -> None:
        self._source = source
        self._after = after
        self.list_snapshots = source.list_snapshots

    @contextmanager
    def read_snapshot(self, mark: SnapshotMark, *, after: int = 0) -> Iterator[SnapshotReading]:
        with self._source.read_snapshot(mark, after=after) as reading:
            yield SnapshotReading(
                snapshot=reading.snapshot,
                messages=self._broken(reading.messages),
                stamp=reading.stamp,
            )

    hold_snapshot = read_snapshot

    def _broken(self, messages: Iterator[Message]) -> Iterator[Message]:
        for number, message in enumerate(messages):
            if number >= self._after:
                raise _CutError
            yield message

    def snapshot_writer(self) -> AbstractContextManager[SnapshotWriter]:
        raise NotImplementedError


@pytest.mark.parametrize("other", [*ENGINES, "postgresql"])
def test_session_is_copied_completely_or_not_at_all(stores: Open, other: str) -> None:
    source, target = stores("memory", "source"), stores(other, "target")
    fill(source)
    with pytest.raises(_CutError):
        copy_snapshots(_Breaking(whole(source), 5), whole(target))
    there = digests(target)
    assert {"a", "purged"}.isdisjoint(key for key, _, _ in there.values())
    assert there.items() <= digests(source).items()
    _copied(source, target)
    before = digests(target)
    source.add_messages("a", [{"n": number} for number in range(20)])
    with pytest.raises(_CutError):
        copy_snapshots(_Breaking(whole(source), 25), whole(target))
    assert digests(target) == before
    _copied(source, target)
    assert digests(target) == digests(source)


def test_copy_to_read_only_store_writes_nothing(place: Path) -> None:
    with JSONLStore(place / "target") as target:
        target.add_message("a", "user", "one")
    with JSONLStore(place / "source") as source, suppress(StenologError):
        source.add_message("b", "user", "one")
        with (
            JSONLStore(place / "target", read_only=True) as target,
            pytest.raises(ReadOnly),
        ):
            copy_snapshots(source, target)
    assert [path.name for path in (place / "target/sessions").iterdir()] == ["a.jsonl"]


def test_leftovers_of_killed_copy_are_removed(place: Path) -> None:
    with JSONLStore(place / "source") as source, JSONLStore(place / "target") as target:
        source.add_message("a", "user", "one")
        left = place / "target/sessions/.0123456789abcdef-01234567.copy"
        left.write_bytes(b"half of it")
        _copied(source, target)
        assert sorted(p.name for p in (place / "target/sessions").iterdir()) == ["a.jsonl"]


def test_archives_that_a_killed_copy_left_are_removed(place: Path) -> None:
    with JSONLStore(place / "source") as source, JSONLStore(place / "target") as target:
        fill(source)
        _copied(source, target)
        uid = target.info("a").uid
        folder = place / "target/sessions/archive" / uid
        [kept] = [path.name for path in folder.iterdir()]
        left = folder / "1-3.9.jsonl.gz"
        # Version 0.1 named the key and the uid; then the path and the stamp of the old copy.
        for note in (
            {"key": "a", "uid": uid},
            {"key": "a", "uid": uid, "path": "a.jsonl", "old_path": "a.jsonl"},
        ):
            left.write_bytes(b"of the copy that was replaced")
            (place / f"target/sessions/.{uid}-archives.copy").write_text(json.dumps(note))
            _copied(source, target)
            assert [path.name for path in folder.iterdir()] == [kept]
        assert [p.name for p in (place / "target/sessions").iterdir() if p.name[0] == "."] == []


def test_a_copy_replaced_in_another_place_is_removed_after_a_kill(place: Path) -> None:
    with JSONLStore(place / "source") as source, JSONLStore(place / "target") as target:
        source.add_message("a", "user", "one")
        _copied(source, target)
        old = (place / "target/sessions/a.jsonl").read_bytes()
        [before] = target.list_snapshots()
        source.delete("a")
        source.restore("a", as_key="b")
        _copied(source, target)
        # As if the copy had been killed before it removed the old file.
        (place / "target/sessions/a.jsonl").write_bytes(old)
        note = {"key": "b", "uid": before.uid, "path": "b.jsonl", "old_path": "a.jsonl"}
        (place / f"target/sessions/.{before.uid}-archives.copy").write_text(json.dumps(note))
        assert target.list_sessions() == ["a", "b"]
        _copied(source, target)
        assert target.list_sessions() == ["b"]
        assert digests(target) == digests(source)


def test_files_of_a_copy_are_private(place: Path) -> None:
    with JSONLStore(place / "target") as target, InMemoryStore() as source:
        fill(source)
        _copied(source, target)
    modes = {oct(path.stat().st_mode & 0o777) for path in (place / "target").rglob("*")}
    assert modes == {"0o700", "0o600"}


@pytest.mark.parametrize("engine", ["jsonl", "sqlite"])
def test_written_sessions_are_read_back_and_compared(place: Path, engine: str) -> None:
    with JSONLStore(place / "source") as source, opened(engine, place) as target:
        source.add_message("a", "user", "number 1")
        source.add_message("a", "user", "number 2")

        def damage(step: CopyStep) -> None:
            if step.phase == "comparing" and step.done == 0:
                if isinstance(target, SQLiteStore):
                    with target.database.write_transaction() as transaction:
                        transaction.execute("UPDATE message SET at = '2020' || substr(at, 5)")
                else:
                    _damage(place / "x/sessions/a.jsonl", b"number 1")

        [problem] = copy_snapshots(source, whole(target), progress=damage).problems
        assert "the copy differs from the source" in problem.reason


def test_a_session_keeps_its_times_and_its_uid(place: Path) -> None:
    with JSONLStore(place / "source") as source, SQLiteStore(place / "x.db") as target:
        source.add_message("a", "user", "one")
        stood = json.dumps([source.info("a").uid, now_of(source, "a")])
        _copied(source, target)
        assert json.dumps([target.info("a").uid, now_of(target, "a")]) == stood
        assert mark_of(target, "a").uid == mark_of(source, "a").uid


# --- what is said of a store is true of it ---------------------------------------------------


@pytest.mark.parametrize("other", ENGINES)
def test_row_missing_in_the_source_is_not_damage_of_the_copy(place: Path, other: str) -> None:
    with SQLiteStore(place / "x.db") as source, opened(other, place, name="target") as target:
        source.add_messages("a", [{"n": number} for number in range(6)])
        with source.database.write_transaction() as transaction:
            transaction.execute("DELETE FROM message WHERE seq IN (2, 4)")
        _copied(source, target)
        assert _copied(source, target).messages == 0
        source.add_message("a", "user", "later")
        assert _copied(source, target).messages == 1
        assert [m.seq for m in target.get_history("a")] == [1, 3, 5, 6, 7]


def test_stamp_differs_from_that_of_a_rewritten_session(place: Path) -> None:
    with SQLiteStore(place / "x.db") as source, InMemoryStore() as kept:
        source.add_message("a", "user", "one")
        stamps = {mark.stamp for mark in source.list_snapshots()}
        _copied(source, kept)
        source.purge("a")
        _copied(kept, source)
        stamps |= {mark.stamp for mark in source.list_snapshots()}
        assert len(stamps) == 2
        [mark] = source.list_snapshots()
        with source.read_snapshot(mark) as reading:
            assert (reading.stamp, reading.snapshot.last_seq) == (mark.stamp, mark.last_seq)


def test_earlier_copy_is_not_trusted_if_source_has_more_messages(place: Path) -> None:
    with SQLiteStore(place / "x.db") as source, InMemoryStore() as target:
        source.add_message("a", "user", "one")
        [carried] = _copied(source, target).copied
        source.add_message("a", "user", "two")
        [mark] = source.list_snapshots()
        known = copy.EarlierCopy(
            stamp=mark.stamp, digest=carried.digest, last_seq=carried.last_seq, messages=1
        )
        found = copy_snapshots(source, target, known={carried.uid: known})
        assert (found.messages, found.problems) == (1, ())
        assert digests(target) == digests(source)


class _Around:
    """A store as it is; tests change one thing about it."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store
        self.list_snapshots = store.list_snapshots
        self.read_snapshot = store.read_snapshot
        self.hold_snapshot = store.hold_snapshot
        self.snapshot_writer = store.snapshot_writer


class _Unlockable(_Around):
    """Can be read, and refuses its locks."""

    def __init__(self, store: SnapshotStore, error: StenologError) -> None:
        super().__init__(store)
        self._error = error
        self.hold_snapshot = self._refuse

    def _refuse(self, *_: object, **__: object) -> AbstractContextManager[SnapshotReading]:
        raise self._error


@pytest.mark.parametrize(
    "error",
    [ReadOnly("no"), NotStored("no"), StoreUnavailable("no")],
    ids=lambda error: type(error).__name__,
)
def test_source_that_cannot_be_locked_is_read_without_locks(error: StenologError) -> None:
    with InMemoryStore() as source, InMemoryStore() as target:
        source.add_message("a", "user", "one")

        def write(step: CopyStep) -> None:
            if step.phase == "copying" and step.done:
                source.add_message("a", "user", "more")

        found = copy_snapshots(_Unlockable(source, error), target, progress=write)
        assert (found.problems, found.unlocked) == ((), True)
        assert digests(target) == digests(source)
        assert not copy_snapshots(source, target).unlocked


class _OftenBusy(_Around):
    """A destination whose writer is refused for one key, when all is written, so many times."""

    def __init__(self, store: SnapshotStore, key: str, times: int) -> None:
        super().__init__(store)
        self._key = key
        self.times = times
        self._wanted = False
        self.snapshot_writer = self._writing

    @contextmanager
    def _writing(self) -> Iterator[SnapshotWriter]:
        self._wanted = False
        with self._store.snapshot_writer() as writer:
            self._writer = writer
            yield self
            if self._wanted and self.times:
                self.times -= 1
                raise StoreBusy("somebody else writes")

    def write(
        self, snapshot: Snapshot, messages: Iterable[Message], *, instead_of: str = ""
    ) -> None:
        if snapshot.key == self._key:
            self._wanted = True
            if self.times:
                return
        self._writer.write(snapshot, messages, instead_of=instead_of)


def test_busy_destination_does_not_end_the_copy() -> None:
    with InMemoryStore() as source:
        for key in "abc":
            source.add_message(key, "user", key)
        with InMemoryStore() as target:
            busy = _OftenBusy(target, "b", copy.MAX_PASSES + 2)
            assert copy_snapshots(source, busy).problems == ()
            assert digests(target) == digests(source)
        with InMemoryStore() as target:
            [problem] = copy_snapshots(source, _OftenBusy(target, "b", 1_000)).problems
            assert (problem.key, "somebody else writes" in problem.reason) == ("b", True)
            assert target.list_sessions() == ["a", "c"]


class _Unreadable(_Around):
    """A destination that is too busy to be looked at."""

    def __init__(self, store: SnapshotStore) -> None:
        super().__init__(store)
        self.read_snapshot = self._refuse

    def _refuse(self, *_: object, **__: object) -> AbstractContextManager[SnapshotReading]:
        raise StoreBusy("replaced all the time")


def test_unreadable_destination_session_is_not_overwritten() -> None:
    with InMemoryStore() as source, InMemoryStore() as target:
        source.add_message("a", "user", "one")
        _copied(source, target)
        target.add_message("a", "user", "of its own")
        source.add_message("a", "user", "two")
        [problem] = copy_snapshots(source, _Unreadable(target)).problems
        assert problem.key == "a"
        assert [m.content for m in target.get_history("a")] == ["one", "of its own"]
