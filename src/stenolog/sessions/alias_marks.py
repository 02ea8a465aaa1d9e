"""A mark in each store that is another one whenever a session was given aliases.

So that a new key costs nothing where nobody ever had an alias, and elsewhere no look through all
sessions for each. The aliases themselves stand in the meta of their sessions: the mark is made
before the first of them, and changed after each.
"""

from typing import Final

from stenolog.stores.base import MarkedStore, Store

NAME: Final = "aliases"
NONE_YET: Final = ""
"""The mark of a store in which no session was ever given an alias."""


def current(store: Store) -> str | None:
    """The mark as it is now; None where nobody can tell, and every look must be made."""
    return store.mark(NAME) if isinstance(store, MarkedStore) else None


def prepare(store: Store) -> None:
    """Have a mark before the first alias is given. Raises StoreUnavailable."""
    if current(store) == NONE_YET:
        change(store)


def change(store: Store) -> None:
    """Make it another one. Raises StoreUnavailable."""
    if isinstance(store, MarkedStore):
        store.change_mark(NAME)
