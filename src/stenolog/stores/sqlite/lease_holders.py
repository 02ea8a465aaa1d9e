"""Identity of the process that holds a lease, and whether it still holds the lease.

A process counts as ended only if its end is certain. If the system does not provide enough
information, no process counts as ended.
"""

import os
import re
import time
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import astuple

from stenolog.stores.sql.leases import LEASES_BY_STORE

_PROC_FOLDER: Final = Path("/proc")
_NAMESPACE_PIDS: Final = re.compile(r"^NSpid:\t(.*)$", re.MULTILINE)
_ENDED_STATES: Final = ("Z", "X", "x")
"""States of an ended process in /proc. Z: its parent has not yet read the exit status."""
_CLOCK_TOLERANCE_SECONDS: Final = 2.0
"""Seconds by which the clock may be set back without freeing earlier leases."""


# --- processes -------------------------------------------------------------------------------


class Process(Struct, frozen=True):
    """One process of this machine, identified by its PID and start time.

    PIDs are reused, so the PID alone is not enough. A PID depends on the Linux namespace of the
    process, and can only be compared within the same namespace. The number of a namespace is
    reused, too, but only after all its processes have ended.
    """

    boot: str
    pid_namespace: str
    """Number of the PID namespace."""
    pid: int
    start_time: int
    """Start time in clock ticks since the boot."""

    def __str__(self) -> str:
        return " ".join(map(str, astuple(self)))

    def can_check(self, other: "Process") -> bool:
        """Return whether this process can find out whether `other` has ended."""
        return (self.boot, self.pid_namespace) == (other.boot, other.pid_namespace)


def current_process() -> Process | None:
    """Return the current process; None if the system does not provide enough information."""
    try:
        return _read_current_process()
    except (OSError, ValueError, IndexError):
        return None


@cache
def _read_current_process() -> Process:
    pid = os.getpid()
    # If /proc belongs to another PID namespace, it shows another PID or several, so do not use it.
    [pids] = _NAMESPACE_PIDS.findall((_PROC_FOLDER / "self/status").read_text(errors="replace"))
    if pids != str(pid):
        raise ValueError(pids)
    return Process(
        boot=(_PROC_FOLDER / "sys/kernel/random/boot_id").read_text().strip(),
        pid_namespace=str((_PROC_FOLDER / "self/ns/pid").readlink()),
        pid=pid,
        start_time=_read_stat(pid)[0],
    )


# The cached value is wrong in a forked child, which is another process.
os.register_at_fork(after_in_child=_read_current_process.cache_clear)


def parse_process(text: str) -> Process | None:
    """Parse the result of `str(process)`; return None if the text is invalid."""
    try:
        boot, pid_namespace, pid, start_time = text.split(" ")
        return Process(boot, pid_namespace, int(pid), int(start_time))
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
    # The process name, in brackets, may contain any characters, so split after the last bracket.
    # The field after the name is the third field of the line.
    fields = text.rpartition(")")[2].split()
    state, thread_count, start_time = fields[0], int(fields[17]), int(fields[19])
    # If only the first thread has ended, the process looks ended, but its other threads still run.
    return start_time, state in _ENDED_STATES and thread_count <= 1


# --- holders ---------------------------------------------------------------------------------


def is_held(epoch: int, since: bytes, expires: float, holder_text: bytes) -> bool:
    """Return whether the lease of a row is held.

    A lease expires by the monotonic clock of the machine. A lease from another machine, or from
    before a reboot, expires by the wall clock. A lease is also free if its process has ended, or if
    a store of this process has released it.
    """
    holder = _parse_holder(holder_text)
    return _is_unexpired(since, expires, holder) and not _is_abandoned(epoch, holder)


class _LeaseHolder(Struct, frozen=True):
    """The holder of a lease as stored in its row: `PROCESS STORE_NAME@EXPIRY`."""

    process: Process
    store_name: str
    """Name of the store in the holder's process (`StoreLeases.name`)."""
    monotonic_expiry: float | None
    """Expiry by the monotonic clock of the machine; None if the row is damaged."""


def _parse_holder(holder_text: bytes) -> _LeaseHolder | None:
    process_text, _, store_text = holder_text.decode(errors="replace").rpartition(" ")
    holder_process = parse_process(process_text)
    if holder_process is None:
        return None
    store_name, _, expiry_text = store_text.partition("@")
    try:
        return _LeaseHolder(holder_process, store_name, float(expiry_text))
    except ValueError:
        return _LeaseHolder(holder_process, store_name, None)


def _is_abandoned(epoch: int, holder: _LeaseHolder | None) -> bool:
    """Return whether the holder of an unexpired lease certainly no longer uses the lease."""
    current = current_process()
    if holder is None or current is None or not current.can_check(holder.process):
        return False
    if holder.process == current:
        leases = LEASES_BY_STORE.get(holder.store_name)
        return leases is None or not leases.is_active(epoch)
    return has_ended(holder.process)


def _is_unexpired(since: bytes, expires: float, holder: _LeaseHolder | None) -> bool:
    """Return whether a lease that was acquired or renewed at `since` has not expired.

    If the lease was acquired on this machine since its last boot, the monotonic clock decides:
    setting the wall clock has no effect. Otherwise the wall clock decides.
    """
    if isinstance(expires, float) and expires <= 0:
        return False  # the lease was released
    current = current_process()
    is_local = holder is not None and current is not None and current.boot == holder.process.boot
    monotonic_expiry = holder.monotonic_expiry if holder is not None and is_local else None
    if monotonic_expiry is not None:  # guard: sqlite-lease-clock
        return time.monotonic() < monotonic_expiry
    wall_time = time.time()
    try:
        # If `since` is in the future, the clock was ahead: treat the lease as expired.
        acquired_at = datetime.fromisoformat(since.decode()).timestamp()
        return acquired_at - _CLOCK_TOLERANCE_SECONDS < wall_time < expires
    except (ValueError, TypeError):  # the row is damaged
        return False


def format_holder(store_name: str, ttl: float) -> str:
    """Return the holder text of a lease taken or renewed now; empty if the process is unknown."""
    current = current_process()
    return "" if current is None else f"{current} {store_name}@{time.monotonic() + ttl:.6f}"
