"""Processes that contend for the turn in many sessions while they are killed and stalled.

Never are two of them at once in a turn: what they write through their leases never interleaves.
And nothing is stuck when all of them are gone.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from typing import IO, Final

import pytest

import stenolog
from crash import lease_worker
from crash.conftest import Say
from stenolog.stores.base import Store

SESSIONS: Final = 50
WORKERS: Final = 8
TTL: Final = 0.25
PATIENCE: Final = 30.0
"""Seconds until a lease that is not given is taken for stuck."""

Where = Callable[[Path], str]
ENGINES: Final[dict[str, Where]] = {
    "sqlite": lambda path: f"sqlite:{path}/sessions.db",
    "jsonl": str,
}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_p7_eight_processes_contend_for_fifty_leases(
    tmp_path: Path, say: Say, seed: int, engine: str
) -> None:
    _contend(tmp_path, say, seed, engine, blows=16)


@pytest.mark.full
def test_p7_eight_processes_contend_for_fifty_leases_for_longer(
    tmp_path: Path, say: Say, seed: int, engine: str
) -> None:
    _contend(tmp_path, say, seed, engine, blows=300)


def _contend(place: Path, say: Say, seed: int, engine: str, *, blows: int) -> None:
    where = ENGINES[engine](place / "store")
    (place / "store").mkdir(mode=0o700)
    chance = random.Random(seed)
    keys = [f"session {number}" for number in range(SESSIONS)]
    with stenolog.open_store(where) as store:
        for key in keys:
            store.add_message(key, "user", "before begin")
        with _Workers(where, place) as workers:
            for _ in range(blows):
                time.sleep(chance.random() * 0.1)
                # A lease of the JSONL store is its process's: stalled, it keeps it.
                if engine == "sqlite" and chance.random() < 0.4:
                    workers.stall(chance)
                else:
                    workers.kill(chance)
        said = workers.said()
        turns = sum(_check_turns(store, key) for key in keys)
        for key in keys:
            store.lease(key, ttl=TTL, wait=PATIENCE).release()
    say(
        f"{engine} leases: seed {seed}, {workers.killed} killed, {workers.stalled} stalled, "
        f"{turns} turns begun, {said['done']} ended, {said['lost']} lost to others"
    )
    assert turns >= said["done"] > 0


def _check_turns(store: Store, key: str) -> int:
    """How many turns the session has seen; each is one run, begun once, and ended at most once."""
    texts = [str(message.content).split(" ") for message in store.get_history(key)]
    runs = [(name, [step for _, step in steps]) for name, steps in groupby(texts, lambda t: t[0])]
    names = [name for name, _ in runs]
    assert len(names) == len(set(names)), f"{key}: turns overlap: {names}"
    for name, steps in runs:
        written = steps[:-1] if steps[-1] == "end" else steps
        whole = ["begin", *map(str, range(len(steps)))]
        assert written == whole[: len(written)], f"{key}: {name} has {steps}"
    return len(runs) - 1


class _Workers:
    """Processes that are killed, stalled and replaced; all of them are gone at the end."""

    def __init__(self, where: str, place: Path) -> None:
        self._where = where
        self._place = place
        self._running: list[subprocess.Popen[bytes]] = []
        self._outputs: list[Path] = []
        self.killed = self.stalled = 0

    def __enter__(self) -> "_Workers":
        for _ in range(WORKERS):
            self._start()
        self._until_all_work()
        return self

    def __exit__(self, *error: object) -> None:
        # Wherever they are: in a turn, at the gate, in a transaction.
        for process in self._running:
            process.kill()
            process.wait()

    def _start(self) -> None:
        output = self._place / f"worker{len(self._outputs)}"
        self._outputs.append(output)
        arguments = ["work", self._where, output.name, str(SESSIONS), str(TTL)]
        with output.open("wb") as said:
            self._running.append(
                subprocess.Popen(
                    [sys.executable, lease_worker.__file__, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                )
            )

    def _until_all_work(self) -> None:
        limit = time.monotonic() + PATIENCE
        while not all(output.stat().st_size for output in self._outputs):
            assert time.monotonic() < limit, "a worker does nothing"
            time.sleep(0.005)

    def kill(self, chance: random.Random) -> None:
        """Kill one with -9, wherever it is, and begin another."""
        process = self._running.pop(chance.randrange(WORKERS))
        process.kill()
        process.wait()
        self.killed += 1
        self._start()

    def stall(self, chance: random.Random) -> None:
        """Stop one for longer than its lease lasts, then let it go on."""
        process = chance.choice(self._running)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(TTL * (1.2 + chance.random()))
        os.kill(process.pid, signal.SIGCONT)
        self.stalled += 1

    def said(self) -> Counter[str]:
        """What became of their turns; none of them met an error that it did not expect."""
        for process in self._running:
            assert process.returncode == -signal.SIGKILL, "a worker ended by itself"
        lines = [line for output in self._outputs for line in _whole_lines(output)]
        return Counter(json.loads(line)[0] for line in lines)


def _whole_lines(output: Path) -> list[bytes]:
    return output.read_bytes().split(b"\n")[:-1]


# --- one holder that stalls ------------------------------------------------------------------


@contextmanager
def _holding(where: str, key: str, ttl: float) -> Iterator[subprocess.Popen[str]]:
    """A process that has the turn, and writes when it is told to."""
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


def test_p8_a_holder_that_stalled_wakes_and_has_lost_the_turn(tmp_path: Path) -> None:
    where = ENGINES["sqlite"](tmp_path)
    with stenolog.open_store(where) as store:
        store.add_message("a", "user", "1")
        with _holding(where, "a", 0.2) as holder:
            os.kill(holder.pid, signal.SIGSTOP)
            with store.lease("a", ttl=60, wait=PATIENCE) as lease:
                lease.store.add_message("a", "user", "2")
                os.kill(holder.pid, signal.SIGCONT)
                said, _ = holder.communicate("write\n")
                word, _, _, epoch = json.loads(said)
                assert (word, epoch < lease.epoch) == ("lost", True)
                lease.store.add_message("a", "user", "3")
        assert [message.content for message in store.get_history("a")] == ["1", "2", "3"]


def test_p7_the_turn_of_a_killed_holder_is_free(tmp_path: Path, engine: str) -> None:
    where = ENGINES[engine](tmp_path)
    with stenolog.open_store(where) as store:
        store.add_message("a", "user", "1")
        with _holding(where, "a", 0.2) as holder:
            with pytest.raises(stenolog.StoreBusy, match=str(holder.pid)):
                store.lease("a", ttl=60, wait=0)
            holder.kill()
            with store.lease("a", ttl=60, wait=PATIENCE) as lease:
                assert lease.store.add_message("a", "user", "2") == 2
