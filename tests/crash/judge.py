"""Compares a store with what a run said before it was cut short.

The model is InMemoryStore: the acknowledged steps are replayed on it, and the store must look like
it, or like it with the step that was under way. Seqs may differ (those of an unfinished write are
never used again), so messages are compared by label, and seqs by rules of their own.
"""

import contextlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

import stenolog
from crash.workload import OPEN, Line, Step, label_of, message, perform
from stenolog import errors
from stenolog.errors import NoSuchSession, StenologError, UsageError
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore

Fate = Literal["acked", "refused", "absent", "unknown"]

_MAX_OPEN_QUESTIONS: Final = 10


class Violation(AssertionError):
    """A promise that the store did not keep."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is known of a step: acknowledged, refused as a wrong call, surely absent, unknown."""

    step: Step
    fate: Fate
    result: Any = None
    """What an acknowledged one returned, or the name of the error."""
    told: bool = True
    """Whether the caller learnt of it; else it was found out by looking."""
    late: bool = False
    """Said while the power was going: if this one is in, so is every late one before it."""


@dataclass(frozen=True, slots=True)
class Look:
    """A session as one reader sees it; equal looks mean equal sessions.

    One that is not there looks like one with nothing in it: a first call cut short leaves either.
    """

    messages: tuple[tuple[str, bool], ...] = ()
    """Label and whether hidden, of every message, archived ones included."""
    summary: str = ""
    meta: str = "{}"
    undoable: int = 0


@dataclass(slots=True)
class Seen:
    """A look and the seqs that stand behind it."""

    look: Look
    seqs: dict[str, int] = field(default_factory=dict)
    last_seq: int = 0
    below_floor: int = 0


# --- what a run said -------------------------------------------------------------------------


def outcomes(lines: Sequence[Line], *, certain: int | None = None) -> list[Outcome]:
    """The steps of a run and their fates, in order. Raises Violation for an untyped error.

    What was said after the first `certain` lines was said while the power was going.
    """
    found: list[Outcome] = []
    begun: Step | None = None
    trusted = 0
    for index, line in enumerate(lines):
        if index == certain:
            trusted = len(found)
        match line.word:
            case "BEGIN":
                assert begun is None, "a run begins one step at a time"
                begun = line.step
            case "ACK" if begun is not None:
                found += _answered(begun, line.result[0])
                begun = None
            case "ERR" if begun is not None:
                found += _failed(begun, line.result[0])
                begun = None
            case "BUG":
                raise Violation(f"an untyped error came out of {begun}:\n{line.result}")
            case _:
                assert line.word == "END", line
    if begun is not None:
        found += _failed(begun, "MaybeStored")
    if certain is not None and certain < len(lines):
        found[trusted:] = [_late(outcome) for outcome in found[trusted:]]
    return [outcome for outcome in found if outcome.step.op != OPEN]


def _late(outcome: Outcome) -> Outcome:
    if outcome.fate in ("acked", "unknown"):
        return replace(outcome, fate="unknown", late=True)
    # An error as the disk went away; as a refusal it would bind the model to what came before.
    return replace(outcome, fate="absent")


def _answered(step: Step, result: Any) -> list[Outcome]:
    if step.op != "add_group":
        return [Outcome(step, "acked", result)]
    single = zip(_members(step), result, strict=True)
    return [
        Outcome(member, _fate(answer), answer)
        if isinstance(answer, str)
        else Outcome(member, "acked", answer)
        for member, answer in single
    ]


def _failed(step: Step, error: str) -> list[Outcome]:
    members = _members(step) if step.op == "add_group" else [step]
    return [Outcome(member, _fate(error), error) for member in members]


def _members(step: Step) -> list[Step]:
    # Each append of a group is whole or absent on its own.
    return [Step("add_full_message", step.key, (label,)) for label in step.labels]


def _fate(error: str) -> Fate:
    kind = getattr(errors, error)
    if issubclass(kind, errors.MaybeStored):
        return "unknown"
    return "refused" if issubclass(kind, UsageError) else "absent"


# --- looking ---------------------------------------------------------------------------------


