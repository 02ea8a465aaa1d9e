"""A store of each kind, with its catalog."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import stenolog
from stenolog.catalog import Catalog, open_catalog
from stenolog.stores.base import Store
from support.postgres_server import Databases, Server
from support.random_operations import fill_three_sessions

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
        fill_three_sessions(opened)
        yield opened


Open = Callable[[], Catalog]
