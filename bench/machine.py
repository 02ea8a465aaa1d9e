"""What the numbers were taken with: commit, versions, disk, load; and the peer's environment."""

import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_PEER = ".venv-bench-peer"


def commit() -> str:
    """The commit that was measured, and whether the tree differs from it."""
    found = _git("rev-parse", "--short=12", "HEAD")
    if found is None:
        return "none"
    return f"{found}, changed since" if _git("status", "--porcelain", "src", "bench") else found


def _git(*arguments: str) -> str | None:
    try:
        ended = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments], check=False, capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None


def machine(folder: Path) -> dict[str, Any]:
    """The versions and the disk."""
    return {
        "cpus": os.cpu_count(),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "file_system": _file_system(folder),
        "python": platform.python_version(),
        "msgspec": version("msgspec"),
    }


def load() -> list[float]:
    """The load averages of the last 1, 5 and 15 minutes."""
    return [round(average, 2) for average in os.getloadavg()]


def _file_system(folder: Path) -> str:
    """The type of the file system that a folder is on."""
    device = os.stat(folder).st_dev  # noqa: PTH116
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1]
    return "unknown"


def peer_environment() -> tuple[Path, str | None]:
    """The Python of the peer's own environment, made if it is missing; and why it is not there."""
    python = _ROOT / _PEER / "bin" / "python"
    ended = subprocess.run(
        [sys.executable, _ROOT / "scripts" / "environment.py", _PEER, "--editable", ".[bench]"],
        check=False,
        stdout=sys.stderr,
    )
    return python, None if ended.returncode == 0 else "pip could not install the peers"


def peer_versions(python: Path) -> str:
    """What the peers that speak to PostgreSQL are made of."""
    names = ("langgraph-checkpoint-postgres", "SQLAlchemy", "asyncpg")
    script = (
        "from importlib.metadata import version; "
        f"print(', '.join(f'{{name}} {{version(name)}}' for name in {names}))"
    )
    ended = subprocess.run([python, "-c", script], check=False, capture_output=True, text=True)
    return ended.stdout.strip()
