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
from stenolog.lazy_exports import lazy_exports
from stenolog.records import Message, SessionInfo
from stenolog.stores.base import Lease, SessionView, Store
from stenolog.stores.open_store import open_store

_PUBLIC_MODULES = (
    "stenolog.agent",
    "stenolog.catalog",
    "stenolog.context",
    "stenolog.errors",
    "stenolog.memory",
    "stenolog.providers",
    "stenolog.records",
    "stenolog.redaction",
    "stenolog.sessions",
    "stenolog.settings",
    "stenolog.stores",
    "stenolog.testing",
    "stenolog.tokens",
    "stenolog.transfer",
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
    # Imported on first use, so that a program does not wait for parts that it does not need.
    _find_name, __dir__ = lazy_exports(
        __name__,
        {
            "AgentInstance": "stenolog.agent.instance",
            "AgentLoop": "stenolog.agent.loop",
            "AgentRegistry": "stenolog.agent.instance",
            "AgentSpec": "stenolog.agent.spec",
            "AsyncStore": "stenolog.stores.async_store",
            "Context": "stenolog.context.context",
            "InMemoryStore": "stenolog.stores.in_memory",
            "InboundMessage": "stenolog.agent.turn_events",
            "JSONLBackend": "stenolog.sessions.session_store",
            "JSONLStore": "stenolog.stores.jsonl",
            "Limits": "stenolog.context.window",
            "Memory": "stenolog.memory.facade",
            "PostgresStore": "stenolog.stores.postgres",
            "SQLiteStore": "stenolog.stores.sqlite",
            "SessionManager": "stenolog.sessions.session_manager",
            "SessionStore": "stenolog.sessions.session_store",
            "open_catalog": "stenolog.catalog.index",
            "open_memory": "stenolog.memory.facade",
            "open_sessions": "stenolog.transfer.open_sessions",
            "tool": "stenolog.agent.tools",
        },
    )

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            return version("stenolog")
        try:
            return _find_name(name)
        except AttributeError:
            for module in _PUBLIC_MODULES if not name.startswith("_") else ():
                if name in import_module(module).__all__:
                    hint = f"stenolog.{name} does not exist: use `from {module} import {name}`"
                    raise AttributeError(hint) from None
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
