"""All rows of the table: description, target, comparison, and the function that measures."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from appends import (
    append_once,
    many_sessions,
    many_tasks,
    many_writers,
    one_append,
    one_operation,
)
from copies import copy_to_postgres, copy_to_sqlite
from engines import Engine, add_message, get_history, sqlite_append
from footprint import start_up, touched_keys, touched_sessions
from gateway import added_latency
from index import (
    list_fresh,
    list_warm,
    search_common,
    search_newest,
    search_prefix,
    search_rare,
)
from measure import Context, Measurement
from postgres import PostgresPeer, postgres_append, postgres_peer
from reads import full_read, full_read_with_floor, last_messages, warm_read
from recall import many_users, one_session
from transcripts import complete_index, first_list, import_transcripts, search_transcripts
from viewer import first_paint


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Number to reach."""

    sense: Literal["≤", "≥"]
    number: float
    unit: Literal["×", "ms", "MB", "MB/s"]

    def reached(self, measured: float) -> bool:
        """Return whether a number meets the target."""
        return measured <= self.number if self.sense == "≤" else measured >= self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    description: str
    target: Target
    baseline: str
    """Name of the comparison."""
    run: Callable[[Context], Measurement]
    times: int = 3
    peer: bool = False
    """Whether the row needs the peers' environment."""


_STAT_10000 = "looking at 10,000 files"
_ENGINES: tuple[Engine, ...] = ("jsonl", "sqlite")
_HISTORIES: tuple[tuple[Engine, bool], ...] = (
    ("jsonl", False),
    ("sqlite", False),
    ("sqlite", True),
)
_CLIENTS = ((1, "one client"), (32, "32 clients"))
_POSTGRES_PEERS: tuple[tuple[str, PostgresPeer, str], ...] = (
    ("langgraph", "langgraph_saver", "LangGraph's PostgresSaver"),
    ("agents", "agents_sqlalchemy", "OpenAI Agents' SQLAlchemySession"),
)


def _ratio(sense: Literal["≤", "≥"], number: float) -> Target:
    return Target(sense=sense, number=number, unit="×")


