"""`steno list` and `steno search`: list the sessions of a workspace, and find messages."""

import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec.structs import asdict, replace

from stenolog.catalog import Catalog, open_catalog
from stenolog.catalog.entries import Entry, Hit, Hits, Page, SessionFilter, Sort, State
from stenolog.cli.output import (
    TIME_FORMATS,
    TimeType,
    attributes_of,
    error_sentence,
    format_age,
    format_local_time,
    format_time,
    one_line,
    plural,
    print_notice,
    print_rows,
    print_table,
    printable,
    progress_bar,
    sentence,
    terminal_console,
    wants_json,
)
from stenolog.cli.workspace import (
    Location,
    choose_workspace,
    damage_lines,
    display_name,
    json_option,
    limit_option,
    location_options,
    prefix_option,
    short_keys,
    tag_option,
    transcripts_hint,
)
from stenolog.errors import StoreUnavailable
from stenolog.sessions.folders import OtherNamespaces, SessionsLocation, other_namespaces
from stenolog.stores.base import Store
from stenolog.stores.file_names import LOG_SUFFIX
from stenolog.stores.open_store import open_store, parse_address

if TYPE_CHECKING:
    from rich.progress import Progress

    from stenolog.transfer.importers.legacy_session import Source

_TERMINAL_ROW_LIMIT: Final = 50
"""Default number of sessions listed in a terminal."""
_NO_LIMIT: Final = 1 << 62
"""A limit larger than any number of sessions."""
_FOREIGN_SUFFIX: Final = ".json"
"""Suffix of the session files of some other programs."""
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
@limit_option(
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
    location: Location,
) -> int:
    """List the sessions of a workspace.

    DIR is the workspace, as with -w. In a terminal the command prints a table, newest message
    first. A long key is shown as a part of it that selects only this session; commands that only
    read accept the part. A state is shown only if it is not idle.

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
    """  # noqa: D301 -- click does not rewrap a block after \b
    location = replace(location, workspace=choose_workspace(directory, location.workspace))
    as_table = sys.stdout.isatty() and not wants_json()
    with _open_workspace_catalog(location) as (store, catalog, progress):
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
            limit=limit or (_TERMINAL_ROW_LIMIT if as_table else _NO_LIMIT),
            progress=progress,
        )
        keys = [entry.key for entry in page.entries]
        key_texts = short_keys(keys, store.list_sessions()) if as_table else {}
    table = partial(_print_sessions_table, key_texts=key_texts, sort=sort)
    print_rows(page.entries, fields=_session_fields, cells=_session_cells, table=table)
    is_unfiltered = not (prefix or tag or state or failed or program or project or since)
    print_notice(*_list_remarks(page, location, is_unfiltered, sort))
    return 1 if any(entry.problem is not None for entry in page.entries) else 0


def _find_project(catalog: Catalog, path_or_name: str) -> str:
    """Return the path of the project with this path or name, or the argument if there is none.

    Raises UsageError if several projects have this name.
    """
    projects = catalog.projects(SessionFilter(), size=1, limit=_NO_LIMIT).projects
    paths = [project.group.value for project in projects]
    for path in (path_or_name, str(Path(path_or_name).absolute())):
        if path in paths:
            return path
    matching_paths = sorted(path for path in paths if re.split(r"[\\/]", path)[-1] == path_or_name)
    if len(matching_paths) > 1:
        paths_text = ", ".join(map(one_line, matching_paths[:_MAX_LISTED_NAMES]))
        raise click.UsageError(
            f"{len(matching_paths):,} projects are named {one_line(path_or_name)!r}: {paths_text}. "
            "Use a whole path."
        )
    return matching_paths[0] if matching_paths else path_or_name


