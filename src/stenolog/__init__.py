"""Durable conversations for AI agents: every message is on disk before the model answers."""

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
from stenolog.stores.async_store import AsyncStore
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.jsonl import JSONLStore
from stenolog.stores.opening import open_store

__all__ = [
    "AsyncStore",
    "Compacted",
    "DamagedStore",
    "ForeignLog",
    "Health",
    "InMemoryStore",
    "InvalidKey",
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
    "SessionInfo",
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
