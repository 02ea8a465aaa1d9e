"""The catalog of a SQLite store: a file beside the database for each namespace."""

import fcntl
import os
import stat
import time
from pathlib import Path

import pytest

from stenolog.catalog import open_catalog
from stenolog.errors import DamagedStore, StoreBusy
from stenolog.stores.open_store import open_store
from stenolog.stores.sqlite import SQLiteStore, lease_holders
from support.catalog_scan import catalogued, change_unnoticed, differences, full_scan
from support.random_operations import fill_three_sessions


@pytest.fixture
def where(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path}/s.db"


def test_namespaces_in_one_file_have_separate_catalogs(where: str) -> None:
    with (
        open_store(where) as sessions,
        open_store(where, namespace="notes") as notes,
        open_catalog(sessions) as of_sessions,
        open_catalog(notes) as of_notes,
    ):
        fill_three_sessions(sessions)
        notes.add_message("note", "user", "allmessages something else")
        for purged in (False, True):
            if purged:
                notes.admin.purge("note")
            assert differences(catalogued(of_sessions), full_scan(sessions)) == {}
            assert differences(catalogued(of_notes), full_scan(notes)) == {}
            assert of_sessions.search("something").count == 0
            assert of_notes.search("hello").count == 0


@pytest.mark.parametrize(
    "harm",
    [
        "UPDATE catalog_session SET title = 'wrong'; UPDATE catalog_about SET version = 'old'",
        "DELETE FROM catalog_about",
        "DROP TABLE catalog_session",
        "DROP TABLE catalog_words",
        "DELETE FROM catalog_words_data",
        "DELETE FROM catalog_words_idx",
        "UPDATE catalog_words_data SET block = zeroblob(40)",
        "UPDATE catalog_session SET sight = 'not json'",
        "UPDATE catalog_session SET title = CAST(x'ff41' AS TEXT)",
    ],
)
def test_outdated_or_damaged_file_is_rebuilt(where: str, harm: str) -> None:
    with open_store(where) as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
        catalog.refresh()
        file = store.admin.place.catalog_file
        assert file is not None
        for statement in harm.split("; "):
            change_unnoticed(file, statement)
        store.add_message("cli:default", "user", "allmessages more")
        with open_store(where) as other, open_catalog(other) as fresh:
            assert differences(catalogued(fresh), full_scan(other)) == {}
        assert differences(catalogued(catalog), full_scan(store)) == {}
        assert catalog.problems == ()
        store.admin.purge("cli:default")


def test_damaged_store_raises_damaged_store(where: str, tmp_path: Path) -> None:
    with open_store(where) as store:
        fill_three_sessions(store)
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


def test_expired_lease_is_not_shown_as_running(where: str) -> None:
    with open_store(where) as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
        lease = store.lease("cli:default", ttl=0.05)
        limit = time.monotonic() + 10
        while catalog.list(state="running").entries and time.monotonic() < limit:
            pass
        assert catalog.list(state="running").entries == []
        lease.release()


def test_lease_of_an_ended_process_is_not_shown_as_running(where: str) -> None:
    if lease_holders.current_process() is None:
        pytest.skip("NOT RUN: the start times of processes are unknown here")
    with open_store(where) as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
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


def test_lease_from_the_future_is_running_while_its_holder_runs(
    where: str,
) -> None:
    with open_store(where) as store, open_catalog(store) as catalog:
        assert isinstance(store, SQLiteStore)
        fill_three_sessions(store)
        lease = store.lease("cli:default", ttl=600)
        with store.database.write_transaction() as transaction:
            transaction.execute("UPDATE lease SET since = '2999-01-01T00:00:00.000000Z'")
        assert [one.key for one in catalog.list(state="running").entries] == ["cli:default"]
        with pytest.raises(StoreBusy):
            store.lease("cli:default", ttl=600, wait=0)
        assert not lease.lost
        lease.release()


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
def test_read_only_store_writes_no_catalog_and_reports_no_problem(
    request: pytest.FixtureRequest,
    where: str,
    caplog: pytest.LogCaptureFixture,
    indexed: bool,
    engine: str,
) -> None:
    if engine == "postgres":
        where = request.getfixturevalue("postgres_schema")
    with open_store(where) as store:
        fill_three_sessions(store)
        if indexed:
            with open_catalog(store) as catalog:
                catalog.refresh()
    with open_store(where, read_only=True) as store, open_catalog(store) as catalog:
        assert catalog.search("allmessages").count == 6
        assert catalog.problems == ()
        used = type(catalog._active.database).__name__
        assert (used == "MemoryDatabase") is not indexed
    assert caplog.records == []


