"""Aliases: other names of sessions that were taken in, such as those another program used.

They stand in the session's own meta, `aliases`, and nowhere else: so they are right after a
restart and in other processes, and go with the session. A key that is a session of its own always
wins, and only as long as it is one: who is to write asks each time. That is one look at the mark
where no alias was ever given. Elsewhere, who first asks for a key that is no session pays for a
look at all of them, and later ones for a look at what changed, once after each time that aliases
were given.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Final

from stenolog.codec import check_key
from stenolog.errors import DamagedStore, NoSuchSession
from stenolog.sessions import alias_marks
from stenolog.stores.base import Store
from stenolog.stores.locks import ThreadLock

REMEMBERED: Final = 10_000
"""How many names are known to open what they say, for who only reads."""


class Aliases:
    """Which session a name opens."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._mutex = ThreadLock()
        self._plain: set[str] = set()
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
        mark = alias_marks.current(self._store)
        if mark == alias_marks.NONE_YET or self._was_never_given(key, mark):
            return key
        if self._exists(key):
            return key
        owner = self.owners().get(key)
        if key in self._ever and (owner is None or key not in self._aliases_of(owner)):
            # Deleted, restored under another key, or no longer its alias.
            owner = self.owners(anew=True).get(key)
        return key if owner is None else owner

    def key_to_read(self, key: str) -> str:
        """The same without a look at the store, where the name opened itself before.

        Perhaps that session is gone since: who finds nothing in it must ask for the `own_key`.
        """
        if key.__class__ is str and key in self._plain:
            return key
        own = self.own_key(key)
        if own == key:
            if len(self._plain) >= REMEMBERED:
                self._plain.clear()
            self._plain.add(key)
        return own

    def _was_never_given(self, key: str, mark: str | None) -> bool:
        """Whether the last look, after which no aliases were given, found none of this name."""
        return mark is not None and mark == self._mark and key not in self._ever

    def owners(self, *, anew: bool = False) -> Mapping[str, str]:
        """Every alias, and the session that it opens unless there is one of that very key."""
        with self._mutex:
            mark = alias_marks.current(self._store)
            if mark == alias_marks.NONE_YET:
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


def _owners(claims: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Two may claim one alias, when they were taken in at the same time: the first key has it."""
    return {alias: key for key in sorted(claims, reverse=True) for alias in claims[key]}


def claimed(meta: Mapping[str, object]) -> tuple[str, ...]:
    """The aliases that stand in a session's meta."""
    names = meta.get("aliases")
    if not isinstance(names, list):
        return ()
    return tuple(name for name in names if isinstance(name, str))
