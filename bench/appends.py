"""Rows about writing, each compared with a bare loop in the same run.

They cover one append, many sessions at once, many writers of one session, and the operations that
hide or summarize messages.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import stenolog
from measure import Context, Measurement, Rate, alternate, percentiles, run_threads, time_calls
from messages import payload, sample

_MESSAGES = sample(997)
_LINES = [payload(message) + b"\n" for message in _MESSAGES]
_BATCH = 500
_BLOCK = 50


class BareFile:
    """The lower limit: a file to which the same bytes are written with `write` and `fdatasync`."""

    def __init__(self, file: Path, *, history: int = 1) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        self._lines = cycle(_LINES)
        # The file is as long as the compared log: file systems may treat long files differently.
        for _ in range(0, history, _BATCH):
            many = b"".join(next(self._lines) for _ in range(min(history, _BATCH)))
            os.write(self._file, many)
        os.fsync(self._file)

    def append(self) -> None:
        """Write one line and sync it."""
        os.write(self._file, next(self._lines))
        os.fdatasync(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._file)


def workspace(context: Context) -> str:
    """Return the path of the workspace of this run."""
    return str(context.folder / "workspace")


def fill(store: stenolog.Store, key: str, count: int, *, one_by_one: int = 0) -> None:
    """Fill a session up to `count` messages, the last `one_by_one` of them with a call each.

    An agent writes one message at a time. The lines of a batch are a little longer.
    """
    try:
        present = store.info(key).last_seq
    except stenolog.NoSuchSession:
        present = 0
    messages = cycle(_MESSAGES)
    while present < count - one_by_one:
        batch = [next(messages) for _ in range(min(_BATCH, count - one_by_one - present))]
        present = store.add_messages(key, batch)[-1]
    while present < count:
        present = store.add_full_message(key, next(messages))


def _appender(store: stenolog.Store, key: str) -> Callable[[], int]:
    messages = cycle(_MESSAGES)
    return lambda: store.add_full_message(key, next(messages))


def _unique(name: str) -> str:
    return f"{name}-{uuid4().hex[:12]}"


def one_append(context: Context, *, history: int) -> Measurement:
    """Measure the p50 of one durable append, as a multiple of the bare loop's."""
    key = f"long-{history}" if history > 1000 else _unique(f"append-{history}")
    with (
        stenolog.open_store(workspace(context)) as store,
        BareFile(context.folder / _unique("bare"), history=max(history, 1)) as bare,
    ):
        fill(store, key, history)
        append = _appender(store, key)
        append()
        bare_times, times = alternate(
            context.times(40),
            lambda: time_calls(_BLOCK, bare.append),
            lambda: time_calls(_BLOCK, append),
        )
    raw, ours = percentiles(bare_times), percentiles(times)
    return Measurement(measured=ours["p50_us"] / raw["p50_us"], ours=ours, raw=raw)


