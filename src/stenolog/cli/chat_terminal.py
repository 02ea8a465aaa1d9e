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
from stenolog.catalog.entries import Entry
from stenolog.catalog.message_metadata import mark_received, model_label
from stenolog.cli.agents import CHANNEL, EXIT_NOT_SAVED, OpenAgent, Signals
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
from stenolog.cli.output import (
    error_sentence,
    one_line,
    printable,
    sentence,
    styled_lines,
    terminal_console,
)
from stenolog.cli.picker import ChatStart, Picker, find_sessions
from stenolog.cli.terminal_markdown import Block, render_block
from stenolog.cli.workspace import location_hint
from stenolog.context.turn_state import turn_state
from stenolog.errors import StenologError
from stenolog.messages import text_parts_of
from stenolog.records import Message
from stenolog.sessions.keys import cli_sender
from stenolog.stores.open_store import parse_address

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.input import Input
    from prompt_toolkit.output import Output
    from rich.console import Console


# --- history --------------------------------------------------------------------------------------


HISTORY_LIMIT: Final = 40
"""Number of messages that are read to show the end of a resumed session."""
_MAX_MESSAGES_SHOWN: Final = 4
"""Maximum number of messages shown of a resumed session."""
_MAX_MESSAGE_LINES: Final = 6
"""Maximum number of lines shown of a message in a resumed session."""


def user_line(text: str) -> str:
    """Return a user message with the prompt `> ` before it, formatted for a chat."""
    return PROMPT + printable(text).replace("\n", "\n" + " " * len(PROMPT))


def history_lines(
    history: Sequence[Message], console: "Console", *, markdown: bool = True
) -> list[str]:
    """Return the last messages of user and agent, dimmed and without tools."""
    bodies = (message.to_dict() for message in history)
    texts = [(body.get("role"), printable(text_parts_of(body)).strip()) for body in bodies]
    chat_texts = [(role, text) for role, text in texts if text and role in ("user", "assistant")]
    lines: list[str] = []
    for role, text in chat_texts[-_MAX_MESSAGES_SHOWN:]:
        if role == "user":
            message_lines = styled_lines(console, user_line(text), "dim")
        elif markdown:
            message_lines = render_block(Block(source=text, gap=0), console, style="dim")
        else:
            message_lines = styled_lines(console, text, "dim")
        if len(message_lines) > _MAX_MESSAGE_LINES:
            rest_text = f"… {len(message_lines) - _MAX_MESSAGE_LINES + 1} more lines"
            message_lines[_MAX_MESSAGE_LINES - 1 :] = styled_lines(console, rest_text, "dim italic")
        lines += [*message_lines, ""]
    return lines


# --- conversation ---------------------------------------------------------------------------------


_STORED_NOTICE: Final = "Saved, not answered yet."
_MAX_COMPLETIONS: Final = 30
_KEYS_HELP: Final = (
    "Enter sends. Alt-Enter, or \\ at the end of a line, starts a new line. Ctrl-C stops the "
    "answer. Ctrl-R searches your earlier input. Ctrl-D or /quit leaves; the session is kept."
)
TERMINAL_COMMANDS: Final = (("/quit", "", "leave; the session is kept"),)
"""Commands of the terminal, in addition to the commands of the agent loop."""
_SWITCHING_COMMANDS: Final = ("new", "resume")
"""Commands that switch to another session."""
_RESETTING_COMMANDS: Final = ("clear", "undo")
"""Commands after which the size of the context is unknown until the next request."""


