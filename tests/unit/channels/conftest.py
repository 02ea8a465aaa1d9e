"""Fixtures of the channel tests: a temporary folder in memory, because nothing here tests syncs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import temporary_folders


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Yield a folder in memory."""
    with temporary_folders.folder() as path:
        yield path
