"""Tests two threads of one store, stopped at every point and failing at every point.

The first thread loads a log, reads its new records, appends, rewrites or compacts it. It is stopped
at each of its lock operations and system calls while a second thread makes a public call. Then it
continues, or is interrupted, or fails. Afterwards every acknowledged message is readable, the
session has its uid and its old bytes, the next append works, and no lock or descriptor is left.
"""

import gc
import logging
import random
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest

from stenolog import DamagedStore, JSONLStore, MaybeStored, NoSuchSession, NotStored, StenologError
from stenolog.errors import ForeignLog, NewerFormat, SessionExists, StoreClosed
from stenolog.stores.arguments import make_batch
from support.crash.interleaving import (
    BUSY_TIMEOUT,
    FAULTS,
    INJECTED,
    Engine,
    Fault,
    Point,
    Scheduler,
    TracedLock,
    traced_engine,
)
from support.crash.reporting import Say
from support.group_appends import append_as_group

KEY: Final = "k"
FILE: Final = "k.jsonl"
SAMPLE: Final = 300
"""Number of cases in the quick run."""


@dataclass
class Run:
    """One store, and the results that its callers got."""

    store: JSONLStore
    place: Path
    acknowledged: dict[str, int] = field(default_factory=dict)
    """Seqs of the acknowledged messages."""
    possible: set[str] = field(default_factory=set)
    """Messages that may be stored: their callers got an error that leaves it open."""

    def add(self, content: str, once: str | None = None) -> None:
        """Append a message to the session."""
        self._append(content, lambda: self.store.add_message(KEY, "user", content, once=once))

    def add_batch(self) -> None:
        """Append two messages as one batch."""
        batch = [{"role": "user", "content": "batch"}, {"role": "user", "content": "batch end"}]
        self.possible.add("batch end")
        self._append("batch", lambda: self.store.add_messages(KEY, batch)[0])

    def add_group(self) -> None:
        """Append messages of two callers."""
        group = [
            make_batch([{"role": "user", "content": f"group {n}"}], None, None) for n in (1, 2)
        ]
        self.possible |= {"group 1", "group 2"}
        for number, result in enumerate(append_as_group(self.store, KEY, group), 1):
            if isinstance(result, StenologError):
                raise result
            self.acknowledged[f"group {number}"] = result

    def add_leased(self) -> None:
        """Append a message under a lease."""
        with self.store.lease(KEY, ttl=60) as lease:
            self.possible.add("leased")
            self.acknowledged["leased"] = lease.store.add_message(KEY, "user", "leased")

    def read_snapshot(self) -> None:
        """Read the session as a copy to another store does."""
        [mark] = [
            mark
            for mark in self.store.admin.list_snapshots()
            if mark.key == KEY and mark.deleted is None
        ]
        with self.store.admin.read_snapshot(mark) as reading:
            assert len(list(reading.messages)) >= len(OLD)

    def write_snapshot(self) -> None:
        """Write a session of another store, as a copy to this store does."""
        with JSONLStore(self.place / "another") as source:
            source.add_message("copied", "user", "copied")
            [mark] = source.admin.list_snapshots()
            with (
                source.admin.read_snapshot(mark) as reading,
                self.store.admin.snapshot_writer() as writing,
            ):
                writing.write(reading.snapshot, reading.messages)
        assert [message.content for message in self.store.get_history("copied")] == ["copied"]

    def refresh(self) -> None:
        """Bring a view of the session up to date."""
        old = self.store.view(KEY)
        assert len(old.merged(self.store.view(old.key, since=old)).messages) >= 3

    def purge_older(self) -> None:
        """Purge the earlier session of the key, which is in the trash."""
        older = [trashed for trashed in self.store.admin.list_trash() if trashed.key == KEY]
        purged = self.store.admin.purge(KEY, trash=[(one.uid, one.deleted) for one in older])
        assert purged.messages == len(older) == 1

    def finish_purge(self) -> None:
        """Finish the interrupted purge."""
        [unfinished] = self.store.admin.list_trash(unfinished=True)
        self.store.admin.finish_purge(unfinished.uid)
        assert self.store.admin.list_trash(unfinished=True) == []

    def read(self, *, full: bool) -> list[str]:
        """Return those messages that the session had before each run."""
        found = [message.content for message in self.store.get_history(KEY, full=full)]
        old = list(OLD.values()) if full else list(OLD.values())[5:]
        return [content for content in found if content in old]

    def _append(self, content: str, append: Callable[[], int]) -> None:
        try:
            self.acknowledged[content] = append()
        except NotStored:
            raise
        except BaseException:
            self.possible.add(content)
            raise


