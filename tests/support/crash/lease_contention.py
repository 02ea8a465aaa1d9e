"""Processes that contend for leases while they are killed and paused, and checks of their turns."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from typing import IO, Final, NamedTuple

from stenolog.stores.base import Store
from support.crash import lease_worker

SESSIONS: Final = 50
WORKERS: Final = 8
TTL: Final = 0.25
SLACK: Final = 3.0
"""Seconds after its ttl until a lease that cannot be acquired counts as stuck."""
PATIENCE: Final = 120.0
"""Seconds until a process that does not start counts as failed."""
HOLD_TTL: Final = 0.2
LONG: Final = 3600.0
"""A ttl that never expires during a test."""
MOST_MORE_BLOWS: Final = 400


class Contention(NamedTuple):
    """Numbers about all turns, from the sessions and the workers."""

    turns: int
    hit: int
    """Turns whose holder was killed in the middle."""
    taken_over: int
    """Those of them after which another process had the turn."""
    refused: int
    """How often a paused process was rejected."""

    def proves(self, engine: str) -> bool:
        """Return whether the tested situations occurred at all."""
        return self.taken_over > 0 and (engine == "jsonl" or self.refused > 0)


def contention(store: Store, keys: list[str], workers: "LeaseWorkers") -> Contention:
    lost = workers.lost()
    turns = hit = taken_over = 0
    for key in keys:
        runs = _runs(store, key)
        turns += len(runs)
        for index, (name, steps) in enumerate(runs):
            worker = name.partition(".")[0]
            if steps[-1] != "end" and name not in lost and worker in workers.were_killed:
                hit += 1
                taken_over += index + 1 < len(runs)
    refused = sum(name.partition(".")[0] in workers.were_stalled for name in lost)
    return Contention(turns, hit, taken_over, refused)


def _runs(store: Store, key: str) -> list[tuple[str, list[str]]]:
    """Return the turns of a session and the steps written in each.

    Checks that each turn is one uninterrupted run with one start and at most one end.
    """
    texts = [str(message.content).split(" ") for message in store.get_history(key)]
    runs = [(name, [step for _, step in steps]) for name, steps in groupby(texts, lambda t: t[0])]
    names = [name for name, _ in runs]
    assert len(names) == len(set(names)), f"{key}: turns overlap: {names}"
    for name, steps in runs:
        written = steps[:-1] if steps[-1] == "end" else steps
        whole = ["begin", *map(str, range(len(steps)))]
        assert written == whole[: len(written)], f"{key}: {name} has {steps}"
    return runs[1:]


class LeaseWorkers:
    """Worker processes that are killed, paused and replaced; all end with the block."""

    def __init__(self, where: str, place: Path) -> None:
        self._where = where
        self._place = place
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._outputs: list[Path] = []
        self.killed = self.stalled = 0
        self.were_killed: set[str] = set()
        """Names of the workers that were killed while others continued."""
        self.were_stalled: set[str] = set()

    def __enter__(self) -> "LeaseWorkers":
        for _ in range(WORKERS):
            self._start()
        self._until_all_work()
        return self

    def __exit__(self, *error: object) -> None:
        # In a turn, waiting for a lease, or in a transaction.
        for _, process in self._running:
            process.kill()
            process.wait()

    def _start(self) -> None:
        output = self._place / f"worker{len(self._outputs)}"
        self._outputs.append(output)
        arguments = ["work", self._where, output.name, str(SESSIONS), str(TTL)]
        with output.open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, lease_worker.__file__, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=said,
            )
        self._running.append((output.name, process))

    def _until_all_work(self) -> None:
        limit = time.monotonic() + PATIENCE
        while not all(output.stat().st_size for output in self._outputs):
            assert time.monotonic() < limit, "a worker does nothing"
            time.sleep(0.005)

    def kill(self, chance: random.Random) -> None:
        """Kill one worker with SIGKILL at any point, and start another."""
        name, process = self._running.pop(chance.randrange(WORKERS))
        process.kill()
        process.wait()
        self.killed += 1
        self.were_killed.add(name)
        self._start()

    def stall(self, chance: random.Random) -> None:
        """Pause one worker for longer than its lease, then continue it."""
        name, process = chance.choice(self._running)
        self.were_stalled.add(name)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(TTL * (1.2 + chance.random()))
        os.kill(process.pid, signal.SIGCONT)
        self.stalled += 1

    def check_ends(self) -> None:
        """Check that no worker ended with an unexpected error."""
        for _, process in self._running:
            assert process.returncode == -signal.SIGKILL, "a worker ended by itself"

    def said(self) -> Counter[str]:
        """Count the outcomes of all turns."""
        return Counter(word for _, (word, _, _, _) in self._lines())

    def lost(self) -> set[str]:
        """Return the names of the turns whose holder was rejected."""
        lines = self._lines()
        return {f"{name}.{number}" for name, (word, _, number, _) in lines if word == "lost"}

    def _lines(self) -> Iterator[tuple[str, tuple[str, str, int, int]]]:
        for output in self._outputs:
            for line in _whole_lines(output):
                yield output.name, json.loads(line)


def _whole_lines(output: Path) -> list[bytes]:
    return output.read_bytes().split(b"\n")[:-1]


@contextmanager
def lease_holder(where: str, key: str, ttl: float) -> Iterator[subprocess.Popen[str]]:
    """Run a process that holds the lease, and writes on request."""
    with (
        subprocess.Popen(
            [sys.executable, lease_worker.__file__, "hold", where, key, str(ttl)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as holder,
        ExitStack() as stack,
    ):
        stack.callback(holder.kill)
        assert _next(holder.stdout)[0] == "held"
        yield holder


def _next(output: IO[str] | None) -> list[object]:
    assert output is not None
    found: list[object] = json.loads(output.readline())
    return found
