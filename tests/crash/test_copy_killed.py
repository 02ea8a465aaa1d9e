"""Tests copies that are killed between any two steps, or run while others write."""

import os
import random
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Final

import pytest

from stenolog import JSONLStore, Message, StoreUnavailable
from stenolog.maintenance.workspace_check import examine
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store
from stenolog.stores.snapshots import SnapshotMark
from stenolog.transfer.copy import copy_place, copy_snapshots
from support.copied_stores import digests, everything, fill
from support.crash.migration_worker import TESTS, Runner
from support.crash.recorder import Recorder
from support.crash.replay_model import Disk
from support.crash.reporting import Say

WHERE: Final = {"jsonl": "jsonl:{}/store", "sqlite": "sqlite:{}/store.db"}
PAIRS: Final = [*product(WHERE, repeat=2)]


Content = dict[str, tuple[str, str | None, str]]


def _digests(where: str) -> Content:
    with open_store(where) as store:
        return digests(store)


def _stored(where: str) -> Content:
    """Return what a killed copy left, without repairing anything."""
    try:
        with open_store(where, read_only=True) as store:
            return digests(store)
    except StoreUnavailable:
        return {}  # the copy was killed before it created the store


class _Trial:
    """Copies from one engine to an empty place of another."""

    def __init__(self, runner: Runner, place: Path, source: str, target: str) -> None:
        self._runner = runner
        self._source = WHERE[source].format(place / "source")
        self._target = WHERE[target].format(place / "target")
        self._folder = place / "target"
        self._folder.mkdir()
        with open_store(self._source) as store:
            fill(store)
        self._content = _digests(self._source)

    def run(self, *, kill_at: int = 0) -> int:
        return self._runner.run("copy", f"{self._source}|{self._target}", kill_at=kill_at)

    def reset(self) -> None:
        shutil.rmtree(self._folder)
        self._folder.mkdir()

    def check_whole_sessions(self, words: str) -> int:
        """Check that each session of the destination is whole; return the number of sessions."""
        stored = _stored(self._target)
        assert stored.items() <= self._content.items(), words
        return len(stored)

    def check(self, words: str) -> None:
        """Check that source and destination are equal."""
        assert _digests(self._target) == self._content, words
        with open_store(self._source) as source, open_store(self._target) as target:
            assert everything(target) == everything(source), words
        if self._target.startswith("jsonl"):
            assert examine(self._target).findings == (), words


def _kill(place: Path, pair: tuple[str, str], *, stride: int, seed: int) -> tuple[int, int]:
    """Kill a copy repeatedly; return its number of steps and of kills."""
    chance = random.Random(seed)
    with Runner("support.crash.copy_worker") as runner:
        trial = _Trial(runner, place, *pair)
        steps = trial.run()
        trial.check("undisturbed")
        runs, counts = 0, set[int]()
        for first in range(1 + chance.randrange(stride), steps + 1, stride):
            trial.reset()
            second = chance.randint(1, steps)
            assert trial.run(kill_at=first) == 0
            counts.add(trial.check_whole_sessions(f"killed at {first} of {steps}"))
            trial.run(kill_at=second)
            trial.check_whole_sessions(f"killed at {first} and {second} of {steps}")
            trial.run()
            trial.check(f"killed at {first} and {second} of {steps}")
            runs += 1
    assert stride > 1 or len(counts) > 2, "some kills left a part of the sessions"
    return steps, runs


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_p2_copy_repeated_after_kills_at_sampled_steps_equals_its_source(
    quick_disk: Path, say: Say, seed: int, pair: tuple[str, str]
) -> None:
    steps, runs = _kill(quick_disk, pair, stride=31, seed=seed)
    say(f"{'-'.join(pair)}: seed {seed}, {steps} steps, killed twice in {runs} runs")


@pytest.mark.full
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_p2_copy_repeated_after_kills_at_every_step_equals_its_source(
    quick_disk: Path, say: Say, seed: int, pair: tuple[str, str]
) -> None:
    steps, runs = _kill(quick_disk, pair, stride=1, seed=seed)
    say(f"{'-'.join(pair)}: seed {seed}, {steps} steps, killed twice in {runs} runs")


# --- power cuts ------------------------------------------------------------------------------


def _write_sessions(store: Store) -> None:
    """Create a live, an archived and two deleted sessions."""
    for text in ("one", "two"):
        store.add_message("a", "user", text)
        store.delete("a")
    for text in ("three", "four"):
        store.add_message("b", "user", text)
    store.truncate_history("b", 1)
    store.compact("b")
    store.add_message("c", "user", "five")


