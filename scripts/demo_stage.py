"""Helpers of the demo: the agent process, reading the store, and printing."""

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
    """A failed check of the demo."""


class Agent:
    """Context manager that runs a `demo_agent.py` process for one session, and ends the process."""

    def __init__(self, key: str, model: str, *, room: int = 8_000, shown: bool = True) -> None:
        """Start the agent.

        `room` is the context size that the agent assumes, in tokens. With `shown`, the events of
        the agent are printed.
        """
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
        self._reading = threading.Thread(target=self._read_lines)
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
            self._process.stdin.close()  # the agent ends when its input ends
            code = self._process.wait(10 if kind is None else 0.1)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            code = self._process.wait()
        self._reading.join()
        if kind is None and code not in (0, -signal.SIGKILL):
            raise Failed(f"the agent ended with code {code}")

    def say(self, text: str, *, id: str = "") -> tuple[str, str]:
        """Send a message, wait until the agent is idle, and return the outcome and the answer."""
        self.send(text, id=id)
        self.until("ready")
        return [(kind, words) for kind, words in self._heard if kind in _OUTCOMES][-1]

    def send(self, text: str, *, id: str = "") -> None:
        """Send a message without waiting."""
        if self._shown:
            tell(f"  Ada: {text}")
        assert self._process.stdin is not None
        self._process.stdin.write(f"{id}\t{text}\n")
        self._process.stdin.flush()

    def until(self, kind: str, words: str = "") -> None:
        """Read lines until one has this kind and contains these words."""
        while True:
            try:
                line = self._lines.get(timeout=_PATIENCE)
            except queue.Empty:
                raise Failed(f"the agent was silent for {_PATIENCE:g} s") from None
            if not line:
                raise Failed("the agent ended too early; its last words stand above")
            line_kind, _, text = line.rstrip("\n").partition("\t")
            self._heard.append((line_kind, text))
            if self._shown and line_kind != "ready":
                if line_kind in _OUTCOMES:
                    tell_answer(text)
                else:
                    tell(f"    {line_kind}: {text}")
            if line_kind == kind and words in text:
                return

    def heard(self, kind: str) -> list[str]:
        """Return the texts of all lines of this kind."""
        return [words for line_kind, words in self._heard if line_kind == kind]

    def kill(self) -> None:
        """Kill the agent with SIGKILL, so that it can neither print nor close a file."""
        self._process.send_signal(signal.SIGKILL)
        if self._process.wait() != -signal.SIGKILL:
            raise Failed(f"the agent ended by itself, with code {self._process.returncode}")

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")


_OUTCOMES = ("answered", "interrupted", "failed", "again", "elsewhere", "command")


# --- reading the store -----------------------------------------------------------------------


def history(key: str, *, full: bool = False) -> list[Message]:
    """Return the visible messages of a session, or all messages with `full`."""
    with stenolog.open_store("workspace") as store:
        return store.get_history(key, full=full)


def info(key: str) -> SessionInfo:
    """Return the metadata of a session."""
    with stenolog.open_store("workspace") as store:
        return store.info(key)


# --- printing --------------------------------------------------------------------------------


def tell(words: str) -> None:
    """Print a line, truncated to the width of the screen."""
    shown = words if len(words) <= _WIDTH else f"{words[: _WIDTH - 4]} ..."
    encoding = sys.stdout.encoding or "ascii"
    print(shown.encode(encoding, "replace").decode(encoding), flush=True)


def tell_answer(words: str) -> None:
    """Print the complete answer of the agent, wrapped."""
    begin = "  agent: "
    for line in textwrap.wrap(
        words, _WIDTH, initial_indent=begin, subsequent_indent=" " * len(begin)
    ) or [begin]:
        tell(line)


def heading(words: str) -> None:
    """Print the heading of a step."""
    tell(f"\n{words}\n{'-' * len(words)}")


def expect(holds: bool, words: str) -> None:
    """Print `words` if the condition `holds`, otherwise raise Failed."""
    if not holds:
        raise Failed(f"check failed: {words}")
    tell(f"  ok: {words}")


def wait_for(holds: Callable[[], bool], words: str) -> None:
    """Wait up to ten seconds until a condition holds. Raises Failed."""
    limit = time.monotonic() + 10
    while not holds():
        if time.monotonic() > limit:
            raise Failed(f"timed out: {words}")
        time.sleep(0.01)


def shell(command: str, *, lines: int = 10) -> str:
    """Run a command, print the first `lines` lines of its output and return all of it.

    Raises Failed if the command fails or prints nothing.
    """
    tell(f"  $ {command}")
    # Use the `steno` of this Python, even if another `steno` is installed.
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
