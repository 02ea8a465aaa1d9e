"""Sessions for agent loops: the SessionStore facade, session keys, aliases and folders."""

from typing import TYPE_CHECKING

from stenolog.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from stenolog.sessions.keys import Origin, key_for, split_key
    from stenolog.sessions.session_manager import SessionManager
    from stenolog.sessions.session_store import JSONLBackend, SessionHealth, SessionStore
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "JSONLBackend": "stenolog.sessions.session_store",
            "Origin": "stenolog.sessions.keys",
            "SessionHealth": "stenolog.sessions.session_store",
            "SessionManager": "stenolog.sessions.session_manager",
            "SessionStore": "stenolog.sessions.session_store",
            "key_for": "stenolog.sessions.keys",
            "split_key": "stenolog.sessions.keys",
        },
    )

__all__ = [
    "JSONLBackend",
    "Origin",
    "SessionHealth",
    "SessionManager",
    "SessionStore",
    "key_for",
    "split_key",
]
