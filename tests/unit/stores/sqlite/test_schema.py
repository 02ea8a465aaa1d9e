"""Tests of the tables, their fingerprint, and the statements on them."""

from pathlib import Path

import apsw
import pytest

from stenolog import SQLiteStore
from stenolog.stores.sql.dialect import schema_fingerprint
from stenolog.stores.sqlite import database_file
from stenolog.stores.sqlite.database_file import APPLICATION_ID, fingerprint, run_script
from stenolog.stores.sqlite.transactions import FURTHER_SQL, PARAMETER_COUNTS, SQL

_SCHEMA = Path(database_file.__file__).with_name("schema.sql")


def test_fingerprint_changes_with_the_tables_and_not_with_comments() -> None:
    script = "-- A table.\nCREATE TABLE a (\n    x TEXT -- text\n);\n"
    assert schema_fingerprint(script) == schema_fingerprint("CREATE TABLE a (x TEXT);")
    assert schema_fingerprint(script) != schema_fingerprint("CREATE TABLE a (x BLOB);")


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", SQL)
def test_no_statement_needs_a_full_scan(name: str) -> None:
    connection = apsw.Connection(":memory:")
    run_script(
        connection, (Path(database_file.__file__).parent / "schema.sql").read_text(encoding="utf-8")
    )
    plan = [
        detail
        for statement in (SQL[name], *FURTHER_SQL.get(name, ()))
        for *_, detail in connection.execute(
            f"EXPLAIN QUERY PLAN {statement}", [None] * PARAMETER_COUNTS[statement]
        )
    ]
    connection.close()
    whole = {"every_session", "purge_begun", "end_purge", "stray_rows"}
    # The rows of a recursive query are not those of a table.
    scans = [step for step in plan if step.startswith("SCAN")]
    assert name in whole or set(scans) <= {"SCAN CONSTANT ROW", "SCAN step"}, plan


def test_file_header_matches_the_design(store: SQLiteStore) -> None:
    with store.database.write_transaction() as transaction:
        found = {
            name: next(iter(transaction.execute(f"PRAGMA {name}")))[0]
            for name in (
                "journal_mode",
                "synchronous",
                "foreign_keys",
                "application_id",
                "user_version",
                "auto_vacuum",
            )
        }
    assert found == {
        "journal_mode": "wal",
        "synchronous": 2,
        "foreign_keys": 1,
        "application_id": APPLICATION_ID,
        "user_version": fingerprint(),
        "auto_vacuum": 2,  # in small steps, and only when they are asked for
    }
