"""Kills a process in each operation in turn, and checks the store after each kill."""

import random
import statistics
import time
from collections import Counter, defaultdict
from pathlib import Path

from support.crash.child_processes import Child, Nursery
from support.crash.crash_checks import Judge, Outcome, acknowledged, outcomes
from support.crash.reporting import Say
from support.crash.workload import OPERATIONS, Line

_ROUNDS_PER_STORE = 6
"""How often a process is killed on one store before a new, empty store is used."""


def kill_each_operation(place: Path, say: Say, *, hits: int, seed: int) -> None:
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
    # Not always the first of its kind: later ones find a longer log.
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
