"""`steno memory`: list, search, correct, forget and purge notes."""

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import IO, Any, TextIO

import click
from msgspec import Struct

from stenolog.catalog.query import parse
from stenolog.cli.note_output import (
    notes_meant,
    notes_to_read,
    notes_to_write,
    print_notes,
    print_whole,
    quoted,
    scope_meant,
    scopes_meant,
    whose_options,
)
from stenolog.cli.output import NOT_ALL, json_text, one_line, printable, sentence
from stenolog.cli.workspace import shown, workspace_option
from stenolog.memory.note_files import NoteChanges, export_notes, import_notes
from stenolog.memory.note_pages import from_markdown
from stenolog.memory.notes import Draft, Kind, Note, Notes
from stenolog.memory.scopes import Scope, parse_scope_name

_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object per note."
)


_done_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as a JSON object."
)


@click.group("memory")
def memory_command() -> None:
    """List, search, correct and forget the notes that agents remember.

    Notes belong to a user or a group chat, and to an agent. Select them with --who and --agent.
    """


@memory_command.command("list")
@click.option("--kind", type=click.Choice(["core", "daily"]), help="Only notes of this kind.")
@click.option("--all", "full", is_flag=True, help="Include superseded and forgotten notes.")
@_json_option
@whose_options
@workspace_option
@click.pass_context
def list_command(
    ctx: click.Context,
    kind: Kind | None,
    full: bool,
    as_json: bool,
    who: str | None,
    agent: str | None,
    workspace: str,
) -> None:
    """List notes by user, oldest first.

    Prints one line per note, separated by tabs: id, kind, time, state, user, text. In a terminal it
    prints a table.

    Exit codes: 0 done, 1 failed, 2 wrong usage.
    """
    with notes_to_read(workspace) as store:
        notes = Notes(store)
        scopes = scopes_meant(notes, who=who, agent=agent)
        found = [note for scope in scopes for note in notes.list(scope, kind=kind, full=full)]
    print_notes(found, as_json=as_json, color=ctx.color is not False)
    if not found:
        whole = kind is None and who is None and agent is None
        words = f"There are no notes in {shown(workspace)} yet." if whole else "No matching notes."
        click.echo(words, err=True)


@memory_command.command("search")
@click.argument("query", nargs=-1, required=True)
@_json_option
@whose_options
@workspace_option
@click.pass_context
def search_command(
    ctx: click.Context,
    query: tuple[str, ...],
    as_json: bool,
    who: str | None,
    agent: str | None,
    workspace: str,
) -> None:
    """Find notes that contain all words of QUERY.

    QUERY is written as for `steno search`. Only notes in force are searched. The output is that of
    `steno memory list`, newest first for each user.

    Exit codes: 0 found, 1 nothing found, 2 wrong usage.
    """
    asked = " ".join(query)
    if parse(asked).is_empty:
        raise click.UsageError(f"{one_line(asked)!r} contains no word to search for.")
    with notes_to_read(workspace) as store:
        notes = Notes(store)
        scopes = scopes_meant(notes, who=who, agent=agent)
        found = [note for scope in scopes for note in notes.search(asked, scope=scope)]
    print_notes(found, as_json=as_json, color=ctx.color is not False)
    if not found:
        click.echo("No matching notes.", err=True)
        ctx.exit(1)


@memory_command.command("show")
@click.argument("id")
@_json_option
@whose_options
@workspace_option
def show_command(
    id: str, as_json: bool, who: str | None, agent: str | None, workspace: str
) -> None:
    """Show the note ID with all details.

    The first characters of an id are enough.

    Exit codes: 0 done, 1 there is no such note, 2 wrong usage.
    """
    with notes_to_read(workspace) as store:
        [note] = notes_meant(Notes(store), [id], who=who, agent=agent)
    if as_json:
        print_notes([note], as_json=True, color=False)
    else:
        print_whole(note)


