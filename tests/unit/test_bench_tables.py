"""Tests that docs/benchmarks.md shows the results of the last full run, and the check for it."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_LATEST = _ROOT / "bench" / "results" / "latest.json"
_PAGE = _ROOT / "docs" / "benchmarks.md"


def _tables(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, _ROOT / "bench" / "tables.py", *arguments],
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Return a copy of the page that may be changed."""
    copy = tmp_path / "benchmarks.md"
    copy.write_text(_PAGE.read_text())
    return copy


def test_the_page_shows_the_numbers_of_the_last_full_run() -> None:
    ended = _tables("--check")
    assert ended.returncode == 0, ended.stderr


def test_other_numbers_make_the_page_out_of_date_until_it_is_renewed(
    page: Path, tmp_path: Path
) -> None:
    results: dict[str, Any] = json.loads(_LATEST.read_text())
    results["rows"][0]["measured"] = 77.7
    results["rows"][0]["reached"] = False
    other = tmp_path / "other.json"
    other.write_text(json.dumps(results))

    assert _tables("--check", "--results", other, "--page", page).returncode == 1
    assert _tables("--results", other, "--page", page).returncode == 0
    missed = page.read_text().partition("<!-- begin missed")[2]
    assert "77.7" in missed
    assert _tables("--check", "--results", other, "--page", page).returncode == 0


def test_the_table_for_users_follows_the_results(page: Path, tmp_path: Path) -> None:
    results: dict[str, Any] = json.loads(_LATEST.read_text())
    by_name = {row["name"]: row for row in results["rows"]}
    by_name["AddMessage-jsonl"]["measured"] = 5.55
    by_name["AddMessage-sqlite"]["measured"] = 0.5
    del by_name["pg-agents-1"]["repetitions"]
    by_name["pg-agents-1"]["not_run"] = "pip could not install it"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(results))

    assert _tables("--results", other, "--page", page).returncode == 0
    summary = page.read_text().partition("<!-- end summary -->")[0]
    [jsonl] = re.findall(r"^\| Store a message \|.*\|$", summary, re.MULTILINE)
    [sqlite] = re.findall(r"^\| Store a message, SQLite \|.*\|$", summary, re.MULTILINE)
    assert jsonl.endswith("| 5.55 × faster |")
    assert sqlite.endswith("| 2 × slower |")
    assert re.search(r"OpenAI Agents' SQLAlchemySession \| NOT RUN \|$", summary, re.MULTILINE)


def test_all_rows_are_printed_with_their_percentiles() -> None:
    printed = _tables("--rows").stdout
    for row in json.loads(_LATEST.read_text())["rows"]:
        assert re.search(rf"^{row['name']} .*\b(yes|no)\b", printed, re.MULTILINE), row["name"]
    assert re.search(r"^append-0 +ours( +[\d.,]+ [µm]s){4}", printed, re.MULTILINE)
