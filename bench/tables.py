"""Tables of the numbers in bench/results/latest.json, for the terminal and docs/benchmarks.md.

With `--rows` every row and its percentiles are printed. With `--check` nothing is changed: the
program fails if the text between the markers of docs/benchmarks.md is out of date, or if a row was
never measured.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rows import rows

ROOT = Path(__file__).resolve().parent.parent
LATEST = ROOT / "bench" / "results" / "latest.json"
PAGE = ROOT / "docs" / "benchmarks.md"

_BEGIN = "<!-- begin {}: written by bench/tables.py -->"
_END = "<!-- end {} -->"


def main() -> None:
    """Update the page, or check whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if out of date")
    parser.add_argument("--rows", action="store_true", help="print every row and its percentiles")
    parser.add_argument("--results", type=Path, default=LATEST)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    results = json.loads(options.results.read_text())
    if options.rows:
        print(
            text_table(results), _columns(_PERCENTILE_HEAD, _percentile_lines(results)), sep="\n\n"
        )
        return
    before = options.page.read_text()
    after = renew(before, results)
    if options.check:
        measured = {row["name"] for row in results["rows"]}
        if missing := [row.name for row in rows(Path()) if row.name not in measured]:
            sys.exit(f"never measured: {', '.join(missing)}; run `make bench`")
        if before != after:
            sys.exit(f"{options.page.name} is out of date: run `python bench/tables.py`")
    else:
        options.page.write_text(after)


def renew(page: str, results: dict[str, Any]) -> str:
    """Return the page with new text between its markers."""
    parts = {
        "summary": _markdown(_SUMMARY_HEAD, _summary_lines(results)),
        "conditions": _conditions(results),
        "missed": _markdown(_MISSED_HEAD, _missed_lines(results)),
    }
    for name, text in parts.items():
        begin, end = _BEGIN.format(name), _END.format(name)
        if page.count(begin) != 1 or page.count(end) != 1:
            sys.exit(f"the page lacks the markers of {name!r}, or has them twice")
        head, rest = page.split(begin)
        page = f"{head}{begin}\n{text}\n{end}{rest.split(end)[1]}"
    return page


def text_table(results: dict[str, Any]) -> str:
    """Return the rows for a terminal, followed by the conditions."""
    return f"{_columns(_HEAD, _row_lines(results))}\n\n{_conditions(results)}"


def _columns(head: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head))]
    padded = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (head, *lines)
    ]
    return "\n".join([padded[0], "-" * sum(widths), *padded[1:]])


_SUMMARY_HEAD = ("what", "ours", "peer", "ratio")
_SUMMARY = {
    "append-1000": "Store a message, compared with the fastest possible program",
    "AddMessage-jsonl": "Store a message",
    "AddMessage-sqlite": "Store a message, SQLite",
    "pg-langgraph-1": "Store a message, PostgreSQL",
    "pg-agents-1": "Store a message, PostgreSQL",
    "pg-langgraph-32": "Messages stored by 32 clients, PostgreSQL",
    "pg-agents-32": "Messages stored by 32 clients, PostgreSQL",
    "GetHistory-1000-jsonl": "Read 1,000 messages",
    "GetHistory-1000-sqlite": "Read 1,000 messages, SQLite",
    "read-1000": "Open a store and read 1,000 messages",
    "list-warm": "List 50 of 10,000 sessions",
    "search-everywhere": "Search 1,000,000 messages for a common word",
    "recall-one-session": "Recall from 100,000 messages and 5,200 notes",
}
"""Rows of the table for users, and the description of each row in this table."""
_FASTER = ": times faster"
"""End of the description of rows whose number says how many times faster stenolog is."""

_HEAD = ("row", "what", "target", "measured", "spread", "reached", "ours", "compared with")
_MISSED_HEAD = ("row", "what", "target", "measured")
_PERCENTILE_HEAD = ("row", "side", "p50", "p90", "p99", "worst", "calls")


def _summary_lines(results: dict[str, Any]) -> list[tuple[str, ...]]:
    measured = {row["name"]: row for row in results["rows"]}
    lines: list[tuple[str, ...]] = []
    for name, description in _SUMMARY.items():
        row = measured.get(name)
        if row is None:
            lines.append((description, "", "", "NOT RUN"))
            continue
        baseline = row["beside"]
        if baseline.startswith("the peer"):
            baseline = results["peer"].get("name", baseline)
        if "not_run" in row:
            lines.append((description, "", baseline, "NOT RUN"))
            continue
        measurement = _median_repetition(row)
        ours = _format_stats(measurement["ours"])
        if row["target"]["unit"] == "×":
            peer = f"{baseline}: {_format_stats(measurement['raw'])}"
            lines.append((description, ours, peer, _ratio(row)))
        else:
            lines.append((description, ours, "–", "–"))
    return lines


