"""Stops a file system in the middle of a run, mounts it again and checks the store."""

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
MAX_REPORTS = 150
"""Lines that a child reports at most before its cut; each step reports two."""


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
    """Cut the power `cuts` times. `engine` is the prefix of the address, such as `sqlite:`."""
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
            # The cut comes after a number of reports, not of seconds: a child on a busy machine may
            # do nothing for a second, and a cut before its first message tests little.
            reports = moments.randrange(MAX_REPORTS)
            child.until(lambda received: received.count(b"\n") >= reports, seconds=120)  # noqa: B023
            time.sleep(moments.uniform(0, 0.005))
            # Only lines received before the cut count: a sync that returns while the file system
            # goes down is an artefact of this kind of cut.
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
