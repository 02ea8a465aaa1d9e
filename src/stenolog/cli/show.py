"""`steno show` and `steno tail`: print the messages of a session."""

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import Any, Final

import click

from stenolog.catalog.searchable_text import (
    last_copied_from,
    prompt_from,
    role_of,
    source_from,
    text_of,
    title_from,
)
from stenolog.cli.message_lines import MessageRenderer, print_message
from stenolog.cli.options import json_option, key_argument
from stenolog.cli.output import (
    json_text,
    one_line,
    print_notice,
    print_notices,
    printable,
    uses_color,
)
from stenolog.cli.workspace import (
    Location,
    damage_lines,
    find_session,
    find_session_or_none,
    find_session_to_read,
    location_options,
    messages_are,
    open_read_only,
)
from stenolog.errors import StenologError
from stenolog.records import Message, SessionInfo
from stenolog.stores.base import Store, forked_at

_NEIGHBOUR_COUNT: Final = 5
"""Number of messages shown before and after the requested message."""
_MAX_SEARCHED: Final = 20_000
"""The source session of a fork is searched only if it has at most this many messages."""


@click.command("show")
@key_argument
@click.option("--all", "full", is_flag=True, help="Include hidden and archived messages.")
@click.option(
    "--at",
    metavar="SEQ",
    type=click.IntRange(min=1),
    help="Show only this message and its neighbours.",
)
@click.option("--tools", is_flag=True, help="Do not shorten tool calls and results.")
@click.option("--no-pager", is_flag=True, help="Do not use a pager.")
@json_option()
@location_options
def show_command(
    key: str,
    full: bool,
    at: int | None,
    tools: bool,
    no_pager: bool,
    as_json: bool,
    where: Location,
) -> None:
    """Show the messages of the session KEY.

    KEY:SEQ shows one message and its neighbours, including hidden messages. In a terminal,
    `steno search` prints the KEY:SEQ of each result. KEY:SEQ is the same as KEY --at SEQ.

    In a terminal, the start or end of KEY, or the start of a part after a colon, is enough if only
    one session matches.

    In a terminal, Markdown is formatted, tool results are shortened, and long output is paged
    ($PAGER, otherwise less). Without a terminal the output is plain text. Control characters are
    removed; `steno export` prints messages exactly as stored.

    Example: steno show telegram:123 --all

    Exit codes: 0 done, 1 there is no such session or message, 2 wrong usage.
    """
    with open_read_only(where) as store:
        info, at = _find_message(store, key, at)
        summary, hidden, earlier = info.summary, info.count - info.visible, list[Message]()
        if at is None:
            messages = store.get_history(info.key, full=full)
        else:
            messages = _message_and_neighbours(store, info, at)
            earlier = [message for message in messages if message.seq < at]
            summary, hidden = "", 0
        source = "" if as_json or at is not None else one_line(_fork_source_text(store, info))
        if as_json:
            click.echo(json_text(_session_fields(store, info, messages)))
        elif sys.stdout.isatty():
            renderer = MessageRenderer(color=uses_color(), tools=tools)
            start = len(list(renderer.conversation_lines("", earlier, None)))
            lines = renderer.conversation_lines(summary, messages, at)
            lines = chain([source, ""] if source else [], lines)
            _print_lines(lines, paged=not no_pager, skipped_lines=start)
        else:
            if source:
                click.echo(f"{source}\n")
            if summary:
                click.secho("Summary", bold=True)
                click.echo(f"{printable(summary)}\n")
            for message in messages:
                print_message(message)
        if hidden and not full:
            print_notice(f"{messages_are(hidden)} hidden. Use --all to show them.")
        # Read the info again: reading all messages may have discovered damage.
        print_notices(damage_lines(find_session(store, info.key), where.workspace))


# --- selection -------------------------------------------------------------------------------


def _find_message(store: Store, name: str, at: int | None) -> tuple[SessionInfo, int | None]:
    """Return the session and the seq of the message.

    If `name` is an existing key, it is not read as KEY:SEQ.
    """
    key, _, seq = name.rpartition(":")
    if at is None and key and seq.isascii() and seq.isdecimal():
        info = None if find_session_or_none(store, name) else find_session_or_none(store, key)
        if info is not None:
            return info, int(seq)
    return find_session_to_read(store, name), at


def _message_and_neighbours(store: Store, info: SessionInfo, at: int) -> list[Message]:
    """Return a message and its neighbours. Raises ClickException if there is no such message."""
    nearby = store.get_history(info.key, after=max(0, at - 1 - 4 * _NEIGHBOUR_COUNT), full=True)
    preceding = [message for message in nearby if message.seq < at][-_NEIGHBOUR_COUNT:]
    following = [message for message in nearby if message.seq >= at][: _NEIGHBOUR_COUNT + 1]
    if not following or following[0].seq != at:
        raise click.ClickException(
            f"There is no message {at} in {one_line(info.key)}; the last is {info.last_seq}."
        )
    return [*preceding, *following]


