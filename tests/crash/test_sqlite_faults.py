"""Tests SQLite on a failing disk: each write and sync in turn, a full disk, a file size limit.

A VFS of the test between SQLite and the system makes single calls fail.
"""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

from support import needs
from support.crash.child_processes import Nursery
from support.crash.crash_checks import Judge, Violation, acknowledged, outcomes
from support.crash.disks import failing_disk, grow, tiny_tmpfs
from support.crash.reporting import Say
from support.crash.workload import Line, Run

# --- every write and sync --------------------------------------------------------------------

_SYSTEM = apsw.vfs_names()[0]
_TROUBLE = {
    "xWrite": ((1, apsw.SQLITE_FULL), (3, apsw.SQLITE_IOERR_WRITE)),
    "xSync": ((1, apsw.SQLITE_IOERR_FSYNC), (3, apsw.SQLITE_IOERR_FSYNC)),
    "xTruncate": ((1, apsw.SQLITE_IOERR_TRUNCATE),),
    "xRead": ((1, apsw.SQLITE_IOERR_READ),),
}
"""Number of calls that fail in a row, and the error code."""
Fault = tuple[str, int, int, int]
"""The failing call, the number of the first failure, how many fail, and the error code."""


class _Faulty(apsw.VFS):
    """The system's VFS, in which chosen calls fail."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.struck = 0
        self.fault: Fault | None = None
        super().__init__("faulty", base=_SYSTEM)

    def xOpen(self, name: apsw.URIFilename | str | None, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        return _FaultyFile(self, name, flags)

    def meet(self, call: str) -> None:
        self.seen[call] += 1
        if self.fault is not None:
            wanted, first, count, code = self.fault
            if call == wanted and first <= self.seen[call] < first + count:
                self.struck += 1
                raise apsw.exception_for(code)


class _FaultyFile(apsw.VFSFile):
    def __init__(self, layer: _Faulty, name: Any, flags: list[int]) -> None:
        self._layer = layer
        super().__init__(_SYSTEM, name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        self._layer.meet("xWrite")
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:  # noqa: N802
        self._layer.meet("xSync")
        super().xSync(flags)

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        self._layer.meet("xTruncate")
        super().xTruncate(newsize)

    def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802
        self._layer.meet("xRead")
        return super().xRead(amount, offset)


@contextmanager
def _faulty() -> Iterator[_Faulty]:
    layer = _Faulty()
    apsw.set_default_vfs("faulty")
    try:
        yield layer
    finally:
        apsw.set_default_vfs(_SYSTEM)
        layer.unregister()


def _run(where: Path, fault: Fault | None) -> tuple[list[Line], Counter[str], int]:
    lines: list[Line] = []
    with _faulty() as layer:
        layer.fault = fault
        Run(where, lines.append).go()
        return lines, layer.seen, layer.struck


def _faults(seen: Counter[str]) -> list[Fault]:
    return [
        (call, number, count, code)
        for call, troubles in _TROUBLE.items()
        for number in range(1, seen[call] + 1)
        for count, code in troubles
    ]


def test_p8_errors_are_correct_if_sampled_writes_and_syncs_fail(
    quick_disk: Path, say: Say, seed: int
) -> None:
    _sweep(quick_disk, say, seed, count=60)


@pytest.mark.full
def test_p8_errors_are_correct_if_any_write_or_sync_fails(
    quick_disk: Path, say: Say, seed: int
) -> None:
    _sweep(quick_disk, say, seed, count=None)


def _sweep(place: Path, say: Say, seed: int, *, count: int | None) -> None:
    _, seen, _ = _run(Path(f"sqlite:{place}/measured/store"), None)
    faults = _faults(seen)
    if count is not None:
        faults = random.Random(seed).sample(faults, count)
    kept = 0
    errors: Counter[str] = Counter()
    violations: list[str] = []
    for index, fault in enumerate(faults):
        where = Path(f"sqlite:{place}/{index}/store")
        lines, _, struck = _run(where, fault)
        assert struck or fault[0] in ("xRead", "xTruncate"), fault
        errors.update(line.result[0] for line in lines if line.word == "ERR")
        try:
            said = outcomes(lines)
            Judge(said).judge(where, thorough=index % 4 == 0)
            kept += sum(acknowledged(said).values())
        except Violation as violation:
            violations.append(f"{fault}: {violation}")
    say(f"SQLite's calls: seed {seed}, {dict(seen)} seen, {len(faults)} runs, {kept} kept")
    say(f"errors told: {dict(errors)}")
    assert not violations, "\n".join(violations[:5])
    assert {"NotStored", "MaybeStored"} <= errors.keys()


# --- no space --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["180k", "300k"])
def test_p8_errors_are_correct_on_a_full_disk(tmp_path: Path, say: Say, size: str) -> None:
    needs.kernel("mount")
    with tiny_tmpfs(tmp_path, size) as mounted, Nursery() as nursery:
        where = Path(f"sqlite:{mounted}/store")
        child = nursery.child("run", where=where, size=1_000, passes=3)
        child.go()
        child.finish()
        said = outcomes(child.lines())
        grow(mounted, "8m")
        Judge(said).judge(where, thorough=True)
    refused = sum(line.word == "ERR" for line in child.lines())
    assert refused
    total = sum(acknowledged(said).values())
    say(f"tmpfs of {size}: {refused} calls failed, {total} acknowledged messages kept")


def test_p8_errors_are_correct_at_the_file_size_limit(quick_disk: Path, say: Say) -> None:
    _limit_files(quick_disk, say, step=60_000)


@pytest.mark.full
def test_p8_errors_are_correct_at_many_file_size_limits(quick_disk: Path, say: Say) -> None:
    _limit_files(quick_disk, say, step=3_000)


def _limit_files(place: Path, say: Say, *, step: int) -> None:
    total = refused = 0
    violations: list[str] = []
    limits = range(1_000, 500_000, step)
    with Nursery() as nursery:
        for limit in limits:
            where = Path(f"sqlite:{place}/store{limit}")
            child = nursery.child("run", where=where, file_size=limit)
            child.go()
            child.finish()
            refused += sum(line.word == "ERR" for line in child.lines())
            try:
                said = outcomes(child.lines())
                Judge(said).judge(where, thorough=True)
                total += sum(acknowledged(said).values())
            except Violation as violation:
                violations.append(f"at most {limit} bytes: {violation}")
    say(f"ulimit -f: {len(limits)} limits, {refused} calls failed, {total} messages kept")
    assert not violations, "\n".join(violations[:5])
    assert refused


# --- a failing disk --------------------------------------------------------------------------


def test_p8_errors_are_correct_if_a_disk_fails_to_sync(tmp_path: Path, say: Say) -> None:
    needs.kernel("ext4", "mount")
    with failing_disk(tmp_path, room="12m") as disk, Nursery() as nursery:
        where = Path(f"sqlite:{disk.mounted}/store")
        child = nursery.child("run", where=where, size=30_000, passes=4)
        child.go()
        child.finish(seconds=60)
        lines = child.lines()
        disk.unmount()
        grow(tmp_path / "tiny", "80m")
        disk.repair()
        disk.mount()
        said = outcomes(lines)
        Judge(said).judge(where, thorough=True)
    failed = [line.result for line in lines if line.word == "ERR"]
    assert any("IOERR" in text for _, text in failed), failed[:5]
    total = sum(acknowledged(said).values())
    say(f"a failing disk: {len(failed)} calls failed, {total} acknowledged messages kept")
