"""Temporary folders in memory or on the disk, for tests."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MEMORY = Path("/dev/shm")
_ENOUGH = 4 << 30
_DISK = "STENO_TEST_DISK"
"""The environment variable with the temporary folder on the disk, for the workers of a run."""


def new_folder_of_run() -> Path:
    """Return a new folder for all files of a run: in memory where there is enough room.

    A TMPDIR in the environment is used instead. The disk is used where programs cannot be started
    from memory, and where there is little room, as the 64 MB of a Docker container.
    """
    os.environ.setdefault(_DISK, tempfile.gettempdir())
    in_memory = (
        "TMPDIR" not in os.environ
        and os.access(_MEMORY, os.W_OK | os.X_OK)
        and not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC
        and shutil.disk_usage(_MEMORY).free >= _ENOUGH
    )
    # Short, because a socket's path may have no more than about 100 bytes.
    return Path(tempfile.mkdtemp(prefix="steno-", dir=_MEMORY if in_memory else None))


@contextmanager
def folder_on_disk() -> Iterator[Path]:
    """Make a folder on the disk and remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix="steno-", dir=os.environ[_DISK]) as path:
        yield Path(path)


@contextmanager
def folder() -> Iterator[Path]:
    """Make a folder in memory, where there is any, and remove it afterwards."""
    with tempfile.TemporaryDirectory(
        prefix="steno-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None
    ) as path:
        yield Path(path)
