"""In memory: what is asked here is what is stored, not how safely."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import temporary_folders


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder that costs no syncs."""
    with temporary_folders.folder() as path:
        yield path
