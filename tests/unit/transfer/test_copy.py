"""Copying between all engines: everything is carried, nothing of anybody else is overwritten."""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import product
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from stenolog import (
    JSONLStore,
    Message,
    OnceConflict,
    SQLiteStore,
    StenologError,
    StoreBusy,
)
from stenolog.errors import ReadOnly, SessionExists
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store
from stenolog.stores.snapshots import (
    SnapshotMark,
    SnapshotReading,
    SnapshotWriter,
)
from stenolog.transfer import copy
from stenolog.transfer.copy import CopyProblem, CopyStep, CopyTotals, copy_snapshots
from support import temporary_folders
from support.copied_stores import (
    LONG_KEY,
    digests,
    everything,
    fill,
    go_on,
    mark_of,
    opened,
    undone,
)
from support.postgres_server import Databases, Server
from support.strategies import operations

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
    found = copy_snapshots(source, target)
    assert found.problems == ()
    return found


def _refused(source: Store, target: Store) -> CopyProblem:
    """The one problem of a copy, which left the destination as it was."""
    before = everything(target), digests(target)
    [problem] = copy_snapshots(source, target).problems
    assert (everything(target), digests(target)) == before
    return problem


# --- everything is carried -------------------------------------------------------------------


@pytest.mark.quick(4)
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
    oldest = source.admin.list_trash()[-1].uid
    for store in (source, target):
        store.admin.restore("b/\u00e9:X", uid=oldest, as_key="back")
        assert [m.content for m in store.get_history("back")] == ["first"]
    steps = undone(source)
    assert undone(target) == steps
    assert sum(not isinstance(step[0], type) for step in steps["a"]) == 5  # type: ignore[index]


@pytest.mark.quick(3)
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


@pytest.mark.quick(3)
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_copy_keeps_the_deletion_times_of_sessions(stores: Open, one: str, other: str) -> None:
    source, target = stores(one, "source"), stores(other, "target")
    for key in ("a", "b"):
        source.add_message(key, "user", "hello")
    source.delete("b")
    source.delete("a")  # later, and copied before "b"
    _copied(source, target)
    times = [[(t.key, t.deleted) for t in store.admin.list_trash()] for store in (source, target)]
    assert times[0] == times[1]
    # The next copy recognises what this one left.
    assert _copied(source, target).messages == 0


@pytest.mark.quick(3)
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_second_copy_adds_new_sessions_and_reports_changed_ones(
    stores: Open, one: str, other: str
) -> None:
    source, target = stores(one, "source"), stores(other, "target")
    fill(source)
    _copied(source, target)
    again = _copied(source, target)
    assert (again.messages, [c.key for c in again.copied if c.written]) == (0, [])
    before = everything(target)
    go_on(source)
    found = copy_snapshots(source, target)
    changed = ["a", "another key", "fork", "only a summary", "only meta", "only meta", "purged"]
    assert sorted(problem.key for problem in found.problems) == changed
    assert all("The destination was not changed" in problem.reason for problem in found.problems)
    assert [carried.key for carried in found.copied if carried.written] == ["new"]
    assert LONG_KEY in {carried.key for carried in found.copied}
    after = everything(target)
    assert after.pop("new") == everything(source)["new"]
    assert after == before


@pytest.mark.quick(2)
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


@pytest.mark.parametrize("engine", ["jsonl", "sqlite"])
@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    calls=st.lists(operations(), max_size=20),
    other=st.sampled_from(ENGINES),
)
def test_any_session_is_copied(engine: str, calls: list[object], other: str) -> None:
    with (
        temporary_folders.folder() as place,
        opened(engine, place, name="source") as source,
        opened(other, place, name="target") as target,
        InMemoryStore() as back,
    ):
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
        store.admin.hide("a", 8, 8)
    _damage(place / "source/sessions/a.jsonl", b"number 4")
    with JSONLStore(place / "source") as source, opened(other, place) as target:
        _copied(source, target)
        assert source.info("a").lost == target.info("a").lost == 1
        assert target.info("a").count == 8
        assert [m.seq for m in target.get_history("a")] == [1, 2, 3, 4, 6, 7, 9]
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
        assert "different content" in _refused(source, target).reason


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
    [problem] = copy_snapshots(source, target).problems
    assert problem.key == "a"
    assert "delete or rename that session there" in problem.reason
    assert everything(target)["a"] == before
    assert everything(target)["b"] == everything(source)["b"]


