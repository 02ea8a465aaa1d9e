"""Temporary folders in memory or on disk, for tests."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MEMORY = Path("/dev/shm")
_ENOUGH = 4 << 30
_DISK = "STENO_TEST_DISK"
"""Environment variable with the temporary folder on disk, for the workers of a run."""


def new_folder_of_run() -> Path:
    """Create a folder for all files of a run, in memory if there is enough space.

    A TMPDIR in the environment is used instead. The disk is used if programs cannot be started from
    memory, or if there is little space, such as the 64 MB of a Docker container.
    """
    os.environ.setdefault(_DISK, tempfile.gettempdir())
    in_memory = (
        "TMPDIR" not in os.environ
        and os.access(_MEMORY, os.W_OK | os.X_OK)
        and not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC
        and shutil.disk_usage(_MEMORY).free >= _ENOUGH
    )
    # Short, because the path of a socket may have at most about 100 bytes.
    return Path(tempfile.mkdtemp(prefix="steno-", dir=_MEMORY if in_memory else None))


@contextmanager
def folder_on_disk() -> Iterator[Path]:
    """Create a folder on disk and remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix="steno-", dir=os.environ[_DISK]) as path:
        yield Path(path)


@contextmanager
def folder() -> Iterator[Path]:
    """Create a folder, in memory if possible, and remove it afterwards."""
    with tempfile.TemporaryDirectory(
        prefix="steno-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None
    ) as path:
        yield Path(path)
