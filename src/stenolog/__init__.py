"""Durable conversations for AI agents: every message is on disk before the model answers."""

from importlib import import_module
from typing import TYPE_CHECKING

from stenolog.errors import (
    ContextTooSmall,
    DamagedStore,
    LeaseLost,
    MaybeStored,
    ModelRefused,
    ModelUnavailable,
    NoSuchSession,
    NotStored,
    OnceConflict,
    StenologError,
    StoreBusy,
    StoreUnavailable,
    UsageError,
)
from stenolog.lazy_loading import lazy_exports
from stenolog.records import Message, SessionInfo
from stenolog.stores.base import Lease, SessionView, Store
from stenolog.stores.open_store import open_store

_PUBLIC_MODULES = (
    "agent catalog context errors memory providers records redaction sessions settings stores "
    "testing tokens transfer"
)
"""Modules with public names that this package does not export."""

if TYPE_CHECKING:
    from stenolog.agent.instance import AgentInstance, AgentRegistry
    from stenolog.agent.loop import AgentLoop
    from stenolog.agent.spec import AgentSpec
    from stenolog.agent.tools import tool
    from stenolog.agent.turn_events import InboundMessage
    from stenolog.catalog.index import open_catalog
    from stenolog.context.context import Context
    from stenolog.context.window import Limits
    from stenolog.memory.facade import Memory, open_memory
    from stenolog.sessions.session_manager import SessionManager
    from stenolog.sessions.session_store import JSONLBackend, SessionStore
    from stenolog.stores.async_store import AsyncStore
    from stenolog.stores.in_memory import InMemoryStore
    from stenolog.stores.jsonl import JSONLStore
    from stenolog.stores.postgres import PostgresStore
    from stenolog.stores.sqlite import SQLiteStore
    from stenolog.transfer.open_sessions import open_sessions

    __version__: str
else:
    # Names are imported on first use, so that a program does not wait for unneeded modules.
    _, _find_name, __dir__ = lazy_exports(
        __name__,
        {
            "stenolog.agent.instance": "AgentInstance AgentRegistry",
            "stenolog.agent.loop": "AgentLoop",
            "stenolog.agent.spec": "AgentSpec",
            "stenolog.agent.tools": "tool",
            "stenolog.agent.turn_events": "InboundMessage",
            "stenolog.catalog.index": "open_catalog",
            "stenolog.context.context": "Context",
            "stenolog.context.window": "Limits",
            "stenolog.memory.facade": "Memory open_memory",
            "stenolog.sessions.session_manager": "SessionManager",
            "stenolog.sessions.session_store": "JSONLBackend SessionStore",
            "stenolog.stores.async_store": "AsyncStore",
            "stenolog.stores.in_memory": "InMemoryStore",
            "stenolog.stores.jsonl": "JSONLStore",
            "stenolog.stores.postgres": "PostgresStore",
            "stenolog.stores.sqlite": "SQLiteStore",
            "stenolog.transfer.open_sessions": "open_sessions",
        },
    )

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            return version("stenolog")
        try:
            return _find_name(name)
        except AttributeError:
            for module in _PUBLIC_MODULES.split() if not name.startswith("_") else ():
                if name in import_module(f"stenolog.{module}").__all__:
                    advice = f"use `from stenolog.{module} import {name}`"
                    raise AttributeError(f"stenolog.{name} does not exist: {advice}") from None
            raise


__all__ = [
    "AgentInstance",
    "AgentLoop",
    "AgentRegistry",
    "AgentSpec",
    "AsyncStore",
    "Context",
    "ContextTooSmall",
    "DamagedStore",
    "InMemoryStore",
    "InboundMessage",
    "JSONLBackend",
    "JSONLStore",
    "Lease",
    "LeaseLost",
    "Limits",
    "MaybeStored",
    "Memory",
    "Message",
    "ModelRefused",
    "ModelUnavailable",
    "NoSuchSession",
    "NotStored",
    "OnceConflict",
    "PostgresStore",
    "SQLiteStore",
    "SessionInfo",
    "SessionManager",
    "SessionStore",
    "SessionView",
    "StenologError",
    "Store",
    "StoreBusy",
    "StoreUnavailable",
    "UsageError",
    "open_catalog",
    "open_memory",
    "open_sessions",
    "open_store",
    "tool",
]
