"""Rows about writing, each beside the bare loop in the same run.

One append, many sessions at once, many writers of one session, and the operations that hide or
summarise.
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
from measure import Figure, Place, Rate, in_threads, in_turn, percentiles, timed
from messages import payload, sample

_MESSAGES = sample(997)
_LINES = [payload(message) + b"\n" for message in _MESSAGES]
_BATCH = 500
_BLOCK = 50


class Bare:
    """The limit: the same bytes by `write` and `fdatasync`, and nothing else."""

    def __init__(self, file: Path, *, history: int = 1) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        self._lines = cycle(_LINES)
        # As long as the log beside it: the file system may treat long files otherwise.
        for _ in range(0, history, _BATCH):
            many = b"".join(next(self._lines) for _ in range(min(history, _BATCH)))
            os.write(self._file, many)
        os.fsync(self._file)

    def append(self) -> None:
        """One line, durable."""
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


def workspace(place: Place) -> str:
    """Where the stores of this run live."""
    return str(place.folder / "workspace")


def fill(store: stenolog.Store, key: str, count: int, *, singly: int = 0) -> None:
    """Give a session so many messages, unless it has them; the last ones each by a call of its own.

    An agent writes one at a time, and lines of a batch are a little longer.
    """
    try:
        present = store.info(key).last_seq
    except stenolog.NoSuchSession:
        present = 0
    messages = cycle(_MESSAGES)
    while present < count - singly:
        batch = [next(messages) for _ in range(min(_BATCH, count - singly - present))]
        present = store.add_messages(key, batch)[-1]
    while present < count:
        present = store.add_full_message(key, next(messages))


def _appender(store: stenolog.Store, key: str) -> Callable[[], int]:
    messages = cycle(_MESSAGES)
    return lambda: store.add_full_message(key, next(messages))


def _fresh(name: str) -> str:
    return f"{name}-{uuid4().hex[:12]}"


def one_append(place: Place, *, history: int) -> Figure:
    """The p50 of one durable append, as a multiple of the bare loop's."""
    key = f"long-{history}" if history > 1000 else _fresh(f"append-{history}")
    with (
        stenolog.open_store(workspace(place)) as store,
        Bare(place.folder / _fresh("bare"), history=max(history, 1)) as bare,
    ):
        fill(store, key, history)
        append = _appender(store, key)
        append()
        bare_times, times = in_turn(
            place.times(40),
            lambda: timed(_BLOCK, bare.append),
            lambda: timed(_BLOCK, append),
        )
    raw, ours = percentiles(bare_times), percentiles(times)
    return Figure(measured=ours["p50_us"] / raw["p50_us"], ours=ours, raw=raw)


