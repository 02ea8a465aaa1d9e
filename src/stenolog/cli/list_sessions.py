"""`steno list`: list the sessions of a workspace."""

import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec.structs import replace

from stenolog.catalog import Catalog, open_catalog
from stenolog.catalog.entries import Entry, Page, SessionFilter, Sort, State
from stenolog.cli.options import json_option, prefix_option, tag_option
from stenolog.cli.output import (
    TimeType,
    error_sentence,
    format_age,
    format_time,
    one_line,
    plural,
    print_notices,
    print_rows,
    print_table,
    printable,
    progress_bar,
    sentence,
    terminal_console,
    uses_color,
)
from stenolog.cli.workspace import (
    Location,
    choose_workspace,
    damage_lines,
    location_options,
    open_read_only,
    transcripts_hint,
)
from stenolog.errors import StoreUnavailable
from stenolog.sessions.folders import OtherNamespaces, SessionsLocation, other_namespaces
from stenolog.stores.base import Store
from stenolog.stores.file_names import LOG_SUFFIX
from stenolog.stores.open_store import open_store, parse_address

if TYPE_CHECKING:
    from rich.progress import Progress

    from stenolog.transfer.importers.folder import Source


# --- catalog --------------------------------------------------------------------------------------


_DELAY_SECONDS: Final = 0.5
"""Seconds after which the progress bar appears."""


class IndexProgress:
    """Progress bar on stderr that appears if updating the catalog takes long."""

    def __init__(self) -> None:
        self._started_at = time.monotonic()
        self._bar: Progress | None = None

    def __call__(self, done: int, total: int) -> None:
        """Show how many changed sessions are indexed."""
        if self._bar is None:
            if time.monotonic() - self._started_at < _DELAY_SECONDS or not sys.stderr.isatty():
                return
            self._bar = progress_bar()
            self._bar.start()
            self._bar.add_task("Indexing sessions")
        self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def open_workspace_catalog(where: Location) -> Iterator[tuple[Catalog, IndexProgress]]:
    """Open the catalog of a workspace. Sessions are only read; the catalog is updated."""
    place = where.place
    progress = IndexProgress()
    with ExitStack() as stack:
        store = stack.enter_context(open_read_only(where))
        keeps_catalog = True
        if parse_address(place.where).engine == "postgresql":
            writable = _open_for_indexing(store, place)
            keeps_catalog = writable is not None
            if writable is not None:
                stack.close()
                store = stack.enter_context(writable)
        catalog = stack.enter_context(open_catalog(store, keep=keeps_catalog))
        try:
            yield catalog, progress
        finally:
            progress.close()
            print_notices(one_line(f"{problem}.") for problem in catalog.problems)


def _open_for_indexing(store: Store, place: SessionsLocation) -> Store | None:
    """Open a PostgreSQL database for writing, because it contains the catalog to update.

    Return None if the database cannot be opened. Also return None if opening would migrate older
    tables: a command that only reads must not lock out an older program that uses the database.
    """
    # This import is only needed for PostgreSQL.
    from stenolog.stores.postgres import PostgresStore

    if isinstance(store, PostgresStore) and store.database.is_outdated:
        return None
    try:
        return open_store(place.where, namespace=place.namespace)
    except StoreUnavailable:
        return None


# --- sessions -------------------------------------------------------------------------------------


_TERMINAL_LIMIT: Final = 50
"""Default number of sessions listed in a terminal."""
_NO_LIMIT: Final = 1 << 62
"""A limit larger than any number of sessions."""
_FOREIGN_SUFFIX: Final = ".json"
"""Suffix of session files of other programs."""
_MAX_LISTED_NAMES: Final = 8
"""Maximum number of names listed in a remark or error."""


