"""`make bench`: measure every row, print the table, keep the numbers in bench/results/latest.json.

Each repetition of a row has a process of its own. No time is asserted: a missed target is a line
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

from machine import commit, load, machine, peer_environment, peer_versions
from measure import NotRun, Place
from postgres import about as about_postgres
from reads import Peer
from rows import Row, rows
from tables import LATEST, text_table

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Measure what the command line asks for."""
    asked = _arguments()
    peer_python, peer_refusal = peer_environment()
    chosen = [
        row
        for row in rows(peer_python)
        if asked.only in (None, row.name) and not row.name.startswith(tuple(asked.without))
    ]
    if not chosen:
        names = ", ".join(row.name for row in rows(peer_python))
        sys.exit(f"There is no row {asked.only!r}; there are: {names}")
    if asked.child:
        _child(chosen[0], Place(folder=asked.folder, quick=asked.quick))
        return
    results = _measure_all(chosen, asked, peer_python, peer_refusal)
    print(text_table(results))
    output = asked.output
    if output is None and not asked.quick and asked.only is None:
        output = LATEST
    if output is not None:
        output.parent.mkdir(exist_ok=True)
        output.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        print(f"Written to {output}; `python bench/tables.py` renews the page in docs.")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few minutes; once, and rougher")
    parser.add_argument("--only", metavar="ROW", help="one row by its name")
    parser.add_argument(
        "--without",
        metavar="NAME",
        action="append",
        default=[],
        help="leave out the rows whose names begin so; the rows of search take minutes to prepare",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the JSON goes")
    parser.add_argument(
        "--folder", type=Path, default=ROOT, help="work below here: the disk that is measured"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure_all(
    chosen: list[Row], asked: argparse.Namespace, peer_python: Path, peer_refusal: str | None
) -> dict[str, Any]:
    started, load_before = perf_counter(), load()
    repetitions: dict[str, list[dict[str, Any]]] = {row.name: [] for row in chosen}
    refusals: dict[str, str] = {}
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=asked.folder))
    try:
        (folder / ".gitignore").write_text("*\n")
        # A PostgreSQL server, which does not run as root, has its files below.
        folder.chmod(0o711)
        # All rows once, then all again: what disturbs the machine for a minute spoils one
        # repetition of a few rows, not all of one.
        for repetition in range(1 if asked.quick else 3):
            for row in chosen:
                if repetition >= row.times or row.name in refusals:
                    continue
                _tell(f"{repetition + 1} {row.name}")
                if peer_refusal is not None and row.peer:
                    refusals[row.name] = peer_refusal
                    continue
                answer = _in_child(row.name, folder, quick=asked.quick)
                if "not_run" in answer:
                    refusals[row.name] = answer["not_run"]
                else:
                    repetitions[row.name].append(answer)
        peer = {"not_run": peer_refusal} if peer_refusal else _about_peer(folder, peer_python)
        described = {**machine(folder), "postgres": about_postgres()}
    finally:
        # Of a run that is stopped, the servers' own keeper removes their files at the same time.
        shutil.rmtree(folder, ignore_errors=True)
        _tell("")
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "quick": asked.quick,
        "seconds": round(perf_counter() - started, 1),
        "machine": described,
        "load": {"before": load_before, "after": load()},
        "peer": peer,
        "rows": [_result(row, repetitions[row.name], refusals.get(row.name)) for row in chosen],
    }


def _tell(what: str) -> None:
    """Where the run is, for whoever watches it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)


def _about_peer(folder: Path, python: Path) -> dict[str, str]:
    with Peer(Place(folder=folder, quick=True), python, []) as peer:
        about: dict[str, str] = peer.ask("about")
        return {**about, "others": peer_versions(python)}


def _in_child(name: str, folder: Path, *, quick: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", "--only", name, "--folder", str(folder)]
    ended = subprocess.run(
        [*command, *(["--quick"] if quick else [])], check=False, capture_output=True, text=True
    )
    if ended.returncode != 0:
        last = ended.stderr.strip().rpartition("\n")[2]
        return {"not_run": last or f"the row's process ended with {ended.returncode}"}
    answer: dict[str, Any] = json.loads(ended.stdout)
    return answer


def _child(row: Row, place: Place) -> None:
    try:
        answer: dict[str, Any] = asdict(row.run(place))
    except NotRun as refusal:
        answer = {"not_run": str(refusal)}
    print(json.dumps(answer))


def _result(row: Row, found: list[dict[str, Any]], refusal: str | None) -> dict[str, Any]:
    result: dict[str, Any] = {
        "name": row.name,
        "what": row.what,
        "target": asdict(row.target),
        "beside": row.beside,
    }
    if refusal is not None or not found:
        return {**result, "not_run": refusal or "no repetition"}
    measured = [figure["measured"] for figure in found]
    # Three digits are shown, and these are judged.
    middle = float(f"{median(measured):.3g}")
    return {
        **result,
        "measured": middle,
        "spread": [round(min(measured), 4), round(max(measured), 4)],
        "reached": row.target.reached(middle),
        "repetitions": found,
    }


if __name__ == "__main__":
    main()
