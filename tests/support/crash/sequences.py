"""Short sequences of operations, checked on every disk that a power cut in the last one may leave.

A power cut in an earlier operation is covered by a shorter sequence.
"""

import contextlib
import itertools
import logging
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

import stenolog
from stenolog.errors import StenologError
from stenolog.stores.base import Store
from support.crash.crash_checks import Judge, Outcome, Violation, outcomes
from support.crash.recorder import Blindness, Killed, Recorder
from support.crash.replay_model import Disk, tree_of
from support.crash.workload import ENDINGS, OPEN, OPERATIONS, Line, Step, labels, perform, plan

Ground = str
"""Initial state of the store before a sequence: see GROUNDS."""

_STORE: Final = "store"


@dataclass(frozen=True, slots=True)
class Case:
    """One sequence on one initial state.

    `kill` names the operation (-1 is the first opening) and the call at which the process is
    killed; another process then continues.
    """

    ground: Ground
    ops: tuple[str, ...]
    kill: tuple[int, int] | None = None
    blind_to: Blindness | None = None


@dataclass(slots=True)
class Tally:
    """Results of many cases."""

    sequences: int = 0
    cuts: int = 0
    disks: int = 0
    judged: int = 0
    violations: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Add the results of another tally."""
        self.sequences += other.sequences
        self.cuts += other.cuts
        self.disks += other.disks
        self.judged += other.judged
        self.violations += other.violations

    def __str__(self) -> str:
        return (
            f"{self.sequences} sequences, {self.cuts} cuts, {self.disks} disks, "
            f"{self.judged} distinct and judged, {len(self.violations)} violations"
        )


class Sequencer:
    """Runs cases in its own folder."""

    def __init__(self, place: Path, *, limit: int = 120) -> None:
        self._place = place
        self._limit = limit
        self._grounds: dict[Ground, tuple[Path, list[Outcome]]] = {}
        self._numbers = itertools.count()

    def judge(self, case: Case, seed: int) -> Tally:
        """Record the sequence, and check every disk."""
        ground, history = self._ground(case.ground)
        tally = Tally(sequences=1)
        place = self._place / f"run{next(self._numbers)}"
        shutil.copytree(ground, place)
        try:
            recorder = Recorder(place, blind_to=case.blind_to)
            play = _Play(place / _STORE, recorder)
            with recorder.recording():
                play.all(case)
            disk = Disk()
            for event in recorder.events[: play.began]:
                disk.apply(event)
            choice = random.Random(f"{seed} {case}")
            for event in recorder.events[play.began :]:
                disk.apply(event)
                tally.cuts += 1
                self._judge_cut(case, disk, Judge(history + play.cut_short()), choice, tally)
            _agree(disk, place, case)
            tally.cuts += 1
            self._judge_cut(case, disk, Judge(history + play.finished()), choice, tally)
        finally:
            shutil.rmtree(place)
        return tally

    def _judge_cut(
        self, case: Case, disk: Disk, judge: Judge, choice: random.Random, tally: Tally
    ) -> None:
        seen = set[bytes]()
        for tree in disk.losses(choice, limit=self._limit):
            tally.disks += 1
            digest = tree.digest()
            if digest in seen:
                continue
            seen.add(digest)
            tally.judged += 1
            place = self._place / f"disk{next(self._numbers)}"
            tree.build(place)
            try:
                judge.judge(place / _STORE, thorough=choice.random() < 0.05)
            except Violation as violation:
                tally.violations.append(f"{case}: {violation}")
                kept = self._place / f"violation{len(tally.violations)}"
                if not kept.exists():
                    tree.build(kept)
            finally:
                shutil.rmtree(place)

    def _ground(self, name: Ground) -> tuple[Path, list[Outcome]]:
        if name not in self._grounds:
            place = self._place / f"ground-{name}"
            place.mkdir()
            self._grounds[name] = place, GROUNDS[name](place / _STORE)
        return self._grounds[name]


def _agree(disk: Disk, place: Path, case: Case) -> None:
    """Check that the recording is complete; otherwise the model proves nothing about the store."""
    assert disk.now() == tree_of(place), f"{case}: the store changed files behind the recorder"


class _Play:
    """Makes the calls of a case and records what a caller would know."""

    def __init__(self, where: Path, recorder: Recorder) -> None:
        self._where = where
        self._recorder = recorder
        self._lines: list[Line] = []
        self._tokened = Step("add_full_message", "a", ("token.30",), once="token")
        self._before_last = 0
        self.began = 0
        """Number of events recorded before the last operation."""

    def all(self, case: Case) -> None:
        """Open the store and run the operations of the case in order."""
        victim, call = case.kill if case.kill is not None else (None, 0)
        recorder = self._recorder
        recorder.kill_at = call if victim == -1 else None
        try:
            store = self._open()
        except Killed:
            recorder.revive()
            store = self._open()
        recorder.kill_at = None
        for number, op in enumerate(case.ops):
            self._before_last = len(self._lines)
            # No other case checks power cuts during the first opening.
            self.began = len(recorder.events) if number else recorder.before
            recorder.kill_at = call if victim == number else None
            try:
                store = self._one(store, number, op)
            except Killed:
                # A dead process writes nothing more, but its locks and descriptors are released.
                store.close()
                recorder.revive()
                store = self._open()
            recorder.kill_at = None
        store.close()

    def _open(self) -> Store:
        return stenolog.open_store(str(self._where))

    def _one(self, store: Store, number: int, op: str) -> Store:
        key = f"new{number}" if op == "create" else "a"
        if op == OPEN:
            self._lines.append(Line("BEGIN", number, Step(OPEN)))
            store.close()
            store = self._open()
            self._lines.append(Line("ACK", number, result=[None, 0]))
            return store
        step = plan(op, key, number, labels(store, key), size=30)
        if op in ("add_full_message", "again"):
            step = msgspec.structs.replace(self._tokened, op=op)
        self._lines.append(Line("BEGIN", number, step))
        try:
            result = perform(store, step)
        except StenologError as error:
            self._lines.append(Line("ERR", number, result=[type(error).__name__, str(error)]))
        else:
            self._lines.append(Line("ACK", number, result=[result, 0]))
        return store

    def cut_short(self) -> list[Outcome]:
        """Return the outcomes known while the last operation is in progress."""
        return self._outcomes(self._lines[: self._before_last + 1])

    def finished(self) -> list[Outcome]:
        """Return the outcomes known after the last operation."""
        return self._outcomes(self._lines)

    def _outcomes(self, lines: Sequence[Line]) -> list[Outcome]:
        found: list[Outcome] = []
        # A killed operation has no result, although another operation follows.
        for line, following in itertools.zip_longest(lines, lines[1:]):
            if line.word == "BEGIN":
                answered = following is not None and following.word != "BEGIN"
                found += outcomes([line, following] if answered else [line])
        return found


# --- initial states --------------------------------------------------------------------------


def _talk(where: Path, *, messages: int = 4, compacted: bool = False) -> list[Outcome]:
    """Create a session with a summary, a floor, a batch, hidden messages and some to archive."""
    lines: list[Line] = []
    ops = ["add_message"] * 3 + ["add_messages", "set_summary", "truncate_history"]
    if compacted:
        ops += ["compact", "add_message", "truncate_history"]
    ops += ["add_message"] * messages + ["hide"]
    with stenolog.open_store(str(where)) as store:
        for number, op in enumerate(ops, 100):
            lines += _made(store, number, op)
    return outcomes(lines)


def _made(store: Store, number: int, op: str) -> list[Line]:
    step = plan(op, "a", number, labels(store, "a"), size=20)
    return [
        Line("BEGIN", number, step),
        Line("ACK", number, result=[perform(store, step), 0]),
    ]


def _torn(where: Path) -> list[Outcome]:
    """Leave half a line at the end, as a power cut during a message does."""
    history = _talk(where)
    step = Step("add_message", "a", ("torn.90",))
    log = _log(where)
    before = log.stat().st_size
    with stenolog.open_store(str(where)) as store:
        perform(store, step)
    with contextlib.closing(log.open("r+b")) as file:
        file.truncate((before + log.stat().st_size) // 2)
    return [*history, Outcome(step, "absent")]


def _holed(where: Path) -> list[Outcome]:
    """Leave a hole in a batch whose middle did not reach the disk, but whose end did."""
    history = _talk(where)
    step = Step("add_messages", "a", ("hole1.90", "hole2.90", "hole3.90"))
    log = _log(where)
    before = log.stat().st_size
    with stenolog.open_store(str(where)) as store:
        perform(store, step)
    third = (log.stat().st_size - before) // 3
    with contextlib.closing(log.open("r+b")) as file:
        file.seek(before + third + 10)
        file.write(bytes(third - 40))
    return [*history, Outcome(step, "absent")]


def _long(where: Path) -> list[Outcome]:
    """Create a log so long that one of the next writes stores a state."""
    return _talk(where, messages=244)


def _compacted(where: Path) -> list[Outcome]:
    """Create a session with one archive, and messages for the next."""
    return _talk(where, compacted=True)


def _trashed(where: Path) -> list[Outcome]:
    """Create a deleted session with an archive."""
    history = _compacted(where)
    with stenolog.open_store(str(where)) as store:
        return history + outcomes(_made(store, 200, "delete"))


def _recreated(where: Path) -> list[Outcome]:
    """Create a session that was deleted twice (once with an archive) and exists, with a fork."""
    history = _trashed(where)
    with stenolog.open_store(str(where)) as store:
        ops = ["add_messages", "delete", "add_message", "add_messages", "fork"]
        for number, op in enumerate(ops, 300):
            history += outcomes(_made(store, number, op))
    return history


def _log(where: Path) -> Path:
    (found,) = where.glob("sessions/*.jsonl")
    return found


GROUNDS: Final[dict[Ground, Callable[[Path], list[Outcome]]]] = {
    "empty": lambda _where: [],
    "talk": _talk,
    "torn": _torn,
    "holed": _holed,
    "long": _long,
    "compacted": _compacted,
    "trashed": _trashed,
    "recreated": _recreated,
}

_LIFECYCLE: Final = ("fork", *ENDINGS)
"""Operations that create and end sessions."""
_WITHIN: Final = tuple(op for op in OPERATIONS if op not in _LIFECYCLE)
_BESIDE: Final = ("add_message", "again", "clear", "compact", "undo", OPEN)
"""Operations before and after those, where all operations would take too long."""
_TRIPLES: Final = 600
_CALLS: Final = {
    "compact": 20,
    "fork": 13,
    "delete": 8,
    "restore": 15,
    "purge_before": 15,
    "purge": 29,
}
"""Maximum number of calls of an operation; 6 for the others."""


def all_cases(seed: int) -> Iterator[Case]:
    """Yield all sequences of up to three operations in a talk, of up to two on other states.

    Also every operation, or the first opening, killed at each of its calls, followed by another. Of
    three operations with one that creates or ends a session, yield only a sample; other initial
    states only if they make a difference.
    """
    yield from _within()
    for length in (1, 2):
        for ops in itertools.product(OPERATIONS, repeat=length):
            if set(ops) & set(_LIFECYCLE):
                yield Case("talk", ops)
    triples = [ops for ops in itertools.product(OPERATIONS, repeat=3) if set(ops) & set(_LIFECYCLE)]
    for ops in random.Random(seed).sample(triples, _TRIPLES):
        yield Case("talk", ops)
    for ground in ("torn", "compacted", "trashed", "recreated"):
        for op in _LIFECYCLE:
            yield Case(ground, (op,))
            for other in (*_LIFECYCLE, *_BESIDE):
                yield Case(ground, (op, other))
                if other not in _LIFECYCLE:
                    yield Case(ground, (other, op))
    for ground in ("compacted", "trashed", "recreated"):
        for first, second in itertools.product(_LIFECYCLE, (*_LIFECYCLE, *_BESIDE)):
            for call in range(_CALLS[first]):
                yield Case(ground, (first, second), kill=(0, call))


def _within() -> Iterator[Case]:
    """Yield all sequences without creation or end of a session."""
    for length in (1, 2, 3):
        for ops in itertools.product(_WITHIN, repeat=length):
            yield Case("talk", ops)
    for ground in ("empty", "torn", "holed", "long", "compacted"):
        for length in (1, 2):
            for ops in itertools.product(_WITHIN, repeat=length):
                yield Case(ground, ops)
    for ground in ("talk", "empty"):
        for first, second in itertools.product(_WITHIN, repeat=2):
            for call in range(_CALLS.get(first, 6)):
                yield Case(ground, (first, second), kill=(0, call))
    for op in _WITHIN:
        for call in range(5):
            yield Case("empty", (op,), kill=(-1, call))


def sample(seed: int, count: int) -> list[Case]:
    """Choose `count` cases, evenly over initial states and lengths."""
    choice = random.Random(seed)
    groups: dict[tuple[str, int, bool, bool], list[Case]] = {}
    for case in all_cases(seed):
        ends = bool(set(case.ops) & set(_LIFECYCLE))
        groups.setdefault((case.ground, len(case.ops), case.kill is None, ends), []).append(case)
    share = count // len(groups) + 1
    chosen = [
        case for group in groups.values() for case in choice.sample(group, min(share, len(group)))
    ]
    choice.shuffle(chosen)
    return chosen[:count]


def judge_all(cases: Sequence[Case], place: Path, seed: int) -> Tally:
    """Check all these cases one after the other."""
    tally = Tally()
    place.mkdir(parents=True, exist_ok=True)
    sequencer = Sequencer(place)
    report = logging.getLogger("stenolog")
    level = report.level
    # Each damage is logged, which happens thousands of times here.
    report.setLevel(logging.CRITICAL)
    try:
        for case in cases:
            tally.add(sequencer.judge(case, seed))
    finally:
        report.setLevel(level)
    return tally
