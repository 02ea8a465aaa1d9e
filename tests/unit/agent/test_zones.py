"""Tests the users' time zone: the configured one, or the machine's."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import TZPATH

import pytest

from stenolog.errors import UsageError
from stenolog.memory.facade import load_zone


def _hours(name: str, month: int) -> float:
    offset = datetime(2026, month, 1, 12, tzinfo=load_zone(name)).utcoffset()
    assert offset is not None
    return offset / timedelta(hours=1)


def test_zone_has_daylight_saving_time() -> None:
    assert (_hours("Europe/Zurich", 1), _hours("Europe/Zurich", 7)) == (1, 2)


@pytest.mark.parametrize("name", ["Europe/Zürich", "../etc/passwd", "/etc/localtime", "no"])
def test_unknown_zone_name_is_rejected(name: str) -> None:
    with pytest.raises(UsageError, match="unknown time zone"):
        load_zone(name)


@pytest.mark.parametrize("named", ["Europe/Zurich", ":Europe/Zurich"])
def test_default_is_the_zone_of_the_machine(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", named)
    assert (_hours("", 1), _hours("", 7)) == (1, 2)


@pytest.mark.parametrize("prefix", ["", ":"])
def test_zone_of_the_machine_may_be_a_file(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [Path(folder) / "Europe" / "Zurich" for folder in TZPATH]
    file = next(path for path in paths if path.exists())
    monkeypatch.setenv("TZ", f"{prefix}{file}")
    assert (_hours("", 1), _hours("", 7)) == (1, 2)


@pytest.mark.timeout(20)
def test_zone_file_without_its_last_line_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = next(path for path in (Path(folder) / "UTC" for folder in TZPATH) if path.exists())
    cut_off = tmp_path / "zone"
    cut_off.write_bytes(whole.read_bytes()[:-3])
    monkeypatch.setenv("TZ", str(cut_off))
    assert datetime.now(load_zone("")).utcoffset() is not None


@pytest.mark.parametrize("named", ["", "XYZ-3"])
def test_machine_zone_without_a_name_is_used(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", named)
    assert datetime.now(load_zone("")).utcoffset() is not None


def test_zone_name_overrides_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    now = datetime.now(UTC)
    assert now.astimezone(load_zone("UTC")).utcoffset() == timedelta(0)
