"""`steno memory`: list, forget and purge notes."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, Final

import click
from msgspec import Struct

from stenolog.cli.output import (
    attributes_of,
    format_age,
    format_time,
    one_line,
    print_json,
    print_notice,
    print_rows,
    print_table,
    printable,
    sentence,
    shorten,
    terminal_console,
)
from stenolog.cli.workspace import (
    Location,
    check_store_exists,
    display_name,
    json_option,
    location_hint,
    options_as_struct,
    require_terminal,
    workspace_option,
    yes_option,
)
from stenolog.memory.notes import Kind, Note, Notes
from stenolog.memory.scopes import Scope
from stenolog.sessions.folders import NOTES


class NoteSelection(Struct, frozen=True, kw_only=True):
    """Options that select notes: the workspace, the user and the agent."""

    workspace: str
    who: str | None
    agent: str | None

    @contextmanager
    def open(self, *, writable: bool = False) -> Iterator[Notes]:
        """Open the notes, read-only unless `writable` is set.

        If there is no store of notes, use an empty one in memory.
        """
        check_store_exists(self.workspace)
        location = Location(workspace=self.workspace, namespace=NOTES)
        with location.open_existing(writable=writable) as store:
            yield Notes(store)

    def find_scopes(self, notes: Notes) -> list[Scope]:
        """Return the scopes that have notes and match the options."""
        scopes = notes.scopes(agent=self.agent)
        return [scope for scope in scopes if self.who in (None, scope.who, scope.name)]

    def find_scope(self, notes: Notes) -> Scope:
        """Return the only scope that matches the options.

        Raises UsageError if several scopes match, and ClickException if no scope matches.
        """
        scopes = self.find_scopes(notes)
        if self.who is not None:
            scopes = [scope for scope in scopes if scope.name == self.who] or scopes
        if len(scopes) == 1:
            return scopes[0]
        if not scopes:
            user_text = f" of {one_line(self.who)}" if self.who is not None else ""
            raise click.ClickException(f"There are no notes{user_text} here.")
        names = ", ".join(map(scope_name, scopes[:10])) + (" …" if len(scopes) > 10 else "")
        option = "--agent" if len({scope.who for scope in scopes}) == 1 else "--who"
        raise click.UsageError(f"There are notes of {names}. Select one with {option}.")

    def find_notes(self, notes: Notes, note_ids: Sequence[str]) -> list[Note]:
        """Return the notes with these ids or id prefixes.

        Raises UsageError if an id is ambiguous, and ClickException if there is no such note.
        """
        scopes = self.find_scopes(notes)
        candidates = [note for scope in scopes for note in notes.list(scope, full=True)]
        selected_notes = [_find_note(candidates, note_id) for note_id in note_ids]
        return list({(note.scope, note.id): note for note in selected_notes}.values())


note_options: Final = options_as_struct(
    "selection",
    NoteSelection,
    click.option("--who", metavar="USER", help="Only notes of this user or group chat."),
    click.option("--agent", metavar="NAME", help="Only notes of this agent."),
    workspace_option,
)


def _find_note(notes: Sequence[Note], note_id: str) -> Note:
    exact_matches = [note for note in notes if note.id == note_id]
    matches = exact_matches or [note for note in notes if note_id and note.id.startswith(note_id)]
    if len(matches) == 1:
        return matches[0]
    name = f"{one_line(note_id)!r}"
    if not matches:
        raise click.ClickException(f"There is no note {name}. `steno memory list` lists the notes.")
    if exact_matches:
        users = ", ".join(scope_name(note.scope) for note in matches)
        raise click.UsageError(f"{users} have a note {note_id}. Select one with --who or --agent.")
    names = ", ".join(note.id for note in matches[:5]) + (" …" if len(matches) > 5 else "")
    raise click.UsageError(f"Several notes start with {name}: {names}")


def scope_name(scope: Scope) -> str:
    """Return the name of a scope as it is printed."""
    return one_line(scope.name if scope.agent == "main" else f"{scope.name} (agent {scope.agent})")


# --- showing ---------------------------------------------------------------------------------


def _note_state(note: Note) -> str:
    """Return the state of a note as it is printed."""
    if note.forgotten:
        return "forgotten"
    return "superseded" if note.superseded else "in force"


def _note_label(note: Note) -> str:
    """Return the id of a note and the start of its text."""
    return f"{note.id} “{shorten(one_line(printable(note.text)), 60)}”"


def _note_cells(note: Note) -> Sequence[str]:
    text = printable(note.text)
    return note.id, note.kind, format_time(note.at), _note_state(note), note.scope.name, text


def _note_fields(note: Note) -> dict[str, Any]:
    return {
        "id": note.id,
        "agent": note.scope.agent,
        "who": note.scope.name,
        **attributes_of(note, "kind", "at"),
        "state": _note_state(note),
        **attributes_of(note, "about", "text", "quote", "session", "uid", "seqs"),
        **attributes_of(note, "supersedes", "superseded", "superseded_by"),
    }


def _print_note_tables(notes: Sequence[Note]) -> None:
    # This import is slow and only needed in a terminal.
    from rich.text import Text

    console = terminal_console()
    columns: dict[str, dict[str, Any]] = {name: {"no_wrap": True} for name in ("id", "kind", "age")}
    columns["text"] = {"overflow": "fold", "ratio": 1}
    now = datetime.now(UTC)

    def note_row(note: Note) -> Sequence[Any]:
        text = Text(printable(note.text), style="dim" if not note.in_force else "")
        if not note.in_force:
            text.append(f"  ({_note_state(note)})", style="yellow")
        return f"  {note.id}", note.kind, (format_age(note.at, now), "dim"), text

    for scope, scope_notes in groupby(notes, lambda note: note.scope):
        console.print(Text(scope_name(scope), style="bold cyan"))
        rows = map(note_row, scope_notes)
        print_table(columns, rows, console=console, show_header=False, padding=(0, 2, 0, 0))
        console.print()


# --- commands --------------------------------------------------------------------------------


@click.group("memory")
def memory_command() -> None:
    """List and forget the notes that agents remember.

    Each agent has its own notes about users and group chats. Select notes with --who and --agent.
    """


@memory_command.command("list")
@click.option("--kind", type=click.Choice(["core", "daily"]), help="Only notes of this kind.")
@click.option("--all", "full", is_flag=True, help="Include superseded and forgotten notes.")
@json_option("one JSON object per note")
@note_options
def list_command(kind: Kind | None, full: bool, selection: NoteSelection) -> None:
    """List notes by user, oldest first.

    Prints one line per note, separated by tabs: id, kind, time, state, user, text. In a terminal
    the command prints a table.

    Exit codes: 0 done, 1 failed, 2 wrong usage.
    """
    with selection.open() as notes:
        scopes = selection.find_scopes(notes)
        matches = [note for scope in scopes for note in notes.list(scope, kind=kind, full=full)]
    print_rows(matches, fields=_note_fields, cells=_note_cells, table=_print_note_tables)
    if not matches and kind is None and selection.who is None and selection.agent is None:
        print_notice(f"There are no notes in {display_name(selection.workspace)} yet.")
    elif not matches:
        print_notice("No matching notes.")


@memory_command.command("forget")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("--purge", is_flag=True, help="Delete the text permanently.")
@yes_option
@json_option("one JSON object per note")
@note_options
def forget_command(ids: tuple[str, ...], purge: bool, yes: bool, selection: NoteSelection) -> None:
    """Forget notes, or delete their text permanently.

    The first characters of an id are enough. A forgotten note is no longer recalled;
    `steno memory undo` restores it. --purge deletes the text of the note permanently. The messages
    from which the note was made are not deleted; their session is named on stderr.

    Exit codes: 0 done, 1 not confirmed or there is no such note, 2 wrong usage.
    """
    with selection.open(writable=True) as notes:
        selected_notes = selection.find_notes(notes, ids)
        if purge and not yes:
            _confirm_purge(selected_notes)
        for note in selected_notes:
            restored_notes, not_reached = _forget_note(notes, note, purge=purge)
            # The output may be logged: purged text must not appear in it.
            text = f"Deleted permanently: {note.id}" if purge else f"Forgotten: {_note_label(note)}"
            print_notice(text)
            print_notice(*(f"In force again: {_note_label(other)}" for other in restored_notes))
            print_notice(*(f"Not deleted: {sentence(place)}" for place in not_reached))
            fields = {
                "id": note.id,
                "agent": note.scope.agent,
                "who": note.scope.name,
                "purged": purge,
                "in_force_again": [other.id for other in restored_notes],
                "not_reached": not_reached,
            }
            print_json(fields)
    if not purge:
        print_notice(f"Undo with {_undo_command_text(selected_notes[-1].scope)}.")


def _undo_command_text(scope: Scope) -> str:
    options = location_hint()
    if scope.agent != "main" and " --agent " not in options:
        options += f" --agent {shlex.quote(scope.agent)}"
    return one_line(f"`steno memory undo --who {shlex.quote(scope.name)}{options}`")


def _confirm_purge(notes: Sequence[Note]) -> None:
    """Ask for confirmation. Raises Abort if declined, UsageError if there is no terminal."""
    require_terminal("--purge deletes permanently")
    print_notice(*map(_note_label, notes))
    notes_phrase = "this note" if len(notes) == 1 else f"these {len(notes)} notes"
    click.confirm(f"Delete {notes_phrase} permanently?", abort=True, err=True)


def _forget_note(notes: Notes, note: Note, *, purge: bool) -> tuple[list[Note], Sequence[str]]:
    """Forget or purge a note.

    Return the older notes that this note superseded and that are recalled again, and the places
    that may still contain the purged text.
    """
    ids_before = {other.id for other in notes.list(note.scope)}
    not_reached: Sequence[str] = ()
    if purge:
        not_reached = notes.purge(note.scope, note.id).not_reached
    else:
        notes.forget(note.scope, note.id)
    return [other for other in notes.list(note.scope) if other.id not in ids_before], not_reached


@memory_command.command("undo")
@json_option("the result as a JSON object")
@note_options
def undo_command(selection: NoteSelection) -> None:
    """Restore the note of a user that was forgotten last.

    Each call restores one note, up to eight in all, but none that was forgotten before a purge.

    Exit codes: 0 done, 1 failed or nothing to undo, 2 wrong usage.
    """
    with selection.open(writable=True) as notes:
        scope = selection.find_scope(notes)
        notes_before = {note.id: note for note in notes.list(scope)}
        notes.undo(scope)
        notes_after = {note.id: note for note in notes.list(scope)}
    restored_ids = [id for id in notes_after if id not in notes_before]
    superseded_ids = [id for id in notes_before if id not in notes_after]
    print_notice(*(f"In force again: {_note_label(notes_after[id])}" for id in restored_ids))
    print_notice(*(f"Superseded again: {_note_label(notes_before[id])}" for id in superseded_ids))
    ids = {"in_force_again": restored_ids, "superseded_again": superseded_ids}
    print_json({"agent": scope.agent, "who": scope.name, **ids})
    if notes_before == notes_after:
        print_notice("Undone. The same notes are in force as before.")
