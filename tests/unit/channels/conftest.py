"""In memory: what is asked here is what is stored, not how safely."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import memory_disk


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder that costs no syncs."""
    with memory_disk.folder() as path:
        yield path
