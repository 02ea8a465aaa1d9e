"""Detection of network file systems, whose locks and syncs are not reliable."""

import re
from pathlib import Path
from typing import Final

_NETWORK: Final = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "afs", "ceph"}
_MOUNTS: Final = "/proc/self/mounts"
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")

_kinds: dict[int, str] = {}
"""File system type by device number, cached: the lookup takes longer than opening a store."""


def network_kind(folder: Path) -> str:
    """Return the type of the network file system; empty if it is local or unknown.

    Raises OSError if the folder does not exist.
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
        return ""  # Only Linux has this file.


def kind_at(path: str, mounts: str) -> str:
    """Return the type of the innermost mount that holds a path, from a table like /proc/mounts."""
    best, kind = "", ""
    for fields in (line.split(" ") for line in mounts.splitlines()):
        if len(fields) > 2:
            point = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), fields[1])
            inside = path == point or path.startswith(point.rstrip("/") + "/")
            # A later mount at the same point covers the earlier one.
            if inside and len(point) >= len(best):
                best, kind = point, fields[2]
    return kind
