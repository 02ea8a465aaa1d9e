"""The contract on the PostgreSQL store: both halves, and the first half through PgBouncer.

A folder of the contract is a database of its own.
"""

from pathlib import Path
from typing import ClassVar

import pytest

import stenolog
from bouncer import Bouncer
from postgres_server import Places
from stenolog.stores.base import GroupStore, Store
from stenolog.testing import CrashContract, StoreContract
from stenolog.testing.contract.appends import Appends
from stenolog.testing.contract.follow import Following
from stenolog.testing.contract.leases import Leases
from stenolog.testing.contract.tokens import Tokens
from stenolog.testing.contract.trash import Trash
from stenolog.testing.contract.undo import Undoing
from stenolog.testing.contract.writers import Writers


class TestPostgresStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _places(self, postgres_places: Places) -> None:
        self._databases = postgres_places

    def make_store(self, path: Path) -> Store:
        return stenolog.open_store(self._databases.at(path))

    def test_it_takes_appends_in_groups(self, store: Store) -> None:
        assert isinstance(store, GroupStore)


class TestPostgresStoreIsKilled(CrashContract):
    factory: ClassVar[str] = "stenolog:open_store"

    @pytest.fixture(autouse=True)
    def _places(self, postgres_places: Places) -> None:
        self._databases = postgres_places

    def where(self, path: Path) -> str:
        return self._databases.at(path)


class TestPostgresStoreThroughPgBouncer(
    Appends, Tokens, Writers, Following, Undoing, Trash, Leases
):
    @pytest.fixture(autouse=True)
    def _places(self, postgres_places: Places, bouncer: Bouncer) -> None:
        self._databases = postgres_places
        self._bouncer = bouncer

    def make_store(self, path: Path) -> Store:
        return stenolog.open_store(self._bouncer.url(self._databases.at(path)))
