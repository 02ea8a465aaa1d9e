"""Tests P1: both engines warn about a network file system."""

import os
from pathlib import Path

import pytest

from stenolog import JSONLStore, SQLiteStore
from stenolog.stores import disk


def _pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    device = tmp_path.stat().st_dev
    table = tmp_path / "mounts"
    table.write_text(
        "1 0 1:2 / /elsewhere rw - smb3 server rw\n"
        f"2 1 {os.major(device)}:{os.minor(device)} / /mnt/a\\040place rw shared:1 - {kind} x rw\n"
    )
    monkeypatch.setattr(disk, "_MOUNT_TABLE", str(table))
    monkeypatch.setattr(disk, "_filesystem_types", {})


@pytest.mark.parametrize(("kind", "warned"), [("nfs4", True), ("ext4", False)])
def test_p1_both_engines_warn_about_a_network_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, *, warned: bool
) -> None:
    _pretend(tmp_path, monkeypatch, kind)
    with JSONLStore(tmp_path / "w") as logs, SQLiteStore(tmp_path / "w" / "x.db") as database:
        for store in (logs, database):
            told = [
                p for p in store.admin.health().problems if f"network file system ({kind})" in p
            ]
            assert bool(told) == warned
            assert store.admin.health().ok


def test_unknown_file_system_causes_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pretend(tmp_path, monkeypatch, "nfs")
    (tmp_path / "mounts").unlink()
    assert disk.network_filesystem(tmp_path) == ""
