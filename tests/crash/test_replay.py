"""Recorded runs, replayed on every disk that a power cut may leave."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from crash.conftest import Say
from crash.sequences import Case, Sequencer, Tally, all_cases, judge_all, sample


def test_p1_p2_a_sample_of_sequences_on_every_disk_that_is_left(
    quick_disk: Path, say: Say, seed: int
) -> None:
    tally = _judge(sample(seed, 130), quick_disk, seed)
    say(f"replay: seed {seed}, {tally}")
    assert not tally.violations, "\n".join(tally.violations[:5])


@pytest.mark.full
def test_p1_p2_all_sequences_of_up_to_three_operations_on_every_disk_that_is_left(
    quick_disk: Path, say: Say, seed: int
) -> None:
    tally = _judge(list(all_cases()), quick_disk, seed)
    say(f"replay: seed {seed}, {tally}")
    assert not tally.violations, "\n".join(tally.violations[:5])


@pytest.mark.parametrize("op", ["add_message", "add_messages", "set_summary", "create"])
def test_a_store_that_does_not_sync_its_files_is_caught(quick_disk: Path, op: str) -> None:
    tally = Sequencer(quick_disk).judge(Case("talk", (op,), blind_to="files"), 1)
    assert tally.violations


@pytest.mark.parametrize("ops", [("create",), ("checkpoint", "compact", "add_message")])
def test_a_store_that_does_not_sync_its_folders_is_caught(
    quick_disk: Path, ops: tuple[str, ...]
) -> None:
    tally = Sequencer(quick_disk).judge(Case("talk", ops, blind_to="folders"), 1)
    assert tally.violations


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
