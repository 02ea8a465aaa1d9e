"""Tests recorded runs, replayed on every disk that a power cut may leave."""

import itertools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from support.crash.reporting import Say
from support.crash.sequences import Case, Sequencer, Tally, all_cases, judge_all, sample

PARTS: Final = 8
"""Number of parts: all sequences take an hour on two cores."""


def test_p1_p2_sampled_sequences_survive_every_power_cut_state(
    quick_disk: Path, say: Say, seed: int
) -> None:
    tally = _judge(sample(seed, 130), quick_disk, seed)
    say(f"replay: seed {seed}, {tally}")
    assert not tally.violations, "\n".join(tally.violations[:5])


@pytest.mark.parametrize("op", ["fork", "delete", "restore", "purge_before", "purge"])
def test_p1_p2_lifecycle_calls_survive_every_power_cut_state(
    quick_disk: Path, say: Say, op: str
) -> None:
    cases = [Case(ground, (op,)) for ground in ("torn", "compacted", "trashed", "recreated")]
    # Killed half way, then repeated by another process, or followed by another operation.
    ground = "trashed" if op == "restore" else "compacted"
    calls = {
        "fork": range(2, 11, 4),
        "delete": range(0, 8, 2),
        "restore": range(1, 16, 2),
        "purge_before": range(2, 15, 5),
        "purge": range(0, 19, 3),
    }
    later = (op, "clear", "add_message") if op == "delete" else (op, "clear")
    for call, after in itertools.product(calls[op], later):
        cases.append(Case(ground, (op, after), kill=(0, call)))
    tally = judge_all(cases, quick_disk, 1)
    say(f"replay of {op}: {tally}")
    assert not tally.violations, "\n".join(tally.violations[:5])


@pytest.mark.full
def test_p1_p2_an_eighth_of_all_sequences_survives_every_power_cut_state(
    quick_disk: Path, say: Say, seed: int
) -> None:
    _judge_part(seed % PARTS, quick_disk, say, seed)


@pytest.mark.replay
@pytest.mark.parametrize("part", range(PARTS))
def test_p1_p2_all_sequences_of_three_operations_survive_every_power_cut_state(
    quick_disk: Path, say: Say, seed: int, part: int
) -> None:
    _judge_part(part, quick_disk, say, seed)


@pytest.mark.parametrize("op", ["add_message", "add_messages", "set_summary", "create", "fork"])
def test_replay_detects_a_store_that_does_not_sync_its_files(quick_disk: Path, op: str) -> None:
    tally = Sequencer(quick_disk).judge(Case("talk", (op,), blind_to="files"), 1)
    assert tally.violations


@pytest.mark.parametrize(
    "ops",
    [
        ("create",),
        ("checkpoint", "compact", "add_message"),
        ("fork",),
        ("delete",),
        ("delete", "restore"),
        ("purge",),
    ],
)
def test_replay_detects_a_store_that_does_not_sync_its_folders(
    quick_disk: Path, ops: tuple[str, ...]
) -> None:
    tally = Sequencer(quick_disk).judge(Case("talk", ops, blind_to="folders"), 1)
    assert tally.violations


def _judge_part(part: int, place: Path, say: Say, seed: int) -> None:
    cases = list(all_cases(seed))[part::PARTS]
    tally = _judge(cases, place, seed)
    say(f"replay: seed {seed}, part {part} of {PARTS}, {len(cases)} sequences, {tally}")
    assert not tally.violations, "\n".join(tally.violations[:5])


def _judge(cases: list[Case], place: Path, seed: int) -> Tally:
    workers = min(os.cpu_count() or 1, 8)
    tally = Tally()
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawned) as pool:
        shares = [cases[number :: workers * 4] for number in range(workers * 4)]
        places = [place / f"share{number}" for number in range(len(shares))]
        for found in pool.map(judge_all, shares, places, [seed] * len(shares)):
            tally.add(found)
    return tally
