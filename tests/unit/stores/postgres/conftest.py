"""Fixtures of the PostgreSQL store tests."""

from collections.abc import Iterator

import psycopg
import pytest

from stenolog import PostgresStore


@pytest.fixture
def store(postgres_url: str) -> Iterator[PostgresStore]:
    """Yield a store for the test."""
    with PostgresStore(postgres_url) as opened:
        yield opened


@pytest.fixture
def server(postgres_url: str) -> Iterator[psycopg.Connection]:
    """Yield a connection to the same database, to examine or damage its tables."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection
