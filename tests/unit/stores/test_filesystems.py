"""Tests P1: network file systems are detected, and both engines warn about them."""

from pathlib import Path

import pytest

from stenolog import JSONLStore, SQLiteStore
from stenolog.stores import disk

MOUNTS = r"""/dev/sda / ext4 rw 0 0
server:/a /mnt/shared nfs4 rw 0 0
tmpfs /mnt/shared/local tmpfs rw 0 0
server:/b /mnt/my\040own\134share cifs rw 0 0
auto /home autofs rw 0 0
server:/c /home nfs rw 0 0
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/var/lib", "ext4"),
        ("/mnt/shared", "nfs4"),
        ("/mnt/shared/deep/below", "nfs4"),
        ("/mnt/shared/local/x", "tmpfs"),
        ("/mnt/shared2", "ext4"),
        ("/mnt/my own\\share/x", "cifs"),
        ("/home/me", "nfs"),
    ],
)
def test_file_system_is_that_of_the_innermost_mount(path: str, kind: str) -> None:
    assert disk.filesystem_type_at(path, MOUNTS) == kind


def _pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    table = tmp_path / "mounts"
    table.write_text(f"x / {kind} rw 0 0\n")
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
