"""`steno chat`: an interactive chat, and the session in which it starts."""

import asyncio
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec import Struct
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.output.color_depth import ColorDepth
from prompt_toolkit.output.vt100 import Vt100_Output

from stenolog.agent.commands import COMMANDS, new_key, parse_command
from stenolog.agent.session_history import is_own_turn, read_fork_seq
from stenolog.agent.threads import start_task
from stenolog.agent.turn_events import Answer, Event, ModelCalled
from stenolog.catalog import Catalog, Entry
from stenolog.catalog.message_metadata import model_label
from stenolog.cli.agents import (
    CHANNEL,
    EXIT_NOT_SAVED,
    SENDER,
    OpenAgent,
    Signals,
    close_agent,
    open_agent,
    session_model,
)
from stenolog.cli.chat_input import InputHistory, InputLine, history_file
from stenolog.cli.chat_screen import PROMPT, StatusLine, TurnScreen
from stenolog.cli.config import AgentOptions, agent_options
from stenolog.cli.output import (
    error_sentence,
    format_age,
    is_interactive,
    one_line,
    plural,
    print_notice,
    printable,
    sentence,
    shorten,
    styled_lines,
    terminal_console,
)
from stenolog.cli.picker import choose_session
from stenolog.cli.terminal_markdown import Block, render_block
from stenolog.cli.workspace import matching_keys, session_command
from stenolog.context.turn_state import turn_state
from stenolog.errors import StenologError
from stenolog.messages import text_parts_of
from stenolog.records import Message
from stenolog.stores.open_store import parse_address

if TYPE_CHECKING:
    from rich.console import Console


_MAX_TITLE_LENGTH: Final = 60
_MAX_EXAMINED_SESSIONS: Final = 100
"""Maximum number of sessions that are examined to find the last one with messages."""


@click.command("chat")
@click.argument("key", required=False)
@click.option(
    "-c",
    "--continue",
    "continue_last",
    is_flag=True,
    help="Continue the last session of the command line.",
)
@click.option(
    "-r",
    "--resume",
    "search",
    is_flag=False,
    flag_value="",
    metavar="[TEXT]",
    help="Choose a session; TEXT searches titles, keys and messages.",
)
@agent_options
def chat_command(
    key: str | None, continue_last: bool, search: str | None, options: AgentOptions
) -> int:
    """Talk to an agent in a terminal, in a new session or in the session KEY.

    /help lists commands and keys. Scripts use `steno ask`.

    If no model is configured, the first model found is used: by an API key in the environment, in
    Ollama, or as local weights. --model scripted is a test model that needs no key.

    Example: steno chat -c --model ollama/llama3.2

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 a message could not be saved, 128 + N ended by
    signal N.
    """
    if sum((key is not None, continue_last, search is not None)) > 1:
        raise click.UsageError("Select the session only once: with KEY, -c or -r.")
    if not is_interactive():
        raise click.ClickException(
            "steno chat needs an interactive terminal. "
            "Elsewhere: steno ask --session KEY 'QUESTION'"
        )
    with create_app_session(output=_inline_output()):
        return asyncio.run(_chat(options, key=key, continue_last=continue_last, search=search))


async def _chat(
    options: AgentOptions, *, key: str | None, continue_last: bool, search: str | None
) -> int:
    selects_session = key is not None or continue_last or search is not None
    opened_agent = open_agent(options, allow_missing_model=selects_session)
    signals = Signals()
    chat = None
    try:
        start = await signals.run_until_signal(
            find_start(opened_agent, key=key, continue_last=continue_last, search_text=search)
        )
        if start is not None:
            session_model(opened_agent, start.key)
            chat = TerminalChat(opened_agent, start.key)
            chat.greet(start)
            await chat.run(signals)
    finally:
        exit_code = await close_agent(opened_agent, signals, print_notice)
        if chat is not None:
            await chat.wait_for_turns()
    return exit_code or (0 if chat is None else chat.exit_code)


