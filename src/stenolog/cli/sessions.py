"""`steno list`, `steno show` and `steno export`: what was said, for people and for programs."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from stenolog.cli.text import moment, one_line, printable, sentence
from stenolog.cli.workspace import chosen, open_to_read, workspace_option
from stenolog.errors import NoSuchSession, StenologError
from stenolog.records import Message, SessionInfo
from stenolog.stores.base import Store

_COLUMNS = ("key", "visible", "all", "updated")


@click.command("list")
@click.argument("directory", metavar="[DIR]", required=False)
@workspace_option
@click.pass_context
def list_command(ctx: click.Context, directory: str | None, workspace: str) -> None:
    """List the sessions of a workspace.

    One line each, with tabs between: the key, how many messages are visible, how many there are,
    and when it last changed. In a terminal it is a table.
    """
    place = chosen(ctx, directory, workspace)
    rows: list[Sequence[str]] = []
    trouble: list[str] = []
    unreadable = False
    with open_to_read(place) as store:
        for key in store.list_sessions():
            try:
                info = store.info(key)
            except NoSuchSession:
                continue  # deleted since it was listed
            except StenologError as error:
                trouble.append(f"{one_line(key)}: {sentence(str(error))}")
                rows.append((one_line(key), "-", "-", "-"))
                unreadable = True
            else:
                rows.append(_row(info))
                trouble += _damage(info, place)
    left_out = _files(place) - len(rows)
    if left_out > 0:
        trouble.append(
            f"{left_out} of the files there {'is' if left_out == 1 else 'are'} no session that "
            f"can be read; steno doctor {place} says more."
        )
    if not rows:
        click.echo(f"There are no sessions in {place} yet.", err=True)
    elif sys.stdout.isatty():
        _print_table(rows, color=ctx.color is not False)
    else:
        for row in rows:
            click.echo("\t".join(row))
    for words in trouble:
        click.echo(words, err=True)
    ctx.exit(1 if unreadable else 0)


def _files(place: str) -> int:
    """How many files in a workspace look like logs."""
    return len(list((Path(place) / "sessions").glob("*.jsonl")))


@click.command("show")
@click.argument("key")
@click.option("--all", "full", is_flag=True, help="Hidden and archived messages too, marked.")
@workspace_option
def show_command(key: str, full: bool, workspace: str) -> None:
    """Show what was said in the session KEY, for reading.

    Control characters are left out; `steno export` has the messages as they are.
    """
    with open_to_read(workspace) as store:
        info = _info(store, key)
        if info.summary:
            click.secho("Summary", bold=True)
            click.echo(f"{printable(info.summary)}\n")
        for message in store.get_history(key, full=full):
            _print_message(message)
        hidden = info.count - info.visible
        if hidden and not full:
            click.echo(f"{_messages(hidden)} hidden; --all shows them too.", err=True)
        # Asked again: reading all of it may have met damage that a first look does not.
        for words in _damage(_info(store, key), workspace):
            click.echo(words, err=True)


@click.command("export")
@click.argument("key")
@click.option("--all", "full", is_flag=True, help="Hidden and archived messages too.")
@workspace_option
def export_command(key: str, full: bool, workspace: str) -> None:
    """Write the messages of the session KEY to stdout, one JSON object a line.

    Each is exactly what was given to the store: role, content, tool calls … and nothing of ours.
    """
    with open_to_read(workspace) as store:
        _info(store, key)
        for message in store.get_history(key, full=full):
            line = message.to_json()
            if sys.stdout.isatty():
                click.echo(printable(line.decode()))
            else:
                click.echo(line)
        for words in _damage(_info(store, key), workspace):
            click.echo(words, err=True)


def _info(store: Store, key: str) -> SessionInfo:
    try:
        return store.info(key)
    except NoSuchSession:
        raise click.ClickException(
            f"There is no session {one_line(key)!r} here; `steno list` shows the keys there are."
        ) from None


def _row(info: SessionInfo) -> Sequence[str]:
    return (one_line(info.key), str(info.visible), str(info.count), moment(info.updated))


def _print_table(rows: Sequence[Sequence[str]], *, color: bool) -> None:
    # Slow to import, and only a table in a terminal needs it.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in _COLUMNS:
        table.add_column(column, justify="right" if column in ("visible", "all") else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(color_system="auto" if color else None, highlight=False).print(table)


def _print_message(message: Message) -> None:
    fields = message.to_dict()
    role = fields.pop("role", "message")
    head = f"[{message.seq}] {role if isinstance(role, str) else json.dumps(role)}"
    click.secho(printable(head), bold=True, nl=False)
    click.secho(
        f" · {moment(message.at)}{' · hidden' if message.hidden else ''}", dim=True, nl=True
    )
    for text in _texts(fields.pop("content", None)):
        click.echo(printable(text))
    for name, value in fields.items():
        click.echo(printable(f"{name}: {_as_json(value)}"))
    click.echo()


def _texts(content: Any) -> Iterator[str]:
    """The content in paragraphs: text as it is, anything else as JSON."""
    if content is None:
        return
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        yield text if isinstance(text, str) else _as_json(part)


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _damage(info: SessionInfo, workspace: str) -> Iterator[str]:
    """A sentence where the session is not whole."""
    if info.lost or info.damaged:
        cost = f"{_messages(info.lost)} lost" if info.lost else "no message is lost"
        yield (
            f"{one_line(info.key)} is damaged: {cost}, as far as was read; "
            f"`steno doctor {workspace}` says more."
        )


def _messages(count: int) -> str:
    return "1 message is" if count == 1 else f"{count:,} messages are"
