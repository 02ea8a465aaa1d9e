"""A folder in memory where there is one: for tests that ask what is written, not how safely."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def folder() -> Iterator[Path]:
    """A new folder, gone afterwards."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="steno-", dir=shared if os.access(shared, os.W_OK) else None
    ) as path:
        yield Path(path)
