"""Aliases: additional names of imported sessions, for example the names that another program used.

Aliases are stored only in the meta of their session, in the field `aliases`. Aliases are therefore
correct after a restart and in other processes, and move with the session. If the key of a session
equals an alias of another session, the key wins. A writer resolves a key unless this process knows
a session with exactly that key. A reader resolves a key if it finds no session with that key.

Each store has a change marker that changes whenever a session gets aliases. The marker is created
before the first alias is stored, and changed after each alias. If the marker says that there are no
aliases, resolving a key costs one read of the marker. If there are aliases, the first unknown key
costs a read of all sessions, and each change of the marker costs a read of the changed sessions.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Final

from stenolog.codec import check_key
from stenolog.errors import DamagedStore, NoSuchSession
from stenolog.stores.base import Store, find_info
from stenolog.stores.locks import ThreadLock

MAX_CACHED_KEYS: Final = 10_000
"""Maximum number of known sessions. A full cache is emptied."""
_MARKER_NAME: Final = "aliases"
NO_ALIASES: Final = ""
"""Value of the change marker if no session of the store ever had an alias."""


class Aliases:
    """Resolver from names to session keys, with caches."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._mutex = ThreadLock()
        self._known_sessions: set[str] = set()
        """Keys of sessions that this process has written."""
        self._seen_marker: object = None
        self._stamp_hashes = array("q")
        """Hash of the key and stamp of each session at the last scan. Hashes need less memory."""
        self._aliases_by_session: dict[str, tuple[str, ...]] = {}
        """Aliases of each session that has aliases, by the key of the session."""
        self._owners: Mapping[str, str] = {}
        self._all_aliases: set[str] = set()
        """Every alias seen so far, including those of deleted sessions, which may be restored."""

    def resolve_key(self, key: str) -> str:
        """Return the key of the session that this name opens; the name itself if it is no alias."""
        check_key(key)
        marker = alias_mark(self._store)
        # The aliases are known if no alias was added since the last scan.
        are_known = marker == self._seen_marker
        if marker == NO_ALIASES or (are_known and key not in self._all_aliases):
            return key
        if find_info(self._store, key) is not None:
            return key
        owner = self.owners().get(key)
        if key in self._all_aliases and (owner is None or key not in self._aliases_of(owner)):
            # The session was deleted, was restored under another key, or lost this alias.
            owner = self.owners(rescan=True).get(key)
        return key if owner is None else owner

    def resolve_known(self, key: str) -> str:
        """Resolve a key without reading the store if `remember_session` recorded the key."""
        is_known = key.__class__ is str and key in self._known_sessions
        return key if is_known else self.resolve_key(key)

    def remember_session(self, key: str) -> None:
        """Remember that a session with exactly this key exists."""
        if len(self._known_sessions) >= MAX_CACHED_KEYS:
            self._known_sessions.clear()
        self._known_sessions.add(key)

    def forget_session(self, key: str) -> None:
        """Make the next write resolve this key again. Call this if the session may be gone."""
        self._known_sessions.discard(key)

    def owners(self, *, rescan: bool = False) -> Mapping[str, str]:
        """Return the session key of each alias, even if another session has the alias as its key.

        `rescan`: read the sessions that changed, even if the change marker is unchanged.
        """
        with self._mutex:
            marker = alias_mark(self._store)
            if marker == NO_ALIASES:
                return {}
            if rescan or marker != self._seen_marker:
                self._rescan()
                self._seen_marker = marker
            return self._owners

    def aliases_by_session(self) -> Mapping[str, tuple[str, ...]]:
        """Return the aliases of each session with aliases. Two sessions may claim one alias."""
        self.owners(rescan=True)
        return self._aliases_by_session

    def _rescan(self) -> None:
        """Read the aliases of all sessions that changed since the last scan."""
        stamps = self._store.admin.stamps()
        known_hashes = set(self._stamp_hashes)
        changed_keys = [key for key in stamps if hash((key, stamps[key])) not in known_hashes]
        unchanged_keys = (self._aliases_by_session.keys() & stamps.keys()) - set(changed_keys)
        aliases = {key: self._aliases_by_session[key] for key in unchanged_keys}
        aliases |= {key: names for key in changed_keys if (names := self._aliases_of(key))}
        if aliases != self._aliases_by_session:
            self._aliases_by_session = aliases
            self._owners = _owner_by_alias(aliases)
            self._all_aliases.update(self._owners)
        self._stamp_hashes = array("q", map(hash, stamps.items()))

    def _aliases_of(self, key: str) -> tuple[str, ...]:
        try:
            info = self._store.info(key)
        except (NoSuchSession, DamagedStore):
            # A missing or damaged session has no aliases. Do not catch other errors: the caller
            # would find no session for the alias and start a second session.
            return ()
        # A fork has a copy of the meta, but the aliases belong to the original session.
        return () if info.forked_from is not None else aliases_in(info.meta)


def _owner_by_alias(aliases_by_session: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the owner of each alias.

    Two sessions may claim one alias if they were imported at the same time: the smaller key wins.
    """
    return {
        alias: key
        for key in sorted(aliases_by_session, reverse=True)
        for alias in aliases_by_session[key]
    }


def aliases_in(meta: Mapping[str, object]) -> tuple[str, ...]:
    """Return the aliases in the meta of a session."""
    names = meta.get("aliases")
    if not isinstance(names, list):
        return ()
    return tuple(name for name in names if isinstance(name, str))


def alias_mark(store: Store) -> str:
    """Return the change marker of the aliases."""
    return store.admin.read_marker(_MARKER_NAME)


def prepare_alias_mark(store: Store) -> None:
    """Create the change marker if it is missing. Call this before an alias is stored.

    Raises StoreUnavailable.
    """
    if alias_mark(store) == NO_ALIASES:
        change_alias_mark(store)


def change_alias_mark(store: Store) -> None:
    """Update the change marker of the aliases. Raises StoreUnavailable."""
    store.admin.update_marker(_MARKER_NAME)
