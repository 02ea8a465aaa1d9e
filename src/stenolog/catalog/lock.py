"""The lock file of an index: one writer at a time, and how the last one left the database."""

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from stenolog.catalog.database import Busy, Unusable

WRITING: Final = b"writing"
"""Stands in the lock file while somebody writes, or died doing so."""

_POLL: Final = 0.002
_MARK_BYTES: Final = 80

Identity = tuple[int, int]
"""Device and inode: which file it is, whatever its name."""


class LockFile:
    """A file that is locked by who writes, and tells what they left."""

    def __init__(self, path: Path, *, patience: float) -> None:
        self._path = path
        self.patience = patience
        """How long to wait for other writers, in seconds."""

    @contextmanager
    def held(self) -> Iterator[int]:
        """The lock file, with its flock held. Raises Unusable."""
        try:
            lock = self._open()
        except BlockingIOError as error:
            raise Busy(f"{self._path}: others write all the time") from error
        except OSError as error:
            raise Unusable(f"{self._path}: {error.strerror}") from error
        try:
            yield lock
        except OSError as error:
            raise Unusable(f"{self._path}: {error.strerror}") from error
        finally:
            # By name, for the sake of a forked child that has a copy of the descriptor.
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)

    def _open(self) -> int:
        deadline = time.monotonic() + self.patience
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            lock = os.open(self._path, flags, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.fstat(lock)
                if (found.st_dev, found.st_ino) == identity(self._path):
                    return lock
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(lock)
                    raise
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)
            time.sleep(_POLL)

    def mark(self) -> bytes:
        """What the last writer wrote; empty where there is none."""
        try:
            # A fifo of this name would keep whoever opens it waiting.
            lock = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            if not stat.S_ISREG(os.fstat(lock).st_mode):
                return b""
            return os.pread(lock, _MARK_BYTES, 0).rstrip()
        finally:
            os.close(lock)


def set_mark(lock: int, mark: bytes) -> None:
    """Write it into the lock file that is held. Raises OSError."""
    os.pwrite(lock, mark.ljust(_MARK_BYTES - 1) + b"\n", 0)


def left(path: Path) -> bytes:
    """What changes whenever a file is written to or replaced; empty where there is none."""
    try:
        found = path.lstat()
    except OSError:
        return b""
    return b"%d:%d:%d:%d" % (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def identity(path: Path) -> Identity | None:
    """Which file stands there; None where there is none. Raises Unusable."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unusable(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise Unusable(f"{path}: something else stands in its place")
    return found.st_dev, found.st_ino
