"""What the demo stands on: the agent's process, the store as it is read, and what is printed."""

import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import stenolog
from stenolog.records import Message, SessionInfo

_AGENT = Path(__file__).with_name("demo_agent.py")
_WIDTH = 110
_PATIENCE = 60.0


class Failed(Exception):
    """A step did not hold."""


class Agent:
    """The process of `demo_agent.py`, for one session. A context manager: it is gone at its end."""

    def __init__(self, key: str, model: str, *, room: int = 8_000, shown: bool = True) -> None:
        """`room`: how many tokens it believes that the model takes. `shown`: as it goes on."""
        self._shown = shown
        self._lines: queue.Queue[str] = queue.Queue()
        self._heard: list[tuple[str, str]] = []
        self._process = subprocess.Popen(
            [sys.executable, str(_AGENT), key, model, str(room)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        )
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def __enter__(self) -> Self:
        self.until("ready")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()  # the end of its input is the end of its work
            code = self._process.wait(10 if kind is None else 0.1)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            code = self._process.wait()
        self._reading.join()
        if kind is None and code not in (0, -signal.SIGKILL):
            raise Failed(f"the agent ended with code {code}")

    def say(self, text: str, *, id: str = "") -> tuple[str, str]:
        """Say something and wait until all that follows from it is done; outcome and answer."""
        self.send(text, id=id)
        self.until("ready")
        return [(kind, words) for kind, words in self._heard if kind in _OUTCOMES][-1]

    def send(self, text: str, *, id: str = "") -> None:
        """Say something, and do not wait."""
        if self._shown:
            tell(f"  Ada: {text}")
        assert self._process.stdin is not None
        self._process.stdin.write(f"{id}\t{text}\n")
        self._process.stdin.flush()

    def until(self, kind: str, words: str = "") -> None:
        """Listen until it says something of this kind, with these words."""
        while True:
            try:
                line = self._lines.get(timeout=_PATIENCE)
            except queue.Empty:
                raise Failed(f"the agent was silent for {_PATIENCE:g} s") from None
            if not line:
                raise Failed("the agent ended too early; its last words stand above")
            found, _, said = line.rstrip("\n").partition("\t")
            self._heard.append((found, said))
            if self._shown and found != "ready":
                if found in _OUTCOMES:
                    tell_answer(said)
                else:
                    tell(f"    {found}: {said}")
            if found == kind and words in said:
                return

    def heard(self, kind: str) -> list[str]:
        """All that it said of this kind."""
        return [words for found, words in self._heard if found == kind]

    def kill(self) -> None:
        """Kill it with -9: it has no time to say a word, or to close a file."""
        self._process.send_signal(signal.SIGKILL)
        if self._process.wait() != -signal.SIGKILL:
            raise Failed(f"the agent ended by itself, with code {self._process.returncode}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")


_OUTCOMES = ("answered", "interrupted", "failed", "again", "elsewhere", "command")


# --- the store, as anybody can read it -------------------------------------------------------


def history(key: str, *, full: bool = False) -> list[Message]:
    """The messages of a session that are in sight; with `full`, all there ever were."""
    with stenolog.open_store("workspace") as store:
        return store.get_history(key, full=full)


def info(key: str) -> SessionInfo:
    """What is known of a session."""
    with stenolog.open_store("workspace") as store:
        return store.info(key)


# --- what is printed -------------------------------------------------------------------------


def tell(words: str) -> None:
    """Print a line, cut where it would fill the screen."""
    shown = words if len(words) <= _WIDTH else f"{words[: _WIDTH - 4]} ..."
    encoding = sys.stdout.encoding or "ascii"
    print(shown.encode(encoding, "replace").decode(encoding), flush=True)


def tell_answer(words: str) -> None:
    """Print what the agent says, all of it, in lines of that width."""
    begin = "  agent: "
    for line in textwrap.wrap(
        words, _WIDTH, initial_indent=begin, subsequent_indent=" " * len(begin)
    ) or [begin]:
        tell(line)


def heading(words: str) -> None:
    """Begin a step."""
    tell(f"\n{words}\n{'-' * len(words)}")


def expect(holds: bool, words: str) -> None:
    """Print what holds. Raises Failed where it does not."""
    if not holds:
        raise Failed(f"check failed: {words}")
    tell(f"  ok: {words}")


def wait_for(holds: Callable[[], bool], words: str) -> None:
    """Wait until something holds, for a few seconds. Raises Failed."""
    limit = time.monotonic() + 10
    while not holds():
        if time.monotonic() > limit:
            raise Failed(f"timed out: {words}")
        time.sleep(0.01)


def shell(command: str, *, lines: int = 10) -> str:
    """Run a command and show what it prints, so many lines of it; all of it is returned.

    Raises Failed where it fails, or prints nothing.
    """
    tell(f"  $ {command}")
    # The `steno` beside this Python, whatever else is installed.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    ran = subprocess.run(
        ["sh", "-c", command],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PATH": path, "PYTHONIOENCODING": "utf-8"},
        timeout=30,
    )
    printed = ran.stdout.splitlines()
    for line in printed[:lines]:
        tell(f"    {line}")
    if len(printed) > lines:
        tell(f"    ({len(printed) - lines} more lines)")
    if ran.returncode != 0 or not ran.stdout.strip():
        raise Failed(f"`{command}` ended with code {ran.returncode} {ran.stderr.strip()}")
    return ran.stdout
