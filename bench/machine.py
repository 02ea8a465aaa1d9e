"""Conditions of a run (commit, versions, disk, load), and the environment of the peers."""

import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_PEER = ".venv-bench-peer"


def commit(checkout: Path = _ROOT) -> str:
    """Return the measured commit, and whether the working tree differs from the commit."""
    revision = _git(checkout, "rev-parse", "--short=12", "HEAD")
    if revision is None:
        return "none"
    is_changed = _git(checkout, "status", "--porcelain", "src", "bench")
    return f"{revision}, changed since" if is_changed else revision


def _git(checkout: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(checkout), *arguments], check=False, capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def machine_info(folder: Path) -> dict[str, Any]:
    """Return the versions and the disk."""
    return {
        "cpus": os.cpu_count(),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "file_system": _file_system(folder),
        "python": platform.python_version(),
        "msgspec": version("msgspec"),
    }


def load() -> list[float]:
    """Return the load averages of the last 1, 5 and 15 minutes."""
    return [round(average, 2) for average in os.getloadavg()]


def _file_system(folder: Path) -> str:
    """Return the type of a folder's file system."""
    device = os.stat(folder).st_dev  # noqa: PTH116
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == number:
            return fields[fields.index("-") + 1]
    return "unknown"


def peer_environment() -> tuple[Path, str | None]:
    """Return the Python of the peers' environment, and an error text if pip could not create it."""
    python = _ROOT / _PEER / "bin" / "python"
    result = subprocess.run(
        [sys.executable, _ROOT / "scripts" / "environment.py", _PEER, "--editable", ".[bench]"],
        check=False,
        stdout=sys.stderr,
    )
    return python, None if result.returncode == 0 else "pip could not install the peers"


def peer_versions(python: Path) -> str:
    """Return the versions of the packages of the PostgreSQL peers."""
    names = ("langgraph-checkpoint-postgres", "SQLAlchemy", "asyncpg")
    script = (
        "from importlib.metadata import version; "
        f"print(', '.join(f'{{name}} {{version(name)}}' for name in {names}))"
    )
    result = subprocess.run([python, "-c", script], check=False, capture_output=True, text=True)
    return result.stdout.strip()
