"""Tests what the doctor reports about a workspace after a power cut, before any write.

The expected findings come from the bytes and names of the files, as in docs/format.md, not from the
doctor's code.
"""

import itertools
import random
from binascii import crc32
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest

from stenolog.maintenance.log_damage import Kind
from stenolog.maintenance.repair import repair
from stenolog.maintenance.workspace_check import examine
from stenolog.records import Span
from stenolog.stores.open_store import open_store
from support.crash.recorder import Recorder
from support.crash.replay_model import Disk
from support.crash.reporting import Say
from support.crash.sequences import GROUNDS
from support.crash.workload import labels, perform, plan

_OF_A_LOG: Final = (Kind.TORN_TAIL, Kind.NUL_BYTES, Kind.INCOMPLETE_BATCH, Kind.DAMAGED_LINE)
_SIGNATURE: Final = len(b',"crc":"xxxxxxxx"}')

CASES: Final = [
    ("talk", "add_message"),
    ("talk", "add_messages"),
    ("torn", "truncate_history"),
    ("holed", "add_message"),
    ("compacted", "compact"),
    ("compacted", "fork"),
    ("trashed", "restore"),
    ("compacted", "purge_before"),
    ("recreated", "purge"),
]


@pytest.mark.parametrize(("ground", "op"), CASES, ids=["-".join(case) for case in CASES])
def test_p3_doctor_reports_exactly_the_damage_of_a_power_cut(
    quick_disk: Path, say: Say, ground: str, op: str
) -> None:
    disks = 0
    for where in _disks(quick_disk, ground, op):
        disks += 1
        named = {
            (finding.kind, finding.path)
            for finding in examine(where).findings
            if finding.kind is not Kind.WIDE_PERMISSIONS
        }
        for finding in examine(where).findings:
            assert not _readable_seqs(where, finding.key) & set(_seqs(finding.lost)), "it is there"
        for kinds, path in _required_findings(where):
            assert any((kind, path) in named for kind in kinds), (kinds, path, named)
        told = {path for _, path in named}
        assert told <= {path for _, path in _required_findings(where)} | _possible_findings(
            where
        ), "nothing is made up"

        before, holed = _bytes(where), _logs_with_holes(where)
        repair(where)
        assert _all_content_exists(before, where), "--repair sets aside, and removes no byte"
        left = {f.path for f in examine(where).findings if f.kind is not Kind.WIDE_PERMISSIONS}
        # An interrupted purge has to be repeated; a missing middle may have been acknowledged.
        assert all(path in holed or path.endswith(".purged") for path in left), left
    say(f"doctor: {op} on {ground}, {disks} disks")
    assert disks > 1


def test_power_cut_cases_cover_every_kind_of_damage(quick_disk: Path) -> None:
    seen = set[str]()
    for number, (ground, op) in enumerate(CASES):
        place = quick_disk / str(number)
        place.mkdir()
        for where in _disks(place, ground, op):
            seen |= {finding.kind for finding in examine(where).findings}
    assert seen >= {
        Kind.TORN_TAIL,
        Kind.NUL_BYTES,
        Kind.INCOMPLETE_BATCH,
        Kind.EMPTY_FILE,
        Kind.LEFTOVER,
        Kind.UNREFERENCED_ARCHIVE,
    }


def _readable_seqs(where: Path, key: str | None) -> set[int]:
    with open_store(where, read_only=True) as store:
        keys = store.list_sessions()
        return {m.seq for m in store.get_history(key, full=True)} if key in keys else set()


def _seqs(spans: Iterable[Span]) -> Iterator[int]:
    for first, last in spans:
        yield from range(first, last + 1)


# --- disks -----------------------------------------------------------------------------------


def _disks(place: Path, ground: str, op: str) -> Iterator[Path]:
    """Yield each disk that a power cut in the operation may leave."""
    store_at = place / "run" / "store"
    store_at.parent.mkdir()
    GROUNDS[ground](store_at)
    recorder = Recorder(store_at.parent)
    with recorder.recording(), open_store(store_at) as store:
        began = len(recorder.events)
        perform(store, plan(op, "a", 0, labels(store, "a"), size=30))
    disk = Disk()
    for event in recorder.events[:began]:
        disk.apply(event)
    choice, numbers, known = random.Random(1), itertools.count(), set[bytes]()
    for event in recorder.events[began:]:
        disk.apply(event)
        for tree in disk.losses(choice, limit=60):
            if tree.digest() not in known:
                known.add(tree.digest())
                built = place / f"disk{next(numbers)}"
                tree.build(built)
                if (built / "store" / "sessions").exists():
                    yield built / "store"


# --- expected findings -----------------------------------------------------------------------


def _required_findings(where: Path) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the findings that are required: possible kinds and the file."""
    sessions = where / "sessions"
    for path in sorted(sessions.rglob("*")):
        name = str(path.relative_to(where))
        if path.name.endswith(".purged"):
            yield (Kind.LEFTOVER,), name
        elif path.parent == sessions and path.suffix == ".jsonl":
            text = path.read_bytes()
            if not text:
                yield (Kind.EMPTY_FILE,), name
            elif not _ends_well(text):
                yield _OF_A_LOG, name


def _ends_well(text: bytes) -> bool:
    """Return whether the last line is a complete record, and the last of its batch."""
    *_, last = text.removesuffix(b"\n").split(b"\n")
    head = last.partition(b',"body":')[0]
    _, part, numbers = head.partition(b'"part":[')
    number, _, count = numbers.partition(b"]")[0].partition(b",")
    return _is_record(last) and (not part or number == count)


def _is_record(line: bytes) -> bool:
    return line[-_SIGNATURE:] == b',"crc":"%08x"}' % crc32(line[:-_SIGNATURE])


def _logs_with_holes(where: Path) -> set[str]:
    """Return the logs with a line that is not a record."""
    logs = where.glob("sessions/*.jsonl")
    return {
        str(log.relative_to(where))
        for log in logs
        if not all(_is_record(line) for line in log.read_bytes().split(b"\n") if line)
    }


def _possible_findings(where: Path) -> set[str]:
    """Return files that may be reported: logs with holes, and archives that may be spare."""
    archives = where.glob("sessions/archive/*/*")
    return _logs_with_holes(where) | {str(path.relative_to(where)) for path in archives}


def _bytes(where: Path) -> dict[str, bytes]:
    files = [path for path in where.rglob("*") if path.is_file()]
    return {path.name: path.read_bytes() for path in files if path.stat().st_size}


def _all_content_exists(before: dict[str, bytes], where: Path) -> bool:
    """Return whether all previous content still exists, perhaps under another name."""
    now = [path.read_bytes() for path in where.rglob("*") if path.is_file()]
    return all(any(found.startswith(text) for found in now) for text in before.values())
