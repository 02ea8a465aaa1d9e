"""Benchmark process of a peer: the OpenAI Agents SDK's SQLiteSession.

Each line on standard input requests one measurement. The process does not import stenolog.
"""

import asyncio
import gc
import json
import sqlite3
import sys
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

from agents import SQLiteSession  # type: ignore[import-not-found,unused-ignore]


def touch(messages: list[dict[str, Any]]) -> int:
    """Access every field once, as a caller does that passes the messages to a model."""
    count = 0
    for message in messages:
        for value in message.values():
            if value is not None:
                count += 1
    return count


async def cold(file: Path, times: int) -> list[float]:
    """Time reads that each create a new session object."""
    durations = []
    for _ in range(times):
        start = perf_counter()
        session = SQLiteSession("bench", file)
        touch(await session.get_items())
        durations.append(perf_counter() - start)
        session.close()
    return durations


async def ready(session: Any, times: int) -> list[float]:
    """Time reads of an existing session object with an open connection."""
    durations = []
    for _ in range(times):
        start = perf_counter()
        touch(await session.get_items())
        durations.append(perf_counter() - start)
    return durations


async def call(session: Any, times: int) -> list[float]:
    """Time reads without accessing the result."""
    durations = []
    for _ in range(times):
        start = perf_counter()
        await session.get_items()
        durations.append(perf_counter() - start)
    return durations


async def append(session: Any, message: dict[str, Any], times: int) -> list[float]:
    """Time appends of one message, each committed."""
    durations = []
    for _ in range(times):
        start = perf_counter()
        await session.add_items([message])
        durations.append(perf_counter() - start)
    return durations


def about() -> dict[str, str]:
    """Return name and versions of the peer, and how its SQLite build syncs."""
    with sqlite3.connect(":memory:") as connection:
        options = {name for (name,) in connection.execute("pragma compile_options")}
    level = [name for name in options if name.startswith("DEFAULT_WAL_SYNCHRONOUS")]
    return {
        "name": "openai-agents SQLiteSession",
        "version": version("openai-agents"),
        "sqlite": sqlite3.sqlite_version,
        "build": level[0] if level else "DEFAULT_WAL_SYNCHRONOUS=FULL",
    }


async def main(folder: Path) -> None:
    """Answer each line of standard input with one line."""
    messages = json.loads((folder / "messages.json").read_text())
    file = folder / f"{len(messages)}.db"
    session = SQLiteSession("bench", file)
    if not await session.get_items(limit=1):
        for message in messages:
            await session.add_items([message])
    append_session = SQLiteSession("append", folder / "append.db")
    for line in sys.stdin:
        request = json.loads(line)
        gc.collect()
        match request["command"]:
            case "about":
                answer: object = about()
            case "append":
                answer = await append(append_session, messages[0], request["times"])
            case "cold":
                answer = await cold(file, request["times"])
            case "ready":
                answer = await ready(session, request["times"])
            case "call":
                answer = await call(session, request["times"])
        print(json.dumps(answer), flush=True)
    session.close()
    append_session.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
