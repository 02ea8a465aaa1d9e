"""Runs the store contract on the in-memory store."""

from pathlib import Path

import pytest

from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from support.contract import StoreContract


@pytest.mark.quick(3)
class TestInMemoryStore(StoreContract):
    # No DamageContract: it has no records outside of the objects of this process.

    def make_store(self, path: Path) -> Store:  # noqa: ARG002 - it lives in no folder
        return InMemoryStore()