def append_once(place: Place, *, history: int, size: int) -> Figure:
    """The p50 of an append with a token to a session read from disk, against one without."""
    texts = cycle([word * (size // len(word)) for word in ("one ", "two ", "three ")])
    tokens = iter(range(1_000_000))
    plain, marked = _fresh("plain"), _fresh("once")

    def message() -> dict[str, Any]:
        return {"role": "user", "content": next(texts)}

    with stenolog.open_store(workspace(place)) as store:
        for key in (plain, marked):
            for _ in range(0, history, _BLOCK):
                store.add_messages(key, [message() for _ in range(_BLOCK)])
    # A new store, which knows nothing of either session.
    with stenolog.open_store(workspace(place)) as store:

        def append() -> int:
            return store.add_full_message(plain, message())

        def append_marked() -> int:
            return store.add_full_message(marked, message(), once=f"request-{next(tokens)}")

        first = {"first_plain_us": timed(1, append), "first_once_us": timed(1, append_marked)}
        plain_times, times = in_turn(
            place.times(40),
            lambda: timed(_BLOCK, append),
            lambda: timed(_BLOCK, append_marked),
        )
    raw, ours = percentiles(plain_times), percentiles(times)
    return Figure(
        measured=ours["p50_us"] / raw["p50_us"],
        ours=ours,
        raw=raw,
        others={name: round(took * 1e6, 2) for name, [took] in first.items()},
    )


def many_sessions(place: Place, *, count: int) -> Figure:
    """The rate of so many threads, each on a session of its own, as a share of bare files'."""
    raw, ours = Rate(), Rate()
    with ExitStack() as opened:
        store = opened.enter_context(stenolog.open_store(workspace(place)))
        appends = [_appender(store, _fresh("many")) for _ in range(count)]
        bares = [opened.enter_context(Bare(place.folder / _fresh("bare"))) for _ in appends]
        for append in appends:
            append()
        for _ in range(2):
            in_threads([bare.append for bare in bares], place.seconds(1.2), raw)
            in_threads(appends, place.seconds(1.2), ours)
    return Figure(measured=ours.per_second / raw.per_second, ours=ours.side(), raw=raw.side())


def many_writers(place: Place, *, count: int) -> Figure:
    """The rate of so many threads on one session, as a multiple of one thread's."""
    alone, together, bare_rate = Rate(), Rate(), Rate()
    key = _fresh("writers")
    with (
        stenolog.open_store(workspace(place)) as store,
        Bare(place.folder / _fresh("bare")) as bare,
    ):
        appends = [_appender(store, key) for _ in range(count)]
        appends[0]()
        for _ in range(2):
            in_threads([bare.append], place.seconds(0.6), bare_rate)
            in_threads(appends[:1], place.seconds(1.0), alone)
            in_threads(appends, place.seconds(1.0), together)
    return _against_one_writer(alone, together, bare_rate)


def many_tasks(place: Place, *, count: int) -> Figure:
    """The rate of so many asyncio tasks on one session, as a multiple of one thread's."""
    alone, together, bare_rate = Rate(), Rate(), Rate()
    key = _fresh("tasks")

    async def run() -> None:
        with (
            stenolog.open_store(workspace(place)) as store,
            Bare(place.folder / _fresh("bare")) as bare,
        ):
            append = _appender(store, key)
            append()
            shared = stenolog.AsyncStore(store)
            for _ in range(2):
                in_threads([bare.append], place.seconds(0.6), bare_rate)
                in_threads([append], place.seconds(1.0), alone)
                await _in_tasks(shared, key, count, place.seconds(1.0), together)

    asyncio.run(run())
    return _against_one_writer(alone, together, bare_rate)


async def _in_tasks(
    store: stenolog.AsyncStore, key: str, count: int, seconds: float, rate: Rate
) -> None:
    each: list[float] = []
    start = perf_counter()

    async def work(messages: Iterator[dict[str, Any]]) -> None:
        now = perf_counter()
        while now < start + seconds:
            before = now
            await store.add_full_message(key, next(messages))
            now = perf_counter()
            each.append(now - before)

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(work(cycle(_MESSAGES)))
    rate.add(perf_counter() - start, each)


def _against_one_writer(alone: Rate, together: Rate, bare: Rate) -> Figure:
    return Figure(
        measured=together.per_second / alone.per_second,
        ours=together.side(),
        raw=alone.side(),
        others={"bare_per_second": round(bare.per_second, 1)},
    )


def one_change(place: Place, *, operation: str) -> Figure:
    """The p50 of an operation that hides or summarises, as a multiple of one append's."""
    key = _fresh(operation)
    with (
        stenolog.open_store(workspace(place)) as store,
        Bare(place.folder / _fresh("bare")) as bare,
    ):
        fill(store, key, 1000)
        append = _appender(store, key)
        change = _CHANGES[operation](store, key)
        # Undo goes eight deep; all operations run in blocks of the same length.
        bare_times, append_times, times = in_turn(
            place.times(60),
            lambda: timed(8, bare.append),
            lambda: timed(8, append),
            lambda: change(8),
        )
    raw, ours = percentiles(append_times), percentiles(times)
    return Figure(
        measured=ours["p50_us"] / raw["p50_us"],
        ours=ours,
        raw=raw,
        others={"bare_p50_us": percentiles(bare_times)["p50_us"]},
    )


Change = Callable[[int], list[float]]


def _truncate(store: stenolog.Store, key: str) -> Change:
    def change(times: int) -> list[float]:
        kept = iter(range(store.info(key).visible - 1, 0, -1))
        return timed(times, lambda: store.truncate_history(key, next(kept)))

    return change


def _checkpoint(store: stenolog.Store, key: str) -> Change:
    summaries = _summaries()

    def change(times: int) -> list[float]:
        ends = iter(range(store.info(key).floor + 1, store.info(key).last_seq))
        return timed(times, lambda: store.checkpoint(key, summary=next(summaries), upto=next(ends)))

    return change


def _set_summary(store: stenolog.Store, key: str) -> Change:
    summaries = _summaries()
    return lambda times: timed(times, lambda: store.set_summary(key, next(summaries)))


def _hide(store: stenolog.Store, key: str) -> Change:
    seqs = iter(range(100, 1000))

    def hide_next() -> None:
        seq = next(seqs)
        store.hide(key, seq, seq)

    return lambda times: timed(times, hide_next)


def _undo(store: stenolog.Store, key: str) -> Change:
    summaries = _summaries()

    def change(times: int) -> list[float]:
        for _ in range(times):
            store.set_summary(key, next(summaries))
        return timed(times, lambda: store.undo(key))

    return change


def _summaries() -> Iterator[str]:
    return cycle([message["content"] for message in _MESSAGES if message["role"] == "tool"])


_CHANGES: dict[str, Callable[[stenolog.Store, str], Change]] = {
    "truncate": _truncate,
    "checkpoint": _checkpoint,
    "set_summary": _set_summary,
    "hide": _hide,
    "undo": _undo,
}
