"""What the crash suites share: a voice that is heard in every run, and places to work in."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import temporary_folders
from support.crash.reporting import Say


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Prints past pytest's capture: seeds and counts are part of the result."""

    def aloud(text: str) -> None:
        with capsys.disabled():
            print(f"\n    {text}", end="", flush=True)

    return aloud


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The same in every quick run and another in every full one; STENO_SEED repeats one."""
    full = request.node.get_closest_marker("full") is not None
    return int(os.environ.get("STENO_SEED", time.time_ns() % 1_000_000 if full else 20_261))


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Replace the folder of pytest, which may be in memory: a sync takes time on a disk only."""
    with temporary_folders.folder_on_disk() as path:
        yield path


@pytest.fixture
def quick_disk() -> Iterator[Path]:
    """A folder in memory where there is one, for suites that only care what calls are made."""
    with temporary_folders.folder() as path:
        yield path
