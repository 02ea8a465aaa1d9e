"""Durable conversations for AI agents: every message is on disk before the model answers."""

from importlib import import_module
from typing import TYPE_CHECKING

from stenolog.errors import (
    DamagedStore,
    ForeignLog,
    InvalidKey,
    MaybeStored,
    NewerFormat,
    NoSuchSession,
    NothingToUndo,
    NotStored,
    OnceConflict,
    ReadOnly,
    RefusedMessage,
    SessionDeleted,
    StaleCheckpoint,
    StenologError,
    StoreBusy,
    StoreClosed,
    StoreUnavailable,
    UsageError,
)
from stenolog.records import Compacted, Health, Message, SessionInfo, Undone
from stenolog.stores.base import Store
from stenolog.stores.opening import open_store

if TYPE_CHECKING:
    from stenolog.sessions.session_store import JSONLBackend, SessionHealth, SessionStore
    from stenolog.stores.async_store import AsyncStore
    from stenolog.stores.in_memory import InMemoryStore
    from stenolog.stores.jsonl import JSONLStore

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
    "MaybeStored",
    "Message",
    "NewerFormat",
    "NoSuchSession",
    "NotStored",
    "NothingToUndo",
    "OnceConflict",
    "ReadOnly",
    "RefusedMessage",
    "SessionDeleted",
    "SessionHealth",
    "SessionInfo",
    "SessionStore",
    "StaleCheckpoint",
    "StenologError",
    "Store",
    "StoreBusy",
    "StoreClosed",
    "StoreUnavailable",
    "Undone",
    "UsageError",
    "open_store",
]


# Who does not use an engine, or the face, does not wait for it: these come when they are asked for.
_LATER = {
    "AsyncStore": "stenolog.stores.async_store",
    "InMemoryStore": "stenolog.stores.in_memory",
    "JSONLBackend": "stenolog.sessions.session_store",
    "JSONLStore": "stenolog.stores.jsonl",
    "SessionHealth": "stenolog.sessions.session_store",
    "SessionStore": "stenolog.sessions.session_store",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'stenolog' has no attribute {name!r}")
    found: object = getattr(import_module(_LATER[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
