"""Ends the servers of a test run, and removes their files, when the run has ended.

It is a separate process, because a killed test run cannot clean up. Its input names what was
started and what has ended, one line each; the end of its input is the end of the run.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path


def is_gone(pid: int) -> bool:
    """Return whether a process has ended; it may still be a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    if not Path("/proc/self/stat").exists():
        return False
    try:
        # The name before it may contain anything, even blanks and brackets.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def keep() -> None:
    """Wait for the end of the input, then end and remove everything that is left."""
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
    # A paused process only reacts to the second.
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