@click.command("list")
@click.argument("directory", metavar="[DIR]", required=False)
@prefix_option
@tag_option
@click.option(
    "--state",
    type=click.Choice(["idle", "running", "interrupted"]),
    help="Only sessions in this state.",
)
@click.option("--failed", is_flag=True, help="Only sessions with a failed tool call.")
@click.option(
    "--program", metavar="NAME", help="Only sessions imported from this program, such as codex."
)
@click.option(
    "--project", metavar="TEXT", help="Only sessions of this folder: its path, or its name."
)
@click.option(
    "--since",
    type=TimeType(),
    help="Only sessions with a message since this time: 2026-11-05, yesterday or 3d.",
)
@click.option(
    "--sort",
    type=click.Choice(["newest", "oldest", "cost", "tokens", "length"]),
    help="Sort by newest or oldest last message, cost, tokens or number of messages.",
)
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(min=1),
    help="Maximum number of sessions.  [default: 50 in a terminal, otherwise all]",
)
@json_option("one JSON object per session")
@location_options
def list_command(
    directory: str | None,
    prefix: str,
    tag: str | None,
    state: State | None,
    failed: bool,
    program: str | None,
    project: str | None,
    since: datetime | None,
    sort: Sort | None,
    limit: int | None,
    as_json: bool,
    where: Location,
) -> int:
    """List the sessions of a workspace.

    DIR is the workspace, as with -w. In a terminal the command prints a table with the cost, newest
    message first.

    \b
    In a pipe the command prints one line per session, latest change of
    any kind first, with columns separated by tabs:
      1  key
      2  number of visible messages
      3  number of all messages
      4  time of the last change, in UTC
      5  state: idle, running or interrupted
      6  title, or the first prompt; may be empty

    If a session cannot be read, columns 2 to 5 are - and the reason is on stderr.

    A session is running while an agent writes an answer, interrupted if its last message was not
    answered, and otherwise idle.

    \b
    Examples:
      steno list --since 7d --sort cost
      steno list --failed --project .
      steno list | cut -f 1,6

    Exit codes: 0 done, 1 failed or some sessions cannot be read, 2 wrong usage.
    """  # noqa: D301 -- click knows a block by this character
    where = replace(where, workspace=choose_workspace(directory, where.workspace))
    as_table = sys.stdout.isatty() and not as_json
    with open_workspace_catalog(where) as (catalog, progress):
        project_path = project if project is None else _find_project(catalog, project)
        page = catalog.list(
            prefix=prefix,
            tag=tag,
            state=state,
            failed=failed or None,
            program=program,
            project=project_path,
            since=since,
            sort=sort or ("newest" if as_table else "changed"),
            limit=limit or (_TERMINAL_LIMIT if as_table else _NO_LIMIT),
            progress=progress,
        )
        unknown = "" if page.entries else _unknown_value(catalog, program, project_path)
    if as_table and page.entries:
        _print_sessions_table(page.entries)
    else:
        print_rows(page.entries, fields=_session_fields, cells=_session_cells, as_json=as_json)
    unfiltered = not (prefix or tag or state or failed or program or project or since)
    print_notices(_remarks(page, where, unfiltered=unfiltered, unknown=unknown, sort=sort))
    return 1 if any(entry.problem is not None for entry in page.entries) else 0


def _find_project(catalog: Catalog, text: str) -> str:
    """Return the project with this path or name. Raises UsageError if several have the name."""
    groups = catalog.projects(SessionFilter(), size=1, limit=_NO_LIMIT).projects
    paths = [project.group.value for project in groups]
    for path in (text, str(Path(text).absolute())):
        if path in paths:
            return path
    matches = sorted(path for path in paths if re.split(r"[\\/]", path)[-1] == text)
    if len(matches) > 1:
        match_list = ", ".join(map(one_line, matches[:_MAX_LISTED_NAMES]))
        raise click.UsageError(
            f"{len(matches):,} projects are named {one_line(text)!r}: {match_list}. "
            "Use a whole path."
        )
    return matches[0] if matches else text


