"""The index inside a SQLite store: tables of its own, which the store does not notice."""

import os
import time
from pathlib import Path

import pytest

from stenolog.catalog import open_catalog
from stenolog.catalog.tables import HasDatabase, TableDatabase
from stenolog.errors import DamagedStore
from stenolog.stores.opening import open_store
from stenolog.stores.sqlite import processes
from unit.catalog.scan import catalogued, differences, full_scan

from .conftest import fill


@pytest.fixture
def where(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path}/s.db"


def test_namespaces_in_one_file_have_an_index_each(where: str) -> None:
    with (
        open_store(where) as sessions,
        open_store(where, namespace="notes") as notes,
        open_catalog(sessions) as of_sessions,
        open_catalog(notes) as of_notes,
    ):
        fill(sessions)
        notes.add_message("note", "user", "allmessages something else")
        for purged in (False, True):
            if purged:
                notes.purge("note")
            assert differences(catalogued(of_sessions), full_scan(sessions)) == {}
            assert differences(catalogued(of_notes), full_scan(notes)) == {}
            assert of_sessions.search("something").count == 0
            assert of_notes.search("hello").count == 0


def test_a_store_that_is_only_read_is_indexed_in_memory(where: str) -> None:
    with open_store(where) as store:
        fill(store)
    with open_store(where, read_only=True) as store, open_catalog(store) as catalog:
        assert differences(catalogued(catalog), full_scan(store)) == {}
        assert "in memory" in catalog.problems[0]
    with open_store(where) as store, open_catalog(store) as catalog:
        catalog.refresh()
    with open_store(where, read_only=True) as store, open_catalog(store) as catalog:
        assert differences(catalogued(catalog), full_scan(store)) == {}
        assert catalog.problems == ()


@pytest.mark.parametrize(
    "harm",
    [
        "UPDATE {0}about SET version = 'old'",
        "DELETE FROM {0}about",
        "DROP TABLE {0}session",
        "DROP TABLE {0}words",
        "DELETE FROM {0}words_data",
        "DELETE FROM {0}words_idx",
        "UPDATE {0}words_data SET block = zeroblob(40)",
        "UPDATE {0}session SET sight = 'not json'",
    ],
)
def test_tables_that_are_old_or_damaged_are_made_anew(where: str, harm: str) -> None:
    with open_store(where) as store, open_catalog(store) as catalog:
        fill(store)
        catalog.refresh()
        assert isinstance(store, HasDatabase)
        prefix = TableDatabase(store.database, store.namespace).prefix
        with store.database.write() as transaction:
            # What others cannot do, as these tables are part of another.
            transaction.execute("PRAGMA writable_schema = ON")
            try:
                transaction.execute(harm.format(prefix))
            finally:
                transaction.execute("PRAGMA writable_schema = OFF")
        store.add_message("cli:default", "user", "allmessages more")
        with open_store(where) as other, open_catalog(other) as fresh:
            assert differences(catalogued(fresh), full_scan(other)) == {}
        assert differences(catalogued(catalog), full_scan(store)) == {}
        assert catalog.problems == ()
        store.purge("cli:default")


def test_a_damaged_store_is_told_as_such(where: str, tmp_path: Path) -> None:
    with open_store(where) as store:
        fill(store)
        for number in range(50):
            store.add_message("k", "user", f"{number} {'x' * 1000}")
    file = tmp_path / "s.db"
    file.write_bytes(file.read_bytes()[:8192] + bytes(len(file.read_bytes()) - 8192))
    with (
        open_store(where) as store,
        open_catalog(store) as catalog,
        pytest.raises(DamagedStore),
    ):
        catalog.list()


def test_a_turn_that_ran_out_is_over(where: str) -> None:
    with open_store(where) as store, open_catalog(store) as catalog:
        fill(store)
        lease = store.lease("cli:default", ttl=0.05)
        limit = time.monotonic() + 10
        while catalog.list(state="running").entries and time.monotonic() < limit:
            pass
        assert catalog.list(state="running").entries == []
        lease.release()


def test_a_turn_whose_process_is_gone_is_over(where: str) -> None:
    if processes.current() is None:
        pytest.skip("NOT RUN: nothing can be told of processes here")
    with open_store(where) as store, open_catalog(store) as catalog:
        fill(store)
        (heard, says), (reads, ends) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ends)
            with store.lease("cli:default", ttl=600):
                os.write(says, b".")
                os.read(reads, 1)
                os._exit(0)
        os.read(heard, 1)
        while_it_lived = catalog.list(state="running").entries
        os.close(ends)
        os.waitpid(pid, 0)
        assert [entry.key for entry in while_it_lived] == ["cli:default"]
        assert catalog.list(state="running").entries == []
        for descriptor in (heard, says, reads):
            os.close(descriptor)


def test_a_turn_from_the_future_is_over_as_it_is_for_who_takes_it(where: str) -> None:
    with open_store(where) as store, open_catalog(store) as catalog:
        assert isinstance(store, HasDatabase)
        fill(store)
        lease = store.lease("cli:default", ttl=600)
        with store.database.write() as transaction:
            transaction.execute("UPDATE lease SET since = '2999-01-01T00:00:00.000000Z'")
        assert catalog.list(state="running").entries == []
        store.lease("cli:default", ttl=600, wait=0).release()
        assert lease.lost
