"""Choose the session of a chat: a new one, the last one, or one that the user selects."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import click
from msgspec import Struct

from stenolog.agent.commands import new_key
from stenolog.catalog import Catalog, Entry
from stenolog.cli.agents import CHANNEL, SENDER, OpenAgent
from stenolog.cli.output import format_age, is_interactive, one_line, printable
from stenolog.cli.picker import find_sessions, newest_session, pick

_MAX_LISTED: Final = 10
"""Maximum number of sessions listed if several match."""
_MAX_TITLE: Final = 60


class ChatStart(Struct, frozen=True, kw_only=True):
    """The session in which a chat starts."""

    key: str
    description: str
    """Description in one line."""
    resumes: bool
    """Whether the session already has messages."""


async def find_start(
    opened: OpenAgent,
    *,
    key: str | None = None,
    continue_last: bool = False,
    text: str | None = None,
) -> ChatStart | None:
    """Find the session to start in; return None if the user was asked and chose none.

    `continue_last` selects the last session of channel cli, `text` one that matches it. Raises
    StenologError, and ClickException if there is no terminal to ask in.
    """
    catalog = opened.agent.catalog
    if key is not None:
        return _start_with_key(opened, key)
    if text is not None:
        return await _choose_start(catalog, text)
    last = await asyncio.to_thread(newest_session, catalog, channel=CHANNEL)
    if not continue_last:
        words = "New session."
        if last is not None:
            words = f"New session. `steno chat -c` continues the last one: {_title(last)}"
        if last is not None and last.state == "interrupted":
            words = (
                "New session. The last one was interrupted; `steno chat -c` finishes the answer: "
                f"{_title(last)}"
            )
        return ChatStart(key=new_key(CHANNEL, SENDER), description=words, resumes=False)
    if last is None:
        words = "There is no earlier session to continue. This is a new one."
        return ChatStart(key=new_key(CHANNEL, SENDER), description=words, resumes=False)
    return _resume_start(last)


async def _choose_start(catalog: Catalog, text: str) -> ChatStart | None:
    found = await asyncio.to_thread(find_sessions, catalog, text)
    if len(found) == 1:
        return _resume_start(found[0])
    if is_interactive():
        key = await pick(catalog, text=text, channel=CHANNEL)
        if key is None:
            return None
        return _resume_start(next(iter(await asyncio.to_thread(find_sessions, catalog, key))))
    if not found:
        raise click.ClickException(
            f"No session matches {one_line(text)!r}. `steno list` lists all sessions."
        )
    raise click.ClickException("\n".join(_ambiguous_lines(found, text)))


def _ambiguous_lines(found: Sequence[Entry], text: str) -> list[str]:
    named = [f"  {one_line(entry.key)}  {_title(entry)}" for entry in found[:_MAX_LISTED]]
    more = [f"  … and {len(found) - _MAX_LISTED:,} more"] if len(found) > _MAX_LISTED else []
    what = f"{len(found):,} sessions match {one_line(text)!r}." if text else "Which session?"
    return [f"{what} Choose one by its key: steno chat KEY", *named, *more]


def _start_with_key(opened: OpenAgent, key: str) -> ChatStart:
    own = opened.agent.own_key(key)
    if opened.agent.sessions.get_history(own, last=1):
        return ChatStart(key=own, description="", resumes=True)
    return ChatStart(key=own, description="New session with this key.", resumes=False)


def _resume_start(entry: Entry) -> ChatStart:
    said = "1 message" if entry.visible == 1 else f"{entry.visible:,} messages"
    when = "" if entry.updated is None else f", {_ago(entry.updated)}"
    return ChatStart(key=entry.key, description=f"{_title(entry)} ({said}{when})", resumes=True)


def _ago(at: datetime) -> str:
    ago = format_age(at, datetime.now(UTC))
    return "just now" if ago == "now" else ago if "-" in ago else f"{ago} ago"


def _title(entry: Entry) -> str:
    title = one_line(printable(entry.title)) or one_line(entry.key)
    return title if len(title) <= _MAX_TITLE else f"{title[: _MAX_TITLE - 1]}…"
