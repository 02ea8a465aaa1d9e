"""Counts the system calls of each operation with strace in a process that does nothing else."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from support import needs

_CHILD = """
import os, sys
from stenolog import open_store

folder, history, operation, turns = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
message = {"role": "user", "content": "Good morning. What is on my list for today?"}

def mark():
    os.path.lexists("/marked-by-the-test")

with open_store(folder) as store:
    for _ in range(0, history, 500):
        store.add_messages("k", [message] * min(history, 500))
    for turn in range(4):
        store.set_summary("k", f"before {turn}")
    calls = {
        "add_full_message": lambda turn: store.add_full_message("k", message),
        "add_messages": lambda turn: store.add_messages("k", [message] * 20),
        "truncate_history": lambda turn: store.truncate_history("k", 30 - turn),
        "checkpoint": lambda turn: store.checkpoint("k", summary=f"now {turn}", upto=turn),
        "set_summary": lambda turn: store.set_summary("k", f"now {turn}"),
        "hide": lambda turn: store.admin.hide("k", 2 * turn, 2 * turn),
        "undo": lambda turn: store.undo("k"),
        "get_history": lambda turn: store.get_history("k", last=20),
        "delete": lambda turn: store.delete(f"d{turn}"),
    }
    for turn in range(turns if operation == "delete" else 0):
        store.add_messages(f"d{turn + 1}", [message] * history)
        store.fork(f"d{turn + 1}", f"trash{turn}")
        store.delete(f"trash{turn}")
    if operation == "get_history":
        store.close()
        store = open_store(folder, read_only=True)
    for turn in range(1, turns + 1):
        mark()
        calls[operation](turn)
    mark()
    store.close()
"""

_SHORT, _LONG = 40, 20_000
_STATS = {"stat", "newfstatat", "statx", "fstat"}


def _calls(
    folder: Path, operation: str, *, history: int = _SHORT, turns: int = 3
) -> list[Counter[str]]:
    """Return the calls on files and descriptors that each turn of the operation made."""
    needs.tool("strace")
    needs.kernel("ptrace")
    log = folder / "calls"
    arguments = [str(folder / "workspace"), str(history), operation, str(turns)]
    child = [sys.executable, "-c", _CHILD, *arguments]
    subprocess.run(
        ["strace", "-f", "-e", "trace=%file,%desc", "-o", str(log), *child],
        check=True,
        timeout=120,
    )
    return [_names(part) for part in log.read_text().split("/marked-by-the-test")[1:-1]]


def _names(text: str) -> Counter[str]:
    # The first line is the rest of one mark, the last one the start of the next.
    calls = [re.match(r"\d+ +(\w+)\(", line) for line in text.split("\n")[1:-1]]
    names = [call[1] for call in calls if call is not None]
    # Python allocates memory at any time.
    return Counter(name for name in names if name not in ("mmap", "munmap"))


@pytest.mark.parametrize("history", [_SHORT, _LONG])
@pytest.mark.parametrize(
    "operation",
    [
        "add_full_message",
        "add_messages",
        "truncate_history",
        "checkpoint",
        "set_summary",
        "hide",
        "undo",
    ],
)
def test_p9_change_is_one_write_and_one_sync_at_any_length(
    tmp_path: Path, operation: str, history: int
) -> None:
    turns = _calls(tmp_path, operation, history=history)
    assert len(turns) == 3
    for seen in turns:
        assert seen.pop("write") == 1
        assert seen.pop("fdatasync") == 1
        assert seen.pop("flock") == 2, "locked once and unlocked once"
        assert sum(seen.pop(name, 0) for name in _STATS) in (1, 2)
        assert seen == {}, "nothing else is asked of the kernel"


def test_p9_state_records_are_part_of_the_write_of_an_append(tmp_path: Path) -> None:
    # More than twice as many appends as fit between two state records.
    turns = _calls(tmp_path, "add_full_message", turns=600)
    log = (tmp_path / "workspace" / "sessions" / "k.jsonl").read_bytes()
    assert log.count(b'\n{"kind":"state"') >= 3
    assert [(seen["write"], seen["fdatasync"]) for seen in turns] == [(1, 1)] * 600
    assert sum((Counter(seen) for seen in turns), Counter()).keys() <= {
        "write",
        "fdatasync",
        "flock",
        *_STATS,
    }


def test_p9_cost_of_reading_the_last_messages_does_not_depend_on_the_length(
    tmp_path: Path,
) -> None:
    counts = []
    for history in (_SHORT, _LONG):
        folder = tmp_path / str(history)
        folder.mkdir()
        cold, warm, again = _calls(folder, "get_history", history=history)
        assert set(warm) <= _STATS, "what is in memory is not read again"
        assert warm == again
        counts.append(sum(cold.values()))
        read = sum(map(int, re.findall(r"pread64\(.* = (\d+)", (folder / "calls").read_text())))
        assert read < 512 * 1024
    assert (tmp_path / str(_LONG) / "workspace" / "sessions" / "k.jsonl").stat().st_size > 3 << 20
    # One more read if the state is farther from the end than the first read reaches.
    assert counts[1] <= counts[0] + 1


@pytest.mark.parametrize("history", [_SHORT, 2_000])
def test_p2_delete_is_one_rename(tmp_path: Path, history: int) -> None:
    for seen in _calls(tmp_path, "delete", history=history):
        renames = {name: seen.pop(name) for name in list(seen) if name.startswith("rename")}
        assert list(renames.values()) == [1]
        assert seen.pop("fsync") >= 2, "of the folder it leaves and of the one it comes to"
        assert not seen.keys() & {"write", "pwrite64", "fdatasync", "unlink", "unlinkat", "pread64"}