OLD: Final = {seq: f"old {seq}" for seq in range(1, 9)}
"""The messages of the session before each run: 1 and 2 archived, 3 to 5 hidden."""


OLDER: Final = "older"
"""The message of an earlier session of the same key, which is in the trash."""


def _build(place: Path) -> None:
    with JSONLStore(place) as store:
        store.add_message(KEY, "user", "purged")
        store.delete(KEY)
        for log in (place / "sessions" / "trash").iterdir():
            log.rename(f"{log}.purged")  # as an interrupted purge leaves it
        store.add_message(KEY, "user", OLDER)
        store.delete(KEY)
        for seq in range(1, 7):
            store.add_message(KEY, "user", OLD[seq], once=f"token {seq}")
        store.checkpoint(KEY, summary="one", upto=2)
        store.compact(KEY)
        store.add_messages(KEY, [{"role": "user", "content": OLD[seq]} for seq in (7, 8)])
        store.checkpoint(KEY, summary="two", upto=5)
        for key in ("other", "gone"):
            store.add_message(key, "user", f"of {key}")
        store.delete("gone")


def _outside(run: Run, content: str) -> None:
    """Append a message as another process does."""
    with JSONLStore(run.place) as store:
        run.acknowledged[content] = store.add_message(KEY, "user", content)


def _warm_up(run: Run) -> None:
    assert len(run.read(full=False)) == 3
    run.add("before")


def _beside(run: Run) -> None:
    _warm_up(run)
    _outside(run, "outside")


def _suspect(run: Run) -> None:
    _warm_up(run)
    run.store._logs.suspect_names.add(FILE)


def _nothing(run: Run) -> None:
    """Prepare nothing: the store has read nothing yet."""


Call = Callable[[Run], Any]

FIRST: Final[dict[str, tuple[Call, Call]]] = {
    "load": (_nothing, lambda run: run.read(full=False)),
    "load everything": (_nothing, lambda run: run.read(full=True)),
    "catch up": (_beside, lambda run: run.read(full=False)),
    "append": (_warm_up, lambda run: run.add("first")),
    "append after another process": (_beside, lambda run: run.add("first")),
    "append once": (_nothing, lambda run: run.add("first", once="first")),
    "change": (_warm_up, lambda run: run.store.set_meta(KEY, first=1)),
    "rewrite": (_suspect, lambda run: run.add("first")),
    "compact": (_warm_up, lambda run: run.store.compact(KEY)),
    "stamps": (_nothing, lambda run: run.store.admin.stamps()),
}
"""For each operation of the first thread: the preparation and the operation."""

REFUSED: Final[dict[str, type[StenologError]]] = {
    "newer": NewerFormat,
    "foreign": ForeignLog,
    "copied": DamagedStore,
}
"""Logs that are neither read nor written."""

