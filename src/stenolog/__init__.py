"""Durable conversations for AI agents: every message is on disk before the model answers."""

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
from stenolog.sessions.session_store import JSONLBackend, SessionHealth, SessionStore
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.jsonl import JSONLStore
from stenolog.stores.opening import open_store

if TYPE_CHECKING:
    from stenolog.stores.async_store import AsyncStore

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


def __getattr__(name: str) -> object:
    # asyncio takes as long to import as all the rest; who does not use it does not wait for it.
    if name == "AsyncStore":
        from stenolog.stores.async_store import AsyncStore

        return AsyncStore
    raise AttributeError(f"module 'stenolog' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