def _inline_output() -> Vt100_Output:
    """Return the terminal output for widgets that are drawn below other output and then removed."""
    output = Vt100_Output.from_pty(
        sys.stdout,
        term=os.environ.get("TERM"),
        default_color_depth=ColorDepth.from_env(),
        enable_bell=False,
    )
    # Do not ask for the cursor position: the terminal's answer would mix with typed text.
    output.enable_cpr = False
    return output


# --- the first session ----------------------------------------------------------------------------


class ChatStart(Struct, frozen=True, kw_only=True):
    """The session in which a chat starts."""

    key: str
    description: str
    """Description of the session in one line; may be empty."""
    resumes: bool
    """Whether the session already has messages."""


async def find_start(
    opened_agent: OpenAgent,
    *,
    key: str | None = None,
    continue_last: bool = False,
    search_text: str | None = None,
) -> ChatStart | None:
    """Find the session to start in; return None if the user chose no session.

    `key` names the session, `continue_last` selects the last session of channel cli, and
    `search_text` selects a session that matches it; otherwise the session is new. Raises
    StenologError.
    """
    catalog = opened_agent.agent.catalog
    if key is not None:
        key = opened_agent.agent.resolve_key(key)
        resumes = bool(opened_agent.agent.sessions.get_history(key, last=1))
        description = ""
        if not resumes:
            description = "New session with this key."
            # `steno list` shows a part of a long key, which is a new key here.
            matches = matching_keys(opened_agent.agent.store.list_sessions(), key)
            if len(matches) == 1:
                description += f" To continue {one_line(matches[0])}, use the whole key."
        return ChatStart(key=key, description=description, resumes=resumes)
    if search_text is not None:
        entry = await choose_session(catalog, search_text)
        return None if entry is None else _start_from_entry(entry)
    last_entry = await asyncio.to_thread(find_last_session, catalog, channel=CHANNEL)
    if not continue_last:
        description = "New session."
        if last_entry is not None:
            hint = "`steno chat -c` continues the last one"
            if last_entry.state == "interrupted":
                hint = "The last one was interrupted; `steno chat -c` finishes the answer"
            description = f"New session. {hint}: {_short_title(last_entry)}"
    elif last_entry is not None:
        return _start_from_entry(last_entry)
    else:
        description = "There is no earlier session to continue. This is a new one."
    return ChatStart(key=new_key(CHANNEL, SENDER), description=description, resumes=False)


def find_last_session(catalog: Catalog, *, channel: str) -> Entry | None:
    """Return the channel's last changed session that is readable and has messages, or None."""
    entries = catalog.list(channel=channel, limit=_MAX_EXAMINED_SESSIONS).entries
    return next((entry for entry in entries if entry.problem is None and entry.count), None)


def _start_from_entry(entry: Entry) -> ChatStart:
    details = plural(entry.visible, "message")
    if entry.updated is not None:
        age = format_age(entry.updated, datetime.now(UTC))
        details += ", just now" if age == "now" else f", {age}" if "-" in age else f", {age} ago"
    return ChatStart(key=entry.key, description=f"{_short_title(entry)} ({details})", resumes=True)


def _short_title(entry: Entry) -> str:
    return shorten(one_line(printable(entry.title)) or one_line(entry.key), _MAX_TITLE_LENGTH)


# --- history --------------------------------------------------------------------------------------


HISTORY_LIMIT: Final = 40
"""Number of messages that are read to show the end of a resumed session."""
_MAX_SHOWN_MESSAGES: Final = 4
"""Maximum number of messages shown of a resumed session."""
_MAX_MESSAGE_LINES: Final = 6
"""Maximum number of lines shown of a message in a resumed session."""


def user_line(text: str) -> str:
    """Return a user message after the prompt `> `, with its further lines indented."""
    return PROMPT + printable(text).replace("\n", "\n" + " " * len(PROMPT))