def look(store: Store, key: str) -> Seen:
    """The session as this store shows it. Raises Violation where it contradicts itself."""
    try:
        info = store.info(key)
    except NoSuchSession:
        _demand(not store.get_history(key, full=True), f"{key!r} has messages but no info")
        return Seen(Look())
    full = store.get_history(key, full=True)
    pairs: list[tuple[str, bool]] = []
    seqs: dict[str, int] = {}
    for found in full:
        fields = found.to_dict()
        label = label_of(fields)
        _demand(bool(label) and fields == message(label), f"{key!r}: not as it went in: {found}")
        _demand(label not in seqs, f"{key!r}: {label} is there twice")
        seqs[label] = found.seq
        pairs.append((label, found.hidden))
    order = list(seqs.values())
    _demand(order == sorted(set(order)) and 0 not in order, f"{key!r}: seqs out of order: {order}")
    visible = [(found.seq, label_of(found.to_dict())) for found in store.get_history(key)]
    shown = [(seqs[label], label) for label, hidden in pairs if not hidden]
    _demand(visible == shown, f"{key!r}: the two reads differ: {visible} and {shown}")
    _demand(
        info.visible == len(visible), f"{key!r}: info counts {info.visible} visible, not {visible}"
    )
    _demand(info.count == len(full), f"{key!r}: info counts {info.count} messages, not {len(full)}")
    _demand(info.last_seq >= max(order, default=0), f"{key!r}: last_seq {info.last_seq} < {order}")
    _demand(
        all(hidden for (_, hidden), seq in zip(pairs, order, strict=True) if seq <= info.floor),
        f"{key!r}: something at or below the floor {info.floor} is visible",
    )
    return Seen(
        Look(
            messages=tuple(pairs),
            summary=info.summary,
            meta=json.dumps(dict(info.meta), sort_keys=True),
            undoable=info.undoable,
        ),
        seqs,
        info.last_seq,
        sum(seq <= info.floor for seq in order),
    )


def _demand(kept: bool, otherwise: str) -> None:
    if not kept:
        raise Violation(otherwise)


# --- the model -------------------------------------------------------------------------------


def _replay(history: Sequence[Outcome], taken: Sequence[bool]) -> InMemoryStore | None:
    """The model after the acknowledged steps and those unknown ones that are taken to be in.

    None where the model contradicts what the run was told: then it was not so.
    """
    model = InMemoryStore()
    choice = iter(taken)
    for outcome in history:
        if outcome.fate == "absent" or (outcome.fate == "unknown" and not next(choice)):
            continue
        step, error = outcome.step, None
        try:
            result = perform(model, step)
        except UsageError as raised:
            result, error = None, type(raised).__name__
        except KeyError:
            # It speaks of a message that is not there if things went this way.
            return None
        if outcome.fate == "refused":
            if error != outcome.result:
                return None
        elif error is not None or (outcome.fate == "acked" and not _same(result, outcome)):
            return None
    return model


def _same(result: Any, outcome: Outcome) -> bool:
    if not outcome.told:
        return True
    if outcome.step.labels and outcome.step.op != "set_history":
        return len(result) == len(outcome.result)
    return bool(json.loads(json.dumps(result)) == outcome.result)


@dataclass(frozen=True, slots=True)
class _Possible:
    taken: tuple[bool, ...]
    look: Look
    below_floor: int


