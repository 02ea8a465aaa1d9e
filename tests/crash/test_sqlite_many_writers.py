"""Tests many concurrent writers of one SQLite session, and the store's own write lock.

With sixteen writing processes, SQLite's own locking lets some starve for seconds and then fail.
Here none fails, and the longest wait is printed. Uses the harness of test_many_writers.py.
"""

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

import stenolog
from support.crash import sqlite_writer
from support.crash.many_writers import (
    fork_while_threads_append,
    interrupt_appends,
    write_in_processes,
    write_in_threads,
)
from support.crash.reporting import Say


def _sqlite(place: Path) -> Path:
    return Path(f"sqlite:{place}")


@pytest.mark.full
def test_p7_eight_writing_processes_lose_nothing_during_compaction(
    tmp_path: Path, say: Say, seed: int
) -> None:
    write_in_processes(_sqlite(tmp_path), say, seed)


def test_p7_sixty_four_writing_threads_lose_nothing_during_compaction(
    tmp_path: Path, say: Say, seed: int
) -> None:
    write_in_threads(_sqlite(tmp_path), say, seed)


def test_p7_fork_during_appends_of_other_threads_loses_nothing(tmp_path: Path, say: Say) -> None:
    fork_while_threads_append(_sqlite(tmp_path), say)


def test_p7_ctrl_c_during_appends_loses_no_acknowledged_message(
    tmp_path: Path, say: Say, seed: int
) -> None:
    interrupt_appends(_sqlite(tmp_path), say, seed, wanted=30)


@pytest.mark.full
def test_p7_five_hundred_ctrl_c_during_appends_lose_no_acknowledged_message(
    tmp_path: Path, say: Say, seed: int
) -> None:
    interrupt_appends(_sqlite(tmp_path), say, seed, wanted=500)


# --- the write lock --------------------------------------------------------------------------


def test_p7_sixteen_writing_processes_all_succeed(tmp_path: Path, say: Say) -> None:
    _write_at_once(tmp_path / "sessions.db", say, writers=16, count=60)


@pytest.mark.full
def test_p7_sixteen_writing_processes_all_succeed_in_a_long_run(tmp_path: Path, say: Say) -> None:
    _write_at_once(tmp_path / "sessions.db", say, writers=16, count=2_000)


def _write_at_once(file: Path, say: Say, *, writers: int, count: int) -> None:
    stenolog.SQLiteStore(file).close()
    command = [sys.executable, sqlite_writer.__file__, str(file), str(count)]
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(number)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for number in range(writers)
        ]
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        began = time.monotonic()
        for process in running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        told = [json.loads(process.communicate()[0]) for process in running]
        took = time.monotonic() - began
    say(
        f"{writers} processes, {writers * count:,} appends, {writers * count / took:,.0f} a "
        f"second, worst wait {max(one['worst'] for one in told) * 1000:.0f} ms"
    )
    # No StoreBusy or other error, and no process had to wait inside SQLite.
    assert [one["failed"] for one in told] == [None] * writers
    assert [one["waits"] for one in told] == [0] * writers
    with stenolog.SQLiteStore(file) as store:
        assert sum(store.info(key).count for key in store.list_sessions()) == writers * count
        shared = [message.content for message in store.get_history("everybody")]
    for number in range(writers):
        own = [text for text in shared if text.startswith(f"{number}.")]
        assert own == [f"{number}.{turn}" for turn in range(1, count, 2)]
