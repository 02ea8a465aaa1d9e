"""`steno list`: list the sessions of a workspace."""

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec.structs import replace

from stenolog.catalog import Catalog, open_catalog
from stenolog.catalog.entries import Entry, Page, Sort, State
from stenolog.cli.output import (
    TimeType,
    format_age,
    format_time,
    json_text,
    one_line,
    plural,
    print_table,
    printable,
    progress_bar,
    sentence,
    table_console,
)
from stenolog.cli.show import damage_lines
from stenolog.cli.workspace import Location, choose_workspace, location_options, open_read_only
from stenolog.errors import StoreUnavailable
from stenolog.sessions.folders import OtherNamespaces, SessionsLocation, other_namespaces
from stenolog.stores.file_names import LOG_SUFFIX
from stenolog.stores.open_store import address, open_store

if TYPE_CHECKING:
    from rich.progress import Progress

    from stenolog.stores.base import Store
    from stenolog.transfer.importers.folder import Source


# --- catalog --------------------------------------------------------------------------------------
# The catalog of a workspace for list and search, with a progress bar while it is updated.


_DELAY_SECONDS: Final = 0.5
"""Seconds before the progress bar appears."""


class IndexProgress:
    """Progress bar on stderr that appears if updating the catalog takes long."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._bar: Progress | None = None

    def __call__(self, done: int, total: int) -> None:
        """Show how many changed sessions are indexed."""
        if self._bar is None:
            if time.monotonic() - self._begun < _DELAY_SECONDS or not sys.stderr.isatty():
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
    with open_read_only(where) as store:
        if address(place.where).engine != "postgresql":
            with _with_progress(open_catalog(store, keep=True)) as found:
                yield found
            return
        kept = _open_for_indexing(store, place)
        if kept is None:
            with _with_progress(open_catalog(store, keep=False)) as found:
                yield found
            return
    with kept, _with_progress(open_catalog(kept)) as found:
        yield found


def _open_for_indexing(store: "Store", place: "SessionsLocation") -> "Store | None":
    """Open a PostgreSQL database for writing, because it contains the catalog to update.

    Return None if that is not possible, or if it would migrate older tables: a read-only command
    must not lock out an older program that uses the database.
    """
    # Imported late: only needed for PostgreSQL.
    from stenolog.stores.postgres import PostgresStore

    if isinstance(store, PostgresStore) and store.database.is_outdated:
        return None
    try:
        return open_store(place.where, namespace=place.namespace)
    except StoreUnavailable:
        return None


@contextmanager
def _with_progress(catalog: Catalog) -> Iterator[tuple[Catalog, IndexProgress]]:
    progress = IndexProgress()
    with catalog:
        try:
            yield catalog, progress
        finally:
            progress.close()
            for problem in catalog.problems:
                click.echo(one_line(f"{problem}."), err=True)


# --- sessions -------------------------------------------------------------------------------------


_TERMINAL_LIMIT: Final = 50
"""Default number of sessions listed in a terminal."""
_NO_LIMIT: Final = 1 << 62
"""A limit larger than any number of sessions."""
_FOREIGN_SUFFIX: Final = ".json"
"""Suffix of session files of other programs."""
_MAX_NAMES: Final = 8
"""Maximum number of other agents or namespaces listed."""


@click.command("list")
@click.argument("directory", metavar="[DIR]", required=False)
@click.option(
    "--prefix", metavar="TEXT", default="", help="Only sessions whose key starts with TEXT."
)
@click.option("--tag", metavar="TAG", help="Only sessions with this tag.")
@click.option(
    "--state",
    type=click.Choice(["idle", "running", "interrupted"]),
    help="Only sessions in this state.",
)
@click.option(
    "--since",
    type=TimeType(),
    help="Only sessions with a message since this time: 2026-11-05, yesterday or 3d.",
)
@click.option(
    "--sort",
    type=click.Choice(["newest", "oldest", "cost", "tokens", "length"]),
    help="newest or oldest last message, cost, tokens used or number of messages.  "
    "[default: last change]",
)
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(min=1),
    help="Maximum number of sessions.  [default: 50 in a terminal, otherwise all]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per session.")
@location_options
@click.pass_context
def list_command(
    ctx: click.Context,
    directory: str | None,
    prefix: str,
    tag: str | None,
    state: State | None,
    since: datetime | None,
    sort: Sort | None,
    limit: int | None,
    as_json: bool,
    where: Location,
) -> None:
    """List sessions, most recently changed first.

    Prints one line per session, separated by tabs: key, visible messages, all messages, time of the
    last change, state, title. In a terminal it prints a table with the cost, and the session with
    the newest message comes first.

    A session is running while an agent writes an answer, interrupted if its last message was not
    answered, and otherwise idle.

    Example: steno list --since 7d --sort cost

    Exit codes: 0 done, 1 failed or some sessions cannot be read, 2 wrong usage.
    """
    where = replace(where, workspace=choose_workspace(ctx, directory, where.workspace))
    in_table = sys.stdout.isatty() and not as_json
    wanted = limit or (_TERMINAL_LIMIT if in_table else _NO_LIMIT)
    with open_workspace_catalog(where) as (catalog, progress):
        page = catalog.list(
            prefix=prefix,
            tag=tag,
            state=state,
            since=since,
            sort=sort or ("newest" if in_table else "changed"),
            limit=wanted,
            progress=progress,
        )
    if as_json:
        for entry in page.entries:
            click.echo(json_text(_fields(entry)))
    elif in_table and page.entries:
        _print_table(page.entries, color=ctx.color is not False)
    else:
        for entry in page.entries:
            click.echo("\t".join(_row(entry)))
    for words in _remarks(page, where, unfiltered=not (prefix or tag or state or since), sort=sort):
        click.echo(words, err=True)
    ctx.exit(1 if any(entry.problem is not None for entry in page.entries) else 0)


def _remarks(
    page: Page, where: Location, *, unfiltered: bool, sort: Sort | None = None
) -> Iterator[str]:
    """Yield remarks about a list: its limits, unreadable sessions, other files and agents."""
    place = where.workspace
    if page.after is not None:
        first = "newest" if sort in (None, "newest") else "first"
        yield f"Showing the {first} {len(page.entries):,}. Use --limit for more."
    elif not page.entries:
        yield (
            f"There are no sessions {_store_name(where)} yet."
            if unfiltered
            else "No matching sessions."
        )
    for entry in page.entries:
        if entry.problem is not None:
            yield f"{one_line(entry.key)}: {sentence(entry.problem)}"
        yield from damage_lines(entry, place)
    if unfiltered and page.after is None:
        yield from _other_files(where, listed=len(page.entries))
    if unfiltered and (not page.entries or (where.agent is None and where.namespace is None)):
        yield from _other_namespaces(other_namespaces(place))


def _store_name(where: Location) -> str:
    if where.agent is not None:
        return f"of agent {one_line(where.agent)} in {where.shown}"
    if where.namespace is not None:
        return f"in namespace {one_line(where.namespace)} of {where.shown}"
    return f"in {where.shown}"


def _other_namespaces(others: OtherNamespaces) -> Iterator[str]:
    """Yield the other agents and namespaces that have sessions, and the option to list them."""
    for names, what in ((others.agents, "agent"), (others.namespaces, "namespace")):
        ways = ", ".join(f"--{what} {shlex.quote(one_line(name))}" for name in names[:_MAX_NAMES])
        more = " …" if len(names) > _MAX_NAMES else ""
        if len(names) == 1:
            yield f"1 {what} has its own sessions: {ways}"
        elif names:
            yield f"{len(names):,} {what}s have their own sessions: {ways}{more}"


def _other_files(where: Location, *, listed: int) -> Iterator[str]:
    """Yield remarks about files in the session folder that were not listed."""
    place = where.place
    in_folder = address(place.where).engine == "jsonl"
    folder = Path(place.where, place.namespace) if in_folder else place.old
    names = [path.name for path in folder.iterdir()] if folder and folder.is_dir() else []
    more = sum(name.endswith(LOG_SUFFIX) for name in names) - (listed if in_folder else 0)
    if more <= 0 and not any(name.endswith(_FOREIGN_SUFFIX) for name in names):
        return  # all files are listed sessions; there is no need to read them
    old = [] if where.namespace is not None else _foreign_sessions(place)
    if old:
        source = shlex.quote(one_line(str(place.old)))
        workspace = shlex.quote(one_line(where.shown))
        agent = "" if where.agent is None else f" --agent {shlex.quote(one_line(where.agent))}"
        yield (
            f"{plural(len(old), 'file')} of other programs; import with "
            f"`steno import {source} -w {workspace}{agent}`."
        )
    unreadable = more - sum(one.body == one.name and one.name.endswith(LOG_SUFFIX) for one in old)
    if in_folder and unreadable > 0:
        yield (
            f"{plural(unreadable, 'session file')} cannot be read. "
            f"Run `steno doctor {where.shown}` for details."
        )


def _foreign_sessions(place: SessionsLocation) -> "list[Source]":
    """Return the sessions of other programs in the place where they are imported from."""
    # Imported late: only needed if there are other files.
    from stenolog.transfer.importers.folder import Folder

    if place.old is not None:
        with suppress(OSError), Folder(place.old) as folder:
            return folder.sources(thorough=False)
    return []


def _row(entry: Entry) -> Sequence[str]:
    if entry.problem is not None:
        return (one_line(entry.key), "-", "-", "-", "-", "")
    updated = format_time(entry.updated) if entry.updated is not None else "-"
    counts = (str(entry.visible), str(entry.count))
    return (one_line(entry.key), *counts, updated, entry.state, _title(entry))


def _title(entry: Entry) -> str:
    return one_line(printable(entry.title))


def _fields(entry: Entry) -> dict[str, Any]:
    return {
        "key": entry.key,
        "uid": entry.uid,
        "title": entry.title,
        "state": entry.state,
        "visible": entry.visible,
        "count": entry.count,
        "tokens": entry.tokens,
        "created": format_time(entry.created) if entry.created is not None else None,
        "updated": format_time(entry.updated) if entry.updated is not None else None,
        "tags": entry.tags,
        "agent": entry.agent,
        "channel": entry.channel,
        "prompt": entry.prompt,
        "problem": entry.problem,
        "last_message": format_time(entry.last_message) if entry.last_message else None,
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


def _cost(entry: Entry) -> str:
    if entry.cost is None:
        return ""
    more = "+" if entry.unpriced else ""
    return (f"${entry.cost:,.2f}" if entry.cost >= 0.01 else f"${entry.cost:.4f}") + more


def _print_table(entries: Sequence[Entry], *, color: bool) -> None:
    console = table_console(color=color)
    shown = (
        "title",
        "key",
        *(
            name
            for name, width in _MIN_WIDTHS.items()
            if console.width >= width and (name != "cost" or any(map(_cost, entries)))
        ),
    )
    # Users copy the key: it is wrapped, never shortened. The title gets the remaining width.
    room = 2 * console.width // 5
    columns: dict[str, dict[str, Any]] = {
        "title": {"ratio": 1, "no_wrap": True, "overflow": "ellipsis", "min_width": 12},
        "key": {"overflow": "fold", "max_width": room},
    }
    for name in shown[2:]:
        columns[name] = {"no_wrap": True, "justify": "left" if name == "state" else "right"}
    now = datetime.now(UTC)

    def cells(entry: Entry) -> dict[str, Any]:
        said = f"{entry.visible:,}" + ("" if entry.visible == entry.count else f"/{entry.count:,}")
        readable = entry.problem is None and entry.updated is not None
        return {
            "key": (one_line(entry.key), "cyan"),
            "title": _title(entry),
            "state": (entry.state if readable else "unreadable", _STYLES[entry.state]),
            "messages": said if readable else "-",
            "cost": _cost(entry),
            "age": (
                format_age(entry.last_message, now) if entry.last_message is not None else "-",
                "dim",
            ),
        }

    rows = ([cells(entry)[name] for name in shown] for entry in entries)
    print_table(console, columns, rows, expand=True)
