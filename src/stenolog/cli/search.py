"""`steno search`: find messages by their words."""

import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final

import click

from stenolog.catalog.entries import Hit, Hits
from stenolog.catalog.query import parse_query
from stenolog.cli.list_sessions import open_workspace_catalog
from stenolog.cli.options import json_option, prefix_option, tag_option
from stenolog.cli.output import (
    TIME_FORMATS,
    TimeType,
    format_local_time,
    format_time,
    one_line,
    print_notice,
    print_notices,
    print_rows,
    printable,
    sentence,
    terminal_console,
    uses_color,
)
from stenolog.cli.workspace import Location, location_options

_ROLE_SAMPLE_SIZE: Final = 100
"""Number of messages examined to suggest other roles."""


@click.command("search")
@click.argument("query", nargs=-1, required=True)
@click.option("--role", metavar="ROLE", help="Only messages of this role: user, assistant, tool, …")
@prefix_option
@tag_option
@click.option("--since", type=TimeType(), help=f"Only messages since this time: {TIME_FORMATS}.")
@click.option("--until", type=TimeType(), help="Only messages before this time.")
@click.option(
    "--limit",
    metavar="N",
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
    as_json: bool,
    where: Location,
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
    text = " ".join(query)
    if parse_query(text).is_empty:
        raise click.UsageError(f"{one_line(text)!r} contains no word to search for.")
    with open_workspace_catalog(where) as (catalog, progress):
        search = partial(catalog.search, text, prefix=prefix, tag=tag, since=since, until=until)
        result = search(role=role, limit=limit, newest=newest, progress=progress)
        # The role may be misspelt, so search all roles if nothing was found.
        other_hits = (
            search(limit=_ROLE_SAMPLE_SIZE).hits if role is not None and not result.hits else ()
        )
    if sys.stdout.isatty() and not as_json:
        _print_hits(result.hits)
    else:
        print_rows(result.hits, fields=_hit_fields, cells=_hit_cells, as_json=as_json)
    remark = _count_text(result) if result.hits else _no_match_text(text, other_hits)
    if remark:
        print_notice(remark)
    unreadable = result.unreadable.items()
    print_notices(f"{one_line(key)}: {sentence(problem)}" for key, problem in unreadable)
    return 0 if result.hits else 1


def message_name(hit: Hit) -> str:
    """Return the name of a message, as `steno show` accepts it."""
    return f"{hit.key}:{hit.seq}"


def _hit_fields(hit: Hit) -> dict[str, Any]:
    return {
        "anchor": message_name(hit),
        "key": hit.key,
        "uid": hit.uid,
        "title": hit.title,
        "seq": hit.seq,
        "role": hit.role,
        "at": hit.at,
        "hidden": hit.hidden,
        "snippet": hit.snippet,
        "marks": hit.marks,
    }


def _hit_cells(hit: Hit) -> Sequence[object]:
    visibility = "hidden" if hit.hidden else "visible"
    return hit.key, hit.seq, hit.role, format_time(hit.at), visibility, printable(hit.snippet)


def _print_hits(hits: Sequence[Hit]) -> None:
    # These imports are slow and only needed in a terminal.
    from rich.padding import Padding
    from rich.text import Text

    console = terminal_console(styled=uses_color())
    previous_key = None
    for hit in hits:
        if hit.key != previous_key:
            head = Text(one_line(hit.key), style="bold cyan")
            # Only the title is shortened: users copy the key.
            if head.cell_len + len("  …") <= console.width:
                head.append(f"  {one_line(printable(hit.title))}", style="not bold dim default")
                console.print(head, no_wrap=True, overflow="ellipsis")
            else:
                console.print(head, overflow="fold")
        previous_key = hit.key
        place = Text(f"{one_line(message_name(hit))} {one_line(hit.role)}", style="bold")
        hidden_text = " · hidden" if hit.hidden else ""
        place.append(f" · {format_local_time(hit.at)}{hidden_text}", style="not bold dim")
        console.print(Padding(place, (0, 0, 0, 2), expand=False))
        snippet = Text()
        for text, is_match in _snippet_parts(hit):
            snippet.append(text, style="bold yellow" if is_match else None)
        console.print(Padding(snippet, (0, 0, 0, 2), expand=False))
        console.print()


def _snippet_parts(hit: Hit) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of the snippet, safe to print, and whether each piece is a match."""
    position = 0
    for start, end in hit.marks:
        yield printable(hit.snippet[position:start]), False
        yield printable(hit.snippet[start:end]), True
        position = end
    yield printable(hit.snippet[position:]), False


def _no_match_text(query: str, other_hits: Sequence[Hit]) -> str:
    """Explain why nothing was found. `other_hits` are matches with any role."""
    if other_hits:
        roles = ", ".join(one_line(role) for role in sorted({hit.role for hit in other_hits}))
        return f"No matching messages of this role. Roles with matches: {roles}."
    if query.count('"') % 2:
        return 'No matching messages. The last quotation mark is not closed: write "two words".'
    if sum(not term.is_excluded for term in parse_query(query).terms) == 1:
        return "No matching messages."
    or_hint = " OR is searched as an ordinary word." if "OR" in query.split() else ""
    return f"No matching messages. A message must contain all words.{or_hint}"


def _count_text(result: Hits) -> str:
    shown_count = len(result.hits)
    if not result.exact:
        return f"Showing {shown_count:,} of more than {result.count - 1:,}. Use --limit for more."
    if shown_count < result.count:
        return f"Showing {shown_count:,} of {result.count:,}. Use --limit for more."
    return ""
