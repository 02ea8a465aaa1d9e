"""Whether a folder is on a network file system, on whose locks and syncs nobody can rely."""

import re
from pathlib import Path
from typing import Final

_NETWORK: Final = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "afs", "ceph"}
_MOUNTS: Final = "/proc/self/mounts"
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")

_kinds: dict[int, str] = {}
"""The kind by device: it takes longer to find out than to open a store."""


def network_kind(folder: Path) -> str:
    """What the network file system is called; empty on a local one, and where nobody tells.

    Raises OSError where there is no such folder.
    """
    device = folder.stat().st_dev
    if device not in _kinds:
        _kinds[device] = _look_up(folder)
    return _kinds[device] if _kinds[device] in _NETWORK else ""


def _look_up(folder: Path) -> str:
    try:
        mounts = Path(_MOUNTS).read_text(encoding="utf-8", errors="replace")
        return kind_at(str(folder.resolve()), mounts)
    except OSError:
        return ""  # only Linux tells


def kind_at(path: str, mounts: str) -> str:
    """The kind of the innermost file system that holds a path, by a table as in /proc/mounts."""
    best, kind = "", ""
    for fields in (line.split(" ") for line in mounts.splitlines()):
        if len(fields) > 2:
            point = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), fields[1])
            inside = path == point or path.startswith(point.rstrip("/") + "/")
            # Of two at the same place the later one covers the other.
            if inside and len(point) >= len(best):
                best, kind = point, fields[2]
    return kind
