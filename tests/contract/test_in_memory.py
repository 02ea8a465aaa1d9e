"""Runs the store contract on the in-memory store."""

from pathlib import Path

from stenolog.stores.base import GroupStore, Store
from stenolog.stores.in_memory import InMemoryStore
from support.contract import StoreContract


class TestInMemoryStore(StoreContract):
    # No DamageContract: it has no records outside of the objects of this process.

    def make_store(self, path: Path) -> Store:  # noqa: ARG002 - it lives in no folder
        return InMemoryStore()


def test_in_memory_store_is_not_a_group_store() -> None:
    # AsyncStore must also work on stores without group appends, such as this one.
    assert not isinstance(InMemoryStore(), GroupStore)
