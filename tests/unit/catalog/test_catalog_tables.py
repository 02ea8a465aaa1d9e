"""The index inside a PostgreSQL store: tables of its own, which the store does not notice."""

import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import psycopg
import pytest

import stenolog
from stenolog.catalog import Catalog, open_catalog, steps
from stenolog.catalog.catalog_tables import SchemaDatabase, table_prefix
from stenolog.errors import StoreUnavailable
from stenolog.stores.base import Store
from stenolog.stores.postgres import PostgresStore
from support.catalog_scan import catalogued, differences, found_words, full_scan, words_said
from support.postgres_server import Installation, attempts, execute
from support.random_operations import WORDS, fill_three_sessions, operate

PREFIX = table_prefix("sessions")


@pytest.fixture
def where(postgres_schema: str) -> str:
    return postgres_schema


@pytest.fixture
def tables(where: str) -> str:
    """What the names of the index's tables begin with, their schema included."""
    return f"{where.partition('schema=')[2]}.{PREFIX}"


def _run(where: str, statement: str) -> list[tuple[Any, ...]]:
    return execute(where.partition("?")[0], statement)


def _count(where: str, table: str) -> int:
    [(found,)] = _run(where, f"SELECT count(*) FROM {table}")  # noqa: S608 - a table of ours
    return int(found)


def _agree(store: Store, catalog: Catalog) -> None:
    assert differences(catalogued(catalog), full_scan(store)) == {}
    for word in WORDS:
        assert found_words(catalog, word) == words_said(store, word)
    assert catalog.problems == ()


@pytest.mark.parametrize("seed", range(1))
def test_catalog_equals_a_full_scan_after_any_operations(where: str, seed: int) -> None:
    chance = random.Random(seed)
    with ExitStack() as opened:
        stores = [opened.enter_context(stenolog.open_store(where)) for _ in range(2)]
        catalogs = [opened.enter_context(open_catalog(store)) for store in stores]
        for _ in range(8):
            for _ in range(15):
                operate(chance.choice(stores), chance)
            _agree(stores[0], chance.choice(catalogs))
        for catalog in catalogs:
            _agree(stores[0], catalog)


def test_catalog_is_stored_and_reused(where: str, tables: str) -> None:
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
        catalog.calibrate("m", estimated=100, reported=130)
        _agree(store, catalog)
        known = catalog.calibration("m")
    about = f"SELECT made, writes FROM {tables}about"  # noqa: S608 - a table of ours
    before = _run(where, about)
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        assert isinstance(catalog._active.database, SchemaDatabase)
        _agree(store, catalog)
        assert catalog.calibration("m") == known
    assert _run(where, about) == before


def test_read_only_store_is_indexed_in_memory(where: str, tables: str) -> None:
    with stenolog.open_store(where) as store:
        fill_three_sessions(store)
    with stenolog.open_store(where, read_only=True) as store, open_catalog(store) as catalog:
        assert differences(catalogued(catalog), full_scan(store)) == {}
        assert catalog.problems == ()
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        catalog.refresh()
    with stenolog.open_store(where, read_only=True) as store, open_catalog(store) as catalog:
        assert differences(catalogued(catalog), full_scan(store)) == {}
        assert catalog.problems == ()
    with stenolog.open_store(where) as store, open_catalog(store, keep=False) as catalog:
        store.add_message("cli:default", "user", "new")
        before = _written(where, tables)
        assert differences(catalogued(catalog), full_scan(store)) == {}
        assert _written(where, tables) == before


def test_schema_with_a_quoted_name_has_a_catalog(postgres_database: str) -> None:
    with (
        stenolog.open_store(f"{postgres_database}?schema=Order_catalog_") as store,
        open_catalog(store) as catalog,
    ):
        fill_three_sessions(store)
        _agree(store, catalog)
        store.admin.purge("telegram:1")
        _agree(store, catalog)


