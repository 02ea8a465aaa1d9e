"""What the tests of the log share."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """A folder in memory where there is one: for thousands of rounds that test no syncing."""
    memory = Path("/dev/shm")
    folder = Path(
        tempfile.mkdtemp(
            prefix="steno-log-", dir=memory if os.access(memory, os.W_OK | os.X_OK) else None
        )
    )
    yield folder
    shutil.rmtree(folder)
