"""Client of `postgres_writer`: starts writers, reads their reports, and checks the log."""

import json
import os
import select
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final

from stenolog.stores.base import Store
from support.crash import postgres_writer

_PATIENCE: Final = 180.0


class Writer:
    """A process that writes until told to stop."""

    def __init__(self, work: str, where: str, name: str) -> None:
        self.name = name
        self.tokens = work == "tokens"
        self._process = subprocess.Popen(
            [sys.executable, postgres_writer.__file__, work, where, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._heard = b""

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._stdin.close()
        self._stdout.close()

    def lines(self) -> list[list[Any]]:
        """Return the lines received so far."""
        return [json.loads(line) for line in self._heard.splitlines(True) if line.endswith(b"\n")]

    def count(self, word: str) -> int:
        """Return how often this word was received."""
        return sum(line[0] == word for line in self.lines())

    def go(self) -> None:
        """Let the process start."""
        self._stdin.write(b"go\n")
        self._stdin.flush()

    def stop(self) -> None:
        """Let the process end by itself."""
        self._stdin.close()
        limit = time.monotonic() + _PATIENCE
        while self.listen(limit):
            pass
        assert self._process.wait(_PATIENCE) == 0, f"{self.name} failed: {self.lines()[-3:]}"

    def listen(self, limit: float) -> bool:
        """Read the next output; return False at the end."""
        ready, _, _ = select.select([self._stdout], [], [], max(0.0, limit - time.monotonic()))
        assert ready, f"{self.name} is silent, its last words: {self.lines()[-3:]}"
        heard = os.read(self._stdout.fileno(), 1 << 16)
        self._heard += heard
        return bool(heard)


def until(writers: Iterable[Writer], holds: Callable[[Writer], bool]) -> None:
    """Read from each writer until the condition holds for it."""
    limit = time.monotonic() + _PATIENCE
    for writer in writers:
        while not holds(writer):
            assert writer.listen(limit), f"{writer.name} ended: {writer.lines()[-3:]}"


def store_more(writers: Iterable[Writer], count: int) -> None:
    """Read from each writer until `count` more of its messages were acknowledged."""
    writers = list(writers)
    wanted = {writer.name: writer.count("stored") + count for writer in writers}
    until(writers, lambda writer: writer.count("stored") >= wanted[writer.name])


def judge(store: Store, writers: Iterable[Writer]) -> Counter[str]:
    """Compare the log with the writers' reports; return how often each outcome occurred.

    Acknowledged messages are stored once, at their seq. Messages that were rejected and never sent
    again are not stored. Messages with an unknown outcome are stored at most once.
    """
    writers = list(writers)
    found: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    order: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for key in store.list_sessions():
        for message in store.get_history(key):
            text = str(message.content)
            found[text].append((key, message.seq))
            name, _, number = text.partition(".")
            order[key, name].append(int(number))
    assert {text: places for text, places in found.items() if len(places) > 1} == {}
    assert [key for key, numbers in order.items() if numbers != sorted(numbers)] == []
    told: Counter[str] = Counter()
    known: set[str] = set()
    for writer in writers:
        for word, text, what in writer.lines():
            told[word] += 1
            known.add(text)
            odd = int(text.partition(".")[2]) % 2
            key = "everybody" if odd else f"own {writer.name}"
            if word == "stored":
                assert found.get(text) == [(key, what)], f"{text} was acknowledged as {what}"
        said = writer.lines()
        refused = {text for word, text, _ in said if word not in ("stored", "MaybeStored")}
        unknown = {text for word, text, _ in said if word == "MaybeStored"}
        stored = {text for word, text, _ in said if word == "stored"}
        absent = refused - stored - unknown
        assert not absent & set(found), f"refused, and yet there: {absent & set(found)}"
    # The writer may have been told to stop during the last message.
    assert set(found) <= known, f"nobody has said this: {set(found) - known}"
    return told
