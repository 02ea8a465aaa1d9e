"""A chat without a terminal: each line of stdin is a message, and only answers go to stdout."""

import asyncio
import signal
import sys
from typing import Final

import click

from stenolog.agent.events import Answer, Inbound
from stenolog.cli.agents import NOT_SAVED, Opened, Signals
from stenolog.cli.chat_lines import Teller, lines_of_stdin
from stenolog.cli.chat_screen import Meter
from stenolog.cli.chat_words import PROMPT
from stenolog.cli.text import error_sentence
from stenolog.errors import StenologError

LEAVING: Final = ("/quit", "/exit")
_INTERRUPTED: Final = 128 + signal.SIGINT


class PipedTalk:
    """Answers one line after the other."""

    def __init__(self, opened: Opened, key: str) -> None:
        self.key = key
        self.code = 0
        """The exit code, as far as it has come."""
        self._opened = opened
        self._meter = Meter(opened.agent.model_of(key).name)
        self._task: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[bool] | None = None
        self._lines = lines_of_stdin()

    async def run(self, signals: Signals) -> None:
        """Go on until the input ends, or somebody asks for it. Raises OSError of stdout."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt, signals)
        try:
            while not signals.asked.is_set():
                self._prompt()
                line = await signals.unless_asked(self._next_line())
                if line is None and sys.stdin is not None and sys.stdin.isatty():
                    click.echo(err=True)  # Ctrl-D has left the cursor behind the prompt
                if line is None or line.strip() in LEAVING:
                    return
                if line.strip():
                    self._task = asyncio.create_task(self._hear(line))
                    await signals.unless_asked(self.ended())
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    async def _next_line(self) -> str | None:
        return await anext(self._lines, None)

    async def ended(self) -> None:
        """Wait for the last answer, when the loop is closed. Raises OSError of stdout."""
        if self._task is not None:
            await asyncio.wait({self._task})
            self._task.result()

    async def _hear(self, text: str) -> None:
        teller = Teller(self._meter, talkative=sys.stderr.isatty(), unread=self._stop)
        try:
            answer = await self._opened.loop.hear(
                Inbound(key=self.key, content=text),
                tell=teller.tell,
                agent=self._opened.agent.id,
                everything=True,
            )
        except StenologError as error:
            click.echo(error_sentence(error), err=True)
            self.code = self.code or 1
            return
        teller.finish(answer)
        self.key = answer.key
        self.code = self.code or code_of(answer)

    def _interrupt(self, signals: Signals) -> None:
        if self._task is not None and not self._task.done():
            self._stop()
        else:
            self.code = _INTERRUPTED
            signals.asked.set()

    def _stop(self) -> None:
        stopping = self._opened.loop.stop(self.key, agent=self._opened.agent.id)
        self._stopping = asyncio.create_task(stopping)

    def _prompt(self) -> None:
        if sys.stdin is not None and sys.stdin.isatty():
            click.echo(PROMPT, nl=False, err=True)


def code_of(answer: Answer) -> int:
    """The exit code that tells what came of a message."""
    if answer.outcome == "interrupted":
        return _INTERRUPTED
    if answer.outcome == "failed" or (answer.outcome == "elsewhere" and answer.seq is None):
        return 1
    return 0 if answer.saved else NOT_SAVED