@pytest.mark.parametrize("engine", [*ENGINES, "postgresql"])
def test_writer_refuses_a_session_whose_key_or_uid_exists(stores: Open, engine: str) -> None:
    source, target = stores("memory", "source"), stores(engine, "target")
    source.add_message("a", "user", "here")

    def write(key: str) -> None:
        with (
            source.admin.read_snapshot(mark_of(source, key)) as reading,
            target.admin.snapshot_writer() as writer,
        ):
            messages = list(reading.messages)
            writer.write(reading.snapshot, messages)
            with pytest.raises(SessionExists):
                writer.write(reading.snapshot, messages)

    write("a")
    with pytest.raises(SessionExists):
        write("a")
    target.delete("a")
    with pytest.raises(SessionExists):
        write("a")
    source.delete("a")
    source.add_message("a", "user", "another session")
    write("a")
    assert [m.content for m in target.get_history("a")] == ["another session"]
    target.admin.purge("a")
    target.add_message("a", "user", "there")
    with pytest.raises(SessionExists):
        write("a")
    assert [m.content for m in target.get_history("a")] == ["there"]


def _append(store: Store) -> None:
    store.add_message("a", "user", "by itself")


def _change(store: Store) -> None:
    store.set_summary("a", "by itself")


def _label(store: Store) -> None:
    store.set_meta("a", title="by itself")


def _delete(store: Store) -> None:
    store.delete("a")


@pytest.mark.quick(4)
@pytest.mark.parametrize("went_on", [_append, _change, _label, _delete])
@pytest.mark.parametrize(("one", "other"), FEW)
def test_changed_destination_is_not_overwritten(
    stores: Open, one: str, other: str, went_on: Callable[[Store], None]
) -> None:
    source, target = stores(one, "source"), stores(other, "target")
    for number in range(5):
        source.add_message("a", "user", str(number))
    source.admin.hide("a", 2, 2)
    _copied(source, target)
    went_on(target)
    assert "different content" in _refused(source, target).reason
    source.add_message("a", "user", "more")
    assert "different content" in _refused(source, target).reason


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
            [problem] = copy_snapshots(source, target).problems
            assert "is damaged" in problem.reason


def test_session_only_in_destination_is_kept(stores: Open) -> None:
    source, target = stores("jsonl", "source"), stores("sqlite", "target")
    source.add_message("a", "user", "one")
    source.add_message("b", "user", "one")
    target.add_message("c", "user", "one")
    _copied(source, target)
    source.admin.purge("b")
    _copied(source, target)
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


def test_session_purged_during_the_copy_is_not_a_problem(stores: Open) -> None:
    source, target = stores("jsonl", "source"), stores("sqlite", "target")
    for key in ("a", "b"):
        source.add_message(key, "user", "one")
    meddler = _Meddler(lambda step: step.phase == "copying", lambda: source.admin.purge("b"))
    found = copy_snapshots(source, target, progress=meddler)
    assert (found.problems, target.list_sessions()) == ((), ["a"])


def test_session_renamed_during_the_copy_is_reported(stores: Open) -> None:
    source, target = stores("jsonl", "source"), stores("sqlite", "target")
    source.add_message("a", "user", "one")

    def rename() -> None:
        source.delete("a")
        source.admin.restore("a", as_key="b")

    meddler = _Meddler(lambda step: step.phase == "copying", rename)
    [problem] = copy_snapshots(source, target, progress=meddler).problems
    assert (problem.key, "renamed during the copy" in problem.reason) == ("a", True)
    _copied(source, target)
    assert target.list_sessions() == ["b"]


class _Busy:
    """A store whose sessions are replaced all the time, for so many reads."""

    def __init__(self, store: Store, times: int) -> None:
        self.admin: Any = self
        self._admin = store.admin
        self._times = times
        self.list_snapshots = store.admin.list_snapshots
        self.snapshot_writer = store.admin.snapshot_writer

    @contextmanager
    def read_snapshot(self, mark: SnapshotMark, *, after: int = 0) -> Iterator[SnapshotReading]:
        with self._admin.read_snapshot(mark, after=after) as reading:
            yield replace(reading, messages=self._interrupted(reading.messages))

    def _interrupted(self, messages: Iterator[Message]) -> Iterator[Message]:
        yield next(messages)
        if self._times:
            self._times -= 1
            raise StoreBusy("replaced all the time")
        yield from messages