@memory_command.command("forget")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("--purge", is_flag=True, help="Delete the text permanently.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--dry-run", is_flag=True, help="Show what would be done, without doing it.")
@_json_option
@whose_options
@workspace_option
def forget_command(
    ids: tuple[str, ...],
    purge: bool,
    yes: bool,
    dry_run: bool,
    as_json: bool,
    who: str | None,
    agent: str | None,
    workspace: str,
) -> None:
    """Forget notes, or delete their text permanently.

    The first characters of an id are enough. A forgotten note is no longer recalled; `steno memory
    undo` brings it back. --purge deletes its text from the notes permanently. The messages that it
    was made from stay in their session, which is named on stderr.

    Exit codes: 0 done, 1 not confirmed or there is no such note, 2 wrong usage.
    """
    with (notes_to_read if dry_run else notes_to_write)(workspace) as store:
        notes = Notes(store)
        found = notes_meant(notes, ids, who=who, agent=agent)
        done = "Would delete permanently" if purge else "Would forget"
        if not dry_run:
            done = "Deleted permanently" if purge else "Forgotten"
            if purge and not yes:
                _ask(found)
        for note in found:
            told = _Told() if dry_run else _forget(notes, note, purge=purge)
            # The output may be logged: purged text must not appear in it.
            gone = purge and not dry_run
            words = [f"{done}: {note.id if gone else quoted(note)}"]
            words += [f"In force again: {quoted(one)}" for one in told.again]
            words += [f"Not deleted: {sentence(why)}" for why in told.not_reached]
            click.echo("\n".join(words), err=True)
            if as_json:
                click.echo(json_text(_forgotten(note, told, purge=purge, dry_run=dry_run)))
    if not purge and not dry_run:
        click.echo(f"Undo with {_undo_of(found[-1].scope)}.", err=True)


def _undo_of(scope: Scope) -> str:
    agent = "" if scope.agent == "main" else f" --agent {shlex.quote(scope.agent)}"
    return one_line(f"`steno memory undo --who {shlex.quote(scope.name)}{agent}`")


