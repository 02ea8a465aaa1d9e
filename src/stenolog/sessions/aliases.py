"""Aliases: other names of sessions that were taken in, such as those another program used.

They stand in the session's own meta, `aliases`, and nowhere else: so they are right after a
restart and in other processes, and go with the session. A key that is a session of its own always
wins. Known sessions cost nothing, and new ones neither where no alias was ever given. Elsewhere,
who first asks for a key that is no session pays for a look at all of them, and later ones for a
look at what changed, once after each time that aliases were given.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from stenolog.codec import check_key
from stenolog.errors import DamagedStore, NoSuchSession
from stenolog.sessions import alias_marks
from stenolog.stores.base import Store
from stenolog.stores.locks import ThreadLock

REMEMBERED: Final = 10_000
"""How many keys are known to be sessions without asking again."""


class Aliases:
    """Which session a name opens."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._mutex = ThreadLock()
        self._sessions: set[str] = set()
        self._mark: object = None
        self._stamps: dict[str, str] = {}
        self._claims: dict[str, tuple[str, ...]] = {}
        """The aliases of each session that has any."""
        self._owners: Mapping[str, str] = {}
        self._ever: set[str] = set()
        """Every alias that was seen: its session may come back from the trash."""

    def own_key(self, key: str) -> str:
        """The key of the session that this name opens; the name itself where it is no alias."""
        if key.__class__ is str and key in self._sessions:
            return key
        check_key(key)
        if self._exists(key):
            return key
        owner = self.owners().get(key)
        if key in self._ever and (owner is None or key not in self._aliases_of(owner)):
            # Deleted, restored under another key, or no longer its alias.
            owner = self.owners(anew=True).get(key)
        return key if owner is None else owner

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

    def _look(self) -> None:
        """Read the aliases of all sessions that changed since the last look."""
        stamps = self._store.stamps()
        gone = self._stamps.keys() - stamps.keys()
        new = [key for key, stamp in stamps.items() if self._stamps.get(key) != stamp]
        found = {key: names for key in new if (names := self._aliases_of(key))}
        if found or not self._claims.keys().isdisjoint((*gone, *new)):
            kept = {key: self._claims[key] for key in self._claims.keys() - {*gone, *new}}
            self._claims = kept | found
            self._owners = _owners(self._claims)
            self._ever.update(self._owners)
        self._stamps = stamps

    def _exists(self, key: str) -> bool:
        try:
            self._store.info(key)
        except NoSuchSession:
            return False
        if len(self._sessions) >= REMEMBERED:
            self._sessions.clear()
        self._sessions.add(key)
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
