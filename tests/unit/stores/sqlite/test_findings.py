"""Tests the findings that the doctor gets about a database."""

import shutil
from pathlib import Path

import apsw
import pytest

from stenolog import SQLiteStore, StoreUnavailable
from stenolog.maintenance.workspace_check import examine
from stenolog.stores.sqlite.database_file import fingerprint, run_script

SAMPLES = Path(__file__).resolve().parents[3] / "samples"


@pytest.fixture
def used(file: Path) -> Path:
    """Create a database with everything that a healthy one may contain."""
    with SQLiteStore(file) as store:
        for number in range(30):
            store.add_message("a", "user", f"{number} \ud800", once=f"t{number}")
        store.checkpoint("a", summary="so far", upto=5)
        store.compact("a")
        store.fork("a", "fork", at=12)
        store.admin.purge("a", before=4)
        store.add_message("gone", "user", "x")
        store.delete("gone")
        store.set_summary("without messages", "text")
        store.lease("a", ttl=60)
    return file


def _spoil(file: Path, script: str) -> None:
    connection = apsw.Connection(str(file))
    run_script(connection, script)
    connection.close()


def test_intact_database_has_no_findings(used: Path) -> None:
    before = used.read_bytes()
    report = examine(f"sqlite:{used}")
    assert report.findings == ()
    assert report.sessions == 4
    assert used.read_bytes() == before


def test_missing_messages_are_reported_by_seq(used: Path) -> None:
    _spoil(used, "DELETE FROM message WHERE seq IN (7, 8, 11) AND session = 1")
    [found] = examine(f"sqlite:{used}").findings
    assert (found.kind, found.key, found.lost) == ("missing message", "a", ((7, 8), (11, 11)))


def test_messages_that_are_not_json_objects_are_reported_by_seq(used: Path) -> None:
    _spoil(
        used, "UPDATE message SET body = CAST('{\"role\"' AS BLOB) WHERE seq = 9 AND session = 1"
    )
    _spoil(used, "UPDATE message SET body = CAST('[]' AS BLOB) WHERE seq = 10 AND session = 1")
    [found] = examine(f"sqlite:{used}").findings
    assert (found.kind, found.key, found.lost) == ("damaged message", "a", ((9, 10),))


def test_unreadable_state_is_reported(used: Path) -> None:
    _spoil(used, "UPDATE state SET body = CAST('{}' AS BLOB) WHERE session = 1")
    _spoil(used, "DELETE FROM state WHERE session = 2")
    found = examine(f"sqlite:{used}").findings
    assert [(one.kind, one.key) for one in found] == [
        ("damaged state", "a"),
        ("damaged state", "fork"),
    ]


def test_stray_rows_are_reported(used: Path) -> None:
    _spoil(used, "PRAGMA foreign_keys = OFF; INSERT INTO token VALUES (99, x'00', 1, 1)")
    _spoil(used, "INSERT INTO message VALUES (999, 1, 31, '', CAST('{}' AS BLOB), 1)")
    assert [one.kind for one in examine(f"sqlite:{used}").findings] == ["stray row", "stray row"]


def test_damaged_pages_are_reported(used: Path) -> None:
    size = used.stat().st_size
    with used.open("r+b") as database:
        database.seek(4096)
        database.write(b"\xff" * (size - 4096))
    found = examine(f"sqlite:{used}").findings
    assert found
    assert {one.kind for one in found} == {"damaged database"}


def test_interrupted_purge_is_reported(used: Path) -> None:
    _spoil(used, "INSERT INTO purge (begun) VALUES ('2026-01-01T00:00:00.000000Z')")
    assert [one.kind for one in examine(f"sqlite:{used}").findings] == ["unfinished purge"]


def test_p11_wide_modes_are_reported(used: Path) -> None:
    used.chmod(0o644)
    # The files that SQLite creates next to it have the same mode.
    assert {one.kind for one in examine(f"sqlite:{used}").findings} == {"wide permissions"}


def test_foreign_and_newer_files_are_reported(tmp_path: Path, used: Path) -> None:
    theirs = tmp_path / "theirs.db"
    shutil.copyfile(SAMPLES / "transcripts/llm-logs/logs.db", theirs)
    assert [one.kind for one in examine(f"sqlite:{theirs}").findings] == ["foreign file"]
    _spoil(used, f"PRAGMA user_version = {fingerprint() + 1}")
    assert [one.kind for one in examine(f"sqlite:{used}").findings] == ["newer format"]
    with pytest.raises(StoreUnavailable):
        examine(f"sqlite:{tmp_path}/nothing.db")
