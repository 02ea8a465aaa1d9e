"""Tests migration, the fallback store and its merge, killed between any two steps, twice."""

import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from stenolog.records import Message
from stenolog.stores.open_store import open_store
from stenolog.transfer.merge import IMPORT_TIME
from support.crash.migration_worker import KEYS, Runner
from support.crash.reporting import Say

SAMPLES: Final = Path(__file__).parents[1] / "samples"
WHERE: Final = {"jsonl": "{}", "sqlite": "sqlite:{}/steno.db"}

SCENARIOS: Final = {
    # Programs that run one after the other; each is killed twice and then runs to its end.
    "migration": ("start",),
    "fallback": ("fail", "start"),
    "json": ("json", "start"),
}
SECOND_KILLS: Final = 5


def _prepare(workspace: Path) -> None:
    for layout in ("picoclaw", "picoclaw-legacy", "zeroclaw"):
        shutil.copytree(SAMPLES / layout, workspace / "sessions", dirs_exist_ok=True)
    for path in (workspace, *workspace.rglob("*")):
        if path.is_dir():
            path.chmod(0o700)
        else:
            os.utime(path, (1_800_000_000, 1_800_000_000))


def _without_import_times(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata without import times."""
    receipts = [{**one, IMPORT_TIME: ""} for one in meta.get("imported", [])]
    return {**meta, "imported": receipts}


def _without_seen(message: Message) -> dict[str, Any]:
    """Return the message with the seqs that it answers, but without `seen`.

    An answer that is added after a kill may have seen less than without the kill.
    """
    body = message.to_dict()
    marks = {name: value for name, value in body.get("stenolog", {}).items() if name != "seen"}
    return {**body, "stenolog": marks}


def _content(workspace: Path, where: str, *, exact: bool) -> dict[str, Any]:
    """Return the content of all sessions, and the names of the old files.

    What the fallback store wrote has the times of its run, so times only count without it.
    """
    with open_store(where) as store:
        found: dict[str, Any] = {
            key: (
                [
                    (m.seq, m.hidden, _without_seen(m), m.at if exact else None)
                    for m in store.get_history(key, full=True)
                ],
                store.get_summary(key),
                store.info(key).floor,
                _without_import_times(store.info(key).meta)
                if exact
                else store.info(key).meta.get("aliases"),
                store.info(key).meta.get("importing"),
            )
            for key in store.list_sessions()
        }
    found["files"] = sorted(
        f"{folder}/{path.name}"
        # The JSON files of a database are in a separate folder.
        for folder in ("sessions", "steno.db.sessions")
        for path in workspace.joinpath(folder).glob("*")
        if path.is_file() and not path.read_bytes().startswith(b'{"kind":"state"')
    )
    return found


def _copy(source: Path, target: Path) -> None:
    """Copy everything, keeping hard links."""
    copies: dict[int, str] = {}

    def copy(one: str, other: str) -> None:
        inode = Path(one).stat().st_ino
        if inode in copies:
            Path(other).hardlink_to(copies[inode])
        else:
            copies[inode] = shutil.copy2(one, other)

    shutil.copytree(source, target, copy_function=copy)


class _Trial:
    """One scenario on one engine."""

    def __init__(self, runner: Runner, place: Path, engine: str, programs: Sequence[str]) -> None:
        self._runner = runner
        self._place = place
        self._where = WHERE[engine]
        self._programs = programs
        self._exact = programs == ("start",)
        self._seconds = SECOND_KILLS if "fail" in programs else None
        self.steps = [0 for _ in programs]
        self.expected = self.run({})

    def run(self, kills: Mapping[int, Sequence[int]]) -> dict[str, Any]:
        """Run all programs, each killed at its steps first, and return the final content."""
        workspace = self._place / "workspace"
        where = self._where.format(workspace)
        _prepare(workspace)
        try:
            for number, program in enumerate(self._programs):
                for step in kills.get(number, ()):
                    self._runner.run(program, where, kill_at=step)
                self.steps[number] = self._runner.run(program, where) or self.steps[number]
            return _content(workspace, where, exact=self._exact)
        finally:
            shutil.rmtree(workspace)

    def every_pair(self, number: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yield the content after killing a program and then its successor at every step.

        Only steps count that leave other files than the one before. The fallback store takes many
        steps, so its second run is killed at a random sample of them.
        """
        workspace, before, killed = (self._place / n for n in ("workspace", "before", "killed"))
        where, program = self._where.format(workspace), self._programs[number]
        _prepare(workspace)
        for earlier in self._programs[:number]:
            self._runner.run(earlier, where)
        workspace.rename(before)
        for first in self._watched(before, workspace, program):
            _copy(before, workspace)
            assert self._runner.run(program, where, kill_at=first) == 0
            workspace.rename(killed)
            seconds = self._watched(killed, workspace, program)
            stride = 1 if self._seconds is None else max(1, len(seconds) // self._seconds)
            for second in seconds[first % stride :: stride]:
                _copy(killed, workspace)
                assert self._runner.run(program, where, kill_at=second) == 0
                for later in self._programs[number:]:
                    self._runner.run(later, where)
                yield first, second, _content(workspace, where, exact=self._exact)
                shutil.rmtree(workspace)
            shutil.rmtree(killed)
        shutil.rmtree(before)

    def _watched(self, source: Path, workspace: Path, program: str) -> list[int]:
        _copy(source, workspace)
        steps = self._runner.watch(program, self._where.format(workspace), workspace)
        shutil.rmtree(workspace)
        return steps


def _kill_at_sampled_steps(
    place: Path, say: Say, seed: int, scenario: str, engine: str, *, stride: int
) -> None:
    chance = random.Random(seed)
    with Runner() as runner:
        trial = _Trial(runner, place, engine, SCENARIOS[scenario])
        steps = list(trial.steps)
        # The fallback store gets a new session.
        assert len(trial.expected) == (7 if scenario == "migration" else 8)
        runs = 0
        for number, count in enumerate(steps):
            for first in range(1 + chance.randrange(stride), count + 1, stride):
                second = chance.randint(1, count)
                found = trial.run({number: (first, second)})
                runs += 1
                assert found == trial.expected, f"program {number} killed at {first}, {second}"
    say(f"{scenario} on {engine}: seed {seed}, {steps} steps, killed twice in {runs} runs")


@pytest.mark.parametrize("engine", WHERE)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_p2_migration_killed_twice_at_sampled_steps_completes(
    quick_disk: Path, say: Say, seed: int, scenario: str, engine: str
) -> None:
    stride = 15 if scenario == "migration" else 40
    _kill_at_sampled_steps(quick_disk, say, seed, scenario, engine, stride=stride)


def _merged_texts(where: str) -> Counter[str]:
    """Count the messages of the fallback store, in all sessions and in the trash."""
    with open_store(where) as store:
        for trashed in store.admin.list_trash():
            store.admin.restore(trashed.key, uid=trashed.uid, as_key=f"deleted {trashed.uid}")
        return Counter(
            str(message.content)
            for key in store.list_sessions()
            for message in store.get_history(key, full=True)
            if str(message.content).startswith("said ")
        )


@pytest.mark.slow
@pytest.mark.parametrize("engine", WHERE)
def test_p7_sessions_deleted_after_a_killed_merge_do_not_come_back(
    quick_disk: Path, say: Say, seed: int, engine: str
) -> None:
    chance = random.Random(seed)
    workspace, before = quick_disk / "workspace", quick_disk / "before"
    where = WHERE[engine].format(workspace)
    _prepare(workspace)
    with Runner() as runner:
        runner.run("fail", where)
        workspace.rename(before)
        _copy(before, workspace)
        count = runner.run("start", where)
        expected = _merged_texts(where)
        assert expected == Counter({f"said {number}": len(KEYS) for number in range(3)})
        shutil.rmtree(workspace)
        # The merge is in the last half of the steps.
        kills = sorted(chance.sample(range(count // 2, count + 1), 20))
        for kill_at in kills:
            _copy(before, workspace)
            assert runner.run("start", where, kill_at=kill_at) == 0
            with open_store(where) as store:
                for key in store.list_sessions():
                    store.delete(key)
            runner.run("start", where)
            assert _merged_texts(where) == expected, f"killed at {kill_at}"
            shutil.rmtree(workspace)
    say(f"{engine}: seed {seed}, killed at {kills} of {count} steps, then deleted")


@pytest.mark.full
@pytest.mark.parametrize("engine", WHERE)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_p2_migration_killed_twice_at_every_step_completes(
    quick_disk: Path, say: Say, scenario: str, engine: str
) -> None:
    with Runner() as runner:
        trial = _Trial(runner, quick_disk, engine, SCENARIOS[scenario])
        runs = [0 for _ in trial.steps]
        for number in range(len(runs)):
            for first, second, found in trial.every_pair(number):
                runs[number] += 1
                assert found == trial.expected, f"program {number} killed at {first}, {second}"
    say(f"{scenario} on {engine}: {trial.steps} steps, killed at {runs} pairs of them")
