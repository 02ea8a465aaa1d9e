"""The index inside a SQLite store: tables of its own, one set for each namespace."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import msgspec

from stenolog.catalog.database import Broken, Busy, Transaction, Unusable
from stenolog.catalog.statements import PREFIX, VERSION, schema, statements, triggers
from stenolog.errors import DamagedStore, ReadOnly, StoreBusy, StoreUnavailable

if TYPE_CHECKING:
    from stenolog.catalog.language import Language

_TABLES: Final = ("words", "block", "said", "message", "tag", "session", "about")


class StoreDatabase(Protocol):
    """What a store lets others do in its database."""

    def read(self) -> AbstractContextManager[Transaction]:
        """A consistent look."""
        ...

    def write(self) -> AbstractContextManager[Transaction]:
        """A transaction of one's own."""
        ...


@runtime_checkable
class HasDatabase(Protocol):
    """A store that keeps its sessions in a database, in which an index can have its tables."""

    @property
    def database(self) -> StoreDatabase:
        """The database."""
        ...

    @property
    def namespace(self) -> str:
        """Which of the sessions in it are the store's."""
        ...


def schema_of(store: HasDatabase) -> str | None:
    """Where in a PostgreSQL server's database the tables are; None for SQLite, which has none."""
    settings = getattr(store.database, "settings", None)
    schema = getattr(settings, "schema", None)
    return schema if isinstance(schema, str) else None


class TableDatabase:
    """The tables of one namespace in the database of a store."""

    def __init__(self, database: StoreDatabase, namespace: str) -> None:
        self.prefix = f"{PREFIX}{namespace.encode().hex()}_"
        self.sql = statements(self.prefix)
        self._database = database
        self._damaged = False

    @property
    def language(self) -> "Language":
        """That of FTS5."""
        # Who only lists does not wait for it.
        from stenolog.catalog.fts5 import FTS5

        return FTS5()

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A look at the tables as they are at one moment."""
        with self._sorted(), self._database.read() as transaction:
            self._check(transaction)
            yield transaction

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        """A transaction of one's own, beside which the store cannot write."""
        with self._sorted(), self._database.write() as transaction:
            self._check(transaction)
            yield transaction

    def renew(self) -> None:
        """Drop the tables, and make empty ones. Raises DamagedStore where the store is."""
        try:
            with self._database.write() as transaction:
                if self._damaged or not self._is_current(transaction):
                    self._make_anew(transaction)
        except StoreBusy as error:
            raise Busy(str(error)) from error
        except (StoreUnavailable, ReadOnly) as error:
            raise Unusable(str(error)) from error
        self._damaged = False

    def close(self) -> None:
        """The database is the store's."""

    def _make_anew(self, transaction: Transaction) -> None:
        # A trigger that outlived its tables would keep the store from purging.
        for name in triggers(self.prefix):
            transaction.execute(f"DROP TRIGGER IF EXISTS {self.prefix}{name}")
        for table in _TABLES:
            transaction.execute(f"DROP TABLE IF EXISTS {self.prefix}{table}")
        *tables, about = schema(self.prefix)
        for statement in (*tables, *triggers(self.prefix).values()):
            transaction.execute(statement)
        transaction.execute(about, (VERSION,))

    def _is_current(self, transaction: Transaction) -> bool:
        [(tables,)] = transaction.execute(self.sql["has_tables"])
        return bool(tables) and list(transaction.execute(self.sql["version"])) == [(VERSION,)]

    def _check(self, transaction: Transaction) -> None:
        if not self._is_current(transaction):
            raise Broken("the index is missing, or of another version")

    @contextmanager
    def _sorted(self) -> Iterator[None]:
        try:
            yield
        except DamagedStore as error:
            self._damaged = True
            raise Broken(str(error)) from error
        except (ValueError, msgspec.MsgspecError) as error:
            # Whatever is read here was written here: what cannot be read is damaged.
            self._damaged = True
            raise Broken(f"the index holds what nobody wrote: {error}") from error
        except StoreBusy as error:
            raise Busy(str(error)) from error
        except (StoreUnavailable, ReadOnly) as error:
            raise Unusable(str(error)) from error