def history_lines(history: Sequence[Message], console: "Console") -> list[str]:
    """Return the last messages of user and agent as dimmed lines, without tool calls."""
    message_dicts = (message.to_dict() for message in history)
    texts = [
        (message_dict.get("role"), printable(text_parts_of(message_dict)).strip())
        for message_dict in message_dicts
    ]
    chat_texts = [(role, text) for role, text in texts if text and role in ("user", "assistant")]
    lines: list[str] = []
    for role, text in chat_texts[-_MAX_SHOWN_MESSAGES:]:
        if role == "user":
            message_lines = styled_lines(console, user_line(text), "dim")
        else:
            message_lines = render_block(Block(source=text, gap=0), console, style="dim")
        if len(message_lines) > _MAX_MESSAGE_LINES:
            rest_text = f"… {len(message_lines) - _MAX_MESSAGE_LINES + 1} more lines"
            message_lines[_MAX_MESSAGE_LINES - 1 :] = styled_lines(console, rest_text, "dim italic")
        lines += [*message_lines, ""]
    return lines


# --- conversation ---------------------------------------------------------------------------------


_SAVED_NOTICE: Final = "Saved, not answered yet."
_KEYS_HELP_TEXT: Final = (
    "Enter sends. Alt-Enter, or \\ at the end of a line, starts a new line. Ctrl-C stops the "
    "answer. Ctrl-R searches your earlier input. Ctrl-D or /quit leaves; the session is kept."
)
_QUIT_COMMANDS: Final = ("/quit", "/exit")
_RESETTING_COMMANDS: Final = ("clear", "undo")
"""Commands after which the size of the context is unknown until the next request."""


class _UserInput(Struct, eq=False):
    """A message or command that the user entered and that is not answered yet."""

    text: str
    screen: TurnScreen
    had_to_wait: bool = False
    is_sent_to_loop: bool = False
    is_model_called: bool = False
    is_shown: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def command_name(self) -> str:
        """Return the name of the command; empty for a message."""
        command = parse_command(self.text)
        return "" if command is None else command.name


