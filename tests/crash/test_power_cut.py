"""Real power cuts: file systems are stopped under a run of all operations.

Mounted again, they are judged. kill -9 cannot show this: an appender that never syncs survives it.
"""

import os
import random
import time
from pathlib import Path

import pytest

import needs
from crash.conftest import Say
from crash.disks import FileSystem, cut, loop_disk
from crash.judge import Judge, Violation, acknowledged, outcomes
from crash.nursery import Nursery

FILE_SYSTEMS: tuple[FileSystem, ...] = ("ext4", "xfs")


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_p1_five_power_cuts_lose_nothing(
    tmp_path: Path, say: Say, seed: int, kind: FileSystem
) -> None:
    cut_often(tmp_path, say, seed, kind, cuts=5)


@pytest.mark.full
@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_p1_a_hundred_power_cuts_lose_nothing(
    tmp_path: Path, say: Say, seed: int, kind: FileSystem
) -> None:
    cut_often(tmp_path, say, seed, kind, cuts=100)


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_a_store_that_does_not_sync_is_caught(tmp_path: Path, say: Say, kind: FileSystem) -> None:
    # The first cut that shows it ends this; a cut may come when nothing was on its way.
    with pytest.raises(Violation, match="acknowledged messages lost"):
        cut_often(tmp_path, say, 1, kind, cuts=20, never_sync=True)


def cut_often(
    place: Path,
    say: Say,
    seed: int,
    kind: FileSystem,
    *,
    cuts: int,
    never_sync: bool = False,
    engine: str = "",
) -> None:
    """`engine`: what stands before the place, as `sqlite:` does."""
    needs.kernel(kind)
    moments = random.Random(seed)
    total = steps = 0
    with loop_disk(place, kind) as disk, Nursery() as nursery:
        for number in range(cuts):
            where = Path(f"{engine}{disk.mounted}") / f"store{number}"
            child = nursery.child(
                "run",
                where=where,
                first=number * 10_000,
                passes=None,
                size=moments.choice([40, 400, 2_000]),
                never_sync=never_sync,
            )
            power = disk.descriptor()
            child.go()
            end = time.monotonic() + moments.uniform(0.02, 0.3)
            while time.monotonic() < end:
                child.poll()
                time.sleep(0.0005)
            # Only what was heard before the cut counts: a sync that returns while the file system
            # goes down is an artefact of cutting it this way.
            child.poll()
            certain = child.words()
            cut(power)
            child.kill()
            os.close(power)
            child.finish()
            disk.unmount()
            disk.mount()
            lines = child.lines()
            said = outcomes(lines, certain=certain)
            Judge(said).judge(where, probe=number, thorough=number % 5 == 0)
            total += sum(acknowledged(said).values())
            steps += len(said)
    kept = f"{steps} steps, {total} acknowledged messages kept"
    say(f"{engine}{kind}: seed {seed}, {cuts} cuts, {kept}")
