"""Records every call that changes files of a store, and can kill the process at any of them."""

import contextlib
import fcntl
import itertools
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal

ROOT: Final = 0
"""The node of the recorded folder."""

Blindness = Literal["files", "folders"]


class Killed(BaseException):
    """A simulated kill: neither this call nor any later one happens."""


@dataclass(frozen=True, slots=True)
class Written:
    """Bytes written at an offset of a file."""

    node: int
    offset: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Resized:
    """A file truncated or extended."""

    node: int
    size: int


@dataclass(frozen=True, slots=True)
class Synced:
    """A file or folder synced."""

    node: int


@dataclass(frozen=True, slots=True)
class Moved:
    """A directory entry that disappears, appears, or both at once."""

    node: int
    old: tuple[int, str] | None = None
    new: tuple[int, str] | None = None
    folder: bool = False


Event = Written | Resized | Synced | Moved


class Recorder:
    """Replaces functions of os and records their effects below one folder.

    `blind_to` leaves out the syncs of files or folders, as if the store had not made them.
    """

    def __init__(self, root: Path, *, blind_to: Blindness | None = None) -> None:
        self.events: list[Event] = []
        self.kill_at: int | None = None
        """Number of calls until the kill."""
        self._blind_to = blind_to
        self._dead = False
        self._nodes: dict[tuple[int, int], int] = {}
        self._numbers = itertools.count(ROOT)
        self._os = SimpleNamespace()
        self._register(root.stat())
        self._adopt(root)
        self.before = len(self.events)
        """Number of events that describe the folder at the start of the recording, all on disk."""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls of this process during the block."""
        watched = {
            "open": self._open,
            "write": self._write,
            "pwrite": self._pwrite,
            "ftruncate": self._ftruncate,
            "fsync": self._sync,
            "fdatasync": self._sync,
            "rename": self._rename,
            "replace": self._rename,
            "link": self._link,
            "unlink": self._unlink,
            "remove": self._unlink,
            "mkdir": self._mkdir,
            "rmdir": self._rmdir,
        }
        self._os = SimpleNamespace(**{name: getattr(os, name) for name in watched})
        try:
            for name, function in watched.items():
                setattr(os, name, function)
            yield
        finally:
            for name in watched:
                setattr(os, name, getattr(self._os, name))

    def revive(self) -> None:
        """Start the next process after the killed one has released everything."""
        self._dead, self.kill_at = False, None

    def _alive(self) -> bool:
        """Return whether this call happens; a dead process makes none, but may run to its end."""
        if self.kill_at is not None and not self._dead:
            self.kill_at -= 1
            if self.kill_at < 0:
                self._dead = True
                raise Killed
        return not self._dead

    def _adopt(self, folder: Path) -> None:
        above = self._nodes[_identity(folder.stat())]
        for path in sorted(folder.iterdir()):
            node = self._register(path.lstat())
            self.events.append(Moved(node, new=(above, path.name), folder=path.is_dir()))
            if path.is_dir():
                self._adopt(path)
            else:
                self.events += [Written(node, 0, path.read_bytes()), Synced(node)]
        self.events.append(Synced(above))

    def _register(self, found: os.stat_result) -> int:
        # An inode number that the file system reuses is a new node.
        node = next(self._numbers)
        self._nodes[_identity(found)] = node
        return node

    def _known(self, descriptor: int) -> int | None:
        return self._nodes.get(_identity(os.fstat(descriptor)))

    def _place(self, path: Any, dir_fd: int | None) -> tuple[int, str] | None:
        above, name = os.path.split(os.fspath(path))
        if above or dir_fd is None:
            folder = self._nodes.get(_identity(os.stat(above or ".", dir_fd=dir_fd)))
        else:
            folder = self._known(dir_fd)
        return None if folder is None else (folder, name)

    def _node_at(self, path: Any, dir_fd: int | None) -> int:
        return self._nodes[_identity(os.stat(path, dir_fd=dir_fd, follow_symlinks=False))]

    # --- replacements for os -----------------------------------------------------------------

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        place = self._place(path, dir_fd) if flags & (os.O_CREAT | os.O_TRUNC) else None
        size = _size(path, dir_fd) if place is not None else None
        changes = place is not None and (size is None or bool(size and flags & os.O_TRUNC))
        if changes and not self._alive():
            raise Killed
        descriptor: int = self._os.open(path, flags, mode, dir_fd=dir_fd)
        if changes and size is None:
            self.events.append(Moved(self._register(os.fstat(descriptor)), new=place))
        elif changes:
            self.events.append(Resized(self._node_at(path, dir_fd), 0))
        return descriptor

    def _write(self, descriptor: int, text: Any) -> int:
        node = self._known(descriptor)
        if node is not None and not self._alive():
            return len(text)
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND or node is None:
            offset = os.fstat(descriptor).st_size
        else:
            offset = os.lseek(descriptor, 0, os.SEEK_CUR)
        count: int = self._os.write(descriptor, text)
        if node is not None:
            self.events.append(Written(node, offset, bytes(text[:count])))
        return count

    def _pwrite(self, descriptor: int, text: Any, offset: int) -> int:
        node = self._known(descriptor)
        if node is not None and not self._alive():
            return len(text)
        count: int = self._os.pwrite(descriptor, text, offset)
        if node is not None:
            self.events.append(Written(node, offset, bytes(text[:count])))
        return count

    def _ftruncate(self, descriptor: int, size: int) -> None:
        node = self._known(descriptor)
        if node is None or self._alive():
            self._os.ftruncate(descriptor, size)
            if node is not None:
                self.events.append(Resized(node, size))

    def _sync(self, descriptor: int) -> None:
        node = self._known(descriptor)
        if node is not None and self._alive():
            folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
            if self._blind_to != ("folders" if folder else "files"):
                self.events.append(Synced(node))

    def _rename(
        self,
        old: Any,
        new: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
    ) -> None:
        source, target = self._place(old, src_dir_fd), self._place(new, dst_dir_fd)
        if target is None or self._alive():
            node = self._node_at(old, src_dir_fd) if target is not None else ROOT
            self._os.rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            if target is not None:
                self.events.append(Moved(node, old=source, new=target))

    def _link(self, source: Any, target: Any, **options: Any) -> None:
        place = self._place(target, options.get("dst_dir_fd"))
        if place is None or self._alive():
            self._os.link(source, target, **options)
            if place is not None:
                node = self._node_at(source, options.get("src_dir_fd"))
                self.events.append(Moved(node, new=place))

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        if place is None or self._alive():
            node = self._node_at(path, dir_fd) if place is not None else ROOT
            self._os.unlink(path, dir_fd=dir_fd)
            if place is not None:
                self.events.append(Moved(node, old=place))

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        if place is None or self._alive():
            self._os.mkdir(path, mode, dir_fd=dir_fd)
            if place is not None:
                found = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
                self.events.append(Moved(self._register(found), new=place, folder=True))

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        if place is None or self._alive():
            node = self._node_at(path, dir_fd) if place is not None else ROOT
            self._os.rmdir(path, dir_fd=dir_fd)
            if place is not None:
                self.events.append(Moved(node, old=place))


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _size(path: Any, dir_fd: int | None) -> int | None:
    try:
        return os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_size
    except FileNotFoundError:
        return None
