"""Processes that are there, that have ended, and of which nothing can be told."""

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from stenolog.stores.sqlite import processes
from stenolog.stores.sqlite.processes import Process, current, has_ended, parse
from support.namespaces import in_namespace

PATIENCE = 120.0

_WHO = "from stenolog.stores.sqlite import processes; print(processes.current(), flush=True); "
_WAITS = _WHO + "input()"
# The first thread ends, and another one goes on.
_FIRST_THREAD_ENDS = (
    "import ctypes, threading; threading.Thread(target=input).start(); "
    + _WHO
    + f"ctypes.PyDLL(None).syscall({{'x86_64': 60}}.get('{os.uname().machine}', 93), 0)"
)


@contextmanager
def _child(program: str, *before: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that waits until its input ends, and what it says of itself."""
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
    found = parse(words)
    assert found is not None
    return found


def _here() -> Process:
    found = current()
    assert found is not None
    return found


def _until_ended(number: int) -> None:
    """Until it has ended, though nobody has waited for it."""
    limit = time.monotonic() + PATIENCE
    while os.waitid(os.P_PID, number, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        assert time.monotonic() < limit


@pytest.fixture(autouse=True)
def _linux() -> None:
    if sys.platform != "linux":
        pytest.skip("NOT RUN: there is no /proc")


def test_a_process_is_told_by_its_number_and_its_start() -> None:
    with _child(_WAITS) as (child, words):
        other = _parsed(words)
        assert other.number == child.pid
        assert _here().number == os.getpid()
        assert _here().can_check(other)
        assert other.started >= _here().started
        assert _parsed(str(other)) == other


def test_one_that_lives_is_not_gone() -> None:
    assert not has_ended(_here())
    with _child(_WAITS) as (_, words):
        assert not has_ended(_parsed(words))


@pytest.mark.parametrize("heard", [True, False], ids=["waited for", "not waited for"])
def test_one_that_was_killed_is_gone(heard: bool) -> None:
    with _child(_WAITS) as (child, words):
        child.kill()
        _until_ended(child.pid)
        if heard:
            child.wait()
        assert has_ended(_parsed(words))


def test_one_whose_number_was_given_out_again_is_gone() -> None:
    with _child(_WAITS) as (_, words):
        living = _parsed(words)
        assert has_ended(replace(living, started=living.started - 1))


def test_one_whose_first_thread_ended_lives_while_another_goes_on() -> None:
    with _child(_FIRST_THREAD_ENDS) as (child, words):
        limit = time.monotonic() + PATIENCE
        while b") Z " not in (stat := _stat(child.pid)):
            assert time.monotonic() < limit, stat
        assert not has_ended(_parsed(words))


def _stat(number: int) -> bytes:
    return Path(f"/proc/{number}/stat").read_bytes()


def test_a_name_that_looks_like_fields_deceives_nobody() -> None:
    before = _stat(os.getpid()).partition(b"(")[2].rpartition(b")")[0]
    set_name = ctypes.CDLL(None).prctl
    assert set_name(15, b"x) Z 1 (", 0, 0, 0) == 0
    try:
        assert not has_ended(_here())
    finally:
        set_name(15, before, 0, 0, 0)


def test_a_forked_child_is_another_one() -> None:
    here = _here()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, str(current()).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        other = _parsed(said.read())
    assert not os.waitpid(child, 0)[1]
    assert (other.number, here.number) == (child, os.getpid())


@pytest.mark.parametrize("field", ["boot", "pid_namespace", "time_namespace"])
def test_one_of_another_boot_or_namespace_is_not_seen(field: str) -> None:
    here = _here()
    assert here.can_check(replace(here, number=1))
    assert not here.can_check(replace(here, **{field: "another"}))


def test_one_that_is_hidden_may_live(monkeypatch: pytest.MonkeyPatch) -> None:
    here = _here()
    monkeypatch.setattr(processes, "_PROC", processes._PROC / "nowhere")
    assert not has_ended(replace(here, started=0))


@pytest.mark.parametrize(
    "words",
    ["", "None", "a b c d", "a b c d e", "a b c 1 2 3", "a b c 1 ", "a b c 1.5 2"],
)
def test_words_that_say_nothing_are_nobody(words: str) -> None:
    assert parse(words) is None


@pytest.mark.parametrize("number", [0, -1, 10**30])
def test_a_number_that_no_process_has_is_not_gone_for_certain(number: int) -> None:
    assert not has_ended(replace(_here(), number=number))


def test_in_another_namespace_one_does_not_see_who_is_in_this_one() -> None:
    with _child(_WAITS, *in_namespace("--mount-proc")) as (_, words):
        other = _parsed(words)
        assert other.boot == _here().boot
        assert not _here().can_check(other)


def test_where_proc_is_that_of_another_namespace_nothing_is_told() -> None:
    with _child(_WAITS, *in_namespace()) as (_, words):
        assert words == "None"