def rows(peer_python: Path) -> list[Row]:
    """Return all rows in the order of the table."""
    return [
        *(
            Row(
                name=f"append-{history}",
                description=f"durable append, one writer, history {history:,}",
                target=_ratio("≤", 1.3),
                baseline="bare write + fdatasync",
                run=partial(one_append, history=history),
            )
            for history in (0, 1000, 100_000)
        ),
        Row(
            name="append-once",
            description=(
                "append with once= to a session of 1,000 messages of 20 KB that this process has "
                "not read ÷ a plain append, after the first"
            ),
            target=_ratio("≤", 1.5),
            baseline="a plain append",
            run=partial(append_once, history=1000, size=20_000),
        ),
        Row(
            name="sessions-64",
            description="durable appends, 64 sessions on 64 threads",
            target=_ratio("≥", 0.35),
            baseline="64 threads on bare files",
            run=partial(many_sessions, count=64),
        ),
        Row(
            name="writers-16",
            description="one session, 16 threads",
            target=_ratio("≥", 3),
            baseline="one writer",
            run=partial(many_writers, count=16),
        ),
        Row(
            name="tasks-16",
            description="one session, 16 asyncio tasks",
            target=_ratio("≥", 3),
            baseline="one writer",
            run=partial(many_tasks, count=16),
        ),
        *(
            Row(
                name=f"read-{count}",
                description=(
                    f"cold read of all {count:,} messages, every field touched: times faster"
                ),
                target=_ratio("≥", number),
                baseline="the peer, cold",
                run=partial(full_read, count=count, peer_python=peer_python),
                peer=True,
            )
            for count, number in ((100, 3), (1000, 2))
        ),
        Row(
            name="read-1000-floor",
            description=(
                "cold read of 1,000 messages, role and content touched ÷ decode + crc of the same "
                "bytes"
            ),
            target=_ratio("≤", 1.8),
            baseline="decode + crc",
            run=partial(full_read_with_floor, count=1000),
        ),
        Row(
            name="warm-1000",
            description="warm read of 1,000 messages, the call alone: times faster",
            target=_ratio("≥", 50),
            baseline="the peer, object ready",
            run=partial(warm_read, count=1000, peer_python=peer_python),
            peer=True,
        ),
        *(
            Row(
                name=f"last-20-{name}",
                description=f"cold read of the last 20 in a session of 100,000{suffix}",
                target=target,
                baseline="in a session of 100",
                run=partial(last_messages, short=100, long=100_000, ratio=name == "ratio"),
            )
            for name, suffix, target in (
                ("time", "", Target(sense="≤", number=2, unit="ms")),
                ("ratio", " ÷ in a session of 100", _ratio("≤", 3)),
            )
        ),
        *(
            Row(
                name=operation,
                description=f"{operation} ÷ append",
                # The cost of one append, plus the difference between two runs of one program.
                target=_ratio("≤", 1.1),
                baseline="one append",
                run=partial(one_operation, operation=operation),
            )
            for operation in ("truncate", "checkpoint", "set_summary", "hide", "undo")
        ),
        Row(
            name="sqlite-append",
            description="SQLite: durable append, one writer",
            target=_ratio("≤", 1.5),
            baseline="bare INSERT + commit",
            run=sqlite_append,
        ),
        *(
            Row(
                name=f"AddMessage-{engine}",
                description=f"AddMessage, {engine}: times faster",
                target=_ratio("≥", 1),
                baseline="the peer's add_items",
                run=partial(add_message, engine=engine, peer_python=peer_python),
                peer=True,
            )
            for engine in _ENGINES
        ),
        *(
            Row(
                name=f"GetHistory-{count}-{engine}{'-cold' if cold else ''}",
                description=(
                    f"GetHistory of {count:,}, {engine}{', cold' if cold else ''}: times faster"
                ),
                target=_ratio("≥", 1.5 if (engine, cold, count) == ("sqlite", False, 1000) else 1),
                baseline="the peer, cold" if cold else "the peer, object ready",
                run=partial(
                    get_history, engine=engine, count=count, cold=cold, peer_python=peer_python
                ),
                peer=True,
            )
            for engine, cold in _HISTORIES
            for count in (100, 1000)
        ),
        *(
            Row(
                name=f"pg-append-{clients}",
                description=f"PostgreSQL: durable appends, {clients_text}",
                target=_ratio("≥", 0.7),
                baseline="bare INSERT",
                run=partial(postgres_append, clients=clients),
            )
            for clients, clients_text in _CLIENTS
        ),
        *(
            Row(
                name=f"pg-{name}-{clients}",
                description=f"PostgreSQL: durable appends, {clients_text}: times faster",
                target=_ratio("≥", 1),
                baseline=baseline,
                run=partial(postgres_peer, peer=peer, clients=clients, peer_python=peer_python),
                peer=True,
            )
            for name, peer, baseline in _POSTGRES_PEERS
            for clients, clients_text in _CLIENTS
        ),
        *(
            Row(
                name=f"copy-{engine}",
                description=f"copy of 50,000 messages, JSONL to {name}, compared by digest",
                # A copy also reads the source, and reads the target back to compare digests.
                target=_ratio("≥", 0.2),
                baseline=baseline,
                run=run,
            )
            for engine, name, baseline, run in (
                ("postgres", "PostgreSQL", "bare COPY", copy_to_postgres),
                ("sqlite", "SQLite", "bare executemany", copy_to_sqlite),
            )
        ),
        *(
            Row(
                name=name,
                description=description,
                target=Target(sense="≤", number=number, unit="ms"),
                baseline=baseline,
                run=run,
                times=1,
            )
            for name, description, number, baseline, run in (
                ("list-warm", "list 50 of 10,000 sessions, warm", 20, _STAT_10000, list_warm),
                (
                    "list-fresh",
                    "list 50 of 10,000 sessions, whole process",
                    100,
                    "`python -c pass`",
                    list_fresh,
                ),
                (
                    "search-rare",
                    "search 1,000,000 messages: 500 hits",
                    50,
                    _STAT_10000,
                    search_rare,
                ),
                (
                    "search-newest",
                    "search 1,000,000 messages: a word found everywhere, newest first",
                    50,
                    _STAT_10000,
                    search_newest,
                ),
                (
                    "search-everywhere",
                    "search 1,000,000 messages: a word found everywhere, best first",
                    300,
                    _STAT_10000,
                    search_common,
                ),
                (
                    "search-begun",
                    "search 1,000,000 messages: all words with one first letter, best first",
                    300,
                    _STAT_10000,
                    search_prefix,
                ),
                (
                    "recall-one-session",
                    "recall from 100,000 messages of one session, and 5,200 notes",
                    20,
                    "looking at one file",
                    one_session,
                ),
                (
                    "recall-many-users",
                    "recall from 100 messages of one of 1,000 users, and 100 notes",
                    20,
                    "looking at 1,000 files",
                    many_users,
                ),
            )
        ),
        *(
            Row(
                name=name,
                description=f"gateway: time added to a model call of 50 ms, {detail}, p50",
                target=Target(sense="≤", number=number, unit="×"),
                baseline="a bare handler with six thread hops and two synced appends",
                run=partial(added_latency, users=users, memory=memory),
            )
            for name, users, memory, detail, number in (
                ("gateway-1", 1, False, "one session, memory off", 2),
                ("gateway-1-memory", 1, True, "one session, memory on", 4),
                ("gateway-200", 200, False, "200 sessions at once", 5),
            )
        ),
        *(
            Row(
                name=f"viewer-{name}",
                description=f"viewer: first paint of a session of 100,000 messages, {detail}",
                target=Target(sense="≤", number=200, unit="ms"),
                baseline="the gateway's shortest page",
                run=partial(first_paint, fresh=name == "fresh"),
                times=1,
            )
            for name, detail in (
                ("warm", "in a new window"),
                ("fresh", "as the first page of a gateway"),
            )
        ),
        *(
            Row(
                name=name,
                description=f"`steno view` with 3,000 transcripts (300 MB): {detail}",
                target=Target(sense="≤", number=number, unit="ms"),
                baseline=baseline,
                run=run,
                times=1,
            )
            for name, detail, number, baseline, run in (
                (
                    "view-first",
                    "first start to the list",
                    3_000,
                    "stat of every file",
                    partial(first_list, indexed=False),
                ),
                (
                    "view-second",
                    "second start to the list",
                    500,
                    "stat of every file",
                    partial(first_list, indexed=True),
                ),
                (
                    "view-index",
                    "first start until everything is indexed",
                    60_000,
                    "decoding every line in one process",
                    complete_index,
                ),
                (
                    "view-search",
                    "search, the slowest of three queries",
                    150,
                    "the gateway's shortest page",
                    search_transcripts,
                ),
            )
        ),
        Row(
            name="import-transcripts",
            description="`steno import` of 3,000 transcripts (300 MB)",
            target=Target(sense="≥", number=20, unit="MB/s"),
            baseline="decoding every line, one synced file for each transcript",
            run=import_transcripts,
            times=1,
        ),
        Row(
            name="memory-10000",
            description="memory of a process that used 10,000 sessions",
            target=Target(sense="≤", number=150, unit="MB"),
            baseline="before the first session",
            run=partial(touched_sessions, count=10_000),
            times=1,
        ),
        Row(
            name="memory-100000",
            description="memory growth while reading 80,000 more sessions",
            # The target is less than the size of a table with one entry of about 50 bytes per key.
            target=Target(sense="≤", number=4, unit="MB"),
            baseline="after 20,000",
            run=partial(touched_keys, count=100_000),
            times=1,
        ),
        Row(
            name="import",
            description="`import stenolog`, whole process",
            target=Target(sense="≤", number=60, unit="ms"),
            baseline="`python -c pass`",
            run=partial(start_up, command="python"),
        ),
        Row(
            name="version",
            description="`steno --version`, whole process",
            target=Target(sense="≤", number=150, unit="ms"),
            baseline="`python -c pass`",
            run=partial(start_up, command="steno"),
        ),
    ]
