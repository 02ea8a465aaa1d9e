"""Ends the servers of a run of the tests, and removes their files, when the run is gone.

A process of its own, because a run that is killed ends nothing. Its input names what was started
and what has ended, one line each; the end of its input is the end of the run.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path


def is_gone(pid: int) -> bool:
    """Whether nothing is left of a process but perhaps an entry that nobody has asked for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    if not Path("/proc/self/stat").exists():
        return False
    try:
        # The name before it may hold anything, blanks and brackets too.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def keep() -> None:
    """Wait for the end of our input, then end and remove what is left of what it named."""
    running: set[int] = set()
    folders: list[str] = []
    for line in sys.stdin:
        word, _, what = line.rstrip("\n").partition(" ")
        if word == "started":
            running.add(int(what))
        elif word == "ended":
            running.discard(int(what))
        else:
            folders.append(what)
    # One that stands still hears only the second.
    for number in (signal.SIGQUIT, signal.SIGKILL):
        running = {pid for pid in running if not is_gone(pid)}
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        limit = time.monotonic() + 5
        while time.monotonic() < limit and not all(map(is_gone, running)):
            time.sleep(0.01)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    keep()