def _unknown_value(catalog: Catalog, program: str | None, project: str | None) -> str:
    """Return a remark with the existing names if no session has this program or project."""
    for facet, value in (("program", program), ("project", project)):
        if value:
            overview = catalog.overview(SessionFilter(), limit=1, values=_NO_LIMIT)
            names = sorted(group.value for group in overview.facets[facet])
            if value not in names:
                listed_names = ", ".join(map(one_line, names[:_MAX_LISTED_NAMES]))
                more = ", …" if len(names) > _MAX_LISTED_NAMES else "."
                others = f" {facet.capitalize()}s: {listed_names}{more}" if names else ""
                return f"No session has the {facet} {one_line(value)}.{others}"
    return ""


def _remarks(
    page: Page, where: Location, *, unfiltered: bool, unknown: str, sort: Sort | None
) -> Iterator[str]:
    """Yield remarks about a list: its limits, unreadable sessions, other files and agents."""
    if page.after is not None:
        order = "newest" if sort in (None, "newest") else "first"
        yield f"Showing the {order} {len(page.entries):,}. Use --limit for more."
    elif not page.entries:
        yield (
            f"There are no sessions {_store_name(where)} yet."
            if unfiltered
            else unknown or "No matching sessions."
        )
    for entry in page.entries:
        if entry.problem is not None:
            yield f"{one_line(entry.key)}: {sentence(entry.problem)}"
        yield from damage_lines(entry, where.workspace)
    hint = _transcripts_hint(where) if unfiltered and not page.entries else ""
    if hint:
        yield error_sentence(hint)
    elif unfiltered and page.after is None:
        yield from _other_file_remarks(where, listed=len(page.entries))
    if unfiltered and (not page.entries or (where.agent is None and where.namespace is None)):
        yield from _other_namespace_remarks(other_namespaces(where.workspace))


def _transcripts_hint(where: Location) -> str:
    place = where.place
    if parse_address(place.where).engine != "jsonl":
        return ""
    return transcripts_hint(Path(place.where, where.namespace or ""))


def _store_name(where: Location) -> str:
    if where.agent is not None:
        return f"of agent {one_line(where.agent)} in {where.display_name}"
    if where.namespace is not None:
        return f"in namespace {one_line(where.namespace)} of {where.display_name}"
    return f"in {where.display_name}"


def _other_namespace_remarks(others: OtherNamespaces) -> Iterator[str]:
    """Yield the other agents and namespaces that have sessions, and the option to list them."""
    for names, kind in ((others.agents, "agent"), (others.namespaces, "namespace")):
        listed_names = names[:_MAX_LISTED_NAMES]
        options = ", ".join(f"--{kind} {shlex.quote(one_line(name))}" for name in listed_names)
        more = " …" if len(names) > _MAX_LISTED_NAMES else ""
        if len(names) == 1:
            yield f"1 {kind} has its own sessions: {options}"
        elif names:
            yield f"{len(names):,} {kind}s have their own sessions: {options}{more}"


def _other_file_remarks(where: Location, *, listed: int) -> Iterator[str]:
    """Yield remarks about files in the session folder that were not listed."""
    place = where.place
    is_folder = parse_address(place.where).engine == "jsonl"
    folder = Path(place.where, place.namespace) if is_folder else place.old
    names = [path.name for path in folder.iterdir()] if folder and folder.is_dir() else []
    other_logs = sum(name.endswith(LOG_SUFFIX) for name in names) - (listed if is_folder else 0)
    if other_logs <= 0 and not any(name.endswith(_FOREIGN_SUFFIX) for name in names):
        return  # all files are listed sessions; there is no need to read them
    foreign = [] if where.namespace is not None else _foreign_sessions(place)
    if foreign:
        source = shlex.quote(one_line(str(place.old)))
        workspace = shlex.quote(one_line(where.display_name))
        agent = "" if where.agent is None else f" --agent {shlex.quote(one_line(where.agent))}"
        yield (
            f"{plural(len(foreign), 'file')} of other programs; import with "
            f"`steno import {source} -w {workspace}{agent}`."
        )
    unreadable_count = other_logs - sum(
        file.body == file.name and file.name.endswith(LOG_SUFFIX) for file in foreign
    )
    if is_folder and unreadable_count > 0:
        yield (
            f"{plural(unreadable_count, 'session file')} cannot be read. "
            f"Run `steno doctor {shlex.quote(where.display_name)}` for details."
        )


