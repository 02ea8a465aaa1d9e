"""`steno search`: find messages by their words."""

import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import Final

import click

from stenolog.catalog.entries import Hit, Hits
from stenolog.catalog.query import parse
from stenolog.cli.list_sessions import open_workspace_catalog
from stenolog.cli.output import (
    TIME_FORMATS,
    TimeType,
    format_local_time,
    format_time,
    json_text,
    one_line,
    printable,
    sentence,
)
from stenolog.cli.workspace import Location, location_options

_ROLE_SAMPLE: Final = 100
"""Number of messages examined to suggest other roles."""


@click.command("search")
@click.argument("query", nargs=-1, required=True)
@click.option("--role", metavar="ROLE", help="Only messages of this role: user, assistant, tool, …")
@click.option(
    "--prefix", metavar="TEXT", default="", help="Only sessions whose key starts with TEXT."
)
@click.option("--tag", metavar="TAG", help="Only sessions with this tag.")
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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per message.")
@location_options
@click.pass_context
def search_command(
    ctx: click.Context,
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
) -> None:
    """Find messages that contain all words of QUERY, including hidden ones.

    "two words" searches for a phrase, -word excludes a word, and wor* matches a prefix. Quote such
    a query for the shell: 'error -"not found"'. Case and accents are ignored, and user matches
    getUserName.

    Prints one line per message, separated by tabs: key, seq, role, time, visible or hidden,
    matching text. In a terminal the output is formatted; `steno show KEY:SEQ` shows a message in
    context.

    Example: steno search 'invoice porto*' --since 2w

    Exit codes: 0 found, 1 nothing found, 2 wrong usage.
    """
    asked = " ".join(query)
    if parse(asked).is_empty:
        raise click.UsageError(f"{one_line(asked)!r} contains no word to search for.")
    with open_workspace_catalog(where) as (catalog, progress):
        look = partial(catalog.search, asked, prefix=prefix, tag=tag, since=since, until=until)
        found = look(role=role, limit=limit, newest=newest, progress=progress)
        # The role may be misspelt. Without a role, all roles were searched.
        others = look(limit=_ROLE_SAMPLE).hits if role is not None and not found.hits else ()
    if as_json:
        for hit in found.hits:
            _print_json(hit)
    elif sys.stdout.isatty():
        _print_for_reading(found.hits, color=ctx.color is not False)
    else:
        for hit in found.hits:
            _print_line(hit)
    words = _count_text(found) if found.hits else _no_match_text(asked, others)
    if words:
        click.echo(words, err=True)
    for key, problem in found.unreadable.items():
        click.echo(f"{one_line(key)}: {sentence(problem)}", err=True)
    ctx.exit(0 if found.hits else 1)


def anchor(hit: Hit) -> str:
    """Return the name of a message, as `steno show` accepts it."""
    return f"{hit.key}:{hit.seq}"


def _print_json(hit: Hit) -> None:
    fields = {
        "anchor": anchor(hit),
        "key": hit.key,
        "uid": hit.uid,
        "title": hit.title,
        "seq": hit.seq,
        "role": hit.role,
        "at": format_time(hit.at),
        "hidden": hit.hidden,
        "snippet": hit.snippet,
        "marks": hit.marks,
    }
    click.echo(json_text(fields))


def _print_line(hit: Hit) -> None:
    visibility = "hidden" if hit.hidden else "visible"
    row = (hit.key, str(hit.seq), hit.role, format_time(hit.at), visibility, printable(hit.snippet))
    click.echo("\t".join(map(one_line, row)))


def _print_for_reading(hits: Sequence[Hit], *, color: bool) -> None:
    # Imported late: slow, and only needed in a terminal.
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(color_system="auto" if color else None, highlight=False)
    before = None
    for hit in hits:
        if hit.key != before:
            head = Text(one_line(hit.key), style="bold cyan")
            # Only the title is shortened: users copy the key.
            if head.cell_len + len("  …") <= console.width:
                head.append(f"  {one_line(printable(hit.title))}", style="not bold dim default")
                console.print(head, no_wrap=True, overflow="ellipsis")
            else:
                console.print(head, overflow="fold")
        before = hit.key
        place = Text(f"{one_line(anchor(hit))} {one_line(hit.role)}", style="bold")
        hidden = " · hidden" if hit.hidden else ""
        place.append(f" · {format_local_time(hit.at)}{hidden}", style="not bold dim")
        console.print(Padding(place, (0, 0, 0, 2), expand=False))
        said = Text()
        for text, found in _snippet_parts(hit):
            said.append(text, style="bold yellow" if found else None)
        console.print(Padding(said, (0, 0, 0, 2), expand=False))
        console.print()


def _snippet_parts(hit: Hit) -> Iterator[tuple[str, bool]]:
    """Yield the snippet in pieces, made safe to print, and whether each one is a match."""
    at = 0
    for start, end in hit.marks:
        yield printable(hit.snippet[at:start]), False
        yield printable(hit.snippet[start:end]), True
        at = end
    yield printable(hit.snippet[at:]), False


def _no_match_text(asked: str, others: Sequence[Hit]) -> str:
    """Explain why nothing was found. `others` are the matches of any role."""
    if others:
        roles = ", ".join(one_line(role) for role in sorted({hit.role for hit in others}))
        return f"No matching messages of this role. Roles with matches: {roles}."
    if asked.count('"') % 2:
        return 'No matching messages. The last quotation mark is not closed: write "two words".'
    if sum(not term.is_excluded for term in parse(asked).terms) == 1:
        return "No matching messages."
    literal = " OR is searched as a word." if "OR" in asked.split() else ""
    return f"No matching messages. A message must contain all words.{literal}"


def _count_text(found: Hits) -> str:
    shown = len(found.hits)
    if not found.exact:
        return f"Showing {shown:,} of more than {found.count - 1:,}. Use --limit for more."
    if shown < found.count:
        return f"Showing {shown:,} of {found.count:,}. Use --limit for more."
    return ""
