"""Tests `postgresql://` addresses: accepted forms and error messages."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import psycopg
import pytest

import stenolog
from stenolog import DamagedStore, PostgresStore, StoreUnavailable, UsageError
from stenolog.errors import ForeignLog, NewerFormat, ReadOnly, StoreClosed, install_command
from stenolog.stores.postgres import schema


def test_a_url_opens_the_database_and_carries_parameters(
    postgres_url: str, server: psycopg.Connection
) -> None:
    with stenolog.open_store(f"{postgres_url}?schema=mine&connections=3&busy_timeout=2") as store:
        assert isinstance(store, PostgresStore)
        store.add_message("a", "user", "x")
        settings = store.database.settings
        assert (settings.schema, settings.connections, settings.busy_timeout) == ("mine", 3, 2.0)
    assert server.execute("SELECT key, messages FROM mine.sessions").fetchall() == [("a", 1)]


@pytest.mark.parametrize(
    "parameters", ["schema=", "schema=a-b", "connections=0", "connections=x", "busy_timeout=-1"]
)
def test_p8_invalid_arguments_are_rejected(postgres_url: str, parameters: str) -> None:
    with pytest.raises(UsageError, match=r"schema|connections"):
        stenolog.open_store(f"{postgres_url}?{parameters}")


def test_p8_unknown_parameter_is_rejected_by_name(postgres_url: str) -> None:
    with pytest.raises(UsageError, match="synchronous"):
        stenolog.open_store(f"{postgres_url}?synchronous=full")


def test_the_stores_of_a_process_share_their_connections(postgres_url: str) -> None:
    with PostgresStore(postgres_url) as one:
        other = PostgresStore(postgres_url, namespace="notes")
        assert other.database is one.database
        other.close()
        other.close()
        assert one.add_message("a", "user", "still open") == 1
    with PostgresStore(postgres_url) as again:
        assert again.database is not one.database
        assert len(again.get_history("a")) == 1


def test_p8_read_only_store_creates_nothing_and_rejects_writes(
    postgres_url: str, server: psycopg.Connection
) -> None:
    with pytest.raises(StoreUnavailable, match="no sessions of stenolog in this database yet"):
        PostgresStore(postgres_url, read_only=True)
    assert server.execute("SELECT to_regnamespace('stenolog')").fetchall() == [(None,)]
    with PostgresStore(postgres_url) as store:
        store.add_message("a", "user", "x")
    with PostgresStore(postgres_url, read_only=True) as store:
        assert [message.content for message in store.get_history("a")] == ["x"]
        with pytest.raises(ReadOnly, match="opened read-only"):
            store.add_message("a", "user", "y")
        with pytest.raises(ReadOnly):
            store.lease("a", ttl=1)


def test_p8_database_with_another_encoding_is_rejected(
    postgres_url: str, server: psycopg.Connection
) -> None:
    name = f"{server.info.dbname}_latin"
    server.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    try:
        other = postgres_url.replace(server.info.dbname, name)
        with pytest.raises(UsageError, match=r"encoding LATIN1.*createdb --encoding=UTF8"):
            PostgresStore(other)
    finally:
        server.execute(f"DROP DATABASE {name}")


def test_p1_synchronous_commit_is_enabled_if_the_server_has_it_off(
    postgres_url: str, server: psycopg.Connection
) -> None:
    server.execute(f"ALTER DATABASE {server.info.dbname} SET synchronous_commit = off")
    with PostgresStore(postgres_url) as store:
        found = store.database.run_read(
            lambda looking: list(looking.execute("SHOW synchronous_commit"))
        )
        assert found == [("on",)]


def test_p13_running_process_rejects_other_tables_with_their_fingerprint(
    store: PostgresStore, server: psycopg.Connection, postgres_url: str
) -> None:
    store.add_message("gone", "user", "x")
    store.delete("gone")
    store.add_message("a", "user", "x")

    def mark(number: int) -> None:
        server.execute("UPDATE stenolog.about SET version = %s", (number,))
        server.execute("UPDATE stenolog.session SET format = %s", (number,))

    mark(0x99)
    for call in (
        lambda: store.add_message("a", "user", "y"),
        lambda: store.add_message("a", "user", "y", once="t"),
        lambda: store.add_message("b", "user", "y"),
        lambda: store.clear("a"),
        lambda: store.set_summary("new", "y"),
        lambda: store.set_history("new", [{"role": "user"}]),
        lambda: store.admin.restore("gone"),
        lambda: store.lease("a", ttl=5),
        lambda: store.get_history("a"),
        lambda: PostgresStore(postgres_url, connections=2),
    ):
        with pytest.raises(NewerFormat, match=r"another version of stenolog: they are 00000099"):
            call()
    mark(schema.fingerprint())
    assert [message.content for message in store.get_history("a")] == ["x"]


def test_open_waits_while_another_process_creates_the_tables(postgres_url: str) -> None:
    found: list[object] = []

    def come(number: int) -> None:
        try:
            with PostgresStore(postgres_url, connections=number) as store:
                found.append(store.add_message("a", "user", number))
        except Exception as error:  # noqa: BLE001 - whatever it is, the test tells it
            found.append(error)

    threads = [threading.Thread(target=come, args=[number]) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, found)) == [str(seq) for seq in range(1, 9)]


def test_missing_driver_error_names_the_package(tmp_path: Path) -> None:
    (tmp_path / "psycopg.py").write_text("raise ImportError('no such module', name='psycopg')\n")
    script = (
        "import stenolog\n"
        "stenolog.PostgresStore\n"
        "try:\n"
        "    stenolog.open_store('postgresql://host/x')\n"
        "except stenolog.UsageError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    told = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert install_command("postgres") in told.stdout


def test_forked_child_uses_its_own_connections(store: PostgresStore) -> None:
    store.add_message("a", "user", "parent")
    child = os.fork()
    if child == 0:
        try:
            store.add_message("a", "user", "child")
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    store.add_message("a", "user", "parent again")
    assert [message.content for message in store.get_history("a")] == [
        "parent",
        "child",
        "parent again",
    ]


def test_p8_callers_beyond_the_connection_limit_wait_and_then_raise(
    postgres_url: str,
) -> None:
    with PostgresStore(postgres_url, connections=1, busy_timeout=0.2) as store:
        store.add_message("a", "user", "x")
        with (
            store.database.read_transaction(),
            pytest.raises(stenolog.StoreBusy, match="connections=NUMBER"),
        ):
            store.get_history("a")
        assert len(store.get_history("a")) == 1


@pytest.mark.parametrize(
    "make",
    [
        "CREATE TABLE stenolog.about (version text)",
        "CREATE TABLE stenolog.about (version int8); INSERT INTO stenolog.about VALUES (1)",
        "CREATE VIEW stenolog.about AS SELECT 1::int8 AS version",
        "CREATE TABLE stenolog.session (id int)",
    ],
)
def test_p8_tables_of_another_program_are_left_alone(
    make: str, postgres_url: str, server: psycopg.Connection
) -> None:
    server.execute(f"CREATE SCHEMA stenolog; {make}")
    with pytest.raises(ForeignLog, match=r"use another schema: \?schema=NAME"):
        PostgresStore(postgres_url)


@pytest.mark.parametrize("version", ["'abc'::text", "NULL::int", "'{}'::jsonb"])
def test_p8_version_that_is_no_number_raises_damaged_store(
    version: str, postgres_url: str, server: psycopg.Connection
) -> None:
    server.execute("CREATE SCHEMA stenolog; CREATE TABLE stenolog.session ()")
    server.execute("CREATE TABLE stenolog.message ()")
    server.execute(f"CREATE TABLE stenolog.about AS SELECT {version} AS version".encode())
    with pytest.raises(DamagedStore, match="version number"):
        PostgresStore(postgres_url)


def test_p10_text_is_unchanged_with_any_client_encoding(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    for place in (postgres_url, f"{postgres_url}?client_encoding=latin1"):
        with PostgresStore(place) as store:
            store.add_message("a", "user", "café €")
            store.add_message("a", "user", "café €", once=place)
            assert {message.content for message in store.get_history("a")} == {"café €"}


def test_concurrent_opens_work_with_any_default_isolation(
    postgres_url: str, server: psycopg.Connection
) -> None:
    name = server.info.dbname
    server.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    test_open_waits_while_another_process_creates_the_tables(postgres_url)


def test_health_reports_a_server_that_accepts_no_writes(
    postgres_url: str, server: psycopg.Connection
) -> None:
    PostgresStore(postgres_url).close()
    server.execute(f"ALTER DATABASE {server.info.dbname} SET default_transaction_read_only = on")
    with PostgresStore(postgres_url) as store:
        health = store.admin.health()
        assert not health.ok
        assert "accepts no writes" in health.problems[0]


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:s%zzSECRET@h/db",
        "postgres://u:SECRET@[::1/db",
        "postgresql://u:pa@SECRET@host/db",
    ],
)
def test_p11_error_for_an_invalid_url_does_not_contain_it(url: str) -> None:
    with pytest.raises(UsageError) as raised:
        stenolog.open_store(url)
    assert "SECRET" not in str(raised.value)
    assert "%40" in str(raised.value)


def test_p8_close_wakes_callers_that_wait_for_a_connection(
    postgres_url: str,
) -> None:
    store = PostgresStore(postgres_url, connections=1, busy_timeout=30)
    found: list[type[Exception]] = []
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        try:
            store.get_history("a")
        except stenolog.StenologError as error:
            found.append(type(error))

    thread = threading.Thread(target=wait)
    with store.database.read_transaction():
        thread.start()
        begun.wait()
        store.close()
        thread.join(20)
    assert found == [StoreClosed]
