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
    ModelRefused,
    ModelUnavailable,
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
    StaleHistory,
    StenologError,
    StoreBusy,
    StoreClosed,
    StoreUnavailable,
    UsageError,
)
from stenolog.records import Compacted, Health, Message, Purged, SessionInfo, Trashed, Undone
from stenolog.stores.base import Lease, SessionView, Store
from stenolog.stores.open_store import open_store

if TYPE_CHECKING:
    from stenolog.agent.instance import AgentInstance
    from stenolog.agent.loop import AgentLoop
    from stenolog.agent.registry import AgentRegistry
    from stenolog.agent.scheduler import CloseReport
    from stenolog.agent.spec import AgentSpec, Route
    from stenolog.agent.tools import Tool, ToolContext, tool
    from stenolog.agent.turn_events import Answer, InboundMessage
    from stenolog.agent.turn_options import TurnOptions
    from stenolog.catalog import Catalog, open_catalog
    from stenolog.context.budget import Limits
    from stenolog.context.context import Context
    from stenolog.context.plan import SummaryPlan, plan_summary
    from stenolog.context.request_messages import ProviderRequirements
    from stenolog.context.summarize import SummaryReport
    from stenolog.context.window import Window, build_window
    from stenolog.memory.consolidation import ConsolidationReport
    from stenolog.memory.facade import Memory, open_memory
    from stenolog.memory.note_files import export_notes, import_notes
    from stenolog.memory.notes import Draft, Note, Notes, PurgedNote
    from stenolog.memory.recall import RecallHit, RecallResult
    from stenolog.memory.scopes import Scope, scope_of
    from stenolog.providers.chat_model import (
        ChatModel,
        CompletionFunction,
        Delta,
        StreamedAnswer,
        ToolCallDelta,
        Usage,
    )
    from stenolog.providers.local_model import LocalModel
    from stenolog.providers.openai_chat import OpenAIChat
    from stenolog.redaction.redact import Redacted, redact
    from stenolog.sessions.session_manager import SessionManager
    from stenolog.sessions.session_store import JSONLBackend, SessionHealth, SessionStore
    from stenolog.stores.async_store import AsyncStore
    from stenolog.stores.following import SessionChange, follow_changes
    from stenolog.stores.in_memory import InMemoryStore
    from stenolog.stores.jsonl import JSONLStore
    from stenolog.stores.postgres import PostgresStore
    from stenolog.stores.sqlite import SQLiteStore
    from stenolog.testing.scripted_model import ScriptedCompletion, ScriptedModel
    from stenolog.tokens import Calibration, Tokens
    from stenolog.transfer.migration import ImportReport, migrate_from_json
    from stenolog.transfer.open_sessions import open_sessions

__all__ = [
    "AgentInstance",
    "AgentLoop",
    "AgentRegistry",
    "AgentSpec",
    "Answer",
    "AsyncStore",
    "Calibration",
    "Catalog",
    "ChatModel",
    "CloseReport",
    "Compacted",
    "CompletionFunction",
    "ConsolidationReport",
    "Context",
    "ContextTooSmall",
    "DamagedStore",
    "Delta",
    "Draft",
    "ForeignLog",
    "Health",
    "ImportReport",
    "InMemoryStore",
    "InboundMessage",
    "InvalidKey",
    "JSONLBackend",
    "JSONLStore",
    "Lease",
    "LeaseLost",
    "Limits",
    "LocalModel",
    "MaybeStored",
    "Memory",
    "Message",
    "ModelRefused",
    "ModelUnavailable",
    "NewerFormat",
    "NoSuchNote",
    "NoSuchSession",
    "NotStored",
    "Note",
    "Notes",
    "NothingToUndo",
    "OnceConflict",
    "OpenAIChat",
    "PostgresStore",
    "ProviderRequirements",
    "Purged",
    "PurgedNote",
    "ReadOnly",
    "RecallHit",
    "RecallResult",
    "Redacted",
    "RefusedMessage",
    "Route",
    "SQLiteStore",
    "Scope",
    "ScriptedCompletion",
    "ScriptedModel",
    "SessionChange",
    "SessionDeleted",
    "SessionExists",
    "SessionHealth",
    "SessionInfo",
    "SessionManager",
    "SessionStore",
    "SessionView",
    "StaleCheckpoint",
    "StaleHistory",
    "StenologError",
    "Store",
    "StoreBusy",
    "StoreClosed",
    "StoreUnavailable",
    "StreamedAnswer",
    "SummaryPlan",
    "SummaryReport",
    "Tokens",
    "Tool",
    "ToolCallDelta",
    "ToolContext",
    "Trashed",
    "TurnOptions",
    "Undone",
    "Usage",
    "UsageError",
    "Window",
    "build_window",
    "export_notes",
    "follow_changes",
    "import_notes",
    "migrate_from_json",
    "open_catalog",
    "open_memory",
    "open_sessions",
    "open_store",
    "plan_summary",
    "redact",
    "scope_of",
    "tool",
]


