"""`steno stats`: count messages and tokens, and compute their cost."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from stenolog.catalog.searchable_text import prompt_from, role_of, text_of, title_from
from stenolog.cli.completion import complete_key
from stenolog.cli.edit import progress
from stenolog.cli.output import (
    PARTIAL,
    TimeType,
    format_time,
    json_text,
    one_line,
    plural,
    print_table,
    printable,
    sentence,
    table_console,
)
from stenolog.cli.show import find_session
from stenolog.cli.workspace import Location, location_options, open_existing, open_read_only
from stenolog.errors import ForeignLog, NoSuchSession, StenologError, install_command
from stenolog.records import SessionInfo
from stenolog.sessions.folders import NOTES
from stenolog.sessions.side_usage import add_usage, read_field, side_counts
from stenolog.sessions.usage import Cost, Counts, Totals, cost_of, prices
from stenolog.stores.base import Store
from stenolog.stores.file_names import key_of_log
from stenolog.stores.open_store import address

if TYPE_CHECKING:
    from stenolog.memory.consolidation import ConsolidationProgress

SCRIPTED_MODEL: Final = "scripted"
"""Name of the model without a provider, the same as in `providers.finding`."""
_MAX_DAYS: Final = 30
"""Maximum number of days drawn."""
_COLUMNS: Final = {
    "messages": "messages",
    "input_tokens": "prompt",
    "output_tokens": "answer",
    "cached_tokens": "cached",
    "estimated_tokens": "estimated",
}
"""Attribute of Counts for each column and JSON field."""
_TABLES: Final = ("days", "models", "channels")
"""JSON fields that --by leaves out."""


@click.command("stats")
@click.argument("key", required=False, shell_complete=complete_key)
@click.option(
    "--prefix", metavar="TEXT", default="", help="Only sessions whose key starts with TEXT."
)
@click.option(
    "--since", type=TimeType(), help="Only messages since this time: 2026-11-05, yesterday or 3d."
)
@click.option("--until", type=TimeType(), help="Only messages before this time.")
@click.option(
    "--by",
    type=click.Choice(["session", "day", "model", "project", "channel"]),
    help="One row per session, day, model, project or channel, the most expensive first.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@location_options
@click.pass_context
def stats_command(
    ctx: click.Context,
    key: str | None,
    prefix: str,
    since: datetime | None,
    until: datetime | None,
    by: str | None,
    as_json: bool,
    where: Location,
) -> None:
    """Count messages and tokens by day, model and channel.

    Counts all sessions, or the session KEY, including hidden and archived messages. Messages that a
    fork copied are counted once.

    input_tokens, output_tokens and cached_tokens (part of the input) are as the providers reported
    them; those of the scripted model are its own estimate. estimated_tokens are texts without such
    a report, each counted once. The cost in US dollars needs the package genai-prices.

    Model calls that made notes and summaries are part of all sums, except those by day and those
    with --since or --until.

    Prints one line per row, separated by tabs: total, day, model or channel; its name; messages,
    input, output, cached and estimated tokens. With --by only these rows, and the cost in US
    dollars as the last column. In a terminal it draws bars.

    Example: steno stats --by project --since 30d

    Exit codes: 0 done, 1 there is no such session, 2 wrong usage, 3 some sessions cannot be read.
    """
    totals = Totals(price=prices())
    titles: dict[str, str] = {}
    problems: dict[str, str] = {}
    with ExitStack() as opened:
        store = opened.enter_context(open_read_only(where))
        progress_marks = None if since or until else _open_marks(opened, where)
        named = find_session(store, key).key if key is not None else None
        keys = [named] if named is not None else _all_keys(store, where, prefix)
        with progress("Counting", len(keys), shown=len(keys) > 1) as step:
            for one in keys:
                try:
                    session = _count(store, one, totals, since, until)
                    if by == "session":
                        titles[one] = "" if session is None else session.title
                    if progress_marks is not None and session is not None:
                        used = read_field(session.info.meta, session.info.uid)
                        add_usage(used, progress_marks.usage(session.info.uid))
                        totals.add_side_calls(one, side_counts(used, totals.price))
                except (NoSuchSession, ForeignLog):
                    pass  # deleted since it was listed, or a file of another program
                except StenologError as error:
                    problems[one] = str(error)
                step()
    cost = cost_of(totals.models) if totals.price is not None else None
    groups = _groups(totals, by) if by is not None else []
    if as_json:
        fields = _fields(totals, cost, problems)
        if by is not None:
            fields = _group_fields(by, groups, titles, fields)
        asked = {"since": since and format_time(since), "until": until and format_time(until)}
        click.echo(json_text({**asked, **fields}, indent=2))
    elif sys.stdout.isatty() and totals.total.messages:
        if by is not None:
            _draw_groups(by, groups, titles, totals, cost, color=ctx.color is not False)
        else:
            _draw(totals, cost, color=ctx.color is not False)
    elif by is not None:
        for name, counts in groups:
            numbers = (str(getattr(counts, one)) for one in _COLUMNS.values())
            money = f"{counts.dollars:.6f}" if counts.priced else "-"
            click.echo("\t".join((by, one_line(name) or "-", *numbers, money)))
    else:
        for row in _rows(totals):
            click.echo("\t".join(row))
    for words in _remarks(totals, cost, problems):
        click.echo(words, err=True)
    ctx.exit(PARTIAL if problems else 0)


def _all_keys(store: Store, where: Location, prefix: str) -> list[str]:
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
            key = key_of_log(path.name)
            if key is not None and key not in listed and key.startswith(prefix):
                others.add(key)
    return keys + sorted(others)


class _CountedSession(NamedTuple):
    info: SessionInfo
    title: str


def _count(
    store: Store, key: str, totals: Totals, since: datetime | None, until: datetime | None
) -> _CountedSession | None:
    """Count a session; return None if it has no message since that time."""
    info = store.info(key)
    if since is not None and info.updated < since:
        return None
    history = store.get_history(key, full=True)
    totals.add(info, history, since=since, until=until)
    if title := title_from(info.meta, ""):
        return _CountedSession(info, title)
    bodies = (message.to_dict() for message in history)
    prompt = prompt_from((role_of(body), text_of(body)) for body in bodies)
    return _CountedSession(info, title_from({}, prompt))


def _open_marks(opened: ExitStack, where: Location) -> "ConsolidationProgress | None":
    """Open the marks of consolidation, which count the model calls that made notes."""
    # Imported late: slow, and only needed here.
    from stenolog.memory.consolidation import ConsolidationProgress
    from stenolog.memory.facade import AGENT

    notes = Location(workspace=where.workspace, namespace=NOTES)
    with suppress(StenologError):
        store = opened.enter_context(open_existing(notes, read_only=True))
        return ConsolidationProgress(store, agent=where.agent or AGENT)
    return None


def _remarks(totals: Totals, cost: Cost | None, problems: Mapping[str, str]) -> Iterator[str]:
    for key, problem in problems.items():
        yield f"{one_line(key)}: {sentence(problem)}"
    total = totals.total
    if not total.messages:
        yield "There are no messages."
        return
    if totals.side:
        tokens = sum(counts.prompt + counts.answer for counts in totals.side.values())
        price = cost_of(totals.side) if cost is not None else None
        money = f", ${price.total:,.2f}" if price is not None and price.models else ""
        yield f"Of which notes and summaries: {plural(tokens, 'token')}{money}."
    script = totals.models.get(SCRIPTED_MODEL, Counts())
    by_script = script.prompt + script.answer
    by_providers = total.prompt + total.answer - by_script
    parts = [
        f"{tokens:,} {words}"
        for tokens, words in (
            (by_providers, "reported by providers"),
            (by_script, "estimated by the scripted model"),
            (total.estimated, "estimated from the text"),
        )
        if tokens
    ]
    if total.estimated or by_script:
        yield f"Tokens: {', '.join(parts)}."
    if cost is None and total.answers > script.answers:
        yield f"To see the cost: {install_command('prices')}"
    elif cost is not None and set(cost.unknown) - {SCRIPTED_MODEL}:
        unknown = [name for name in cost.unknown if name != SCRIPTED_MODEL]
        names = ", ".join(one_line(name) or "unnamed models" for name in unknown)
        yield f"No price is known for {names}."


# --- as text and JSON ------------------------------------------------------------------------


def _report_rows(totals: Totals) -> Iterator[tuple[str, str, Counts]]:
    """Yield the kind, name and counts of each line of the report."""
    yield "total", "", totals.total
    for day in sorted(totals.days):
        yield "day", day.isoformat(), totals.days[day]
    for name in sorted(totals.models, key=lambda one: (-totals.models[one].tokens, one)):
        yield "model", name, totals.models[name]
    for name in sorted(totals.channels, key=lambda one: (-totals.channels[one].tokens, one)):
        yield "channel", name, totals.channels[name]


def _rows(totals: Totals) -> Iterator[list[str]]:
    for kind, name, counts in _report_rows(totals):
        shown = one_line(name) or "-"
        yield [kind, shown, *(str(getattr(counts, name)) for name in _COLUMNS.values())]


def _fields(totals: Totals, cost: Cost | None, problems: Mapping[str, str]) -> dict[str, Any]:
    tables: dict[str, list[dict[str, Any]]] = {"day": [], "model": [], "channel": []}
    for kind, name, counts in _report_rows(totals):
        if kind != "total":
            shown = name if kind == "day" else name or None
            tables[kind].append({kind: shown, **_count_fields(counts)})
    return {
        "sessions": totals.sessions,
        **_count_fields(totals.total),
        "days": tables["day"],
        "models": tables["model"],
        "channels": tables["channel"],
        "cost": None
        if cost is None
        else {
            "usd": cost.total,
            "models": dict(cost.models),
            "unknown": list(cost.unknown),
        },
        "side_calls": {
            name: {**_count_fields(counts), "usd": counts.dollars if counts.priced else None}
            for name, counts in totals.side.items()
        },
        "problems": [{"key": key, "problem": words} for key, words in problems.items()],
    }


def _count_fields(counts: Counts) -> dict[str, int]:
    sums = {column: getattr(counts, name) for column, name in _COLUMNS.items()}
    return {**sums, "answers": counts.answers}


def _groups(totals: Totals, by: str) -> list[tuple[str, Counts]]:
    """Return the name and counts of each group: days in order, others the most expensive first."""
    if by == "day":
        return [(day.isoformat(), totals.days[day]) for day in sorted(totals.days)]
    groups = {
        "session": totals.by_session,
        "model": totals.models,
        "project": totals.projects,
        "channel": totals.channels,
    }[by]
    return sorted(groups.items(), key=lambda one: (-one[1].dollars, -one[1].tokens, one[0]))


def _group_fields(
    by: str,
    groups: Sequence[tuple[str, Counts]],
    titles: Mapping[str, str],
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    rows = [
        {
            by: name or None,
            **({"title": titles.get(name, "")} if by == "session" else {}),
            **_count_fields(counts),
            "usd": counts.dollars if counts.priced else None,
        }
        for name, counts in groups
    ]
    kept = {name: value for name, value in fields.items() if name not in _TABLES}
    return {**kept, "by": by, "rows": rows}


# --- in a terminal ---------------------------------------------------------------------------


def _draw_groups(
    by: str,
    groups: Sequence[tuple[str, Counts]],
    titles: Mapping[str, str],
    totals: Totals,
    cost: Cost | None,
    *,
    color: bool,
) -> None:
    # Imported late: slow, and only needed in a terminal.
    from rich.bar import Bar
    from rich.text import Text

    console = table_console(color=color)
    shown = groups[-_MAX_DAYS:] if by == "day" else groups[:_MAX_DAYS]
    has_cost = any(counts.priced for _, counts in shown)
    number = {"justify": "right", "no_wrap": True}
    columns: dict[str, dict[str, Any]] = {}
    if by == "session":
        columns["title"] = {"no_wrap": True, "overflow": "ellipsis", "min_width": 16, "ratio": 1}
        columns["session"] = {"overflow": "fold", "max_width": max(16, console.width // 3)}
    else:
        columns[by] = {"overflow": "fold", "max_width": max(16, console.width // 2)}
    columns |= {"messages": number, "input": number, "output": number}
    if has_cost:
        columns["cost"] = number
    columns[""] = {"min_width": 6, "max_width": 24}
    most = max((_weight(counts, has_cost) for _, counts in shown), default=0) or 1
    cells: list[tuple[Any, ...]] = []
    for name, counts in shown:
        names = [one_line(name) or "-"]
        if by == "session":
            names.insert(0, one_line(printable(titles.get(name, ""))))
        weight = _weight(counts, has_cost)
        cells.append(
            (
                *names,
                f"{counts.messages:,}",
                f"{counts.prompt:,}",
                f"{counts.answer:,}",
                *((format_dollars(counts) or "-",) if has_cost else ()),
                Bar(most, 0, weight, color="green" if color else "default"),
            )
        )
    console.print(Text(_headline(totals, cost), style="bold"))
    print_table(console, columns, cells)
    if len(groups) > len(shown):
        order = "last" if by == "day" else "first"
        console.print(
            Text(f"The {order} {len(shown)} of {len(groups):,}. Use --json for all.", style="dim")
        )


def _weight(counts: Counts, has_cost: bool) -> float:
    return counts.dollars if has_cost else float(counts.tokens)


def format_dollars(counts: Counts) -> str:
    """Return the cost with two decimals, four below a dollar; empty if no price is known."""
    if not counts.priced:
        return ""
    more = "+" if counts.priced < counts.answers else ""
    amount = counts.dollars
    return (f"${amount:,.2f}" if amount >= 1 else f"${amount:.4f}") + more


def _headline(totals: Totals, cost: Cost | None) -> str:
    total = totals.total
    parts = ((totals.sessions, "session"), (total.messages, "message"), (total.tokens, "token"))
    head = ", ".join(plural(number, what) for number, what in parts)
    if cost is not None and cost.models:
        head += f", ${cost.total:,.2f}"
    return head


def _draw(totals: Totals, cost: Cost | None, *, color: bool) -> None:
    # Imported late: slow, and only needed in a terminal.
    from rich.bar import Bar
    from rich.text import Text

    console = table_console(color=color)
    total = totals.total

    def table(name: str, rows: Mapping[str, Counts], *, bars: str) -> None:
        most = max(counts.tokens for counts in rows.values()) or 1
        number = {"justify": "right", "no_wrap": True}
        columns: dict[str, dict[str, Any]] = {
            name: {"no_wrap": True, "max_width": max(10, console.width // 3)},
            "messages": number,
            "tokens": number,
            **({"cost": number} if total.priced else {}),
            "": {"min_width": 10, "max_width": 40},
        }

        cells = []
        for shown, counts in rows.items():
            about = "~" if counts.estimated else ""
            bar = Bar(most, 0, counts.tokens, color=bars if color else "default")
            money = (format_dollars(counts) or "-",) if total.priced else ()
            tokens = f"{about}{counts.tokens:,}"
            cells.append((shown, f"{counts.messages:,}", tokens, *money, bar))
        print_table(console, columns, cells)
        console.print()

    console.print(Text(_headline(totals, cost), style="bold"))
    console.print(
        Text(
            f"{total.prompt:,} input ({total.cached:,} cached), {total.answer:,} output, "
            f"~{total.estimated:,} estimated\n",
            style="dim",
        )
    )
    days = {day.isoformat(): totals.days[day] for day in sorted(totals.days)[-_MAX_DAYS:]}
    table("day", days, bars="cyan")
    if len(totals.days) > _MAX_DAYS:
        console.print(
            Text(
                f"Showing the last {_MAX_DAYS} days with messages. Use --json for all.\n",
                style="dim",
            )
        )
    for kind, bars in (("model", "green"), ("channel", "magenta")):
        rows = {
            one_line(name) or "-": counts for of, name, counts in _report_rows(totals) if of == kind
        }
        if rows:
            table(kind, rows, bars=bars)
