"""The contract on the PostgreSQL store: both halves, and most of the first through PgBouncer.

A folder of the first half is a namespace, so that each store has others beside it in the same
tables; one of the second half is a database.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar
from uuid import uuid4

import pytest

import stenolog
from bouncer import Bouncer
from postgres_server import Databases, Places
from stenolog.stores.base import GroupStore, Store
from stenolog.testing import CrashContract, StoreContract
from stenolog.testing.contract.appends import Appends
from stenolog.testing.contract.follow import Following
from stenolog.testing.contract.history import Checkpoints, Replacing
from stenolog.testing.contract.leases import Leases
from stenolog.testing.contract.tokens import Tokens
from stenolog.testing.contract.trash import Trash
from stenolog.testing.contract.writers import Writers


@pytest.fixture(scope="class")
def database(postgres_databases: Databases) -> Iterator[str]:
    """The database of all the tests of a class."""
    url = postgres_databases.new()
    # Open all the time, so that not every test makes connections of its own.
    with stenolog.open_store(url):
        yield url
    postgres_databases.leave(url)


@pytest.fixture(scope="class")
def through(own_databases: Databases, bouncer: Bouncer) -> Iterator[str]:
    """The same through PgBouncer."""
    direct = own_databases.new()
    url = bouncer.url(direct)
    with stenolog.open_store(url):
        yield url
    own_databases.leave(direct)


class TestPostgresStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _database(self, database: str) -> None:
        self._url = database

    def make_store(self, path: Path) -> Store:  # noqa: ARG002 - it lives in no folder
        return stenolog.open_store(self._url, namespace=uuid4().hex)

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
    Appends, Replacing, Checkpoints, Tokens, Writers, Following, Trash, Leases
):
    @pytest.fixture(autouse=True)
    def _database(self, through: str) -> None:
        self._url = through

    def make_store(self, path: Path) -> Store:  # noqa: ARG002 - it lives in no folder
        return stenolog.open_store(self._url, namespace=uuid4().hex)
