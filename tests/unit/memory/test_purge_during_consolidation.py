"""Tests that a purge wins over a consolidation, at every call of either store."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from stenolog.cli import main
from stenolog.errors import StenologError
from stenolog.memory.consolidation import Consolidator
from stenolog.memory.notes import Draft, Notes
from stenolog.memory.scopes import Scope
from stenolog.stores.base import Store
from stenolog.stores.jsonl import JSONLStore
from stenolog.stores.open_store import open_store
from stenolog.stores.postgres import PostgresStore
from stenolog.stores.sqlite import SQLiteStore
from support.postgres_server import Databases

KEY = "telegram:7"
SECRET = "mountaineering"
CALLS = ("info", "follow", "lease", "set_meta", "add_messages", "get_history", "delete")
"""The store calls that a consolidation makes."""


def answer(_messages: Any, **_options: Any) -> str:
    """Answer as a model that finds a fact in each of two turns."""
    fact = {"text": f"Likes {SECRET}.", "about": "hobby", "quote": f"I like {SECRET}"}
    turns = [{"turn": n, "daily": f"Spoke of {SECRET}.", "facts": [fact]} for n in (1, 2)]
    return json.dumps({"turns": turns})


@contextmanager
def at_call(number: int, then: Callable[[], None]) -> Iterator[list[str]]:
    """Call `then` once, right before the call of this number to any store; yield all calls."""
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for kind in (JSONLStore, SQLiteStore, PostgresStore):
            for name in CALLS:
                real = getattr(kind, name)

                def counted(
                    self: Store, *args: Any, _real: Any = real, _name: str = name, **options: Any
                ) -> Any:
                    calls.append(_name)
                    if len(calls) == number:
                        then()
                    return _real(self, *args, **options)

                patch.setattr(kind, name, counted)
        yield calls


def begin(where: str, *, noted: bool = False) -> None:
    with open_store(where, namespace="notes") as store:
        if noted:
            Notes(store).add(Scope(who=KEY), [Draft(kind="core", text=f"Has {SECRET}.")])
    with open_store(where) as store:
        for _ in range(2):
            store.add_message(KEY, "user", f"I like {SECRET}")
            store.add_message(KEY, "assistant", "Noted.")


def consolidate(where: str, ask: Any) -> None:
    with open_store(where) as sessions, open_store(where, namespace="notes") as notes:
        Consolidator(sessions, Notes(notes), ask).run(KEY)


def purge(where: str) -> None:
    """Run `steno purge --scope` as another process would."""
    command = ["purge", "--scope", KEY, "--yes", "-w", where]
    done = CliRunner().invoke(main, command, prog_name="steno")
    assert done.exit_code == 0, done.output


def bytes_in(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file())


def rows_in(url: str) -> bytes:
    """Return the rows of all tables of a database."""
    with psycopg.connect(url) as connection:
        tables = connection.execute(
            "SELECT quote_ident(schemaname) || '.' || quote_ident(relname) FROM pg_stat_user_tables"
        ).fetchall()
        # bytea as escaped text, so that words in it are found.
        connection.execute("SET bytea_output = 'escape'")
        rows = [
            connection.execute(f"SELECT t::text FROM {table} AS t".encode()).fetchall()  # noqa: S608
            for (table,) in tables
        ]
    return repr(rows).encode()


def count_calls(where: str, ask: Any, *, noted: bool) -> int:
    begin(where, noted=noted)
    with at_call(0, lambda: None) as calls:
        consolidate(where, ask)
    return len(calls)


@pytest.mark.parametrize(
    ("engine", "ask", "noted"),
    [
        pytest.param("jsonl", answer, False, id="jsonl, model"),
        pytest.param("jsonl", None, True, id="jsonl, no model, has notes"),
        pytest.param("sqlite", None, False, id="sqlite, no model"),
        pytest.param("postgresql", None, True, id="postgresql, no model", marks=pytest.mark.full),
        pytest.param("postgresql", answer, False, id="postgresql, model", marks=pytest.mark.full),
        pytest.param("jsonl", None, False, id="jsonl, no model", marks=pytest.mark.full),
        pytest.param("jsonl", answer, True, id="jsonl, model, has notes", marks=pytest.mark.full),
        pytest.param("sqlite", answer, False, id="sqlite, model", marks=pytest.mark.full),
        pytest.param("sqlite", answer, True, id="sqlite, model, has notes", marks=pytest.mark.full),
    ],
)
def test_p7_purge_at_any_call_of_a_consolidation_leaves_no_notes(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    ask: Any,
    noted: bool,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))

    def place(name: str) -> tuple[Path, str]:
        folder = tmp_path / name
        folder.mkdir()
        if engine == "postgresql":
            databases: Databases = request.getfixturevalue("own_databases")
            url = databases.new()
            request.addfinalizer(lambda: databases.leave(url))
            return folder, url
        return folder, f"sqlite:{folder}/s.db" if engine == "sqlite" else str(folder)

    def content(folder: Path, where: str) -> bytes:
        return rows_in(where) if engine == "postgresql" else bytes_in(folder)

    counted = place("counted")
    total = count_calls(counted[1], ask, noted=noted)
    assert total > 10
    assert SECRET.encode() in content(*counted)
    for number in range(1, total + 1):
        folder, where = place(str(number))
        begin(where, noted=noted)
        purged: list[int] = []

        def strike(where: str = where, purged: list[int] = purged, number: int = number) -> None:
            if not purged:
                purged.append(number)
                purge(where)

        with at_call(number, strike) as calls:
            try:
                consolidate(where, ask)
            except StenologError as error:
                pytest.fail(f"purged before {calls[number - 1]} ({number}): {error!r}")
        assert purged, number
        with open_store(where, namespace="notes") as store:
            left = store.list_sessions() + [one.key for one in store.admin.list_trash()]
            told = f"purged before call {number}, {calls[number - 1]}"
            assert not [key for key in left if not key.startswith(":mark:")], told
            assert all("session" not in store.info(key).meta for key in left), told
        assert SECRET.encode() not in content(folder, where), told


def test_p7_notes_of_a_purged_session_do_not_enter_the_scope_of_its_successor(
    tmp_path: Path,
) -> None:
    where = str(tmp_path)
    begin(where)

    def ask(messages: Any, **_options: Any) -> str:
        purge(where)
        with open_store(where) as store:
            store.add_message(KEY, "user", "I am new here")
            store.add_message(KEY, "assistant", "Welcome.")
        consolidate(where, None)
        return answer(messages)

    consolidate(where, ask)

    with open_store(where, namespace="notes") as store:
        [note] = Notes(store).list(Scope(who=KEY))
    assert "new here" in note.text


def test_p7_next_run_writes_notes_of_a_scope_purged_meanwhile(
    tmp_path: Path,
) -> None:
    where = str(tmp_path)
    begin(where)

    consolidate(where, None)
    with open_store(where, namespace="notes") as store:
        for key in store.list_sessions():
            store.admin.purge(key)
    consolidate(where, answer)

    with open_store(where, namespace="notes") as store:
        assert len(Notes(store).list(Scope(who=KEY), kind="daily")) == 2
