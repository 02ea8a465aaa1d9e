"""`make bench`: measure all rows, print the table and write bench/results/latest.json.

Each repetition of a row runs in its own process. No time is asserted: a missed target is a line
that says "no".
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from machine import commit, load, machine_info, peer_environment, peer_versions
from measure import Context, NotRun
from postgres import describe as describe_postgres
from reads import Peer
from rows import Row, rows
from tables import LATEST, text_table

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Measure the rows that the command line selects."""
    options = _arguments()
    peer_python, peer_problem = peer_environment()
    selected = [
        row
        for row in rows(peer_python)
        if options.only in (None, row.name) and not row.name.startswith(tuple(options.without))
    ]
    if not selected:
        names = ", ".join(row.name for row in rows(peer_python))
        sys.exit(f"No row {options.only!r}. Rows: {names}")
    if options.child:
        _run_row(selected[0], Context(folder=options.folder, quick=options.quick))
        return
    results = _measure_all(selected, options, peer_python, peer_problem)
    print(text_table(results))
    output = options.output
    if output is None and not options.quick and options.only is None:
        output = LATEST
    if output is not None:
        output.parent.mkdir(exist_ok=True)
        output.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        print(f"Written to {output}; `python bench/tables.py` updates docs/benchmarks.md.")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="one repetition with fewer calls; a few minutes"
    )
    parser.add_argument("--only", metavar="ROW", help="measure one row")
    parser.add_argument(
        "--without",
        metavar="NAME",
        action="append",
        default=[],
        help="skip rows whose names start with NAME (search rows take minutes to prepare)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON to FILE")
    parser.add_argument("--folder", type=Path, default=ROOT, help="folder on the disk to measure")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure_all(
    selected: list[Row], options: argparse.Namespace, peer_python: Path, peer_problem: str | None
) -> dict[str, Any]:
    started, load_before = perf_counter(), load()
    repetitions: dict[str, list[dict[str, Any]]] = {row.name: [] for row in selected}
    problems: dict[str, str] = {}
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=options.folder))
    try:
        (folder / ".gitignore").write_text("*\n")
        # PostgreSQL does not run as root and must be able to reach its files in this folder.
        folder.chmod(0o711)
        # Run all rows once, then all rows again. So a disturbance of a minute affects a single
        # repetition of a few rows, not all repetitions of one row.
        for repetition in range(1 if options.quick else 3):
            for row in selected:
                if repetition >= row.times or row.name in problems:
                    continue
                _show_progress(f"{repetition + 1} {row.name}")
                if peer_problem is not None and row.peer:
                    problems[row.name] = peer_problem
                    continue
                answer = _run_row_in_process(row.name, folder, quick=options.quick)
                if "not_run" in answer:
                    problems[row.name] = answer["not_run"]
                else:
                    repetitions[row.name].append(answer)
        peer = {"not_run": peer_problem} if peer_problem else _describe_peer(folder, peer_python)
        machine_data = {**machine_info(folder), "postgres": describe_postgres()}
    finally:
        # If the run is interrupted, the cleanup of the PostgreSQL servers deletes files at the same
        # time.
        shutil.rmtree(folder, ignore_errors=True)
        _show_progress("")
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "quick": options.quick,
        "seconds": round(perf_counter() - started, 1),
        "machine": machine_data,
        "load": {"before": load_before, "after": load()},
        "peer": peer,
        "rows": [_result(row, repetitions[row.name], problems.get(row.name)) for row in selected],
    }


def _show_progress(text: str) -> None:
    """Show the progress of the run in a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _describe_peer(folder: Path, python: Path) -> dict[str, str]:
    with Peer(Context(folder=folder, quick=True), python, []) as peer:
        description: dict[str, str] = peer.ask("about")
        return {**description, "others": peer_versions(python)}


def _run_row_in_process(name: str, folder: Path, *, quick: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", "--only", name, "--folder", str(folder)]
    process = subprocess.run(
        [*command, *(["--quick"] if quick else [])], check=False, capture_output=True, text=True
    )
    if process.returncode != 0:
        last = process.stderr.strip().rpartition("\n")[2]
        return {"not_run": last or f"the row's process ended with {process.returncode}"}
    answer: dict[str, Any] = json.loads(process.stdout)
    return answer


def _run_row(row: Row, context: Context) -> None:
    try:
        answer: dict[str, Any] = asdict(row.run(context))
    except NotRun as problem:
        answer = {"not_run": str(problem)}
    print(json.dumps(answer))


def _result(row: Row, measurements: list[dict[str, Any]], problem: str | None) -> dict[str, Any]:
    result: dict[str, Any] = {
        "name": row.name,
        "what": row.description,
        "target": asdict(row.target),
        "beside": row.baseline,
    }
    if problem is not None or not measurements:
        return {**result, "not_run": problem or "no repetition"}
    measured = [measurement["measured"] for measurement in measurements]
    # Compare the three digits that the table shows with the target.
    value = float(f"{median(measured):.3g}")
    return {
        **result,
        "measured": value,
        "spread": [round(min(measured), 4), round(max(measured), 4)],
        "reached": row.target.reached(value),
        "repetitions": measurements,
    }


if __name__ == "__main__":
    main()
