"""`make soak`: 200 sessions at once for ten minutes, with bursts of ten times the capacity.

It draws the memory of the gateway over time. It fails if the memory grows in the second half, if a
request gets anything but an answer or a refusal, or if a message is lost.

The store keeps the newest messages in memory up to `cache_bytes`, 64 MiB by default, which this
load reaches only after an hour. `--cache-mib` sets a limit that is reached in the first half, so
that the second half shows whether memory stays there. The gateway has about 100 threads, and glibc
keeps freed memory for each of them; that is switched off here, because it grows for a long time and
would hide a leak.
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
from footprint import resident_of
from gateway import gateway, talking
from measure import percentiles

SESSIONS = 200
ROOM = 256
SLICE = 10.0
"""Seconds between two looks at the memory."""
BURST = 6
"""In each so many-th slice there are ten times as many users as there is room for."""
FLAT = 15.0
"""So many MB it may grow from the middle of the run to its end."""
_BARS = "▁▂▃▄▅▆▇█"


def main() -> None:
    """Run it, and tell how it went."""
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
    print("All of it held.")


def _soak(folder: Path, minutes: float, cache_bytes: int) -> list[str]:
    statuses: Counter[int] = Counter()
    weights: list[float] = []
    calm: list[float] = []
    until = perf_counter() + minutes * 60
    served = gateway(
        folder / "workspace", max_turns=ROOM, cache_bytes=cache_bytes, plain_malloc=True
    )
    with served as (url, pid):
        while perf_counter() < until:
            burst = len(weights) % BURST == BURST - 1
            users = talking(url, ROOM * 10 if burst else SESSIONS, 2.0 if burst else SLICE)
            for user in users:
                statuses += user.statuses
                calm += [] if burst else user.seconds
            weights.append(resident_of(pid))
            _show(weights, statuses, minutes, done=until - perf_counter())
    print()
    answered = statuses[200]
    with stenolog.open_store(str(folder / "workspace"), read_only=True) as store:
        kept = sum(store.info(key).count for key in store.list_sessions())
    found = percentiles(calm)
    refused, unheard = statuses[429] + statuses[503], statuses[0]
    print(f"{answered:,} answers, {refused:,} refused, {unheard:,} connections closed unheard;")
    print(f"{kept:,} messages are kept.")
    print(f"A turn took {found['p50_us'] / 1e6:.2f} s (p50), {found['p99_us'] / 1e6:.2f} s (p99).")
    return _problems(statuses, weights, kept)


def _show(weights: list[float], statuses: Counter[int], minutes: float, *, done: float) -> None:
    low, high = min(weights), max(weights)
    scale = (high - low) or 1.0
    drawn = "".join(_BARS[int((one - low) / scale * (len(_BARS) - 1))] for one in weights[-60:])
    left = max(0.0, done) / 60
    words = f"{drawn} {weights[-1]:.0f} MB ({low:.0f} to {high:.0f}), {statuses[200]:,} answers"
    print(f"\r\033[K{words}, {left:.1f} of {minutes:g} min left", end="", flush=True)


def _problems(statuses: Counter[int], weights: list[float], kept: int) -> list[str]:
    problems = []
    refusals = (0, 429, 503)
    others = {one: count for one, count in statuses.items() if one not in (200, *refusals)}
    if others:
        problems.append(f"Answered with something else: {others}.")
    if kept < 2 * statuses[200]:
        problems.append(f"{2 * statuses[200] - kept} messages are missing.")
    # Until then the logs are filled that are kept in memory, each up to its limit.
    tenth, half = max(1, len(weights) // 10), len(weights) // 2
    early, late = median(weights[half : half + tenth] or weights), median(weights[-tenth:])
    print(f"Memory: {early:.0f} MB in the middle of the run, {late:.0f} MB in its last tenth.")
    if late > early + FLAT:
        problems.append(f"The memory is not flat: it grew by {late - early:.0f} MB.")
    return problems


if __name__ == "__main__":
    main()