def _list_remarks(
    page: Page, location: Location, is_unfiltered: bool, sort: Sort | None
) -> Iterator[str]:
    """Yield remarks about the list: its limit, unreadable sessions, other files and agents."""
    if page.after is not None:
        order_word = "newest" if sort in (None, "newest") else "first"
        yield f"Showing the {order_word} {len(page.entries):,}. Use --limit for more."
    elif not page.entries:
        empty_remark = f"There are no sessions {_location_phrase(location)} yet."
        yield empty_remark if is_unfiltered else "No matching sessions."
    for entry in page.entries:
        if entry.problem is not None:
            yield f"{one_line(entry.key)}: {sentence(entry.problem)}"
        yield from damage_lines(entry, location.workspace)
    hint, place = "", location.place
    if is_unfiltered and not page.entries and parse_address(place.where).engine == "jsonl":
        hint = transcripts_hint(Path(place.where, location.namespace or ""))
    if hint:
        yield error_sentence(hint)
    elif is_unfiltered and page.after is None:
        yield from _other_file_remarks(location, listed_count=len(page.entries))
    is_whole_workspace = location.agent is None and location.namespace is None
    if is_unfiltered and (not page.entries or is_whole_workspace):
        yield from _other_namespace_remarks(other_namespaces(location.workspace))


def _location_phrase(location: Location) -> str:
    if location.agent is not None:
        return f"of agent {one_line(location.agent)} in {display_name(location.workspace)}"
    if location.namespace is not None:
        return f"in namespace {one_line(location.namespace)} of {display_name(location.workspace)}"
    return f"in {display_name(location.workspace)}"


def _other_namespace_remarks(others: OtherNamespaces) -> Iterator[str]:
    """Yield remarks about other agents and namespaces with sessions, and how to list them."""
    for names, kind in ((others.agents, "agent"), (others.namespaces, "namespace")):
        listed_names = names[:_MAX_LISTED_NAMES]
        options = ", ".join(f"--{kind} {shlex.quote(one_line(name))}" for name in listed_names)
        more = " …" if len(names) > _MAX_LISTED_NAMES else ""
        if len(names) == 1:
            yield f"1 {kind} has its own sessions: {options}"
        elif names:
            yield f"{len(names):,} {kind}s have their own sessions: {options}{more}"


def _other_file_remarks(location: Location, *, listed_count: int) -> Iterator[str]:
    """Yield remarks about files in the session folder that are not listed sessions."""
    place = location.place
    is_folder = parse_address(place.where).engine == "jsonl"
    folder = Path(place.where, place.namespace) if is_folder else place.old
    names = [path.name for path in folder.iterdir()] if folder and folder.is_dir() else []
    other_log_count = sum(name.endswith(LOG_SUFFIX) for name in names)
    other_log_count -= listed_count if is_folder else 0
    if other_log_count <= 0 and not any(name.endswith(_FOREIGN_SUFFIX) for name in names):
        return  # all files are listed sessions; there is no need to read them
    foreign_files = [] if location.namespace is not None else _importable_files(place)
    if foreign_files:
        arguments = ["import", str(place.old), "-w", display_name(location.workspace)]
        arguments += [] if location.agent is None else ["--agent", location.agent]
        command = f"`steno {shlex.join(map(one_line, arguments))}`"
        yield f"{plural(len(foreign_files), 'file')} of other programs; import with {command}."
    unreadable_count = other_log_count - sum(
        file.body == file.name and file.name.endswith(LOG_SUFFIX) for file in foreign_files
    )
    if is_folder and unreadable_count > 0:
        yield (
            f"{plural(unreadable_count, 'session file')} cannot be read. "
            f"Run `steno doctor {shlex.quote(display_name(location.workspace))}` for details."
        )


def _importable_files(place: SessionsLocation) -> "list[Source]":
    """Return the session files of other programs in the session folder."""
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
        **attributes_of(entry, "key", "uid", "title", "state", "visible", "count", "tokens"),
        **attributes_of(entry, "created", "updated", "tags", "agent", "channel", "prompt"),
        **attributes_of(entry, "problem", "last_message"),
        "program": entry.program or None,
        "project": entry.project or None,
        "model": entry.model or None,
        **attributes_of(entry, "input_tokens", "output_tokens"),
        "usd": entry.cost,
        **attributes_of(entry, "failed", "forked_from"),
    }


_MIN_TERMINAL_WIDTHS: Final = {"state": 60, "messages": 100, "cost": 60, "age": 40}
"""Minimum width of the terminal for each optional column."""
_STATE_STYLES: Final = {"running": "green", "interrupted": "yellow"}
"""Style of each state that is shown. Most sessions are idle, which is not shown."""


def _state_text(entry: Entry) -> str:
    if entry.problem is not None or entry.updated is None:
        return "unreadable"
    return "" if entry.state == "idle" else entry.state


