"""Migration, the fallback and its merge, killed between every two steps, twice."""

import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from stenolog.stores.open_store import open_store
from stenolog.transfer.merge import IMPORT_TIME
from support.crash.migration_worker import Runner
from support.crash.reporting import Say

SAMPLES: Final = Path(__file__).parents[1] / "samples"
WHERE: Final = {"jsonl": "{}", "sqlite": "sqlite:{}/steno.db"}

SCENARIOS: Final = {
    # What is run, one after the other; each is killed twice and then comes to its end.
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


def _timeless(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The meta without the times at which something was taken in."""
    receipts = [{**one, IMPORT_TIME: ""} for one in meta.get("imported", [])]
    return {**meta, "imported": receipts}


def _picture(workspace: Path, where: str, *, exact: bool) -> dict[str, Any]:
    """All that the sessions say, and the names of the old files.

    What the fallback wrote has the times of its run, so these count only where it had no part.
    """
    with open_store(where) as store:
        found: dict[str, Any] = {
            key: (
                [
                    (m.seq, m.hidden, m.to_json(), m.at if exact else None)
                    for m in store.get_history(key, full=True)
                ],
                store.get_summary(key),
                store.info(key).floor,
                _timeless(store.info(key).meta) if exact else store.info(key).meta.get("aliases"),
                store.info(key).meta.get("importing"),
            )
            for key in store.list_sessions()
        }
    found["files"] = sorted(
        f"{folder}/{path.name}"
        # JSON files beside a database are in a folder of their own.
        for folder in ("sessions", "steno.db.sessions")
        for path in workspace.joinpath(folder).glob("*")
        if path.is_file() and not path.read_bytes().startswith(b'{"kind":"state"')
    )
    return found


def _copy(source: Path, target: Path) -> None:
    """All as a kill left it: a file that has two names is one file there, too."""
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
        """Run all programs, each killed at its steps first; what there is in the end."""
        workspace = self._place / "workspace"
        where = self._where.format(workspace)
        _prepare(workspace)
        try:
            for number, program in enumerate(self._programs):
                for step in kills.get(number, ()):
                    self._runner.run(program, where, kill_at=step)
                self.steps[number] = self._runner.run(program, where) or self.steps[number]
            return _picture(workspace, where, exact=self._exact)
        finally:
            shutil.rmtree(workspace)

    def every_pair(self, number: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """One program killed at every step, and the run that follows likewise: what there is then.

        At every step, that is, that leaves other files than the one before it. The fallback takes
        many steps: there the second run is killed at a sample of them, another one each time.
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
                yield first, second, _picture(workspace, where, exact=self._exact)
                shutil.rmtree(workspace)
            shutil.rmtree(killed)
        shutil.rmtree(before)

    def _watched(self, source: Path, workspace: Path, program: str) -> list[int]:
        _copy(source, workspace)
        steps = self._runner.watch(program, self._where.format(workspace), workspace)
        shutil.rmtree(workspace)
        return steps


def _kill_here_and_there(
    place: Path, say: Say, seed: int, scenario: str, engine: str, *, stride: int
) -> None:
    chance = random.Random(seed)
    with Runner() as runner:
        trial = _Trial(runner, place, engine, SCENARIOS[scenario])
        steps = list(trial.steps)
        # The fallback gets a new session, and purges one.
        assert len(trial.expected) == (8 if scenario == "json" else 7)
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
    _kill_here_and_there(quick_disk, say, seed, scenario, engine, stride=stride)


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
