"""The peer's side: reads of the OpenAI Agents SDK's SQLiteSession, measured in this process.

A line on standard input asks for each. Knows nothing of stenolog.
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
    """Look at every field once, as a caller does that hands them to a model."""
    found = 0
    for message in messages:
        for value in message.values():
            if value is not None:
                found += 1
    return found


async def cold(file: Path, times: int) -> list[float]:
    """A new session object for each read."""
    found = []
    for _ in range(times):
        start = perf_counter()
        session = SQLiteSession("bench", file)
        touch(await session.get_items())
        found.append(perf_counter() - start)
        session.close()
    return found


async def ready(session: Any, times: int) -> list[float]:
    """The object is there and its connection is open."""
    found = []
    for _ in range(times):
        start = perf_counter()
        touch(await session.get_items())
        found.append(perf_counter() - start)
    return found


async def call(session: Any, times: int) -> list[float]:
    """The same, and nobody looks at what came back."""
    found = []
    for _ in range(times):
        start = perf_counter()
        await session.get_items()
        found.append(perf_counter() - start)
    return found


async def append(session: Any, message: dict[str, Any], times: int) -> list[float]:
    """One message after the other, each committed."""
    found = []
    for _ in range(times):
        start = perf_counter()
        await session.add_items([message])
        found.append(perf_counter() - start)
    return found


def about() -> dict[str, str]:
    """Which peer this is; how it syncs is an option of the SQLite build."""
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
    appended = SQLiteSession("append", folder / "append.db")
    for line in sys.stdin:
        asked = json.loads(line)
        gc.collect()
        match asked["what"]:
            case "about":
                answer: object = about()
            case "append":
                answer = await append(appended, messages[0], asked["times"])
            case "cold":
                answer = await cold(file, asked["times"])
            case "ready":
                answer = await ready(session, asked["times"])
            case "call":
                answer = await call(session, asked["times"])
        print(json.dumps(answer), flush=True)
    session.close()
    appended.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
