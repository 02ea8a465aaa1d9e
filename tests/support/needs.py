"""Requirements of a test on the machine, checked in its first line: `needs.tool("strace")`.

A test with a missing requirement is skipped with a reason that starts with NOT RUN, and conftest
lists these at the end. With STENO_REQUIRE=tools, a missing tool (or missing root) is a failure
instead. A missing kernel feature is always a skip, because it cannot be installed.
"""

import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Literal, NoReturn

import pytest

Facility = Literal["loop", "ext4", "xfs", "mount", "ptrace", "fuse"]

_NEEDS_ROOT = {"loop", "ext4", "xfs", "mount"}
_NEEDS_TOOLS: dict[str, tuple[str, ...]] = {
    "loop": ("losetup",),
    "ext4": ("losetup", "mount", "mkfs.ext4"),
    "xfs": ("losetup", "mount", "mkfs.xfs"),
    "mount": ("mount",),
    "ptrace": ("strace",),
    "fuse": (),
}


def tool(*names: str) -> None:
    """Skip the test unless all these programs are installed."""
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        lacking(f"not installed: {', '.join(missing)}")


def package(*names: str) -> None:
    """Skip the test unless all these pip packages are installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        lacking(f"not installed: {', '.join(missing)}")


def root() -> None:
    """Skip the test unless the user is root."""
    if os.geteuid() != 0:
        lacking("not root")


def kernel(*facilities: Facility) -> None:
    """Skip the test unless the kernel supports these facilities; each is tried once per run.

    Also requires root and the tools of the trial, so that a missing tool is not mistaken for a
    missing kernel feature.
    """
    for facility in facilities:
        if facility in _NEEDS_ROOT:
            root()
        tool(*_NEEDS_TOOLS[facility])
        refusal = _try(facility)
        if refusal is not None:
            pytest.skip(f"NOT RUN (kernel): no {facility} here: {refusal}")


def lacking(what: str) -> NoReturn:
    """End the test as NOT RUN, or as failed if all tools are required."""
    if os.environ.get("STENO_REQUIRE") == "tools":
        pytest.fail(f"{what}, and STENO_REQUIRE=tools asks for it", pytrace=False)
    pytest.skip(f"NOT RUN: {what}")


@functools.cache
def _try(facility: Facility) -> str | None:
    """Return the kernel's error, or None if the facility works."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        try:
            match facility:
                case "loop":
                    _attach(place)
                case "ext4":
                    _mount_image(place, size=8, mkfs=["mkfs.ext4", "-q", "-F"])
                case "xfs":
                    # mkfs.xfs rejects anything smaller; the file is sparse and takes no space.
                    _mount_image(place, size=320, mkfs=["mkfs.xfs", "-q", "-f"])
                case "mount":
                    _run("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder)
                    _run("umount", folder)
                case "ptrace":
                    _run("strace", "-o", os.devnull, "true")
                case "fuse":
                    os.close(os.open("/dev/fuse", os.O_RDWR))
        except subprocess.CalledProcessError as error:
            return _first_line(error.stderr) or f"{error.cmd[0]} ended with {error.returncode}"
        except subprocess.TimeoutExpired as error:
            return f"{error.cmd[0]} did not end"
        except OSError as error:
            return str(error)
    return None


def _attach(place: Path) -> None:
    image = _image(place, size=1)
    device = _run("losetup", "--find", "--show", str(image)).strip()
    _run("losetup", "--detach", device)


def _mount_image(place: Path, *, size: int, mkfs: list[str]) -> None:
    image = _image(place, size=size)
    target = place / "mounted"
    target.mkdir()
    _run(*mkfs, str(image))
    _run("mount", "-o", "loop", str(image), str(target))
    _run("umount", str(target))


def _image(place: Path, *, size: int) -> Path:
    image = place / "image"
    with image.open("wb") as empty:
        empty.truncate(size << 20)
    return image


def _run(*command: str) -> str:
    return subprocess.run(
        command,
        check=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=30,
    ).stdout


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
