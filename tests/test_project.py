"""Promises of the project as a whole, kept by looking at its files and at a fresh process."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import sabotage

ROOT = Path(__file__).resolve().parent.parent

# In pieces, so that this file does not hold what it looks for.
_REGISTRY = re.compile("|".join(["py" + r"pi\.org", "python" + r"hosted\.org", "npm" + r"js\.org"]))
_HOME = re.compile(r"(?<![\w.-])/(?:root|(?:home|Users)/[\w.-]+)/")
_SHARED_BY_ALL = {"/", "/tmp", "/var/tmp", "/home", "/mnt", "/opt", "/srv", "/src", "/usr/src"}


def test_the_changelog_begins_with_the_version_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == project["version"] == importlib.metadata.version("stenolog")


def test_no_file_names_a_registry_or_a_place_on_the_author_s_machine() -> None:
    # Where this very clone stands is such a place, unless every machine has a folder like it.
    here = [str(place) for place in (ROOT, ROOT.parent) if str(place) not in _SHARED_BY_ALL]
    place = re.compile("|".join(rf"(?<![\w.-]){re.escape(name)}/" for name in here) or r"(?!)")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in _project_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        for pattern in (_REGISTRY, _HOME, place)
        if pattern.search(line)
    ]
    assert found == []


def test_importing_the_library_loads_the_standard_library_and_msgspec_alone() -> None:
    # msgspec first: it also takes what it finds installed, and that is its own affair.
    script = (
        "import sys, msgspec; before = set(sys.modules); import stenolog; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    child = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    loaded = set(child.stdout.split())
    assert "stenolog" in loaded
    assert loaded - sys.stdlib_module_names - {"stenolog", "msgspec"} == set()


def test_every_breakage_still_fits_the_code(tmp_path: Path) -> None:
    rows = sabotage.read_table(sabotage.TABLE)
    for row in rows:
        copy = tmp_path / row.file
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / row.file).read_bytes())
        sabotage.apply(row, tmp_path)
    # pytest answers with an error if one of the named tests does not exist.
    tests = sorted({row.test for row in rows}) or ["tests/test_project.py"]
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *tests],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert collected.returncode == 0, collected.stdout[-2000:]


def _project_files() -> list[Path]:
    """Every file that is or would be committed; without git, every file outside hidden folders."""
    # safe.directory: a clone may belong to somebody else than the one who tests it.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others"]
    try:
        listed = subprocess.run(
            [*command, "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.split("\0")
        paths = [ROOT / name for name in listed if name]
    except (FileNotFoundError, subprocess.CalledProcessError):
        paths = [
            path
            for path in ROOT.rglob("*")
            if not any(part.startswith(".") for part in path.relative_to(ROOT).parts[:-1])
        ]
    return [path for path in paths if path.is_file() and not path.is_symlink()]
