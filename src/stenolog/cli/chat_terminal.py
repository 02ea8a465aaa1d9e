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
from stenolog.catalog.message_metadata import mark_received, model_label
from stenolog.cli.agents import CHANNEL, NOT_SAVED, OpenAgent, Signals
from stenolog.cli.chat_input import (
    ChatRequest,
    CommandCompleter,
    InputHistory,
    InputLine,
    LeaveRequest,
    ResumeRequest,
    history_file,
)
from stenolog.cli.chat_pipe import QUIT_COMMANDS
from stenolog.cli.chat_screen import PROMPT, StatusLine, TurnScreen
from stenolog.cli.output import error_sentence, one_line, printable, sentence, terminal_console
from stenolog.cli.picker import ChatStart, find_sessions, pick
from stenolog.cli.terminal_markdown import Block, render_block
from stenolog.cli.workspace import location_hint
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


HISTORY_LIMIT: Final = 40
"""Number of messages that are read to show the end of a resumed session."""
_MESSAGES_SHOWN: Final = 4
"""Number of messages shown of a resumed session."""
_MAX_MESSAGE_LINES: Final = 6
"""Maximum number of lines shown of each message."""


def user_line(text: str) -> str:
    """Return a user message with the prompt before it, formatted for a chat."""
    return PROMPT + printable(text).replace("\n", "\n" + " " * len(PROMPT))


def history_lines(
    history: Sequence[Message], console: "Console", *, markdown: bool = True
) -> list[str]:
    """Return the last messages of user and agent, dimmed and without tools."""
    from rich.text import Text

    texts: list[tuple[str, bool]] = []
    for message in history:
        body = message.to_dict()
        words = printable(text_parts_of(body)).strip()
        if words and body.get("role") in ("user", "assistant"):
            of_user = body["role"] == "user"
            texts.append((user_line(words) if of_user else words, markdown and not of_user))
    lines: list[str] = []
    for words, laid_out in texts[-_MESSAGES_SHOWN:]:
        if laid_out:
            shown = render_block(Block(source=words, gap=0), console, style="dim")
        else:
            with console.capture() as captured:
                console.print(Text(words, style="dim"), highlight=False)
            shown = captured.get().removesuffix("\n").split("\n")
        if len(shown) > _MAX_MESSAGE_LINES:
            more = f"… {len(shown) - _MAX_MESSAGE_LINES + 1} more lines"
            with console.capture() as captured:
                console.print(Text(more, style="dim italic"), highlight=False)
            shown = [*shown[: _MAX_MESSAGE_LINES - 1], captured.get().removesuffix("\n")]
        lines += [*shown, ""]
    return lines


# --- conversation ---------------------------------------------------------------------------------


_STORED: Final = "Saved, not answered yet."
_MAX_COMPLETIONS: Final = 30
_KEYS_HELP: Final = (
    "Enter sends. Alt-Enter, or \\ at the end of a line, starts a new line. Ctrl-C stops the "
    "answer. Ctrl-R searches your earlier input. Ctrl-D or /quit leaves; the session is kept."
)
TERMINAL_COMMANDS: Final = (("/quit", "", "leave; the session is kept"),)
"""Commands of the terminal, in addition to those of the loop."""
_SWITCHING_COMMANDS: Final = ("new", "resume")
"""Commands that switch to another session, in addition to those that change this one."""
_RESETTING_COMMANDS: Final = ("clear", "undo")
"""Commands after which the size of the context is unknown until the next request."""


class _Entry:
    """An entered message or command, until it is answered."""

    def __init__(self, text: str, screen: TurnScreen) -> None:
        self.text = text
        self.screen = screen
        self.waits = False
        self.begun = False
        """Whether it was passed to the loop."""
        self.requested = False
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
    def changes_session(self) -> bool:
        """Whether it is a command that changes the session, or switches to another one."""
        known = COMMANDS.get(self.command)
        return known is not None and (known.alone or self.command in _SWITCHING_COMMANDS)


