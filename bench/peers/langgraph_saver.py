"""Benchmark process of a peer: LangGraph's PostgresSaver.

Each line on standard input requests one measurement. The process does not import stenolog. A chat
graph stores one checkpoint after each message, with all messages so far; the task writes that a
graph also stores are left out. Each client has its own saver and connection, because a saver serves
one caller at a time.
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

MAX_MESSAGES = 100
"""Maximum number of messages in a checkpoint; then the next conversation starts."""


class Client:
    """A client with one conversation after the other."""

    def __init__(self, url: str, messages: list[Any]) -> None:
        self._connection = PostgresSaver.from_conn_string(url)
        self.saver = self._connection.__enter__()
        self._messages = cycle(messages)
        self._start_conversation()

    def _start_conversation(self) -> None:
        self._conversation: list[Any] = []
        self._config: Any = {"configurable": {"thread_id": uuid4().hex, "checkpoint_ns": ""}}
        self._version: Any = None

    def append(self) -> float:
        """Append one message durably and return how long it took."""
        step = len(self._conversation)
        self._conversation.append(next(self._messages))
        self._version = self.saver.get_next_version(self._version, None)
        checkpoint = {
            "v": 4,
            "id": str(uuid6(clock_seq=step)),
            "ts": datetime.now(UTC).isoformat(),
            "channel_values": {"messages": self._conversation},
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
        if len(self._conversation) == MAX_MESSAGES:
            self._start_conversation()
        return took

    def close(self) -> None:
        """Close the connection."""
        self._connection.__exit__(None, None, None)


def rate(clients: list[Client], seconds: float) -> dict[str, Any]:
    """Let all clients append at once for `seconds`."""
    durations: list[list[float]] = [[] for _ in clients]
    gate = threading.Barrier(len(clients) + 1)
    stop = threading.Event()

    def work(client: Client, own: list[float]) -> None:
        gate.wait()
        while not stop.is_set():
            own.append(client.append())

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(clients, durations, strict=True)
    ]
    for thread in threads:
        thread.start()
    gate.wait()
    start = perf_counter()
    stop.wait(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    return {
        "seconds": perf_counter() - start,
        "durations": [took for own in durations for took in own],
    }


def main(folder: Path, url: str, count: int) -> None:
    """Answer each line of standard input with one line."""
    messages = convert_to_messages(json.loads((folder / "messages.json").read_text()))
    clients = [Client(url, messages) for _ in range(count)]
    clients[0].saver.setup()
    for line in sys.stdin:
        request = json.loads(line)
        gc.collect()
        match request["command"]:
            case "append":
                answer: object = [clients[0].append() for _ in range(request["times"])]
            case "rate":
                answer = rate(clients, request["seconds"])
        print(json.dumps(answer), flush=True)
    for client in clients:
        client.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
