"""Tests which versions of SQLite cause a warning."""

import logging
from pathlib import Path

import apsw
import pytest

from stenolog import SQLiteStore
from stenolog.stores.sqlite.database_file import known_bugs


@pytest.mark.parametrize(
    "version", ["3.7.0", "3.40.1", "3.44.5", "3.45.0", "3.50.6", "3.51.0", "3.51.2", "3.51"]
)
def test_versions_with_the_wal_reset_bug_are_named(version: str) -> None:
    [told] = known_bugs(version)
    assert f"SQLite {version} " in told
    assert "WAL-reset" in told


@pytest.mark.parametrize(
    "version", ["3.6.23", "3.44.6", "3.44.9", "3.50.7", "3.51.3", "3.52.0", "3.54.1", "4.0.0"]
)
def test_versions_without_the_wal_reset_bug_are_not_named(version: str) -> None:
    assert known_bugs(version) == []


def test_linked_sqlite_has_no_known_bug() -> None:
    assert known_bugs(apsw.sqlite_lib_version()) == []


def test_start_up_and_health_name_a_sqlite_with_a_known_bug(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SQLiteStore(file) as store:
        assert store.admin.health().problems == ()
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: "3.40.1")
    with caplog.at_level(logging.WARNING, "stenolog"), SQLiteStore(file) as store:
        assert "WAL-reset" in caplog.text
        assert any("3.40.1" in problem for problem in store.admin.health().problems)
