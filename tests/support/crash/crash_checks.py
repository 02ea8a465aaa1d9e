"""Compares a store with the lines that a run reported before it was interrupted.

The model is InMemoryStore: the acknowledged steps are replayed on it, and the store must equal it,
with or without the step that was in progress. Seqs may differ (those of an unfinished write are
never used again), so messages are compared by label, and seqs by separate rules.
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
from stenolog import errors
from stenolog.errors import NoSuchSession, StenologError, UsageError
from stenolog.maintenance.log_damage import Kind
from stenolog.maintenance.repair import repair
from stenolog.maintenance.workspace_check import examine
from stenolog.stores.base import FORKED_AT, Store
from stenolog.stores.in_memory import InMemoryStore
from support.crash.workload import ENDINGS, FORK, OPEN, Line, Step, label_of, message, perform

Fate = Literal["acked", "refused", "absent", "unknown"]
Taken = bool | Step
"""Whether an unknown step is assumed to have happened, or a replacement step.

A purge may have reached only some sessions of a key; it is then repeated.
"""

_HALF_PURGE: Final = "half a purge"
_ENDINGS: Final = (*ENDINGS, _HALF_PURGE)

_MAX_OPEN_QUESTIONS: Final = 10


class Violation(AssertionError):
    """A promise that the store broke."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a step: acknowledged, rejected as a wrong call, certainly absent, or unknown."""

    step: Step
    fate: Fate
    result: Any = None
    """Return value of an acknowledged step, or the name of the error."""
    told: bool = True
    """Whether the caller learned the outcome; otherwise the checks found it out."""
    late: bool = False
    """Reported during the power cut: if this step is stored, all earlier late ones are too."""


@dataclass(frozen=True, slots=True)
class Look:
    """A session as a reader sees it; equal looks mean equal sessions.

    A missing session equals an empty one, because an interrupted first call may leave either.
    """

    messages: tuple[tuple[str, bool], ...] = ()
    """Label and hidden flag of every message, including archived ones."""
    summary: str = ""
    meta: str = "{}"
    undoable: int = 0
    forks: tuple[tuple[str, "Look"], ...] = ()
    """Sessions that were forked from it."""
    trash: tuple[tuple[str, int], ...] = ()
    """Its deleted sessions and their numbers of messages."""


@dataclass(slots=True)
class Seen:
    """A look and its seqs."""

    look: Look
    seqs: dict[str, int] = field(default_factory=dict)
    last_seq: int = 0
    below_floor: int = 0


# --- outcomes of a run -----------------------------------------------------------------------