# --- thrown away -------------------------------------------------------------------------------


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "harm",
    [
        "UPDATE {0}about SET version = 'old'",
        "DELETE FROM {0}about",
        "DROP TABLE {0}about",
        "DROP TABLE {0}session",
        "DROP TABLE {0}words, {0}message",
        "DROP TABLE {0}about, {0}session, {0}tag, {0}message, {0}said, {0}block, {0}words",
        "ALTER TABLE {0}message DROP COLUMN at",
        "UPDATE {0}session SET title = '\\xff41'",
        "UPDATE {0}session SET sight = 'not json'",
        "TRUNCATE {0}message",
        "DROP FUNCTION {0}purged CASCADE; UPDATE {0}about SET version = 'old'",
    ],
)
def test_missing_outdated_or_damaged_tables_are_rebuilt(where: str, tables: str, harm: str) -> None:
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
        catalog.refresh()
        catalog.calibrate("m", estimated=100, reported=130)
        known = catalog.calibration("m")
        for statement in harm.format(tables).split("; "):
            _run(where, statement)
        store.add_message("cli:default", "user", "allmessages more")
        with stenolog.open_store(where) as other, open_catalog(other) as fresh:
            _agree(other, fresh)
        _agree(store, catalog)
        assert catalog.calibration("m") == known
        store.admin.purge("cli:default")
        assert _count(where, f"{tables}session") == 0
        _agree(store, catalog)


@pytest.mark.quick(1)
@pytest.mark.parametrize("gone", ["about", "words", "session"])
def test_p4_remains_of_a_catalog_do_not_prevent_a_purge(where: str, tables: str, gone: str) -> None:
    with stenolog.open_store(where) as store:
        fill_three_sessions(store)
        with open_catalog(store) as catalog:
            catalog.refresh()
        _run(where, f"DROP TABLE {tables}{gone}")
        assert store.admin.purge("cli:default").messages == 2
        with open_catalog(store) as catalog:
            _agree(store, catalog)


# --- purged ------------------------------------------------------------------------------------


def _bytes_of_index(where: str) -> bytes:
    """All that the files of the index hold, what is deleted included."""
    schema = where.partition("schema=")[2]
    _run(where, "CHECKPOINT")
    files = _run(
        where,
        f"""
        WITH own AS (
            SELECT oid, reltoastrelid FROM pg_class
            WHERE relnamespace = '{schema}'::regnamespace AND relname LIKE '{PREFIX}%'
              AND relkind IN ('r', 'i')
        ), every AS (
            SELECT oid FROM own UNION SELECT reltoastrelid FROM own
            UNION SELECT indexrelid FROM pg_index JOIN own ON indrelid = reltoastrelid
        )
        SELECT pg_read_binary_file(pg_relation_filepath(oid)) FROM every WHERE oid <> 0
        """,  # noqa: S608 - tables of ours
    )
    return b"".join(content for (content,) in files)


def _say_secrets(store: Store) -> None:
    store.add_message("secretkey", "user", "zebrasecret xylophonequux " + "ocarinafoo " * 3_000)
    store.add_message("other", "user", "allmessages hello")


SECRETS = (b"zebrasecret", b"xylophonequux", b"ocarinafoo", b"secretkey")


def test_p4_purged_text_leaves_no_trace_in_the_files_of_the_catalog(where: str) -> None:
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        _say_secrets(store)
        assert catalog.search("zebrasecret").hits
        found = _bytes_of_index(where)
        assert all(word in found for word in SECRETS)
        assert store.admin.purge("secretkey").not_reached == ()
        found = _bytes_of_index(where)
        assert not any(word in found for word in SECRETS)
        _agree(store, catalog)
        store.add_message("other", "user", "zebrasecret")
        catalog.refresh()
        store.admin.purge("other", before=3)
        assert b"zebrasecret" not in _bytes_of_index(where)


def test_p4_purge_removes_words_that_the_index_had_deleted_before(where: str) -> None:
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        _say_secrets(store)
        catalog.refresh()
        store.delete("secretkey")
        assert [entry.key for entry in catalog.list().entries] == ["other"]
        store.admin.purge("secretkey")
    found = _bytes_of_index(where)
    assert not any(word in found for word in SECRETS)


