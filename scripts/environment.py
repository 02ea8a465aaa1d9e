"""Create a virtual environment and install this project in it.

The arguments are the folder of the environment, then arguments for pip. `--` starts another call of
pip, for example for packages without dependencies. If the environment is up to date, the script
does nothing. The last step writes a note about the installed packages, their sources and the
Python. If the note is missing or differs, the environment is created again. So an interrupted
installation never counts as finished.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(folder: Path, requirement: list[str]) -> None:
    """Bring the environment in `folder` up to date. Exits with a message if pip fails."""
    wanted = _describe(folder, requirement)
    note = folder / "installed.json"
    # Two make targets that run at once must not build the same environment.
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # If only this process is killed, pip continues and keeps the lock until it ends.
        os.set_inheritable(lock.fileno(), True)
        if (folder / "bin" / "python").exists() and _read(note) == wanted:
            return
        print(f"Installing {' '.join(requirement)} into {folder.name} ...", flush=True)
        python = _python_outside(folder)
        shutil.rmtree(folder, ignore_errors=True)
        _create_folder(folder, python)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        for part in _split_calls(requirement):
            _run([*pip, "install", "--quiet", *part])
        note.write_text(wanted)


def _describe(folder: Path, requirement: list[str]) -> str:
    """Return a description of everything that the environment depends on.

    If the description changes, the environment must be created again.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    # Limits and settings of the checks may change without a new environment.
    build = [project["build-system"], project["project"], project["tool"]["hatch"]]
    digest = hashlib.sha256(json.dumps(build, sort_keys=True).encode())
    if "--editable" not in requirement:
        for source in sorted((ROOT / "src").rglob("*.py")):
            digest.update(source.read_bytes())
    return json.dumps(
        {
            "requirement": requirement,
            "python": [sys.base_prefix, sys.version],
            # Scripts in an environment contain its path, so it cannot be moved.
            "place": str(folder),
            "sources": digest.hexdigest(),
        }
    )


def _split_calls(requirement: list[str]) -> list[list[str]]:
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
    """Return the running Python, or its base Python if it is in the folder to be replaced."""
    if Path(sys.prefix).resolve() != folder:
        return sys.executable
    return str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")


def _create_folder(folder: Path, python: str) -> None:
    result = subprocess.run(
        [python, "-m", "venv", folder], check=False, capture_output=True, close_fds=False
    )
    if result.returncode == 0:
        return
    # Debian has a part of venv in a separate package. virtualenv does not need this package. It is
    # installed in a temporary folder, so that nothing is left on the machine.
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
