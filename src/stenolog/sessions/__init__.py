"""Sessions for agent loops: the SessionStore facade, session keys, aliases and folders."""

from typing import TYPE_CHECKING

from stenolog.lazy_loading import lazy_exports

if TYPE_CHECKING:
    from stenolog.sessions.keys import key_for as key_for
    from stenolog.sessions.session_manager import SessionManager as SessionManager
    from stenolog.sessions.session_store import JSONLBackend as JSONLBackend
    from stenolog.sessions.session_store import SessionStore as SessionStore
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "stenolog.sessions.keys": "key_for",
            "stenolog.sessions.session_manager": "SessionManager",
            "stenolog.sessions.session_store": "JSONLBackend SessionStore",
        },
    )
