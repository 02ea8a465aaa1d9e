"""Long-term memory: notes made from conversations, and the recall of notes and past messages."""

from typing import TYPE_CHECKING

from stenolog.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from stenolog.memory.consolidation import ConsolidationReport
    from stenolog.memory.facade import Memory, open_memory
    from stenolog.memory.note_files import export_notes, import_notes
    from stenolog.memory.notes import Draft, Note, Notes, PurgedNote
    from stenolog.memory.recall import RecallHit, RecallResult
    from stenolog.memory.scopes import Scope, scope_of
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "ConsolidationReport": "stenolog.memory.consolidation",
            "Draft": "stenolog.memory.notes",
            "Memory": "stenolog.memory.facade",
            "Note": "stenolog.memory.notes",
            "Notes": "stenolog.memory.notes",
            "PurgedNote": "stenolog.memory.notes",
            "RecallHit": "stenolog.memory.recall",
            "RecallResult": "stenolog.memory.recall",
            "Scope": "stenolog.memory.scopes",
            "export_notes": "stenolog.memory.note_files",
            "import_notes": "stenolog.memory.note_files",
            "open_memory": "stenolog.memory.facade",
            "scope_of": "stenolog.memory.scopes",
        },
    )

__all__ = [
    "ConsolidationReport",
    "Draft",
    "Memory",
    "Note",
    "Notes",
    "PurgedNote",
    "RecallHit",
    "RecallResult",
    "Scope",
    "export_notes",
    "import_notes",
    "open_memory",
    "scope_of",
]
