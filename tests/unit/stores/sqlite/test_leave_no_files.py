"""Tests that a reader with `leave_no_files` creates and changes no file next to the database."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stenolog.errors import ReadOnly, StoreUnavailable
from stenolog.stores.sqlite import SQLiteStore
from support.viewing import state_of

_WRITER = """
import os, sys
from stenolog.stores.open_store import open_store
store = open_store("sqlite:" + sys.argv[1])
for line in sys.stdin:
    if line.strip() == "die":
        os.kill(os.getpid(), 9)
    store.add_message("s", "user", line.strip())
    print("stored", flush=True)
"""


class _Writer:
    """Another process that writes to the database."""

    def __init__(self, file: Path) -> None:
        command = [sys.executable, "-c", _WRITER, str(file)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def say(self, words: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{words}\n")
        self.process.stdin.flush()
        if words == "die":
            self.process.wait(60)
        else:
            assert self.process.stdout.readline() == "stored\n"

    def end(self) -> None:
        self.process.communicate()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "place" / "steno.db"
    with SQLiteStore(made) as store:
        store.add_message("s", "user", "one")
    return made


@pytest.fixture
def writer(file: Path) -> Iterator[_Writer]:
    one = _Writer(file)
    yield one
    one.end()


def texts(store: SQLiteStore) -> list[str]:
    return [message.content for message in store.get_history("s")]


def test_closed_database_is_read_without_a_log(file: Path) -> None:
    before = state_of(file.parent)
    with SQLiteStore(file, read_only=True, leave_no_files=True) as store:
        assert texts(store) == ["one"]
        assert list(store.admin.stamps()) == ["s"]
        with pytest.raises(ReadOnly):
            store.add_message("s", "user", "two")
        assert state_of(file.parent) == before
    assert state_of(file.parent) == before


def test_messages_of_a_writer_are_read_and_its_files_do_not_change(
    file: Path, writer: _Writer
) -> None:
    with SQLiteStore(file, read_only=True, leave_no_files=True) as store:
        expected = ["one"]
        for words in ("two", "three"):
            writer.say(words)
            expected.append(words)
            before = state_of(file.parent)
            assert texts(store) == expected
            assert state_of(file.parent) == before


def test_log_of_a_killed_writer_is_read_as_it_is(file: Path, writer: _Writer) -> None:
    writer.say("two")
    writer.say("die")
    before = state_of(file.parent)
    assert "steno.db-wal" in before
    with SQLiteStore(file, read_only=True, leave_no_files=True) as store:
        assert texts(store) == ["one", "two"]
    assert state_of(file.parent) == before
    file.with_name("steno.db-shm").unlink()
    before = state_of(file.parent)
    with pytest.raises(StoreUnavailable, match="write-ahead log"):
        SQLiteStore(file, read_only=True, leave_no_files=True)
    assert state_of(file.parent) == before