def outcomes(lines: Sequence[Line], *, certain: int | None = None) -> list[Outcome]:
    """Return the steps of a run and their outcomes. Raises Violation for an untyped error.

    Lines after the first `certain` ones were sent during the power cut.
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
    # The disk failed. A rejection would bind the model to the state before.
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
    # Each append of a group is stored completely or not at all.
    return [Step("add_full_message", step.key, (label,)) for label in step.labels]


def _fate(error: str) -> Fate:
    kind = getattr(errors, error)
    if issubclass(kind, errors.MaybeStored):
        return "unknown"
    return "refused" if issubclass(kind, UsageError) else "absent"


# --- reading ---------------------------------------------------------------------------------


def look(store: Store, key: str) -> Seen:
    """Read a session, its forks and deleted sessions. Raises Violation if they are inconsistent."""
    seen = _look(store, key)
    forks = store.list_sessions(prefix=key + FORK)
    seen.look = replace(
        seen.look,
        forks=tuple((fork, _look(store, fork).look) for fork in forks),
        trash=tuple((t.key, t.count) for t in store.admin.list_trash() if _family(t.key) == key),
    )
    return seen


def _family(key: str) -> str:
    return key.partition(FORK)[0]


def _look(store: Store, key: str) -> Seen:
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
            # Without that seq: failed writes may have used seqs here but not in the model.
            meta=json.dumps(
                {name: value for name, value in info.meta.items() if name != FORKED_AT},
                sort_keys=True,
            ),
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


def _replay(
    history: Sequence[Outcome], taken: Sequence[Taken], *, disk_fails: bool = False
) -> InMemoryStore | None:
    """Return the model after the acknowledged steps and the assumed unknown ones.

    Returns None if the model contradicts a reported result, because the assumption is then wrong.
    If the disk itself fails, a read is no promise: data that a failed sync left in the kernel's
    cache may be visible and later be lost.
    """
    model = InMemoryStore()
    choice = iter(taken)
    doubtful = False
    for outcome in history:
        happened: Taken = next(choice) if outcome.fate == "unknown" else outcome.fate != "absent"
        if not happened:
            doubtful = doubtful or (disk_fails and outcome.fate == "unknown")
            continue
        step, error = happened if isinstance(happened, Step) else outcome.step, None
        try:
            result = _repeat(model, step)
        except UsageError as raised:
            result, error = None, type(raised).__name__
            if step.op == "purge" and outcome.fate == "acked":
                error = None  # it only had to remove hidden messages
        except KeyError:
            # Under this assumption the step refers to a missing message.
            return None
        if outcome.fate == "refused":
            if error != outcome.result:
                return None
        elif error is not None:
            return None
        elif outcome.fate == "acked" and not (doubtful and step.op == "read"):
            agrees = _same(result, outcome)
            if not agrees:
                return None
    return model


def _repeat(model: InMemoryStore, step: Step) -> Any:
    if step.op != _HALF_PURGE:
        return perform(model, step)
    # The live session, if any, is the first.
    with contextlib.suppress(NoSuchSession):
        model.delete(step.key)
        if not step.keep & 1:
            model.admin.restore(step.key)
    entries = [trashed.uid for trashed in model.admin.list_trash() if trashed.key == step.key]
    alive = step.key in model.list_sessions()
    for number, uid in enumerate(entries, alive):
        if step.keep & 1 << number:
            model.admin.restore(step.key, uid=uid, as_key="to be purged")
            model.admin.purge("to be purged")
    return None


def _halves(key: str) -> tuple[Step, ...]:
    """Return each choice of up to three sessions except all and none."""
    return tuple(Step(_HALF_PURGE, key, keep=gone) for gone in range(1, 7))


def _same(result: Any, outcome: Outcome) -> bool:
    if not outcome.told or outcome.step.op == "purge":
        return True
    if outcome.step.labels and outcome.step.op != "set_history":
        return len(result) == len(outcome.result)
    return bool(json.loads(json.dumps(result)) == outcome.result)


@dataclass(frozen=True, slots=True)
class _Possible:
    taken: tuple[Taken, ...]
    look: Look
    below_floor: int


class Judge:
    """Checks any number of stores against the same history."""

    def __init__(self, history: Iterable[Outcome], *, disk_fails: bool = False) -> None:
        self._disk_fails = disk_fails
        self._history: dict[str, list[Outcome]] = {}
        for outcome in history:
            self._history.setdefault(_family(outcome.step.key), []).append(outcome)
        self._known: dict[tuple[str, frozenset[str]], list[_Possible]] = {}

    def judge(self, where: Path, *, probe: int = 0, thorough: bool = False) -> list[Outcome]:
        """Check a store and return what really happened, including the probes. Raises Violation.

        Reads without writing, opens, compares, repeats unknown steps that have an idempotency key,
        appends to every session, opens again and compares again. `thorough` also undoes everything
        step by step, and compacts. The labels of probes contain the number.
        """
        try:
            return self._judge(where, probe, thorough=thorough)
        except StenologError as error:
            raise Violation(f"the store does not work any more: {error!r}") from error

    def _judge(self, where: Path, probe: int, *, thorough: bool) -> list[Outcome]:
        untouched: dict[str, Look] = {}
        if _holds_a_store(where):
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
                settled[key] = _decided(
                    self._history.get(key, ()), possible.taken, disk_fails=self._disk_fails
                )
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
        with stenolog.open_store(str(where)) as store:
            if thorough:
                for key, history in settled.items():
                    _compare(store, key, history, "taken back, compacted and opened again")
            for key in settled:
                settled[key] += _purge_again(store, key, self._history.get(key, []), settled[key])
            if thorough:
                for key, history in settled.items():
                    _empty_the_trash(store, key, history)
        if thorough and not str(where).startswith("sqlite:"):
            _see_the_doctor(where)
        return [outcome for history in settled.values() for outcome in history]

    def _keys(self, store: Store) -> list[str]:
        there = [*store.list_sessions(), *(trashed.key for trashed in store.admin.list_trash())]
        strange = {_family(key) for key in there} - self._history.keys()
        _demand(not strange, f"sessions that nobody made: {strange}")
        return list(self._history)

    def _settle(self, key: str, seen: Seen) -> _Possible:
        history = self._history.get(key, [])
        present = frozenset(seen.seqs)
        questions = [outcome.step.labels for outcome in history if outcome.fate == "unknown"]
        asked = (key, present & set(itertools.chain(*questions)))
        if asked not in self._known:
            self._known[asked] = list(
                _possibilities(key, history, present, disk_fails=self._disk_fails)
            )
        gapless = seen.last_seq == len(seen.seqs)
        for possible in self._known[asked]:
            if possible.look == seen.look:
                _demand(
                    not gapless or seen.below_floor == possible.below_floor,
                    f"{key!r}: {seen.below_floor} below the floor, not {possible.below_floor}",
                )
                return possible
        raise Violation(_difference(key, history, seen.look, self._known[asked]))


def _holds_a_store(where: Path) -> bool:
    file = str(where)
    if file.startswith("sqlite:"):
        return Path(file.removeprefix("sqlite:")).exists()
    return (where / "sessions").exists()


def _possibilities(
    key: str, history: Sequence[Outcome], present: frozenset[str], *, disk_fails: bool
) -> Iterable[_Possible]:
    """Yield every possible course of events, given the messages that are stored."""
    everywhere = [label for outcome in history for label in outcome.step.labels]
    choices: list[tuple[Taken, ...]] = []
    late: list[int] = []
    halves: dict[int, tuple[Taken, ...]] = {}
    for place, outcome in enumerate(history):
        if outcome.fate == "unknown":
            labels = set(outcome.step.labels)
            half = labels & present
            # A deleted session may have contained it, and a purge can cut anywhere.
            ended = any(other.step.op in _ENDINGS for other in history[place:])
            _demand(
                ended or not half or half == labels,
                f"{key!r}: half of it is there: {outcome.step}",
            )
            # A message that only this step can have stored shows whether the step happened.
            decided = bool(labels) and all(everywhere.count(label) == 1 for label in labels)
            if outcome.late:
                late.append(len(choices))
                if outcome.step.op == "purge":
                    halves[len(choices)] = tuple(_halves(key))
            if decided and not ended and not outcome.late:
                choices.append((bool(half),))
            else:
                both: tuple[Taken, ...] = (True, False)
                choices.append((*both, *_halves(key)) if outcome.step.op == "purge" else both)
    questions = sum(len(choice) > 1 for choice in choices) - len(late)
    _demand(questions <= _MAX_OPEN_QUESTIONS, f"{key!r}: {questions} calls ended as MaybeStored")
    for count in range(len(late) + 1):
        for number, place in enumerate(late):
            # The first step that did not complete may be a partial purge.
            partly = halves.get(place, ()) if number == count else ()
            choices[place] = (number < count, *partly)
        for taken in itertools.product(*choices):
            model = _replay(history, taken, disk_fails=disk_fails)
            if model is None:
                continue
            # The step was repeated; if the message had been stored, it would be there twice.
            with contextlib.suppress(Violation):
                seen = look(model, key)
                yield _Possible(taken, seen.look, seen.below_floor)


def _decided(
    history: Sequence[Outcome], taken: Sequence[Taken], *, disk_fails: bool
) -> list[Outcome]:
    """Return what happened. Leaves out the reads that `_replay` does not compare."""
    choice = iter(taken)
    found = []
    doubtful = False
    for outcome in history:
        if outcome.fate == "unknown":
            happened = next(choice)
            doubtful = doubtful or (disk_fails and not happened)
            step = happened if isinstance(happened, Step) else outcome.step
            fate: Fate = "acked" if happened else "absent"
            found.append(replace(outcome, step=step, fate=fate, told=False))
        elif not (doubtful and outcome.step.op == "read"):
            found.append(outcome)
    return found


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
    """Check that seqs are as acknowledged, with gaps only at unfinished writes."""
    unfinished = False
    ended = any(outcome.step.op in _ENDINGS for outcome in history)
    last = 0
    counted: set[str] = set()
    for outcome in history:
        step = outcome.step
        if step.op in _ENDINGS:
            # Another session, or the start was purged: counting continues from any seq.
            last = 0
            continue
        if outcome.fate == "acked" and not set(step.labels) <= seen.seqs.keys():
            unfinished = True  # in another session, or purged
            continue
        # It is not visible which of two steps that cancel each other was interrupted.
        unfinished = unfinished or outcome.fate == "absent" or not outcome.told
        if outcome.fate != "acked" or not step.labels or step.labels[0] in counted:
            continue
        real = [seen.seqs[label] for label in step.labels]
        if ended and outcome.told and real != outcome.result and _told_later(step, real, history):
            unfinished = True  # the first messages were purged, or are in another session
            continue
        counted.update(step.labels)
        if outcome.told and step.op != "set_history":
            _demand(
                real == outcome.result, f"{key!r}: {step} was told {outcome.result}, has {real}"
            )
        _demand(real == list(range(real[0], real[0] + len(real))), f"{key!r}: {step} has {real}")
        _demand(
            real[0] == last + 1 or ((unfinished or ended) and real[0] > last),
            f"{key!r}: seqs {last + 1} to {real[0] - 1} are missing, and every write was finished",
        )
        last, unfinished = real[-1], False


def _told_later(step: Step, real: list[int], history: Sequence[Outcome]) -> bool:
    same = [o for o in history if o.fate == "acked" and o.step.labels == step.labels]
    return any(not outcome.told or outcome.result == real for outcome in same)


def _probe(
    store: Store, key: str, seen: Seen, history: Sequence[Outcome], number: int
) -> tuple[Look, list[Outcome]]:
    """Repeat steps with an idempotency key, then append: both must work normally."""
    expected, made = seen.look, list[Outcome]()
    before = seen.last_seq
    tokened = [
        outcome
        for outcome in history
        if outcome.step.once is not None
        and len(seen.seqs.keys() & set(outcome.step.labels)) in (0, len(outcome.step.labels))
    ][-1:]
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


def _purge_again(
    store: Store, key: str, said: Sequence[Outcome], history: Sequence[Outcome]
) -> list[Outcome]:
    """Repeat an interrupted purge and check that it is complete."""
    made: list[Outcome] = []
    for outcome in said:
        step = outcome.step
        if outcome.fate != "unknown" or step.op not in ("purge", "purge_before"):
            continue
        model = _replay([*history, *made], ())
        assert model is not None, "the model took all this a moment ago"
        again = Outcome(step, "acked", told=False)
        wanted = result = 0
        with contextlib.suppress(NoSuchSession, KeyError):
            wanted = perform(model, step)
            made.append(again)
        with contextlib.suppress(NoSuchSession, KeyError):
            result = perform(store, step)
        # Including messages that were hidden already.
        _demand(result >= wanted, f"{key!r}: made again, {step} gave {result}, not {wanted}")
        _compare(store, key, [*history, *made], f"purged again by {step}")
    return made


def _empty_the_trash(store: Store, key: str, history: Sequence[Outcome]) -> None:
    """Check that every deleted session can be restored, and that a purge then removes all."""
    model = _replay(history, ())
    assert model is not None, "the model took all this a moment ago"
    entries = [t.uid for t in store.admin.list_trash() if t.key == key]
    for number, uid in enumerate(entries):
        other = f"{key} session {number}"
        store.admin.restore(key, uid=uid, as_key=other)
        model.admin.restore(key, as_key=other)
        seen, wanted = look(store, other).look, look(model, other).look
        _demand(seen == wanted, f"{key!r}: restored it is {seen}, not {wanted}")
        store.admin.purge(other)
    for fork in store.list_sessions(prefix=key + FORK):
        store.admin.purge(fork)
    with contextlib.suppress(NoSuchSession):
        store.admin.purge(key)
    found = look(store, key).look
    _demand(found == Look(), f"{key!r}: after a purge {found}")


def _see_the_doctor(where: Path) -> None:
    """Check that repair quarantines remains of purged sessions and finds no damage."""
    repair(where)
    found = [f for f in examine(where).findings if f.kind is not Kind.WIDE_PERMISSIONS]
    _demand(not found, f"the doctor finds {found}")


def _compare(store: Store, key: str, history: Sequence[Outcome], when: str) -> None:
    model = _replay(history, ())
    assert model is not None, "the model took all this a moment ago"
    seen, wanted = look(store, key).look, look(model, key).look
    _demand(seen == wanted, f"{key!r}: {when} it is {seen}, not {wanted}")


def acknowledged(history: Iterable[Outcome]) -> Mapping[str, int]:
    """Return how many messages were acknowledged for each session."""
    counts: dict[str, int] = {}
    for outcome in history:
        if outcome.fate == "acked" and outcome.step.op != "again":
            counts[outcome.step.key] = counts.get(outcome.step.key, 0) + len(outcome.step.labels)
    return counts
