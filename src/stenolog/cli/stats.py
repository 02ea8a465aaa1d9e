"""`steno stats`: count messages and tokens, and compute their cost."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from stenolog.cli.output import (
    EXIT_PARTIAL,
    TimeType,
    one_line,
    plural,
    print_json,
    print_notice,
    print_table,
    printable,
    sentence,
    terminal_console,
)
from stenolog.cli.workspace import (
    Location,
    find_session_to_read,
    json_option,
    location_options,
    prefix_option,
    read_each_session,
    session_title,
)
from stenolog.errors import StenologError
from stenolog.sessions.folders import NOTES
from stenolog.sessions.usage import (
    Cost,
    Counts,
    Totals,
    add_usage,
    cost_of,
    load_prices,
    read_side_usage,
    side_counts,
)
from stenolog.stores.base import Store
from stenolog.stores.file_names import key_of_log
from stenolog.stores.open_store import parse_address

if TYPE_CHECKING:
    from rich.console import Console

    from stenolog.memory.consolidation import ConsolidationProgress

_MAX_TABLE_ROWS: Final = 30
"""Maximum number of rows in a table of the terminal."""
_COUNT_ATTRIBUTES: Final = {
    "messages": "messages",
    "input_tokens": "prompt",
    "output_tokens": "answer",
    "cached_tokens": "cached",
    "estimated_tokens": "estimated",
}
"""Attribute of Counts for each JSON field. The text columns have the same order."""


@click.command("stats")
@click.argument("key", required=False)
@prefix_option
@click.option(
    "--since", type=TimeType(), help="Only messages since this time: 2026-11-05, yesterday or 3d."
)
@click.option("--until", type=TimeType(), help="Only messages before this time.")
@click.option(
    "--by",
    type=click.Choice(["session", "day", "model", "project", "channel"]),
    help="One row per session, day, model, project or channel. Days are sorted by date, other rows "
    "by cost, the highest first.",
)
@json_option()
@location_options
def stats_command(
    key: str | None,
    prefix: str,
    since: datetime | None,
    until: datetime | None,
    by: str | None,
    location: Location,
) -> int:
    """Count messages and tokens by day, model and channel.

    Counts all sessions, or the session KEY, including hidden and archived messages. Messages that a
    fork copied are counted once.

    In a terminal, the start or end of KEY, or the start of a part after a colon, is enough if only
    one session matches.

    input_tokens, output_tokens and cached_tokens (part of the input) are numbers that the providers
    reported; the scripted model reports estimates. estimated_tokens is for messages without
    reported numbers, each counted once.

    The sums include model calls for notes and summaries, except sums by day and sums with --since
    or --until, because the time of these calls is not recorded.

    Prints rows with columns separated by tabs: the kind of row (total, day, model or channel), its
    name, messages, input, output, cached and estimated tokens. With --by, only rows of the given
    kind are printed, with the cost in US dollars as the last column. In a terminal the command
    prints tables.

    Example: steno stats --by project --since 30d

    Exit codes: 0 done, 1 there is no such session, 2 wrong usage, 3 some sessions cannot be read.
    """
    totals = Totals(price=load_prices())
    titles: dict[str, str] = {}
    with ExitStack() as stack:
        store = stack.enter_context(location.open())
        notes_progress = None if since or until else _open_notes_progress(stack, location)
        if key is not None:
            keys = [find_session_to_read(store, key).key]
        else:
            keys = _all_keys(store, location, prefix)

        def count_session(session_key: str) -> None:
            info = store.info(session_key)
            if since is None or info.updated >= since:
                history = store.get_history(session_key, full=True)
                totals.add(info, history, since=since, until=until)
                if by == "session":
                    titles[session_key] = session_title(info, history)
                if notes_progress is not None:
                    usage = read_side_usage(info.meta, info.uid)
                    add_usage(usage, notes_progress.usage(info.uid))
                    totals.add_side_calls(session_key, side_counts(usage, totals.price))

        problems = read_each_session("Counting", keys, count_session)
    cost = cost_of(totals.models) if totals.price is not None else None
    groups = _group_counts(totals, by) if by is not None else []
    fields = _report_fields(totals, cost, problems, by, groups, titles)
    if not print_json({"since": since, "until": until, **fields}, indent=2):
        if not sys.stdout.isatty() or not totals.total.messages:
            _print_text_rows(totals, by, groups)
        else:
            _draw_tables(totals, cost, by, groups, titles)
    print_notice(*_stats_remarks(totals, cost, problems))
    return EXIT_PARTIAL if problems else 0


def _all_keys(store: Store, location: Location, prefix: str) -> list[str]:
    """Return all session keys with this prefix, including those of unreadable sessions.

    A JSONL store does not list unreadable sessions, so this function lists their files.
    """
    keys = store.list_sessions(prefix=prefix)
    place = location.place
    if parse_address(place.where).engine != "jsonl":
        return keys
    other_keys: set[str] = set()
    with suppress(OSError):
        paths = Path(place.where, place.namespace).iterdir()
        log_keys = (key_of_log(path.name) for path in paths)
        other_keys.update(key for key in log_keys if key is not None and key.startswith(prefix))
    return keys + sorted(other_keys.difference(keys))


def _open_notes_progress(stack: ExitStack, location: Location) -> "ConsolidationProgress | None":
    """Open the progress of consolidation, which counts the model calls that made notes.

    Return None if the notes cannot be read.
    """
    # These imports are slow and only needed here.
    from stenolog.memory.consolidation import ConsolidationProgress
    from stenolog.memory.facade import DEFAULT_AGENT

    notes_location = Location(workspace=location.workspace, namespace=NOTES)
    with suppress(StenologError):
        store = stack.enter_context(notes_location.open_existing())
        return ConsolidationProgress(store, agent=location.agent or DEFAULT_AGENT)
    return None


def _stats_remarks(totals: Totals, cost: Cost | None, problems: Mapping[str, str]) -> Iterator[str]:
    for key, problem in problems.items():
        yield f"{one_line(key)}: {sentence(problem)}"
    total = totals.total
    if not total.messages:
        yield "There are no messages."
        return
    if totals.side:
        tokens = sum(counts.prompt + counts.answer for counts in totals.side.values())
        cost_text = _cost_text(None if cost is None else cost_of(totals.side))
        yield f"Included for notes and summaries: {plural(tokens, 'token')}{cost_text}."
    if total.estimated:
        reported_tokens = total.prompt + total.answer
        reported_text = f"{reported_tokens:,} reported by models, " if reported_tokens else ""
        yield f"Tokens: {reported_text}{total.estimated:,} estimated from the text."
    if cost is not None and cost.unknown:
        names_text = ", ".join(one_line(name) or "unnamed models" for name in cost.unknown)
        yield f"No price is known for {names_text}."


# --- as text and JSON ------------------------------------------------------------------------


def _overview_groups(totals: Totals) -> dict[str, list[tuple[str, Counts]]]:
    """Return name and counts of each group, by kind."""
    kinds = ("day", "model", "channel")
    return {"total": [("", totals.total)], **{kind: _group_counts(totals, kind) for kind in kinds}}


def _print_text_rows(totals: Totals, by: str | None, groups: Sequence[tuple[str, Counts]]) -> None:
    """Print columns separated by tabs. With `by`, the last column is the cost."""
    for kind, rows in (_overview_groups(totals) if by is None else {by: groups}).items():
        for name, counts in rows:
            cells = [kind, one_line(name) or "-"]
            cells += (str(getattr(counts, attribute)) for attribute in _COUNT_ATTRIBUTES.values())
            if by is not None:
                cells.append(f"{counts.dollars:.6f}" if counts.priced else "-")
            click.echo("\t".join(cells))


def _report_fields(
    totals: Totals,
    cost: Cost | None,
    problems: Mapping[str, str],
    by: str | None,
    groups: Sequence[tuple[str, Counts]],
    titles: Mapping[str, str],
) -> dict[str, Any]:
    fields: dict[str, Any] = {"sessions": totals.sessions, **_count_fields(totals.total)}
    if by is None:
        overview_groups = _overview_groups(totals)
        for kind in ("day", "model", "channel"):
            fields[f"{kind}s"] = [
                {kind: name or None, **_count_fields(counts)}
                for name, counts in overview_groups[kind]
            ]
    fields["cost"] = None
    if cost is not None:
        fields["cost"] = {
            "usd": cost.total,
            "models": dict(cost.models),
            "unknown": list(cost.unknown),
        }
    fields["side_calls"] = {
        name: {**_count_fields(counts), "usd": _dollars(counts)}
        for name, counts in totals.side.items()
    }
    fields["problems"] = [{"key": key, "problem": problem} for key, problem in problems.items()]
    if by is not None:
        fields["by"] = by
        fields["rows"] = [
            {
                by: name or None,
                **({"title": titles.get(name, "")} if by == "session" else {}),
                **_count_fields(counts),
                "usd": _dollars(counts),
            }
            for name, counts in groups
        ]
    return fields


def _dollars(counts: Counts) -> float | None:
    return counts.dollars if counts.priced else None


def _count_fields(counts: Counts) -> dict[str, int]:
    sums = {column: getattr(counts, name) for column, name in _COUNT_ATTRIBUTES.items()}
    return {**sums, "answers": counts.answers}


def _group_counts(totals: Totals, kind: str) -> list[tuple[str, Counts]]:
    """Return the name and counts of each group. Days are sorted by date, other groups by cost."""
    if kind == "day":
        return [(day.isoformat(), totals.days[day]) for day in sorted(totals.days)]
    groups = {
        "session": totals.by_session,
        "model": totals.models,
        "project": totals.projects,
        "channel": totals.channels,
    }[kind]
    return sorted(groups.items(), key=lambda item: (-item[1].dollars, -item[1].tokens, item[0]))


# --- in a terminal ---------------------------------------------------------------------------


def _draw_tables(
    totals: Totals,
    cost: Cost | None,
    by: str | None,
    groups: Sequence[tuple[str, Counts]],
    titles: Mapping[str, str],
) -> None:
    """Draw a table of the groups, or without `by` tables of the days, models and channels."""
    # This import is slow and only needed in a terminal.
    from rich.text import Text

    console = terminal_console()
    console.print(Text(_headline(totals, cost), style="bold"))
    total = totals.total
    remark = (
        f"{total.prompt:,} input ({total.cached:,} cached), {total.answer:,} output, "
        f"~{total.estimated:,} estimated\n"
    )
    console.print(Text(remark, style="dim"))
    tables = {by: groups} if by is not None else _overview_groups(totals)
    tables.pop("total", None)
    for kind, rows in tables.items():
        shown_rows = rows[-_MAX_TABLE_ROWS:] if kind == "day" else rows[:_MAX_TABLE_ROWS]
        if shown_rows:
            _draw_table(console, kind, shown_rows, titles)
        if len(rows) > len(shown_rows):
            which = f"{'last' if kind == 'day' else 'first'} {len(shown_rows)} of {len(rows):,}"
            console.print(Text(f"Showing the {which}. Use --json for all.", style="dim"))


def _draw_table(
    console: "Console",
    kind: str,
    rows: Sequence[tuple[str, Counts]],
    titles: Mapping[str, str],
) -> None:
    """Draw a table of names and numbers."""
    has_cost = any(counts.priced for _, counts in rows)
    name_width = console.width // (3 if kind == "session" else 2)
    names: dict[str, Mapping[str, Any]] = {kind: {"overflow": "fold", "max_width": name_width}}
    if kind == "session":
        title_style = {"ratio": 1, "no_wrap": True, "overflow": "ellipsis", "min_width": 12}
        names = {"title": title_style, **names}
    numbers = ("messages", "tokens", *(("cost",) if has_cost else ()))
    table_rows = [
        (
            *((one_line(printable(titles.get(name, ""))),) if kind == "session" else ()),
            one_line(name) or "-",
            *(_NUMBER_FORMATTERS[column](counts) for column in numbers),
        )
        for name, counts in rows
    ]
    columns = {**names, **{name: {"justify": "right", "no_wrap": True} for name in numbers}}
    print_table(columns, table_rows, console=console, expand=kind == "session")
    console.print()


def format_dollars(counts: Counts) -> str:
    """Return the cost with two decimals, or four below a dollar; empty if no price is known.

    A `+` at the end means that some answers have no known price.
    """
    if not counts.priced:
        return ""
    plus_sign = "+" if counts.priced < counts.answers else ""
    amount = counts.dollars
    return (f"${amount:,.2f}" if amount >= 1 else f"${amount:.4f}") + plus_sign


_NUMBER_FORMATTERS: Final[dict[str, Callable[[Counts], str]]] = {
    "messages": lambda counts: f"{counts.messages:,}",
    "tokens": lambda counts: f"{'~' if counts.estimated else ''}{counts.tokens:,}",
    "cost": lambda counts: format_dollars(counts) or "-",
}
"""Functions that format a number of Counts, by column."""


def _headline(totals: Totals, cost: Cost | None) -> str:
    total = totals.total
    parts = ((totals.sessions, "session"), (total.messages, "message"), (total.tokens, "token"))
    return ", ".join(plural(count, noun) for count, noun in parts) + _cost_text(cost)


def _cost_text(cost: Cost | None) -> str:
    return f", ${cost.total:,.2f}" if cost is not None and cost.models else ""