@pytest.mark.parametrize("engine", ENGINES)
def test_session_that_is_replaced_during_the_copy_is_read_again(stores: Open, engine: str) -> None:
    source, target = stores("memory", "source"), stores(engine, "target")
    source.add_message("a", "user", "one")
    source.add_message("b", "user", "one")
    busy = _Busy(source, copy.MAX_ATTEMPTS)
    [problem] = copy_snapshots(cast("Store", busy), target).problems
    assert (problem.key, problem.reason) == ("a", "replaced all the time")
    assert target.list_sessions() == ["b"]
    busy = _Busy(source, copy.MAX_ATTEMPTS - 1)
    assert copy_snapshots(cast("Store", busy), target).problems == ()
    assert digests(target) == digests(source)


def test_destination_session_that_cannot_be_read_is_reported() -> None:
    with InMemoryStore() as source, InMemoryStore() as target:
        source.add_message("a", "user", "one")
        _copied(source, target)
        [problem] = copy_snapshots(source, cast("Store", _Busy(target, 1))).problems
        assert (problem.key, problem.reason) == ("a", "replaced all the time")


@pytest.mark.parametrize("engine", ["jsonl", "sqlite"])
def test_message_added_to_a_copy_during_the_copy_is_kept(stores: Open, engine: str) -> None:
    source, target = stores("memory", "source"), stores(engine, "target")
    source.add_message("a", "user", "one")
    meddler = _Meddler(
        lambda step: step.phase == "comparing", lambda: target.add_message("a", "user", "there")
    )
    [problem] = copy_snapshots(source, target, progress=meddler).problems
    assert (problem.key, "another process wrote to the copy" in problem.reason) == ("a", True)
    assert [m.content for m in target.get_history("a")] == ["one", "there"]


@pytest.mark.parametrize("engine", ["jsonl", "sqlite"])
def test_concurrent_writers_lose_nothing_during_copy(stores: Open, engine: str) -> None:
    source = stores(engine, "source")
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
        for round_number in range(3):
            target = stores("sqlite", f"target {round_number}")
            _copied(source, target)
            for key in target.list_sessions():
                copied = [m.to_json() for m in target.get_history(key)]
                assert copied == [m.to_json() for m in source.get_history(key)][: len(copied)]
                assert [m.seq for m in target.get_history(key)] == list(range(1, len(copied) + 1))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    target = stores("sqlite", "target")
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
        if step.done >= 5:
            raise _CutError

    with pytest.raises(_CutError):
        copy_snapshots(source, target, progress=cut)
    there = {mark.uid for mark in target.admin.list_snapshots()}
    assert len(there) == 4 + (other == "memory")
    found = _copied(source, target)
    assert {c.uid for c in found.copied if not c.written} == there
    assert digests(target) == digests(source)


class _Breaking:
    """A source whose messages break off, as on a disk that fails."""

    def __init__(self, source: Store, after: int) -> None:
        self.admin: Any = self
        self._source = source.admin
        self._after = after
        self.list_snapshots = source.admin.list_snapshots

    @contextmanager
    def read_snapshot(self, mark: SnapshotMark, *, after: int = 0) -> Iterator[SnapshotReading]:
        with self._source.read_snapshot(mark, after=after) as reading:
            yield SnapshotReading(
                snapshot=reading.snapshot,
                messages=self._broken(reading.messages),
            )

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
        copy_snapshots(cast("Store", _Breaking(source, 5)), target)
    there = digests(target)
    assert {"a", "purged"}.isdisjoint(key for key, _, _ in there.values())
    assert there.items() <= digests(source).items()
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


# --- what is said of a store is true of it ---------------------------------------------------


@pytest.mark.parametrize("other", ENGINES)
def test_row_missing_in_the_source_is_not_damage_of_the_copy(place: Path, other: str) -> None:
    with SQLiteStore(place / "x.db") as source, opened(other, place, name="target") as target:
        source.add_messages("a", [{"n": number} for number in range(6)])
        with source.database.write_transaction() as transaction:
            transaction.execute("DELETE FROM message WHERE seq IN (2, 4)")
        _copied(source, target)
        assert _copied(source, target).messages == 0
        assert [m.seq for m in target.get_history("a")] == [1, 3, 5, 6]
