"""What the tests of the SQLite store share."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import needs
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


def in_namespace(*options: str) -> list[str]:
    """The command that begins another one in a namespace of its own."""
    needs.tool("unshare")
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", *options]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"NOT RUN (kernel): no namespaces here: {tried.stderr.strip()}")
    return command
