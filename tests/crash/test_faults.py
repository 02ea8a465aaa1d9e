"""Tests failing system calls, injected one by one, and real failures.

Real failures are short and torn writes, a file size limit, a full disk and a failing disk.
"""

import multiprocessing
import os
import random
import subprocess
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from support import needs
from support.crash import fault_injection
from support.crash.child_processes import Nursery
from support.crash.crash_checks import Judge, Violation, acknowledged, outcomes
from support.crash.disks import failing_disk, grow, tiny_tmpfs
from support.crash.fault_injection import Fault, Tally
from support.crash.reporting import Say

# --- every call ------------------------------------------------------------------------------


def test_p8_errors_are_correct_if_sampled_system_calls_fail(
    quick_disk: Path, say: Say, seed: int
) -> None:
    needs.kernel("ptrace")
    with Nursery() as nursery:
        seen = fault_injection.calls_seen(nursery, quick_disk)
    tally = _sweep(fault_injection.sample(seen, seed, 120), quick_disk)
    say(
        f"faults: seed {seed}, {tally.runs} runs of "
        f"{sum(1 for _ in fault_injection.all_faults(seen))}"
    )
    _report(say, seen, tally)
    assert not tally.violations, "\n".join(tally.violations[:5])


@pytest.mark.full
def test_p8_errors_are_correct_if_any_system_call_fails(quick_disk: Path, say: Say) -> None:
    needs.kernel("ptrace")
    with Nursery() as nursery:
        seen = fault_injection.calls_seen(nursery, quick_disk)
    tally = _sweep(list(fault_injection.all_faults(seen)), quick_disk)
    say(f"faults: {tally.runs} runs; EINTR for good is left out, Python calls again for ever")
    _report(say, seen, tally)
    assert not tally.violations, "\n".join(tally.violations[:5])
    assert tally.failed >= {
        (call, number) for call, count in seen.items() for number in range(1, count + 1)
    }


def _sweep(faults: list[Fault], place: Path) -> Tally:
    workers = min(os.cpu_count() or 1, 8)
    tally = Tally()
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawned) as pool:
        shares = [faults[number::workers] for number in range(workers)]
        places = [place / f"share{number}" for number in range(workers)]
        for found in pool.map(fault_injection.sweep, shares, places):
            tally.add(found)
    return tally


def _report(say: Say, seen: dict[str, int], tally: Tally) -> None:
    for call in fault_injection.CALLS:
        count = seen.get(call, 0)
        failed = sum(name == call and number <= count for name, number in tally.failed)
        say(f"{call}: {count} calls seen, {failed} failed")
    say(f"{tally.acknowledged} acknowledged messages kept, errors told: {dict(tally.errors)}")


# --- short and torn writes -------------------------------------------------------------------


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs.tool("gcc")
    built = tmp_path_factory.mktemp("shim") / "shim.so"
    source = Path(__file__).with_name("shim.c")
    options = ["-shared", "-fPIC", "-O2", "-Wall", "-Werror"]
    command = ["gcc", *options, "-o", str(built), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return built


def test_p2_p3_sampled_short_and_torn_writes_lose_no_acknowledged_message(
    quick_disk: Path, say: Say, seed: int, shim: Path
) -> None:
    _tear(quick_disk, say, shim, seed=seed, count=60)


@pytest.mark.full
def test_p2_p3_any_short_or_torn_write_loses_no_acknowledged_message(
    quick_disk: Path, say: Say, seed: int, shim: Path
) -> None:
    _tear(quick_disk, say, shim, seed=seed, count=None)


def _tear(place: Path, say: Say, shim: Path, *, seed: int, count: int | None) -> None:
    with Nursery(env={"LD_PRELOAD": str(shim)}) as nursery:
        writes = _writes(nursery, place)
        cases = [
            (number, keep, then)
            for number in range(1, writes + 1)
            for keep in (0, 1, 70, -70, -1)
            for then in ("short", "kill", "full")
        ]
        if count is not None:
            cases = random.Random(seed).sample(cases, count)
        total = 0
        violations: list[str] = []
        for index, (number, keep, then) in enumerate(cases):
            where = place / f"store{index}"
            env = {
                "SHIM_UNDER": str(where),
                "SHIM_NTH": str(number),
                "SHIM_KEEP": str(keep),
                "SHIM_THEN": then,
            }
            child = nursery.child("run", where=where, env=env)
            child.go()
            status = child.finish()
            assert (status < 0) == (then == "kill"), (status, env)
            try:
                said = outcomes(child.lines())
                Judge(said).judge(where, thorough=index % 4 == 0)
                total += sum(acknowledged(said).values())
            except Violation as violation:
                violations.append(f"write {number}, {keep} bytes kept, {then}: {violation}")
    say(f"short and torn writes: seed {seed}, {len(cases)} runs, {writes} writes, {total} kept")
    assert not violations, "\n".join(violations[:5])


def _writes(nursery: Nursery, place: Path) -> int:
    """Return the number of writes of the run: the last number at which a kill happens."""
    for number in range(1, 10_000):
        where = place / f"counting{number}"
        env = {
            "SHIM_UNDER": str(where),
            "SHIM_NTH": str(number),
            "SHIM_KEEP": "0",
            "SHIM_THEN": "kill",
        }
        child = nursery.child("run", where=where, env=env)
        child.go()
        if child.finish() == 0:
            return number - 1
    raise AssertionError("a run of so many writes is no short run")


# --- no space --------------------------------------------------------------------------------


def test_p8_errors_are_correct_at_the_file_size_limit(quick_disk: Path, say: Say) -> None:
    _limit_files(quick_disk, say, step=700)


@pytest.mark.full
def test_p8_errors_are_correct_at_many_file_size_limits(quick_disk: Path, say: Say) -> None:
    _limit_files(quick_disk, say, step=37)


def _limit_files(place: Path, say: Say, *, step: int) -> None:
    total = refused = 0
    violations: list[str] = []
    limits = range(100, 14_000, step)
    with Nursery() as nursery:
        for limit in limits:
            where = place / f"store{limit}"
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


@pytest.mark.parametrize("size", ["48k", "80k", "144k"])
def test_p8_errors_are_correct_on_a_full_disk(tmp_path: Path, say: Say, size: str) -> None:
    needs.kernel("mount")
    with tiny_tmpfs(tmp_path, size) as mounted, Nursery() as nursery:
        where = mounted / "store"
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


# --- a failing disk --------------------------------------------------------------------------


def test_p8_errors_are_correct_if_a_disk_fails_to_sync(tmp_path: Path, say: Say) -> None:
    needs.kernel("ext4", "mount")
    with failing_disk(tmp_path, room="12m") as disk, Nursery() as nursery:
        where = disk.mounted / "store"
        child = nursery.child("run", where=where, size=30_000, passes=6)
        child.go()
        child.finish(seconds=60)
        lines = child.lines()
        disk.unmount()
        grow(tmp_path / "tiny", "80m")
        disk.repair()
        disk.mount()
        said = outcomes(lines)
        Judge(said, disk_fails=True).judge(where, thorough=True)
    failed = [line.result for line in lines if line.word == "ERR"]
    # If the kernel's own writes fail first, it only refuses to open files for writing.
    expected = ("Input/output error", "read-only")
    assert any(text in reason for _, reason in failed for text in expected), failed[:5]
    total = sum(acknowledged(said).values())
    say(f"a failing disk: {len(failed)} calls failed, {total} acknowledged messages kept")
