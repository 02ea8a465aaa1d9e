"""Durable conversations for AI agents: every message is on disk before the model answers."""

from importlib import import_module
from typing import TYPE_CHECKING

from stenolog.errors import (
    ContextTooSmall,
    DamagedStore,
    ForeignLog,
    InvalidKey,
    LeaseLost,
    MaybeStored,
    NewerFormat,
    NoSuchNote,
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
    from stenolog.catalog import Catalog, open_catalog
    from stenolog.context.arranging import Needs
    from stenolog.context.budget import Limits
    from stenolog.context.compaction import Compaction, compact_context
    from stenolog.context.context import Context
    from stenolog.context.plan import Plan, plan_compaction
    from stenolog.context.window import Window, build_window
    from stenolog.memory.consolidation import Consolidated
    from stenolog.memory.hand_edits import export_notes, import_notes
    from stenolog.memory.memory import Memory, open_memory
    from stenolog.memory.notes import Draft, Note, Notes, PurgedNote
    from stenolog.memory.recall import Found, Recalled
    from stenolog.memory.redaction import Redacted, redact
    from stenolog.memory.scopes import Scope, scope_of
    from stenolog.providers.base import Ask
    from stenolog.providers.scripted import Scripted
    from stenolog.sessions.migration import Migrated, migrate_from_json
    from stenolog.sessions.opening import open_sessions
    from stenolog.sessions.session_store import JSONLBackend, SessionHealth, SessionStore
    from stenolog.stores.async_store import AsyncStore
    from stenolog.stores.in_memory import InMemoryStore
    from stenolog.stores.jsonl import JSONLStore
    from stenolog.stores.legacy_json import SessionManager
    from stenolog.stores.sqlite import SQLiteStore
    from stenolog.tokens import Calibration, Tokens

__all__ = [
    "Ask",
    "AsyncStore",
    "Calibration",
    "Catalog",
    "Compacted",
    "Compaction",
    "Consolidated",
    "Context",
    "ContextTooSmall",
    "DamagedStore",
    "Draft",
    "ForeignLog",
    "Found",
    "Health",
    "InMemoryStore",
    "InvalidKey",
    "JSONLBackend",
    "JSONLStore",
    "Lease",
    "LeaseLost",
    "Limits",
    "MaybeStored",
    "Memory",
    "Message",
    "Migrated",
    "Needs",
    "NewerFormat",
    "NoSuchNote",
    "NoSuchSession",
    "NotStored",
    "Note",
    "Notes",
    "NothingToUndo",
    "OnceConflict",
    "Plan",
    "Purged",
    "PurgedNote",
    "ReadOnly",
    "Recalled",
    "Redacted",
    "RefusedMessage",
    "SQLiteStore",
    "Scope",
    "Scripted",
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
    "Tokens",
    "Trashed",
    "Undone",
    "UsageError",
    "Window",
    "build_window",
    "compact_context",
    "export_notes",
    "import_notes",
    "migrate_from_json",
    "open_catalog",
    "open_memory",
    "open_sessions",
    "open_store",
    "plan_compaction",
    "redact",
    "scope_of",
]


# Who does not use an engine, the face, or the memory, does not wait for it: these come when they
# are asked for.
_LATER = {
    "Ask": "stenolog.providers.base",
    "AsyncStore": "stenolog.stores.async_store",
    "Calibration": "stenolog.tokens",
    "Catalog": "stenolog.catalog",
    "Compaction": "stenolog.context.compaction",
    "Consolidated": "stenolog.memory.consolidation",
    "Context": "stenolog.context.context",
    "Draft": "stenolog.memory.notes",
    "Found": "stenolog.memory.recall",
    "InMemoryStore": "stenolog.stores.in_memory",
    "JSONLBackend": "stenolog.sessions.session_store",
    "JSONLStore": "stenolog.stores.jsonl",
    "Limits": "stenolog.context.budget",
    "Memory": "stenolog.memory.memory",
    "Migrated": "stenolog.sessions.migration",
    "Needs": "stenolog.context.arranging",
    "Note": "stenolog.memory.notes",
    "Notes": "stenolog.memory.notes",
    "Plan": "stenolog.context.plan",
    "PurgedNote": "stenolog.memory.notes",
    "Recalled": "stenolog.memory.recall",
    "Redacted": "stenolog.memory.redaction",
    "SQLiteStore": "stenolog.stores.sqlite",
    "Scope": "stenolog.memory.scopes",
    "Scripted": "stenolog.providers.scripted",
    "SessionHealth": "stenolog.sessions.session_store",
    "SessionManager": "stenolog.stores.legacy_json",
    "SessionStore": "stenolog.sessions.session_store",
    "Tokens": "stenolog.tokens",
    "Window": "stenolog.context.window",
    "build_window": "stenolog.context.window",
    "compact_context": "stenolog.context.compaction",
    "export_notes": "stenolog.memory.hand_edits",
    "import_notes": "stenolog.memory.hand_edits",
    "migrate_from_json": "stenolog.sessions.migration",
    "open_catalog": "stenolog.catalog",
    "open_memory": "stenolog.memory.memory",
    "open_sessions": "stenolog.sessions.opening",
    "plan_compaction": "stenolog.context.plan",
    "redact": "stenolog.memory.redaction",
    "scope_of": "stenolog.memory.scopes",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'stenolog' has no attribute {name!r}")
    found: object = getattr(import_module(_LATER[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
