"""Rows about the SQLite store, compared with the bare driver, the JSONL store and a peer.

AddMessage and GetHistory are the benchmarks of the reference projects, run on both engines.
"""

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from uuid import uuid4

import stenolog
from appends import fill, workspace
from measure import Context, Measurement, NotRun, alternate, percentiles, time_calls
from messages import payload, sample
from reads import Peer, touch

Engine = Literal["jsonl", "sqlite"]

_MESSAGES = sample(997)
_PAYLOADS = [payload(message) for message in _MESSAGES]
_BLOCK = 50
_READS = 10


class BareSQLite:
    """The lower limit: one INSERT with its commit through the same driver."""

    def __init__(self, file: Path) -> None:
        try:
            import apsw
        except ImportError as error:
            raise NotRun("apsw is not installed: pip install -e '.[sqlite]'") from error
        self._connection = apsw.Connection(str(file))
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute("CREATE TABLE bare (id INTEGER PRIMARY KEY, body BLOB NOT NULL)")
        self._payloads = cycle(_PAYLOADS)

    def append(self) -> None:
        """Insert one row and commit."""
        self._connection.execute("INSERT INTO bare (body) VALUES (?)", (next(self._payloads),))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()


def store_address(context: Context, engine: Engine) -> str:
    """Return the address of an engine's store in this run."""
    return workspace(context) if engine == "jsonl" else f"sqlite:{context.folder / 'bench.db'}"


def _open_store(context: Context, engine: Engine) -> stenolog.Store:
    try:
        return stenolog.open_store(store_address(context, engine))
    except stenolog.StenologError as error:
        raise NotRun(str(error)) from error


def _appender(store: stenolog.Store, name: str) -> Callable[[], int]:
    messages = cycle(_MESSAGES)
    key = f"{name}-{uuid4().hex[:12]}"
    return lambda: store.add_full_message(key, next(messages))


def sqlite_append(context: Context) -> Measurement:
    """Measure the p50 of one durable append, as a multiple of the bare driver's.

    The JSONL store's p50 is recorded too.
    """
    with (
        BareSQLite(context.folder / f"bare-{uuid4().hex}.db") as bare,
        _open_store(context, "sqlite") as store,
        _open_store(context, "jsonl") as files,
    ):
        append, append_line = _appender(store, "append"), _appender(files, "append")
        bare.append()
        append()
        append_line()
        bare_times, times, line_times = alternate(
            context.times(40),
            lambda: time_calls(_BLOCK, bare.append),
            lambda: time_calls(_BLOCK, append),
            lambda: time_calls(_BLOCK, append_line),
        )
    raw, ours = percentiles(bare_times), percentiles(times)
    return Measurement(
        measured=ours["p50_us"] / raw["p50_us"],
        ours=ours,
        raw=raw,
        others={"jsonl_p50_us": percentiles(line_times)["p50_us"]},
    )


def add_message(context: Context, *, engine: Engine, peer_python: Path) -> Measurement:
    """Measure how many times faster than the peer one durable append is."""
    with (
        _open_store(context, engine) as store,
        Peer(context, peer_python, _MESSAGES[:1]) as peer,
    ):
        append = _appender(store, "add")
        append()
        peer_times, times = alternate(
            context.times(20),
            lambda: _peer_times(peer, "append", _BLOCK),
            lambda: time_calls(_BLOCK, append),
        )
    raw, ours = percentiles(peer_times), percentiles(times)
    return Measurement(measured=raw["p50_us"] / ours["p50_us"], ours=ours, raw=raw)


def get_history(
    context: Context, *, engine: Engine, count: int, cold: bool, peer_python: Path
) -> Measurement:
    """Measure how many times faster than the peer a read of all messages and fields is."""
    key = f"history-{count}"
    with _open_store(context, engine) as store:
        fill(store, key, count)
        messages = [message.to_dict() for message in store.get_history(key)]

    def read(store: stenolog.Store) -> None:
        touch([message.to_dict() for message in store.get_history(key)])

    def read_cold() -> None:
        with stenolog.open_store(store_address(context, engine)) as fresh:
            read(fresh)

    with _open_store(context, engine) as store, Peer(context, peer_python, messages) as peer:
        command = "cold" if cold else "ready"
        _peer_times(peer, command, 1)
        read(store)
        peer_times, times = alternate(
            context.times(16),
            lambda: _peer_times(peer, command, _READS),
            lambda: time_calls(_READS, read_cold if cold else lambda: read(store)),
        )
    raw, ours = percentiles(peer_times), percentiles(times)
    return Measurement(measured=raw["p50_us"] / ours["p50_us"], ours=ours, raw=raw)


def _peer_times(peer: Peer, command: str, times: int) -> list[float]:
    durations: Any = peer.ask(command, times=times)
    return list(durations)
