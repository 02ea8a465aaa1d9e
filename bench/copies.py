"""Rows about copying a JSONL store to a database, beside the bare driver with the same rows.

What is compared with has the rows in memory, all of them, and writes them into one table in one
transaction: it reads no source, keeps no sessions, and compares nothing in the end.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import cast
from uuid import uuid4

import stenolog
from measure import Figure, NotRun, Place
from messages import payload, sample
from postgres import driver, server
from stenolog.stores.snapshots import SnapshotStore
from stenolog.transfer.copy import copy_snapshots

SESSIONS = 200
EACH = 250
_AT = "2026-01-01T00:00:00.000000Z"
_CREATE = (
    "CREATE TABLE {} (session bigint NOT NULL, seq bigint NOT NULL, at text NOT NULL, "
    "body text NOT NULL, PRIMARY KEY (session, seq))"
)
BareRow = tuple[int, int, str, str]


@contextmanager
def _source(place: Place) -> Iterator[stenolog.Store]:
    """The store that is copied, made when first asked for."""
    with stenolog.open_store(str(place.folder / "copied")) as store:
        if not store.list_sessions(limit=1):
            messages = sample(EACH)
            for number in range(place.times(SESSIONS)):
                store.add_messages(f"bench:{number:05d}", messages)
        yield store


def _rows(place: Place) -> list[BareRow]:
    bodies = [payload(message).decode() for message in sample(EACH)]
    return [
        (session, seq, _AT, body)
        for session in range(place.times(SESSIONS))
        for seq, body in enumerate(bodies, 1)
    ]


def to_postgres(place: Place) -> Figure:
    """Messages per second to PostgreSQL, as a share of a bare COPY's."""
    names = (f"bare_{number}" for number in count())
    with server(place) as running, driver(running.url()) as connection:

        def bare(rows: list[BareRow]) -> None:
            name = next(names)
            connection.execute(_CREATE.format(name).encode())
            with connection.cursor().copy(f"COPY {name} FROM STDIN".encode()) as copy:
                for row in rows:
                    copy.write_row(row)

        return _measured(place, bare, lambda: f"{running.url()}?schema=s{uuid4().hex[:8]}")


def to_sqlite(place: Place) -> Figure:
    """Messages per second to SQLite, as a share of a bare executemany's."""
    try:
        import apsw
    except ImportError as error:
        raise NotRun("apsw is not installed: pip install 'stenolog[sqlite]'") from error

    def new_file() -> Path:
        return place.folder / f"copy-{uuid4().hex}.db"

    def bare(rows: list[BareRow]) -> None:
        connection = apsw.Connection(str(new_file()))
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(_CREATE.format("bare"))
        with connection:
            connection.executemany("INSERT INTO bare VALUES (?, ?, ?, ?)", rows)
        connection.close()

    return _measured(place, bare, lambda: f"sqlite:{new_file()}")


def _measured(
    place: Place, bare: Callable[[list[BareRow]], None], new_place: Callable[[], str]
) -> Figure:
    rows = _rows(place)
    bare_seconds = seconds = 0.0
    with _source(place) as source:
        for _ in range(2):
            start = perf_counter()
            bare(rows)
            bare_seconds += perf_counter() - start
            with stenolog.open_store(new_place()) as target:
                start = perf_counter()
                done = copy_snapshots(cast("SnapshotStore", source), cast("SnapshotStore", target))
                seconds += perf_counter() - start
            assert not done.problems
            assert done.messages == len(rows)
    ours, raw = 2 * len(rows) / seconds, 2 * len(rows) / bare_seconds
    return Figure(
        measured=ours / raw,
        ours={"per_second": round(ours, 1)},
        raw={"per_second": round(raw, 1)},
    )
