"""Tests that a new database equals a migrated one, and that older ones are migrated."""

from pathlib import Path

import apsw
import pytest

from stenolog import SQLiteStore
from stenolog.stores.sqlite.database_file import (
    APPLICATION_ID,
    create_compatibility_views,
    migrations,
    newest_version,
    run_script,
    view_scripts,
)
from stenolog.stores.sqlite.transactions import FURTHER_SQL, PARAMETER_COUNTS, SQL


def _tables(connection: apsw.Connection) -> list[tuple[object, ...]]:
    """Return every table, index and trigger, without white space and comments."""
    return sorted(
        (kind, name, table, " ".join(line.partition("--")[0] for line in (sql or "").split()))
        for kind, name, table, sql in connection.execute(
            "SELECT type, name, tbl_name, sql FROM sqlite_schema"
        )
    )


def _made(*scripts: str) -> apsw.Connection:
    connection = apsw.Connection(":memory:")
    for script in scripts:
        run_script(connection, script)
    return connection


def _old_database(file: Path, version: int) -> None:
    """Create a database as a stenolog of that schema left it."""
    connection = apsw.Connection(str(file))
    for script in migrations()[:version]:
        run_script(connection, script)
    run_script(connection, f"PRAGMA user_version = {version}")
    run_script(connection, f"PRAGMA application_id = {APPLICATION_ID}")
    run_script(connection, "PRAGMA journal_mode = WAL")
    run_script(
        connection,
        """
        INSERT INTO session VALUES
            (1, 'sessions', 'a', '0123456789abcdef', '2026-01-01T00:00:00.000000Z',
             '2026-01-01T00:00:00.000000Z', 1, 30, 1, NULL, NULL);
        INSERT INTO state VALUES
            (1, CAST('{"format":1,"key":"","uid":"","generation":1,"created":""}' AS BLOB));
        INSERT INTO message (id, session, seq, at, body) VALUES
            (1, 1, 1, '2026-01-01T00:00:00.000000Z',
             CAST('{"role":"user","content":"old"}' AS BLOB));
        """,
    )
    connection.close()


def test_new_schema_equals_the_migrated_one(file: Path) -> None:
    SQLiteStore(file).close()
    fresh = apsw.Connection(str(file))
    migrated = _made(*migrations())
    try:
        assert _tables(fresh) == _tables(migrated)
        assert fresh.pragma("user_version") == newest_version() == len(migrations())
    finally:
        fresh.close()
        migrated.close()


@pytest.mark.parametrize("version", range(1, newest_version()))
def test_p13_older_database_is_migrated_with_its_content(file: Path, version: int) -> None:
    _old_database(file, version)
    with SQLiteStore(file) as store:
        assert [message.content for message in store.get_history("a")] == ["old"]
        assert store.add_message("a", "user", "new") == 2
        with store.lease("a", ttl=10) as lease:
            assert not lease.lost
    connection = apsw.Connection(str(file))
    fresh = _made(*migrations())
    try:
        assert _tables(connection) == _tables(fresh)
        assert connection.pragma("user_version") == newest_version()
    finally:
        connection.close()
        fresh.close()


@pytest.mark.parametrize("version", range(1, newest_version()))
def test_p13_read_only_store_reads_an_older_database(file: Path, version: int) -> None:
    _old_database(file, version)
    before = file.read_bytes()
    with SQLiteStore(file, read_only=True) as store:
        assert [message.content for message in store.get_history("a")] == ["old"]
        assert store.database.is_outdated
        # A database with sessions but without marks may have aliases.
        assert store.read_marker("aliases") == ("1" if version < 3 else "")
        with store.database.read_transaction() as transaction:
            for statement in SQL.values():
                if statement.startswith("SELECT"):
                    places = max([0, *(n for n in range(1, 10) if f"?{n}" in statement)])
                    list(transaction.execute(statement, [0] * places))
            assert list(transaction.execute("PRAGMA query_only")) == [(1,)]
    assert file.read_bytes() == before


def test_p13_reader_sees_a_migration_by_a_writer(file: Path) -> None:
    _old_database(file, 1)
    with SQLiteStore(file, read_only=True) as reading:
        assert reading.read_marker("aliases") == "1"
        with SQLiteStore(file) as writing:
            writing.update_marker("aliases")
            assert reading.read_marker("aliases") == writing.read_marker("aliases") == "2"
        assert not reading.database.is_outdated


@pytest.mark.parametrize("version", range(1, newest_version()))
def test_views_of_older_tables_have_all_new_columns(version: int) -> None:
    fresh, old = _made(*migrations()), _made(*migrations()[:version])
    create_compatibility_views(old, version)
    try:
        tables = [str(name) for kind, name, *_ in _tables(fresh) if kind == "table"]
        for table in tables:
            assert _columns(old, table) == _columns(fresh, table)
    finally:
        fresh.close()
        old.close()


def _columns(connection: apsw.Connection, table: str) -> list[str]:
    return [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]


def test_each_migration_starts_with_its_reason() -> None:
    for script in (*migrations(), *view_scripts().values()):
        assert script.startswith("-- ")


@pytest.mark.parametrize("name", SQL)
def test_no_statement_needs_a_full_scan(name: str) -> None:
    connection = _made(*migrations())
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


def test_messages_and_sessions_are_found_by_index_alone(store: SQLiteStore) -> None:
    with store.database.read_transaction() as transaction:
        plan = [
            detail
            for *_, detail in transaction.execute(
                f"EXPLAIN QUERY PLAN {SQL['find_session']}", ("sessions", "a")
            )
        ]
    assert any("USING INDEX session_live" in step for step in plan)


def test_file_header_matches_the_design(store: SQLiteStore) -> None:
    with store.database.write_transaction() as transaction:
        found = {
            name: next(iter(transaction.execute(f"PRAGMA {name}")))[0]
            for name in ("journal_mode", "synchronous", "foreign_keys", "application_id")
        }
    assert found == {
        "journal_mode": "wal",
        "synchronous": 2,
        "foreign_keys": 1,
        "application_id": APPLICATION_ID,
    }


def test_removing_a_session_removes_all_its_rows(store: SQLiteStore) -> None:
    store.add_message("a", "user", "x", once="t")
    store.set_summary("a", "text")
    with store.database.write_transaction() as transaction:
        transaction.execute("DELETE FROM session")
    with store.database.read_transaction() as transaction:
        for table in ("state", "message", "token", "change"):
            assert list(transaction.execute(f"SELECT count(*) FROM {table}")) == [(0,)]  # noqa: S608
