"""Long-term memory: notes made from conversations, and the recall of notes and past messages."""

from typing import TYPE_CHECKING

from stenolog.lazy_loading import lazy_exports

if TYPE_CHECKING:
    from stenolog.memory.facade import Memory as Memory
    from stenolog.memory.facade import open_memory as open_memory
    from stenolog.memory.notes import Draft as Draft
    from stenolog.memory.notes import Note as Note
    from stenolog.memory.notes import Notes as Notes
    from stenolog.memory.scopes import Scope as Scope
    from stenolog.memory.scopes import scope_of as scope_of
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "stenolog.memory.facade": "Memory open_memory",
            "stenolog.memory.notes": "Draft Note Notes",
            "stenolog.memory.scopes": "Scope scope_of",
        },
    )
