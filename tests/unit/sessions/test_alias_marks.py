"""Tests the mark that informs all processes of new aliases, on each engine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from stenolog.errors import ReadOnly, StoreClosed
from stenolog.sessions.aliases import NO_ALIASES, alias_mark, change_alias_mark, prepare_alias_mark
from stenolog.sessions.session_store import JSONLBackend
from stenolog.stores.base import ChangeMarkerStore, Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store
from support import needs

WHERE: Final = {"jsonl": "{}", "sqlite": "sqlite:{}/steno.db"}

Opened = Callable[..., Store]


@pytest.fixture(params=WHERE)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    where = WHERE[request.param].format(tmp_path)

    def open_it(**options: object) -> Store:
        return open_store(where, **options)  # type: ignore[arg-type]

    return open_it


def test_every_store_supports_marks(opened: Opened) -> None:
    with opened() as store:
        assert isinstance(store, ChangeMarkerStore)
    assert isinstance(InMemoryStore(), ChangeMarkerStore)


def test_p7_changed_marker_differs_for_all_processes(opened: Opened) -> None:
    with opened() as store, opened() as beside, opened(namespace="other") as elsewhere:
        assert alias_mark(beside) == NO_ALIASES
        prepare_alias_mark(store)
        seen = [alias_mark(beside)]
        prepare_alias_mark(beside)
        assert alias_mark(store) == seen[0] != NO_ALIASES
        for changing in (store, beside, store):
            change_alias_mark(changing)
            seen.append(alias_mark(beside))
        assert len(set(seen)) == len(seen)
        assert alias_mark(elsewhere) == NO_ALIASES
    with opened(read_only=True) as look:
        assert alias_mark(look) == seen[-1]
        with pytest.raises(ReadOnly):
            change_alias_mark(look)


def test_mark_of_an_in_memory_store_changes() -> None:
    store = InMemoryStore()
    prepare_alias_mark(store)
    first = alias_mark(store)
    change_alias_mark(store)
    assert alias_mark(store) not in (first, NO_ALIASES)
    store.close()
    with pytest.raises(StoreClosed):
        alias_mark(store)


def test_p11_mark_file_is_private(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        prepare_alias_mark(store)
    assert (tmp_path / "sessions" / ".aliases").stat().st_mode & 0o777 == 0o600


def test_p13_aliases_in_a_database_of_the_previous_schema_are_found(tmp_path: Path) -> None:
    needs.package("apsw")
    import apsw

    from stenolog.stores.sqlite.database_file import APPLICATION_ID, migrations, run_script

    at, uid = "2026-11-15T12:00:00.000000Z", "6c8eabfac8994c93"
    state: dict[str, Any] = {
        "format": 1,
        "key": "telegram:1",
        "uid": uid,
        "generation": 1,
        "created": at,
    }
    state["meta"] = {"aliases": ["telegram_1"]}
    file = tmp_path / "steno.db"
    connection = apsw.Connection(str(file))
    for script in migrations()[:2]:
        run_script(connection, script)
    run_script(connection, f"PRAGMA user_version = 2; PRAGMA application_id={APPLICATION_ID}")
    run_script(connection, "PRAGMA journal_mode = wal")
    # The table with the alias mark of earlier versions.
    run_script(connection, "CREATE TABLE alias_mark (namespace TEXT PRIMARY KEY, given INTEGER)")
    connection.execute(
        "INSERT INTO session (id, namespace, key, uid, created, updated, last_seq, bytes, version)"
        " VALUES (1, 'sessions', 'telegram:1', ?, ?, ?, 0, 0, 1)",
        (uid, at, at),
    )
    connection.execute("INSERT INTO state VALUES (1, ?)", (json.dumps(state).encode(),))
    connection.close()
    file.chmod(0o600)

    sessions = JSONLBackend(open_store(f"sqlite:{file}"))
    assert sessions.add_message("telegram_1", "user", "y") == 1
    assert sessions.list_sessions() == ["telegram:1"]
    sessions.close()