def _foreign_sessions(place: SessionsLocation) -> "list[Source]":
    """Return the sessions of other programs that can be imported from the session folder."""
    # This import is only needed if there are other files.
    from stenolog.transfer.importers.folder import Folder

    if place.old is not None:
        with suppress(OSError), Folder(place.old, thorough=False) as folder:
            return folder.sources()
    return []


def _session_cells(entry: Entry) -> Sequence[object]:
    if entry.problem is not None:
        return (entry.key, "-", "-", "-", "-", "")
    updated = format_time(entry.updated) if entry.updated is not None else "-"
    return (entry.key, entry.visible, entry.count, updated, entry.state, _title_text(entry))


def _title_text(entry: Entry) -> str:
    return one_line(printable(entry.title))


def _session_fields(entry: Entry) -> dict[str, Any]:
    return {
        "key": entry.key,
        "uid": entry.uid,
        "title": entry.title,
        "state": entry.state,
        "visible": entry.visible,
        "count": entry.count,
        "tokens": entry.tokens,
        "created": entry.created,
        "updated": entry.updated,
        "tags": entry.tags,
        "agent": entry.agent,
        "channel": entry.channel,
        "prompt": entry.prompt,
        "problem": entry.problem,
        "last_message": entry.last_message,
        "program": entry.program or None,
        "project": entry.project or None,
        "model": entry.model or None,
        "input_tokens": entry.input_tokens,
        "output_tokens": entry.output_tokens,
        "usd": entry.cost,
        "failed": entry.failed,
        "forked_from": entry.forked_from,
    }


_MIN_WIDTHS: Final = {"state": 70, "messages": 80, "cost": 90, "age": 50}
"""Minimum width of the terminal for each optional column."""
_STYLES: Final = {"idle": "dim", "running": "green", "interrupted": "yellow"}


def _cost_text(entry: Entry) -> str:
    if entry.cost is None:
        return ""
    plus = "+" if entry.unpriced else ""
    return (f"${entry.cost:,.2f}" if entry.cost >= 0.01 else f"${entry.cost:.4f}") + plus


def _print_sessions_table(entries: Sequence[Entry]) -> None:
    console = terminal_console(styled=uses_color())
    # Users copy the key: it is wrapped, never shortened. The title gets the remaining width.
    columns: dict[str, dict[str, Any]] = {
        "title": {"ratio": 1, "no_wrap": True, "overflow": "ellipsis", "min_width": 12},
        "key": {"overflow": "fold", "max_width": 2 * console.width // 5},
    }
    for name, width in _MIN_WIDTHS.items():
        if console.width >= width and (name != "cost" or any(map(_cost_text, entries))):
            columns[name] = {"no_wrap": True, "justify": "left" if name == "state" else "right"}
    now = datetime.now(UTC)

    def cells(entry: Entry) -> dict[str, Any]:
        total_text = "" if entry.visible == entry.count else f"/{entry.count:,}"
        is_readable = entry.problem is None and entry.updated is not None
        age = format_age(entry.last_message, now) if entry.last_message is not None else "-"
        return {
            "key": (one_line(entry.key), "cyan"),
            "title": _title_text(entry),
            "state": (entry.state if is_readable else "unreadable", _STYLES[entry.state]),
            "messages": f"{entry.visible:,}{total_text}" if is_readable else "-",
            "cost": _cost_text(entry),
            "age": (age, "dim"),
        }

    rows = ([cells(entry)[name] for name in columns] for entry in entries)
    print_table(columns, rows, console=console, expand=True)
