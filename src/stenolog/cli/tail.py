"""`steno tail`: the end of a session, and what is said in it from now on, by any process."""

import sys
from collections.abc import Callable
from typing import Final

import click

from stenolog.cli.completion import complete_key
from stenolog.cli.showing import (
    damage_words,
    info_of,
    message_fields,
    painter,
    print_message,
)
from stenolog.cli.text import json_text, one_line
from stenolog.cli.workspace import Where, open_to_read, where_options
from stenolog.records import Message

_STOPPED: Final = 128 + 2
"""The exit code that a shell shows for a program ended by Ctrl-C."""


@click.command("tail")
@click.argument("key", shell_complete=complete_key)
@click.option("-f", "--follow", is_flag=True, help="Go on with what is said, until Ctrl-C.")
@click.option(
    "-n",
    "--last",
    metavar="N",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="How many messages to begin with.",
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object for each message.")
@where_options
@click.pass_context
def tail_command(
    ctx: click.Context, key: str, follow: bool, last: int, as_json: bool, where: Where
) -> None:
    """Show the last messages of the session KEY, and with -f those that follow.

    With -f, each message is shown as soon as it is stored, whichever process wrote it. It ends
    with Ctrl-C, or when the session is deleted.

    Exit code: 0 shown, 1 there is no such session, or it was deleted meanwhile, 2 wrong usage,
    130 ended with Ctrl-C.
    """
    show = _printer(ctx, as_json=as_json)
    try:
        with open_to_read(where) as store:
            info = info_of(store, key)
            # Those that are hidden by now are not shown, but none is shown twice for that.
            seen = info.last_seq
            for message in store.get_history(info.key, last=last):
                show(message)
                seen = max(seen, message.seq)
            for words in damage_words(info_of(store, info.key), where.workspace):
                click.echo(words, err=True)
            if not follow:
                return
            if sys.stderr.isatty():
                click.echo(f"Following {one_line(info.key)}; Ctrl-C ends it.", err=True)
            for message in store.follow(info.key, after=seen):
                show(message)
    except KeyboardInterrupt:
        ctx.exit(_STOPPED)


def _printer(ctx: click.Context, *, as_json: bool) -> Callable[[Message], None]:
    """What prints one message to stdout."""
    if as_json:
        return lambda message: click.echo(json_text(message_fields(message)))
    if not sys.stdout.isatty():
        return print_message
    page = painter(color=ctx.color is not False)

    def painted(message: Message) -> None:
        for line in page.message(message):
            click.echo(line, color=page.color)

    return painted
