"""`open_sessions`: the store for an agent loop, with old sessions taken in, or a stand-in.

A loop must be able to start. Where the store cannot be opened, or old sessions cannot be taken in,
it is closed again and the legacy JSON store stands in for this run, loudly; the next good start
merges what was written there.
"""

import logging
import os

from stenolog.errors import ForeignLog, StenologError, UsageError
from stenolog.sessions.folders import Place, find_place
from stenolog.sessions.migration import report, take_in
from stenolog.sessions.session_store import JSONLBackend, SessionStore
from stenolog.stores.base import Store
from stenolog.stores.json_folder import refusal
from stenolog.stores.legacy_json import SessionManager
from stenolog.stores.opening import open_store

_logger = logging.getLogger("stenolog")


def open_sessions(where: str | os.PathLike[str], *, agent: str | None = None) -> SessionStore:
    """The sessions at a place, for an agent loop: what `open_store` takes is taken here.

    With a name, those of that agent: they share nothing with those of any other. Old sessions in
    the folder `sessions` there (picoclaw's, zeroclaw's, and what the stand-in wrote) are taken in
    first, and their files renamed to `.migrated`. If the store cannot be opened, or old sessions
    cannot be taken in, the answer is a SessionManager, and its `health()` says why, and whether
    that can write. A place that can only be read is opened: `health()` says so, and each write
    answers that it failed. Raises UsageError where no engine takes the place, ForeignLog where it
    is another program's database, and what the store raised where there is no folder to stand in.
    """
    place = find_place(where, agent)
    try:
        store = open_store(place.where, namespace=place.namespace)
    except (UsageError, ForeignLog):
        raise  # no later start would find it otherwise
    except StenologError as error:
        return _stand_in(place, error)
    try:
        _take_all_in(place, store)
    except (StenologError, OSError) as error:
        _close(store)
        return _stand_in(place, error)
    except BaseException:
        _close(store)
        raise
    sessions = JSONLBackend(store)
    health = sessions.health()
    if not health.ok:
        _logger.error("the store is not well: %s", health.problems[0])
    return sessions


def _take_all_in(place: Place, store: Store) -> None:
    shares = place.old != place.stand_in
    if place.old is not None:
        report(take_in(place.old, store, thorough=False, stand_ins=not shares))
    if place.stand_in is not None and shares:
        report(take_in(place.stand_in, store, thorough=False))


def _stand_in(place: Place, error: Exception) -> SessionStore:
    if place.stand_in is None:
        raise error
    words = f"{type(error).__name__}: {error}"
    old = None if place.old == place.stand_in else place.old
    manager = SessionManager(place.stand_in, because=words, old=old)
    cannot = refusal(place.stand_in)
    if cannot is not None:
        # A loop must be able to start all the same; each write answers that it failed.
        _logger.error("nothing can be saved, neither in the store (%s) nor as %s", words, cannot)
    else:
        _logger.error(
            "the store cannot be used (%s); for this run sessions are kept as JSON files in %s",
            words,
            place.stand_in,
        )
    return manager


def _close(store: Store) -> None:
    try:
        store.close()
    except Exception:
        _logger.exception("closing the store that could not be used failed")
