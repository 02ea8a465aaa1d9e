"""Runs work in a forked child process with limits of CPU time and memory."""

import os
import resource
import sys
import traceback
from collections.abc import Callable

MB = 1 << 20
_MOST_MEMORY = 4096 * MB


def run_limited(work: Callable[[], object], *, cpu: int, memory: int | None = None) -> None:
    """Run `work` in a child; fail if it raises, or needs more than the limits.

    `cpu`: seconds of CPU time, so a busy machine does not matter. `memory`: bytes by which the
    process may grow.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
            # Protects the machine if the test fails; it is not the check, because code may catch
            # MemoryError.
            resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
            before = _peak()
            work()
            grown = _peak() - before
            assert memory is None or grown <= memory, f"it took {grown // MB:,} MB"
            code = 0
        except BaseException:  # noqa: BLE001 - shown, before the child ends here
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"ended with {status}; a negative number is a signal: over the CPU limit"


def _peak() -> int:
    """Return the peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
