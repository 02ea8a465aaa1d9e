"""Find notes by id or user, and print them as tables, text or JSON."""

import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import click

from stenolog.cli.output import (
    age,
    json_text,
    moment,
    one_line,
    print_table,
    printable,
    table_console,
)
from stenolog.cli.workspace import check_there
from stenolog.errors import UsageError
from stenolog.memory.notes import Note, Notes
from stenolog.memory.scopes import Scope
from stenolog.sessions.folders import NOTES
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import address, open_store

_Command = TypeVar("_Command", bound=Callable[..., Any])


def whose_options(command: _Command) -> _Command:
    """Add `--who` and `--agent` to a command."""
    who = click.option("--who", metavar="USER", help="Only notes of this user or group chat.")
    agent = click.option("--agent", metavar="NAME", help="Only notes of this agent.")
    return who(agent(command))


# --- opening ---------------------------------------------------------------------------------


def notes_to_read(workspace: str) -> Store:
    """Open the notes read-only; return an empty store if there are none."""
    if not _has_notes(workspace):
        return InMemoryStore()
    return open_store(workspace, namespace=NOTES, read_only=True)


def notes_to_write(workspace: str, *, create: bool = False) -> Store:
    """Open the notes for writing. Without notes, return an empty store unless `create` is set."""
    if not _has_notes(workspace) and not create:
        return InMemoryStore()
    return open_store(workspace, namespace=NOTES)


def _has_notes(workspace: str) -> bool:
    """Return whether notes were ever stored there. Raises UsageError if there is no workspace.

    Otherwise a typing error would create one.
    """
    check_there(workspace)
    found = address(workspace)
    place = Path(found.path)
    if found.engine == "sqlite" and not place.is_file():
        raise UsageError(f"there is no database at {place}; check the path")
    return found.engine != "jsonl" or (place / NOTES).exists()


# --- selection -------------------------------------------------------------------------------


def scopes_meant(notes: Notes, *, who: str | None, agent: str | None) -> list[Scope]:
    """Return the scopes that have notes and match the options."""
    return [scope for scope in notes.scopes(agent=agent) if who in (None, scope.who, scope.name)]


def scope_meant(notes: Notes, *, who: str | None, agent: str | None) -> Scope:
    """Return the one scope that matches.

    Raises UsageError if several match, and ClickException if none does.
    """
    found = scopes_meant(notes, who=who, agent=agent)
    if who is not None:
        found = [scope for scope in found if scope.name == who] or found
    if len(found) == 1:
        return found[0]
    if not found:
        of = f" of {one_line(who)}" if who is not None else ""
        raise click.ClickException(f"There are no notes{of} here.")
    names = ", ".join(map(_named, found[:10])) + (" …" if len(found) > 10 else "")
    option = "--agent" if len({scope.who for scope in found}) == 1 else "--who"
    raise click.UsageError(f"There are notes of {names}. Select one with {option}.")


def notes_meant(
    notes: Notes, ids: Sequence[str], *, who: str | None, agent: str | None
) -> list[Note]:
    """Return the notes with these ids or id prefixes.

    Raises UsageError if an id is ambiguous, and ClickException if there is no such note.
    """
    scopes = scopes_meant(notes, who=who, agent=agent)
    everything = [note for scope in scopes for note in notes.list(scope, full=True)]
    return list({(n.scope, n.id): n for n in (_note_meant(everything, id) for id in ids)}.values())


def _note_meant(notes: Sequence[Note], id: str) -> Note:
    exact = [note for note in notes if note.id == id]
    found = exact or [note for note in notes if id and note.id.startswith(id)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise click.ClickException(
            f"There is no note {one_line(id)!r}. `steno memory list` lists the notes."
        )
    if exact:
        whose = ", ".join(_named(note.scope) for note in found)
        raise click.UsageError(f"{whose} have a note {id}. Select one with --who or --agent.")
    names = ", ".join(note.id for note in found[:5]) + (" …" if len(found) > 5 else "")
    raise click.UsageError(f"Several notes start with {one_line(id)!r}: {names}")


def _named(scope: Scope) -> str:
    name = scope.name
    return one_line(name if scope.agent == "main" else f"{name} (agent {scope.agent})")


# --- showing ---------------------------------------------------------------------------------


def state_of(note: Note) -> str:
    """Return the state of a note in one word."""
    if note.forgotten:
        return "forgotten"
    return "superseded" if note.superseded else "mixed" if note.mixed else "in force"


def quoted(note: Note) -> str:
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
            row = (note.id, note.kind, moment(note.at), state_of(note), note.scope.name, text)
            click.echo("\t".join(map(one_line, row)))


def print_whole(note: Note) -> None:
    """Print a note with all its details."""
    click.secho(note.id, bold=True, nl=False)
    click.secho(f" · {note.kind} · {moment(note.at)} · {state_of(note)}", dim=True)
    click.echo(printable(note.text))
    click.echo()
    for name, value in _details(note):
        click.echo(f"{name}: {one_line(printable(value))}")


def _details(note: Note) -> Iterator[tuple[str, str]]:
    yield "user", f"{note.scope.name} (agent {note.scope.agent})"
    if note.about:
        yield "about", note.about
    if note.superseded is not None:
        yield "superseded", f"{moment(note.superseded)} by {note.superseded_by}"
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
        "at": moment(note.at),
        "state": state_of(note),
        "about": note.about,
        "text": note.text,
        "quote": note.quote,
        "session": note.session,
        "uid": note.uid,
        "seqs": note.seqs,
        "confidence": note.confidence,
        "supersedes": note.supersedes,
        "superseded": moment(note.superseded) if note.superseded is not None else None,
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
        return f"  {note.id}", note.kind, (age(note.at, now), "dim"), said

    for scope, own in groupby(notes, lambda note: note.scope):
        console.print(Text(_named(scope), style="bold cyan"))
        print_table(console, columns, map(row, own), show_header=False, padding=(0, 2, 0, 0))
        console.print()
