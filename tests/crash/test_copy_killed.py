"""Tests copies that are killed between any two steps, or run while others write."""

import os
import random
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Final

import pytest

from stenolog import JSONLStore, Message
from stenolog.maintenance.log_damage import Kind
from stenolog.maintenance.workspace_check import examine
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store
from stenolog.stores.snapshots import SnapshotMark
from stenolog.transfer.copy import copy_snapshots
from stenolog.transfer.copy_all import copy_place
from support.copied_stores import digests, everything, fill, go_on, whole
from support.crash.migration_worker import TESTS, Runner
from support.crash.recorder import Recorder
from support.crash.replay_model import Disk
from support.crash.reporting import Say

WHERE: Final = {"jsonl": "jsonl:{}/store", "sqlite": "sqlite:{}/store.db"}
PAIRS: Final = [*product(WHERE, repeat=2)]


def _digests(where: str) -> dict[str, tuple[str, str | None, str]]:
    with open_store(where) as store:
        return digests(store)


Doing = Callable[[Store], None]


def _write_two_sessions(store: Store) -> None:
    for text in ("one", "two"):
        store.add_message("a", "user", text)
        store.delete("a")
    store.add_message("b", "user", "three")
    store.add_message("c", "user", "four")


def _move_sessions(store: Store) -> None:
    store.restore("a", as_key="d")
    store.restore("a")
    store.delete("b")
    store.delete("c")
    store.restore("c", as_key="e")
    for key in ("d", "a", "e"):
        store.add_message(key, "user", "after it moved")


class _Trial:
    """Copies from one engine to another: a first one, and one after the source changed."""

    def __init__(
        self, runner: Runner, place: Path, source: str, target: str, begin: Doing = fill
    ) -> None:
        self._runner = runner
        self._place = place
        self._source = WHERE[source].format(place / "source")
        self._target = WHERE[target].format(place / "target")
        self.folder = place / "target"
        with open_store(self._source) as store:
            begin(store)

    def prepare(self, *, again: bool) -> None:
        """Prepare the source in its first state, or after a first copy."""
        self.folder.mkdir()
        if again:
            self.run()
        shutil.copytree(self.folder, self._place / "before")

    def go_on(self, doing: Doing = go_on) -> None:
        with open_store(self._source) as store:
            doing(store)

    def run(self, *, kill_at: int = 0) -> int:
        return self._runner.run("copy", f"{self._source}|{self._target}", kill_at=kill_at)

    def watch(self) -> list[int]:
        """Return the steps before which the destination had changed."""
        return self._runner.watch("copy", f"{self._source}|{self._target}", self.folder)

    def uids(self) -> set[str]:
        """Return the uids in the destination, including the trash, without repairing anything."""
        with open_store(self._target, read_only=True) as store:
            return {mark.uid for mark in whole(store).list_snapshots()}

    def reset(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self._place / "before", self.folder)

    def check(self, words: str) -> None:
        """Check that source and destination are equal."""
        assert _digests(self._target) == _digests(self._source), words
        with open_store(self._source) as source, open_store(self._target) as target:
            assert everything(target) == everything(source), words
        if self._target.startswith("jsonl"):
            # Leftovers of a killed restore are harmless.
            found = [one for one in examine(self._target).findings if one.kind is not Kind.LEFTOVER]
            assert found == [], words


def _kill(
    place: Path, pair: tuple[str, str], *, again: bool, stride: int, seed: int
) -> tuple[int, int]:
    """Kill a copy repeatedly; return its number of steps and of kills."""
    chance = random.Random(seed)
    source, target = pair
    with Runner("support.crash.copy_worker") as runner:
        trial = _Trial(runner, place, source, target)
        trial.prepare(again=again)
        if again:
            trial.go_on()
        steps = trial.run()
        trial.check("undisturbed")
        runs = 0
        for first in range(1 + chance.randrange(stride), steps + 1, stride):
            trial.reset()
            second = chance.randint(1, steps)
            assert trial.run(kill_at=first) == 0
            trial.run(kill_at=second)
            trial.run()
            trial.check(f"killed at {first} and {second} of {steps}")
            runs += 1
    return steps, runs


