"""Identity of a process, for other processes that check whether the process has ended.

A process counts as ended only if its end is certain. If the system does not provide enough
information, no process counts as ended.
"""

import os
import re
from functools import cache
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import astuple

_PROC_FOLDER: Final = Path("/proc")
_NAMESPACE_PIDS: Final = re.compile(r"^NSpid:\t(.*)$", re.MULTILINE)
_ENDED_STATES: Final = ("Z", "X", "x")
"""State letters in /proc of a process that has ended; Z: its parent has not collected it yet."""


class Process(Struct, frozen=True):
    """One process of this machine, identified by its number and start time.

    Process numbers are reused, so the number alone is not enough. Number and start time depend on
    namespaces and can only be compared within the same namespaces. The number of a namespace is
    reused, too, but only after all its processes have ended.
    """

    boot: str
    pid_namespace: str
    """Number of the PID namespace."""
    time_namespace: str
    """Number of the time namespace."""
    pid: int
    start_time: int
    """Start time in clock ticks since the boot."""

    def __str__(self) -> str:
        return " ".join(map(str, astuple(self)))

    def can_check(self, other: "Process") -> bool:
        """Return whether this process can find out whether another process has ended."""
        return self.shares_clock(other) and self.pid_namespace == other.pid_namespace

    def shares_clock(self, other: "Process") -> bool:
        """Return whether two processes share a monotonic clock: same boot and time namespace."""
        return (self.boot, self.time_namespace) == (other.boot, other.time_namespace)


def current_process() -> Process | None:
    """Return the current process; None if the system does not provide enough information."""
    try:
        return _current()
    except (OSError, ValueError, IndexError):
        return None


@cache
def _current() -> Process:
    pid = os.getpid()
    # If /proc belongs to other namespaces, /proc has another number for this process, or several.
    [pids] = _NAMESPACE_PIDS.findall((_PROC_FOLDER / "self/status").read_text(errors="replace"))
    if pids != str(pid):
        raise ValueError(pids)
    return Process(
        boot=(_PROC_FOLDER / "sys/kernel/random/boot_id").read_text().strip(),
        pid_namespace=str((_PROC_FOLDER / "self/ns/pid").readlink()),
        time_namespace=_time_namespace(),
        pid=pid,
        start_time=_read_stat(pid)[0],
    )


# The cached value is wrong in a forked child, which is another process.
os.register_at_fork(after_in_child=_current.cache_clear)


def _time_namespace() -> str:
    try:
        return str((_PROC_FOLDER / "self/ns/time").readlink())
    except FileNotFoundError:  # a kernel without time namespaces
        return "-"


def parse_process(text: str) -> Process | None:
    """Parse the result of `str(process)`; return None if the text is invalid."""
    try:
        boot, pid_namespace, time_namespace, pid, start_time = text.split(" ")
        return Process(boot, pid_namespace, time_namespace, int(pid), int(start_time))
    except ValueError:
        return None


def has_ended(process: Process) -> bool:
    """Return whether the process has certainly ended; `can_check` must be true for the process."""
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass  # another user owns the process
    try:
        start_time, is_ended = _read_stat(process.pid)
    except (OSError, ValueError, IndexError):
        return False  # the system hides the process
    return is_ended or start_time != process.start_time


def _read_stat(pid: int) -> tuple[int, bool]:
    """Return the start time of a process and whether it has ended.

    Raises OSError, ValueError, IndexError.
    """
    text = (_PROC_FOLDER / str(pid) / "stat").read_text(errors="replace")
    # The process name, in brackets, may contain any characters.
    # The field after the name is the third field.
    fields = text.rpartition(")")[2].split()
    state, thread_count, start_time = fields[0], int(fields[17]), int(fields[19])
    # If only the first thread has ended, the process looks ended, but its other threads still run.
    return start_time, state in _ENDED_STATES and thread_count <= 1
