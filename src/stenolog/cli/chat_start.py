"""Choose the session of a chat: a new one, the last one, or one that the user selects."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import click
from msgspec import Struct

from stenolog.agent.commands import new_key
from stenolog.catalog import Catalog, Entry
from stenolog.cli.agents import CHANNEL, SENDER, Opened
from stenolog.cli.output import age, is_interactive, one_line, printable
from stenolog.cli.picker import matching, newest, pick

_NAMED: Final = 10
"""Maximum number of sessions listed if several match."""
_TITLE: Final = 60


class Start(Struct, frozen=True, kw_only=True):
    """The session in which a chat starts."""

    key: str
    words: str
    """Description in one line."""
    goes_on: bool
    """Whether the session already has messages."""


async def find_start(
    opened: Opened, *, key: str | None = None, go_on: bool = False, text: str | None = None
) -> Start | None:
    """Find the session to start in; return None if the user was asked and chose none.

    `go_on` selects the last session of channel cli, `text` one that matches it. Raises
    StenologError, and ClickException if there is no terminal to ask in.
    """
    catalog = opened.agent.catalog
    if key is not None:
        return _named(opened, key)
    if text is not None:
        return await _chosen(catalog, text)
    last = await asyncio.to_thread(newest, catalog, channel=CHANNEL)
    if not go_on:
        words = "New session."
        if last is not None:
            words = f"New session. `steno chat -c` continues the last one: {_title(last)}"
        if last is not None and last.state == "interrupted":
            words = (
                "New session. The last one was interrupted; `steno chat -c` finishes the answer: "
                f"{_title(last)}"
            )
        return Start(key=new_key(CHANNEL, SENDER), words=words, goes_on=False)
    if last is None:
        words = "There is no earlier session to continue. This is a new one."
        return Start(key=new_key(CHANNEL, SENDER), words=words, goes_on=False)
    return _at(last)


async def _chosen(catalog: Catalog, text: str) -> Start | None:
    found = await asyncio.to_thread(matching, catalog, text)
    if len(found) == 1:
        return _at(found[0])
    if is_interactive():
        key = await pick(catalog, text=text, channel=CHANNEL)
        if key is None:
            return None
        return _at(next(iter(await asyncio.to_thread(matching, catalog, key))))
    if not found:
        raise click.ClickException(
            f"No session matches {one_line(text)!r}. `steno list` lists all sessions."
        )
    raise click.ClickException("\n".join(_several(found, text)))


def _several(found: Sequence[Entry], text: str) -> list[str]:
    named = [f"  {one_line(entry.key)}  {_title(entry)}" for entry in found[:_NAMED]]
    more = [f"  … and {len(found) - _NAMED:,} more"] if len(found) > _NAMED else []
    what = f"{len(found):,} sessions match {one_line(text)!r}." if text else "Which session?"
    return [f"{what} Choose one by its key: steno chat KEY", *named, *more]


def _named(opened: Opened, key: str) -> Start:
    own = opened.agent.own_key(key)
    if opened.agent.sessions.get_history(own, last=1):
        return Start(key=own, words="", goes_on=True)
    return Start(key=own, words="New session with this key.", goes_on=False)


def _at(entry: Entry) -> Start:
    said = "1 message" if entry.visible == 1 else f"{entry.visible:,} messages"
    when = "" if entry.updated is None else f", {_ago(entry.updated)}"
    return Start(key=entry.key, words=f"{_title(entry)} ({said}{when})", goes_on=True)


def _ago(at: datetime) -> str:
    ago = age(at, datetime.now(UTC))
    return "just now" if ago == "now" else ago if "-" in ago else f"{ago} ago"


def _title(entry: Entry) -> str:
    title = one_line(printable(entry.title)) or one_line(entry.key)
    return title if len(title) <= _TITLE else f"{title[: _TITLE - 1]}…"
