"""Run `make test` several times in a row while two busy loops use the CPU.

Prints the wall time, the CPU time and the result of each run. Tests that depend on the speed of the
machine fail here. The output of failed runs is kept in files that are named at the end.
"""

import contextlib
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOOPS = 2


def main(runs: int) -> int:
    """Run the tests and return the exit code."""
    # Ctrl-C and `kill` must end the busy loops as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    failed = 0
    kept = Path(tempfile.mkdtemp(prefix="steno-loaded-"))
    with _busy_loops():
        for run in range(1, runs + 1):
            log = kept / f"run{run}.log"
            began, used = time.monotonic(), _cpu_seconds()
            with log.open("wb") as output:
                code = subprocess.run(
                    ["make", "--no-print-directory", "test"],
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    check=False,
                ).returncode
            wall, cpu = time.monotonic() - began, _cpu_seconds() - used
            result = "passed" if code == 0 else f"FAILED, see {log}"
            print(f"run {run:2}: {_clock(wall)} wall, {_clock(cpu)} CPU, {result}", flush=True)
            failed += code != 0
            if code == 0:
                log.unlink()
    print(f"{runs - failed} of {runs} runs passed")
    return 1 if failed else 0


@contextlib.contextmanager
def _busy_loops() -> Iterator[None]:
    loops: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(LOOPS):
            # A loop whose parent has ended sees another parent and stops.
            code = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    pass"
            loops.append(subprocess.Popen([sys.executable, "-S", "-c", code]))
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10))
