"""`open_sessions` opens the store for an agent loop and imports old sessions.

An agent loop must be able to start. If the store cannot be opened, or old sessions cannot be
imported, the store is closed again, an error is logged, and the run uses the fallback store. The
next successful start merges the sessions of the fallback store into the regular store.
"""

import logging
import os
from pathlib import Path

from stenolog.errors import ForeignLog, StenologError, UsageError
from stenolog.sessions.folders import SessionsLocation, locate_sessions
from stenolog.sessions.session_manager import SessionManager, why_not_writable
from stenolog.sessions.session_store import JSONLBackend, SessionStore
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store
from stenolog.transfer.fallback import merge_fallback, open_fallback
from stenolog.transfer.migration import import_folder, log_report

_logger = logging.getLogger("stenolog")


def open_sessions(where: str | os.PathLike[str], *, agent: str | None = None) -> SessionStore:
    """Open the sessions of an agent for an agent loop. `where` is the same as for `open_store`.

    Named agents share no sessions. Old sessions of picoclaw and zeroclaw in the folder `sessions`
    are imported first, and their files are renamed to `.migrated`. Then the content of a fallback
    store is merged.

    If the store cannot be opened, or old sessions cannot be imported, the run uses the fallback
    store: a JSONL store in the folder `sessions.fallback`, or FILE.fallback for a SQLite file. The
    fallback store starts with copies of the old sessions, and its `health()` says why the regular
    store is not used. If the folder cannot be written either, the result is a SessionManager. A
    read-only workspace can be opened: `health()` reports the problem, and each write returns a
    failure.

    Raises UsageError if no engine supports the place, ForeignLog for a database of another program,
    and the store's error for a PostgreSQL database, which has no fallback store.
    """
    place = locate_sessions(where, agent)
    try:
        store = open_store(place.where, namespace=place.namespace)
    except (UsageError, ForeignLog):
        raise  # later starts would fail too, so a fallback store would never be merged
    except StenologError as error:
        return _open_fallback_store(place, error)
    try:
        _import_old_sessions(place, store)
    except (StenologError, OSError) as error:
        _close_unusable_store(store)
        return _open_fallback_store(place, error)
    except BaseException:
        _close_unusable_store(store)
        raise
    sessions = JSONLBackend(store)
    health = sessions.health()
    if not health.ok:
        _logger.error("the store has a problem: %s", health.problems[0])
    return sessions


def _import_old_sessions(place: SessionsLocation, store: Store) -> None:
    for folder, fallbacks in place.legacy_folders():
        report = import_folder(folder, store, thorough=False, with_fallbacks=fallbacks, is_own=True)
        log_report(report, store)
    merge_fallback(place, store)


def _open_fallback_store(place: SessionsLocation, error: Exception) -> SessionStore:
    if place.fallback is None or place.json_fallback is None:
        raise error
    reason = f"{type(error).__name__}: {error}"
    try:
        store = open_fallback(place, reason=reason)
    except (StenologError, OSError) as fallback_error:
        _logger.debug("the fallback cannot be used", exc_info=fallback_error)
        return _open_session_manager(place.json_fallback, place.old, reason)
    _logger.error(
        "the store cannot be used (%s); for this run sessions are kept in %s", reason, store.folder
    )
    return JSONLBackend(store)


def _open_session_manager(folder: Path, old_folder: Path | None, reason: str) -> SessionStore:
    """Return a SessionManager. If JSON files cannot be written either, each write fails."""
    old = None if old_folder == folder else old_folder
    manager = SessionManager(folder, reason=reason, old=old)
    write_error = why_not_writable(folder)
    text = "the store cannot be used (%s); for this run sessions are kept as JSON files in %s"
    if write_error is not None:
        text = "nothing can be stored: the store is unusable (%s), and so are %s"
    _logger.error(text, reason, write_error or folder)
    return manager


def _close_unusable_store(store: Store) -> None:
    try:
        store.close()
    except Exception:
        _logger.exception("closing the unusable store failed")
