"""Durable conversations for AI agents: every message is on disk before the model answers."""

from importlib import import_module
from typing import TYPE_CHECKING

from stenolog.lazy_loading import lazy_exports
from stenolog.stores.open_store import open_store as open_store

_PUBLIC_MODULES = (
    "agent catalog context errors memory providers records redaction sessions settings stores "
    "testing tokens transfer"
)
"""Modules with public names that this package does not export."""

if TYPE_CHECKING:
    from stenolog.agent.instance import AgentInstance as AgentInstance
    from stenolog.agent.instance import AgentRegistry as AgentRegistry
    from stenolog.agent.loop import AgentLoop as AgentLoop
    from stenolog.agent.spec import AgentSpec as AgentSpec
    from stenolog.agent.tools import tool as tool
    from stenolog.agent.turn_events import InboundMessage as InboundMessage
    from stenolog.catalog.index import open_catalog as open_catalog
    from stenolog.context.context import Context as Context
    from stenolog.context.window import Limits as Limits
    from stenolog.errors import ContextTooSmall as ContextTooSmall
    from stenolog.errors import DamagedStore as DamagedStore
    from stenolog.errors import LeaseLost as LeaseLost
    from stenolog.errors import MaybeStored as MaybeStored
    from stenolog.errors import ModelRefused as ModelRefused
    from stenolog.errors import ModelUnavailable as ModelUnavailable
    from stenolog.errors import NoSuchSession as NoSuchSession
    from stenolog.errors import NotStored as NotStored
    from stenolog.errors import OnceConflict as OnceConflict
    from stenolog.errors import StenologError as StenologError
    from stenolog.errors import StoreBusy as StoreBusy
    from stenolog.errors import StoreUnavailable as StoreUnavailable
    from stenolog.errors import UsageError as UsageError
    from stenolog.memory.facade import Memory as Memory
    from stenolog.memory.facade import open_memory as open_memory
    from stenolog.records import Message as Message
    from stenolog.records import SessionInfo as SessionInfo
    from stenolog.sessions.session_manager import SessionManager as SessionManager
    from stenolog.sessions.session_store import JSONLBackend as JSONLBackend
    from stenolog.sessions.session_store import SessionStore as SessionStore
    from stenolog.stores.async_store import AsyncStore as AsyncStore
    from stenolog.stores.base import Lease as Lease
    from stenolog.stores.base import SessionView as SessionView
    from stenolog.stores.base import Store as Store
    from stenolog.stores.in_memory import InMemoryStore as InMemoryStore
    from stenolog.stores.jsonl import JSONLStore as JSONLStore
    from stenolog.stores.postgres import PostgresStore as PostgresStore
    from stenolog.stores.sqlite import SQLiteStore as SQLiteStore
    from stenolog.transfer.open_sessions import open_sessions as open_sessions

    __all__: list[str]
    __version__: str
else:
    # Names are imported on first use, so that a program does not wait for unneeded modules.
    __all__, _find_name, __dir__ = lazy_exports(
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
            "stenolog.errors": (
                "ContextTooSmall DamagedStore LeaseLost MaybeStored ModelRefused ModelUnavailable "
                "NoSuchSession NotStored OnceConflict StenologError StoreBusy StoreUnavailable "
                "UsageError"
            ),
            "stenolog.memory.facade": "Memory open_memory",
            "stenolog.records": "Message SessionInfo",
            "stenolog.sessions.session_manager": "SessionManager",
            "stenolog.sessions.session_store": "JSONLBackend SessionStore",
            "stenolog.stores.async_store": "AsyncStore",
            "stenolog.stores.base": "Lease SessionView Store",
            "stenolog.stores.in_memory": "InMemoryStore",
            "stenolog.stores.jsonl": "JSONLStore",
            "stenolog.stores.open_store": "open_store",
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
