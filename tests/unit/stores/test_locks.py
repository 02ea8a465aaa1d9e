"""Tests locks between threads in a forked child, and locks on a file that is replaced."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import stenolog
from stenolog.stores.disk import replace_file

_FORKED_WHILE_HELD = """
import os, sys, threading
from stenolog.stores.locks import ThreadLock
lock, held, done = ThreadLock(), threading.Event(), threading.Event()

def hold():
    with lock:
        held.set()
        done.wait()

holder = threading.Thread(target=hold)
holder.start()
held.wait()
pid = os.fork()
if pid == 0:
    with lock:
        os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
done.set()
holder.join()
"""

_FORKED_WHILE_WRITING = """
import os, sys, threading
import stenolog
sessions = stenolog.SessionManager(sys.argv[1])
stop = threading.Event()

def write():
    number = 0
    while not stop.is_set():
        number += 1
        sessions.add_message("parent", "user", str(number))

writer = threading.Thread(target=write)
writer.start()
for number in range(5):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if sessions.add_message(f"child {number}", "user", "x") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
stop.set()
writer.join()
sessions.close()
"""

_FORKED_INSIDE_A_CALL = """
import os, threading
from stenolog.stores.in_memory import InMemoryStore
store, held, done = InMemoryStore(), threading.Event(), threading.Event()

def hold():
    with store._locked_store():
        held.set()
        done.wait()

holder = threading.Thread(target=hold)
holder.start()
held.wait()
pid = os.fork()
if pid == 0:
    store.add_message("child", "user", "x")
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
done.set()
holder.join()
"""


@pytest.mark.parametrize(
    "program", [_FORKED_WHILE_HELD, _FORKED_WHILE_WRITING, _FORKED_INSIDE_A_CALL]
)
def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent(
    tmp_path: Path, program: str
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)]
    subprocess.run(command, check=True, timeout=60)


@pytest.mark.parametrize("place", ["sqlite", "file"])
def test_p7_replaced_file_is_closed_before_it_gets_its_name(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Closing any descriptor of a database drops the locks that SQLite holds on it in this process.
    open_at_rename: list[str] = []
    rename = os.rename

    def checked_rename(source: str, target: str, **folders: int) -> None:
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                open_file = str(descriptor.readlink())
                if open_file.endswith(f"/{source}"):
                    open_at_rename.append(open_file)
        rename(source, target, **folders)

    monkeypatch.setattr("stenolog.stores.disk.os.rename", checked_rename)
    if place == "sqlite":
        with stenolog.open_store(f"sqlite:{tmp_path}/s.db") as store:
            store.add_message("a:1", "user", "hello")
    else:
        folder = os.open(tmp_path, os.O_RDONLY)
        replace_file(folder, "name", b"text")
        os.close(folder)
        assert (tmp_path / "name").read_bytes() == b"text"
    assert open_at_rename == []