@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_p2_copy_repeated_after_kills_at_sampled_steps_equals_its_source(
    quick_disk: Path, say: Say, seed: int, pair: tuple[str, str], again: bool
) -> None:
    steps, runs = _kill(quick_disk, pair, again=again, stride=67, seed=seed)
    say(f"{'-'.join(pair)}: seed {seed}, {steps} steps, killed twice in {runs} runs")


@pytest.mark.full
@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_p2_copy_repeated_after_kills_at_every_step_equals_its_source(
    quick_disk: Path, say: Say, seed: int, pair: tuple[str, str], again: bool
) -> None:
    steps, runs = _kill(quick_disk, pair, again=again, stride=1, seed=seed)
    say(f"{'-'.join(pair)}: seed {seed}, {steps} steps, killed twice in {runs} runs")


def test_p2_copy_of_moved_sessions_can_be_killed_at_any_step(quick_disk: Path, say: Say) -> None:
    with Runner("support.crash.copy_worker") as runner:
        trial = _Trial(runner, quick_disk, "jsonl", "jsonl", _write_two_sessions)
        trial.prepare(again=True)
        trial.go_on(_move_sessions)
        steps = trial.run()
        trial.check("undisturbed")
        # Only at the steps that leave different files.
        trial.reset()
        telling = trial.watch()
        before = trial.uids()
        for step in telling:
            trial.reset()
            assert trial.run(kill_at=step) == 0
            assert trial.uids() >= before, f"every session is there after a kill at {step}"
            trial.run()
            trial.check(f"killed at {step} of {steps}")
    say(f"{steps} steps, killed at {len(telling)} of them")


# --- power cuts ------------------------------------------------------------------------------


def _cut_power(place: Path, seed: int, *, limit: int) -> tuple[int, int]:
    """Check the disks that power cuts in a copy may leave; return the numbers of cuts and disks."""
    chance = random.Random(seed)
    with JSONLStore(place / "source") as source:
        _write_two_sessions(source)
        source.add_message("b", "user", "five")
        source.truncate_history("b", 1)
        source.compact("b")
        with JSONLStore(place / "target") as target:
            copy_snapshots(source, target)
            before = {mark.uid for mark in target.list_snapshots()}
        _move_sessions(source)
        wanted = digests(source)
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
                    assert {mark.uid for mark in left.list_snapshots()} >= before, (
                        f"after event {number}"
                    )
                    if finished:
                        assert digests(left) == wanted, "the copy is durable"
                    assert copy_snapshots(source, left).problems == (), f"after event {number}"
                    assert digests(left) == wanted, f"after event {number}"
                shutil.rmtree(place / "left")
    return cuts, disks


def test_p1_p2_power_cut_during_a_copy_loses_no_session(
    quick_disk: Path, say: Say, seed: int
) -> None:
    cuts, disks = _cut_power(quick_disk, seed, limit=4)
    say(f"seed {seed}, {cuts} power cuts during a copy, {disks} disks judged")


@pytest.mark.full
def test_p1_p2_power_cut_at_any_event_of_a_copy_loses_no_session(
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
        for mark in whole(there).list_snapshots():
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
    with whole(store).read_snapshot(mark) as reading:
        return list(reading.messages)


def _copy_beside_writers(
    place: Path, pair: tuple[str, str], *, writers: int, rounds: int
) -> tuple[int, int]:
    source, target = (WHERE[one].format(place / name) for one, name in zip(pair, "st", strict=True))
    open_store(source).close()
    with _writers(source, writers):
        messages = 0
        for _ in range(rounds):
            copied = copy_place(source, target)
            assert [found.problems for found in copied.namespaces.values() if found.problems] == []
            messages = _check_prefixes(source, target)
    copied = copy_place(source, target)
    assert copied.problems == 0
    assert _digests(target) == _digests(source)
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
