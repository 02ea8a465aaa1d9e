"""Aliases: additional names of imported sessions, for example the names that another program used.

Aliases are stored only in the meta of their session, in the field `aliases`. They are therefore
correct after a restart and in other processes, and move with the session. An existing session with
that key takes precedence. Writers resolve a key until this process knows its session; readers
resolve it whenever they find nothing.

Each store has a change marker that changes whenever a session gets aliases. It is created before
the first alias is stored and changed after each one. If the marker says that there are no aliases,
resolving a key costs one read of the marker. Otherwise the first unknown key costs a read of all
sessions, and each change of the marker a read of the changed sessions.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Final

from stenolog.codec import check_key
from stenolog.errors import DamagedStore, NoSuchSession
from stenolog.stores.base import MarkedStore, Store
from stenolog.stores.locks import ThreadLock

MAX_CACHED_KEYS: Final = 10_000
"""Maximum number of cached keys that are known not to be aliases."""
_MARK: Final = "aliases"
NO_ALIASES: Final = ""
"""Marker of a store in which no session ever had an alias."""


class Aliases:
    """Resolver from names to session keys, with caches."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._mutex = ThreadLock()
        self._non_aliases: set[str] = set()
        """Keys that resolved to themselves when they were read."""
        self._known_sessions: set[str] = set()
        """Keys of sessions that this process has read or written."""
        self._mark: object = None
        self._stamp_hashes = array("q")
        """Hash of each key and stamp at the last scan: eight bytes instead of both strings."""
        self._aliases_by_session: dict[str, tuple[str, ...]] = {}
        """The aliases of each session that has any."""
        self._owners: Mapping[str, str] = {}
        self._all_aliases: set[str] = set()
        """Every alias seen so far: its session may be restored from the trash."""

    def resolve_key(self, key: str) -> str:
        """Return the key of the session that this name opens; the name itself if it is no alias."""
        check_key(key)
        mark = alias_mark(self._store)
        if mark == NO_ALIASES or self._is_no_alias(key, mark):
            return key
        if self._exists(key):
            return key
        owner = self.owners().get(key)
        if key in self._all_aliases and (owner is None or key not in self._aliases_of(owner)):
            # The session was deleted or restored under another key, or lost this alias.
            owner = self.owners(rescan=True).get(key)
        return key if owner is None else owner

    def key_to_write(self, key: str) -> str:
        """Resolve a key without reading the store if `note_session` recorded the key."""
        known = key.__class__ is str and key in self._known_sessions
        return key if known else self.resolve_key(key)

    def note_session(self, key: str) -> None:
        """Remember that a session with exactly this key exists."""
        _remember(self._known_sessions, key)

    def forget_session(self, key: str) -> None:
        """Resolve this key again before the next write, because its session was deleted."""
        self._known_sessions.discard(key)

    def key_to_read(self, key: str) -> str:
        """Resolve a key without reading the store if it resolved to itself before.

        The session may have been deleted since. A caller that finds nothing must use `resolve_key`.
        """
        if key.__class__ is str and key in self._non_aliases:
            return key
        own = self.resolve_key(key)
        if own == key:
            _remember(self._non_aliases, key)
        return own

    def _is_no_alias(self, key: str, mark: str | None) -> bool:
        """Return whether no alias has this name and no alias was added since the last scan."""
        return mark is not None and mark == self._mark and key not in self._all_aliases

    def owners(self, *, rescan: bool = False) -> Mapping[str, str]:
        """Return every alias and its session; an existing session of that key takes precedence."""
        with self._mutex:
            mark = alias_mark(self._store)
            if mark == NO_ALIASES:
                return {}
            if rescan or mark is None or mark != self._mark:
                self._rescan()
                self._mark = mark
            return self._owners

    def aliases_by_session(self) -> Mapping[str, tuple[str, ...]]:
        """Return the aliases of each session that has any; two sessions may claim the same one."""
        self.owners(rescan=True)
        return self._aliases_by_session

    def _rescan(self) -> None:
        """Read the aliases of all sessions that changed since the last scan."""
        stamps = self._store.stamps()
        seen = set(self._stamp_hashes)
        new = [key for key, stamp in stamps.items() if hash((key, stamp)) not in seen]
        removed = self._aliases_by_session.keys() - stamps.keys()
        found = {key: names for key in new if (names := self._aliases_of(key))}
        if found or not self._aliases_by_session.keys().isdisjoint((*removed, *new)):
            kept = {
                key: self._aliases_by_session[key]
                for key in self._aliases_by_session.keys() - {*removed, *new}
            }
            self._aliases_by_session = kept | found
            self._owners = _owner_by_alias(self._aliases_by_session)
            self._all_aliases.update(self._owners)
        self._stamp_hashes = array("q", map(hash, stamps.items()))

    def _exists(self, key: str) -> bool:
        try:
            self._store.info(key)
        except NoSuchSession:
            return False
        return True

    def _aliases_of(self, key: str) -> tuple[str, ...]:
        try:
            info = self._store.info(key)
        except (NoSuchSession, DamagedStore):
            # A missing or damaged session has no aliases. Transient errors are not caught: a caller
            # that misses an alias would start a second session.
            return ()
        # A fork has a copy of the meta, but not the aliases.
        return () if info.forked_from is not None else aliases_in(info.meta)


def _remember(keys: set[str], key: str) -> None:
    if len(keys) >= MAX_CACHED_KEYS:
        keys.clear()
    keys.add(key)


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


def alias_mark(store: Store) -> str | None:
    """Return the marker; None if the store has no markers and all sessions must be read."""
    return store.mark(_MARK) if isinstance(store, MarkedStore) else None


def prepare_alias_mark(store: Store) -> None:
    """Create the marker before the first alias is stored. Raises StoreUnavailable."""
    if alias_mark(store) == NO_ALIASES:
        change_alias_mark(store)


def change_alias_mark(store: Store) -> None:
    """Change the marker. Raises StoreUnavailable."""
    if isinstance(store, MarkedStore):
        store.change_mark(_MARK)
