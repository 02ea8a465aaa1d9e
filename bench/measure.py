"""Functions that measure durations and rates. Compared blocks of calls run alternately."""

import gc
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

Stats = dict[str, float]
"""Numbers by name, of one side of a comparison: `p50_us`, `p99_us` …, `per_second`, `mb`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Folder and length of a run."""

    folder: Path
    """Folder that is empty when the run starts. The rows of a run use it one after the other."""
    quick: bool

    def times(self, full: int) -> int:
        """Return how often to repeat an action that a full run does `full` times."""
        return max(full // 4, 1) if self.quick else full

    def seconds(self, full: float) -> float:
        """Return how long to repeat an action that a full run repeats for `full` seconds."""
        return full / 3 if self.quick else full


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Result of one repetition of a row."""

    measured: float
    """Number that is compared with the target."""
    ours: Stats
    raw: Stats
    """Numbers of the comparison, measured in the same run."""
    others: dict[str, float] = field(default_factory=dict)
    """More numbers by name, for readers of the JSON."""


class NotRun(Exception):
    """A row that cannot be measured on this machine; the text gives the reason."""


def run_process(command: Sequence[str]) -> None:
    """Start a process and wait for its end.

    Call this function once before you measure it: the first call writes the bytecode, which an
    installed package already has.
    """
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment())


def environment() -> dict[str, str]:
    """Return the environment for a measured process, which may write bytecode."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def percentiles(seconds: Sequence[float]) -> Stats:
    """Return the p50, p90, p99 and maximum of durations, in microseconds."""
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


def alternate(rounds: int, *blocks: Callable[[], list[float]]) -> list[list[float]]:
    """Run the blocks alternately, and return the durations of each block.

    Every second round runs in reverse order. So other load of the machine, and effects of one block
    on the next block, affect all blocks equally.
    """
    durations: list[list[float]] = [[] for _ in blocks]
    order = list(enumerate(blocks))
    for turn in range(rounds):
        for index, block in order if turn % 2 == 0 else reversed(order):
            gc.collect()
            durations[index] += block()
    return durations


def time_calls(times: int, action: Callable[[], Any]) -> list[float]:
    """Call an action `times` times and return the duration of each call."""
    durations = []
    for _ in range(times):
        start = perf_counter()
        action()
        durations.append(perf_counter() - start)
    return durations


@dataclass(slots=True)
class Rate:
    """Calls of several writers, summed over all rounds."""

    calls: int = 0
    seconds: float = 0.0
    durations: list[float] = field(default_factory=list)

    def add(self, seconds: float, durations: list[float]) -> None:
        """Add one round."""
        self.calls += len(durations)
        self.seconds += seconds
        self.durations += durations

    @property
    def per_second(self) -> float:
        """Calls per second of all writers together."""
        return self.calls / self.seconds

    def stats(self) -> Stats:
        """Return the rate and the percentiles of single calls."""
        return {"per_second": round(self.per_second, 1), **percentiles(self.durations)}


def run_threads(actions: Sequence[Callable[[], Any]], seconds: float, rate: Rate) -> None:
    """Repeat each action in its own thread, all at once, for `seconds`."""
    stop = False
    durations: list[list[float]] = [[] for _ in actions]
    gate = threading.Barrier(len(actions) + 1)

    def work(action: Callable[[], Any], durations: list[float]) -> None:
        gate.wait()
        while not stop:
            start = perf_counter()
            action()
            durations.append(perf_counter() - start)

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(actions, durations, strict=True)
    ]
    for thread in threads:
        thread.start()
    gate.wait()
    start = perf_counter()
    threading.Event().wait(seconds)
    stop = True
    for thread in threads:
        thread.join()
    rate.add(perf_counter() - start, [took for own in durations for took in own])
