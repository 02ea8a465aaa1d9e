"""How things are measured: by turns, so that all see the same machine, and as percentiles."""

import gc
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

Side = dict[str, float]
"""One thing's own numbers: `p50_us`, `p99_us` …, `per_second`, `mb`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a row may work, and how long."""

    folder: Path
    """Empty at the start of the run; rows of one run share it, one after the other."""
    quick: bool

    def times(self, full: int) -> int:
        """How often to do a thing that a full run does so many times."""
        return max(full // 4, 1) if self.quick else full

    def seconds(self, full: float) -> float:
        """How long to do it."""
        return full / 3 if self.quick else full


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What one repetition of a row found."""

    measured: float
    """The number that the target speaks of."""
    ours: Side
    raw: Side
    """The limit, or what the row compares with, taken in the same run."""
    others: dict[str, float] = field(default_factory=dict)
    """Further numbers by name, for the reader of the JSON."""


class NotRun(Exception):
    """The row cannot be measured here; the text says why."""


def run_process(command: Sequence[str]) -> None:
    """Start a process and wait for its end; call it once before it is timed.

    An installed package has its bytecode beside it: the first call writes it.
    """
    environment = {**os.environ}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)


def percentiles(seconds: Sequence[float]) -> Side:
    """A list of times as p50, p90, p99 and the worst, in microseconds."""
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e6, 2)

    return {
        "p50_us": at(0.5),
        "p90_us": at(0.9),
        "p99_us": at(0.99),
        "max_us": at(1.0),
        "n": len(ordered),
    }


def in_turn(rounds: int, *blocks: Callable[[], list[float]]) -> list[list[float]]:
    """Run the blocks by turns, each second round backwards; the times of each.

    What else the machine does, and what one block leaves behind for the next, then hits all alike.
    """
    found: list[list[float]] = [[] for _ in blocks]
    order = list(enumerate(blocks))
    for turn in range(rounds):
        for index, block in order if turn % 2 == 0 else reversed(order):
            gc.collect()
            found[index] += block()
    return found


def timed(times: int, action: Callable[[], Any]) -> list[float]:
    """How long each of so many calls took."""
    found = []
    for _ in range(times):
        start = perf_counter()
        action()
        found.append(perf_counter() - start)
    return found


@dataclass(slots=True)
class Rate:
    """What several writers did, added up over all their turns."""

    calls: int = 0
    seconds: float = 0.0
    each: list[float] = field(default_factory=list)

    def add(self, seconds: float, each: list[float]) -> None:
        """Count one turn."""
        self.calls += len(each)
        self.seconds += seconds
        self.each += each

    @property
    def per_second(self) -> float:
        """Calls per second of all writers together."""
        return self.calls / self.seconds

    def side(self) -> Side:
        """The rate, with the times of the single calls."""
        return {"per_second": round(self.per_second, 1), **percentiles(self.each)}


def in_threads(actions: Sequence[Callable[[], Any]], seconds: float, rate: Rate) -> None:
    """Each action over and over in a thread of its own, all at once, for so long."""
    stop = False
    each: list[list[float]] = [[] for _ in actions]
    gate = threading.Barrier(len(actions) + 1)

    def work(action: Callable[[], Any], found: list[float]) -> None:
        gate.wait()
        while not stop:
            start = perf_counter()
            action()
            found.append(perf_counter() - start)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(actions, each, strict=True)]
    for thread in threads:
        thread.start()
    gate.wait()
    start = perf_counter()
    threading.Event().wait(seconds)
    stop = True
    for thread in threads:
        thread.join()
    rate.add(perf_counter() - start, [took for found in each for took in found])
