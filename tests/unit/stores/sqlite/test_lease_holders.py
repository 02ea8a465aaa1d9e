"""Tests the detection of running, ended and unknown processes."""

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from stenolog.stores.sqlite import lease_holders
from stenolog.stores.sqlite.lease_holders import (
    Process,
    current_process,
    has_ended,
)
from support.namespaces import in_namespace

PATIENCE = 120.0

_WHO = (
    "import msgspec; from stenolog.stores.sqlite import lease_holders as h; "
    "print(msgspec.json.encode(h.current_process()).decode(), flush=True); "
)
_WAITS = _WHO + "input()"
# The first thread ends, and another one continues.
_FIRST_THREAD_ENDS = (
    "import ctypes, threading; threading.Thread(target=input).start(); "
    + _WHO
    + f"ctypes.PyDLL(None).syscall({{'x86_64': 60}}.get('{os.uname().machine}', 93), 0)"
)


@contextmanager
def _child(program: str, *before: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a process that waits until its input ends; yield it and its description of itself."""
    with subprocess.Popen(
        [*before, sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def _parsed(words: str) -> Process:
    return msgspec.json.decode(words, type=Process)


def _here() -> Process:
    found = current_process()
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def _linux() -> None:
    if sys.platform != "linux":
        pytest.skip("NOT RUN: there is no /proc")


def test_process_is_identified_by_number_and_start_time() -> None:
    with _child(_WAITS) as (child, words):
        other = _parsed(words)
        assert other.pid == child.pid
        assert _here().pid == os.getpid()
        assert other == replace(_here(), pid=other.pid, start_time=other.start_time)
        assert other.start_time >= _here().start_time


def test_process_whose_number_was_reused_has_ended() -> None:
    with _child(_WAITS) as (_, words):
        living = _parsed(words)
        assert has_ended(replace(living, start_time=living.start_time - 1))


def test_process_runs_while_any_of_its_threads_runs() -> None:
    with _child(_FIRST_THREAD_ENDS) as (child, words):
        limit = time.monotonic() + PATIENCE
        while b") Z " not in (stat := _stat(child.pid)):
            assert time.monotonic() < limit, stat
        assert not has_ended(_parsed(words))


def _stat(number: int) -> bytes:
    return Path(f"/proc/{number}/stat").read_bytes()


def test_process_name_that_looks_like_fields_is_parsed_correctly() -> None:
    before = _stat(os.getpid()).partition(b"(")[2].rpartition(b")")[0]
    set_name = ctypes.CDLL(None).prctl
    assert set_name(15, b"x) Z 1 (", 0, 0, 0) == 0
    try:
        assert not has_ended(_here())
    finally:
        set_name(15, before, 0, 0, 0)


def test_forked_child_is_another_process() -> None:
    here = _here()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, msgspec.json.encode(current_process()))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        other = _parsed(said.read())
    assert not os.waitpid(child, 0)[1]
    assert (other.pid, here.pid) == (child, os.getpid())


def test_hidden_process_does_not_count_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    here = _here()
    monkeypatch.setattr(lease_holders, "_PROC_FOLDER", lease_holders._PROC_FOLDER / "nowhere")
    assert not has_ended(replace(here, start_time=0))


@pytest.mark.parametrize("number", [0, 10**30])
def test_impossible_process_number_does_not_count_as_ended(number: int) -> None:
    assert not has_ended(replace(_here(), pid=number))


def test_no_process_is_identified_if_proc_belongs_to_another_namespace() -> None:
    with _child(_WAITS, *in_namespace()) as (_, words):
        assert words == "null"
