"""`steno chat`: an interactive chat, and the session in which it starts."""

import asyncio
import os
import sys
from datetime import UTC, datetime
from typing import Final

import click
from msgspec import Struct
from prompt_toolkit.application import create_app_session
from prompt_toolkit.output.color_depth import ColorDepth
from prompt_toolkit.output.vt100 import Vt100_Output

from stenolog.agent.commands import new_key
from stenolog.catalog import Catalog, Entry
from stenolog.cli.agents import (
    CHANNEL,
    SENDER,
    OpenAgent,
    Signals,
    close_agent,
    open_agent,
    session_model,
)
from stenolog.cli.chat_terminal import TerminalChat
from stenolog.cli.config import AgentOptions, agent_options
from stenolog.cli.output import (
    format_age,
    is_interactive,
    one_line,
    plural,
    print_notice,
    printable,
    shorten,
)
from stenolog.cli.picker import choose_session
from stenolog.cli.workspace import matching_keys

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
