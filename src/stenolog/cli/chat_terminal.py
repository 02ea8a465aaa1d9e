"""Chat in a terminal: connects the input line, the agent loop and the screen."""

import asyncio
import shlex
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Final

from stenolog.agent.commands import COMMANDS, parse_command
from stenolog.agent.turn_events import Answer, Event, InboundMessage, ModelCalled
from stenolog.agent.turn_ownership import is_own_turn, read_forked_at
from stenolog.catalog.message_metadata import mark_received
from stenolog.cli.agents import CHANNEL, NOT_SAVED, Opened, Signals
from stenolog.cli.chat_history import KeptHistory, history_file
from stenolog.cli.chat_input import Commands, Leave, Line, Pick, Wish
from stenolog.cli.chat_messages import PROMPT
from stenolog.cli.chat_screen import Meter, Screen
from stenolog.cli.chat_start import Start
from stenolog.cli.output import console, error_sentence, one_line, printable, sentence
from stenolog.cli.picker import matching, pick
from stenolog.cli.terminal_markdown import Block, painted
from stenolog.context.turn_state import turn_state
from stenolog.errors import StenologError
from stenolog.messages import text_parts_of
from stenolog.records import Message
from stenolog.sessions.keys import cli_sender
from stenolog.stores.open_store import address

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.input import Input
    from prompt_toolkit.output import Output
    from rich.console import Console


# --- history --------------------------------------------------------------------------------------
# The last turns of a resumed session, shortened and dimmed.


LAST: Final = 40
"""Number of messages that are read to show the end of a resumed session."""
_SHOWN: Final = 4
"""Number of messages shown of a resumed session."""
_LINES: Final = 6
"""Maximum number of lines shown of each message."""


def said_by_user(text: str) -> str:
    """Return a user message with the prompt before it, formatted for a chat."""
    return PROMPT + printable(text).replace("\n", "\n" + " " * len(PROMPT))


def past_lines(
    history: Sequence[Message], console: "Console", *, markdown: bool = True
) -> list[str]:
    """Return the last messages of user and agent, dimmed and without tools."""
    from rich.text import Text

    told: list[tuple[str, bool]] = []
    for message in history:
        body = message.to_dict()
        words = printable(text_parts_of(body)).strip()
        if words and body.get("role") in ("user", "assistant"):
            of_user = body["role"] == "user"
            told.append((said_by_user(words) if of_user else words, markdown and not of_user))
    lines: list[str] = []
    for words, laid_out in told[-_SHOWN:]:
        if laid_out:
            shown = painted(Block(source=words, gap=0), console, style="dim")
        else:
            with console.capture() as captured:
                console.print(Text(words, style="dim"), highlight=False)
            shown = captured.get().removesuffix("\n").split("\n")
        if len(shown) > _LINES:
            more = f"… {len(shown) - _LINES + 1} more lines"
            with console.capture() as captured:
                console.print(Text(more, style="dim italic"), highlight=False)
            shown = [*shown[: _LINES - 1], captured.get().removesuffix("\n")]
        lines += [*shown, ""]
    return lines


# --- conversation ---------------------------------------------------------------------------------


LEAVING: Final = ("/quit", "/exit")
_STORED: Final = "Saved, not answered yet."
_COMPLETED: Final = 30
_KEYS: Final = (
    "Enter sends. Alt-Enter, or \\ at the end of a line, starts a new line. Ctrl-C stops the "
    "answer. Ctrl-R searches your earlier input. Ctrl-D or /quit leaves; the session is kept."
)
OWN: Final = (("/quit", "", "leave; the session is kept"),)
"""Commands of the terminal, in addition to those of the loop."""
_ELSEWHERE: Final = ("new", "resume")
"""Commands that switch to another session, in addition to those that change this one."""
_FORGETFUL: Final = ("clear", "undo")
"""Commands after which the size of the context is unknown until the next request."""


class _Entered:
    """An entered message or command, until it is answered."""

    def __init__(self, text: str, screen: Screen) -> None:
        self.text = text
        self.screen = screen
        self.waits = False
        self.begun = False
        """Whether it was passed to the loop."""
        self.asked = False
        """Whether a request was sent to the model."""
        self.shown = False
        self.task: asyncio.Task[None] | None = None

    @property
    def is_command(self) -> bool:
        return self.command != ""

    @property
    def command(self) -> str:
        """Return the name of the command; empty for a message."""
        given = parse_command(self.text)
        return "" if given is None else given.name

    @property
    def matters(self) -> bool:
        """Whether it is a command that changes the session, or switches to another one."""
        known = COMMANDS.get(self.command)
        return known is not None and (known.alone or self.command in _ELSEWHERE)


