"""Every row of the table: what it measures, the number to reach, and how to measure it."""

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
    one_change,
)
from copies import to_postgres, to_sqlite
from engines import Engine, add_message, get_history, sqlite_append
from footprint import start_up, touched_keys, touched_sessions
from gateway import added
from index import (
    list_fresh,
    list_warm,
    search_begun,
    search_everywhere,
    search_newest,
    search_rare,
)
from measure import Figure, Place
from postgres import PostgresPeer, postgres_append, postgres_peer
from reads import full_read, full_read_floor, last_messages, warm_read
from recall import many_users, one_session
from viewer import first_paint


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The number to reach."""

    sense: Literal["≤", "≥"]
    number: float
    unit: Literal["×", "ms", "MB"]

    def reached(self, measured: float) -> bool:
        """Whether a number is on the right side."""
        return measured <= self.number if self.sense == "≤" else measured >= self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    what: str
    target: Target
    beside: str
    """What stands in the column of the raw limit."""
    run: Callable[[Place], Figure]
    times: int = 3
    peer: bool = False
    """Whether another program's environment is needed."""


_STATS = "looking at 10,000 files"
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


def _times(sense: Literal["≤", "≥"], number: float) -> Target:
    return Target(sense=sense, number=number, unit="×")


def rows(peer_python: Path) -> list[Row]:
    """All of them, in the order of the table."""
    return [
        *(
            Row(
                name=f"append-{history}",
                what=f"durable append, one writer, history {history:,}",
                target=_times("≤", 1.3),
                beside="bare write + fdatasync",
                run=partial(one_append, history=history),
            )
            for history in (0, 1000, 100_000)
        ),
        Row(
            name="append-once",
            what=(
                "append with once= to a session of 1,000 messages of 20 KB that this process has "
                "not read ÷ a plain append, after the first"
            ),
            target=_times("≤", 1.5),
            beside="a plain append",
            run=partial(append_once, history=1000, size=20_000),
        ),
        Row(
            name="sessions-64",
            what="durable appends, 64 sessions on 64 threads",
            target=_times("≥", 0.35),
            beside="64 threads on bare files",
            run=partial(many_sessions, count=64),
        ),
        Row(
            name="writers-16",
            what="one session, 16 threads",
            target=_times("≥", 3),
            beside="one writer",
            run=partial(many_writers, count=16),
        ),
        Row(
            name="tasks-16",
            what="one session, 16 asyncio tasks",
            target=_times("≥", 3),
            beside="one writer",
            run=partial(many_tasks, count=16),
        ),
        *(
            Row(
                name=f"read-{count}",
                what=f"cold read of all {count:,} messages, every field touched: times faster",
                target=_times("≥", number),
                beside="the peer, cold",
                run=partial(full_read, count=count, peer_python=peer_python),
                peer=True,
            )
            for count, number in ((100, 3), (1000, 2))
        ),
        Row(
            name="read-1000-floor",
            what=(
                "cold read of 1,000 messages, role and content touched ÷ decode + crc of the same "
                "bytes"
            ),
            target=_times("≤", 1.8),
            beside="decode + crc",
            run=partial(full_read_floor, count=1000),
        ),
        Row(
            name="warm-1000",
            what="warm read of 1,000 messages, the call alone: times faster",
            target=_times("≥", 50),
            beside="the peer, object ready",
            run=partial(warm_read, count=1000, peer_python=peer_python),
            peer=True,
        ),
        *(
            Row(
                name=f"last-20-{name}",
                what=f"cold read of the last 20 in a session of 100,000{against}",
                target=target,
                beside="in a session of 100",
                run=partial(last_messages, short=100, long=100_000, ratio=name == "ratio"),
            )
            for name, against, target in (
                ("time", "", Target(sense="≤", number=2, unit="ms")),
                ("ratio", " ÷ in one of 100", _times("≤", 3)),
            )
        ),
        *(
            Row(
                name=operation,
                what=f"{operation} ÷ append",
                # "The cost of one append", give or take what two runs of the same differ by.
                target=_times("≤", 1.1),
                beside="one append",
                run=partial(one_change, operation=operation),
            )
            for operation in ("truncate", "checkpoint", "set_summary", "hide", "undo")
        ),
        Row(
            name="sqlite-append",
            what="SQLite: durable append, one writer",
            target=_times("≤", 1.5),
            beside="bare INSERT + commit",
            run=sqlite_append,
        ),
        *(
            Row(
                name=f"AddMessage-{engine}",
                what=f"AddMessage, {engine}: times faster",
                target=_times("≥", 1),
                beside="the peer's add_items",
                run=partial(add_message, engine=engine, peer_python=peer_python),
                peer=True,
            )
            for engine in _ENGINES
        ),
        *(
            Row(
                name=f"GetHistory-{count}-{engine}{'-cold' if cold else ''}",
                what=f"GetHistory of {count:,}, {engine}{', cold' if cold else ''}: times faster",
                target=_times("≥", 1.5 if (engine, cold, count) == ("sqlite", False, 1000) else 1),
                beside="the peer, cold" if cold else "the peer, object ready",
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
                what=f"PostgreSQL: durable appends, {many}",
                target=_times("≥", 0.7),
                beside="bare INSERT",
                run=partial(postgres_append, clients=clients),
            )
            for clients, many in _CLIENTS
        ),
        *(
            Row(
                name=f"pg-{name}-{clients}",
                what=f"PostgreSQL: durable appends, {many}: times faster",
                target=_times("≥", 1),
                beside=beside,
                run=partial(postgres_peer, peer=peer, clients=clients, peer_python=peer_python),
                peer=True,
            )
            for name, peer, beside in _POSTGRES_PEERS
            for clients, many in _CLIENTS
        ),
        *(
            Row(
                name=f"copy-{engine}",
                what=f"copy of 50,000 messages, JSONL to {name}, compared by digest",
                # A copy also reads the source, and reads all of it back for its digest.
                target=_times("≥", 0.2),
                beside=beside,
                run=run,
            )
            for engine, name, beside, run in (
                ("postgres", "PostgreSQL", "bare COPY", to_postgres),
                ("sqlite", "SQLite", "bare executemany", to_sqlite),
            )
        ),
        *(
            Row(
                name=name,
                what=what,
                target=Target(sense="≤", number=number, unit="ms"),
                beside=beside,
                run=run,
                times=1,
            )
            for name, what, number, beside, run in (
                ("list-warm", "list 50 of 10,000 sessions, warm", 20, _STATS, list_warm),
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
                    _STATS,
                    search_rare,
                ),
                (
                    "search-newest",
                    "search 1,000,000 messages: a word found everywhere, newest first",
                    50,
                    _STATS,
                    search_newest,
                ),
                (
                    "search-everywhere",
                    "search 1,000,000 messages: a word found everywhere, best first",
                    300,
                    _STATS,
                    search_everywhere,
                ),
                (
                    "search-begun",
                    "search 1,000,000 messages: words of one first letter, best first",
                    300,
                    _STATS,
                    search_begun,
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
                what=f"gateway: what it adds to a model of 50 ms, {words}, p50",
                target=Target(sense="≤", number=reach, unit="×"),
                beside="a bare handler with six thread hops and two synced appends",
                run=partial(added, users=users, memory=memory),
            )
            for name, users, memory, words, reach in (
                ("gateway-1", 1, False, "one session, memory off", 2),
                ("gateway-1-memory", 1, True, "one session, memory on", 4),
                ("gateway-200", 200, False, "200 sessions that all wait for it", 5),
            )
        ),
        *(
            Row(
                name=f"viewer-{name}",
                what=f"viewer: a session of 100,000 messages to its first paint, {words}",
                target=Target(sense="≤", number=200, unit="ms"),
                beside="the gateway's shortest page",
                run=partial(first_paint, fresh=name == "fresh"),
                times=1,
            )
            for name, words in (
                ("warm", "in a new window"),
                ("fresh", "as the first page of a gateway"),
            )
        ),
        Row(
            name="memory-10000",
            what="10,000 sessions touched by one process, resident",
            target=Target(sense="≤", number=150, unit="MB"),
            beside="before the first",
            run=partial(touched_sessions, count=10_000),
            times=1,
        ),
        Row(
            name="memory-100000",
            what="100,000 keys: growth from 20,000 read to all read",
            # Flat: less than any table entry per key would take (about 50 bytes each).
            target=Target(sense="≤", number=4, unit="MB"),
            beside="after 20,000",
            run=partial(touched_keys, count=100_000),
            times=1,
        ),
        Row(
            name="import",
            what="`import stenolog`, whole process",
            target=Target(sense="≤", number=60, unit="ms"),
            beside="`python -c pass`",
            run=partial(start_up, command="python"),
        ),
        Row(
            name="version",
            what="`steno --version`, whole process",
            target=Target(sense="≤", number=150, unit="ms"),
            beside="`python -c pass`",
            run=partial(start_up, command="steno"),
        ),
    ]
