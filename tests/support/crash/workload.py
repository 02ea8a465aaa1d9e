"""One scripted run of every operation.

The run reports each operation before it starts and its result, so that a check knows afterwards
what must be in the store, what may be, and what must not.
"""

import itertools
import json
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

import stenolog
from stenolog.errors import StenologError
from stenolog.stores.arguments import make_batch
from stenolog.stores.base import Store
from stenolog.stores.jsonl import JSONLStore
from support.group_appends import append_as_group

OPEN: Final = "open"

OPERATIONS: Final = (
    "create",
    "add_message",
    "add_full_message",
    "again",
    "add_messages",
    "add_group",
    "set_summary",
    "truncate_history",
    "clear",
    "set_history",
    "hide",
    "show",
    "pop",
    "checkpoint",
    "undo",
    "compact",
    "set_meta",
    OPEN,
    "fork",
    "delete",
    "restore",
    "purge_before",
    "purge",
)
"""All operations of a run, by the names under which they are targeted and counted."""

ENDINGS: Final = ("delete", "restore", "purge_before", "purge")
"""Operations that may move or remove existing messages."""

FORK: Final = "/fork "
"""Separates the key of a source session from the rest of its fork's key."""

# One pass over all operations, each where it has an effect. `a` grows from pass to pass, the other
# sessions start again, each with another operation that creates one.
SCRIPT: Final = (
    ("create", "new"),
    ("add_message", "a"),
    ("add_full_message", "a"),
    ("again", "a"),
    ("add_messages", "a"),
    ("read", "a"),
    ("set_summary", "a"),
    ("add_group", "a"),
    ("truncate_history", "a"),
    ("add_message", "a"),
    ("hide", "a"),
    ("undo", "a"),
    ("checkpoint", "a"),
    ("compact", "a"),
    ("add_messages", "b"),
    ("add_message", "a"),
    ("pop", "a"),
    ("undo", "a"),
    ("show", "a"),
    ("set_meta", "a"),
    ("set_history", "a"),
    ("add_group", "b"),
    ("read", "a"),
    ("undo", "a"),
    ("again", "a"),
    (OPEN, ""),
    ("set_summary", "c"),
    ("add_message", "c"),
    ("clear", "a"),
    ("add_messages", "a"),
    ("set_meta", "d"),
    ("set_history", "e"),
    ("hide", "a"),
    ("compact", "a"),
    ("undo", "a"),
    ("read", "a"),
    ("checkpoint", "b"),
    ("compact", "b"),
    ("add_message", "b"),
    ("truncate_history", "e"),
    ("read", "b"),
    ("fork", "a"),
    ("delete", "b"),
    ("restore", "b"),
    ("add_message", "b"),
    ("purge_before", "b"),
    ("add_messages", "b"),
    ("fork", "b"),
    ("delete", "e"),
    ("add_message", "e"),
    ("delete", "a"),
    ("restore", "a"),
    ("read", "a"),
    ("purge", "e"),
    ("purge_before", "c"),
    ("purge", "d"),
)


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call, described independently of seqs."""

    op: str
    key: str = ""
    labels: tuple[str, ...] = ()
    """Messages that it adds."""
    named: tuple[str, ...] = ()
    """Existing messages that it refers to: kept, first and last hidden, last covered."""
    once: str | None = None
    text: str = ""
    keep: int = 0


def message(label: str) -> dict[str, Any]:
    """Return a message for a label `NAME.SIZE`, with that size and bytes that are hard to parse."""
    size = int(label.rpartition(".")[2])
    return {"role": "user", "content": f"{label} " + ('é\n{"kind":"' * (size // 11 + 1))[:size]}


def label_of(fields: dict[str, Any]) -> str:
    """Return the label of a message from `message`, or "" for any other."""
    return str(fields.get("content", "")).partition(" ")[0]


def perform(store: Store, step: Step) -> Any:
    """Make the call and return its result as JSON, with labels in place of messages."""
    key, messages = step.key, [message(label) for label in step.labels]
    match step.op:
        case "add_message" | "create":
            return [store.add_message(key, messages[0]["role"], messages[0]["content"])]
        case "add_full_message" | "again":
            return [store.add_full_message(key, messages[0], once=step.once)]
        case "add_messages":
            return store.add_messages(key, messages, once=step.once)
        case "add_group":
            return _add_group(store, key, messages)
        case "set_summary":
            store.set_summary(key, step.text)
        case "truncate_history":
            store.truncate_history(key, step.keep)
        case "clear":
            store.clear(key)
        case "set_history":
            store.set_history(key, [*map(message, step.named), *messages])
        case "hide":
            first, last = _seqs(store, step)
            store.admin.hide(key, first, last)
        case "show":
            store.admin.show(key, 1, store.info(key).last_seq)
        case "pop":
            popped = store.pop(key)
            return None if popped is None else label_of(popped.to_dict())
        case "checkpoint":
            store.checkpoint(key, summary=step.text, upto=max(_seqs(store, step), default=0))
        case "undo":
            undone = store.undo(key)
            return [undone.op, undone.shown, undone.hid, undone.summary_restored]
        case "compact":
            store.compact(key)
        case "fork":
            store.fork(key, step.text)
        case "delete":
            return store.delete(key).count
        case "restore":
            store.admin.restore(key)
        case "purge_before":
            return store.admin.purge(key, before=min(_seqs(store, step), default=1)).messages
        case "purge":
            return store.admin.purge(key).messages
        case "set_meta":
            store.set_meta(key, title=step.text, odd=step.keep or None)
        case "read":
            return [labels(store, key), store.get_summary(key)]
        case _:
            raise ValueError(step.op)
    return None


def labels(store: Store, key: str) -> list[str]:
    """Return the labels of the visible messages."""
    return [label_of(found.to_dict()) for found in store.get_history(key)]


def _add_group(store: Store, key: str, messages: list[dict[str, Any]]) -> list[Any]:
    answers: list[int | StenologError]
    if isinstance(store, JSONLStore):
        batches = [make_batch([fields], None, None) for fields in messages]
        answers = append_as_group(store, key, batches)
    else:
        answers = [_try_append(store, key, fields) for fields in messages]
    return [
        type(answer).__name__ if isinstance(answer, StenologError) else [answer]
        for answer in answers
    ]


def _try_append(store: Store, key: str, fields: dict[str, Any]) -> int | StenologError:
    try:
        return store.add_full_message(key, fields)
    except StenologError as error:
        return error


def _seqs(store: Store, step: Step) -> list[int]:
    seqs = {label_of(m.to_dict()): m.seq for m in store.get_history(step.key, full=True)}
    return [seqs[label] for label in step.named]


def plan(op: str, key: str, number: int, visible: Sequence[str], *, size: int = 40) -> Step:
    """Return the next step of this operation, given the visible messages; labels are new."""

    def new(count: int) -> tuple[str, ...]:
        # One in three is several times as long, so that writes end at all offsets of a block.
        return tuple(
            f"{number}{'xyz'[i]}.{size * (1 + 8 * ((number + i) % 3 == 0))}" for i in range(count)
        )

    match op:
        case "create" | "add_message":
            return Step(op, key, new(1))
        case "add_full_message" | "again":
            return Step(op, key, new(1), once=f"token-{number}")
        case "add_messages":
            return Step(op, key, new(3), once=f"token-{number}" if number % 2 else None)
        case "add_group":
            return Step(op, key, new(2))
        case "set_history":
            return Step(op, key, new(2), named=tuple(visible[:2]))
        case "hide" if visible:
            return Step(op, key, named=(visible[len(visible) // 3], visible[len(visible) // 2]))
        case "checkpoint":
            return Step(op, key, named=tuple(visible[1:2]), text=f"summary {number}")
        case "truncate_history":
            return Step(op, key, keep=max(len(visible) - 2, 0))
        case "fork":
            return Step(op, key, text=f"{key}{FORK}{number}")
        case "purge_before":
            return Step(op, key, named=tuple(visible[1:2]))
        case "set_summary" | "set_meta":
            return Step(op, key, text=f"text {number}", keep=number % 2)
        case "hide":
            return Step("add_message", key, new(1))
        case _:
            return Step(op, key)


class Line(msgspec.Struct, frozen=True, array_like=True):
    """A line of a run: BEGIN with a step, then ACK, ERR (a typed error) or BUG; END last."""

    word: str
    number: int = 0
    step: Step | None = None
    result: Any = None
    """The return value and nanoseconds of an ACK; the name and text of an ERR."""


def intents(first: int, passes: int | None) -> Iterator[tuple[int, str, str]]:
    """Yield numbered operations and their sessions, repeatedly until told to stop."""
    numbers = itertools.count(first)
    for turn in itertools.count() if passes is None else range(passes):
        for op, key in SCRIPT:
            number = next(numbers)
            yield number, op, key if key in ("a", "") else f"{key}:{first}:{turn}"


class Run:
    """A run against the store in one folder, reported line by line."""

    def __init__(
        self,
        where: Path,
        report: Callable[[Line], None],
        *,
        size: int = 40,
        patience: float = 5.0,
    ) -> None:
        self._where = where
        self._report = report
        self._size = size
        self._patience = patience
        self._store: Store | None = None
        self._tokened: dict[str, Step] = {}

    def go(self, *, first: int = 0, passes: int | None = 1) -> None:
        """Run all operations in the order of the script; a failed one does not stop the run."""
        for number, op, key in intents(first, passes):
            if op == OPEN and self._store is not None:
                self._say(number, Step(OPEN), self._close)
            if self._store is None and not self._say(number, Step(OPEN), self._open):
                continue
            if op != OPEN:
                self._operate(number, op, key)
        if self._store is not None:
            self._say(0, Step(OPEN), self._close)
        self._report(Line("END"))

    def _operate(self, number: int, op: str, key: str) -> None:
        store = self._store
        assert store is not None
        try:
            visible = labels(store, key)
        except StenologError as error:
            self._report(Line("BEGIN", number, Step("read", key)))
            self._report(Line("ERR", number, result=[type(error).__name__, str(error)]))
            return
        step = plan(op, key, number, visible, size=self._size)
        if op == "again" and key in self._tokened:
            step = msgspec.structs.replace(self._tokened[key], op="again")
        elif step.once is not None and len(step.labels) == 1:
            self._tokened[key] = step
        self._say(number, step, lambda: perform(store, step))

    def _say(self, number: int, step: Step, call: Callable[[], Any]) -> bool:
        self._report(Line("BEGIN", number, step))
        began = time.perf_counter_ns()
        try:
            result = call()
        except StenologError as error:
            self._report(Line("ERR", number, result=[type(error).__name__, str(error)]))
            return False
        except Exception:  # noqa: BLE001 - whatever is not typed is what we are looking for
            self._report(Line("BUG", number, result=traceback.format_exc()))
            return False
        self._report(Line("ACK", number, result=[result, time.perf_counter_ns() - began]))
        return True

    def _open(self) -> None:
        place = str(self._where)
        if place.startswith("sqlite:"):
            file = place.removeprefix("sqlite:")
            self._store = stenolog.SQLiteStore(file, busy_timeout=self._patience)
        else:
            self._store = stenolog.JSONLStore(place, busy_timeout=self._patience)

    def _close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()


def encode_line(line: Line) -> bytes:
    """Encode a line for a channel."""
    return json.dumps(msgspec.to_builtins(line)).encode() + b"\n"


def decode_lines(received: bytes) -> list[Line]:
    """Decode the complete lines."""
    return [msgspec.json.decode(part, type=Line) for part in received.split(b"\n")[:-1]]