class Conversation:
    """A chat: sends messages, stops answers, and tracks the turns in progress."""

    def __init__(
        self,
        opened: Opened,
        key: str,
        *,
        source: "Input | None" = None,
        output: "Output | None" = None,
    ) -> None:
        """Create the chat.

        `source` and `output` are the terminal, if it is not that of the process.
        """
        self.key = key
        self.code = 0
        """Exit code of the conversation itself."""
        self._opened = opened
        self._terminal = (source, output)
        self._console = console()
        self._meter = Meter(opened.agent.model_of(key).name)
        self._entered: list[_Entered] = []
        self._resuming: Screen | None = None
        self._resumption: asyncio.Task[None] | None = None
        self._leaving = False
        self._said = False
        self._stopping: set[asyncio.Task[bool]] = set()
        self.line = Line(
            self,
            history=self._history(),
            completer=self._completer(),
            source=source,
            output=output,
        )

    async def run(self, signals: Signals) -> None:
        """Talk until the user leaves or a signal arrives."""
        try:
            while isinstance(wish := await signals.unless_asked(self.line.run()), Pick):
                await signals.unless_asked(self._pick(wish))
        finally:
            self._leaving = True
            await self._hand_over()
        if not signals.asked.is_set():
            # Leaving does not wait for an answer. The part that was written is stored.
            await self._opened.loop.stop(self.key, agent=self._opened.agent.id)
            if self._said:
                self.say(f"Resume with: steno chat {shlex.quote(one_line(self.key))}")

    async def ended(self) -> None:
        """Wait for all turns after the loop was closed, and show the last lines."""
        tasks = [one.task for one in self._entered if one.task is not None]
        if self._resumption is not None:
            tasks.append(self._resumption)
        if tasks:
            await asyncio.wait(tasks)
        self.line.flush()

    async def _hand_over(self) -> None:
        """Store the messages that wait for a command, and skip the commands that wait.

        Messages after a command that changes or switches the session are reported as not sent.
        """
        astray = False
        for one in tuple(self._entered):
            astray = astray or one.matters
            if one.begun or one.task is None:
                continue
            one.task.cancel()
            if one.is_command:
                self.say(f"Not run: {one.text}", "yellow")
            elif not astray and await asyncio.to_thread(self._store, one.text):
                self.say(f"{said_by_user(one.text)}\n{_STORED}", "yellow")
            else:
                self.code = NOT_SAVED
                self.say(f"Not sent: {one.text}", "yellow")

    def _store(self, text: str) -> bool:
        content = text[1:] if text.startswith("//") else text
        body = {"role": "user", "content": content}
        # Without the mark of an accepted message, no agent would answer it at the next start.
        body = mark_received(body, sender=cli_sender(self.key))  # guard: chat-unsent-received
        try:
            return bool(self._opened.agent.sessions.add_full_message(self.key, body))
        except StenologError:
            return False

    def say(self, words: str, style: str = "dim") -> None:
        """Show a notice above the input line."""
        from rich.text import Text

        with self._console.capture() as captured:
            self._console.print(Text(printable(words), style=style), highlight=False)
        self.line.show(captured.get().removesuffix("\n").split("\n"))

    def greet(self, start: Start) -> None:
        """Show agent, model, session and problems, and the last messages of an existing session."""
        agent = self._opened.agent
        name = f"{one_line(agent.id)} · " if agent.id else ""
        self.say(f"{name}{self._meter.model} · {one_line(self.key)}")
        if start.words:
            self.say(start.words)
        for problem in agent.problems:
            self.say(f"! {sentence(problem)}", "yellow")
        self.line.show([""])
        if start.goes_on:
            self.come_back()

    def come_back(self) -> None:
        """Show the last messages of this session, and resume an interrupted turn."""
        sessions = self._opened.agent.sessions
        history = sessions.get_history(self.key, last=LAST)
        laid_out = self._opened.settings.cli.markdown
        self.line.show(past_lines(history, self._console, markdown=laid_out))
        own_after = read_forked_at(sessions, self.key)
        if turn_state(history).is_unfinished and is_own_turn(history, after=own_after):
            self.say("The last turn was interrupted. Resuming it.", "yellow")
            self.line.show([""])
            self._said = True
            self._resuming = self._screen()
            self._resumption = asyncio.create_task(self._resume())

    # --- interface for the input line --------------------------------------------------------

    def send(self, text: str) -> Wish | None:
        """Send a message or a command. Commands of the terminal itself return a wish."""
        words = text.split()
        if words[0] in LEAVING:
            return Leave()
        if words[0] == "/stop":
            if self.busy:
                self.stop()
            else:
                self.say("No answer is being written.\n")
            return None
        if words[0] == "/resume" and not self.busy:
            return Pick(" ".join(words[1:]))
        self._begin(text)
        return None

    def stop(self) -> None:
        """Stop the current answer."""
        stopping = asyncio.create_task(
            self._opened.loop.stop(self.key, agent=self._opened.agent.id)
        )
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)

    @property
    def busy(self) -> bool:
        """Whether a turn is in progress."""
        return bool(self._entered or self._resuming is not None)

    def live(self, rows: int) -> Sequence[str]:
        """Return the text that is still changing."""
        if self._resuming is not None:
            return self._resuming.live(rows)
        shown = next((one for one in self._entered if one.shown), None)
        return shown.screen.live(rows) if shown is not None else ()

    def waiting(self) -> Sequence[str]:
        """Return the messages entered during the current turn."""
        return [one.text for one in self._entered if not one.shown]

    def status(self) -> str:
        """Return the status line."""
        return self._meter.words()

    @property
    def nearly_full(self) -> bool:
        """Whether the session will soon be summarized."""
        return self._meter.nearly_full

    # --- turns -------------------------------------------------------------------------------

    def _screen(self) -> Screen:
        told = self._opened.settings.cli
        return Screen(
            self._console,
            self._meter,
            show=self.line.show,
            reasoning=told.show_reasoning,
            markdown=told.markdown,
        )

    def _begin(self, text: str) -> None:
        one = _Entered(text, self._screen())
        self._said = self._said or not one.is_command
        # A message is stored at once and waits in the log. A command may change the log or the
        # session, so it waits here, and so does everything entered after it.
        before = self._entered[-1].task if self._entered else None
        blocked = one.is_command or any(other.is_command for other in self._entered)
        one.waits = self.busy
        if not one.waits:
            self._show(one)
        one.task = asyncio.create_task(self._hear(one, before if blocked else None))
        self._entered.append(one)
        self.line.changed()

    async def _hear(self, one: _Entered, before: "asyncio.Task[None] | None") -> None:
        try:
            if before is not None:
                await asyncio.wait([before])
            one.begun = True
            if one.is_command:
                self._show(one)
            inbound = InboundMessage(key=self.key, content=one.text, sender=cli_sender(self.key))
            tell = partial(self._tell, one)
            answer = await self._opened.loop.handle(
                inbound, on_event=tell, agent=self._opened.agent.id, all_sessions=True
            )
        except StenologError as error:
            self._show(one)
            one.screen.note(error_sentence(error))
        else:
            self._show(one)
            self._answered(one, answer)
        finally:
            self._entered.remove(one)
            self.line.changed()

    def _answered(self, one: _Entered, answer: Answer) -> None:
        if one.waits and answer.outcome == "elsewhere":
            one.screen.note("Answered above.")
            return
        if self._leaving and answer.outcome == "failed":
            # `close_agent` reports turns that were cut off.
            if one.waits and not one.asked:
                one.screen.note(_STORED)
            return
        one.screen.finish(answer)
        if one.text == "/help":
            self.say(_KEYS)
            self.line.show([""])
        if one.command and one.command not in COMMANDS:
            near = get_close_matches(one.command, (*COMMANDS, "quit", "exit"), 1)
            if near:
                self.say(f"Did you mean /{near[0]}?\n")
        if one.command in _FORGETFUL:
            self._meter.forget()
        if answer.key != self.key or one.command == "model":
            self.key = answer.key
            self._meter.forget()
            self._meter.model = self._opened.agent.model_of(self.key).name
            if one.text.startswith("/resume"):
                self.come_back()

    def _tell(self, one: _Entered, event: Event) -> None:
        if isinstance(event, ModelCalled):
            one.asked = True
            self._show(one)
        one.screen.tell(event)
        self.line.changed()

    def _show(self, one: _Entered) -> None:
        if not one.shown:
            one.shown = True
            self.say(said_by_user(one.text), "bold")
            self.line.show([""])

    async def _resume(self) -> None:
        screen = self._resuming
        assert screen is not None

        def tell(event: Event) -> None:
            screen.tell(event)
            self.line.changed()

        try:
            for answer in await self._opened.loop.resume(
                self.key, on_event=tell, agent=self._opened.agent.id
            ):
                screen.finish(answer)
        except StenologError as error:
            screen.note(error_sentence(error))
        finally:
            self._resuming = None
            self.line.changed()

    # --- choosing a session ------------------------------------------------------------------

    async def _pick(self, wish: Pick) -> None:
        catalog = self._opened.agent.catalog
        assert catalog is not None
        try:
            found = await asyncio.to_thread(matching, catalog, wish.text) if wish.text else ()
            if len(found) == 1:
                key: str | None = found[0].key
            else:
                source, output = self._terminal
                key = await pick(
                    catalog, text=wish.text, channel=CHANNEL, source=source, output=output
                )
        except StenologError as error:
            self.say(error_sentence(error), "yellow")
            return
        if key is None:
            self.say("No session was chosen; staying in this one.\n")
        elif key == self.key:
            self.say("You are already in this session.\n")
        else:
            self._begin(f"/resume {key}")

    def _completer(self) -> Commands:
        known = [(f"/{name}", one.arguments, one.help) for name, one in COMMANDS.items()]
        return Commands([*known, *OWN], self._sessions)

    def _sessions(self, text: str) -> Iterable[tuple[str, str]]:
        catalog = self._opened.agent.catalog
        try:
            if text.strip():
                found = matching(catalog, text.strip())
            else:
                found = catalog.list(limit=_COMPLETED).entries
        except StenologError:
            return []
        return [(entry.key, printable(entry.title)) for entry in found[:_COMPLETED]]

    def _history(self) -> "History | None":
        # If sessions are kept only in memory, the input must not be written to a file either.
        where = self._opened.agent.spec.sessions
        return None if address(where).engine == "memory" else KeptHistory(history_file())