def _fork_source_text(store: Store, info: SessionInfo) -> str:
    """Return `forked from KEY at message N` or `continues KEY at message N`; empty for others.

    A session that another program forked continues its source: it has only its own messages.
    """
    source = info.forked_from or source_from(info.meta)
    if not source:
        return ""
    seq = forked_at(info) or _last_copied_seq(store, source, last_copied_from(info.meta))
    verb = "forked from" if info.forked_from else "continues"
    return f"{verb} {source} at message {seq}" if seq else f"{verb} {source}"


def _last_copied_seq(store: Store, source: str, identity: str) -> int:
    """Return the seq of the message with this identity in the source session, or 0."""
    with suppress(StenologError):  # The source may be missing or damaged, or have an invalid key.
        if identity and store.info(source).count <= _MAX_SEARCHED:
            # This import is slow and only needed for forks of other programs.
            from stenolog.transfer.transcripts.transcript import identity_of

            encoded_id = identity.encode()
            messages = store.get_history(source, full=True)
            candidates = (m for m in messages if encoded_id in m.to_json())
            seqs = (m.seq for m in candidates if identity_of(m.to_dict()) == identity)
            return max(seqs, default=0)
    return 0


def _session_fields(store: Store, info: SessionInfo, messages: Iterable[Message]) -> dict[str, Any]:
    bodies = (message.to_dict() for message in store.get_history(info.key, full=True))
    return {
        "key": info.key,
        "uid": info.uid,
        "title": title_from(
            info.meta, prompt_from((role_of(body), text_of(body)) for body in bodies)
        ),
        "created": info.created,
        "updated": info.updated,
        "summary": info.summary,
        "visible": info.visible,
        "count": info.count,
        "messages": [message_fields(message) for message in messages],
    }


def message_fields(message: Message) -> dict[str, Any]:
    """Return a message as a JSON object: seq, time and visibility, and the object as stored."""
    return {
        "seq": message.seq,
        "at": message.at,
        "hidden": message.hidden,
        "message": message.to_dict(),
    }


def _print_lines(lines: Iterator[str], *, paged: bool, skipped_lines: int) -> None:
    """Print lines, through a pager if they do not fit on the screen.

    If the pager is `less`, it starts after `skipped_lines` lines.
    """
    first_lines = list(islice(lines, max(1, shutil.get_terminal_size().lines - 1))) if paged else []
    next_line = next(lines, None) if paged else None
    if next_line is None:
        for line in chain(first_lines, lines):
            click.echo(line)
        return
    all_lines = chain(first_lines, [next_line], lines)
    if skipped_lines:
        os.environ["LESS"] = f"{os.environ.get('LESS', '-R')} +{skipped_lines + 1}g"
    click.echo_via_pager(f"{line}\n" for line in all_lines)


# --- tail -----------------------------------------------------------------------------------------


_EXIT_CTRL_C: Final = 128 + 2
"""Exit code of a program that was ended with Ctrl-C."""


@click.command("tail")
@key_argument
@click.option("-f", "--follow", is_flag=True, help="Follow new messages until Ctrl-C.")
@click.option(
    "-n",
    "--last",
    metavar="N",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="Number of messages to show first.",
)
@json_option("one JSON object per message")
@location_options
def tail_command(key: str, follow: bool, last: int, as_json: bool, where: Location) -> int:
    """Show the last messages of the session KEY, and new messages with -f.

    In a terminal, the start or end of KEY, or the start of a part after a colon, is enough if only
    one session matches.

    With -f, each message is shown as soon as any process stores it, until you press Ctrl-C or the
    session is deleted.

    Exit codes: 0 done, 1 there is no such session, or it was deleted, 2 wrong usage, 130 stopped
    with Ctrl-C.
    """
    show = _message_printer(as_json=as_json)
    try:
        with open_read_only(where) as store:
            info, messages, last_seq = _last_messages(store, key, last)
            for message in messages:
                show(message)
            print_notices(damage_lines(info, where.workspace))
            if not follow:
                return 0
            if sys.stderr.isatty():
                print_notice(f"Following {one_line(info.key)}. Press Ctrl-C to stop.")
            for message in store.follow(info.key, after=last_seq, uid=info.uid):
                show(message)
    except KeyboardInterrupt:
        return _EXIT_CTRL_C
    return 0


def _last_messages(store: Store, key: str, last: int) -> tuple[SessionInfo, list[Message], int]:
    """Return a session, its last visible messages, and the seq after which to follow the session.

    Reads again if another process deleted and recreated the session in the meantime.
    """
    key = find_session_to_read(store, key).key
    while True:
        info = find_session(store, key)
        messages = store.get_history(info.key, last=last)
        info_after = find_session(store, info.key)
        if info_after.uid == info.uid:
            # Messages that were hidden meanwhile are not shown, and no message is shown twice.
            last_seq = max([info.last_seq, *(message.seq for message in messages)])
            return info_after, messages, last_seq


def _message_printer(*, as_json: bool) -> Callable[[Message], None]:
    """Return a function that prints one message to stdout."""
    if as_json:
        return lambda message: click.echo(json_text(message_fields(message)))
    if not sys.stdout.isatty():
        return print_message
    renderer = MessageRenderer(color=uses_color())
    return lambda message: click.echo("\n".join(renderer.message_lines(message)))