class Judge:
    """Judges any number of stores by the same history: what was said before each was cut."""

    def __init__(self, history: Iterable[Outcome]) -> None:
        self._history: dict[str, list[Outcome]] = {}
        for outcome in history:
            self._history.setdefault(outcome.step.key, []).append(outcome)
        self._known: dict[tuple[str, frozenset[str]], list[_Possible]] = {}

    def judge(self, where: Path, *, probe: int = 0, thorough: bool = False) -> list[Outcome]:
        """What really happened, with the judge's own probes. Raises Violation.

        Looks without writing, opens, compares, repeats what is unknown and carries a token, appends
        to every session, opens again and compares again; `thorough` also takes everything back,
        step by step, and compacts. Labels of probes carry the number.
        """
        try:
            return self._judge(where, probe, thorough=thorough)
        except StenologError as error:
            raise Violation(f"the store does not work any more: {error!r}") from error

    def _judge(self, where: Path, probe: int, *, thorough: bool) -> list[Outcome]:
        untouched: dict[str, Look] = {}
        if (where / "sessions").exists():
            with stenolog.open_store(str(where), read_only=True) as reader:
                untouched = {key: look(reader, key).look for key in self._keys(reader)}
        settled: dict[str, list[Outcome]] = {}
        expected: dict[str, Look] = {}
        with stenolog.open_store(str(where)) as store:
            for key in self._keys(store):
                seen = look(store, key)
                _demand(
                    untouched.get(key, Look()) == seen.look,
                    f"{key!r}: opened for reading it is {untouched.get(key)}, else {seen.look}",
                )
                possible = self._settle(key, seen)
                settled[key] = _decided(self._history.get(key, ()), possible.taken)
                _check_seqs(key, seen, settled[key])
                expected[key], more = _probe(store, key, seen, settled[key], probe)
                settled[key] += more
        with stenolog.open_store(str(where)) as store:
            for key, wanted in expected.items():
                seen = look(store, key)
                _demand(
                    seen.look == wanted,
                    f"{key!r}: after an append and a new opening {seen.look}, not {wanted}",
                )
                _check_seqs(key, seen, settled[key])
                if thorough:
                    settled[key] += _take_everything_back(store, key, settled[key])
        if thorough:
            with stenolog.open_store(str(where)) as store:
                for key, history in settled.items():
                    _compare(store, key, history, "taken back, compacted and opened again")
        return [outcome for history in settled.values() for outcome in history]

    def _keys(self, store: Store) -> list[str]:
        there = store.list_sessions()
        strange = set(there) - self._history.keys()
        _demand(not strange, f"sessions that nobody made: {strange}")
        return list(self._history)

    def _settle(self, key: str, seen: Seen) -> _Possible:
        history = self._history.get(key, [])
        present = frozenset(seen.seqs)
        questions = [outcome.step.labels for outcome in history if outcome.fate == "unknown"]
        asked = (key, present & set(itertools.chain(*questions)))
        if asked not in self._known:
            self._known[asked] = list(_possibilities(key, history, present))
        gapless = seen.last_seq == len(seen.seqs)
        for possible in self._known[asked]:
            if possible.look == seen.look:
                _demand(
                    not gapless or seen.below_floor == possible.below_floor,
                    f"{key!r}: {seen.below_floor} below the floor, not {possible.below_floor}",
                )
                return possible
        raise Violation(_difference(key, history, seen.look, self._known[asked]))


def _possibilities(
    key: str, history: Sequence[Outcome], present: frozenset[str]
) -> Iterable[_Possible]:
    """Every way it may have gone, given which messages are there."""
    everywhere = [label for outcome in history for label in outcome.step.labels]
    choices: list[tuple[bool, ...]] = []
    late: list[int] = []
    for outcome in history:
        if outcome.fate == "unknown":
            labels = set(outcome.step.labels)
            half = labels & present
            _demand(not half or half == labels, f"{key!r}: half of it is there: {outcome.step}")
            # A message that only this step can have brought tells whether the step happened.
            decided = bool(labels) and all(everywhere.count(label) == 1 for label in labels)
            if outcome.late:
                late.append(len(choices))
            choices.append((bool(half),) if decided and not outcome.late else (True, False))
    questions = sum(len(choice) > 1 for choice in choices) - len(late)
    _demand(questions <= _MAX_OPEN_QUESTIONS, f"{key!r}: {questions} calls ended as MaybeStored")
    for count in range(len(late) + 1):
        for number, place in enumerate(late):
            choices[place] = (number < count,)
        for taken in itertools.product(*choices):
            model = _replay(history, taken)
            if model is None:
                continue
            # It kept a message by repeating it; had it not been there, it would be there twice.
            with contextlib.suppress(Violation):
                seen = look(model, key)
                yield _Possible(taken, seen.look, seen.below_floor)


def _decided(history: Sequence[Outcome], taken: Sequence[bool]) -> list[Outcome]:
    choice = iter(taken)
    return [
        replace(outcome, fate="acked" if next(choice) else "absent", told=False)
        if outcome.fate == "unknown"
        else outcome
        for outcome in history
    ]