class TerminalChat:
    """A chat: sends messages, stops answers, and tracks the turns in progress."""

    def __init__(
        self,
        opened: OpenAgent,
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
        self._console = terminal_console()
        self._status = StatusLine(opened.agent.model_of(key).name)
        self._entered: list[_Entry] = []
        self._resuming: TurnScreen | None = None
        self._resumption: asyncio.Task[None] | None = None
        self._leaving = False
        self._has_spoken = False
        self._stopping: set[asyncio.Task[bool]] = set()
        self.line = InputLine(
            self,
            history=self._history(),
            completer=self._completer(),
            source=source,
            output=output,
        )

    async def run(self, signals: Signals) -> None:
        """Talk until the user leaves or a signal arrives."""
        try:
            while isinstance(
                request := await signals.run_until_signal(self.line.run()), ResumeRequest
            ):
                await signals.run_until_signal(self._pick(request))
        finally:
            self._leaving = True
            await self._store_waiting()
        if not signals.received.is_set():
            # Leaving does not wait for an answer. The part that was written is stored.
            await self._opened.loop.stop(self.key, agent=self._opened.agent.id)
            if self._has_spoken:
                key = shlex.quote(one_line(self.key))
                self.say(f"Resume with: steno chat {key}{location_hint()}")

    async def ended(self) -> None:
        """Wait for all turns after the loop was closed, and show the last lines."""
        tasks = [one.task for one in self._entered if one.task is not None]
        if self._resumption is not None:
            tasks.append(self._resumption)
        if tasks:
            await asyncio.wait(tasks)
        self.line.flush()

    async def _store_waiting(self) -> None:
        """Store the messages that wait for a command, and skip the commands that wait.

        Messages after a command that changes or switches the session are reported as not sent.
        """
        blocked = False
        for one in tuple(self._entered):
            blocked = blocked or one.changes_session
            if one.begun or one.task is None:
                continue
            one.task.cancel()
            if one.is_command:
                self.say(f"Not run: {one.text}", "yellow")
            elif not blocked and await asyncio.to_thread(self._store, one.text):
                self.say(f"{user_line(one.text)}\n{_STORED}", "yellow")
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

    def greet(self, start: ChatStart) -> None:
        """Show agent, model, session and problems, and the last messages of an existing session."""
        agent = self._opened.agent
        name = f"{one_line(agent.id)} · " if agent.id else ""
        self.say(f"{name}{model_label(self._status.model)} · {one_line(self.key)}")
        if start.description:
            self.say(start.description)
        for problem in agent.problems:
            self.say(f"! {sentence(problem)}", "yellow")
        self.line.show([""])
        if start.resumes:
            self.show_history()

    def show_history(self) -> None:
        """Show the last messages of this session, and resume an interrupted turn."""
        sessions = self._opened.agent.sessions
        history = sessions.get_history(self.key, last=HISTORY_LIMIT)
        laid_out = self._opened.settings.cli.markdown
        self.line.show(history_lines(history, self._console, markdown=laid_out))
        own_after = read_forked_at(sessions, self.key)
        if turn_state(history).is_unfinished and is_own_turn(history, after=own_after):
            self.say("The last turn was interrupted. Resuming it.", "yellow")
            self.line.show([""])
            self._has_spoken = True
            self._resuming = self._screen()
            self._resumption = asyncio.create_task(self._resume())

    # --- interface for the input line --------------------------------------------------------

    def send(self, text: str) -> ChatRequest | None:
        """Send a message or a command. Commands of the terminal itself return a request."""
        words = text.split()
        if words[0] in QUIT_COMMANDS:
            return LeaveRequest()
        if words[0] == "/stop":
            if self.busy:
                self.stop()
            else:
                self.say("No answer is being written.\n")
            return None
        if words[0] == "/resume" and not self.busy:
            return ResumeRequest(" ".join(words[1:]))
        self._enter(text)
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
        return self._status.text()

    @property
    def nearly_full(self) -> bool:
        """Whether the session will soon be summarized."""
        return self._status.nearly_full

    # --- turns -------------------------------------------------------------------------------

    def _screen(self) -> TurnScreen:
        settings = self._opened.settings.cli
        return TurnScreen(
            self._console,
            self._status,
            show=self.line.show,
            reasoning=settings.show_reasoning,
            markdown=settings.markdown,
        )

    def _enter(self, text: str) -> None:
        one = _Entry(text, self._screen())
        self._has_spoken = self._has_spoken or not one.is_command
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

    async def _hear(self, one: _Entry, before: "asyncio.Task[None] | None") -> None:
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
            self._show_answer(one, answer)
        finally:
            self._entered.remove(one)
            self.line.changed()

    def _show_answer(self, one: _Entry, answer: Answer) -> None:
        if one.waits and answer.outcome == "elsewhere":
            one.screen.note("Answered above.")
            return
        if self._leaving and answer.outcome == "failed":
            # `close_agent` reports turns that were cut off.
            if one.waits and not one.requested:
                one.screen.note(_STORED)
            return
        one.screen.finish(answer)
        if one.text == "/help":
            self.say(_KEYS_HELP)
            self.line.show([""])
        if one.command and one.command not in COMMANDS:
            near = get_close_matches(one.command, (*COMMANDS, "quit", "exit"), 1)
            if near:
                self.say(f"Did you mean /{near[0]}?\n")
        if one.command in _RESETTING_COMMANDS:
            self._status.reset()
        if answer.key != self.key or one.command == "model":
            self.key = answer.key
            self._status.reset()
            self._status.model = self._opened.agent.model_of(self.key).name
            if one.text.startswith("/resume"):
                self.show_history()

    def _tell(self, one: _Entry, event: Event) -> None:
        if isinstance(event, ModelCalled):
            one.requested = True
            self._show(one)
        one.screen.tell(event)
        self.line.changed()

    def _show(self, one: _Entry) -> None:
        if not one.shown:
            one.shown = True
            self.say(user_line(one.text), "bold")
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

    async def _pick(self, request: ResumeRequest) -> None:
        catalog = self._opened.agent.catalog
        assert catalog is not None
        try:
            found = (
                await asyncio.to_thread(find_sessions, catalog, request.text)
                if request.text
                else ()
            )
            if len(found) == 1:
                key: str | None = found[0].key
            else:
                source, output = self._terminal
                key = await pick(
                    catalog, text=request.text, channel=CHANNEL, source=source, output=output
                )
        except StenologError as error:
            self.say(error_sentence(error), "yellow")
            return
        if key is None:
            self.say("No session was chosen; staying in this one.\n")
        elif key == self.key:
            self.say("You are already in this session.\n")
        else:
            self._enter(f"/resume {key}")

    def _completer(self) -> CommandCompleter:
        known = [(f"/{name}", one.arguments, one.help) for name, one in COMMANDS.items()]
        return CommandCompleter([*known, *TERMINAL_COMMANDS], self._sessions)

    def _sessions(self, text: str) -> Iterable[tuple[str, str]]:
        catalog = self._opened.agent.catalog
        try:
            if text.strip():
                found = find_sessions(catalog, text.strip())
            else:
                found = catalog.list(limit=_MAX_COMPLETIONS).entries
        except StenologError:
            return []
        return [(entry.key, printable(entry.title)) for entry in found[:_MAX_COMPLETIONS]]

    def _history(self) -> "History | None":
        # If sessions are kept only in memory, the input must not be written to a file either.
        where = self._opened.agent.spec.sessions
        return None if address(where).engine == "memory" else InputHistory(history_file())
