"""Many processes or threads that write to one session, and checks of the stored messages."""

import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import stenolog
from support.crash.child_processes import Child, Nursery
from support.crash.reporting import Say
from support.crash.workload import label_of, message

KEY = "everybody"


def _run_with_compactor_and_readers(
    nursery: Nursery, where: Path, writers: list[Child], seed: int
) -> str:
    """Start all children at once, wait for their end and return what readers and compactor saw."""
    beside = [
        nursery.child("compact", where=where, key=KEY, seed=seed),
        nursery.child("read", where=where, key=KEY),
        nursery.child("read", where=where, key=KEY),
    ]
    with stenolog.open_store(str(where)) as store:
        store.add_message(KEY, "user", message("first.0")["content"])
    for child in [*beside, *writers]:
        child.go()
    for child in writers:
        _check_ended(child)
    for child in beside:
        child.go()
        _check_ended(child)
    (moves, *reads) = [child.lines()[-2].result for child in beside]
    assert moves[0] > 0
    assert moves[1] > 0
    assert all(made > 0 for made, _ in reads)
    return f"rounds, archived, undone: {moves}; reads, longest: {reads}"


def interrupt_appends(place: Path, say: Say, seed: int, *, wanted: int) -> None:
    """Write until `wanted` appends were interrupted."""
    where = place / "store"
    with Nursery() as nursery:
        child = nursery.child("write_interrupted", where=where, key=KEY, threads=8, seed=seed)
        child.go()
        while child.poll() and child.said("CUT") < wanted:
            time.sleep(0.005)
        child.go()
        _check_ended(child)
    cut = {line.result[0] for line in child.lines() if line.word == "CUT"}
    counts = _check_stored_once(where, [child], perhaps=cut)
    say(
        f"Ctrl-C: seed {seed}, {len(cut)} appends cut short, "
        f"{sum(not label.startswith('main') for label in cut)} of them of other threads, "
        f"{sum(counts.values())} acknowledged messages of {len(counts)} writers"
    )


def _check_ended(child: Child) -> None:
    status = child.finish(seconds=60)
    lines = child.lines()
    bugs = [line.result for line in lines if line.word == "BUG"]
    assert not bugs, bugs[0]
    assert status == 0
    assert any(line.word == "END" for line in lines), "it ended before its end"


def _check_stored_once(
    where: Path,
    writers: Iterable[Child],
    *,
    more: dict[str, int] | None = None,
    perhaps: Iterable[str] = (),
) -> dict[str, int]:
    """Return the number of acknowledged messages per writer.

    Checks that all of them are stored exactly once, and no others.
    """
    told: dict[str, int] = dict(more or {})
    order: defaultdict[str, list[int]] = defaultdict(list)
    for child in writers:
        for line in child.lines():
            if line.word == "ACK":
                label, seq = line.result
                assert label not in told, f"{label} was acknowledged twice"
                told[label] = seq
                order[label.partition("-")[0]].append(seq)
    for name, seqs in order.items():
        assert seqs == sorted(seqs), f"the order of {name} was not kept"
    with stenolog.open_store(str(where)) as store:
        found = [(label_of(m.to_dict()), m.seq) for m in store.get_history(KEY, full=True)]
        assert store.info(KEY).lost == 0
    labels = [label for label, _ in found]
    assert len(labels) == len(set(labels)), "something is there twice"
    assert {label: seq for label, seq in found if label in told} == told
    assert set(labels) <= told.keys() | set(perhaps)
    assert [seq for _, seq in found] == list(range(1, len(found) + 1))
    return {name: len(seqs) for name, seqs in order.items()}


def write_in_processes(place: Path, say: Say, seed: int) -> None:
    """Let 8 processes write while one compacts and two read."""
    where = place / "store"
    with Nursery() as nursery:
        writers = [
            nursery.child("write", where=where, key=KEY, name=f"w{number}", count=500)
            for number in range(8)
        ]
        told = _run_with_compactor_and_readers(nursery, where, writers, seed)
    counts = _check_stored_once(where, writers, more={"first.0": 1})
    assert sum(counts.values()) == 4_000
    say(f"8 writers, 4,000 messages; {told}")


def write_in_threads(place: Path, say: Say, seed: int) -> None:
    """Let 64 threads of two processes write while one process compacts and two read."""
    where = place / "store"
    with Nursery() as nursery:
        writers = [
            nursery.child("write_by_threads", where=where, key=KEY, name=name, threads=32, count=25)
            for name in "ab"
        ]
        told = _run_with_compactor_and_readers(nursery, where, writers, seed)
    counts = _check_stored_once(where, writers, more={"first.0": 1})
    assert len(counts) == 64
    assert set(counts.values()) == {25}
    say(f"64 threads in 2 processes: {sum(counts.values())} messages; {told}")


def fork_while_threads_append(place: Path, say: Say) -> None:
    """Fork 20 times in a process whose threads append."""
    where = place / "store"
    with Nursery() as nursery:
        forking = nursery.child("fork_while_writing", where=where, key=KEY, forks=20, count=5)
        apart = nursery.child("write", where=where, key=KEY, name="apart", count=300)
        forking.go()
        apart.go()
        for child in (forking, apart):
            _check_ended(child)
    counts = _check_stored_once(where, [forking, apart])
    say(f"20 forks under 4 threads: {sum(counts.values())} messages of {len(counts)} writers")
    assert [counts[f"f{number}"] for number in range(20)] == [5] * 20
