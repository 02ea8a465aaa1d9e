"""Stores for sessions: the `Store` protocol, and one package or module per engine."""

from typing import TYPE_CHECKING

from stenolog.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from stenolog.stores.async_store import AsyncStore
    from stenolog.stores.base import Lease, SessionView, Store
    from stenolog.stores.following import SessionChange, follow_changes
    from stenolog.stores.in_memory import InMemoryStore
    from stenolog.stores.jsonl import JSONLStore
    from stenolog.stores.postgres import PostgresStore
    from stenolog.stores.sqlite import SQLiteStore
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "AsyncStore": "stenolog.stores.async_store",
            "InMemoryStore": "stenolog.stores.in_memory",
            "JSONLStore": "stenolog.stores.jsonl",
            "Lease": "stenolog.stores.base",
            "PostgresStore": "stenolog.stores.postgres",
            "SQLiteStore": "stenolog.stores.sqlite",
            "SessionChange": "stenolog.stores.following",
            "SessionView": "stenolog.stores.base",
            "Store": "stenolog.stores.base",
            "follow_changes": "stenolog.stores.following",
        },
    )

__all__ = [
    "AsyncStore",
    "InMemoryStore",
    "JSONLStore",
    "Lease",
    "PostgresStore",
    "SQLiteStore",
    "SessionChange",
    "SessionView",
    "Store",
    "follow_changes",
]
