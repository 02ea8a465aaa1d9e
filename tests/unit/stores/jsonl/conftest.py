"""Fixtures of the tests of the JSONL log."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """Yield a folder in memory if possible, for thousands of rounds that do not test syncs."""
    memory = Path("/dev/shm")
    folder = Path(
        tempfile.mkdtemp(
            prefix="steno-log-", dir=memory if os.access(memory, os.W_OK | os.X_OK) else None
        )
    )
    yield folder
    shutil.rmtree(folder)
