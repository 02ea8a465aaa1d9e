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
    "--json", "as_json", is_flag=True, help="Write one JSON object for each note."
)


_done_option = click.option(
    "--json", "as_json", is_flag=True, help="Write one JSON object: what was done."
)


@click.group("memory")
def memory_command() -> None:
    """Look at what is remembered, correct it, forget it.

    Notes belong to a user or a group chat, and to an agent: --who and --agent say whose are
    meant.
    """


@memory_command.command("list")
@click.option("--kind", type=click.Choice(["core", "daily"]), help="Only notes of this kind.")
@click.option("--all", "full", is_flag=True, help="Superseded and forgotten notes too.")
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
    """List the notes, user by user, the oldest first.

    One line each, with tabs between: the id, the kind, when it was made, whether it is in force,
    whose it is, and the text. In a terminal it is laid out for reading.

    Exit code: 0 listed, 1 it could not be done, 2 wrong usage.
    """
    with notes_to_read(workspace) as store:
        notes = Notes(store)
        scopes = scopes_meant(notes, who=who, agent=agent)
        found = [note for scope in scopes for note in notes.list(scope, kind=kind, full=full)]
    print_notes(found, as_json=as_json, color=ctx.color is not False)
    if not found:
        whole = kind is None and who is None and agent is None
        words = f"There are no notes in {shown(workspace)} yet." if whole else "No note matches."
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
    """Find notes that have all the words of QUERY.

    QUERY is written as for `steno search`; only notes in force are found. Lines are those of
    `steno memory list`, of each user the newest first.

    Exit code: 0 something was found, 1 nothing was, 2 wrong usage.
    """
    asked = " ".join(query)
    if parse(asked).empty:
        raise click.UsageError(f"There is no word to search for in {one_line(asked)!r}.")
    with notes_to_read(workspace) as store:
        notes = Notes(store)
        scopes = scopes_meant(notes, who=who, agent=agent)
        found = [note for scope in scopes for note in notes.search(asked, scope=scope)]
    print_notes(found, as_json=as_json, color=ctx.color is not False)
    if not found:
        click.echo("No note matches.", err=True)
        ctx.exit(1)


@memory_command.command("show")
@click.argument("id")
@_json_option
@whose_options
@workspace_option
def show_command(
    id: str, as_json: bool, who: str | None, agent: str | None, workspace: str
) -> None:
    """Show the note ID with all that is known of it.

    The beginning of an id is enough.

    Exit code: 0 shown, 1 there is no such note, 2 wrong usage.
    """
    with notes_to_read(workspace) as store:
        [note] = notes_meant(Notes(store), [id], who=who, agent=agent)
    if as_json:
        print_notes([note], as_json=True, color=False)
    else:
        print_whole(note)


@memory_command.command("forget")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("--purge", is_flag=True, help="Delete the text for good.")
@click.option("--yes", is_flag=True, help="Do not ask before a purge.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
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
    """Forget notes, or delete their text for good.

    The beginning of an id is enough. A forgotten note is out of sight, and `steno memory undo`
    brings it back. With --purge its text is deleted from the notes for good. What was said stays
    in the session it was learnt in: stderr names it.

    Exit code: 0 done, 1 there is no such note, or it was not meant, 2 wrong usage.
    """
    with (notes_to_read if dry_run else notes_to_write)(workspace) as store:
        notes = Notes(store)
        found = notes_meant(notes, ids, who=who, agent=agent)
        done = "Would delete for good" if purge else "Would forget"
        if not dry_run:
            done = "Deleted for good" if purge else "Forgotten"
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
        click.echo(f"{_undo_of(found[-1].scope)} takes it back.", err=True)


def _undo_of(scope: Scope) -> str:
    agent = "" if scope.agent == "main" else f" --agent {shlex.quote(scope.agent)}"
    return one_line(f"`steno memory undo --who {shlex.quote(scope.name)}{agent}`")


def _ask(notes: Sequence[Note]) -> None:
    """Ask for confirmation. Raises Abort, or UsageError if there is no terminal to ask in."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise click.UsageError("--purge deletes for good; add --yes where nobody can be asked.")
    for note in notes:
        click.echo(quoted(note), err=True)
    what = "this note" if len(notes) == 1 else f"these {len(notes)} notes"
    click.confirm(f"Delete {what} for good?", abort=True, err=True)


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
    """Take back the last forget of a user's notes.

    Up to eight can be taken back, one after the other; none that was made before a purge.

    Exit code: 0 taken back, 1 there was nothing to take back, 2 wrong usage.
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
        click.echo("Taken back; the same notes are in force.", err=True)


@memory_command.command("export")
@whose_options
@workspace_option
def export_command(who: str | None, agent: str | None, workspace: str) -> None:
    """Write the notes of a user as Markdown.

    It goes to stdout, to be read or edited. What was changed in it, `steno memory import` takes
    back in.

    Exit code: 0 written, 1 it could not be done, 2 wrong usage.
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
            self.fail("there is no stdin; name a file", param, ctx)
        return super().convert(value, param, ctx)


@memory_command.command("import")
@click.argument("file", type=_Page(encoding="utf-8"))
@click.option("--dry-run", is_flag=True, help="Say what would be changed, and change nothing.")
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
    """Take in a page of notes that was edited.

    FILE is what `steno memory export` wrote; - is stdin.
    A changed text supersedes the old one, a deleted item is forgotten, an added one is a new note.
    A page of your own, without the head of an export, needs --who. Importing twice changes
    nothing more.

    Exit code: 0 all is in, 1 it could not be done, 2 wrong usage, 3 a note was another one by now,
    and its change was left out; stderr says which.
    """
    try:
        text = file.read()
    except UnicodeDecodeError as error:
        raise click.ClickException(f"{file.name} is no UTF-8 text: {error}.") from error
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
        yield f"Left out: {sentence(words)}"
    if not edits.count and not edits.conflicts:
        yield "Nothing was changed on the page."