def append_once(context: Context, *, history: int, size: int) -> Measurement:
    """Measure the p50 of an append with an idempotency key, as a multiple of an append without.

    The session is read from disk first.
    """
    texts = cycle([word * (size // len(word)) for word in ("one ", "two ", "three ")])
    numbers = iter(range(1_000_000))
    plain, keyed = _unique("plain"), _unique("once")

    def message() -> dict[str, Any]:
        return {"role": "user", "content": next(texts)}

    with stenolog.open_store(workspace(context)) as store:
        for key in (plain, keyed):
            for _ in range(0, history, _BLOCK):
                store.add_messages(key, [message() for _ in range(_BLOCK)])
    # A new store has not read either session.
    with stenolog.open_store(workspace(context)) as store:

        def append() -> int:
            return store.add_full_message(plain, message())

        def append_keyed() -> int:
            return store.add_full_message(keyed, message(), once=f"request-{next(numbers)}")

        first = {
            "first_plain_us": time_calls(1, append),
            "first_once_us": time_calls(1, append_keyed),
        }
        plain_times, times = alternate(
            context.times(40),
            lambda: time_calls(_BLOCK, append),
            lambda: time_calls(_BLOCK, append_keyed),
        )
    raw, ours = percentiles(plain_times), percentiles(times)
    return Measurement(
        measured=ours["p50_us"] / raw["p50_us"],
        ours=ours,
        raw=raw,
        others={name: round(took * 1e6, 2) for name, [took] in first.items()},
    )


def many_sessions(context: Context, *, count: int) -> Measurement:
    """Measure the rate of `count` threads, each with a session, as a share of bare files' rate."""
    raw, ours = Rate(), Rate()
    with ExitStack() as stack:
        store = stack.enter_context(stenolog.open_store(workspace(context)))
        appends = [_appender(store, _unique("many")) for _ in range(count)]
        bares = [stack.enter_context(BareFile(context.folder / _unique("bare"))) for _ in appends]
        for append in appends:
            append()
        for _ in range(2):
            run_threads([bare.append for bare in bares], context.seconds(1.2), raw)
            run_threads(appends, context.seconds(1.2), ours)
    return Measurement(
        measured=ours.per_second / raw.per_second, ours=ours.stats(), raw=raw.stats()
    )


def many_writers(context: Context, *, count: int) -> Measurement:
    """Measure the rate of `count` threads on one session, as a multiple of one thread's."""
    alone, together, bare_rate = Rate(), Rate(), Rate()
    key = _unique("writers")
    with (
        stenolog.open_store(workspace(context)) as store,
        BareFile(context.folder / _unique("bare")) as bare,
    ):
        appends = [_appender(store, key) for _ in range(count)]
        appends[0]()
        for _ in range(2):
            run_threads([bare.append], context.seconds(0.6), bare_rate)
            run_threads(appends[:1], context.seconds(1.0), alone)
            run_threads(appends, context.seconds(1.0), together)
    return _compare_with_one_writer(alone, together, bare_rate)


def many_tasks(context: Context, *, count: int) -> Measurement:
    """Measure the rate of `count` asyncio tasks on one session, as a multiple of one thread's."""
    alone, together, bare_rate = Rate(), Rate(), Rate()
    key = _unique("tasks")

    async def run() -> None:
        with (
            stenolog.open_store(workspace(context)) as store,
            BareFile(context.folder / _unique("bare")) as bare,
        ):
            append = _appender(store, key)
            append()
            shared = stenolog.AsyncStore(store)
            for _ in range(2):
                run_threads([bare.append], context.seconds(0.6), bare_rate)
                run_threads([append], context.seconds(1.0), alone)
                await _run_tasks(shared, key, count, context.seconds(1.0), together)

    asyncio.run(run())
    return _compare_with_one_writer(alone, together, bare_rate)


async def _run_tasks(
    store: stenolog.AsyncStore, key: str, count: int, seconds: float, rate: Rate
) -> None:
    durations: list[float] = []
    start = perf_counter()

    async def work(messages: Iterator[dict[str, Any]]) -> None:
        now = perf_counter()
        while now < start + seconds:
            before = now
            await store.add_full_message(key, next(messages))
            now = perf_counter()
            durations.append(now - before)

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(work(cycle(_MESSAGES)))
    rate.add(perf_counter() - start, durations)


def _compare_with_one_writer(alone: Rate, together: Rate, bare: Rate) -> Measurement:
    return Measurement(
        measured=together.per_second / alone.per_second,
        ours=together.stats(),
        raw=alone.stats(),
        others={"bare_per_second": round(bare.per_second, 1)},
    )


def one_operation(context: Context, *, operation: str) -> Measurement:
    """Measure the p50 of an operation that hides or summarizes, as a multiple of one append's."""
    key = _unique(operation)
    with (
        stenolog.open_store(workspace(context)) as store,
        BareFile(context.folder / _unique("bare")) as bare,
    ):
        fill(store, key, 1000)
        append = _appender(store, key)
        run_operation = _OPERATIONS[operation](store, key)
        # Eight operations can be undone, so all operations run in blocks of eight.
        bare_times, append_times, times = alternate(
            context.times(60),
            lambda: time_calls(8, bare.append),
            lambda: time_calls(8, append),
            lambda: run_operation(8),
        )
    raw, ours = percentiles(append_times), percentiles(times)
    return Measurement(
        measured=ours["p50_us"] / raw["p50_us"],
        ours=ours,
        raw=raw,
        others={"bare_p50_us": percentiles(bare_times)["p50_us"]},
    )


Operation = Callable[[int], list[float]]


def _truncate(store: stenolog.Store, key: str) -> Operation:
    def run_operation(times: int) -> list[float]:
        kept = iter(range(store.info(key).visible - 1, 0, -1))
        return time_calls(times, lambda: store.truncate_history(key, next(kept)))

    return run_operation


def _checkpoint(store: stenolog.Store, key: str) -> Operation:
    summaries = _summaries()

    def run_operation(times: int) -> list[float]:
        ends = iter(range(store.info(key).floor + 1, store.info(key).last_seq))
        return time_calls(
            times, lambda: store.checkpoint(key, summary=next(summaries), upto=next(ends))
        )

    return run_operation


def _set_summary(store: stenolog.Store, key: str) -> Operation:
    summaries = _summaries()
    return lambda times: time_calls(times, lambda: store.set_summary(key, next(summaries)))


def _hide(store: stenolog.Store, key: str) -> Operation:
    seqs = iter(range(100, 1000))

    def hide_next() -> None:
        seq = next(seqs)
        store.admin.hide(key, seq, seq)

    return lambda times: time_calls(times, hide_next)


def _undo(store: stenolog.Store, key: str) -> Operation:
    summaries = _summaries()

    def run_operation(times: int) -> list[float]:
        for _ in range(times):
            store.set_summary(key, next(summaries))
        return time_calls(times, lambda: store.undo(key))

    return run_operation


def _summaries() -> Iterator[str]:
    return cycle([message["content"] for message in _MESSAGES if message["role"] == "tool"])


_OPERATIONS: dict[str, Callable[[stenolog.Store, str], Operation]] = {
    "truncate": _truncate,
    "checkpoint": _checkpoint,
    "set_summary": _set_summary,
    "hide": _hide,
    "undo": _undo,
}
