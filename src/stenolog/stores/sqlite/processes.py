"""Which process somebody is, in words that another process of the same machine can check.

Certain or nothing: where a system tells too little of its processes, nobody counts as gone.
"""

import os
import re
from functools import cache
from pathlib import Path
from typing import Final

from msgspec import Struct

_PROC: Final = Path("/proc")
_OWN_NUMBERS: Final = re.compile(r"^NSpid:\t(.*)$", re.MULTILINE)
_ENDED: Final = ("Z", "X", "x")
"""What /proc calls a process that has ended; its parent may not have heard of it yet."""


class Process(Struct, frozen=True):
    """One process of this machine. Numbers are given out again: with its start it is the only one.

    Both are told from within namespaces, and mean something only to who is in the same ones. The
    number of a namespace is given out again as well, but only when all in the former one are gone.
    """

    boot: str
    pids: str
    """The namespace of the numbers."""
    times: str
    """The namespace of the start times."""
    number: int
    started: int

    def __str__(self) -> str:
        return f"{self.boot} {self.pids} {self.times} {self.number} {self.started}"

    def sees(self, other: "Process") -> bool:
        """Whether it can tell what became of another one."""
        return (self.boot, self.pids, self.times) == (other.boot, other.pids, other.times)

    def shares_clock(self, other: "Process") -> bool:
        """Whether both read the same monotonic clock: that of one boot and one time namespace."""
        return (self.boot, self.times) == (other.boot, other.times)


def current() -> Process | None:
    """The one that this is; None where the system does not say enough."""
    try:
        return _current()
    except (OSError, ValueError, IndexError):
        return None


@cache
def _current() -> Process:
    number = os.getpid()
    # Where /proc is that of other namespaces, it has another number for us, or several.
    [numbers] = _OWN_NUMBERS.findall((_PROC / "self/status").read_text(errors="replace"))
    if numbers != str(number):
        raise ValueError(numbers)
    return Process(
        boot=(_PROC / "sys/kernel/random/boot_id").read_text().strip(),
        pids=str((_PROC / "self/ns/pid").readlink()),
        times=_times(),
        number=number,
        started=_look(number)[0],
    )


# A forked child is another one.
os.register_at_fork(after_in_child=_current.cache_clear)


def _times() -> str:
    try:
        return str((_PROC / "self/ns/time").readlink())
    except FileNotFoundError:  # a kernel without them
        return "-"


def parse(words: str) -> Process | None:
    """The process that was written down; None where that says nothing."""
    try:
        boot, pids, times, number, started = words.split(" ")
        return Process(boot, pids, times, int(number), int(started))
    except ValueError:
        return None


def is_gone(process: Process) -> bool:
    """Whether one that the current process sees has certainly ended."""
    try:
        os.kill(process.number, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass  # it is somebody else's
    try:
        started, ended = _look(process.number)
    except (OSError, ValueError, IndexError):
        return False  # hidden from us
    return ended or started != process.started


def _look(number: int) -> tuple[int, bool]:
    """When a process started, and whether it has ended. Raises OSError, ValueError, IndexError."""
    words = (_PROC / str(number) / "stat").read_text(errors="replace")
    # Its name, in brackets, may hold anything. The first field behind it is the third of all.
    fields = words.rpartition(")")[2].split()
    state, threads, started = fields[0], int(fields[17]), int(fields[19])
    # With the first of its threads gone it looks ended, while the others go on.
    return started, state in _ENDED and threads <= 1
