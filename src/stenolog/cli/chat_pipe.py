"""Chat without a terminal: each line of stdin is a message, and only answers go to stdout.

Notices go to stderr.
"""

import asyncio
import codecs
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import click

from stenolog.agent.turn_events import (
    RETRY_HINT,
    Answer,
    Event,
    InboundMessage,
    Notice,
    SaveFailed,
    SaveRecovered,
    SummaryCreated,
    TextDelta,
    ToolFinished,
    ToolStarted,
)
from stenolog.cli.agents import NOT_SAVED, OpenAgent, Signals
from stenolog.cli.chat_screen import (
    PROMPT,
    StatusLine,
    UnsavedReport,
    compaction_text,
    first_line,
    is_interruption_notice,
    outcome_text,
    saved_text,
    short_call,
    short_time,
)
from stenolog.cli.output import error_sentence, printable, sentence
from stenolog.errors import StenologError
from stenolog.sessions.keys import cli_sender

_INTRODUCER: Final = re.compile("[\x1b\x9b\x9d\x90\x98\x9e\x9f]")
_MAX_HELD: Final = 256
_QUOTED: Final = re.compile(r"`([^`\n]+)`")


class SafeStream:
    """Filter for streamed text that removes terminal control sequences."""

    def __init__(self) -> None:
        self._held = ""

    def add(self, text: str) -> str:
        """Return the text that can be printed now.

        A sequence that may be incomplete is held back.
        """
        text, self._held = self._held + text, ""
        done: list[str] = []
        at = 0
        while (found := _INTRODUCER.search(text, at)) is not None:
            start = found.start()
            line_end = text.find("\n", start)
            if line_end < 0:
                if len(text) - start < _MAX_HELD:
                    text, self._held = text[:start], text[start:]
                break
            done.append(printable(text[at : line_end + 1]))
            at = line_end + 1
        return "".join([*done, printable(text[at:])])

    def end(self) -> str:
        """Return the rest of the text that was held back."""
        left, self._held = printable(self._held), ""
        return left


