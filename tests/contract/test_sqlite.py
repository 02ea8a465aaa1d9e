"""Runs the store contract on the SQLite store: API, damage and crashes."""

from pathlib import Path
from typing import ClassVar

import apsw
import pytest

import stenolog
from stenolog.stores.base import Store
from support.contract import CrashContract, DamageContract, DamagedRecord, StoreContract


class TestSQLiteStore(StoreContract):
    def make_store(self, path: Path) -> Store:
        return stenolog.open_store(f"sqlite:{path}/sessions.db")


class TestSQLiteStoreIsKilled(CrashContract):
    factory: ClassVar[str] = "stenolog:open_store"

    def where(self, path: Path) -> str:
        return f"sqlite:{path}/sessions.db"


class TestSQLiteStoreIsDamaged(DamageContract):
    """Each record is damaged by invalid bytes, and by deleting its row."""

    @pytest.fixture(autouse=True, params=["unreadable", "missing"])
    def _how(self, request: pytest.FixtureRequest) -> None:
        self._missing = request.param == "missing"

    def make_store(self, path: Path) -> Store:
        self._file = path / "sessions.db"
        return stenolog.open_store(f"sqlite:{self._file}")

    def damage(self, store: Store, record: DamagedRecord, key: str) -> Store:
        store.close()
        table = "state" if record == "trash" else record
        which = {
            "change": "AND number = (SELECT max(number) FROM change)",
            "message": "AND seq = 2",
        }.get(record, "")
        where = f"WHERE session = (SELECT id FROM session WHERE key = ?) {which}"  # noqa: S608
        what = f"UPDATE {table} SET body = x'7b22ff'"  # noqa: S608
        if self._missing:
            what = f"DELETE FROM {table}"  # noqa: S608
        connection = apsw.Connection(str(self._file))
        connection.execute(f"{what} {where}", (key,))
        assert connection.changes() == 1
        connection.close()
        return stenolog.open_store(f"sqlite:{self._file}")
