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

from msgspec import DecodeError, Struct
from msgspec.json import Decoder, encode

from stenolog.stores.sql.leases import LEASES_BY_STORE

_PROC_FOLDER: Final = Path("/proc")
_NAMESPACE_PIDS: Final = re.compile(r"^NSpid:\t(.*)$", re.MULTILINE)
_ENDED_STATES: Final = ("Z", "X", "x")
"""States of an ended process in /proc. Z: its parent has not yet read the exit status."""
_CLOCK_TOLERANCE_SECONDS: Final = 2.0
"""Seconds by which the clock may be set back without freeing earlier leases."""


# --- processes -------------------------------------------------------------------------------


class Process(Struct, frozen=True, array_like=True):
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


def has_ended(process: Process) -> bool:
    """Return whether a process of the same boot and PID namespace has certainly ended."""
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


class _Holder(Struct, frozen=True, array_like=True):
    """The holder of a lease, stored in its row as JSON."""

    process: Process
    store_name: str
    """Name of the store in the holder's process (`StoreLeases.name`)."""
    monotonic_expiry: float
    """Expiry by the monotonic clock of the machine."""


_decode_holder: Final = Decoder(_Holder).decode


def format_holder(store_name: str, ttl: float) -> str:
    """Return the holder text of a lease taken or renewed now; empty if the process is unknown."""
    current = current_process()
    if current is None:
        return ""
    return encode(_Holder(current, store_name, time.monotonic() + ttl)).decode()


def is_held(epoch: int, since: bytes, expires: float, holder_text: bytes) -> bool:
    """Return whether the lease of a row is held.

    A lease expires by the monotonic clock of the machine. A lease from another machine, or from
    before a reboot, expires by the wall clock. A lease is also free if its process has ended, or if
    a store of this process has released it.
    """
    if not isinstance(expires, float) or expires <= 0:
        return False  # the lease was released, or the row is damaged
    holder, current = _parse_holder(holder_text), current_process()
    # guard: sqlite-lease-clock
    if holder is None or current is None or holder.process.boot != current.boot:
        return _is_unexpired(since, expires)
    if time.monotonic() >= holder.monotonic_expiry:
        return False
    if holder.process == current:
        leases = LEASES_BY_STORE.get(holder.store_name)
        return leases is not None and leases.is_active(epoch)
    return holder.process.pid_namespace != current.pid_namespace or not has_ended(holder.process)


def _parse_holder(holder_text: bytes) -> _Holder | None:
    try:
        return _decode_holder(holder_text)
    except (DecodeError, UnicodeDecodeError):
        return None  # the process is unknown, or the row is damaged


def _is_unexpired(since: bytes, expires: float) -> bool:
    """Return whether a lease that was acquired or renewed at `since` has not expired."""
    wall_time = time.time()
    try:
        # If `since` is in the future, the clock was ahead: treat the lease as expired.
        acquired_at = datetime.fromisoformat(since.decode()).timestamp()
        return acquired_at - _CLOCK_TOLERANCE_SECONDS < wall_time < expires
    except ValueError:  # the row is damaged
        return False