def test_p4_refresh_that_read_before_a_purge_does_not_write_after_it(
    where: str,
) -> None:
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        catalog.refresh()
        store.add_message("secretkey", "user", "zebrasecret")
        history = store.get_history

        def purge_meanwhile(key: str, **options: object) -> list[stenolog.Message]:
            found = history(key, **options)  # type: ignore[arg-type]
            store.get_history = history  # type: ignore[method-assign]
            store.admin.purge("secretkey")
            return found

        store.get_history = purge_meanwhile  # type: ignore[method-assign]
        catalog.refresh()
        assert not catalog.list().entries
    assert b"zebrasecret" not in _bytes_of_index(where)


@contextmanager
def _aside(work: Callable[[], object]) -> Iterator[None]:
    """Do this in a thread of its own, which ends with the block."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(60)
    assert not thread.is_alive()
    assert failed == []


def _somebody_waits(where: str) -> bool:
    waiting = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    return any(_run(where, waiting) != [(0,)] for _ in attempts())


def test_p4_purge_waits_for_a_catalog_writer_and_removes_its_rows(where: str, tables: str) -> None:
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        store.add_message("secretkey", "user", "zebrasecret")
        catalog.refresh()
        database = catalog._active.database
        with ExitStack() as writing:
            transaction = writing.enter_context(database.write_transaction())
            transaction.run("add_said", (77, "zebrasecret"))
            with _aside(lambda: store.admin.purge("secretkey")):
                assert _somebody_waits(where)
                writing.close()
        assert _count(where, f"{tables}said") == 0
        assert not catalog.list().entries


@pytest.mark.slow
def test_p4_purge_during_a_dump_deletes_the_rows(where: str, tables: str) -> None:
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        _say_secrets(store)
        catalog.refresh()
        with psycopg.connect(where.partition("?")[0]) as dump:
            for name in ("about", "words", "said"):
                dump.execute(f"TABLE {tables}{name}".encode())
            store.admin.purge("secretkey")
            for name in ("session", "message", "said", "words"):
                assert _count(where, f"{tables}{name}") == 0
        assert catalog.search("zebrasecret").count == 0
        _agree(store, catalog)


@pytest.mark.slow
def test_read_during_emptying_sees_all_rows_or_none(where: str) -> None:
    """And none is what the next look fills again: a search never misses what is there."""
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
        catalog.refresh()
        database = catalog._active.database
        with database.read_transaction() as transaction:
            before = list(transaction.run("about"))
            with _aside(lambda: store.admin.purge("telegram:1")):
                assert _somebody_waits(where)
                # It waits for us, or takes the rows alone: we see them as they were.
                assert len(list(transaction.run("stamps"))) == 3
                assert before == list(transaction.run("about"))
        _agree(store, catalog)


def test_read_that_waited_for_emptying_sees_no_rows(where: str, tables: str) -> None:
    """What a look sees is decided when it begins; it must not begin before it has waited."""
    with (
        stenolog.open_store(where) as store,
        open_catalog(store) as catalog,
        psycopg.connect(where.partition("?")[0]) as purging,
    ):
        fill_three_sessions(store)
        catalog.refresh()
        database = catalog._active.database
        read = database.read_transaction
        purging.execute(f"LOCK TABLE {tables}about IN ACCESS EXCLUSIVE MODE".encode())
        for name in ("session", "tag", "message", "said", "block", "words"):
            purging.execute(f"TRUNCATE {tables}{name}".encode())
        purging.execute(f"UPDATE {tables}about SET made = made / 2".encode())  # noqa: S608

        def look() -> None:
            with read() as transaction:
                [(made, _)] = transaction.run("about")
                seen.append((made, len(list(transaction.run("stamps")))))

        before = catalog._active._known.catalog_id
        seen: list[tuple[int, int]] = []
        with _aside(look):
            assert _somebody_waits(where)
            purging.commit()
        [(made, sessions)] = seen
        assert (made == before, sessions) == (False, 0), "an old index without its rows"
        _agree(store, catalog)


def test_one_writer_at_a_time_does_not_block_readers(where: str) -> None:
    with (
        stenolog.open_store(where) as store,
        open_catalog(store) as catalog,
        open_catalog(store) as other,
    ):
        fill_three_sessions(store)
        catalog.refresh()
        database = catalog._active.database
        with ExitStack() as writing:
            writing.enter_context(database.write_transaction())
            assert len(other.list().entries) == 3
            store.add_message("cli:default", "user", "allmessages more")
            with _aside(lambda: _agree(store, other)):
                assert _somebody_waits(where)
                writing.close()
        _agree(store, catalog)


def test_purge_by_any_program_empties_the_catalog(where: str, tables: str) -> None:
    """Another user of the database may not touch the tables of who made the index."""
    schema = where.partition("schema=")[2]
    user = f"u{schema}"
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
        catalog.refresh()
        _run(where, f"CREATE ROLE {user} LOGIN PASSWORD 'x'")
        try:
            _run(where, f"GRANT USAGE ON SCHEMA {schema} TO {user}")
            for name in ("about", "session", "message", "token", "change", "lease", "mark"):
                _run(where, f"GRANT ALL ON {schema}.{name} TO {user}")
            place = where.replace(where.partition("//")[2].partition("@")[0], f"{user}:x")
            with stenolog.open_store(place) as other, open_catalog(other) as own:
                assert differences(catalogued(own), full_scan(other)) == {}
                assert "in memory" in own.problems[0]
                assert other.admin.purge("cli:default").messages == 2
            assert _count(where, f"{tables}words") == 0
            _agree(store, catalog)
        finally:
            _run(where, f"DROP OWNED BY {user}")
            _run(where, f"DROP ROLE {user}")


def _written(where: str, tables: str) -> list[tuple[Any, ...]]:
    return _run(where, f"SELECT made, writes FROM {tables}about")  # noqa: S608 - a table of ours


def _made(where: str, tables: str) -> int:
    [(made,)] = _run(where, f"SELECT made FROM {tables}about")  # noqa: S608 - a table of ours
    return int(made)


@contextmanager
def _stranger(where: str) -> Iterator[tuple[str, str]]:
    """A user with a schema of the same name, who may look into ours; and the address."""
    schema = where.partition("schema=")[2]
    user = f"s{schema}"
    _run(where, f"CREATE ROLE {user} LOGIN PASSWORD 'x'")
    try:
        _run(where, f"CREATE SCHEMA {user} AUTHORIZATION {user}")
        _run(where, f"GRANT USAGE ON SCHEMA {schema} TO {user}")
        place = where.replace(where.partition("//")[2].partition("@")[0], f"{user}:x")
        yield user, place
    finally:
        _run(where, f"DROP OWNED BY {user} CASCADE")
        _run(where, f"DROP ROLE {user}")


def test_purge_trigger_cannot_be_used_by_other_users(where: str, tables: str) -> None:
    """It runs with the rights of who made the index."""
    with (
        stenolog.open_store(where) as store,
        open_catalog(store) as catalog,
        _stranger(where) as (user, place),
    ):
        fill_three_sessions(store)
        catalog.refresh()
        before = _made(where, tables)
        _run(place, f"CREATE TABLE {user}.bait (session int8, namespace text)")
        _run(place, f"INSERT INTO {user}.bait VALUES (0, 'sessions')")  # noqa: S608
        trap = (
            f"CREATE TRIGGER trap AFTER DELETE ON {user}.bait REFERENCING OLD TABLE AS gone "
            f"FOR EACH STATEMENT EXECUTE FUNCTION {tables}purged('{PREFIX}')"
        )
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="purged"):
            _run(place, trap)
        _run(where, f"GRANT EXECUTE ON FUNCTION {tables}purged TO {user}")
        _run(place, trap)
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="not for a table outside"):
            _run(place, f"DELETE FROM {user}.bait")  # noqa: S608
        assert (_made(where, tables), _count(where, f"{tables}session")) == (before, 3)


def test_purge_trigger_ignores_arguments_and_temporary_tables(where: str, tables: str) -> None:
    """Nor do tables beside ours that have the names of an index."""
    schema = where.partition("schema=")[2]
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
        catalog.refresh()
        _run(where, f"CREATE TABLE {schema}.chat_message AS SELECT 1 AS kept")
        _run(
            where,
            f"CREATE TRIGGER told AFTER DELETE ON {schema}.message REFERENCING OLD TABLE AS gone "
            f"FOR EACH STATEMENT EXECUTE FUNCTION {tables}purged('chat_')",
        )
        with psycopg.connect(where.partition("?")[0], autocommit=True) as purging:
            purging.execute("CREATE TEMPORARY TABLE gone (session int8, namespace text)")
            purging.execute(f"DELETE FROM {schema}.message".encode())  # noqa: S608
        assert _count(where, f"{schema}.chat_message") == 1
        assert _count(where, f"{tables}session") == 0


def test_delete_of_no_rows_keeps_the_catalog(where: str, tables: str) -> None:
    """To copy a session that is there already deletes what it has too much."""
    schema = where.partition("schema=")[2]
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
        catalog.refresh()
        before = _made(where, tables)
        with psycopg.connect(where.partition("?")[0]) as copying:
            copying.execute(f"DELETE FROM {schema}.message WHERE seq > 1000".encode())  # noqa: S608
            copying.execute(f"DELETE FROM {schema}.session WHERE id < 0".encode())  # noqa: S608
            assert len(catalog.list().entries) == 3, "who copies keeps nobody from looking"
        assert (_made(where, tables), _count(where, f"{tables}session")) == (before, 3)
        _run(where, f"DELETE FROM {schema}.message WHERE seq > 1")  # noqa: S608
        assert _made(where, tables) != before


@pytest.mark.parametrize("name", ["notes", "o'clock $$ {schema} \\ \" %I; catalog_ 東京"])
def test_p4_purge_empties_only_the_catalog_of_its_namespace(
    where: str, tables: str, name: str
) -> None:
    with (
        stenolog.open_store(where) as sessions,
        stenolog.open_store(where, namespace=name) as notes,
        open_catalog(sessions) as of_sessions,
        open_catalog(notes) as of_notes,
    ):
        fill_three_sessions(sessions)
        notes.add_message("note", "user", "allmessages something else")
        notes.add_message("other", "user", "allmessages something else")
        of_sessions.refresh()
        of_notes.refresh()
        own = tables.replace(PREFIX, table_prefix(name))
        before = _made(where, tables), _made(where, own)
        notes.admin.purge("note")
        assert _count(where, f"{own}session") == 0
        assert (_made(where, tables), _count(where, f"{tables}session")) == (before[0], 3)
        _agree(notes, of_notes)
        between = _made(where, own)
        assert between != before[1]
        sessions.admin.purge("cli:default")
        assert _count(where, f"{tables}session") == 0
        assert (_made(where, own), _count(where, f"{own}session")) == (between, 1)


def test_p4_purged_session_without_messages_leaves_no_trace(where: str) -> None:
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        store.add_message("other", "user", "allmessages hello")
        store.set_meta("secretkey", title="zebrasecret")
        catalog.refresh()
        assert b"zebrasecret" in _bytes_of_index(where)
        store.admin.purge("secretkey")
        assert b"zebrasecret" not in _bytes_of_index(where)
        _agree(store, catalog)


def test_p4_messages_deleted_after_their_session_leave_no_trace(where: str, tables: str) -> None:
    schema = where.partition("schema=")[2]
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        _say_secrets(store)
        catalog.refresh()
        _run(where, f"ALTER TABLE {schema}.session DISABLE TRIGGER USER")
        one = f"SELECT id FROM {schema}.session WHERE key = 'secretkey'"  # noqa: S608
        [(number,)] = _run(where, one)
        _run(where, f"DELETE FROM {schema}.session WHERE id = {number}")  # noqa: S608
        assert _count(where, f"{tables}said") == 2
        _run(where, f"DELETE FROM {schema}.message WHERE session = {number}")  # noqa: S608
        assert _count(where, f"{tables}said") == 0


def test_p4_catalog_in_a_renamed_schema_is_rebuilt(postgres_database: str) -> None:
    with stenolog.open_store(f"{postgres_database}?schema=before") as store:
        fill_three_sessions(store)
        with open_catalog(store) as catalog:
            catalog.refresh()
    _run(postgres_database, "ALTER SCHEMA before RENAME TO behind")
    with (
        stenolog.open_store(f"{postgres_database}?schema=behind") as store,
        open_catalog(store) as catalog,
    ):
        _agree(store, catalog)
        store.admin.purge("cli:default")
        assert _count(postgres_database, f"behind.{PREFIX}session") == 0
        _agree(store, catalog)


# --- many at once ------------------------------------------------------------------------------


def _child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - told, before the child ends here
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)
    return pid


def _statuses(pids: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _talk(where: str, name: int) -> None:
    """Write, and see at once what was written."""
    key = f"talk:{name}"
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        for turn in range(1, 7):
            store.add_message(key, "user", f"allmessages turn{turn} of p{name}")
            counts = {entry.key: entry.count for entry in catalog.list().entries}
            assert counts.get(key) == turn, counts
            hits = catalog.search(f"turn{turn} p{name}").hits
            assert [(hit.key, hit.seq) for hit in hits] == [(key, turn)]
            if name == 0 and turn == 4:
                store.admin.purge("telegram:1")
        assert catalog.problems == ()


def test_concurrent_catalogs_see_their_own_writes(where: str) -> None:
    with stenolog.open_store(where) as store:
        fill_three_sessions(store)
        pids = [_child(partial(_talk, where, name)) for name in range(6)]
        assert _statuses(pids) == [0] * 6
        with open_catalog(store) as catalog:
            _agree(store, catalog)


def _refresh_for_ever(where: str, seed: int) -> None:
    chance = random.Random(seed)
    steps.MAX_MESSAGES = chance.choice([3, 50, 2_000])  # type: ignore[misc]
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        while True:
            catalog.refresh()
            if catalog.problems:
                raise AssertionError(catalog.problems)


def test_refresh_of_a_killed_process_is_continued_by_others(where: str) -> None:
    chance = random.Random(3)
    killed = 0
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        for _ in range(4):
            seeds = [chance.randrange(10**9) for _ in range(3)]
            pids = [_child(partial(_refresh_for_ever, where, seed)) for seed in seeds]
            try:
                for _ in range(25):
                    operate(store, chance)
                time.sleep(chance.uniform(0, 0.2))  # so long the others are at work
            finally:
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                statuses = _statuses(pids)
            killed += statuses.count(-signal.SIGKILL)
            assert set(statuses) <= {-signal.SIGKILL}, "a refresher failed"
            _agree(store, catalog)
    assert killed == 12


# --- a server that goes and comes --------------------------------------------------------------


def test_catalog_survives_a_broken_connection(where: str) -> None:
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
        catalog.refresh()
        database = catalog._active.database
        end = (
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        for _ in range(3):
            with suppress(Exception), database.read_transaction() as transaction:
                _run(where, end)
                transaction.run("about")
            _run(where, end)
            store.admin.stamps()
            _agree(store, catalog)
        assert catalog._active.database is database


@pytest.mark.slow
def test_unreachable_server_raises_and_the_catalog_is_kept(
    postgres_installation: Installation,
) -> None:
    server = postgres_installation.server().start()
    with PostgresStore(server.url(), busy_timeout=0.2) as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
        catalog.refresh()
        database = catalog._active.database
        server.stop()
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                catalog.search("hello")
        server.start()
        assert catalog.search("hello").count == 6
        assert catalog._active.database is database
        assert catalog.problems == ()
    server.stop()
