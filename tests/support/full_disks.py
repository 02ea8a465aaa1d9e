"""A disk that is full until it is freed: a small tmpfs, or a limit on the size of files."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from support import needs
from support.crash.disks import tiny_tmpfs

KINDS: Final = ("tmpfs", "limit")
LONG: Final = "and so on " * 12_000
"""A text longer than the free space in pages that a file already has."""


class Disk(Protocol):
    """A folder whose disk can be filled and emptied."""

    folder: Path

    def fill(self) -> None:
        """Fill the disk."""

    def free(self) -> None:
        """Free some space."""


class _Tmpfs:
    def __init__(self, mounted: Path) -> None:
        self.folder = mounted
        self._ballast = mounted / "ballast"

    def fill(self) -> None:
        with self._ballast.open("wb", buffering=0) as file:
            for size in (1 << 16, 1 << 10, 1):
                try:
                    while file.write(b"x" * size) == size:
                        pass
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        self._ballast.unlink()


class _Limit:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._usual = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, self._usual[1]))

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._usual)


@contextmanager
def full_disk(folder: Path, kind: str) -> Iterator[Disk]:
    """Yield a disk of this kind, which is not full yet. A limit applies to the whole process."""
    if kind == "tmpfs":
        needs.kernel("mount")
        with tiny_tmpfs(folder, "8m") as mounted:
            yield _Tmpfs(mounted)
        return
    limit = _Limit(folder)
    try:
        yield limit
    finally:
        limit.free()
