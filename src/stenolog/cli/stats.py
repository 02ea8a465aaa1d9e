"""`steno stats`: count messages and tokens, and compute their cost."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import click

from stenolog.cli.completion import complete_key
from stenolog.cli.edit import progress
from stenolog.cli.output import (
    NOT_ALL,
    count,
    json_text,
    moment,
    one_line,
    print_table,
    sentence,
    table_console,
)
from stenolog.cli.search import Moment
from stenolog.cli.show import info_of
from stenolog.cli.workspace import Where, open_to_read, where_options
from stenolog.errors import ForeignLog, NoSuchSession, StenologError
from stenolog.sessions.usage import INSTALL_COMMAND, Cost, Counts, Totals, cost_of, prices
from stenolog.stores.base import Store
from stenolog.stores.jsonl.log_names import key_of
from stenolog.stores.open_store import address

ESTIMATES_ITSELF: Final = "scripted"
"""Name of the model without a provider, the same as in `providers.finding`."""
_DAYS: Final = 30
"""Maximum number of days drawn."""
_COLUMNS: Final = ("messages", "prompt", "answer", "cached", "estimated")


@click.command("stats")
@click.argument("key", required=False, shell_complete=complete_key)
@click.option("--prefix", metavar="TEXT", default="", help="Only sessions whose key begins so.")
@click.option("--since", type=Moment(), help="Only what was said from then on: 2026-11-05 or 3d.")
@click.option("--until", type=Moment(), help="Only what was said before then.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@where_options
@click.pass_context
def stats_command(
    ctx: click.Context,
    key: str | None,
    prefix: str,
    since: datetime | None,
    until: datetime | None,
    as_json: bool,
    where: Where,
) -> None:
    """Count sessions, messages and tokens, by day, model and channel.

    All sessions, or the session KEY; hidden and archived messages too, for they took tokens. What
    a fork took over is counted where it was said.

    Of tokens, prompt, answer and cached (a part of prompt) are what the providers counted; of the
    scripted model, which has none, what it estimated itself. Estimated is the text, each message
    once, for which nobody did. The cost, in US dollars, is
    told where the package genai-prices is installed; nobody is asked for newer prices.

    One line each, with tabs between: total, day, model or channel; its name; messages, prompt,
    answer, cached, estimated. In a terminal days are drawn as bars.

    Exit code: 0 counted, 1 there is no such session, 2 wrong usage, 3 some sessions could not be
    read; stderr names them.
    """
    totals = Totals(price=prices())
    problems: dict[str, str] = {}
    with open_to_read(where) as store:
        named = info_of(store, key).key if key is not None else None
        keys = [named] if named is not None else _all_keys(store, where, prefix)
        with progress("Counting", len(keys), shown=len(keys) > 1) as step:
            for one in keys:
                try:
                    _count(store, one, totals, since, until)
                except (NoSuchSession, ForeignLog):
                    pass  # deleted since it was listed, or a file of another program
                except StenologError as error:
                    problems[one] = str(error)
                step()
    cost = cost_of(totals.models) if totals.price is not None else None
    if as_json:
        fields = _fields(totals, cost, problems)
        asked = {"since": since and moment(since), "until": until and moment(until)}
        click.echo(json_text({**asked, **fields}, indent=2))
    elif sys.stdout.isatty() and totals.total.messages:
        _draw(totals, cost, color=ctx.color is not False)
    else:
        for row in _rows(totals):
            click.echo("\t".join(row))
    for words in _remarks(totals, cost, problems):
        click.echo(words, err=True)
    ctx.exit(NOT_ALL if problems else 0)


def _all_keys(store: Store, where: Where, prefix: str) -> list[str]:
    """Return the keys of all sessions, and of files that a store does not list.

    A JSONL store leaves out the sessions that it cannot read.
    """
    keys = store.list_sessions(prefix=prefix)
    place = where.place
    if address(place.where).engine != "jsonl":
        return keys
    listed, others = set(keys), set()
    with suppress(OSError):
        for path in Path(place.where, place.namespace).iterdir():
            key = key_of(path.name)
            if key is not None and key not in listed and key.startswith(prefix):
                others.add(key)
    return keys + sorted(others)


def _count(
    store: Store, key: str, totals: Totals, since: datetime | None, until: datetime | None
) -> None:
    info = store.info(key)
    if since is not None and info.updated < since:
        return  # no message in it is newer
    totals.add(info, store.get_history(key, full=True), since=since, until=until)


def _remarks(totals: Totals, cost: Cost | None, problems: Mapping[str, str]) -> Iterator[str]:
    for key, problem in problems.items():
        yield f"{one_line(key)}: {sentence(problem)}"
    whole = totals.total
    if not whole.messages:
        yield "Nothing was said there."
        return
    script = totals.models.get(ESTIMATES_ITSELF, Counts())
    by_script = script.prompt + script.answer
    by_providers = whole.prompt + whole.answer - by_script
    parts = [
        f"{tokens:,} {words}"
        for tokens, words in (
            (by_providers, "tokens were counted by providers"),
            (by_script, "are what the scripted model estimated of itself"),
            (whole.estimated, "are estimated from the text"),
        )
        if tokens
    ]
    if whole.answers and (whole.estimated or by_script):
        first = parts[0] if by_providers else parts[0].replace(" are ", " tokens are ", 1)
        yield f"{', '.join([first, *parts[1:]])}."
    elif whole.estimated:
        yield "No provider's counts are known here: all tokens are estimated from the text."
    if cost is None and whole.answers > script.answers:
        yield f"For the cost: {INSTALL_COMMAND}"
    elif cost is not None and set(cost.unknown) - {ESTIMATES_ITSELF}:
        unknown = [name for name in cost.unknown if name != ESTIMATES_ITSELF]
        names = ", ".join(one_line(name) or "unnamed models" for name in unknown)
        yield f"No price is known for {names}."


# --- as text and JSON ------------------------------------------------------------------------


def _tables(totals: Totals) -> Iterator[tuple[str, str, Counts]]:
    """Yield the kind, name and counts of each line of the report."""
    yield "total", "", totals.total
    for day in sorted(totals.days):
        yield "day", day.isoformat(), totals.days[day]
    for name in sorted(totals.models, key=lambda one: (-totals.models[one].tokens, one)):
        yield "model", name, totals.models[name]
    for name in sorted(totals.channels, key=lambda one: (-totals.channels[one].tokens, one)):
        yield "channel", name, totals.channels[name]


def _rows(totals: Totals) -> Iterator[list[str]]:
    for kind, name, counts in _tables(totals):
        shown = one_line(name) or "-"
        yield [kind, shown, *(str(getattr(counts, column)) for column in _COLUMNS)]


def _fields(totals: Totals, cost: Cost | None, problems: Mapping[str, str]) -> dict[str, Any]:
    told: dict[str, list[dict[str, Any]]] = {"day": [], "model": [], "channel": []}
    for kind, name, counts in _tables(totals):
        if kind != "total":
            shown = name if kind == "day" else name or None
            told[kind].append({kind: shown, **_sums(counts)})
    return {
        "sessions": totals.sessions,
        **_sums(totals.total),
        "days": told["day"],
        "models": told["model"],
        "channels": told["channel"],
        "cost": None
        if cost is None
        else {
            "usd": cost.total,
            "models": dict(cost.models),
            "unknown": list(cost.unknown),
        },
        "problems": [{"key": key, "problem": words} for key, words in problems.items()],
    }


def _sums(counts: Counts) -> dict[str, int]:
    return {column: getattr(counts, column) for column in (*_COLUMNS, "answers")}


# --- in a terminal ---------------------------------------------------------------------------


def _draw(totals: Totals, cost: Cost | None, *, color: bool) -> None:
    # Imported late: slow, and only needed in a terminal.
    from rich.bar import Bar
    from rich.text import Text

    console = table_console(color=color)

    def table(name: str, rows: Mapping[str, Counts], *, bars: str) -> None:
        most = max(counts.tokens for counts in rows.values()) or 1
        number = {"justify": "right", "no_wrap": True}
        columns: dict[str, dict[str, Any]] = {
            name: {"no_wrap": True, "max_width": max(10, console.width // 3)},
            "messages": number,
            "tokens": number,
            "": {"min_width": 10, "max_width": 40},
        }

        cells = []
        for shown, counts in rows.items():
            about = "~" if counts.estimated else ""
            bar = Bar(most, 0, counts.tokens, color=bars if color else "default")
            cells.append((shown, f"{counts.messages:,}", f"{about}{counts.tokens:,}", bar))
        print_table(console, columns, cells)
        console.print()

    whole = totals.total
    parts = ((totals.sessions, "session"), (whole.messages, "message"), (whole.tokens, "token"))
    head = ", ".join(count(number, what) for number, what in parts)
    if cost is not None and cost.models:
        head += f", ${cost.total:,.2f}"
    console.print(Text(head, style="bold"))
    console.print(
        Text(
            f"read {whole.prompt:,} (of that {whole.cached:,} cached), written {whole.answer:,}, "
            f"estimated ~{whole.estimated:,}\n",
            style="dim",
        )
    )
    days = {day.isoformat(): totals.days[day] for day in sorted(totals.days)[-_DAYS:]}
    table("day", days, bars="cyan")
    if len(totals.days) > _DAYS:
        console.print(Text(f"The last {_DAYS} days with messages; --json has all.\n", style="dim"))
    for kind, bars in (("model", "green"), ("channel", "magenta")):
        rows = {one_line(name) or "-": counts for of, name, counts in _tables(totals) if of == kind}
        if rows:
            table(kind, rows, bars=bars)
