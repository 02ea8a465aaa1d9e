"""Chat turns through a gateway on each storage engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stenolog.stores.in_memory import InMemoryAdmin, InMemoryLease, InMemoryStore
from stenolog.stores.jsonl.admin import JSONLAdmin
from stenolog.stores.jsonl.leases import JSONLLease
from stenolog.stores.jsonl.store import JSONLStore
from stenolog.stores.postgres.store import PostgresStore
from stenolog.stores.sql.admin import SQLAdmin
from stenolog.stores.sql.leases import SQLLease
from stenolog.stores.sqlite.store import SQLiteStore
from support.gateway.served_gateway import Served

ENGINES: dict[str, tuple[Any, Any, Any]] = {
    "memory": (InMemoryStore, InMemoryAdmin, InMemoryLease),
    "jsonl": (JSONLStore, JSONLAdmin, JSONLLease),
    "sqlite": (SQLiteStore, SQLAdmin, SQLLease),
    "postgres": (PostgresStore, SQLAdmin, SQLLease),
}


HOURS = 10_000.0
"""Ttl of leases. The gateway looks for unfinished turns in the background once per ttl."""


@contextmanager
def new_place(engine: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the address of a new store."""
    match engine:
        case "postgres":
            yield request.getfixturevalue("own_url")
        case "memory":
            yield "memory:"
        case "sqlite":
            yield f"sqlite:{folder / 'steno.db'}"
        case _:
            yield str(folder)


def chat(served: Served, client: Any, content: str) -> None:
    """Send one message, wait for the answer and for the work after it."""
    body = {"messages": [{"role": "user", "content": content}]}
    answer = client.post("/v1/chat/completions", json=body, headers={"X-Session-Key": "work"})
    assert answer.json()["choices"][0]["message"]["content"] == f"to {content}"
    served.quiet()
