"""`steno chat` in a pseudo-terminal, as a process: what a person sees and presses."""

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from stenolog.stores.open_store import open_store
from support.terminal import Terminal

ROWS, COLUMNS = 30, 90
PROGRAM = "from stenolog.cli import main; main(prog_name='steno')"
PATIENCE = 120.0
COLOUR = re.compile(r"\x1b\[[0-9;]*(?:3[0-7]|9[0-7]|4[0-7])[0-9;]*m")


class Run:
    """A command whose stdin, stdout and stderr are a terminal."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._master, self._slave = pty.openpty()
        size = struct.pack("HHHH", ROWS, COLUMNS, 0, 0)
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, size)
        self._modes = termios.tcgetattr(self._slave)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env={**os.environ, "TERM": "xterm-256color", **environment},
            start_new_session=True,
        )
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.raw = ""
        self.terminal = Terminal(rows=ROWS, columns=COLUMNS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    @property
    def shown(self) -> str:
        return self.terminal.all

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def see(self, words: str) -> None:
        """Wait until this is to be seen."""
        self.until(lambda: words in self.shown, words)

    def until(self, there: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not there():
            if not self._read(0.05) and (self.process.poll() is not None or time.monotonic() > end):
                # What it wrote last may still be on its way.
                self._read(0.2)
                assert there(), f"{what!r} was waited for in vain; there is:\n{self.shown}"

    def ended(self) -> int:
        """The exit code; the terminal is as it was."""
        end = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < end:
            self._read(0.05)
        while self._read(0.05):
            pass
        assert termios.tcgetattr(self._slave) == self._modes
        return self.process.wait(1)

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], seconds)
        if not ready:
            return False
        text = self._decoder.decode(os.read(self._master, 65_536))
        self.raw += text
        self.terminal.feed(text)
        return True


@pytest.fixture(autouse=True)
def _scripted(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the scripted model, and the size and colours of the terminal."""
    assert here.exists()
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("STENO_AGENT__MODEL", "scripted")


def contents(key: str) -> list[str]:
    with open_store("workspace", read_only=True) as store:
        return [str(message.content) for message in store.get_history(key)]


def test_an_answer_streams_as_markdown_with_its_tools_and_a_status_line(here: Path) -> None:
    with Run("chat") as run:
        run.see("scripted · /help")
        run.type("what time is it?\r")
        run.see("✓ now()")
        run.see("tokens in")
        run.until(lambda: "/help" in run.terminal.screen.splitlines()[-1], "the end of the turn")
        run.type("markdown\r")
        # While it comes: the beginning is there, the end is not, and the line is there to type in.
        run.see("• a list")
        assert "this page is always the same" not in run.shown
        assert "Ctrl-C to stop" in run.terminal.screen
        run.see("this page is always the same")
        run.until(lambda: "/help" in run.terminal.screen.splitlines()[-1], "the end")
        run.type("\x04")
        assert run.ended() == 0
    shown = run.shown
    assert " mountain   height" in shown
    assert "https://example.org" in shown
    # Everything was written once, and all of it stays.
    assert shown.count("What Markdown looks like") == 1
    assert shown.count("The tool says: ") == 1
    assert "Resume with: steno chat " in shown.splitlines()[-1]
    assert COLOUR.search(run.raw) is not None
    (file,) = (here / "state").rglob("chat-history")
    assert file.stat().st_mode & 0o777 == 0o600


def test_session_is_chosen_from_a_filtered_list() -> None:
    with open_store("workspace") as store:
        for number in range(40):
            store.add_message(f"cli:{number:02}:default", "user", f"talk number {number}")
            store.add_message(f"cli:{number:02}:default", "assistant", f"Yes, {number}.")
        store.add_message("cli:00:default", "user", "where do zebras live?")
        store.add_message("cli:00:default", "assistant", "In **Africa**.")
    with Run("chat", "-r") as run:
        run.see("Enter resume")
        assert "talk number 39" in run.terminal.screen
        run.type("number 1")
        run.see("talk number 11")
        run.type("\x7f" * len("number 1") + "zebra")
        run.see("[3] user: where do zebras live?")
        run.type("\r")
        run.see("In Africa.")
        run.see("/help")
        assert "Enter resume" not in run.shown
        run.type("/quit\r")
        assert run.ended() == 0
    with Run("chat", "--resume", "number") as run:
        run.see("Enter resume")
        run.type("\x1b")
        assert run.ended() == 0
    assert run.shown == ""


def test_chat_resumes_after_a_kill() -> None:
    with Run("chat", "cli:a") as run:
        run.see("/help")
        run.type("markdown\r")
        run.see("• a list")
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
    assert contents("cli:a") == ["markdown"]
    with Run("chat", "-c") as run:
        run.see("The last turn was interrupted. Resuming it.")
        run.see("this page is always the same")
        run.until(lambda: "Ctrl-C to stop" not in run.terminal.screen, "the end")
        run.type("\x04")
        assert run.ended() == 0
    assert len(contents("cli:a")) == 2


@pytest.mark.slow
def test_sigterm_finishes_the_answer_and_restores_the_terminal() -> None:
    with Run("chat", "cli:a") as run:
        run.see("/help")
        run.type("markdown\r")
        run.see("• a list")
        run.process.send_signal(signal.SIGTERM)
        assert run.ended() == 0
        assert "this page is always the same" in run.shown
    assert contents("cli:a")[1].endswith("always the same.\n")


def test_no_color_is_honoured() -> None:
    with Run("chat", NO_COLOR="1") as run:
        run.see("/help")
        run.type("markdown\r")
        run.see("this page is always the same")
        run.type("\x04")
        assert run.ended() == 0
    assert COLOUR.search(run.raw) is None


def test_dumb_terminal_is_refused() -> None:
    with Run("chat", TERM="dumb") as run:
        run.see("steno chat needs an interactive terminal.")
        assert run.ended() == 1
    assert "\x1b" not in run.raw


def test_input_during_an_answer_is_not_lost() -> None:
    with Run("chat", "cli:a") as run:
        run.see("/help")
        run.type("long\r")
        run.see("This is sentence 3 of")
        run.type("half ")
        run.see("> half")
        run.type("\x03")
        run.see("Stopped.")
        run.type("a message\r")
        run.see("You said: half a message")
        run.type("\x04")
        assert run.ended() == 0


def test_session_in_an_unsupported_format_is_refused() -> None:
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    with open_store("workspace") as store:
        store.add_messages("cli:a", [{"role": "user", "content": "hello"}, item])
    with Run("chat", "cli:a") as run:
        run.see("Start a new session")
        assert run.ended() == 1
    assert "the message at seq 2" in run.shown