SECOND: Final[dict[str, Call]] = {
    "add_message": lambda run: run.add("second"),
    "add_message once": lambda run: run.add("second", once="second"),
    "get_history": lambda run: run.read(full=False),
    "get_history full": lambda run: run.read(full=True),
    "info": lambda run: run.store.info(KEY),
    "lease": lambda run: run.add_leased(),
    "fork onto": lambda run: run.store.fork("other", KEY),
    "restore onto": lambda run: run.store.admin.restore("gone", as_key=KEY),
    "compact": lambda run: run.store.compact(KEY),
    "set_meta": lambda run: run.store.set_meta(KEY, second=2),
    "delete": lambda run: run.store.delete(KEY),
    "purge": lambda run: run.store.admin.purge(KEY),
    # Those above also run with faults.
    "add_messages": lambda run: run.add_batch(),
    "add_group": lambda run: run.add_group(),
    "set_summary": lambda run: run.store.set_summary(KEY, "second"),
    "truncate_history": lambda run: run.store.truncate_history(KEY, 1),
    "clear": lambda run: run.store.clear(KEY),
    "hide": lambda run: run.store.admin.hide(KEY, 7, 7),
    "checkpoint": lambda run: run.store.checkpoint(KEY, summary="second", upto=6),
    "pop": lambda run: run.store.pop(KEY),
    "set_history": lambda run: run.store.set_history(KEY, []),
    "undo": lambda run: run.store.undo(KEY),
    "fork": lambda run: run.store.fork(KEY, "fork"),
    "restore": lambda run: run.store.admin.restore("gone"),
    "list_trash": lambda run: run.store.admin.list_trash(),
    "purge trash": lambda run: run.store.admin.purge("gone"),
    "purge before": lambda run: run.store.admin.purge(KEY, before=2),
    "stamps": lambda run: run.store.admin.stamps(),
    "purge_trash": lambda run: run.purge_older(),
    "unfinished_purges": lambda run: run.store.admin.list_trash(unfinished=True),
    "finish_purge": lambda run: run.finish_purge(),
    "mark": lambda run: run.store.admin.read_marker("m"),
    "change_mark": lambda run: run.store.admin.update_marker("m"),
    "get_summary": lambda run: run.store.get_summary(KEY),
    "list_sessions": lambda run: run.store.list_sessions(),
    "follow": lambda run: list(run.store.follow(KEY, after=6, timeout=0)),
    "read_snapshot": lambda run: run.read_snapshot(),
    "snapshot_writer": lambda run: run.write_snapshot(),
    "view": lambda run: run.store.view(KEY),
    "refresh": lambda run: run.refresh(),
    "health": lambda run: run.store.admin.health(),
    "close": lambda run: run.store.close(),
}
"""Public calls, made by the second thread."""

WITH_FAULTS: Final = list(SECOND)[:12]
_REWRITES: Final = {"rewrite", "compact", "purge before"}
_REMOVES: Final = {"delete", "purge"}
_HIDES: Final = _REMOVES | {
    "checkpoint",
    "clear",
    "hide",
    "pop",
    "purge before",
    "set_history",
    "truncate_history",
    "undo",
}
_SCARCE: Final = {"fork onto": SessionExists, "restore onto": SessionExists}


@dataclass(frozen=True)
class Case:
    """One run: the calls, the stop of the first one, and the fault."""

    first: str
    second: str
    stop_at: int
    point: Point
    fault: Fault

    def __str__(self) -> str:
        where = f"{self.stop_at} ({self.point.label})"
        return f"{self.first} | {self.second} | point {where} | {self.fault.value}"


