"""Rows about the SQLite store, beside the bare driver, the JSONL store and the peer.

And the references' own benchmarks, AddMessage and GetHistory, on both engines.
"""

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from uuid import uuid4

import stenolog
from appends import fill, workspace
from measure import Figure, NotRun, Place, in_turn, percentiles, timed
from messages import payload, sample
from reads import Peer, touch

Engine = Literal["jsonl", "sqlite"]

_MESSAGES = sample(997)
_PAYLOADS = [payload(message) for message in _MESSAGES]
_BLOCK = 50
_READS = 10


class BareSQLite:
    """The limit: one INSERT and its commit through the same driver, and nothing else."""

    def __init__(self, file: Path) -> None:
        try:
            import apsw
        except ImportError as error:
            raise NotRun("apsw is not installed: pip install 'stenolog[sqlite]'") from error
        self._connection = apsw.Connection(str(file))
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute("CREATE TABLE bare (id INTEGER PRIMARY KEY, body BLOB NOT NULL)")
        self._payloads = cycle(_PAYLOADS)

    def append(self) -> None:
        """One row, durable."""
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


def where(place: Place, engine: Engine) -> str:
    """Where the store of an engine lives in this run."""
    return workspace(place) if engine == "jsonl" else f"sqlite:{place.folder / 'bench.db'}"


def _opened(place: Place, engine: Engine) -> stenolog.Store:
    try:
        return stenolog.open_store(where(place, engine))
    except stenolog.StenologError as error:
        raise NotRun(str(error)) from error


def _appender(store: stenolog.Store, name: str) -> Callable[[], int]:
    messages = cycle(_MESSAGES)
    key = f"{name}-{uuid4().hex[:12]}"
    return lambda: store.add_full_message(key, next(messages))


def sqlite_append(place: Place) -> Figure:
    """The p50 of one durable append, as a multiple of the bare driver's; JSONL's beside it."""
    with (
        BareSQLite(place.folder / f"bare-{uuid4().hex}.db") as bare,
        _opened(place, "sqlite") as store,
        _opened(place, "jsonl") as files,
    ):
        append, append_line = _appender(store, "append"), _appender(files, "append")
        bare.append()
        append()
        append_line()
        bare_times, times, line_times = in_turn(
            place.times(40),
            lambda: timed(_BLOCK, bare.append),
            lambda: timed(_BLOCK, append),
            lambda: timed(_BLOCK, append_line),
        )
    raw, ours = percentiles(bare_times), percentiles(times)
    return Figure(
        measured=ours["p50_us"] / raw["p50_us"],
        ours=ours,
        raw=raw,
        others={"jsonl_p50_us": percentiles(line_times)["p50_us"]},
    )


def add_message(place: Place, *, engine: Engine, peer_python: Path) -> Figure:
    """How many times faster than the peer one durable append is."""
    with (
        _opened(place, engine) as store,
        Peer(place, peer_python, _MESSAGES[:1]) as peer,
    ):
        append = _appender(store, "add")
        append()
        peer_times, times = in_turn(
            place.times(20),
            lambda: _asked(peer, "append", _BLOCK),
            lambda: timed(_BLOCK, append),
        )
    raw, ours = percentiles(peer_times), percentiles(times)
    return Figure(measured=raw["p50_us"] / ours["p50_us"], ours=ours, raw=raw)


def get_history(
    place: Place, *, engine: Engine, count: int, cold: bool, peer_python: Path
) -> Figure:
    """How many times faster than the peer a read of everything is, every field touched."""
    key = f"history-{count}"
    with _opened(place, engine) as store:
        fill(store, key, count)
        messages = [message.to_dict() for message in store.get_history(key)]

    def read(store: stenolog.Store) -> None:
        touch([message.to_dict() for message in store.get_history(key)])

    def read_cold() -> None:
        with stenolog.open_store(where(place, engine)) as fresh:
            read(fresh)

    with _opened(place, engine) as store, Peer(place, peer_python, messages) as peer:
        ask = "cold" if cold else "ready"
        _asked(peer, ask, 1)
        read(store)
        peer_times, times = in_turn(
            place.times(16),
            lambda: _asked(peer, ask, _READS),
            lambda: timed(_READS, read_cold if cold else lambda: read(store)),
        )
    raw, ours = percentiles(peer_times), percentiles(times)
    return Figure(measured=raw["p50_us"] / ours["p50_us"], ours=ours, raw=raw)


def _asked(peer: Peer, what: str, times: int) -> list[float]:
    found: Any = peer.ask(what, times=times)
    return list(found)
