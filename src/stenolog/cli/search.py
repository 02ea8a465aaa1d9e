"""`steno search`: find messages by their words."""

import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import click

from stenolog.catalog.entries import Hit, Hits
from stenolog.catalog.query import parse
from stenolog.cli.list_sessions import catalog_of
from stenolog.cli.output import json_text, moment, one_line, printable, sentence, spoken_moment
from stenolog.cli.workspace import Where, where_options

_SOME: Final = 100
"""Number of messages examined to suggest other roles."""
_TIMES: Final = (
    "2026-11-05, 2026-11-05T14:30 (UTC), today, yesterday, or an age: 90s, 15m, 2h, 3d, 1w"
)


class Moment(click.ParamType[datetime]):
    """The type of a time option: a date, a time, or an age."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        """Return the time. Fails if the value is not a time."""
        if isinstance(value, datetime):
            return value
        found = spoken_moment(value, datetime.now(UTC))
        if found is None:
            self.fail(f"{value!r} is no time; write {_TIMES}", param, ctx)
        return found


@click.command("search")
@click.argument("query", nargs=-1, required=True)
@click.option("--role", metavar="ROLE", help="Only what this role said: user, assistant, tool …")
@click.option("--prefix", metavar="TEXT", default="", help="Only sessions whose key begins so.")
@click.option("--tag", metavar="TAG", help="Only sessions with this tag.")
@click.option("--since", type=Moment(), help=f"Only what was said from then on: {_TIMES}.")
@click.option("--until", type=Moment(), help="Only what was said before then; TIME as above.")
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="How many messages to show.",
)
@click.option("--newest", is_flag=True, help="The newest first, instead of the best.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object for each message.")
@where_options
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
    where: Where,
) -> None:
    """Find messages that have all the words of QUERY, hidden and archived ones too.

    Within QUERY, "two words" stand in this order, -word must not be there, and wor* is the
    beginning of a word; the shell wants such a query in quotes: 'error -"not found"'. Case and
    accents make no difference, and user finds getUserName.

    One line each, with tabs between: the key, the seq, the role, when it was said, whether it is
    visible or hidden, and the part that matches. In a terminal it is laid out for reading, and each
    message named KEY:SEQ: `steno show KEY:SEQ` shows it with what was said around it.

    Exit code: 0 something was found, 1 nothing was, 2 wrong usage.
    """
    asked = " ".join(query)
    if parse(asked).is_empty:
        raise click.UsageError(f"There is no word to search for in {one_line(asked)!r}.")
    with catalog_of(where) as (catalog, meter):
        look = partial(catalog.search, asked, prefix=prefix, tag=tag, since=since, until=until)
        found = look(role=role, limit=limit, newest=newest, progress=meter)
        # The role may be misspelt. Without a role, all roles were searched.
        others = look(limit=_SOME).hits if role is not None and not found.hits else ()
    if as_json:
        for hit in found.hits:
            _print_json(hit)
    elif sys.stdout.isatty():
        _print_for_reading(found.hits, color=ctx.color is not False)
    else:
        for hit in found.hits:
            _print_line(hit)
    words = _in_words(found) if found.hits else _why_nothing(asked, others)
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
        "at": moment(hit.at),
        "hidden": hit.hidden,
        "snippet": hit.snippet,
        "marks": hit.marks,
    }
    click.echo(json_text(fields))


def _print_line(hit: Hit) -> None:
    sight = "hidden" if hit.hidden else "visible"
    row = (hit.key, str(hit.seq), hit.role, moment(hit.at), sight, printable(hit.snippet))
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
        place.append(f" · {moment(hit.at)}{hidden}", style="not bold dim")
        console.print(Padding(place, (0, 0, 0, 2), expand=False))
        said = Text()
        for text, found in _pieces(hit):
            said.append(text, style="bold yellow" if found else None)
        console.print(Padding(said, (0, 0, 0, 2), expand=False))
        console.print()


def _pieces(hit: Hit) -> Iterator[tuple[str, bool]]:
    """Yield the snippet in pieces, made safe to print, and whether each one is a match."""
    at = 0
    for start, end in hit.marks:
        yield printable(hit.snippet[at:start]), False
        yield printable(hit.snippet[start:end]), True
        at = end
    yield printable(hit.snippet[at:]), False


def _why_nothing(asked: str, others: Sequence[Hit]) -> str:
    """Explain why nothing was found. `others` are the matches of any role."""
    if others:
        roles = ", ".join(one_line(role) for role in sorted({hit.role for hit in others}))
        return f"No message of that role matches; there are some of: {roles}."
    if asked.count('"') % 2:
        return 'No message matches. The last quotation mark is not closed: write "two words".'
    if sum(not term.is_excluded for term in parse(asked).terms) == 1:
        return "No message matches."
    literal = " OR is taken for a word." if "OR" in asked.split() else ""
    return f"No message matches: all of the words must be in it.{literal}"


def _in_words(found: Hits) -> str:
    shown = len(found.hits)
    if not found.exact:
        return f"{shown:,} of more than {found.count - 1:,} shown; --limit shows more."
    if shown < found.count:
        return f"{shown:,} of {found.count:,} shown; --limit shows more."
    return ""