def _cost_text(entry: Entry) -> str:
    if entry.cost is None:
        return ""
    plus_sign = "+" if entry.unpriced else ""
    return (f"${entry.cost:,.2f}" if entry.cost >= 0.01 else f"${entry.cost:.4f}") + plus_sign


def _print_sessions_table(
    entries: Sequence[Entry], *, key_texts: Mapping[str, str], sort: Sort | None
) -> None:
    console = terminal_console()
    shown_columns = {
        "state": any(map(_state_text, entries)),
        "messages": True,
        "cost": any(map(_cost_text, entries)) or sort == "cost",
        "age": True,
    }
    # Users copy the key: it is wrapped, never shortened. The title gets the remaining width.
    columns: dict[str, dict[str, Any]] = {
        "title": {"ratio": 1, "no_wrap": True, "overflow": "ellipsis", "min_width": 12},
        "key": {"overflow": "fold", "max_width": 2 * console.width // 5},
    }
    for name, width in _MIN_TERMINAL_WIDTHS.items():
        if console.width >= width and shown_columns[name]:
            columns[name] = {"no_wrap": True, "justify": "left" if name == "state" else "right"}
    now = datetime.now(UTC)

    def cells(entry: Entry) -> dict[str, Any]:
        total_text = "" if entry.visible == entry.count else f"/{entry.count:,}"
        is_readable = entry.problem is None and entry.updated is not None
        age = format_age(entry.last_message, now) if entry.last_message is not None else "-"
        return {
            "key": (one_line(key_texts[entry.key]), "cyan"),
            "title": _title_text(entry),
            "state": (_state_text(entry), _STATE_STYLES.get(entry.state, "")),
            "messages": f"{entry.visible:,}{total_text}" if is_readable else "-",
            "cost": _cost_text(entry),
            "age": (age, "dim"),
        }

    rows = ([cells(entry)[name] for name in columns] for entry in entries)
    print_table(columns, rows, console=console, expand=True)


# --- search ---------------------------------------------------------------------------------------


@click.command("search")
@click.argument("query", nargs=-1, required=True)
@click.option("--role", metavar="ROLE", help="Only messages of this role: user, assistant, tool, …")
@prefix_option
@tag_option
@click.option("--since", type=TimeType(), help=f"Only messages since this time: {TIME_FORMATS}.")
@click.option("--until", type=TimeType(), help="Only messages before this time.")
@limit_option(
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Maximum number of messages.",
)
@click.option(
    "--newest", is_flag=True, help="Sort by time, newest first.  [default: best match first]"
)
@json_option("one JSON object per message")
@location_options
def search_command(
    query: tuple[str, ...],
    role: str | None,
    prefix: str,
    tag: str | None,
    since: datetime | None,
    until: datetime | None,
    limit: int,
    newest: bool,
    location: Location,
) -> int:
    """Find messages that contain all words of QUERY, including hidden messages.

    "two words" searches for a phrase, -word excludes a word, and wor* matches a prefix. Quote such
    a query for the shell: 'error -"not found"'. Case and accents are ignored. Titles are not
    searched. A word also matches a part of a name: user finds getUserName.

    Prints one line per message, separated by tabs: key, seq, role, time, visible or hidden,
    matching text. In a terminal the output is formatted. `steno show KEY:SEQ` shows a message with
    its neighbours.

    Example: steno search 'invoice porto*' --since 2w

    Exit codes: 0 found, 1 nothing found, 2 wrong usage.
    """
    # `steno list` does not need this import.
    from stenolog.catalog.query import parse_query, prefix_query

    text = " ".join(query)
    if parse_query(text).is_empty:
        raise click.UsageError(f"{one_line(text)!r} contains no word to search for.")
    with _open_workspace_catalog(location) as (_, catalog, progress):
        search = partial(catalog.search, prefix=prefix, tag=tag, since=since, until=until)
        result = search(text, role=role, limit=limit, newest=newest, progress=progress)
        prefixes = "" if result.hits else prefix_query(text)
        has_longer_words = bool(prefixes and search(prefixes, role=role, limit=1).hits)
    print_rows(result.hits, fields=_hit_fields, cells=_hit_cells, table=_print_hits)
    hint = " A message must contain all words." if " " in text else ""
    remark = _count_text(result) if result.hits else f"No matching messages.{hint}"
    if has_longer_words:
        remark += f" Longer words match: steno search {shlex.quote(one_line(prefixes))}"
    if remark:
        print_notice(remark)
    unreadable_sessions = result.unreadable.items()
    print_notice(*(f"{one_line(key)}: {sentence(problem)}" for key, problem in unreadable_sessions))
    return 0 if result.hits else 1


def _message_reference(hit: Hit) -> str:
    """Return KEY:SEQ of a message, as `steno show` accepts it."""
    return f"{hit.key}:{hit.seq}"


def _hit_fields(hit: Hit) -> dict[str, Any]:
    return {"anchor": _message_reference(hit), **asdict(hit)}


def _hit_cells(hit: Hit) -> Sequence[object]:
    visibility = "hidden" if hit.hidden else "visible"
    return hit.key, hit.seq, hit.role, format_time(hit.at), visibility, printable(hit.snippet)


def _print_hits(hits: Sequence[Hit]) -> None:
    # These imports are slow and only needed in a terminal.
    from rich.padding import Padding
    from rich.text import Text

    console = terminal_console()
    previous_key = None
    for hit in hits:
        if hit.key != previous_key:
            header = Text(one_line(hit.key), style="bold cyan")
            # Only the title is shortened: users copy the key.
            if header.cell_len + len("  …") <= console.width:
                title = one_line(printable(hit.title))
                header.append(f"  {title}", style="not bold dim default")
                console.print(header, no_wrap=True, overflow="ellipsis")
            else:
                console.print(header, overflow="fold")
        previous_key = hit.key
        hidden_text = " · hidden" if hit.hidden else ""
        message_header = Text(one_line(f"{_message_reference(hit)} {hit.role}"), style="bold")
        message_header.append(f" · {format_local_time(hit.at)}{hidden_text}", style="not bold dim")
        console.print(Padding(message_header, (0, 0, 0, 2), expand=False))
        snippet, position = Text(), 0
        for start, end in hit.marks:
            snippet.append(printable(hit.snippet[position:start]))
            snippet.append(printable(hit.snippet[start:end]), style="bold yellow")
            position = end
        snippet.append(printable(hit.snippet[position:]))
        console.print(Padding(snippet, (0, 0, 0, 2), expand=False))
        console.print()


def _count_text(result: Hits) -> str:
    shown_count = len(result.hits)
    if not result.exact:
        return f"Showing {shown_count:,} of more than {result.count - 1:,}. Use --limit for more."
    if shown_count < result.count:
        return f"Showing {shown_count:,} of {result.count:,}. Use --limit for more."
    return ""


# --- catalog --------------------------------------------------------------------------------------


_PROGRESS_DELAY_SECONDS: Final = 0.5
"""Seconds after which the progress bar appears."""


class IndexProgress:
    """Progress bar on stderr that appears if updating the catalog takes long."""

    def __init__(self) -> None:
        self._started_at = time.monotonic()
        self._bar: Progress | None = None

    def __call__(self, indexed_count: int, changed_count: int) -> None:
        """Show how many of the changed sessions are indexed."""
        if self._bar is None:
            elapsed_seconds = time.monotonic() - self._started_at
            if elapsed_seconds < _PROGRESS_DELAY_SECONDS or not sys.stderr.isatty():
                return
            self._bar = progress_bar()
            self._bar.start()
            self._bar.add_task("Indexing sessions")
        self._bar.update(self._bar.task_ids[0], completed=indexed_count, total=changed_count)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def _open_workspace_catalog(
    location: Location,
) -> Iterator[tuple[Store, Catalog, IndexProgress]]:
    """Open the store and the catalog of a workspace, and a progress bar for updating the catalog.

    Sessions are only read. A PostgreSQL database is opened for writing to update its catalog.
    """
    place = location.place
    progress = IndexProgress()
    with ExitStack() as stack:
        store = stack.enter_context(location.open())
        is_catalog_stored = parse_address(place.where).engine != "postgresql"
        if not is_catalog_stored:
            with suppress(StoreUnavailable):
                writable_store = open_store(place.where, namespace=place.namespace)
                stack.close()
                store = stack.enter_context(writable_store)
                is_catalog_stored = True
        catalog = stack.enter_context(open_catalog(store, keep=is_catalog_stored))
        try:
            yield store, catalog, progress
        finally:
            progress.close()
            print_notice(*(one_line(f"{problem}.") for problem in catalog.problems))
