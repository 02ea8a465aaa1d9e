"""Failing system calls in the scripted run.

strace is attached to a waiting child that has everything imported. All counted calls therefore
belong to the run, and no path has to be named: new files and folders of a compaction are covered
like the log itself.
"""

import itertools
import logging
import random
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from support.crash.child_processes import Child, Nursery
from support.crash.crash_checks import Judge, Violation, acknowledged, outcomes
from support.crash.workload import Line

CALLS: Final = (
    "write",
    "pwrite64",
    "fdatasync",
    "fsync",
    "rename",
    "renameat",
    "renameat2",
    "openat",
    "mkdir",
    "mkdirat",
    "unlink",
    "unlinkat",
    "rmdir",
    "ftruncate",
    "flock",
    "pread64",
)
ERRORS: Final = ("EIO", "ENOSPC", "EDQUOT", "EINTR", "EMFILE")
KILL: Final = "SIGKILL"

_SYNCS: Final = ("fdatasync", "fsync")
_SECONDS: Final = 20
_CALL = re.compile(r"^(?:\d+ +)?(\w+)\(")
_BEGINS: Final = r'"[\"BEGIN\"'


@dataclass(frozen=True, slots=True)
class Fault:
    """An error of the call with this number; if lasting, also of all later ones."""

    call: str
    number: int
    error: str
    lasting: bool = False

    def option(self) -> str:
        """Return the option for strace."""
        what = f"signal={self.error}" if self.error == KILL else f"error={self.error}"
        return f"inject={self.call}:{what}:when={self.number}{'+' if self.lasting else ''}"


@dataclass(slots=True)
class Tally:
    """Results of many faults."""

    runs: int = 0
    acknowledged: int = 0
    failed: set[tuple[str, int]] = field(default_factory=set)
    """Calls that really failed, by name and number."""
    errors: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Add the results of another tally."""
        self.runs += other.runs
        self.acknowledged += other.acknowledged
        self.failed |= other.failed
        self.errors += other.errors
        self.violations += other.violations


def calls_seen(nursery: Nursery, place: Path) -> Counter[str]:
    """Count the system calls of a run without faults."""
    child = nursery.child("run", where=place / "dry")
    trace = _traced(child, place / "dry.trace", [])
    assert all(line.word != "ERR" for line in child.lines()), child.lines()
    found = Counter(match[1] for line in trace if (match := _CALL.match(line)))
    return Counter({call: found[call] for call in CALLS if found[call]})


def all_faults(seen: Mapping[str, int]) -> Iterator[Fault]:
    """Yield every call with every error, once and lasting, and with a kill.

    A lasting EINTR is left out, because Python itself retries forever (PEP 475).
    """
    for call, count in seen.items():
        for number, error in itertools.product(range(1, count + 1), ERRORS):
            yield Fault(call, number, error)
            if error != "EINTR":
                yield Fault(call, number, error, lasting=True)
        for number in range(1, count + 1):
            yield Fault(call, number, KILL)


def sample(seen: Mapping[str, int], seed: int, count: int) -> list[Fault]:
    """Choose `count` faults, evenly over calls and errors."""
    choice = random.Random(seed)
    groups: dict[tuple[str, str, bool], list[Fault]] = {}
    for fault in all_faults(seen):
        groups.setdefault((fault.call, fault.error, fault.lasting), []).append(fault)
    chosen = [choice.choice(group) for group in groups.values()]
    while len(chosen) < count:
        chosen.append(choice.choice(groups[choice.choice(list(groups))]))
    choice.shuffle(chosen)
    return chosen[:count]


def sweep(faults: Sequence[Fault], place: Path) -> Tally:
    """Run and check with each of these faults."""
    tally = Tally()
    logging.getLogger("stenolog").setLevel(logging.CRITICAL)
    place.mkdir(parents=True)
    with Nursery() as nursery:
        for number, fault in enumerate(faults):
            where = place / f"store{number}"
            # No other process holds the lock, so a wait that times out would do so every time.
            child = nursery.child("run", where=where, patience=0.02)
            tally.runs += 1
            try:
                trace = _traced(child, place / "trace", ["-e", fault.option()])
                _note_failed(trace, fault, tally)
                tally.errors.update(line.result[0] for line in child.lines() if line.word == "ERR")
                said = outcomes(child.lines())
                tally.acknowledged += sum(acknowledged(said).values())
                _check_syncs(trace, fault, child.lines())
                Judge(said).judge(where, thorough=number % 4 == 0)
            except (Violation, TimeoutError) as error:
                tally.violations.append(f"{fault}: {error}")
    return tally


def _traced(child: Child, trace: Path, options: Sequence[str]) -> list[str]:
    command = ["strace", "-s", "40", "-o", str(trace), "-e", f"trace={','.join(CALLS)},sendto"]
    tracer = subprocess.Popen(
        [*command, *options, "-p", str(child.pid)],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        assert tracer.stderr is not None
        attached = tracer.stderr.readline()
        if b"attached" not in attached:
            raise RuntimeError(f"strace: {attached.decode()}")
        child.go()
        child.finish(seconds=_SECONDS)
        tracer.wait(_SECONDS)
    finally:
        child.kill()
        if tracer.poll() is None:
            tracer.send_signal(signal.SIGTERM)
            tracer.wait(_SECONDS)
        if tracer.stderr is not None:
            tracer.stderr.close()
    return trace.read_text(errors="replace").splitlines()


def _note_failed(trace: Sequence[str], fault: Fault, tally: Tally) -> None:
    made = 0
    for line in trace:
        match = _CALL.match(line)
        if match and match[1] == fault.call:
            made += 1
            killed = fault.error == KILL and made == fault.number
            if "(INJECTED)" in line or killed:
                tally.failed.add((fault.call, made))


def _check_syncs(trace: Sequence[str], fault: Fault, lines: Sequence[Line]) -> None:
    """Check that a step with a failed sync is not acknowledged, because a retry proves nothing."""
    if fault.call not in _SYNCS or fault.error == "EINTR":
        return
    step, failed = 0, set[int]()
    for line in trace:
        if "(INJECTED)" in line:
            failed.add(step)
        step += _BEGINS in line
    step = 0
    for answer in lines:
        step += answer.word == "BEGIN"
        if answer.word == "ACK" and step in failed and not _all_refused(answer):
            raise Violation(f"acknowledged after a failed {fault.call}: {answer}")


def _all_refused(answer: Line) -> bool:
    result = answer.result[0]
    return isinstance(result, list) and all(isinstance(one, str) for one in result)
