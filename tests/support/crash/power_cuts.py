"""Stop a file system in the middle of a run, mount it again and check the store."""

import os
import random
import time
from pathlib import Path

from support import needs
from support.crash.child_processes import Nursery
from support.crash.crash_checks import Judge, acknowledged, outcomes
from support.crash.disks import FileSystem, cut, loop_disk
from support.crash.reporting import Say

FILE_SYSTEMS: tuple[FileSystem, ...] = ("ext4", "xfs")


def cut_power(
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
