"""Short sequences of operations, judged on every disk that a power cut may leave within the last.

A cut within an earlier operation is a cut in a shorter sequence.
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
"""What is there before a sequence begins: see GROUNDS."""

_STORE: Final = "store"


@dataclass(frozen=True, slots=True)
class Case:
    """One sequence, on one ground.

    `kill` names the operation (the opening before them all is -1) and the call at which the
    process is killed, after which another process goes on.
    """

    ground: Ground
    ops: tuple[str, ...]
    kill: tuple[int, int] | None = None
    blind_to: Blindness | None = None


@dataclass(slots=True)
class Tally:
    """What came of many cases."""

    sequences: int = 0
    cuts: int = 0
    disks: int = 0
    judged: int = 0
    violations: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Count these too."""
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
    """Runs cases in a folder of its own."""

    def __init__(self, place: Path, *, limit: int = 120) -> None:
        self._place = place
        self._limit = limit
        self._grounds: dict[Ground, tuple[Path, list[Outcome]]] = {}
        self._numbers = itertools.count()

    def judge(self, case: Case, seed: int) -> Tally:
        """Record the sequence, and judge every disk."""
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
    """What was recorded is all that happened: else the model says nothing about the store."""
    assert disk.now() == tree_of(place), f"{case}: the store changed files behind the recorder"


class _Play:
    """Makes the calls of a case and keeps what a caller would know."""

    def __init__(self, where: Path, recorder: Recorder) -> None:
        self._where = where
        self._recorder = recorder
        self._lines: list[Line] = []
        self._tokened = Step("add_full_message", "a", ("token.30",), once="token")
        self._before_last = 0
        self.began = 0
        """How many events were recorded before the last operation."""

    def all(self, case: Case) -> None:
        """Open the store and make them, in the order of the case."""
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
            # Nobody else judges cuts within the first opening.
            self.began = len(recorder.events) if number else recorder.before
            recorder.kill_at = call if victim == number else None
            try:
                store = self._one(store, number, op)
            except Killed:
                # A dead process writes nothing more, but its locks and descriptors go.
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
        """What is known while the last operation is under way."""
        return self._outcomes(self._lines[: self._before_last + 1])

    def finished(self) -> list[Outcome]:
        """What is known when it has returned."""
        return self._outcomes(self._lines)

    def _outcomes(self, lines: Sequence[Line]) -> list[Outcome]:
        found: list[Outcome] = []
        # A killed operation has no answer, and yet another one follows.
        for line, following in itertools.zip_longest(lines, lines[1:]):
            if line.word == "BEGIN":
                answered = following is not None and following.word != "BEGIN"
                found += outcomes([line, following] if answered else [line])
        return found


# --- what may be there before ----------------------------------------------------------------


def _talk(where: Path, *, messages: int = 4, compacted: bool = False) -> list[Outcome]:
    """A summary, a floor, a batch, something hidden above the floor, something to archive."""
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
    """A message was being written when the power went: half a line at the end."""
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
    """A batch was being written: its middle never reached the disk, its end did."""
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
    """So long that a state is due in one of the next writes."""
    return _talk(where, messages=244)


def _compacted(where: Path) -> list[Outcome]:
    """With one archive, and something for the next."""
    return _talk(where, compacted=True)


def _trashed(where: Path) -> list[Outcome]:
    """With an archive, and deleted."""
    history = _compacted(where)
    with stenolog.open_store(str(where)) as store:
        return history + outcomes(_made(store, 200, "delete"))


def _recreated(where: Path) -> list[Outcome]:
    """Deleted once with an archive and once without, and alive, with a fork."""
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
"""Operations by which sessions begin and end."""
_WITHIN: Final = tuple(op for op in OPERATIONS if op not in _LIFECYCLE)
_BESIDE: Final = ("add_message", "again", "clear", "compact", "undo", OPEN)
"""What is done before and after those, where all of it would be too much."""
_TRIPLES: Final = 600
_CALLS: Final = {
    "compact": 20,
    "fork": 13,
    "delete": 8,
    "restore": 15,
    "purge_before": 15,
    "purge": 29,
}
"""How many calls an operation makes at the most; of the others 6."""


def all_cases(seed: int) -> Iterator[Case]:
    """All sequences of up to three operations in a talk, of up to two on the other grounds.

    And every operation, or the first opening, killed at each of its calls, with another after it.
    Of three operations of which one begins or ends a session, a chosen few; other grounds for
    these where they find something else there.
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
    """All that happens while a session exists."""
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
    """Some of all cases, of each ground and length alike."""
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
    """All of these, one after the other."""
    tally = Tally()
    place.mkdir(parents=True, exist_ok=True)
    sequencer = Sequencer(place)
    report = logging.getLogger("stenolog")
    level = report.level
    # Damage is reported as it is met, and here it is met thousands of times.
    report.setLevel(logging.CRITICAL)
    try:
        for case in cases:
            tally.add(sequencer.judge(case, seed))
    finally:
        report.setLevel(level)
    return tally
