"""`make soak`: 200 sessions at once for ten minutes, with bursts of ten times the capacity.

The program draws the memory of the gateway over time. It fails if memory grows in the second half,
if a request gets anything but an answer or a rejection, or if a message is lost.

The store caches the newest messages up to `cache_bytes`, 64 MiB by default, which this load reaches
only after an hour. `--cache-mib` sets a limit that is reached in the first half, so that the second
half shows whether memory stays constant. The gateway has about 100 threads, and glibc keeps freed
memory for each thread. This cache is switched off, because it grows for a long time and would hide
a leak.
"""

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median
from time import perf_counter

import stenolog
from footprint import resident_mb_of
from gateway import gateway, run_users
from measure import percentiles

SESSIONS = 200
CAPACITY = 256
SLICE_SECONDS = 10.0
"""Seconds between two measurements of memory."""
BURST_EVERY = 6
"""Every sixth slice is a burst with ten times as many users as the gateway accepts."""
MAX_GROWTH_MB = 15.0
"""MB that memory may grow from the middle of the run to its end."""
_BARS = "▁▂▃▄▅▆▇█"


def main() -> None:
    """Run the soak test and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--cache-mib", type=float, default=4.0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix=".soak-", dir=Path(__file__).resolve().parent.parent))
    (folder / ".gitignore").write_text("*\n")
    try:
        problems = _soak(folder, options.minutes, int(options.cache_mib * 1024 * 1024))
    finally:
        shutil.rmtree(folder)
    if problems:
        sys.exit("\n".join(problems))
    print("Passed.")


def _soak(folder: Path, minutes: float, cache_bytes: int) -> list[str]:
    statuses: Counter[int] = Counter()
    memory: list[float] = []
    durations: list[float] = []
    until = perf_counter() + minutes * 60
    server = gateway(
        folder / "workspace", max_turns=CAPACITY, cache_bytes=cache_bytes, plain_malloc=True
    )
    with server as (url, pid):
        while perf_counter() < until:
            burst = len(memory) % BURST_EVERY == BURST_EVERY - 1
            users = run_users(
                url, CAPACITY * 10 if burst else SESSIONS, 2.0 if burst else SLICE_SECONDS
            )
            for user in users:
                statuses += user.statuses
                durations += [] if burst else user.seconds
            memory.append(resident_mb_of(pid))
            _print_progress(memory, statuses, minutes, seconds_left=until - perf_counter())
    print()
    answered = statuses[200]
    with stenolog.open_store(str(folder / "workspace"), read_only=True) as store:
        stored = sum(store.info(key).count for key in store.list_sessions())
    stats = percentiles(durations)
    rejected, closed = statuses[429] + statuses[503], statuses[0]
    print(f"{answered:,} answers, {rejected:,} rejected")
    print(f"{closed:,} connections closed without a response")
    print(f"{stored:,} messages stored")
    print(f"A turn took {stats['p50_us'] / 1e6:.2f} s (p50), {stats['p99_us'] / 1e6:.2f} s (p99).")
    return _find_problems(statuses, memory, stored)


def _print_progress(
    memory: list[float], statuses: Counter[int], minutes: float, *, seconds_left: float
) -> None:
    low, high = min(memory), max(memory)
    scale = (high - low) or 1.0
    chart = "".join(_BARS[int((value - low) / scale * (len(_BARS) - 1))] for value in memory[-60:])
    minutes_left = max(0.0, seconds_left) / 60
    text = f"{chart} {memory[-1]:.0f} MB ({low:.0f} to {high:.0f}), {statuses[200]:,} answers"
    print(f"\r\033[K{text}, {minutes_left:.1f} of {minutes:g} min left", end="", flush=True)


def _find_problems(statuses: Counter[int], memory: list[float], stored: int) -> list[str]:
    problems = []
    rejections = (0, 429, 503)
    others = {
        status: count for status, count in statuses.items() if status not in (200, *rejections)
    }
    if others:
        problems.append(f"Unexpected statuses: {others}.")
    if stored < 2 * statuses[200]:
        problems.append(f"{2 * statuses[200] - stored} messages are missing.")
    # In the first half the message cache fills up to its limit.
    tenth, half = max(1, len(memory) // 10), len(memory) // 2
    early, late = median(memory[half : half + tenth] or memory), median(memory[-tenth:])
    print(f"Memory: {early:.0f} MB in the middle of the run, {late:.0f} MB in its last tenth.")
    if late > early + MAX_GROWTH_MB:
        problems.append(f"Memory is not flat: it grew by {late - early:.0f} MB.")
    return problems


if __name__ == "__main__":
    main()
