"""Fixtures of the crash suites: output that is always shown, a seed, and folders."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import temporary_folders
from support.crash.reporting import Say


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Return a function that prints despite pytest's capture: seeds and counts are results."""

    def aloud(text: str) -> None:
        with capsys.disabled():
            print(f"\n    {text}", end="", flush=True)

    return aloud


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Return a fixed seed in quick runs and a new one in full runs; STENO_SEED repeats one."""
    full = request.node.get_closest_marker("full") is not None
    return int(os.environ.get("STENO_SEED", time.time_ns() % 1_000_000 if full else 20_261))


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Replace pytest's folder, which may be in memory, by one on disk, where a sync takes time."""
    with temporary_folders.folder_on_disk() as path:
        yield path


@pytest.fixture
def quick_disk() -> Iterator[Path]:
    """Yield a folder in memory if possible, for suites that only care about the calls."""
    with temporary_folders.folder() as path:
        yield path
