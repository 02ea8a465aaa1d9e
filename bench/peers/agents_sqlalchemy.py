"""Benchmark process of a peer: the OpenAI Agents SDK's SQLAlchemySession.

Each line on standard input requests one measurement. The process does not import stenolog. The
clients are tasks of one event loop with a session each, on one engine with a connection for each of
them.
"""

import asyncio
import gc
import json
import sys
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Any
from uuid import uuid4

from agents.extensions.memory import (  # type: ignore[import-not-found,unused-ignore]
    SQLAlchemySession,
)
from sqlalchemy.ext.asyncio import (  # type: ignore[import-not-found,unused-ignore]
    create_async_engine,
)


class Client:
    """A client with one session."""

    def __init__(self, engine: Any, messages: list[Any]) -> None:
        self._session = SQLAlchemySession(uuid4().hex, engine=engine)
        self._messages = cycle(messages)

    async def append(self) -> float:
        """Append one message durably and return how long it took."""
        message = next(self._messages)
        start = perf_counter()
        await self._session.add_items([message])
        return perf_counter() - start


async def rate(clients: list[Client], seconds: float) -> dict[str, Any]:
    """Let all clients append at once for `seconds`."""
    durations: list[float] = []
    start = perf_counter()

    async def work(client: Client) -> None:
        while perf_counter() < start + seconds:
            durations.append(await client.append())

    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(work(client))
    return {"seconds": perf_counter() - start, "durations": durations}


async def main(folder: Path, url: str, count: int) -> None:
    """Answer each line of standard input with one line."""
    messages = json.loads((folder / "messages.json").read_text())
    engine = create_async_engine(
        url.replace("postgresql:", "postgresql+asyncpg:", 1), pool_size=count, max_overflow=0
    )
    await SQLAlchemySession("first", engine=engine, create_tables=True).get_items()
    clients = [Client(engine, messages) for _ in range(count)]
    for line in sys.stdin:
        request = json.loads(line)
        gc.collect()
        match request["command"]:
            case "append":
                answer: object = [await clients[0].append() for _ in range(request["times"])]
            case "rate":
                answer = await rate(clients, request["seconds"])
        print(json.dumps(answer), flush=True)
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
