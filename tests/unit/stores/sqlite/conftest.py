"""Fixtures of the SQLite store tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stenolog import SQLiteStore


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the path of a new database in a private folder."""
    folder = tmp_path / "workspace"
    folder.mkdir(mode=0o700)
    return folder / "sessions.db"


@pytest.fixture
def store(file: Path) -> Iterator[SQLiteStore]:
    """Yield a store for the test."""
    with SQLiteStore(file) as opened:
        yield opened
