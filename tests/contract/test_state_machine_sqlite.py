"""Compares SQLite and the model, and SQLite, JSONL and the model, under random calls."""

import logging
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, cast

import apsw
import pytest
from hypothesis.stateful import rule, run_state_machine_as_test

import stenolog
from stenolog.stores.base import Store
from support.paired_stores import PairedStores
from support.state_machine import StoreMachine, check_runs, machine_settings


class SQLiteMachine(StoreMachine):
    """SQLite, where a torn write is the rest that a killed writer leaves at the end of the log."""

    supports_torn_writes: ClassVar[bool] = True
    left: ClassVar[int] = 0
    """How often the next process that opened the database found data in its log."""

    def open(self, path: Path) -> Store:
        return stenolog.SQLiteStore(path / "sessions.db")

    @rule()
    def crash(self) -> None:
        """Turn the machine off and on again."""
        self._die()
        super().crash()

    def add_torn_write(self, path: Path, key: str, *, next_seq: int, kind: int, cut: float) -> int:  # noqa: ARG002 - of the hook
        self._die(lambda log: torn(log, kind, cut))
        return 0

    def _die(self, spoilt: Callable[[bytes], bytes] = bytes) -> None:
        """Continue with a copy of the files on disk.

        SQLite's shared memory contains the end of the log. While a process has it open, the log
        itself is not read, so the copy leaves it out.
        """
        place = Path(tempfile.mkdtemp(dir=self._folder.name))
        shutil.copy(self._path / "sessions.db", place)
        log = self._path / "sessions.db-wal"
        if log.exists():
            text = spoilt(log.read_bytes())
            (place / log.name).write_bytes(text)
            type(self).left += bool(text)
        while self._open_stores:
            self._open_stores.pop().close()
        self._path = place


def torn(log: bytes, kind: int, cut: float) -> bytes:
    """Return the log with bytes after its last complete frame, as a killed writer leaves them."""
    if len(log) < _HEADER:
        return log
    end, sums = whole_frames(log)
    salts, first = log[16:24], log[_HEADER : _HEADER + _FRAME]
    page = struct.pack(">II", 1, 0)  # the first page of the database, without a commit
    body = b"\xff" * _PAGE
    sums = checksums(page + body, sums, order=_order(log))
    uncommitted = page + salts + struct.pack(">II", *sums) + body
    tails = [first[: int(len(first) * cut)], first, uncommitted, uncommitted[:-1], b"\0" * 5000]
    return log[:end] + [*tails, b"\xff" * 30][kind % 6]


_HEADER, _FRAME, _PAGE = 32, 24 + 4096, 4096


def _order(log: bytes) -> str:
    return ">" if log[3] & 1 else "<"


def whole_frames(log: bytes) -> tuple[int, tuple[int, int]]:
    """Return the end of the valid frames and their checksums."""
    end = _HEADER
    sums = (int.from_bytes(log[24:28], "big"), int.from_bytes(log[28:32], "big"))
    while len(frame := log[end : end + _FRAME]) == _FRAME and frame[8:16] == log[16:24]:
        after = checksums(frame[:8] + frame[24:], sums, order=_order(log))
        if struct.pack(">II", *after) != frame[16:24]:
            break
        end, sums = end + _FRAME, after
    return end, sums


def checksums(text: bytes, sums: tuple[int, int], *, order: str) -> tuple[int, int]:
    """Compute https://www.sqlite.org/fileformat2.html#checksum_algorithm."""
    one, two = sums
    for first, second in struct.iter_unpack(f"{order}II", text):
        one = (one + first + two) & 0xFFFFFFFF
        two = (two + second + one) & 0xFFFFFFFF
    return one, two


class TogetherMachine(StoreMachine):
    """SQLite and JSONL as one store."""

    def open(self, path: Path) -> Store:
        sqlite, jsonl = path / "sqlite" / "sessions.db", path / "jsonl"
        both = PairedStores(stenolog.SQLiteStore(sqlite), stenolog.JSONLStore(jsonl))
        return cast(Store, both)


@pytest.mark.parametrize(
    ("machine", "runs"),
    [
        (SQLiteMachine, 8),
        (TogetherMachine, 5),
        pytest.param(SQLiteMachine, 20, marks=pytest.mark.slow),
        pytest.param(TogetherMachine, 12, marks=pytest.mark.slow),
    ],
)
def test_sqlite_and_jsonl_behave_like_the_model(
    machine: type[StoreMachine],
    runs: int,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    _run(machine, runs, capsys, caplog)


@pytest.mark.full
@pytest.mark.parametrize(("machine", "runs"), [(SQLiteMachine, 400), (TogetherMachine, 400)])
def test_sqlite_and_jsonl_behave_like_the_model_in_long_runs(
    machine: type[StoreMachine],
    runs: int,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    _run(machine, runs, capsys, caplog)


def _run(
    machine: type[StoreMachine],
    runs: int,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "stenolog")
    before = machine.left if issubclass(machine, SQLiteMachine) else 0
    with _recoveries() as recovered:
        run_state_machine_as_test(machine, settings=machine_settings(runs * 2))
    check_runs(machine, runs, capsys, "crash", "reopen", "switch")
    if issubclass(machine, SQLiteMachine):
        assert machine.rule_counts["torn_crash"] > 0
        # SQLite itself reports that it recovered the log, which this test is about.
        assert len(recovered) >= machine.left - before > 0


@contextmanager
def _recoveries() -> Iterator[list[str]]:
    """Record SQLite's messages about recovered logs."""
    found: list[str] = []

    def told(code: int, words: str) -> None:
        if code == apsw.SQLITE_NOTICE_RECOVER_WAL:
            found.append(words)

    apsw.config(apsw.SQLITE_CONFIG_LOG, told)
    try:
        yield found
    finally:
        apsw.config(apsw.SQLITE_CONFIG_LOG, None)
