"""Stores for sessions: the `Store` protocol, and one package or module per engine."""

from typing import TYPE_CHECKING

from stenolog.lazy_loading import lazy_exports

if TYPE_CHECKING:
    from stenolog.stores.async_store import AsyncStore as AsyncStore
    from stenolog.stores.base import Lease as Lease
    from stenolog.stores.base import SessionView as SessionView
    from stenolog.stores.base import Store as Store
    from stenolog.stores.in_memory import InMemoryStore as InMemoryStore
    from stenolog.stores.jsonl import JSONLStore as JSONLStore
    from stenolog.stores.postgres import PostgresStore as PostgresStore
    from stenolog.stores.sqlite import SQLiteStore as SQLiteStore
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "stenolog.stores.async_store": "AsyncStore",
            "stenolog.stores.base": "Lease SessionView Store",
            "stenolog.stores.in_memory": "InMemoryStore",
            "stenolog.stores.jsonl": "JSONLStore",
            "stenolog.stores.postgres": "PostgresStore",
            "stenolog.stores.sqlite": "SQLiteStore",
        },
    )
