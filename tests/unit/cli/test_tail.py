"""`steno tail`: the last messages, and those that another process adds."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from stenolog.records import Message
from stenolog.stores.jsonl import JSONLStore
from stenolog.stores.open_store import open_store
from support.cli import Steno

pytestmark = pytest.mark.usefixtures("place")

KEY = "telegram:123"
MOMENT = re.compile(r"\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\dZ| \d\d:\d\d:\d\d \S+)")


@contextmanager
def following(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`steno tail -f` as a process of its own, killed at the latest at the end."""
    program = "from stenolog.cli import main; main(prog_name='steno')"
    with subprocess.Popen(
        [sys.executable, "-c", program, "tail", "-f", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _next(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout is not None
    found: dict[str, object] = json.loads(process.stdout.readline())
    return found


def test_follow_shows_messages_of_other_processes_until_ctrl_c(where: str) -> None:
    with following(KEY, "--json", "-n", "1", "-w", where) as process:
        assert _next(process)["seq"] == 4
        with open_store(where) as store:
            for number in (5, 6):
                store.add_message(KEY, "user", f"message {number}")
                told = _next(process)
                assert told["seq"] == number
                assert told["message"] == {"role": "user", "content": f"message {number}"}
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_follow_shows_no_hidden_message() -> None:
    with open_store("workspace") as store:
        store.add_message(KEY, "user", "popped")
        store.pop(KEY)
        with following(KEY, "--json", "-n", "1") as process:
            assert _next(process)["seq"] == 4
            store.add_message(KEY, "user", "new")
            assert _next(process)["message"] == {"role": "user", "content": "new"}


def test_tail_ends_when_the_session_is_deleted() -> None:
    with following(KEY, "--json", "-n", "1") as process:
        _next(process)
        with open_store("workspace") as store:
            store.delete(KEY)
        assert process.wait(timeout=30) == 1
        assert process.stderr is not None
        assert process.stderr.read() == f"Error: '{KEY}': the session was deleted.\n"


@pytest.mark.parametrize("created_again", [False, True])
def test_session_deleted_just_before_follow_ends_the_command(
    steno: Steno, monkeypatch: pytest.MonkeyPatch, created_again: bool
) -> None:
    real = JSONLStore.follow

    def follow(self: JSONLStore, key: str, **options: Any) -> Iterator[Message]:
        with open_store("workspace") as store:
            store.delete(KEY)
            for number in range(6 if created_again else 0):
                store.add_message(KEY, "user", f"new {number}")
        # The timeout is there for a failure: then nothing would ever come.
        return real(self, key, **{**options, "timeout": 1})

    monkeypatch.setattr(JSONLStore, "follow", follow)
    result = steno("tail", "-f", KEY)
    assert result.exit_code == 1, result.stdout
    assert "the session was deleted" in result.stderr
    assert ("another one has its key now" in result.stderr) is created_again
    assert "new" not in result.stdout


@pytest.mark.parametrize("more", [[], ["-f"]])
def test_follow_does_not_wait_for_a_missing_session(steno: Steno, more: list[str]) -> None:
    result = steno("tail", "nobody", *more)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "There is no session 'nobody' in ./workspace." in result.stderr