class TurnPrinter:
    """Printer of one turn: streams the answer to stdout, everything else to stderr.

    `verbose` also prints tool calls and the status line, for a person who watches.
    """

    def __init__(
        self,
        status: StatusLine,
        *,
        verbose: bool,
        quiet: bool = False,
        once: bool = False,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        """Print a turn and update `status`.

        `quiet` suppresses the answer. `once` means that no further message can be sent.
        `on_closed` is called when stdout no longer accepts data.
        """
        self._status = status
        self._on_closed = on_closed
        self._failure: OSError | None = None
        self._verbose = verbose
        self._quiet = quiet
        self._once = once
        self._broke_off = False
        self._safe = SafeStream()
        self._unsaved = UnsavedReport()
        self._calls: dict[str, str] = {}
        self._wrote = ""
        self._apart = False
        self.tools: list[dict[str, Any]] = []
        """The tools that ran: name, arguments, seconds, and whether they failed."""
        status.start_turn()

    def tell(self, event: Event) -> None:
        """Print an event."""
        self._status.count(event)
        match event:
            case TextDelta():
                self._print(self._safe.add(event.text))
            case ToolStarted():
                self._apart = bool(self._wrote)
                self._calls[event.id] = event.arguments
            case ToolFinished():
                self._tool(event)
            case SummaryCreated():
                self._say(compaction_text(event.report))
            case SaveFailed():
                self._say(self._unsaved.words(event))
            case SaveRecovered():
                self._unsaved.saved()
                self._say(saved_text(event))
            case Notice():
                self._broke_off = self._broke_off or is_interruption_notice(event)
                # Without further input there are no commands to suggest.
                words = event.text.removesuffix(RETRY_HINT) if self._once else event.text
                self._say(sentence(words))
            case _:
                pass

    def finish(self, answer: Answer) -> None:
        """End the answer and report an outcome other than success. Raises OSError of stdout."""
        self._print(self._safe.end())
        if not self._wrote and answer.outcome not in ("failed", "interrupted"):
            text = printable(answer.text)
            self._print(_QUOTED.sub(r"\1", text) if answer.outcome == "command" else text)
        if self._wrote and not self._wrote.endswith("\n"):
            self._print("\n")
        if self._failure is not None:
            raise self._failure
        self._say(outcome_text(answer, reported=self._broke_off, once=self._once))
        self._say(self._unsaved.at_the_end())
        if self._verbose and answer.outcome in ("answered", "interrupted"):
            self._say(self._status.text())

    def _tool(self, event: ToolFinished) -> None:
        given = self._calls.pop(event.id, "")
        self.tools.append(
            {
                "name": event.name,
                "arguments": given,
                "seconds": round(event.seconds, 3),
                "failed": event.failed,
            }
        )
        if self._verbose:
            mark = "✗" if event.failed else "✓"
            took = short_time(event.seconds)
            call = short_call(event.name, given)
            self._say(f"{mark} {call} · {took} · {first_line(event.text)}")

    def _print(self, text: str) -> None:
        if self._quiet or not text or self._failure is not None:
            return
        if self._apart:
            self._apart, text = False, f"\n\n{text}"
        self._wrote = text
        try:
            click.echo(text, nl=False)
            sys.stdout.flush()
        except OSError as error:
            # Do not raise in the middle of a turn: the answer is finished and stored first.
            self._failure = error
            self._on_closed()

    def _say(self, words: str) -> None:
        if not words:
            return
        if self._verbose and sys.stdout.isatty() and self._wrote[-1:] not in ("", "\n"):
            click.echo(err=True)
        click.echo(printable(words), err=True)


async def read_messages() -> AsyncIterator[str]:
    """Yield the messages on stdin, one per line. A backslash at the end of a line continues it."""
    text = ""
    async for line in _read_lines():
        text += line
        if text.endswith("\\"):
            text = f"{text[:-1]}\n"
        else:
            yield text
            text = ""
    if text.strip():
        yield text


async def _read_lines() -> AsyncIterator[str]:
    if sys.stdin is None:
        return
    try:
        descriptor = sys.stdin.fileno()
    except OSError:
        # stdin was replaced by an object without a file descriptor, which never blocks.
        for line in sys.stdin:
            yield line.removesuffix("\n")
        return
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text = ""
    while True:
        # Not in a thread: a thread that waits for input cannot be cancelled.
        await _wait_readable(descriptor)
        read = os.read(descriptor, 65_536)
        text += decoder.decode(read, final=not read)
        *complete, text = text.split("\n")
        for line in complete:
            yield line.removesuffix("\r")
        if not read:
            break
    if text:
        yield text


async def _wait_readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(descriptor, ready.set)
    except PermissionError:
        return  # a file, or /dev/null: reading never blocks
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


# --- chat pipe ------------------------------------------------------------------------------------
# The loop that answers lines of stdin.


QUIT_COMMANDS: Final = ("/quit", "/exit")
_INTERRUPTED: Final = 128 + signal.SIGINT


class PipeChat:
    """Chat that answers the lines of stdin in order."""

    def __init__(self, opened: OpenAgent, key: str) -> None:
        self.key = key
        self.code = 0
        """Exit code of the first message that failed, otherwise 0."""
        self._opened = opened
        self._status = StatusLine(opened.agent.model_of(key).name)
        self._task: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[bool] | None = None
        self._lines = read_messages()

    async def run(self, signals: Signals) -> None:
        """Run until the input ends or a signal arrives. Raises OSError of stdout."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt, signals)
        try:
            while not signals.received.is_set():
                self._prompt()
                line = await signals.run_until_signal(self._next_line())
                if line is None and sys.stdin is not None and sys.stdin.isatty():
                    click.echo(err=True)  # Ctrl-D leaves the cursor after the prompt
                if line is None or line.strip() in QUIT_COMMANDS:
                    return
                if line.strip():
                    self._task = asyncio.create_task(self._hear(line))
                    await signals.run_until_signal(self.ended())
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    async def _next_line(self) -> str | None:
        return await anext(self._lines, None)

    async def ended(self) -> None:
        """Wait for the last answer after the loop was closed. Raises OSError of stdout."""
        if self._task is not None:
            await asyncio.wait({self._task})
            self._task.result()

    async def _hear(self, text: str) -> None:
        printer = TurnPrinter(self._status, verbose=sys.stderr.isatty(), on_closed=self._stop)
        try:
            answer = await self._opened.loop.handle(
                InboundMessage(key=self.key, content=text, sender=cli_sender(self.key)),
                on_event=printer.tell,
                agent=self._opened.agent.id,
                all_sessions=True,
            )
        except StenologError as error:
            click.echo(error_sentence(error), err=True)
            self.code = self.code or 1
            return
        printer.finish(answer)
        self.key = answer.key
        self.code = self.code or exit_code_of(answer)

    def _interrupt(self, signals: Signals) -> None:
        if self._task is not None and not self._task.done():
            self._stop()
        else:
            self.code = _INTERRUPTED
            signals.received.set()

    def _stop(self) -> None:
        stopping = self._opened.loop.stop(self.key, agent=self._opened.agent.id)
        self._stopping = asyncio.create_task(stopping)

    def _prompt(self) -> None:
        if sys.stdin is not None and sys.stdin.isatty():
            click.echo(PROMPT, nl=False, err=True)


def exit_code_of(answer: Answer) -> int:
    """Return the exit code for the outcome of a message."""
    if answer.outcome == "interrupted":
        return _INTERRUPTED
    if answer.outcome == "failed" or (answer.outcome == "elsewhere" and answer.seq is None):
        return 1
    return 0 if answer.saved else NOT_SAVED