class _Entry:
    """An entered message or command, until it is answered."""

    def __init__(self, text: str, screen: TurnScreen) -> None:
        self.text = text
        self.screen = screen
        self.is_waiting = False
        self.is_begun = False
        """Whether the entry was passed to the loop."""
        self.is_requested = False
        """Whether a request was sent to the model."""
        self.is_shown = False
        self.task: asyncio.Task[None] | None = None

    @property
    def command_name(self) -> str:
        """Return the name of the command; empty for a message."""
        command = parse_command(self.text)
        return "" if command is None else command.name

    @property
    def changes_session(self) -> bool:
        """Whether the entry is a command that changes the session or switches to another."""
        name = self.command_name
        return name in COMMANDS and (COMMANDS[name].needs_lease or name in _SWITCHING_COMMANDS)


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

        `source` and `output` replace the terminal of the process.
        """
        self.key = key
        self.exit_code = 0
        """EXIT_NOT_SAVED if a waiting message could not be stored, otherwise 0."""
        self._opened = opened
        self._terminal_streams = (source, output)
        self._console = terminal_console()
        self._status = StatusLine(opened.agent.model_of(key).name)
        self._entries: list[_Entry] = []
        self._resumed_screen: TurnScreen | None = None
        self._resume_task: asyncio.Task[None] | None = None
        self._is_leaving = False
        self._has_message = False
        self._stop_tasks: set[asyncio.Task[bool]] = set()
        self.line = InputLine(
            self, history=self._history(), completer=self._completer(), source=source, output=output
        )

    async def run(self, signals: Signals) -> None:
        """Talk until the user leaves or a signal arrives."""
        try:
            while isinstance(
                request := await signals.run_until_signal(self.line.run()), ResumeRequest
            ):
                await signals.run_until_signal(self._pick_session(request))
        finally:
            self._is_leaving = True
            await self._store_waiting()
        if not signals.received.is_set():
            # Leaving does not wait for an answer. The text that is already written is stored.
            await self._opened.loop.stop(self.key, agent=self._opened.agent.id)
            if self._has_message:
                key = shlex.quote(one_line(self.key))
                self.show_notice(f"Resume with: steno chat {key}{location_hint()}")

    async def wait_for_turns(self) -> None:
        """After the loop was closed, wait for all turns and show the last lines."""
        tasks = [entry.task for entry in self._entries if entry.task is not None]
        if self._resume_task is not None:
            tasks.append(self._resume_task)
        if tasks:
            await asyncio.wait(tasks)
        self.line.flush()

    async def _store_waiting(self) -> None:
        """Store the messages that wait behind a command. Waiting commands are not run.

        Messages after a command that changes or switches the session are reported as not sent.
        """
        is_blocked = False
        for entry in tuple(self._entries):
            is_blocked = is_blocked or entry.changes_session
            if entry.is_begun or entry.task is None:
                continue
            entry.task.cancel()
            if entry.command_name:
                self.show_notice(f"Not run: {entry.text}", "yellow")
            elif not is_blocked and await asyncio.to_thread(self._store_message, entry.text):
                self.show_notice(f"{user_line(entry.text)}\n{_STORED_NOTICE}", "yellow")
            else:
                self.exit_code = EXIT_NOT_SAVED
                self.show_notice(f"Not sent: {entry.text}", "yellow")

    def _store_message(self, text: str) -> bool:
        content = text[1:] if text.startswith("//") else text
        body = {"role": "user", "content": content}
        # After a restart, agents answer only messages that are marked as received.
        body = mark_received(body, sender=cli_sender(self.key))
        try:
            return bool(self._opened.agent.sessions.add_full_message(self.key, body))
        except StenologError:
            return False

    def show_notice(self, text: str, style: str = "dim") -> None:
        """Show a notice above the input line."""
        self.line.show(styled_lines(self._console, text, style))

    def greet(self, start: ChatStart) -> None:
        """Show agent, model, session and problems, and the last messages of an existing session."""
        agent = self._opened.agent
        name = f"{one_line(agent.id)} · " if agent.id else ""
        self.show_notice(f"{name}{model_label(self._status.model)} · {one_line(self.key)}")
        if start.description:
            self.show_notice(start.description)
        for problem in agent.problems:
            self.show_notice(f"! {sentence(problem)}", "yellow")
        self.line.show([""])
        if start.resumes:
            self.show_history()

    def show_history(self) -> None:
        """Show the last messages of this session, and resume an interrupted turn."""
        sessions = self._opened.agent.sessions
        history = sessions.get_history(self.key, last=HISTORY_LIMIT)
        markdown = self._opened.settings.cli.markdown
        self.line.show(history_lines(history, self._console, markdown=markdown))
        fork_seq = read_forked_at(sessions, self.key)
        if turn_state(history).is_unfinished and is_own_turn(history, after=fork_seq):
            self.show_notice("The last turn was interrupted. Resuming it.", "yellow")
            self.line.show([""])
            self._has_message = True
            self._resumed_screen = self._new_screen()
            self._resume_task = asyncio.create_task(self._resume(self._resumed_screen))

    # --- interface for the input line --------------------------------------------------------

    def send(self, text: str) -> ChatRequest | None:
        """Send a message or a command. Commands of the terminal itself return a request."""
        words = text.split()
        if words[0] in QUIT_COMMANDS:
            return LeaveRequest()
        if words[0] == "/stop":
            if self.is_busy:
                self.stop()
            else:
                self.show_notice("No answer is being written.\n")
            return None
        if words[0] == "/resume" and not self.is_busy:
            return ResumeRequest(" ".join(words[1:]))
        self._start_entry(text)
        return None

    def stop(self) -> None:
        """Stop the current answer."""
        stop_task = asyncio.create_task(
            self._opened.loop.stop(self.key, agent=self._opened.agent.id)
        )
        self._stop_tasks.add(stop_task)
        stop_task.add_done_callback(self._stop_tasks.discard)

    @property
    def is_busy(self) -> bool:
        """Whether a turn is in progress."""
        return bool(self._entries or self._resumed_screen is not None)

    def live_lines(self, rows: int) -> Sequence[str]:
        """Return the text that is still changing."""
        if self._resumed_screen is not None:
            return self._resumed_screen.live_lines(rows)
        shown_entry = next((entry for entry in self._entries if entry.is_shown), None)
        return shown_entry.screen.live_lines(rows) if shown_entry is not None else ()

    def waiting_messages(self) -> Sequence[str]:
        """Return the messages entered during the current turn."""
        return [entry.text for entry in self._entries if not entry.is_shown]

    def status_text(self) -> str:
        """Return the status line."""
        return self._status.text()

    @property
    def is_nearly_full(self) -> bool:
        """Whether the session will soon be summarized."""
        return self._status.is_nearly_full

    # --- turns -------------------------------------------------------------------------------

    def _new_screen(self) -> TurnScreen:
        settings = self._opened.settings.cli
        return TurnScreen(
            self._console,
            self._status,
            show=self.line.show,
            reasoning=settings.show_reasoning,
            markdown=settings.markdown,
        )

    def _start_entry(self, text: str) -> None:
        entry = _Entry(text, self._new_screen())
        self._has_message = self._has_message or not entry.command_name
        # A message is stored at once and waits in the log.
        # A command may change the log or the session, so it and all later entries wait here.
        previous = self._entries[-1].task if self._entries else None
        must_wait = any(other.command_name for other in (entry, *self._entries))
        entry.is_waiting = self.is_busy
        if not entry.is_waiting:
            self._show_entry_text(entry)
        entry.task = asyncio.create_task(self._run_entry(entry, previous if must_wait else None))
        self._entries.append(entry)
        self.line.request_repaint()

    async def _run_entry(self, entry: _Entry, previous_task: "asyncio.Task[None] | None") -> None:
        try:
            if previous_task is not None:
                await asyncio.wait([previous_task])
            entry.is_begun = True
            if entry.command_name:
                self._show_entry_text(entry)
            inbound = InboundMessage(key=self.key, content=entry.text, sender=cli_sender(self.key))
            answer = await self._opened.loop.handle(
                inbound,
                on_event=partial(self._show_event, entry),
                agent=self._opened.agent.id,
                all_sessions=True,
            )
        except StenologError as error:
            self._show_entry_text(entry)
            entry.screen.show_note(error_sentence(error))
        else:
            self._show_entry_text(entry)
            self._show_answer(entry, answer)
        finally:
            self._entries.remove(entry)
            self.line.request_repaint()

    def _show_answer(self, entry: _Entry, answer: Answer) -> None:
        if entry.is_waiting and answer.outcome == "elsewhere":
            entry.screen.show_note("Answered above.")
            return
        if self._is_leaving and answer.outcome == "failed":
            # `close_agent` reports turns that were cut off.
            if entry.is_waiting and not entry.is_requested:
                entry.screen.show_note(_STORED_NOTICE)
            return
        entry.screen.finish(answer)
        if entry.text == "/help":
            self.show_notice(_KEYS_HELP)
            self.line.show([""])
        if entry.command_name and entry.command_name not in COMMANDS:
            similar_names = get_close_matches(entry.command_name, (*COMMANDS, "quit", "exit"), 1)
            if similar_names:
                self.show_notice(f"Did you mean /{similar_names[0]}?\n")
        if entry.command_name in _RESETTING_COMMANDS:
            self._status.reset()
        if answer.key != self.key or entry.command_name == "model":
            self.key = answer.key
            self._status.reset()
            self._status.model = self._opened.agent.model_of(self.key).name
            if entry.text.startswith("/resume"):
                self.show_history()

    def _show_event(self, entry: _Entry, event: Event) -> None:
        if isinstance(event, ModelCalled):
            entry.is_requested = True
            self._show_entry_text(entry)
        entry.screen.show_event(event)
        self.line.request_repaint()

    def _show_entry_text(self, entry: _Entry) -> None:
        if not entry.is_shown:
            entry.is_shown = True
            self.show_notice(user_line(entry.text), "bold")
            self.line.show([""])

    async def _resume(self, screen: TurnScreen) -> None:
        def show_event(event: Event) -> None:
            screen.show_event(event)
            self.line.request_repaint()

        try:
            for answer in await self._opened.loop.resume(
                self.key, on_event=show_event, agent=self._opened.agent.id
            ):
                screen.finish(answer)
        except StenologError as error:
            screen.show_note(error_sentence(error))
        finally:
            self._resumed_screen = None
            self.line.request_repaint()

    # --- choosing a session ------------------------------------------------------------------

    async def _pick_session(self, request: ResumeRequest) -> None:
        catalog = self._opened.agent.catalog
        key: str | None
        try:
            matches: Sequence[Entry] = ()
            if request.text:
                matches = await asyncio.to_thread(find_sessions, catalog, request.text)
            if len(matches) == 1:
                key = matches[0].key
            else:
                source, output = self._terminal_streams
                picker = Picker(catalog, channel=CHANNEL)
                key = await picker.run(request.text, source=source, output=output)
        except StenologError as error:
            self.show_notice(error_sentence(error), "yellow")
            return
        if key is None:
            self.show_notice("No session was chosen; staying in this one.\n")
        elif key == self.key:
            self.show_notice("You are already in this session.\n")
        else:
            self._start_entry(f"/resume {key}")

    def _completer(self) -> CommandCompleter:
        commands = [(f"/{name}", entry.arguments, entry.help) for name, entry in COMMANDS.items()]
        return CommandCompleter([*commands, *TERMINAL_COMMANDS], self._matching_sessions)

    def _matching_sessions(self, text: str) -> Iterable[tuple[str, str]]:
        catalog = self._opened.agent.catalog
        try:
            if text.strip():
                entries = find_sessions(catalog, text.strip())
            else:
                entries = catalog.list(limit=_MAX_COMPLETIONS).entries
        except StenologError:
            return []
        return [(entry.key, printable(entry.title)) for entry in entries[:_MAX_COMPLETIONS]]

    def _history(self) -> "History | None":
        # If sessions are kept only in memory, the input must not be written to a file either.
        where = self._opened.agent.spec.sessions
        return None if parse_address(where).engine == "memory" else InputHistory(history_file())
