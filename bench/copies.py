"""Rows about copying a JSONL store to a database, compared with the bare driver.

The comparison has all rows in memory and writes them with the bare driver into one table in one
transaction. The comparison reads no source and compares no digests.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from time import perf_counter
from uuid import uuid4

import stenolog
from measure import Context, Measurement, NotRun
from messages import payload, sample
from postgres import connect, server
from stenolog.transfer.copy import copy_snapshots

SESSIONS = 200
MESSAGES_PER_SESSION = 250
_TIMESTAMP = "2026-01-01T00:00:00.000000Z"
_CREATE = (
    "CREATE TABLE {} (session bigint NOT NULL, seq bigint NOT NULL, at text NOT NULL, "
    "body text NOT NULL, PRIMARY KEY (session, seq))"
)
BareRow = tuple[int, int, str, str]


@contextmanager
def _source_store(context: Context) -> Iterator[stenolog.Store]:
    """Open the source store; the first call fills it."""
    with stenolog.open_store(str(context.folder / "copied")) as store:
        if not store.list_sessions(limit=1):
            messages = sample(MESSAGES_PER_SESSION)
            for number in range(context.times(SESSIONS)):
                store.add_messages(f"bench:{number:05d}", messages)
        yield store


def _rows(context: Context) -> list[BareRow]:
    bodies = [payload(message).decode() for message in sample(MESSAGES_PER_SESSION)]
    return [
        (session, seq, _TIMESTAMP, body)
        for session in range(context.times(SESSIONS))
        for seq, body in enumerate(bodies, 1)
    ]


def copy_to_postgres(context: Context) -> Measurement:
    """Measure messages per second to PostgreSQL, as a share of a bare COPY's."""
    names = (f"bare_{number}" for number in count())
    with server(context) as postgres, connect(postgres.url()) as connection:

        def bare(rows: list[BareRow]) -> None:
            name = next(names)
            connection.execute(_CREATE.format(name).encode())
            with connection.cursor().copy(f"COPY {name} FROM STDIN".encode()) as copy:
                for row in rows:
                    copy.write_row(row)

        return _measure(context, bare, lambda: f"{postgres.url()}?schema=s{uuid4().hex[:8]}")


def copy_to_sqlite(context: Context) -> Measurement:
    """Measure messages per second to SQLite, as a share of a bare executemany's."""
    try:
        import apsw
    except ImportError as error:
        raise NotRun("apsw is not installed: pip install -e '.[sqlite]'") from error

    def new_file() -> Path:
        return context.folder / f"copy-{uuid4().hex}.db"

    def bare(rows: list[BareRow]) -> None:
        connection = apsw.Connection(str(new_file()))
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(_CREATE.format("bare"))
        with connection:
            connection.executemany("INSERT INTO bare VALUES (?, ?, ?, ?)", rows)
        connection.close()

    return _measure(context, bare, lambda: f"sqlite:{new_file()}")


def _measure(
    context: Context, bare: Callable[[list[BareRow]], None], new_target: Callable[[], str]
) -> Measurement:
    rows = _rows(context)
    bare_seconds = seconds = 0.0
    with _source_store(context) as source:
        for _ in range(2):
            start = perf_counter()
            bare(rows)
            bare_seconds += perf_counter() - start
            with stenolog.open_store(new_target()) as target:
                start = perf_counter()
                report = copy_snapshots(source, target)
                seconds += perf_counter() - start
            assert not report.problems
            assert report.messages == len(rows)
    ours, raw = 2 * len(rows) / seconds, 2 * len(rows) / bare_seconds
    return Measurement(
        measured=ours / raw,
        ours={"per_second": round(ours, 1)},
        raw={"per_second": round(raw, 1)},
    )
