"""Copying of all namespaces of a workspace or database."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stenolog import JSONLStore
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store
from stenolog.transfer.copy import copy_place, list_namespaces
from support import temporary_folders
from support.copied_stores import digests, everything, fill
from support.postgres_server import Databases


@pytest.fixture
def place() -> Iterator[Path]:
    with temporary_folders.folder() as path:
        yield path


@pytest.fixture
def where(place: Path) -> str:
    """A database with all that a session can have, notes, and an agent with a name."""
    found = f"sqlite:{place}/store.db"
    with open_store(found) as store:
        fill(store)
    with open_store(found, namespace="notes") as store:
        store.add_message("x", "user", "a note")
    with open_store(found, namespace="agents.ada") as store:
        store.add_message("a", "user", "to ada")
    return found


def _of(where: str, namespace: str = "sessions") -> dict[str, tuple[str, str | None, str]]:
    with open_store(where, namespace=namespace) as store:
        return digests(store)


def test_copy_of_a_database_is_a_workspace_of_plain_text(place: Path, where: str) -> None:
    folder = f"jsonl:{place}/b"
    copied = copy_place(where, folder)
    assert copied.problems == 0
    assert list_namespaces(folder) == ["sessions", "notes", "agents.ada"]
    for namespace in ("sessions", "notes"):
        assert _of(folder, namespace) == _of(where, namespace)
    with open_store(folder) as store, open_store(where) as source:
        assert everything(store) == everything(source)
    with JSONLStore(place / "b/agents/ada") as store:
        assert [m.content for m in store.get_history("a")] == ["to ada"]
    modes = {oct(path.stat().st_mode & 0o777) for path in (place / "b", *(place / "b").rglob("*"))}
    assert modes == {"0o700", "0o600"}


def test_aliases_open_their_session_in_a_copy(place: Path) -> None:
    from stenolog.sessions.aliases import Aliases

    def opens(store: Store) -> str:
        return Aliases(store).resolve_key("another name")

    source, target = f"jsonl:{place}/one", f"sqlite:{place}/two.db"
    with open_store(source) as store:
        store.admin.update_marker("aliases")
        store.set_meta("a", aliases=["another name"])
        assert opens(store) == "a"
    with open_store(target) as store:
        known = Aliases(store)
        assert known.resolve_key("another name") == "another name"

        def look(*_: object) -> None:
            # Before anything was written: what is found is remembered.
            found.append(known.resolve_key("another name"))

        found: list[str] = []
        copy_place(source, target, on_progress=look)
        assert found[0] == "another name"
        assert known.resolve_key("another name") == "a"


def test_unopenable_namespace_does_not_stop_the_others(place: Path, where: str) -> None:
    long = "n" * 300
    with open_store(where, namespace=long) as store:
        store.add_message("a", "user", "one")
    found = copy_place(where, f"jsonl:{place}/w")
    [problem] = found.namespaces[long].problems
    assert (found.problems, problem.key, problem.uid) == (1, "", "")
    assert problem.reason
    for name in ("sessions", "notes"):
        assert _of(f"jsonl:{place}/w", name) == _of(where, name)


def test_read_only_server_is_copied(place: Path, own_databases: Databases) -> None:
    where = own_databases.new()
    with open_store(where) as store:
        store.add_message("a", "user", "one")
    reader = f"{where}?options=-c%20default_transaction_read_only%3Don"
    assert copy_place(reader, f"jsonl:{place}/w").problems == 0
    assert _of(f"jsonl:{place}/w") == _of(where)