# --- the file --------------------------------------------------------------------------------


def _catalogs(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".catalog"))


def test_p11_each_namespace_has_its_own_private_file(where: str, tmp_path: Path) -> None:
    for namespace in ("sessions", "Sessions", "two words", "a.b", "x" * 200):
        with open_store(where, namespace=namespace) as store, open_catalog(store) as catalog:
            fill_three_sessions(store)
            catalog.refresh()
    found = _catalogs(tmp_path)
    assert len({name.casefold() for name in found}) == 5
    assert found[0] == "s.db-sessions.catalog"
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_p11_catalog_readable_by_others_is_reported(where: str, tmp_path: Path) -> None:
    with open_store(where) as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
        catalog.refresh()
        (tmp_path / "s.db-sessions.catalog").chmod(0o644)
        advice = f"chmod 600 {tmp_path}/s.db-sessions.catalog"
        assert any(advice in problem for problem in store.admin.health().problems)


def test_new_database_deletes_the_catalog_of_the_previous_one(where: str, tmp_path: Path) -> None:
    with open_store(where) as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
        catalog.refresh()
    for path in tmp_path.glob("s.db*"):
        if "catalog" not in path.name:
            path.unlink()
    open_store(where).close()
    assert _catalogs(tmp_path) == []


def test_folder_at_the_path_of_the_catalog_does_not_prevent_opening(
    where: str, tmp_path: Path
) -> None:
    (tmp_path / "s.db-sessions.catalog").mkdir()
    with open_store(where) as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
        assert differences(catalogued(catalog), full_scan(store)) == {}
        assert len(catalog.problems) == 1
        store.admin.purge("cli:default")


@pytest.mark.parametrize("more", [1, 3, 60])
@pytest.mark.parametrize("hidden", [False, True])
def test_restored_backup_is_indexed_again(
    where: str, tmp_path: Path, more: int, hidden: bool
) -> None:
    with open_store(where) as store:
        fill_three_sessions(store)
    backup = (tmp_path / "s.db").read_bytes()
    with open_store(where) as store, open_catalog(store) as catalog:
        store.add_message("cli:default", "user", "allmessages walrus")
        if hidden:
            store.clear("cli:default")
        assert catalog.search("walrus").count == 1
    (tmp_path / "s.db").write_bytes(backup)
    with open_store(where) as store, open_catalog(store) as catalog:
        for number in range(more):
            store.add_message("cli:default", "user", f"allmessages zebra {number}")
            if hidden and not number:
                store.clear("cli:default")
        assert catalog.search("walrus").count == 0
        assert differences(catalogued(catalog), full_scan(store)) == {}


# --- purge -----------------------------------------------------------------------------------


def test_p4_a_purge_deletes_the_catalogs_of_all_namespaces(where: str, tmp_path: Path) -> None:
    with open_store(where) as store, open_store(where, namespace="notes") as notes:
        for one in (store, notes):
            fill_three_sessions(one)
            with open_catalog(one) as catalog:
                catalog.refresh()
        left = tmp_path / "s.db-gone.catalog-journal"
        left.write_bytes(b"hello")
        assert len(_catalogs(tmp_path)) == 2
        assert store.admin.purge("cli:default", before=2).not_reached == ()
        assert _catalogs(tmp_path) == []
        assert not left.exists()


def test_p4_purge_reports_an_undeletable_catalog_and_is_finished_later(
    tmp_path: Path,
) -> None:
    with SQLiteStore(tmp_path / "s.db", busy_timeout=0.05) as store, open_catalog(store) as catalog:
        fill_three_sessions(store)
        catalog.refresh()
        with (tmp_path / "s.db-sessions.catalog.lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (reason,) = store.admin.purge("cli:default").not_reached
        assert "s.db-sessions.catalog" in reason
        assert "purge again" in reason
        assert _catalogs(tmp_path) == ["s.db-sessions.catalog"]
        assert store.admin.finish_purge("").not_reached == ()
        assert _catalogs(tmp_path) == []
