"""Runs the store contract on PostgreSQL: API, damage, crashes; most of the API through PgBouncer.

A folder of the first half is a namespace, so that each store shares its tables with others; a
folder of the second half is a database.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar
from uuid import uuid4

import psycopg
import pytest

import stenolog
from stenolog.stores.base import Store
from support.contract import CrashContract, DamageContract, DamagedRecord, StoreContract
from support.contract.append_contract import Appends, IdempotencyKeys
from support.contract.concurrency_contract import Following, Leases, Writers
from support.contract.crash_contract import Writer
from support.contract.history_contract import Checkpoints, Replacing
from support.contract.lifecycle_contract import Trash
from support.pgbouncer import Bouncer
from support.postgres_server import Databases, Places, attempts
from support.store_calls import Call

_OTHER_CONNECTIONS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
"""


@pytest.fixture(scope="class")
def database(postgres_databases: Databases) -> Iterator[str]:
    """Create the database of all tests of a class."""
    url = postgres_databases.new()
    # Kept open, so that not every test creates new connections.
    with stenolog.open_store(url):
        yield url
    postgres_databases.leave(url)


@pytest.fixture(scope="class")
def through(own_databases: Databases, bouncer: Bouncer) -> Iterator[str]:
    """Create the same through PgBouncer."""
    direct = own_databases.new()
    url = bouncer.url(direct)
    with stenolog.open_store(url):
        yield url
    own_databases.leave(direct)


# Its code for the cases of a test is that of SQLite, which runs all of them.
@pytest.mark.quick(2)
class TestPostgresStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _database(self, database: str) -> None:
        self._url = database

    def make_store(self, path: Path) -> Store:  # noqa: ARG002 - it lives in no folder
        return stenolog.open_store(self._url, namespace=uuid4().hex)


class TestPostgresStoreIsKilled(CrashContract):
    factory: ClassVar[str] = "stenolog:open_store"

    @pytest.fixture(autouse=True)
    def _places(self, postgres_places: Places) -> None:
        self._databases = postgres_places

    def where(self, path: Path) -> str:
        return self._databases.at(path)

    @contextmanager
    def start_writer(self, path: Path, calls: Sequence[Call]) -> Iterator[Writer]:
        """Wait at the end until the server has ended the connection of the killed writer.

        The server may still complete a call of a writer that was killed a moment ago.
        """
        with super().start_writer(path, calls) as writer:
            yield writer
        with psycopg.connect(self.where(path), autocommit=True) as server:
            for _ in attempts():
                if server.execute(_OTHER_CONNECTIONS).fetchone() == (0,):
                    return
        raise AssertionError("the server has not ended the connections of a killed writer")


class TestPostgresStoreIsDamaged(DamageContract):
    """Messages and changes are also damaged by deleting rows; a state is only a column."""

    @pytest.fixture(autouse=True, params=["unreadable", "missing"])
    def _how(self, request: pytest.FixtureRequest, database: str) -> None:
        self._url = database
        self._missing = request.param == "missing"

    def make_store(self, path: Path) -> Store:  # noqa: ARG002 - it lives in no folder
        self._namespace = uuid4().hex
        return stenolog.open_store(self._url, namespace=self._namespace)

    def damage(self, store: Store, record: DamagedRecord, key: str) -> Store:
        store.close()
        session = "(SELECT id FROM stenolog.session WHERE namespace = %s AND key = %s)"
        if record in ("state", "trash"):
            body = "" if self._missing else '{"format'
            statement = f"UPDATE stenolog.session SET state = '{body}' WHERE id = {session}"  # noqa: S608
        else:
            newest = "(SELECT max(number) FROM stenolog.change AS c WHERE c.session = t.session)"
            which = "seq = 2" if record == "message" else f"number = {newest}"
            what = f"UPDATE stenolog.{record} AS t SET body = '{{\"ro'"  # noqa: S608
            if self._missing:
                what = f"DELETE FROM stenolog.{record} AS t"  # noqa: S608
            statement = f"{what} WHERE session = {session} AND {which}"
        with psycopg.connect(self._url, autocommit=True) as server:
            done = server.execute(statement.encode(), (self._namespace, key.encode()))
            assert done.rowcount == 1
        return stenolog.open_store(self._url, namespace=self._namespace)


class TestPostgresStoreThroughPgBouncer(
    Appends, Replacing, Checkpoints, IdempotencyKeys, Writers, Following, Trash, Leases
):
    @pytest.fixture(autouse=True)
    def _database(self, through: str) -> None:
        self._url = through

    def make_store(self, path: Path) -> Store:  # noqa: ARG002 - it lives in no folder
        return stenolog.open_store(self._url, namespace=uuid4().hex)
