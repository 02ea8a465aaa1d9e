"""`open_sessions`: the store for an agent loop, with old sessions taken in, or a stand-in.

A loop must be able to start. Where the store cannot be opened, or old sessions cannot be taken in,
it is closed again and the legacy JSON store stands in for this run, loudly; the next good start
merges what was written there.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec import Struct

from stenolog.errors import StenologError, UsageError
from stenolog.sessions.migration import report, take_in
from stenolog.sessions.session_store import JSONLBackend, SessionStore
from stenolog.stores.base import Store
from stenolog.stores.legacy_json import SessionManager
from stenolog.stores.names import escaped
from stenolog.stores.opening import open_store

NAMESPACE: Final = "sessions"
AGENTS: Final = "agents"
"""The folder that holds a workspace for each agent that has a name."""

_WITHOUT_FOLDER: Final = ("memory", "postgresql", "postgres")
_logger = logging.getLogger("stenolog")


class Place(Struct, frozen=True):
    """Where the sessions of an agent are."""

    open: Callable[[], Store]
    old: Path | None
    """The folder in which old sessions are looked for, and the stand-in writes."""


def open_sessions(where: str | os.PathLike[str], *, agent: str | None = None) -> SessionStore:
    """The sessions at a place, for an agent loop: what `open_store` takes is taken here.

    With a name, those of that agent: they share nothing with those of any other. Old sessions in
    the folder `sessions` there (picoclaw's, zeroclaw's, and what the stand-in wrote) are taken in
    first, and their files renamed to `.migrated`. If the store cannot be opened or written, the
    answer is a SessionManager, and its `health()` says why. Raises UsageError where no engine
    takes the place, and what the store raised where there is no folder to stand in.
    """
    place = find_place(where, agent)
    try:
        store = place.open()
    except UsageError:
        raise
    except StenologError as error:
        return _stand_in(place, error)
    try:
        if place.old is not None:
            report(take_in(place.old, store, thorough=False))
    except (StenologError, OSError) as error:
        _close(store)
        return _stand_in(place, error)
    except BaseException:
        _close(store)
        raise
    return JSONLBackend(store)


def find_place(where: str | os.PathLike[str], agent: str | None) -> Place:
    """Which store it is, and which folder. Raises UsageError."""
    if agent is not None and (not isinstance(agent, str) or not agent):
        raise UsageError(f"agent {agent!r}: a name is wanted, or none")
    namespace = NAMESPACE if agent is None else f"{AGENTS}.{escaped(agent)}"
    scheme, colon, rest = where.partition(":") if isinstance(where, str) else ("", "", "")
    if colon and scheme == "sqlite":
        return Place(lambda: open_store(where, namespace=namespace), _beside_database(rest, agent))
    if not where or (colon and (scheme in _WITHOUT_FOLDER or "://" in str(where))):
        return Place(lambda: open_store(where, namespace=namespace), None)
    folder = Path(rest) if colon and scheme == "jsonl" else Path(where).expanduser()
    workspace = folder if agent is None else folder / AGENTS / escaped(agent)
    return Place(lambda: open_store(workspace), workspace / NAMESPACE)


def _beside_database(rest: str, agent: str | None) -> Path:
    folder = Path(rest.partition("?")[0]).expanduser().parent
    if agent is not None:
        return folder / AGENTS / escaped(agent) / NAMESPACE
    # A database may stand among the old sessions themselves, but a folder of all sorts is not
    # looked through: what looks like a session there may be anything.
    return folder if folder.name == NAMESPACE else folder / NAMESPACE


def _stand_in(place: Place, error: Exception) -> SessionStore:
    if place.old is None:
        raise error
    words = f"{type(error).__name__}: {error}"
    _logger.error(
        "the store cannot be used (%s); for this run sessions are kept as JSON files in %s",
        words,
        place.old,
    )
    return SessionManager(place.old, because=words)


def _close(store: Store) -> None:
    try:
        store.close()
    except Exception:
        _logger.exception("closing the store that could not be used failed")
