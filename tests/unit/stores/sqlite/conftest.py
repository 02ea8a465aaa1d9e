"""What the tests of the SQLite store share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stenolog import SQLiteStore


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where a database may be made, in a folder that only its owner may enter."""
    folder = tmp_path / "workspace"
    folder.mkdir(mode=0o700)
    return folder / "sessions.db"


@pytest.fixture
def store(file: Path) -> Iterator[SQLiteStore]:
    """A store of the test's own, closed behind it."""
    with SQLiteStore(file) as opened:
        yield opened
