"""Tests real power cuts during all operations on SQLite, with the harness of test_power_cut.py."""

from pathlib import Path

import pytest

from support.crash.crash_checks import Violation
from support.crash.disks import FileSystem
from support.crash.power_cuts import FILE_SYSTEMS, cut_power
from support.crash.reporting import Say


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_p1_four_power_cuts_lose_no_acknowledged_message(
    tmp_path: Path, say: Say, seed: int, kind: FileSystem
) -> None:
    cut_power(tmp_path, say, seed, kind, cuts=4, engine="sqlite:")


@pytest.mark.full
@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_p1_a_hundred_power_cuts_lose_no_acknowledged_message(
    tmp_path: Path, say: Say, seed: int, kind: FileSystem
) -> None:
    cut_power(tmp_path, say, seed, kind, cuts=100, engine="sqlite:")


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_power_cut_test_detects_a_store_that_does_not_sync(
    tmp_path: Path, say: Say, kind: FileSystem
) -> None:
    with pytest.raises(Violation, match="acknowledged messages lost"):
        cut_power(tmp_path, say, 1, kind, cuts=20, never_sync=True, engine="sqlite:")