def _cut_power(place: Path, seed: int, *, limit: int) -> tuple[int, int]:
    """Check the disks that power cuts in a copy may leave; return the numbers of cuts and disks."""
    chance = random.Random(seed)
    with JSONLStore(place / "source") as source:
        _write_sessions(source)
        wanted = digests(source)
        (place / "target").mkdir(mode=0o700)
        recorder = Recorder(place / "target")
        with recorder.recording(), JSONLStore(place / "target") as target:
            assert copy_snapshots(source, target).problems == ()
        disk, cuts, disks = Disk(), 0, 0
        for number, event in enumerate(recorder.events):
            disk.apply(event)
            finished = number == len(recorder.events) - 1
            if number < recorder.before:
                continue
            cuts += 1
            for tree in {tree.digest(): tree for tree in disk.losses(chance, limit=limit)}.values():
                disks += 1
                tree.build(place / "left")
                with JSONLStore(place / "left") as left:
                    stored = digests(left)
                    assert stored.items() <= wanted.items(), f"after event {number}"
                    assert stored == wanted or not finished, "the copy is durable"
                    assert copy_snapshots(source, left).problems == (), f"after event {number}"
                    assert digests(left) == wanted, f"after event {number}"
                shutil.rmtree(place / "left")
    return cuts, disks


def test_p1_p2_power_cut_during_a_copy_leaves_whole_sessions(
    quick_disk: Path, say: Say, seed: int
) -> None:
    cuts, disks = _cut_power(quick_disk, seed, limit=4)
    say(f"seed {seed}, {cuts} power cuts during a copy, {disks} disks judged")


@pytest.mark.full
def test_p1_p2_power_cut_at_any_event_of_a_copy_leaves_whole_sessions(
    quick_disk: Path, say: Say, seed: int
) -> None:
    cuts, disks = _cut_power(quick_disk, seed, limit=40)
    say(f"seed {seed}, {cuts} power cuts during a copy, {disks} disks judged")


# --- concurrent writers ----------------------------------------------------------------------


@contextmanager
def _writers(where: str, count: int) -> Iterator[None]:
    """Run processes that write until the block ends."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "support.crash.copy_worker", where, f"w{number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        for number in range(count)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"writing\n"
        yield
    finally:
        for process in processes:
            process.communicate()
    assert [process.returncode for process in processes] == [0] * count


def _check_prefixes(source: str, target: str) -> int:
    """Check that each copied session is a prefix of its source; return the number of messages."""
    found = 0
    with open_store(source) as here, open_store(target) as there:
        for mark in there.admin.list_snapshots():
            messages = _messages(there, mark)
            assert [m.seq for m in messages] == list(range(1, len(messages) + 1))
            numbers = defaultdict(list)
            for message in messages:
                numbers[message.by].append(message.n)
            assert all(said == sorted(set(said)) for said in numbers.values())
            # It may be deleted and restored all the time; the uid identifies it.
            now = _messages(here, mark)
            assert [m.to_json() for m in messages] == [m.to_json() for m in now][: len(messages)]
            found += len(messages)
    return found


def _messages(store: Store, mark: SnapshotMark) -> list[Message]:
    with store.admin.read_snapshot(mark) as reading:
        return list(reading.messages)


def _copy_beside_writers(
    place: Path, pair: tuple[str, str], *, writers: int, rounds: int
) -> tuple[int, int]:
    source = WHERE[pair[0]].format(place / "source")
    targets = [WHERE[pair[1]].format(place / f"target-{number}") for number in range(rounds + 1)]
    open_store(source).close()
    with _writers(source, writers):
        messages = 0
        for target in targets[1:]:
            copied = copy_place(source, target)
            # Another session had the key of a session that was restored during the copy.
            reasons = [one.reason for found in copied.namespaces.values() for one in found.problems]
            assert [reason for reason in reasons if "there is such a session" not in reason] == []
            messages = _check_prefixes(source, target)
    copied = copy_place(source, targets[0])
    assert copied.problems == 0
    assert _digests(targets[0]) == _digests(source)
    return messages, copied.sessions


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_p7_copy_during_writes_is_consistent_and_finally_equal(
    quick_disk: Path, say: Say, pair: tuple[str, str]
) -> None:
    messages, sessions = _copy_beside_writers(quick_disk, pair, writers=2, rounds=3)
    assert messages > 0
    say(f"{'-'.join(pair)}: {messages:,} messages beside writers, {sessions} sessions")


@pytest.mark.full
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_p7_many_copies_during_writes_are_consistent_and_finally_equal(
    quick_disk: Path, say: Say, pair: tuple[str, str]
) -> None:
    messages, sessions = _copy_beside_writers(quick_disk, pair, writers=6, rounds=30)
    say(f"{'-'.join(pair)}: {messages:,} messages beside writers, {sessions} sessions")
