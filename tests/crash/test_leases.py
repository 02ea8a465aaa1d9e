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
from itertools import count, groupby
from pathlib import Path
from typing import IO, Final, NamedTuple

import pytest

import stenolog
from crash import lease_worker
from crash.conftest import Say
from stenolog.stores.base import Store
from stenolog.stores.sqlite import processes

SESSIONS: Final = 50
WORKERS: Final = 8
TTL: Final = 0.25
SLACK: Final = 3.0
"""Seconds past its ttl until a lease that is not given is taken for stuck."""
PATIENCE: Final = 120.0
"""Seconds until a process that does not begin is given up."""
HOLD_TTL: Final = 0.2
LONG: Final = 3600.0
"""A ttl that no test sees the end of."""
MOST_MORE_BLOWS: Final = 400

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
            for blow in count(1):
                time.sleep(chance.random() * 0.1)
                # A lease of the JSONL store is its process's: stalled, it keeps it.
                if engine == "sqlite" and chance.random() < 0.4:
                    workers.stall(chance)
                else:
                    workers.kill(chance)
                # Blows that hit nobody in a turn prove nothing.
                if blow >= blows and _found(store, keys, workers).proves(engine):
                    break
                assert blow < blows + MOST_MORE_BLOWS, f"no holder was hit: {workers.said()}"
        found = _found(store, keys, workers)
        for key in keys:
            store.lease(key, ttl=TTL, wait=TTL + SLACK).release()
    workers.check_ends()
    said = workers.said()
    say(
        f"{engine} leases: seed {seed}, {workers.killed} killed, {found.hit} of them in a turn, "
        f"{found.taken_over} such turns followed by another's, {workers.stalled} stalled, "
        f"{found.refused} refused when they went on, {found.turns} turns begun, {said['done']} "
        f"ended, {said['lost']} lost to others"
    )
    assert found.proves(engine)
    assert found.turns >= said["done"] > 0


class _Found(NamedTuple):
    """What the sessions and the workers tell of all the turns."""

    turns: int
    hit: int
    """Turns whose holder was killed in the middle."""
    taken_over: int
    """Those of them after which somebody else had the turn."""
    refused: int
    """How often somebody who had been stalled was refused."""

    def proves(self, engine: str) -> bool:
        """Whether what is claimed has happened at all."""
        return self.taken_over > 0 and (engine != "sqlite" or self.refused > 0)


def _found(store: Store, keys: list[str], workers: "_Workers") -> _Found:
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
    return _Found(turns, hit, taken_over, refused)


def _runs(store: Store, key: str) -> list[tuple[str, list[str]]]:
    """The turns of a session, and what was written in each.

    Each is one run, begun once, and ended at most once.
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


class _Workers:
    """Processes that are killed, stalled and replaced; all of them are gone at the end."""

    def __init__(self, where: str, place: Path) -> None:
        self._where = where
        self._place = place
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._outputs: list[Path] = []
        self.killed = self.stalled = 0
        self.were_killed: set[str] = set()
        """Names of those that were killed while others went on."""
        self.were_stalled: set[str] = set()

    def __enter__(self) -> "_Workers":
        for _ in range(WORKERS):
            self._start()
        self._until_all_work()
        return self

    def __exit__(self, *error: object) -> None:
        # Wherever they are: in a turn, at the gate, in a transaction.
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
        """Kill one with -9, wherever it is, and begin another."""
        name, process = self._running.pop(chance.randrange(WORKERS))
        process.kill()
        process.wait()
        self.killed += 1
        self.were_killed.add(name)
        self._start()

    def stall(self, chance: random.Random) -> None:
        """Stop one for longer than its lease lasts, then let it go on."""
        name, process = chance.choice(self._running)
        self.were_stalled.add(name)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(TTL * (1.2 + chance.random()))
        os.kill(process.pid, signal.SIGCONT)
        self.stalled += 1

    def check_ends(self) -> None:
        """None of them met an error that it did not expect."""
        for _, process in self._running:
            assert process.returncode == -signal.SIGKILL, "a worker ended by itself"

    def said(self) -> Counter[str]:
        """What became of their turns."""
        return Counter(word for _, (word, _, _, _) in self._lines())

    def lost(self) -> set[str]:
        """The names of the turns whose holder was refused."""
        lines = self._lines()
        return {f"{name}.{number}" for name, (word, _, number, _) in lines if word == "lost"}

    def _lines(self) -> Iterator[tuple[str, tuple[str, str, int, int]]]:
        for output in self._outputs:
            for line in _whole_lines(output):
                yield output.name, json.loads(line)


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
        with _holding(where, "a", HOLD_TTL) as holder:
            os.kill(holder.pid, signal.SIGSTOP)
            with store.lease("a", ttl=60, wait=HOLD_TTL + SLACK) as lease:
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
        with _holding(where, "a", HOLD_TTL) as holder:
            with pytest.raises(stenolog.StoreBusy, match=str(holder.pid)):
                store.lease("a", ttl=60, wait=0)
            holder.kill()
            with store.lease("a", ttl=60, wait=HOLD_TTL + SLACK) as lease:
                assert lease.store.add_message("a", "user", "2") == 2


@pytest.mark.parametrize("heard", [True, False], ids=["waited for", "not waited for"])
def test_p7_the_turn_of_a_killed_holder_is_free_long_before_its_time(
    tmp_path: Path, engine: str, heard: bool
) -> None:
    if engine == "sqlite" and processes.current() is None:
        pytest.skip("NOT RUN: nothing can be told of processes here")
    where = ENGINES[engine](tmp_path)
    with stenolog.open_store(where) as store:
        store.add_message("a", "user", "1")
        with _holding(where, "a", LONG) as holder:
            holder.kill()
            if heard:
                holder.wait()
            with store.lease("a", ttl=60, wait=SLACK) as lease:
                assert lease.store.add_message("a", "user", "2") == 2


@pytest.mark.parametrize("stalled", [True, False], ids=["stalled", "at work"])
def test_p8_a_holder_that_lives_keeps_the_turn_until_its_time_is_over(
    tmp_path: Path, engine: str, stalled: bool
) -> None:
    where = ENGINES[engine](tmp_path)
    with stenolog.open_store(where) as store:
        store.add_message("a", "user", "1")
        with _holding(where, "a", LONG) as holder:
            if stalled:
                os.kill(holder.pid, signal.SIGSTOP)
            with pytest.raises(stenolog.StoreBusy, match=str(holder.pid)):
                store.lease("a", ttl=60, wait=0.2)
            os.kill(holder.pid, signal.SIGCONT)
            said, _ = holder.communicate("write\n")
            assert json.loads(said)[0] == "stored"
