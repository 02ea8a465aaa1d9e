"""The session in which a chat starts."""

import asyncio
from datetime import UTC, datetime
from typing import Final

from msgspec import Struct

from stenolog.agent.commands import new_key
from stenolog.catalog import Catalog, Entry
from stenolog.cli.agents import CHANNEL, SENDER, OpenAgent
from stenolog.cli.output import format_age, one_line, plural, printable, shorten
from stenolog.cli.picker import choose_session
from stenolog.cli.workspace import matching_keys

_MAX_TITLE_LENGTH: Final = 60
_MAX_EXAMINED_SESSIONS: Final = 100
"""Maximum number of sessions that are examined to find the last one with messages."""


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
