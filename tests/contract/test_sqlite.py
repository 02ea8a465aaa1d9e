"""The contract on the SQLite store: both halves."""

from pathlib import Path
from typing import ClassVar

import stenolog
from stenolog.stores.base import GroupStore, Store
from stenolog.testing import CrashContract, StoreContract


class TestSQLiteStore(StoreContract):
    def make_store(self, path: Path) -> Store:
        return stenolog.open_store(f"sqlite:{path}/sessions.db")

    def test_it_takes_appends_in_groups(self, store: Store) -> None:
        assert isinstance(store, GroupStore)


class TestSQLiteStoreIsKilled(CrashContract):
    factory: ClassVar[str] = "stenolog:open_store"

    def where(self, path: Path) -> str:
        return f"sqlite:{path}/sessions.db"
