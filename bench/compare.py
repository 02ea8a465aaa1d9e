"""Compare two checkouts: measure the same rows with both, one after the other.

    python bench/compare.py ../before --rounds 5 append-0 GetHistory-100-sqlite

`../before` is a checkout of another commit where `make dev` was run. Each row is measured with its
own checkout's benchmark, in its own process. The checkout that is measured first changes with each
round. Our time is divided by the time of the row's comparison, which is measured in the same
process, so that a busy disk affects both. On a busy machine, rows still differ by up to a third.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from machine import commit, load
from rows import rows

ROOT = Path(__file__).resolve().parent.parent
_LONG_ROWS = ("search-", "recall-", "viewer-", "view-", "import-transcripts", "memory-")
"""First letters of the rows that are compared only if they are named: each takes minutes."""


def main() -> None:
    """Measure the selected rows with both checkouts, and print the changes."""
    names = [row.name for row in rows(Path())]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("before", type=Path, help="folder of the other checkout")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="rows to measure")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_intermixed_args()
    selected = options.rows or [name for name in names if not name.startswith(_LONG_ROWS)]
    if unknown := set(selected) - set(names):
        sys.exit(f"No such rows: {', '.join(sorted(unknown))}. Rows: {', '.join(names)}")
    checkouts = {"before": options.before.resolve(), "after": ROOT}
    measured: dict[str, dict[str, list[dict[str, Any]]]] = {
        name: {"before": [], "after": []} for name in selected
    }
    print(f"{commit(checkouts['before'])} -> {commit()}, load {load()[0]}")
    for round_number in range(options.rounds):
        for name in selected:
            for side in sorted(checkouts, reverse=round_number % 2 == 0):
                measured[name][side].append(_measure(checkouts[side], name))
            print(f"round {round_number + 1}: {_describe(name, measured[name])}", flush=True)
    print(f"load {load()[0]}")


def _describe(name: str, sides: dict[str, list[dict[str, Any]]]) -> str:
    """Describe the change of the median cost, relative to the row's comparison."""
    for measurement in (*sides["before"], *sides["after"]):
        if "not_run" in measurement:
            return f"{name}: NOT RUN, {measurement['not_run']}"
    before, after = (median(map(_relative_cost, sides[side])) for side in ("before", "after"))
    return f"{name}: {before:.3g} -> {after:.3g} of the comparison, {after / before - 1:+.0%}"


def _relative_cost(measurement: dict[str, Any]) -> float:
    """Return our time in units of the comparison's time."""
    ours, raw = measurement["ours"], measurement["raw"]
    if "per_second" in ours:
        return float(raw["per_second"] / ours["per_second"])
    name = "p50_us" if "p50_us" in ours else "mb"
    return float(ours[name] / raw[name])


def _measure(checkout: Path, name: str) -> dict[str, Any]:
    """Measure one row once with the code and the environment of a checkout."""
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=ROOT))
    try:
        # PostgreSQL does not run as root and must be able to reach its files in this folder.
        folder.chmod(0o711)
        process = subprocess.run(
            [
                *(checkout / ".venv/bin/python", checkout / "bench/run.py"),
                *("--child", "--only", name, "--folder", folder),
            ],
            check=False,
            capture_output=True,
            text=True,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if process.returncode != 0:
        last_line = process.stderr.strip().rpartition("\n")[2]
        return {"not_run": last_line or f"the process ended with {process.returncode}"}
    answer: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return answer


if __name__ == "__main__":
    main()
