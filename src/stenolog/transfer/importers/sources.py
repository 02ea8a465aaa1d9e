"""The sources of imports in a folder or file that the user names: files, databases, trees."""

import re
from pathlib import Path
from typing import Final

from stenolog.transfer.importers import sqlite_file
from stenolog.transfer.importers.folder import Folder
from stenolog.transfer.importers.framework_tables import Database
from stenolog.transfer.importers.legacy_session import (
    EVERY_LAYOUT,
    OF_THE_REFERENCE,
    Layout,
    SourceFolder,
)
from stenolog.transfer.importers.strands import StrandsFolder, is_session

IN_DATABASES: Final[frozenset[Layout]] = frozenset({"openai-agents", "langchain", "adk"})
IN_FILES: Final[frozenset[Layout]] = OF_THE_REFERENCE | {"nanobot", "langchain", "plain"}
ENDINGS: Final = (".db", ".sqlite", ".sqlite3", ".db3")
"""Suffixes of files in a folder that are opened as databases; a named file always is."""

_OF_A_WORKSPACE: Final = re.compile(r"[0-9a-f]{32}")
"""Name of a workspace folder of nanobot."""


def shelves(
    path: Path, *, only: str | None = None, layouts: frozenset[Layout] = EVERY_LAYOUT
) -> list[SourceFolder]:
    """Return the sources in a folder, or in `only` one file of it. Raises OSError."""
    if only is not None:
        return [_of_file(path, only, layouts)]
    if "strands" in layouts and is_session(path):
        return [StrandsFolder([path])]
    entries = sorted(path.iterdir())
    found: list[SourceFolder] = []
    if not layouts.isdisjoint(IN_FILES):
        found.append(Folder(path, follow=True, layouts=layouts))
    folders = [entry for entry in entries if entry.is_dir() and not entry.is_symlink()]
    if "nanobot" in layouts:
        workspaces = [folder for folder in folders if _OF_A_WORKSPACE.fullmatch(folder.name)]
        found += [Folder(folder, layouts=layouts) for folder in workspaces]
    sessions = [folder for folder in folders if is_session(folder)]
    if "strands" in layouts and sessions:
        found.append(StrandsFolder(sessions))
    if not layouts.isdisjoint(IN_DATABASES):
        named = [entry for entry in entries if entry.suffix.lower() in ENDINGS]
        files = [entry for entry in named if not entry.is_symlink() and sqlite_file.is_one(entry)]
        theirs = [file for file in files if not sqlite_file.is_ours(file)]
        found += [Database(file, layouts=layouts) for file in theirs]
    return found


def is_searched(folder: Path) -> bool:
    """Return whether a subfolder of the named folder is imported too."""
    return _OF_A_WORKSPACE.fullmatch(folder.name) is not None or is_session(folder)


def _of_file(folder: Path, name: str, layouts: frozenset[Layout]) -> SourceFolder:
    file = folder / name
    if sqlite_file.is_one(file):
        return Database(file, layouts=layouts)
    if name == "session.json" and "strands" in layouts and is_session(folder):
        return StrandsFolder([folder])
    return Folder(folder, only=name, follow=True, layouts=layouts)
