"""Tests `open_store`: the engine of each kind of address, and rejected addresses."""

from pathlib import Path
from typing import Any

import pytest

from stenolog.errors import UsageError
from stenolog.memory.facade import open_memory
from stenolog.sessions.session_manager import SessionManager
from stenolog.sessions.session_store import JSONLBackend
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.jsonl import JSONLStore
from stenolog.stores.open_store import open_store, parse_address
from stenolog.transfer.open_sessions import open_sessions
from stenolog.transfer.viewed_places import recognize_place


@pytest.mark.parametrize(
    ("where", "engine", "path"),
    [
        ("./workspace", "jsonl", "./workspace"),
        ("jsonl:w", "jsonl", "w"),
        ("sqlite:./steno.db", "sqlite", "./steno.db"),
        ("sqlite:/srv/steno.db?cache_kb=9", "sqlite", "/srv/steno.db"),
        ("memory:", "memory", ""),
        ("postgres://host/x", "postgresql", "postgres://host/x"),
        ("f:g", "jsonl", "f:g"),
        ("./sqllite:a.db", "jsonl", "./sqllite:a.db"),
        ("a b: c", "jsonl", "a b: c"),
    ],
)
def test_address_is_parsed_into_engine_and_path(where: str, engine: str, path: str) -> None:
    found = parse_address(where)
    assert (found.engine, found.path) == (engine, path)


def test_path_object_always_means_a_folder(tmp_path: Path) -> None:
    with open_store(tmp_path / "sqlite:a.db") as store:
        assert isinstance(store, JSONLStore)


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("", "the address is empty; give a folder, or sqlite:FILE"),
        ("sqlite:", "'sqlite:' needs a path, for example sqlite:./workspace/sessions.db"),
        ("jsonl:", "'jsonl:' needs a path, for example jsonl:./workspace"),
        (
            "sqlite://abs.db",
            "sqlite:PATH takes a plain path, without //: sqlite:./abs.db from here, "
            "or sqlite:/abs.db from the root",
        ),
        ("sqlite:///srv/a.db", "sqlite:PATH takes a plain path, without //: "),
        ("jsonl://w", "jsonl:PATH takes a plain path, without //: jsonl:./w from here"),
        (
            "sqllite:a.db",
            "unknown engine 'sqllite:'; use jsonl:, sqlite:, postgresql: or memory:; "
            "for a folder of that name write ./sqllite:a.db",
        ),
        ("file:./workspace", "unknown engine 'file:'"),
        ("ftp://host/x", "unknown engine 'ftp:'; use jsonl:, sqlite:, postgresql: or memory:"),
        ("memory:x", "'memory:' takes no name"),
        ("jsonl:sqlite:a.db", "jsonl:PATH takes a plain path, not another address"),
        ("postgresql:host/db", "write it as a URL: postgresql://USER@HOST/DATABASE"),
        ("sqlite::memory:", "'memory:' keeps sessions only in this process"),
    ],
)
def test_invalid_address_is_rejected_with_an_explanation(where: str, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_address(where)
    assert words in str(raised.value)


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    "where",
    [
        "sqlite:postgresql://me:Xsecret@host/db",
        "jsonl:postgres://me:Xsecret@host/db",
        "sqlite:sqlite:postgresql://me:Xsecret@host/db",
        "postgresql:/me:Xsecret@host/db",
        "postgres:me:Xsecret@host/db",
        "sqlite:host=h password=Xsecret",
        "host=h password=Xsecret",
        "mysql://me:Xsecret@host/db",
        "sqlite://postgresql://me:Xsecret@host/db",
        "sqlite://me:Xsecret@host/db",
        "postgresql//me:Xsecret@host/db",
    ],
)
def test_error_about_an_odd_address_has_no_password(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for opener in (open_store, open_sessions, recognize_place):
        with pytest.raises(UsageError) as raised:
            opener(where)
        assert "Xsecret" not in str(raised.value)


@pytest.mark.parametrize("where", ["sqllite:a.db", "file:./workspace", "postgres://h/x?schema="])
def test_rejected_address_creates_no_file(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"invalid parameter|unknown engine"):
        open_store(where)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", [None, 7, b"bytes", "a\0b", "sqlite:a\0b", Path("a\0b")])
def test_value_that_is_not_an_address_raises_usage_error(where: Any) -> None:
    for opener in (open_store, open_sessions, open_memory):
        with pytest.raises(UsageError, match=r"text or a path, not|contains a NUL"):
            opener(where)


@pytest.mark.parametrize("name", ["steno.db", "steno.sqlite", "steno.sqlite3"])
def test_database_file_name_without_a_scheme_is_rejected(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for opener in (open_store, open_sessions):
        with pytest.raises(UsageError, match=f"for a database write sqlite:{name}"):
            opener(name)
    assert list(tmp_path.iterdir()) == []
    open_sessions(f"jsonl:{name}").close()
    open_store(name).close()
    assert Path(name, "sessions").is_dir()


def test_a_file_is_not_a_workspace(tmp_path: Path) -> None:
    (tmp_path / "passwd").write_text("x")
    with pytest.raises(UsageError, match=r"passwd is a file, not a folder"):
        open_store(tmp_path / "passwd")


def test_existing_folder_is_opened_even_if_its_name_looks_like_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("telegram:1").mkdir(mode=0o700)
    with open_store("telegram:1") as store:
        store.add_message("k", "user", "x")
    assert Path("telegram:1/sessions/k.jsonl").exists()


def test_home_folder_is_expanded_after_a_scheme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for where in ("~/w", "jsonl:~/w", "sqlite:~/w"):
        assert parse_address(where).path == f"{tmp_path}/w"


def test_in_memory_store_cannot_be_opened_read_only() -> None:
    with open_store("memory:") as store:
        assert isinstance(store, InMemoryStore)
    with pytest.raises(UsageError):
        open_store("memory:", read_only=True)


def test_repr_of_stores_shows_their_location(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        assert repr(store) == f"JSONLStore('{tmp_path}', namespace='sessions')"
        assert repr(JSONLBackend(store)) == f"JSONLBackend({store!r})"
    with open_store(f"sqlite:{tmp_path}/a.db", namespace="notes") as store:
        assert repr(store) == f"SQLiteStore('{tmp_path}/a.db', namespace='notes')"
    assert repr(SessionManager(tmp_path)) == f"SessionManager('{tmp_path}')"
