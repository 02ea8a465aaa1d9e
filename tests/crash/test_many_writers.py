"""Tests many concurrent writers of one session.

Processes write, compact and read; threads append; a process forks while it writes; Ctrl-C
interrupts appends. Every acknowledged message is stored exactly once, each writer's order is kept,
and nothing hangs.
"""

from pathlib import Path

import pytest

from support.crash.many_writers import (
    fork_while_threads_append,
    interrupt_appends,
    write_in_processes,
    write_in_threads,
)
from support.crash.reporting import Say


def test_p7_eight_writing_processes_lose_nothing_during_compaction(
    tmp_path: Path, say: Say, seed: int
) -> None:
    write_in_processes(tmp_path, say, seed)


def test_p7_sixty_four_writing_threads_lose_nothing_during_compaction(
    tmp_path: Path, say: Say, seed: int
) -> None:
    write_in_threads(tmp_path, say, seed)


def test_p7_fork_during_appends_of_other_threads_loses_nothing(tmp_path: Path, say: Say) -> None:
    fork_while_threads_append(tmp_path, say)


def test_p7_ctrl_c_during_appends_loses_no_acknowledged_message(
    tmp_path: Path, say: Say, seed: int
) -> None:
    interrupt_appends(tmp_path, say, seed, wanted=30)


@pytest.mark.full
def test_p7_five_hundred_ctrl_c_during_appends_lose_no_acknowledged_message(
    tmp_path: Path, say: Say, seed: int
) -> None:
    interrupt_appends(tmp_path, say, seed, wanted=500)