def _ratio(row: dict[str, Any]) -> str:
    times = row["measured"] if row["what"].endswith(_FASTER) else 1 / row["measured"]
    return (
        f"{_three_digits(times)} × faster" if times >= 1 else f"{_three_digits(1 / times)} × slower"
    )


def _row_lines(results: dict[str, Any]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for row in results["rows"]:
        target = row["target"]
        unit = target["unit"]
        goal = f"{target['sense']} {target['number']:g} {unit}"
        if "not_run" in row:
            lines.append((row["name"], row["what"], goal, "NOT RUN", "", "", row["not_run"], ""))
            continue
        measurement = _median_repetition(row)
        low, high = row["spread"]
        lines.append(
            (
                row["name"],
                row["what"],
                goal,
                f"{_three_digits(row['measured'])} {unit}",
                f"{_three_digits(low)}–{_three_digits(high)}",
                "yes" if row["reached"] else "no",
                _format_stats(measurement["ours"]),
                f"{row['beside']}: {_format_stats(measurement['raw'])}",
            )
        )
    return lines


def _missed_lines(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows that missed their target or were not measured."""
    lines: list[tuple[str, ...]] = []
    for name, what, target, measured, _, reached, reason, _ in _row_lines(results):
        if measured == "NOT RUN":
            lines.append((name, what, target, f"NOT RUN: {reason}"))
        elif reached == "no":
            lines.append((name, what, target, measured))
    return lines


def _percentile_lines(results: dict[str, Any]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for row in results["rows"]:
        if "not_run" in row:
            continue
        measurement = _median_repetition(row)
        for name, stats in (("ours", measurement["ours"]), (row["beside"], measurement["raw"])):
            if "p50_us" in stats:
                times = [_format_time(stats[at]) for at in ("p50_us", "p90_us", "p99_us", "max_us")]
                lines.append((row["name"], name, *times, f"{stats['n']:,}"))
    return lines


def _median_repetition(row: dict[str, Any]) -> dict[str, Any]:
    """Return the repetition whose number is in the table."""
    ordered = sorted(row["repetitions"], key=lambda measurement: float(measurement["measured"]))
    measurement: dict[str, Any] = ordered[len(ordered) // 2]
    return measurement


def _conditions(results: dict[str, Any]) -> str:
    machine, peer = results["machine"], results["peer"]
    baseline = peer.get("not_run") or f"{peer['name']} {peer['version']}, SQLite {peer['sqlite']}"
    if others := peer.get("others"):
        baseline += f"; {others}"
    database = f"{machine['postgres']}, " if machine.get("postgres") else ""
    before, after = results["load"]["before"][0], results["load"]["after"][0]
    length = "three repetitions, the middle one shown"
    if results["quick"]:
        length = "a quick run, once, with a quarter of the calls and sessions"
    busy = ""
    if before > machine["cpus"] / 2:
        # On a busy machine each sync also waits for a CPU, which changes the ratios.
        busy = (
            " Other programs were running, so the figures are less exact than on an idle machine."
        )
    return (
        f"Commit {results['commit']}; {results['when']}; {length}, {results['seconds']:.0f} s. "
        f"Python {machine['python']}, msgspec {machine['msgspec']}, {database}"
        f"Linux {machine['kernel']}, "
        f"{machine['file_system']}, {machine['cpus']} CPUs ({machine['architecture']}), "
        f"load {before} before and {after} after. Peer: {baseline}.{busy}"
    )


def _format_stats(stats: dict[str, float]) -> str:
    if "per_second" in stats:
        return f"{stats['per_second']:,.0f}/s"
    if "mb" in stats:
        return f"{stats['mb']:,.0f} MB"
    return _format_time(stats["p50_us"])


def _format_time(microseconds: float) -> str:
    if microseconds >= 1000:
        return f"{_three_digits(microseconds / 1000)} ms"
    return f"{_three_digits(microseconds)} µs"


def _three_digits(number: float) -> str:
    """Format a number with three digits. Further digits would be noise."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))


if __name__ == "__main__":
    main()
