"""Durable conversations for AI agents: every message is on disk before the model answers."""

from importlib import import_module
from typing import TYPE_CHECKING

from stenolog.errors import (
    DamagedStore,
    ForeignLog,
    InvalidKey,
    LeaseLost,
    MaybeStored,
    NewerFormat,
    NoSuchSession,
    NothingToUndo,
    NotStored,
    OnceConflict,
    ReadOnly,
    RefusedMessage,
    SessionDeleted,
    SessionExists,
    StaleCheckpoint,
    StenologError,
    StoreBusy,
    StoreClosed,
    StoreUnavailable,
    UsageError,
)
from stenolog.records import Compacted, Health, Message, Purged, SessionInfo, Trashed, Undone
from stenolog.stores.base import Lease, Store
from stenolog.stores.opening import open_store

if TYPE_CHECKING:
    from stenolog.sessions.migration import Migrated, migrate_from_json
    from stenolog.sessions.opening import open_sessions
    from stenolog.sessions.session_store import JSONLBackend, SessionHealth, SessionStore
    from stenolog.stores.async_store import AsyncStore
    from stenolog.stores.in_memory import InMemoryStore
    from stenolog.stores.jsonl import JSONLStore
    from stenolog.stores.legacy_json import SessionManager
    from stenolog.stores.sqlite import SQLiteStore

__all__ = [
    "AsyncStore",
    "Compacted",
    "DamagedStore",
    "ForeignLog",
    "Health",
    "InMemoryStore",
    "InvalidKey",
    "JSONLBackend",
    "JSONLStore",
    "Lease",
    "LeaseLost",
    "MaybeStored",
    "Message",
    "Migrated",
    "NewerFormat",
    "NoSuchSession",
    "NotStored",
    "NothingToUndo",
    "OnceConflict",
    "Purged",
    "ReadOnly",
    "RefusedMessage",
    "SQLiteStore",
    "SessionDeleted",
    "SessionExists",
    "SessionHealth",
    "SessionInfo",
    "SessionManager",
    "SessionStore",
    "StaleCheckpoint",
    "StenologError",
    "Store",
    "StoreBusy",
    "StoreClosed",
    "StoreUnavailable",
    "Trashed",
    "Undone",
    "UsageError",
    "migrate_from_json",
    "open_sessions",
    "open_store",
]


# Who does not use an engine, or the face, does not wait for it: these come when they are asked for.
_LATER = {
    "AsyncStore": "stenolog.stores.async_store",
    "InMemoryStore": "stenolog.stores.in_memory",
    "JSONLBackend": "stenolog.sessions.session_store",
    "JSONLStore": "stenolog.stores.jsonl",
    "Migrated": "stenolog.sessions.migration",
    "SQLiteStore": "stenolog.stores.sqlite",
    "SessionHealth": "stenolog.sessions.session_store",
    "SessionManager": "stenolog.stores.legacy_json",
    "SessionStore": "stenolog.sessions.session_store",
    "migrate_from_json": "stenolog.sessions.migration",
    "open_sessions": "stenolog.sessions.opening",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'stenolog' has no attribute {name!r}")
    found: object = getattr(import_module(_LATER[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
