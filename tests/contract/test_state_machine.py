"""Compares a store with the model under random calls, with crashes and torn writes in between."""

import logging
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis.stateful import run_state_machine_as_test

import stenolog
from stenolog import codec
from stenolog.records import FORMAT, Change, State
from stenolog.stores import file_names
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from support.state_machine import StoreMachine, check_runs, machine_settings

AT = "2026-01-01T00:00:00.000000Z"


class JSONLMachine(StoreMachine):
    supports_torn_writes: ClassVar[bool] = True

    def __init__(self) -> None:
        self._torn: dict[Path, int] = {}
        super().__init__()

    def open(self, path: Path) -> Store:
        return stenolog.open_store(path)

    def add_torn_write(self, path: Path, key: str, *, next_seq: int, kind: int, cut: float) -> int:
        file = path / "sessions" / file_names.log_name(key)
        if file.exists() and self._torn.get(file) == file.stat().st_size:
            # Not torn twice: a second writer would have moved the first torn bytes aside.
            return 0
        if not file.exists() or b"\n" not in file.read_bytes():
            state = State(format=FORMAT, key=key, uid="0" * 16, generation=1, created=AT)
            file.write_bytes(_part(codec.control_line("state", 1, AT, state), cut))
            return 0
        text, used = _torn_write(next_seq, kind, cut)
        with file.open("ab") as log:
            log.write(text)
        self._torn[file] = file.stat().st_size
        return used


def _torn_write(seq: int, kind: int, cut: float) -> tuple[bytes, int]:
    """Return bytes that a killed writer may leave, and how many seqs they use up."""
    one, two, three = (
        codec.message_line(seq + index, AT, b'{"role":"user"}', joined=True, part=(index + 1, 3))
        for index in range(3)
    )
    change = Change(op="replace", number=10_000, floor=seq, hidden=[], appended=(seq, seq))
    match kind:
        case 0:
            return _part(codec.message_line(seq, AT, b'{"role":"user"}', once="t1"), cut), 0
        case 1:
            return b"\xff\xfe garbage {" * (1 + int(cut * 20)), 0
        case 2:
            return b"\0" * (1 + int(cut * 300)), 0
        case 3:
            return one + _part(two, cut), 1
        case 4:
            return one + two, 2
        case 5:
            return one + two + _part(three, cut), 2
        case 6:
            return _part(codec.control_line("change", seq, AT, change), cut), 0
        case 7:
            message = codec.message_line(seq, AT, b"{}", joined=True, part=(2, 2))
            return codec.control_line("change", seq, AT, change, part=(1, 2)) + _part(
                message, cut
            ), 0
        case 8:
            return one[:40] + b"#" + one[41:], 1
        case _:
            return b"", 0


def _part(line: bytes, cut: float) -> bytes:
    """Return the start of a line, too short to be complete without its newline."""
    return line[: 1 + int(cut * (len(line) - 4))]


class InMemoryMachine(StoreMachine):
    persistent: ClassVar[bool] = False

    def open(self, path: Path) -> Store:  # noqa: ARG002 - it lives in no folder
        return InMemoryStore()


@pytest.mark.parametrize(
    ("machine", "runs"),
    [
        (JSONLMachine, 40),
        (InMemoryMachine, 20),
        pytest.param(JSONLMachine, 200, marks=pytest.mark.slow),
    ],
)
def test_store_behaves_like_the_model(
    machine: type[StoreMachine],
    runs: int,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Each torn write logs a warning, thousands of times.
    caplog.set_level(logging.CRITICAL, "stenolog")
    # Hypothesis starts with shorter runs and adds some in between, so it gets more examples.
    run_state_machine_as_test(machine, settings=machine_settings(runs * 3 // 2 + 10))
    rules = ("torn_crash", "crash", "reopen", "switch") if machine.persistent else ()
    check_runs(machine, runs, capsys, *rules)
