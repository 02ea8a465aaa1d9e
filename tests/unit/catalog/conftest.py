"""A store of each kind, with its catalog."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import stenolog
from postgres_server import Databases, Server
from stenolog.catalog import Catalog, open_catalog
from stenolog.stores.base import Store

ENGINES = ["jsonl", "sqlite", "memory", "postgres"]


@pytest.fixture(params=ENGINES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty store."""
    where = {"jsonl": str(tmp_path / "w"), "sqlite": f"sqlite:{tmp_path}/s.db", "memory": "memory:"}
    if request.param == "postgres":
        where["postgres"] = request.getfixturevalue("postgres_schema")
    with stenolog.open_store(where[request.param]) as opened:
        yield opened


@pytest.fixture(scope="session")
def postgres_database(postgres: Server) -> Iterator[str]:
    """One database for many tests, each of which has a schema of its own: that is quicker."""
    databases = Databases(postgres.url())
    yield databases.new()
    databases.close()


@pytest.fixture
def postgres_schema(postgres_database: str) -> str:
    """A place for a store, empty."""
    return f"{postgres_database}?schema=s{secrets.token_hex(6)}"


@pytest.fixture
def catalog(store: Store) -> Iterator[Catalog]:
    """The catalog of the store."""
    with open_catalog(store) as opened:
        yield opened
        assert opened.problems == ()


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Store]:
    """A JSONL store with three sessions in it."""
    with stenolog.open_store(tmp_path / "w") as opened:
        fill(opened)
        yield opened


def fill(store: Store) -> None:
    """Three sessions, the last of them changed last."""
    for key in ("telegram:1", "telegram:2", "cli:default"):
        store.add_message(key, "user", f"allmessages hello from {key}")
        store.add_message(key, "assistant", "allmessages hello yourself")


Open = Callable[[], Catalog]