def _ask(notes: Sequence[Note]) -> None:
    """Ask for confirmation. Raises Abort, or UsageError if there is no terminal to ask in."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise click.UsageError(
            "--purge deletes permanently. Without a terminal to confirm, add --yes."
        )
    for note in notes:
        click.echo(quoted(note), err=True)
    what = "this note" if len(notes) == 1 else f"these {len(notes)} notes"
    click.confirm(f"Delete {what} permanently?", abort=True, err=True)


class _Told(Struct, frozen=True):
    """The effects of forgetting a note."""

    again: tuple[Note, ...] = ()
    """Notes that are in force again because of it."""
    not_reached: tuple[str, ...] = ()


def _forget(notes: Notes, note: Note, *, purge: bool) -> _Told:
    before = {one.id for one in notes.list(note.scope)}
    not_reached: tuple[str, ...] = ()
    if purge:
        not_reached = notes.purge(note.scope, note.id).not_reached
    else:
        notes.forget(note.scope, note.id)
    again = tuple(one for one in notes.list(note.scope) if one.id not in before)
    return _Told(again, not_reached)


def _forgotten(note: Note, told: _Told, *, purge: bool, dry_run: bool) -> dict[str, Any]:
    return {
        "id": note.id,
        "agent": note.scope.agent,
        "who": note.scope.name,
        "purged": purge,
        "in_force_again": [one.id for one in told.again],
        "not_reached": list(told.not_reached),
        "dry_run": dry_run,
    }


@memory_command.command("undo")
@_done_option
@whose_options
@workspace_option
def undo_command(as_json: bool, who: str | None, agent: str | None, workspace: str) -> None:
    """Undo the last forget of a user's notes.

    Up to eight can be undone, one per call, but none from before a purge.

    Exit codes: 0 done, 1 failed or nothing to undo, 2 wrong usage.
    """
    with notes_to_write(workspace) as store:
        notes = Notes(store)
        scope = scope_meant(notes, who=who, agent=agent)
        before = {note.id: note for note in notes.list(scope)}
        notes.undo(scope)
        after = {note.id: note for note in notes.list(scope)}
    again = [note for id, note in after.items() if id not in before]
    superseded = [note for id, note in before.items() if id not in after]
    for note in again:
        click.echo(f"In force again: {quoted(note)}", err=True)
    for note in superseded:
        click.echo(f"Superseded again: {quoted(note)}", err=True)
    if as_json:
        ids = {
            "in_force_again": [note.id for note in again],
            "superseded_again": [note.id for note in superseded],
        }
        click.echo(json_text({"agent": scope.agent, "who": scope.name, **ids}))
    if before == after:
        click.echo("Undone. The same notes are in force as before.", err=True)


@memory_command.command("export")
@whose_options
@workspace_option
def export_command(who: str | None, agent: str | None, workspace: str) -> None:
    """Print the notes of a user as Markdown.

    Edit the file and read your changes back with `steno memory import`.

    Example: steno memory export --who telegram:123 > notes.md

    Exit codes: 0 done, 1 failed, 2 wrong usage.
    """
    with notes_to_read(workspace) as store:
        notes = Notes(store)
        page = export_notes(notes, scope_meant(notes, who=who, agent=agent))
    click.echo(printable(page) if sys.stdout.isatty() else page.encode(), nl=False)


class _Page(click.File):
    """The type of a text file argument, where `-` is stdin."""

    def convert(
        self,
        value: "str | os.PathLike[str] | IO[Any]",
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> IO[Any]:
        """Return the open file. Fails if it cannot be opened."""
        # If a program is started with stdin closed, `sys.stdin` is None.
        if value == "-" and sys.stdin is None:
            self.fail("stdin is closed; name a file", param, ctx)
        return super().convert(value, param, ctx)


@memory_command.command("import")
@click.argument("file", type=_Page(encoding="utf-8"))
@click.option("--dry-run", is_flag=True, help="Show what would be changed, without changing it.")
@_done_option
@whose_options
@workspace_option
@click.pass_context
def import_command(
    ctx: click.Context,
    file: TextIO,
    dry_run: bool,
    as_json: bool,
    who: str | None,
    agent: str | None,
    workspace: str,
) -> None:
    """Import edited notes from FILE, or from stdin with -.

    FILE is the output of `steno memory export`. A changed text supersedes the old note, a deleted
    item is forgotten, and a new item becomes a note. A file without the header of an export
    requires --who. Importing the same file twice changes nothing.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 some notes had changed since the export and were
    skipped.
    """
    try:
        text = file.read()
    except UnicodeDecodeError as error:
        raise click.ClickException(f"{file.name} is not UTF-8 text: {error}.") from error
    scope = _scope_asked(text, who=who, agent=agent)
    with notes_to_write(workspace, create=not dry_run) as store:
        edits = import_notes(Notes(store), text, scope=scope, dry_run=dry_run)
    for words in _in_words(edits, dry_run=dry_run):
        click.echo(words, err=True)
    if as_json:
        texts = {name: [one.text for one in notes] for name, notes in _done(edits).items()}
        told = {**texts, "left_out": list(edits.conflicts), "dry_run": dry_run}
        click.echo(json_text(told))
    ctx.exit(NOT_ALL if edits.conflicts else 0)


def _scope_asked(page: str, *, who: str | None, agent: str | None) -> Scope | None:
    """Return whose notes are meant. With only an agent, the page names the user."""
    if agent is not None and who is None:
        named = from_markdown(page).scope
        who = None if named is None else named.name
    return None if who is None else parse_scope_name(who, agent=agent or "main")


def _done(edits: NoteChanges) -> dict[str, Sequence[Draft | Note]]:
    return {"added": edits.added, "changed": edits.changed, "forgotten": edits.forgotten}


def _in_words(edits: NoteChanges, *, dry_run: bool) -> Iterator[str]:
    would = "would be " if dry_run else ""
    for done, notes in _done(edits).items():
        for one in notes:
            yield f"{f'{would}{done}'.capitalize()}: {one_line(printable(one.text))}"
    for words in edits.conflicts:
        yield f"Skipped: {sentence(words)}"
    if not edits.count and not edits.conflicts:
        yield "Nothing to change: the file matches the notes."