class TerminalChat:
    """Chat in a terminal: sends messages, stops answers, and tracks the turns in progress."""

    def __init__(self, opened_agent: OpenAgent, key: str) -> None:
        self.key = key
        self.exit_code = 0
        """EXIT_NOT_SAVED if the user left before a waiting message was sent, otherwise 0."""
        self._opened_agent = opened_agent
        self._console = terminal_console(styled=True)
        self.status = StatusLine(opened_agent.agent.model_of(key).name)
        self._inputs: list[_UserInput] = []
        self._resumed_screen: TurnScreen | None = None
        self._resume_task: asyncio.Task[None] | None = None
        self._is_leaving = False
        self._has_message = False
        self._stop_tasks: set[asyncio.Task[Any]] = set()
        help_texts = {f"/{name}": entry.help for name, entry in COMMANDS.items()}
        help_texts["/quit"] = "leave; the session is kept"
        usages = {f"/{name}": f"/{name} {entry.arguments}" for name, entry in COMMANDS.items()}
        completer = WordCompleter(
            [*help_texts], display_dict=usages, meta_dict=help_texts, sentence=True
        )
        # If sessions are kept only in memory, the input must not be written to a file either.
        is_in_memory = parse_address(opened_agent.agent.spec.sessions).engine == "memory"
        history = InMemoryHistory() if is_in_memory else InputHistory(history_file())
        self.line = InputLine(self, history=history, completer=completer)

    async def run(self, signals: Signals) -> None:
        """Run the chat until the user leaves or a signal arrives."""
        try:
            run_until_signal = signals.run_until_signal
            while (search_text := await run_until_signal(self.line.run())) is not None:
                await run_until_signal(self._pick_session(search_text))
        finally:
            self._is_leaving = True
            self._cancel_waiting_inputs()
        if not signals.received.is_set():
            # Do not wait for the answer: stop it, which stores the text written so far.
            await self._opened_agent.stop(self.key)
            if self._has_message:
                self.show_notice(f"Resume with: {session_command('chat', self.key)}")

    async def wait_for_turns(self) -> None:
        """Wait for all turns and show their last lines. The agent loop must already be closed."""
        tasks = [user_input.task for user_input in self._inputs if user_input.task is not None]
        if self._resume_task is not None:
            tasks.append(self._resume_task)
        if tasks:
            await asyncio.wait(tasks)
        self.line.flush()

    def _cancel_waiting_inputs(self) -> None:
        """Report what waits for a command to end: it is neither sent nor run."""
        for user_input in tuple(self._inputs):
            if not user_input.is_sent_to_loop and user_input.task is not None:
                user_input.task.cancel()
                if not user_input.command_name:
                    self.exit_code = EXIT_NOT_SAVED
                self.show_notice(f"Not sent: {user_input.text}", "yellow")

    def show_notice(self, text: str, style: str = "dim") -> None:
        """Show a notice above the input line."""
        self.line.show(styled_lines(self._console, text, style))

    def greet(self, start: ChatStart) -> None:
        """Show agent, model, session and problems, and the last messages of an existing session."""
        agent = self._opened_agent.agent
        agent_prefix = f"{one_line(agent.id)} · " if agent.id else ""
        self.show_notice(f"{agent_prefix}{model_label(self.status.model)} · {one_line(self.key)}")
        if start.description:
            self.show_notice(start.description)
        for problem in agent.problems:
            self.show_notice(f"! {sentence(problem)}", "yellow")
        self.line.show([""])
        if start.resumes:
            self.resume_session()

    def resume_session(self) -> None:
        """Show the last messages of this session, and resume an interrupted turn."""
        sessions = self._opened_agent.agent.sessions
        history = sessions.get_history(self.key, last=HISTORY_LIMIT)
        self.line.show(history_lines(history, self._console))
        fork_seq = read_fork_seq(sessions.store, self.key)
        if turn_state(history).is_unfinished and is_own_turn(history, after=fork_seq):
            self.show_notice("The last turn was interrupted. Resuming it.\n", "yellow")
            self._has_message = True
            self._resumed_screen = self._new_screen()
            self._resume_task = asyncio.create_task(self._resume_turn(self._resumed_screen))

    # --- interface for the input line --------------------------------------------------------

    def send(self, text: str) -> None:
        """Send a message or a command, or end the input line.

        `/quit` and `/exit` end the input line, and so does `/resume` if no turn is in progress.
        """
        words = text.split()
        if words[0] in _QUIT_COMMANDS:
            self.line.end()
        elif words[0] == "/stop" and self.is_busy:
            self.stop()
        elif words[0] == "/stop":
            self.show_notice("No answer is being written.\n")
        elif words[0] == "/resume" and not self.is_busy:
            self.line.end(" ".join(words[1:]))
        else:
            self._start_input(text)

    def stop(self) -> None:
        """Stop the current answer."""
        start_task(self._opened_agent.stop(self.key), self._stop_tasks)

    @property
    def is_busy(self) -> bool:
        """Whether a turn is in progress."""
        return bool(self._inputs or self._resumed_screen is not None)

    def live_lines(self, max_rows: int) -> Sequence[str]:
        """Return the text that is still changing."""
        if self._resumed_screen is not None:
            return self._resumed_screen.live_lines(max_rows)
        shown_input = next((user_input for user_input in self._inputs if user_input.is_shown), None)
        return shown_input.screen.live_lines(max_rows) if shown_input is not None else ()

    def waiting_messages(self) -> Sequence[str]:
        """Return the messages and commands that wait for the current turn to end."""
        return [user_input.text for user_input in self._inputs if not user_input.is_shown]

    # --- turns -------------------------------------------------------------------------------

    def _new_screen(self) -> TurnScreen:
        return TurnScreen(self._console, self.status, show=self.line.show)

    def _start_input(self, text: str) -> None:
        user_input = _UserInput(text, self._new_screen())
        self._has_message = self._has_message or not user_input.command_name
        # A message is stored at once, even while another message is answered.
        # A command may change or switch the session, so it and all later inputs wait here.
        previous_task = self._inputs[-1].task if self._inputs else None
        waits_for_previous = any(queued.command_name for queued in (user_input, *self._inputs))
        user_input.had_to_wait = self.is_busy
        if not user_input.had_to_wait:
            self._show_input_text(user_input)
        user_input.task = asyncio.create_task(
            self._run_input(user_input, previous_task if waits_for_previous else None)
        )
        self._inputs.append(user_input)
        self.line.request_repaint()

    async def _run_input(
        self, user_input: _UserInput, previous_task: "asyncio.Task[None] | None"
    ) -> None:
        try:
            if previous_task is not None:
                await asyncio.wait([previous_task])
            user_input.is_sent_to_loop = True
            if user_input.command_name:
                self._show_input_text(user_input)
            on_event = partial(self._show_event, user_input)
            answer = await self._opened_agent.handle(self.key, user_input.text, on_event)
        except StenologError as error:
            self._show_input_text(user_input)
            user_input.screen.show_note(error_sentence(error))
        else:
            self._show_input_text(user_input)
            self._handle_answer(user_input, answer)
        finally:
            self._inputs.remove(user_input)
            self.line.request_repaint()

    def _handle_answer(self, user_input: _UserInput, answer: Answer) -> None:
        if user_input.had_to_wait and answer.outcome == "elsewhere":
            user_input.screen.show_note("Answered above.")
            return
        if self._is_leaving and answer.outcome == "failed":
            # `close_agent` reports interrupted turns, so the failure is not shown here.
            if user_input.had_to_wait and not user_input.is_model_called:
                user_input.screen.show_note(_SAVED_NOTICE)
            return
        user_input.screen.finish(answer)
        if user_input.text == "/help":
            self.show_notice(f"{_KEYS_HELP_TEXT}\n")
        if user_input.command_name in _RESETTING_COMMANDS:
            self.status.reset()
        if answer.key != self.key or user_input.command_name == "model":
            self.key = answer.key
            self.status.reset()
            self.status.model = self._opened_agent.agent.model_of(self.key).name
            if user_input.text.startswith("/resume"):
                self.resume_session()

    def _show_event(self, user_input: _UserInput, event: Event) -> None:
        if isinstance(event, ModelCalled):
            user_input.is_model_called = True
            self._show_input_text(user_input)
        user_input.screen.show_event(event)
        self.line.request_repaint()

    def _show_input_text(self, user_input: _UserInput) -> None:
        if not user_input.is_shown:
            user_input.is_shown = True
            self.show_notice(f"{user_line(user_input.text)}\n", "bold")

    async def _resume_turn(self, screen: TurnScreen) -> None:
        def show_event(event: Event) -> None:
            screen.show_event(event)
            self.line.request_repaint()

        try:
            for answer in await self._opened_agent.loop.resume(
                self.key, on_event=show_event, agent=self._opened_agent.agent.id
            ):
                screen.finish(answer)
        except StenologError as error:
            screen.show_note(error_sentence(error))
        finally:
            self._resumed_screen = None
            self.line.request_repaint()

    # --- choosing a session ------------------------------------------------------------------

    async def _pick_session(self, search_text: str) -> None:
        try:
            entry = await choose_session(self._opened_agent.agent.catalog, search_text)
        except StenologError as error:
            self.show_notice(error_sentence(error), "yellow")
            return
        if entry is None:
            self.show_notice("No session was chosen; staying in this one.\n")
        elif entry.key == self.key:
            self.show_notice("You are already in this session.\n")
        else:
            self._start_input(f"/resume {entry.key}")
