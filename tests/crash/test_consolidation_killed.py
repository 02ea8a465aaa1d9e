"""Tests that consolidation killed between any two steps, twice, skips and repeats no turn."""

import random
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from stenolog.memory.notes import Notes
from stenolog.memory.scopes import Scope
from stenolog.sessions.keys import owner_in_key
from stenolog.stores.open_store import open_store
from support.crash.consolidation_worker import KEYS, PLACES
from support.crash.migration_worker import Runner
from support.crash.reporting import Say

WHERE: Final = {"jsonl": "{}", "sqlite": "sqlite:{}/steno.db"}


def _check(where: str, told: str) -> None:
    """Check that turns have one daily entry, facts are stored once, the newest home is valid."""
    with open_store(where) as sessions, open_store(where, namespace="notes") as store:
        notes = Notes(store)
        for who in ("telegram:1", "telegram:2"):
            keys = [key for key in KEYS if owner_in_key(key) == who]
            uids = {key: sessions.info(key).uid for key in keys}
            found = notes.list(Scope(who=who, of="sender"), full=True)
            daily = Counter((note.uid, note.seqs) for note in found if note.kind == "daily")
            assert daily == {
                (uids[key], (2 * number + 1, 2 * number + 2)): 1
                for key in keys
                for number in range(len(PLACES))
            }, told
            facts = Counter(note.about for note in found if note.kind == "core")
            seen = {name: count for name, count in facts.items() if name != "home"}
            assert seen == {f"city{number}": 1 for number in range(len(PLACES))}, told
            homes = [note for note in found if note.about == "home"]
            assert [note.text for note in homes if note.in_force] == ["Lives in Riga."], told
            # One more if a home was mentioned in one session, and then in the other.
            assert len(homes) >= len(PLACES), told
            assert len({(note.uid, note.seqs) for note in homes}) == len(homes), told


class _Trial:
    """A conversation that continues between killed consolidations."""

    def __init__(self, runner: Runner, place: Path, engine: str) -> None:
        self._runner = runner
        self._workspace = place / "workspace"
        self._talked = place / "talked"
        self._where = WHERE[engine].format(self._workspace)
        self._workspace.mkdir(mode=0o700)
        runner.run("talk", self._where)
        self._workspace.rename(self._talked)
        shutil.copytree(self._talked, self._workspace)
        self.steps = runner.run("consolidate", self._where)
        self._end("undisturbed")

    def run(self, kills: Sequence[int]) -> None:
        """Consolidate repeatedly, killed at these steps, and check the notes."""
        shutil.copytree(self._talked, self._workspace)
        for number, step in enumerate(kills):
            program = "consolidate otherwise" if number % 2 else "consolidate"
            self._runner.run(program, self._where, kill_at=step)
        self._end(f"killed at {kills}")

    def watched(self) -> list[int]:
        """Return the steps before which the files had changed."""
        shutil.copytree(self._talked, self._workspace)
        steps = self._runner.watch("consolidate", self._where, self._workspace)
        shutil.rmtree(self._workspace)
        return steps

    def _end(self, told: str) -> None:
        self._runner.run("go on", self._where)
        self._runner.run("consolidate otherwise", self._where)
        self._runner.run("consolidate", self._where)
        _check(self._where, told)
        shutil.rmtree(self._workspace)


@pytest.mark.parametrize("engine", WHERE)
def test_consolidation_killed_at_sampled_steps_notes_each_turn_once(
    quick_disk: Path, say: Say, seed: int, engine: str
) -> None:
    chance = random.Random(seed)
    with Runner("support.crash.consolidation_worker") as runner:
        trial = _Trial(runner, quick_disk, engine)
        stride = max(trial.steps // 12, 1)
        first = range(1 + chance.randrange(stride), trial.steps + 1, stride)
        for step in first:
            trial.run((step, chance.randint(1, trial.steps)))
    say(f"consolidation on {engine}: seed {seed}, {trial.steps} steps, killed in {len(first)} runs")


@pytest.mark.full
@pytest.mark.parametrize("engine", WHERE)
def test_consolidation_killed_at_every_step_notes_each_turn_once(
    quick_disk: Path, say: Say, seed: int, engine: str
) -> None:
    chance = random.Random(seed)
    with Runner("support.crash.consolidation_worker") as runner:
        trial = _Trial(runner, quick_disk, engine)
        steps = trial.watched()
        for step in steps:
            trial.run((step,))
            trial.run((step, chance.randint(1, trial.steps)))
    say(f"consolidation on {engine}: seed {seed}, killed at each of {len(steps)} steps, twice")