class Bench:
    """Runs cases, each in a fresh copy of the same folder."""

    def __init__(self, engine: Engine, place: Path) -> None:
        self._engine = engine
        self._place = place
        self._count = 0
        self.refused: dict[str, bytes] = {}
        _build(place / "template")
        path = place / "template" / "sessions" / FILE
        self._bytes = path.read_bytes()
        with JSONLStore(place / "template") as store:
            self._uid = store.info(KEY).uid
        for name in REFUSED:
            self._build_refused(name)
        gc.collect()
        gc.freeze()

    def _build_refused(self, name: str) -> None:
        template = self._place / name
        shutil.copytree(self._place / "template", template)
        match name:
            case "newer":
                text = b""
                for line in self._bytes.replace(b'"format":1', b'"format":99').splitlines():
                    body = line[: line.rindex(b',"crc":')]
                    text += body + b',"crc":"%08x"}\n' % zlib.crc32(body)
            case "foreign":
                text = b'{"role":"user","content":"written by another program"}\n' * 9
            case _:
                text = (template / "sessions" / "other.jsonl").read_bytes()
        (template / "sessions" / FILE).write_bytes(text)
        self.refused[name] = text

    def points(self, first: str) -> list[Point]:
        """Return the points of an undisturbed operation."""
        run, call = self._prepared(first)
        scheduler = self._engine.scheduler = Scheduler()
        result, _ = scheduler.run(lambda: call(run))
        if first not in REFUSED:
            assert not isinstance(result, BaseException), (first, result)
        self._close(run)
        return scheduler.points

    def run(self, case: Case) -> bool:
        """Run and check one case; return whether the second thread had to wait."""
        run, call = self._prepared(case.first)
        waited = self._run_calls(case, run, call)
        if self._engine.descriptors:
            gc.collect()  # an error may hold a log in a cycle
        assert not self._engine.descriptors, f"{len(self._engine.descriptors)} descriptors leaked"
        shutil.rmtree(run.place)
        return waited

    def _run_calls(self, case: Case, run: Run, call: Call) -> bool:
        scheduler = self._engine.scheduler = Scheduler(case.stop_at, case.fault)
        first, second = scheduler.run(lambda: call(run), lambda: SECOND[case.second](run))
        self._engine.scheduler = Scheduler()
        if case.first in REFUSED:
            self._check_refused(run, case, first, second)
        else:
            _check_first(case, first)
            _check_second(case, second)
            first = second = None
            self._check_next_append(run, case)
            self._close(run)
            self._check_session(run, case)
        self._close(run)
        return scheduler.waited

    def _prepared(self, first: str) -> tuple[Run, Call]:
        self._engine.scheduler = Scheduler()
        self._engine.descriptors.clear()
        self._count += 1
        place = self._place / f"run {self._count}"
        shutil.copytree(self._place / (first if first in REFUSED else "template"), place)
        run = Run(JSONLStore(place, busy_timeout=BUSY_TIMEOUT), place)
        before, call = FIRST.get(first, FIRST["load"])
        before(run)
        return run, call

    def _close(self, run: Run) -> None:
        run.store.close()

    def _check_next_append(self, run: Run, case: Case) -> None:
        if case.second == "close":
            return
        run.add("next")
        assert run.acknowledged["next"]

    def _check_session(self, run: Run, case: Case) -> None:
        text = (run.place / "sessions" / FILE).read_bytes()
        with JSONLStore(run.place) as store:
            if case.second in _REMOVES:
                _check_removed(run, store, case.second)
                return
            info = store.info(KEY)
            assert info.uid == self._uid, "the session has another uid"
            assert (info.lost, info.damaged) == (0, 0)
            found = {message.seq: message.content for message in store.get_history(KEY, full=True)}
            assert len(store.get_history("other")) == 1
            deleted = {trashed.key for trashed in store.admin.list_trash()}
            assert KEY in deleted or case.second == "purge_trash"
            deleted |= {*store.list_sessions(prefix="gone")}
            assert "gone" in deleted or case.second == "purge trash"
        # After a failed sync the log is copied to a new file.
        failed_sync = case.fault is Fault.SYSTEM and case.point.label.endswith("sync")
        if not failed_sync and not {case.first, case.second} & _REWRITES:
            assert text.startswith(self._bytes), "the old bytes changed"
        purged = {1} if case.second == "purge before" else set()
        for seq in OLD.keys() - purged:
            assert found.get(seq) == OLD[seq], f"message {seq} was lost"
        for content, seq in run.acknowledged.items():
            assert found.get(seq) == content, f"{content!r} was acknowledged as {seq} and is lost"
        new = Counter(content for seq, content in found.items() if seq not in OLD)
        assert new.keys() <= run.acknowledged.keys() | run.possible, "what was refused is stored"
        assert max(new.values(), default=1) == 1, "a message was stored twice"

    def _check_refused(self, run: Run, case: Case, first: Any, second: Any) -> None:
        error = REFUSED[case.first]
        assert isinstance(first, error) or case.fault is not Fault.NONE, first
        for _ in range(2):
            with suppress(error):
                run.add("next")
        assert not run.acknowledged, "an append to a log that must be refused was acknowledged"
        left = (run.place / "sessions" / FILE).read_bytes()
        assert left == self.refused[case.first], f"the file changed; the call returned {second!r}"


