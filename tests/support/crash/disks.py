"""File systems for tests: images on loop devices and small tmpfs, always unmounted again."""

import contextlib
import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

FileSystem = Literal["ext4", "xfs"]

# _IOR('X', 125, __u32): stop the file system immediately without flushing its log (flag 2).
_GOING_DOWN: Final = 0x8004587D
_NO_LOG_FLUSH: Final = 2

_MAKE: Final = {"ext4": ("mkfs.ext4", "-q", "-F"), "xfs": ("mkfs.xfs", "-q", "-f")}
_MEGABYTES: Final = {"ext4": 64, "xfs": 320}


class LoopDisk:
    """A mounted image that can lose power."""

    def __init__(self, image: Path, mounted: Path) -> None:
        self.mounted = mounted
        self._image = image

    def mount(self) -> None:
        """Mount the image, which replays the journal."""
        _run("mount", "-o", "loop", self._image, self.mounted)

    def unmount(self) -> None:
        """Unmount the image, which also frees the loop device."""
        _run("umount", self.mounted)

    def repair(self) -> None:
        """Check and repair the file system as a boot does. The exit code only reports repairs."""
        command = ["e2fsck", "-f", "-y", str(self._image)]
        subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=60)

    def descriptor(self) -> int:
        """Open the descriptor that `cut` needs in advance, so that the cut is one call."""
        return os.open(self.mounted, os.O_RDONLY | os.O_DIRECTORY)


def cut(descriptor: int) -> None:
    """Cut the power: data that is not on the disk yet is lost."""
    fcntl.ioctl(descriptor, _GOING_DOWN, struct.pack("I", _NO_LOG_FLUSH))


@contextlib.contextmanager
def loop_disk(place: Path, kind: FileSystem) -> Iterator[LoopDisk]:
    """Create and mount a new file system of this kind."""
    image, mounted = place / f"{kind}.image", place / kind
    with image.open("wb") as empty:
        empty.truncate(_MEGABYTES[kind] << 20)
    _run(*_MAKE[kind], image)
    mounted.mkdir()
    disk = LoopDisk(image, mounted)
    disk.mount()
    try:
        yield disk
    finally:
        _take_down(mounted)
        image.unlink()


@contextlib.contextmanager
def tiny_tmpfs(place: Path, size: str) -> Iterator[Path]:
    """Mount a small tmpfs that fills up quickly; `grow` enlarges it."""
    mounted = place / "tiny"
    mounted.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", mounted)
    try:
        yield mounted
    finally:
        _take_down(mounted)


def grow(mounted: Path, size: str) -> None:
    """Enlarge a tmpfs."""
    _run("mount", "-o", f"remount,size={size}", mounted)


@contextlib.contextmanager
def failing_disk(place: Path, *, room: str) -> Iterator[LoopDisk]:
    """Mount ext4 on an image that claims 64 MiB but has less, so that the kernel fails writes."""
    with tiny_tmpfs(place, room) as under:
        image, mounted = under / "image", place / "failing"
        with image.open("wb") as empty:
            empty.truncate(64 << 20)
        options = "lazy_itable_init=1,nodiscard"
        _run("mkfs.ext4", "-q", "-F", "-E", options, "-J", "size=4", image)
        mounted.mkdir()
        disk = LoopDisk(image, mounted)
        _run("mount", "-o", "loop,errors=continue", image, mounted)
        try:
            yield disk
        finally:
            _take_down(mounted)


def _take_down(mounted: Path) -> None:
    if mounted.is_mount():
        # Unmount lazily if the mount is in use: it must not outlive its test.
        with contextlib.suppress(subprocess.CalledProcessError):
            _run("umount", mounted)
            return
        _run("umount", "--lazy", mounted)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
