"""Identity of a process, with which other processes of the machine check whether it has ended.

A process counts as ended only if its end is certain. If the system does not provide enough
information, no process counts as ended.
"""

import os
import re
from functools import cache
from pathlib import Path
from typing import Final

from msgspec import Struct

_PROC: Final = Path("/proc")
_NAMESPACE_PIDS: Final = re.compile(r"^NSpid:\t(.*)$", re.MULTILINE)
_ENDED_STATES: Final = ("Z", "X", "x")
"""States in /proc of a process that has ended, even if its parent has not collected it yet."""


class Process(Struct, frozen=True):
    """One process of this machine, identified by its number and start time.

    Process numbers are reused, so the number alone is not enough. Both values depend on namespaces
    and can only be compared within the same namespaces. The number of a namespace is reused, too,
    but only after all its processes have ended.
    """

    boot: str
    pid_namespace: str
    """Number of the PID namespace."""
    time_namespace: str
    """Number of the time namespace."""
    number: int
    started: int

    def __str__(self) -> str:
        return (
            f"{self.boot} {self.pid_namespace} {self.time_namespace} {self.number} {self.started}"
        )

    def can_check(self, other: "Process") -> bool:
        """Return whether this process can find out whether another process has ended."""
        return (self.boot, self.pid_namespace, self.time_namespace) == (
            other.boot,
            other.pid_namespace,
            other.time_namespace,
        )

    def shares_clock(self, other: "Process") -> bool:
        """Return whether two processes share a monotonic clock: same boot and time namespace."""
        return (self.boot, self.time_namespace) == (other.boot, other.time_namespace)


def current() -> Process | None:
    """Return the current process; None if the system does not provide enough information."""
    try:
        return _current()
    except (OSError, ValueError, IndexError):
        return None


@cache
def _current() -> Process:
    number = os.getpid()
    # If /proc belongs to other namespaces, /proc has another number for this process, or several.
    [numbers] = _NAMESPACE_PIDS.findall((_PROC / "self/status").read_text(errors="replace"))
    if numbers != str(number):
        raise ValueError(numbers)
    return Process(
        boot=(_PROC / "sys/kernel/random/boot_id").read_text().strip(),
        pid_namespace=str((_PROC / "self/ns/pid").readlink()),
        time_namespace=_time_namespace(),
        number=number,
        started=_read_stat(number)[0],
    )


# The cached value is wrong in a forked child, which is another process.
os.register_at_fork(after_in_child=_current.cache_clear)


def _time_namespace() -> str:
    try:
        return str((_PROC / "self/ns/time").readlink())
    except FileNotFoundError:  # a kernel without time namespaces
        return "-"


def parse(text: str) -> Process | None:
    """Parse the text form of a process; None if it is invalid."""
    try:
        boot, pid_namespace, time_namespace, number, started = text.split(" ")
        return Process(boot, pid_namespace, time_namespace, int(number), int(started))
    except ValueError:
        return None


def has_ended(process: Process) -> bool:
    """Return whether a process that the current process can check has certainly ended."""
    try:
        os.kill(process.number, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass  # another user owns the process
    try:
        started, ended = _read_stat(process.number)
    except (OSError, ValueError, IndexError):
        return False  # the system hides the process
    return ended or started != process.started


def _read_stat(number: int) -> tuple[int, bool]:
    """Return the start time of a process and whether it has ended.

    Raises OSError, ValueError, IndexError.
    """
    text = (_PROC / str(number) / "stat").read_text(errors="replace")
    # The process name, in brackets, may contain any characters. The field after the name is the
    # third field.
    fields = text.rpartition(")")[2].split()
    state, threads, started = fields[0], int(fields[17]), int(fields[19])
    # If only the first thread has ended, the process looks ended, but its other threads still run.
    return started, state in _ENDED_STATES and threads <= 1