def _check_first(case: Case, result: Any) -> None:
    """Check the result of the first call."""
    if isinstance(result, list) and case.second not in _HIDES:
        assert len(result) == (8 if case.first == "load everything" else 3), "messages are missing"
    if not isinstance(result, BaseException):
        return
    if isinstance(result, KeyboardInterrupt | MemoryError) and result.args == (INJECTED,):
        return
    assert isinstance(result, StenologError), repr(result)
    if case.fault in (Fault.NONE, Fault.HELD):
        expected = {"close": StoreClosed, "purge": NoSuchSession, "delete": NoSuchSession}
        assert isinstance(result, expected.get(case.second, ())), repr(result)


def _check_second(case: Case, result: Any) -> None:
    """Check the result of the second call."""
    if isinstance(result, list) and case.second.startswith("get_history"):
        assert len(result) == (8 if case.second.endswith("full") else 3), "messages are missing"
    expected = _SCARCE.get(case.second)
    if expected is not None:
        assert isinstance(result, expected), repr(result)
    elif case.fault is not Fault.NONE and isinstance(result, MaybeStored):
        pass  # its message was part of the failed write
    else:
        assert not isinstance(result, BaseException), repr(result)


def _check_removed(run: Run, store: JSONLStore, how: str) -> None:
    """Check that a purge left nothing, and that nothing deleted is lost."""
    new = [message.content for message in store.get_history(KEY, full=True)]
    assert "next" in new
    assert how == "delete" or not set(new) & set(OLD.values())
    if how == "purge":
        return
    for number, trashed in enumerate(store.admin.list_trash()):
        store.admin.restore(trashed.key, uid=trashed.uid, as_key=f"back {number}")
        new += [m.content for m in store.get_history(f"back {number}", full=True)]
    assert Counter(new) >= Counter([OLDER, *OLD.values(), *run.acknowledged])


@pytest.fixture
def bench(quick_disk: Path) -> Iterator[Bench]:
    """Yield the patched engine, in memory and without its warnings."""
    logger = logging.getLogger("stenolog")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with traced_engine() as engine:
            yield Bench(engine, quick_disk)
    finally:
        gc.unfreeze()
        logger.setLevel(level)


def _all_cases(bench: Bench) -> Iterator[Case]:
    for first in (*FIRST, *REFUSED):
        points = list(enumerate(bench.points(first), 1))
        for (number, point), second in product(points, SECOND):
            if first in REFUSED and second not in WITH_FAULTS:
                continue
            yield Case(first, second, number, point, Fault.NONE)
            if second in WITH_FAULTS:
                for fault in _faults(point):
                    yield Case(first, second, number, point, fault)


def _faults(point: Point) -> Iterator[Fault]:
    for fault in FAULTS[point.kind]:
        # A rewrite locks a new file, which no other process has opened.
        if fault is not Fault.HELD or not point.label.startswith("rewrite "):
            yield fault


def _run_all(bench: Bench, cases: list[Case], say: Say) -> None:
    failed: list[str] = []
    waited = 0
    for case in cases:
        try:
            waited += bench.run(case)
        except Exception as error:  # noqa: BLE001  all of them are reported
            failed.append(f"{case}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
    points = len({(case.first, case.stop_at) for case in cases})
    faults = Counter(case.fault.value for case in cases)
    say(f"interleavings: {len(cases)} at {points} points, {dict(faults)}; {waited} waited")
    assert not failed, "\n".join([f"{len(failed)} of {len(cases)} failed:", *failed[:40]])


def test_a_call_that_waits_for_the_lock_of_a_finished_call_fails() -> None:
    engine = Engine()
    lock = TracedLock(engine, "test")

    def wait() -> None:
        while not lock.acquire(timeout=0.001):
            pass

    _, second = engine.scheduler.run(lock.acquire, wait)
    assert isinstance(second, AssertionError)


def test_p1_p4_p8_sampled_interleavings_lose_no_message(bench: Bench, say: Say, seed: int) -> None:
    cases = list(_all_cases(bench))
    _run_all(bench, random.Random(seed).sample(cases, SAMPLE), say)


@pytest.mark.full
def test_p1_p4_p8_every_interleaving_loses_no_message(bench: Bench, say: Say) -> None:
    _run_all(bench, list(_all_cases(bench)), say)
