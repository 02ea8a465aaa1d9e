"""Make a virtual environment and install this project in it: FOLDER, then what pip is to install.

A `--` begins another call of pip: what is wanted without its dependencies stands behind one.
Does nothing when the environment is already what is asked for. A note written as the very last
step says what was installed, from what and by which Python; without it, or when it differs, the
environment is made anew, so a stopped install is never taken for a finished one.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(folder: Path, requirement: list[str]) -> None:
    """Bring the environment in folder up to date. Exits with a sentence if pip fails."""
    wanted = _describe(folder, requirement)
    note = folder / "installed.json"
    # Two targets started at once must not build the same environment under each other's hands.
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # If only this process is killed, pip works on; it then keeps the lock until it has ended.
        os.set_inheritable(lock.fileno(), True)
        if (folder / "bin" / "python").exists() and _read(note) == wanted:
            return
        print(f"Installing {' '.join(requirement)} into {folder.name} ...", flush=True)
        python = _python_outside(folder)
        shutil.rmtree(folder, ignore_errors=True)
        _create(folder, python)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        for part in _parts(requirement):
            _run([*pip, "install", "--quiet", *part])
        note.write_text(wanted)


def _describe(folder: Path, requirement: list[str]) -> str:
    """What the environment depends on; a change in any of it calls for a new one."""
    sources = [ROOT / "pyproject.toml"]
    if "--editable" not in requirement:
        sources += sorted((ROOT / "src").rglob("*.py"))
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    return json.dumps(
        {
            "requirement": requirement,
            "python": [sys.base_prefix, sys.version],
            # The scripts in an environment name its place, so it does not survive a move.
            "place": str(folder),
            "sources": digest.hexdigest(),
        }
    )


def _parts(requirement: list[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in requirement:
        if word == "--":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _read(note: Path) -> str | None:
    try:
        return note.read_text()
    except FileNotFoundError:
        return None


def _python_outside(folder: Path) -> str:
    """The running Python, or the one beneath it when that stands in the folder to be replaced."""
    if Path(sys.prefix).resolve() != folder:
        return sys.executable
    return str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")


def _create(folder: Path, python: str) -> None:
    made = subprocess.run(
        [python, "-m", "venv", folder], check=False, capture_output=True, close_fds=False
    )
    if made.returncode == 0:
        return
    # Debian keeps half of venv in a package of its own. virtualenv needs nothing of it, and goes
    # to a temporary folder, so nothing is left behind on the machine.
    print("python -m venv does not work here; using virtualenv from pip.", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as tools:
        _run([python, "-m", "pip", "install", "--quiet", "--target", tools, "virtualenv"])
        search = os.pathsep.join(filter(None, [tools, os.environ.get("PYTHONPATH")]))
        _run(
            [python, "-m", "virtualenv", "--quiet", "--app-data", f"{tools}/data", str(folder)],
            environment={**os.environ, "PYTHONPATH": search},
        )


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    ended = subprocess.run(command, check=False, cwd=ROOT, env=environment, close_fds=False)
    if ended.returncode != 0:
        sys.exit("The environment is not complete: see the lines above. The next make starts anew.")


if __name__ == "__main__":
    try:
        main(ROOT / sys.argv[1], sys.argv[2:])
    except KeyboardInterrupt:
        sys.exit("Stopped. The next make starts anew.")
