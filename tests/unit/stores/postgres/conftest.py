"""What the tests of the PostgreSQL store share."""

from collections.abc import Iterator

import psycopg
import pytest

from stenolog import PostgresStore


@pytest.fixture
def store(postgres_url: str) -> Iterator[PostgresStore]:
    """A store of the test's own, closed behind it."""
    with PostgresStore(postgres_url) as opened:
        yield opened


@pytest.fixture
def server(postgres_url: str) -> Iterator[psycopg.Connection]:
    """The same database, for who looks at its tables or spoils them."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection
