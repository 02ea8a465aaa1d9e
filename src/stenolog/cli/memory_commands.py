"""`steno memory`: list, search, correct, forget and purge notes."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import IO, Any, TextIO, TypeVar

import click
from msgspec import Struct

from stenolog.catalog.query import parse
from stenolog.cli.output import (
    PARTIAL,
    format_age,
    format_time,
    json_text,
    one_line,
    print_table,
    printable,
    sentence,
    table_console,
)
from stenolog.cli.workspace import check_exists, display_name, workspace_option
from stenolog.errors import UsageError
from stenolog.memory.note_files import NoteChanges, export_notes, import_notes
from stenolog.memory.note_pages import from_markdown
from stenolog.memory.notes import Draft, Kind, Note, Notes
from stenolog.memory.scopes import Scope, parse_scope_name
from stenolog.sessions.folders import NOTES
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import address, open_store

# --- notes ----------------------------------------------------------------------------------------


_Command = TypeVar("_Command", bound=Callable[..., Any])


def scope_options(command: _Command) -> _Command:
    """Add `--who` and `--agent` to a command."""
    who = click.option("--who", metavar="USER", help="Only notes of this user or group chat.")
    agent = click.option("--agent", metavar="NAME", help="Only notes of this agent.")
    return who(agent(command))


# --- opening ---------------------------------------------------------------------------------


def open_notes(workspace: str) -> Store:
    """Open the notes read-only; return an empty store if there are none."""
    if not _has_notes(workspace):
        return InMemoryStore()
    return open_store(workspace, namespace=NOTES, read_only=True)


def open_notes_writable(workspace: str, *, create: bool = False) -> Store:
    """Open the notes for writing. Without notes, return an empty store unless `create` is set."""
    if not _has_notes(workspace) and not create:
        return InMemoryStore()
    return open_store(workspace, namespace=NOTES)


def _has_notes(workspace: str) -> bool:
    """Return whether notes were ever stored there. Raises UsageError if there is no workspace.

    Otherwise a typing error would create one.
    """
    check_exists(workspace)
    found = address(workspace)
    place = Path(found.path)
    if found.engine == "sqlite" and not place.is_file():
        raise UsageError(f"there is no database at {place}; check the path")
    return found.engine != "jsonl" or (place / NOTES).exists()


# --- selection -------------------------------------------------------------------------------


def find_scopes(notes: Notes, *, who: str | None, agent: str | None) -> list[Scope]:
    """Return the scopes that have notes and match the options."""
    return [scope for scope in notes.scopes(agent=agent) if who in (None, scope.who, scope.name)]


def find_scope(notes: Notes, *, who: str | None, agent: str | None) -> Scope:
    """Return the one scope that matches.

    Raises UsageError if several match, and ClickException if none does.
    """
    found = find_scopes(notes, who=who, agent=agent)
    if who is not None:
        found = [scope for scope in found if scope.name == who] or found
    if len(found) == 1:
        return found[0]
    if not found:
        of = f" of {one_line(who)}" if who is not None else ""
        raise click.ClickException(f"There are no notes{of} here.")
    names = ", ".join(map(_scope_name, found[:10])) + (" …" if len(found) > 10 else "")
    option = "--agent" if len({scope.who for scope in found}) == 1 else "--who"
    raise click.UsageError(f"There are notes of {names}. Select one with {option}.")


def find_notes(
    notes: Notes, ids: Sequence[str], *, who: str | None, agent: str | None
) -> list[Note]:
    """Return the notes with these ids or id prefixes.

    Raises UsageError if an id is ambiguous, and ClickException if there is no such note.
    """
    scopes = find_scopes(notes, who=who, agent=agent)
    everything = [note for scope in scopes for note in notes.list(scope, full=True)]
    return list({(n.scope, n.id): n for n in (_find_note(everything, id) for id in ids)}.values())


def _find_note(notes: Sequence[Note], id: str) -> Note:
    exact = [note for note in notes if note.id == id]
    found = exact or [note for note in notes if id and note.id.startswith(id)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise click.ClickException(
            f"There is no note {one_line(id)!r}. `steno memory list` lists the notes."
        )
    if exact:
        whose = ", ".join(_scope_name(note.scope) for note in found)
        raise click.UsageError(f"{whose} have a note {id}. Select one with --who or --agent.")
    names = ", ".join(note.id for note in found[:5]) + (" …" if len(found) > 5 else "")
    raise click.UsageError(f"Several notes start with {one_line(id)!r}: {names}")


def _scope_name(scope: Scope) -> str:
    name = scope.name
    return one_line(name if scope.agent == "main" else f"{name} (agent {scope.agent})")


# --- showing ---------------------------------------------------------------------------------


def state_of(note: Note) -> str:
    """Return the state of a note in one word."""
    if note.forgotten:
        return "forgotten"
    return "superseded" if note.superseded else "mixed" if note.mixed else "in force"


def note_label(note: Note) -> str:
    """Return the id of a note and the start of its text."""
    text = one_line(printable(note.text))
    return f"{note.id} “{text if len(text) <= 60 else text[:59] + '…'}”"


def print_notes(notes: Sequence[Note], *, as_json: bool, color: bool) -> None:
    """Print notes to stdout: as tables in a terminal, otherwise for programs."""
    if as_json:
        for note in notes:
            click.echo(json_text(_fields(note)))
    elif sys.stdout.isatty() and notes:
        _print_tables(notes, color=color)
    else:
        for note in notes:
            text = one_line(printable(note.text))
            row = (note.id, note.kind, format_time(note.at), state_of(note), note.scope.name, text)
            click.echo("\t".join(map(one_line, row)))


def print_note(note: Note) -> None:
    """Print a note with all its details."""
    click.secho(note.id, bold=True, nl=False)
    click.secho(f" · {note.kind} · {format_time(note.at)} · {state_of(note)}", dim=True)
    click.echo(printable(note.text))
    click.echo()
    for name, value in _details(note):
        click.echo(f"{name}: {one_line(printable(value))}")


def _details(note: Note) -> Iterator[tuple[str, str]]:
    yield "user", f"{note.scope.name} (agent {note.scope.agent})"
    if note.about:
        yield "about", note.about
    if note.superseded is not None:
        yield "superseded", f"{format_time(note.superseded)} by {note.superseded_by}"
    if note.supersedes:
        yield "supersedes", ", ".join(note.supersedes)
    if note.session:
        seqs = f", seq {', '.join(map(str, note.seqs))}" if note.seqs else ""
        yield "source", f"{note.session}{seqs}"
    else:
        yield "source", "added manually"
    if note.quote:
        yield "quote", note.quote
    if note.confidence != 1.0:
        yield "confidence", f"{note.confidence:g}"


def _fields(note: Note) -> dict[str, Any]:
    return {
        "id": note.id,
        "agent": note.scope.agent,
        "who": note.scope.name,
        "kind": note.kind,
        "at": format_time(note.at),
        "state": state_of(note),
        "about": note.about,
        "text": note.text,
        "quote": note.quote,
        "session": note.session,
        "uid": note.uid,
        "seqs": note.seqs,
        "confidence": note.confidence,
        "supersedes": note.supersedes,
        "superseded": format_time(note.superseded) if note.superseded is not None else None,
        "superseded_by": note.superseded_by,
    }


def _print_tables(notes: Sequence[Note], *, color: bool) -> None:
    # Imported late: slow, and only needed in a terminal.
    from rich.text import Text

    console = table_console(color=color)
    columns: dict[str, dict[str, Any]] = {name: {"no_wrap": True} for name in ("id", "kind", "age")}
    columns["text"] = {"overflow": "fold", "ratio": 1}
    now = datetime.now(UTC)

    def row(note: Note) -> Sequence[Any]:
        said = Text(printable(note.text), style="dim" if not note.in_force else "")
        if not note.in_force:
            said.append(f"  ({state_of(note)})", style="yellow")
        return f"  {note.id}", note.kind, (format_age(note.at, now), "dim"), said

    for scope, own in groupby(notes, lambda note: note.scope):
        console.print(Text(_scope_name(scope), style="bold cyan"))
        print_table(console, columns, map(row, own), show_header=False, padding=(0, 2, 0, 0))
        console.print()


_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object per note."
)


_result_option = click.option(
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
@scope_options
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
    with open_notes(workspace) as store:
        notes = Notes(store)
        scopes = find_scopes(notes, who=who, agent=agent)
        found = [note for scope in scopes for note in notes.list(scope, kind=kind, full=full)]
    print_notes(found, as_json=as_json, color=ctx.color is not False)
    if not found:
        unfiltered = kind is None and who is None and agent is None
        words = (
            f"There are no notes in {display_name(workspace)} yet."
            if unfiltered
            else "No matching notes."
        )
        click.echo(words, err=True)


@memory_command.command("search")
@click.argument("query", nargs=-1, required=True)
@_json_option
@scope_options
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
    with open_notes(workspace) as store:
        notes = Notes(store)
        scopes = find_scopes(notes, who=who, agent=agent)
        found = [note for scope in scopes for note in notes.search(asked, scope=scope)]
    print_notes(found, as_json=as_json, color=ctx.color is not False)
    if not found:
        click.echo("No matching notes.", err=True)
        ctx.exit(1)


@memory_command.command("show")
@click.argument("id")
@_json_option
@scope_options
@workspace_option
def show_command(
    id: str, as_json: bool, who: str | None, agent: str | None, workspace: str
) -> None:
    """Show the note ID with all details.

    The first characters of an id are enough.

    Exit codes: 0 done, 1 there is no such note, 2 wrong usage.
    """
    with open_notes(workspace) as store:
        [note] = find_notes(Notes(store), [id], who=who, agent=agent)
    if as_json:
        print_notes([note], as_json=True, color=False)
    else:
        print_note(note)


@memory_command.command("forget")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("--purge", is_flag=True, help="Delete the text permanently.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--dry-run", is_flag=True, help="Show what would be done, without doing it.")
@_json_option
@scope_options
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
    with (open_notes if dry_run else open_notes_writable)(workspace) as store:
        notes = Notes(store)
        found = find_notes(notes, ids, who=who, agent=agent)
        done = "Would delete permanently" if purge else "Would forget"
        if not dry_run:
            done = "Deleted permanently" if purge else "Forgotten"
            if purge and not yes:
                _confirm_purge(found)
        for note in found:
            effect = _ForgetEffect() if dry_run else _forget(notes, note, purge=purge)
            # The output may be logged: purged text must not appear in it.
            gone = purge and not dry_run
            words = [f"{done}: {note.id if gone else note_label(note)}"]
            words += [f"In force again: {note_label(one)}" for one in effect.again]
            words += [f"Not deleted: {sentence(why)}" for why in effect.not_reached]
            click.echo("\n".join(words), err=True)
            if as_json:
                click.echo(json_text(_forget_fields(note, effect, purge=purge, dry_run=dry_run)))
    if not purge and not dry_run:
        click.echo(f"Undo with {_undo_command_text(found[-1].scope)}.", err=True)


def _undo_command_text(scope: Scope) -> str:
    agent = "" if scope.agent == "main" else f" --agent {shlex.quote(scope.agent)}"
    return one_line(f"`steno memory undo --who {shlex.quote(scope.name)}{agent}`")


def _confirm_purge(notes: Sequence[Note]) -> None:
    """Ask for confirmation. Raises Abort, or UsageError if there is no terminal to ask in."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise click.UsageError(
            "--purge deletes permanently. Without a terminal to confirm, add --yes."
        )
    for note in notes:
        click.echo(note_label(note), err=True)
    what = "this note" if len(notes) == 1 else f"these {len(notes)} notes"
    click.confirm(f"Delete {what} permanently?", abort=True, err=True)


class _ForgetEffect(Struct, frozen=True):
    """The effects of forgetting a note."""

    again: tuple[Note, ...] = ()
    """Notes that are in force again because of it."""
    not_reached: tuple[str, ...] = ()


def _forget(notes: Notes, note: Note, *, purge: bool) -> _ForgetEffect:
    before = {one.id for one in notes.list(note.scope)}
    not_reached: tuple[str, ...] = ()
    if purge:
        not_reached = notes.purge(note.scope, note.id).not_reached
    else:
        notes.forget(note.scope, note.id)
    again = tuple(one for one in notes.list(note.scope) if one.id not in before)
    return _ForgetEffect(again, not_reached)


def _forget_fields(
    note: Note, effect: _ForgetEffect, *, purge: bool, dry_run: bool
) -> dict[str, Any]:
    return {
        "id": note.id,
        "agent": note.scope.agent,
        "who": note.scope.name,
        "purged": purge,
        "in_force_again": [one.id for one in effect.again],
        "not_reached": list(effect.not_reached),
        "dry_run": dry_run,
    }


@memory_command.command("undo")
@_result_option
@scope_options
@workspace_option
def undo_command(as_json: bool, who: str | None, agent: str | None, workspace: str) -> None:
    """Undo the last forget of a user's notes.

    Up to eight can be undone, one per call, but none from before a purge.

    Exit codes: 0 done, 1 failed or nothing to undo, 2 wrong usage.
    """
    with open_notes_writable(workspace) as store:
        notes = Notes(store)
        scope = find_scope(notes, who=who, agent=agent)
        before = {note.id: note for note in notes.list(scope)}
        notes.undo(scope)
        after = {note.id: note for note in notes.list(scope)}
    again = [note for id, note in after.items() if id not in before]
    superseded = [note for id, note in before.items() if id not in after]
    for note in again:
        click.echo(f"In force again: {note_label(note)}", err=True)
    for note in superseded:
        click.echo(f"Superseded again: {note_label(note)}", err=True)
    if as_json:
        ids = {
            "in_force_again": [note.id for note in again],
            "superseded_again": [note.id for note in superseded],
        }
        click.echo(json_text({"agent": scope.agent, "who": scope.name, **ids}))
    if before == after:
        click.echo("Undone. The same notes are in force as before.", err=True)


@memory_command.command("export")
@scope_options
@workspace_option
def export_command(who: str | None, agent: str | None, workspace: str) -> None:
    """Print the notes of a user as Markdown.

    Edit the file and read your changes back with `steno memory import`.

    Example: steno memory export --who telegram:123 > notes.md

    Exit codes: 0 done, 1 failed, 2 wrong usage.
    """
    with open_notes(workspace) as store:
        notes = Notes(store)
        page = export_notes(notes, find_scope(notes, who=who, agent=agent))
    click.echo(printable(page) if sys.stdout.isatty() else page.encode(), nl=False)


class _TextFile(click.File):
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
@click.argument("file", type=_TextFile(encoding="utf-8"))
@click.option("--dry-run", is_flag=True, help="Show what would be changed, without changing it.")
@_result_option
@scope_options
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
    scope = _target_scope(text, who=who, agent=agent)
    with open_notes_writable(workspace, create=not dry_run) as store:
        edits = import_notes(Notes(store), text, scope=scope, dry_run=dry_run)
    for words in _change_lines(edits, dry_run=dry_run):
        click.echo(words, err=True)
    if as_json:
        texts = {
            name: [one.text for one in notes] for name, notes in _changes_by_kind(edits).items()
        }
        fields = {**texts, "left_out": list(edits.conflicts), "dry_run": dry_run}
        click.echo(json_text(fields))
    ctx.exit(PARTIAL if edits.conflicts else 0)


def _target_scope(page: str, *, who: str | None, agent: str | None) -> Scope | None:
    """Return whose notes are meant. With only an agent, the page names the user."""
    if agent is not None and who is None:
        named = from_markdown(page).scope
        who = None if named is None else named.name
    return None if who is None else parse_scope_name(who, agent=agent or "main")


def _changes_by_kind(edits: NoteChanges) -> dict[str, Sequence[Draft | Note]]:
    return {"added": edits.added, "changed": edits.changed, "forgotten": edits.forgotten}


def _change_lines(edits: NoteChanges, *, dry_run: bool) -> Iterator[str]:
    would = "would be " if dry_run else ""
    for done, notes in _changes_by_kind(edits).items():
        for one in notes:
            yield f"{f'{would}{done}'.capitalize()}: {one_line(printable(one.text))}"
    for words in edits.conflicts:
        yield f"Skipped: {sentence(words)}"
    if not edits.count and not edits.conflicts:
        yield "Nothing to change: the file matches the notes."