# Engines, the session facade, the agent and the memory are imported on first use, so that a program
# does not wait for parts that it does not need.
_LATER = {
    "AgentInstance": "stenolog.agent.instance",
    "AgentLoop": "stenolog.agent.loop",
    "AgentRegistry": "stenolog.agent.registry",
    "AgentSpec": "stenolog.agent.spec",
    "Answer": "stenolog.agent.turn_events",
    "CompletionFunction": "stenolog.providers.chat_model",
    "AsyncStore": "stenolog.stores.async_store",
    "Calibration": "stenolog.tokens",
    "ToolCallDelta": "stenolog.providers.chat_model",
    "Catalog": "stenolog.catalog",
    "SessionChange": "stenolog.stores.following",
    "ChatModel": "stenolog.providers.chat_model",
    "SummaryReport": "stenolog.context.summarize",
    "ConsolidationReport": "stenolog.memory.consolidation",
    "Context": "stenolog.context.context",
    "Delta": "stenolog.providers.chat_model",
    "Draft": "stenolog.memory.notes",
    "RecallHit": "stenolog.memory.recall",
    "ToolContext": "stenolog.agent.tools",
    "InMemoryStore": "stenolog.stores.in_memory",
    "InboundMessage": "stenolog.agent.turn_events",
    "JSONLBackend": "stenolog.sessions.session_store",
    "JSONLStore": "stenolog.stores.jsonl",
    "CloseReport": "stenolog.agent.scheduler",
    "Limits": "stenolog.context.budget",
    "LocalModel": "stenolog.providers.local_model",
    "TurnOptions": "stenolog.agent.turn_options",
    "Memory": "stenolog.memory.facade",
    "ImportReport": "stenolog.transfer.migration",
    "ProviderRequirements": "stenolog.context.request_messages",
    "Note": "stenolog.memory.notes",
    "Notes": "stenolog.memory.notes",
    "OpenAIChat": "stenolog.providers.openai_chat",
    "SummaryPlan": "stenolog.context.plan",
    "PostgresStore": "stenolog.stores.postgres",
    "PurgedNote": "stenolog.memory.notes",
    "RecallResult": "stenolog.memory.recall",
    "Redacted": "stenolog.redaction.redact",
    "StreamedAnswer": "stenolog.providers.chat_model",
    "Route": "stenolog.agent.spec",
    "SQLiteStore": "stenolog.stores.sqlite",
    "Scope": "stenolog.memory.scopes",
    "ScriptedCompletion": "stenolog.testing.scripted_model",
    "ScriptedModel": "stenolog.testing.scripted_model",
    "SessionHealth": "stenolog.sessions.session_store",
    "SessionManager": "stenolog.sessions.session_manager",
    "SessionStore": "stenolog.sessions.session_store",
    "Tokens": "stenolog.tokens",
    "Tool": "stenolog.agent.tools",
    "Usage": "stenolog.providers.chat_model",
    "Window": "stenolog.context.window",
    "build_window": "stenolog.context.window",
    "export_notes": "stenolog.memory.note_files",
    "follow_changes": "stenolog.stores.following",
    "import_notes": "stenolog.memory.note_files",
    "migrate_from_json": "stenolog.transfer.migration",
    "open_catalog": "stenolog.catalog",
    "open_memory": "stenolog.memory.facade",
    "open_sessions": "stenolog.transfer.open_sessions",
    "plan_summary": "stenolog.context.plan",
    "redact": "stenolog.redaction.redact",
    "scope_of": "stenolog.memory.scopes",
    "tool": "stenolog.agent.tools",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'stenolog' has no attribute {name!r}")
    found: object = getattr(import_module(_LATER[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