def _difference(
    key: str, history: Sequence[Outcome], found: Look, possible: Sequence[_Possible]
) -> str:
    acked = {
        label: outcome.step
        for outcome in history
        if outcome.fate == "acked"
        for label in outcome.step.labels
    }
    lost = [label for label in acked if label not in dict(found.messages)]
    said = "\n".join(f"  {outcome}" for outcome in history[-6:])
    wanted = "\n".join(f"  {one.look}" for one in possible[:4]) or "  nothing that fits"
    return (
        f"{key!r}: {len(lost)} acknowledged messages lost {lost[:5]}\nfound\n  {found}\n"
        f"possible\n{wanted}\nthe last of what was said\n{said}"
    )


def _check_seqs(key: str, seen: Seen, history: Sequence[Outcome]) -> None:
    """Seqs are as acknowledged, and missing only where a write was not finished."""
    unfinished = False
    last = 0
    counted: set[str] = set()
    for outcome in history:
        step = outcome.step
        # Which of two steps that cancel each other was cut short cannot be told from outside.
        unfinished = unfinished or outcome.fate == "absent" or not outcome.told
        if outcome.fate != "acked" or not step.labels or step.labels[0] in counted:
            continue
        counted.update(step.labels)
        real = [seen.seqs[label] for label in step.labels]
        if outcome.told and step.op != "set_history":
            _demand(
                real == outcome.result, f"{key!r}: {step} was told {outcome.result}, has {real}"
            )
        _demand(real == list(range(real[0], real[0] + len(real))), f"{key!r}: {step} has {real}")
        _demand(
            real[0] == last + 1 or (unfinished and real[0] > last),
            f"{key!r}: seqs {last + 1} to {real[0] - 1} are missing, and every write was finished",
        )
        last, unfinished = real[-1], False


def _probe(
    store: Store, key: str, seen: Seen, history: Sequence[Outcome], number: int
) -> tuple[Look, list[Outcome]]:
    """Ask again what carries a token, then append: both must work as if nothing had happened."""
    expected, made = seen.look, list[Outcome]()
    before = seen.last_seq
    tokened = [outcome for outcome in history if outcome.step.once is not None][-1:]
    for outcome in tokened:
        again = msgspec.structs.replace(outcome.step, op="add_messages")
        result = perform(store, again)
        if again.labels[0] in seen.seqs:
            first = [seen.seqs[label] for label in again.labels]
            _demand(result == first, f"{key!r}: token {again.once} gave {result}, not {first}")
        else:
            expected = _with(expected, again.labels)
            before = result[-1]
        made.append(Outcome(again, "acked", result))
    step = Step("add_message", key, (f"probe{number}.60",))
    result = perform(store, step)
    _demand(result[0] > before, f"{key!r}: seq {result[0]} was given out twice")
    made.append(Outcome(step, "acked", result))
    return _with(expected, step.labels), made


def _with(before: Look, labels: Sequence[str]) -> Look:
    added = tuple((label, False) for label in labels)
    return replace(before, messages=before.messages + added)


def _take_everything_back(store: Store, key: str, history: Sequence[Outcome]) -> list[Outcome]:
    model = _replay(history, ())
    assert model is not None, "the model took all this a moment ago"
    made: list[Outcome] = []
    steps = [Step("undo", key)] * look(store, key).look.undoable
    steps += [Step("clear", key), Step("compact", key)]
    for step in steps:
        result = perform(store, step)
        _demand(
            json.dumps(result) == json.dumps(perform(model, step)),
            f"{key!r}: {step} gave {result}, not what the model gives",
        )
        seen, wanted = look(store, key).look, look(model, key).look
        _demand(seen == wanted, f"{key!r}: after {step} {seen}, not {wanted}")
        made.append(Outcome(step, "acked", result))
    return made


def _compare(store: Store, key: str, history: Sequence[Outcome], when: str) -> None:
    model = _replay(history, ())
    assert model is not None, "the model took all this a moment ago"
    seen, wanted = look(store, key).look, look(model, key).look
    _demand(seen == wanted, f"{key!r}: {when} it is {seen}, not {wanted}")


def acknowledged(history: Iterable[Outcome]) -> Mapping[str, int]:
    """How many messages each session was told that it has."""
    counts: dict[str, int] = {}
    for outcome in history:
        if outcome.fate == "acked" and outcome.step.op != "again":
            counts[outcome.step.key] = counts.get(outcome.step.key, 0) + len(outcome.step.labels)
    return counts
