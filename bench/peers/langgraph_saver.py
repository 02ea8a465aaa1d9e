"""A peer's side: LangGraph's PostgresSaver, measured in this process.

A line on standard input asks for each. Knows nothing of stenolog. What a chat graph stores after
each message is one checkpoint, with all messages so far in it; the writes of its tasks, which a
graph stores as well, are left out. Each client has a saver and a connection of its own: a saver
lets in one caller at a time.
"""

import gc
import json
import sys
import threading
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Any
from uuid import uuid4

from langchain_core.messages import (  # type: ignore[import-not-found,unused-ignore]
    convert_to_messages,
)
from langgraph.checkpoint.base.id import uuid6  # type: ignore[import-not-found,unused-ignore]
from langgraph.checkpoint.postgres import (  # type: ignore[import-not-found,unused-ignore]
    PostgresSaver,
)

CONVERSATION = 100
"""A checkpoint holds so many messages at most; then another conversation begins."""


class Client:
    """One conversation after the other."""

    def __init__(self, url: str, messages: list[Any]) -> None:
        self._opened = PostgresSaver.from_conn_string(url)
        self.saver = self._opened.__enter__()
        self._messages = cycle(messages)
        self._begin()

    def _begin(self) -> None:
        self._said: list[Any] = []
        self._config: Any = {"configurable": {"thread_id": uuid4().hex, "checkpoint_ns": ""}}
        self._version: Any = None

    def append(self) -> float:
        """One more message, durable; how long it took."""
        step = len(self._said)
        self._said.append(next(self._messages))
        self._version = self.saver.get_next_version(self._version, None)
        checkpoint = {
            "v": 4,
            "id": str(uuid6(clock_seq=step)),
            "ts": datetime.now(UTC).isoformat(),
            "channel_values": {"messages": self._said},
            "channel_versions": {"messages": self._version},
            "versions_seen": {},
            "updated_channels": ["messages"],
        }
        metadata = {"source": "loop", "step": step, "parents": {}}
        start = perf_counter()
        self._config = self.saver.put(
            self._config, checkpoint, metadata, {"messages": self._version}
        )
        took = perf_counter() - start
        if len(self._said) == CONVERSATION:
            self._begin()
        return took

    def close(self) -> None:
        """Let go of the connection."""
        self._opened.__exit__(None, None, None)


def rate(clients: list[Client], seconds: float) -> dict[str, Any]:
    """All of them at once, for so long."""
    each: list[list[float]] = [[] for _ in clients]
    gate = threading.Barrier(len(clients) + 1)
    stop = threading.Event()

    def work(client: Client, found: list[float]) -> None:
        gate.wait()
        while not stop.is_set():
            found.append(client.append())

    threads = [threading.Thread(target=work, args=pair) for pair in zip(clients, each, strict=True)]
    for thread in threads:
        thread.start()
    gate.wait()
    start = perf_counter()
    stop.wait(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    return {"seconds": perf_counter() - start, "each": [took for found in each for took in found]}


def main(folder: Path, url: str, count: int) -> None:
    """Answer each line of standard input with one line."""
    messages = convert_to_messages(json.loads((folder / "messages.json").read_text()))
    clients = [Client(url, messages) for _ in range(count)]
    clients[0].saver.setup()
    for line in sys.stdin:
        asked = json.loads(line)
        gc.collect()
        match asked["what"]:
            case "append":
                answer: object = [clients[0].append() for _ in range(asked["times"])]
            case "rate":
                answer = rate(clients, asked["seconds"])
        print(json.dumps(answer), flush=True)
    for client in clients:
        client.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
