"""kill -9, aimed at every operation in turn.

The child names what it begins, the parent kills it at a random moment within. The store is used
on, store after store, and judged after each.
"""

import random
import statistics
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from crash.conftest import Say
from crash.judge import Judge, Outcome, acknowledged, outcomes
from crash.nursery import Child, Nursery
from crash.workload import OPERATIONS, Line

_ROUNDS_PER_STORE = 6
"""How often a store is killed before the next one begins empty."""


def test_p1_p2_every_operation_killed_within_it(tmp_path: Path, say: Say, seed: int) -> None:
    kill_each(tmp_path, say, hits=1, seed=seed)


@pytest.mark.full
def test_p1_p2_every_operation_killed_within_it_fifteen_times(
    tmp_path: Path, say: Say, seed: int
) -> None:
    kill_each(tmp_path, say, hits=15, seed=seed)


def kill_each(place: Path, say: Say, *, hits: int, seed: int) -> None:
    say(f"kill -9: seed {seed}")
    moments = random.Random(seed)
    hit: Counter[str] = Counter()
    rounds = total = kills = 0
    history: list[Outcome] = []
    with Nursery() as nursery:
        usual = _durations(nursery, place / "measured")
        while wanting := [op for op in OPERATIONS if hit[op] < hits]:
            assert rounds < 60 * hits * len(OPERATIONS), f"never hit: {wanting}"
            target = wanting[rounds % len(wanting)]
            if kills == _ROUNDS_PER_STORE:
                history, kills = [], 0
            where = place / f"store{(rounds - kills)}"
            child = nursery.child("run", where=where, first=rounds * 1_000, passes=None)
            child.go()
            _kill_within(child, target, usual[target], moments)
            child.finish()
            lines = child.lines()
            struck = _struck(lines)
            said = outcomes(lines)
            judge = Judge(history + said)
            history = judge.judge(where, probe=rounds, thorough=kills == _ROUNDS_PER_STORE - 1)
            acked = sum(acknowledged(said).values())
            hit[struck] += 1
            rounds, kills, total = rounds + 1, kills + 1, total + acked
            say(f"round {rounds}: aimed at {target}, hit {struck}, {acked} acknowledged")
    say(f"{rounds} rounds, {total} acknowledged messages checked, hit: {dict(hit.most_common())}")


def _durations(nursery: Nursery, where: Path) -> dict[str, float]:
    child = nursery.child("run", where=where, passes=3)
    child.go()
    child.finish()
    taken: defaultdict[str, list[float]] = defaultdict(list)
    steps = {line.number: line.step for line in child.lines() if line.step is not None}
    for line in child.lines():
        if line.word == "ACK" and line.number in steps:
            taken[steps[line.number].op].append(line.result[1] / 1e9)
    return {op: statistics.median(times) for op, times in taken.items()}


def _kill_within(child: Child, target: str, usual: float, moments: random.Random) -> None:
    # Not always the first one of its kind: later ones meet a longer log.
    name = b'"op": "%s"' % target.encode()
    nth = moments.randint(1, 3)
    child.until(lambda said: said.count(name) >= nth)
    moment = time.perf_counter() + moments.random() * usual
    while time.perf_counter() < moment:
        pass
    child.kill()


def _struck(lines: list[Line]) -> str:
    last = lines[-1]
    return last.step.op if last.word == "BEGIN" and last.step is not None else "between two"
