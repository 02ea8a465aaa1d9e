"""The sources of imports in a folder or file that the user names: files, databases, trees."""

import re
from pathlib import Path
from typing import Final

from stenolog.transfer.importers import sqlite_file
from stenolog.transfer.importers.folder import Folder
from stenolog.transfer.importers.framework_tables import Database
from stenolog.transfer.importers.legacy_session import (
    ALL_LAYOUTS,
    REFERENCE_LAYOUTS,
    Layout,
    SourceFolder,
)
from stenolog.transfer.importers.strands import StrandsFolder, is_session_folder

DATABASE_LAYOUTS: Final[frozenset[Layout]] = frozenset({"openai-agents", "langchain", "adk"})
FILE_LAYOUTS: Final[frozenset[Layout]] = REFERENCE_LAYOUTS | {"nanobot", "langchain", "plain"}
DATABASE_SUFFIXES: Final = (".db", ".sqlite", ".sqlite3", ".db3")
"""Suffixes of files in a folder that are opened as databases; a named file always is."""

_NANOBOT_WORKSPACE: Final = re.compile(r"[0-9a-f]{32}")
"""Name of a workspace folder of nanobot."""


def find_sources(
    path: Path, *, only: str | None = None, layouts: frozenset[Layout] = ALL_LAYOUTS
) -> list[SourceFolder]:
    """Return the sources in a folder, or in `only` one file of it. Raises OSError."""
    if only is not None:
        return [_source_of_file(path, only, layouts)]
    if "strands" in layouts and is_session_folder(path):
        return [StrandsFolder([path])]
    entries = sorted(path.iterdir())
    found: list[SourceFolder] = []
    if not layouts.isdisjoint(FILE_LAYOUTS):
        found.append(Folder(path, follow=True, layouts=layouts))
    folders = [entry for entry in entries if entry.is_dir() and not entry.is_symlink()]
    if "nanobot" in layouts:
        workspaces = [folder for folder in folders if _NANOBOT_WORKSPACE.fullmatch(folder.name)]
        found += [Folder(folder, layouts=layouts) for folder in workspaces]
    sessions = [folder for folder in folders if is_session_folder(folder)]
    if "strands" in layouts and sessions:
        found.append(StrandsFolder(sessions))
    if not layouts.isdisjoint(DATABASE_LAYOUTS):
        named = [entry for entry in entries if entry.suffix.lower() in DATABASE_SUFFIXES]
        files = [
            entry for entry in named if not entry.is_symlink() and sqlite_file.is_sqlite_file(entry)
        ]
        theirs = [file for file in files if not sqlite_file.is_stenolog_database(file)]
        found += [Database(file, layouts=layouts) for file in theirs]
    return found


def is_searched(folder: Path) -> bool:
    """Return whether a subfolder of the named folder is imported too."""
    return _NANOBOT_WORKSPACE.fullmatch(folder.name) is not None or is_session_folder(folder)


def _source_of_file(folder: Path, name: str, layouts: frozenset[Layout]) -> SourceFolder:
    file = folder / name
    if sqlite_file.is_sqlite_file(file):
        return Database(file, layouts=layouts)
    if name == "session.json" and "strands" in layouts and is_session_folder(folder):
        return StrandsFolder([folder])
    return Folder(folder, only=name, follow=True, layouts=layouts)
