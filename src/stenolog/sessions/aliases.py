"""Aliases: other names of imported sessions, such as those that another program used.

Aliases are stored only in the meta of their session, in the field `aliases`, so they are correct
after a restart and in other processes, and move with the session. An existing session with that key
takes precedence. Writers resolve a key until this process knows its session, readers whenever they
find nothing.

Each store has a mark that changes whenever a session gets aliases. It is created before the first
alias and changed after each one. If it says that there are none, resolving a key costs one look at
the mark. Otherwise the first unknown key costs a look at all sessions, and after each change of the
mark a look at the changed sessions.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Final

from stenolog.codec import check_key
from stenolog.errors import DamagedStore, NoSuchSession
from stenolog.stores.base import MarkedStore, Store
from stenolog.stores.locks import ThreadLock

REMEMBERED: Final = 10_000
"""Maximum number of keys that are known to be no alias."""
_MARK: Final = "aliases"
NO_ALIASES: Final = ""
"""Mark of a store in which no session ever had an alias."""


class Aliases:
    """Which session a name opens."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._mutex = ThreadLock()
        self._plain: set[str] = set()
        """Keys that opened themselves when they were read."""
        self._sessions: set[str] = set()
        """Keys of sessions that this process has seen or written to."""
        self._mark: object = None
        self._seen = array("q")
        """A hash of each session and its stamp at the last look: eight bytes, and not both."""
        self._claims: dict[str, tuple[str, ...]] = {}
        """The aliases of each session that has any."""
        self._owners: Mapping[str, str] = {}
        self._ever: set[str] = set()
        """Every alias that was seen: its session may come back from the trash."""

    def own_key(self, key: str) -> str:
        """The key of the session that this name opens now; the name itself where it is no alias."""
        check_key(key)
        mark = alias_mark(self._store)
        if mark == NO_ALIASES or self._was_never_given(key, mark):
            return key
        if self._exists(key):
            return key
        owner = self.owners().get(key)
        if key in self._ever and (owner is None or key not in self._aliases_of(owner)):
            # Deleted, restored under another key, or no longer its alias.
            owner = self.owners(anew=True).get(key)
        return key if owner is None else owner

    def key_to_write(self, key: str) -> str:
        """Return the `own_key`, without a look at the store if `note_session` knows the key."""
        known = key.__class__ is str and key in self._sessions
        return key if known else self.own_key(key)

    def note_session(self, key: str) -> None:
        """Remember that there is a session of this very key."""
        _remember(self._sessions, key)

    def forget_session(self, key: str) -> None:
        """Resolve this key again before the next write: its session is gone."""
        self._sessions.discard(key)

    def key_to_read(self, key: str) -> str:
        """The same without a look at the store, where the name opened itself before.

        Perhaps that session is gone since: who finds nothing in it must ask for the `own_key`.
        """
        if key.__class__ is str and key in self._plain:
            return key
        own = self.own_key(key)
        if own == key:
            _remember(self._plain, key)
        return own

    def _was_never_given(self, key: str, mark: str | None) -> bool:
        """Whether the last look, after which no aliases were given, found none of this name."""
        return mark is not None and mark == self._mark and key not in self._ever

    def owners(self, *, anew: bool = False) -> Mapping[str, str]:
        """Every alias, and the session that it opens unless there is one of that very key."""
        with self._mutex:
            mark = alias_mark(self._store)
            if mark == NO_ALIASES:
                return {}
            if anew or mark is None or mark != self._mark:
                self._look()
                self._mark = mark
            return self._owners

    def claims(self) -> Mapping[str, tuple[str, ...]]:
        """The aliases of each session that has any, also of two that claim the same."""
        self.owners(anew=True)
        return self._claims

    def _look(self) -> None:
        """Read the aliases of all sessions that changed since the last look."""
        stamps = self._store.stamps()
        seen = set(self._seen)
        new = [key for key, stamp in stamps.items() if hash((key, stamp)) not in seen]
        gone = self._claims.keys() - stamps.keys()
        found = {key: names for key in new if (names := self._aliases_of(key))}
        if found or not self._claims.keys().isdisjoint((*gone, *new)):
            kept = {key: self._claims[key] for key in self._claims.keys() - {*gone, *new}}
            self._claims = kept | found
            self._owners = _owners(self._claims)
            self._ever.update(self._owners)
        self._seen = array("q", map(hash, stamps.items()))

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
            # It opens under no other name. What may pass is not caught: an alias that is not seen
            # for a moment would begin a second session.
            return ()
        # A fork has a copy of the meta, but not the names.
        return () if info.forked_from is not None else claimed(info.meta)


def _remember(keys: set[str], key: str) -> None:
    if len(keys) >= REMEMBERED:
        keys.clear()
    keys.add(key)


def _owners(claims: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Two may claim one alias, when they were taken in at the same time: the first key has it."""
    return {alias: key for key in sorted(claims, reverse=True) for alias in claims[key]}


def claimed(meta: Mapping[str, object]) -> tuple[str, ...]:
    """The aliases that stand in a session's meta."""
    names = meta.get("aliases")
    if not isinstance(names, list):
        return ()
    return tuple(name for name in names if isinstance(name, str))


def alias_mark(store: Store) -> str | None:
    """Return the current mark; None if the store has no marks, so all sessions must be read."""
    return store.mark(_MARK) if isinstance(store, MarkedStore) else None


def prepare_alias_mark(store: Store) -> None:
    """Create the mark before the first alias is stored. Raises StoreUnavailable."""
    if alias_mark(store) == NO_ALIASES:
        change_alias_mark(store)


def change_alias_mark(store: Store) -> None:
    """Change the mark. Raises StoreUnavailable."""
    if isinstance(store, MarkedStore):
        store.change_mark(_MARK)
