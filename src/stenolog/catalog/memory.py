"""The index in memory: for stores that are there themselves, and where no file can be written."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from stenolog.catalog.connections import in_memory, make_tables, sorted_out
from stenolog.catalog.database import Broken, Transaction, Unusable
from stenolog.catalog.files import FileDatabase
from stenolog.catalog.statements import statements

if TYPE_CHECKING:
    from stenolog.catalog.language import Language


class MemoryDatabase:
    """Tables that are gone with the process."""

    def __init__(self, source: object = None) -> None:
        """Begin with what a file has, as far as that is of use, else with empty tables."""
        self.sql = statements()
        self._mutex = threading.Lock()
        self._connection = in_memory()
        if isinstance(source, FileDatabase):
            with suppress(Broken, Unusable):
                source.copy_to(self._connection)
                return
        make_tables(self._connection)

    @property
    def language(self) -> "Language":
        """That of FTS5."""
        # Who only lists does not wait for it.
        from stenolog.catalog.fts5 import FTS5

        return FTS5()

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A look at the tables."""
        with self._mutex:
            try:
                yield self._connection
            except sqlite3.Error as error:
                raise sorted_out(error, "the index in memory") from error

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        """A transaction: committed at the end, undone by any error."""
        with self._mutex:
            try:
                self._connection.execute("BEGIN")
                yield self._connection
                self._connection.execute("COMMIT")
            except sqlite3.Error as error:
                raise sorted_out(error, "the index in memory") from error
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def renew(self) -> None:
        """Begin with empty tables."""
        with self._mutex:
            self._connection.close()
            self._connection = in_memory()
            make_tables(self._connection)

    def close(self) -> None:
        """Let go of the memory."""
        with self._mutex:
            self._connection.close()
