"""The places that `steno view` shows: found, recognized, and opened so that nothing changes.

A place is a workspace, a SQLite file of stenolog, a PostgreSQL database, or transcripts of a known
program.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from time import time
from typing import Final

import msgspec
from msgspec import Struct

from stenolog.errors import StenologError, UsageError
from stenolog.sessions.folders import AGENTS, CHANNELS, NAMESPACE, NOTES, log_folders
from stenolog.stores import disk
from stenolog.stores.base import Store
from stenolog.stores.file_names import LOG_SUFFIX, unescape_key
from stenolog.stores.open_store import address, open_store
from stenolog.stores.snapshots import NamespacedStore
from stenolog.transfer.combined_store import CombinedStore, StorePlace
from stenolog.transfer.importers import sqlite_file
from stenolog.transfer.transcripts.programs import PROGRAMS, detect_program
from stenolog.transfer.transcripts.transcript_store import TranscriptStore

STENOLOG: Final = "stenolog"
_LOG_START: Final = b'{"kind":"'
_HIDDEN: Final = (NOTES, CHANNELS)
"""Namespaces that contain no conversations."""


class ViewedPlace(Struct, frozen=True, kw_only=True):
    """A place to show."""

    program: str
    """`stenolog`, or the program whose transcripts are there."""
    where: str
    """Path or URL. Paths are absolute."""


def usual_places(workspace: str) -> list[ViewedPlace]:
    """Return the places of known programs that exist here, and the workspace if it exists."""
    found = [
        ViewedPlace(program=name, where=str(folder))
        for name, program in PROGRAMS.items()
        if (folder := program().default_folder()) is not None
    ]
    try:
        return [*found, recognize_place(workspace)]
    except (UsageError, OSError):
        return found


def recognize_place(given: str) -> ViewedPlace:
    """Return the place at a path or URL. Raises UsageError if there is none."""
    if "://" in given or given.startswith(("sqlite:", "jsonl:")):
        found = address(given)
        if found.engine == "postgresql":
            return ViewedPlace(program=STENOLOG, where=given)
        given = os.fspath(found.path)
    path = Path(given).expanduser().absolute()
    if not path.exists():
        raise UsageError(f"there is no file or folder {given}")
    folders = log_folders(path) if path.is_dir() else []
    if any(_has_logs(path / one) for one in folders) or sqlite_file.is_stenolog_database(path):
        return ViewedPlace(program=STENOLOG, where=str(path))
    # Other programs have a folder called `sessions` too.
    program = detect_program(path) or (STENOLOG if folders else None)
    if program is None:
        known = ", ".join(PROGRAMS)
        raise UsageError(
            f"{given} is neither a stenolog workspace nor transcripts of a known program ({known})"
        )
    return ViewedPlace(program=program, where=str(path))


def _has_logs(folder: Path) -> bool:
    """Return whether the first file with the name of a log is a log of stenolog."""
    for log in filter(Path.is_file, folder.glob(f"*{LOG_SUFFIX}")):
        with log.open("rb") as file:
            return file.read(len(_LOG_START)) == _LOG_START
    return False


def open_places(
    places: Sequence[ViewedPlace],
    *,
    catalog: Path | None,
    on_problem: Callable[[ViewedPlace, Exception], None] | None = None,
) -> CombinedStore:
    """Open places as one store, so that nothing in them changes.

    A place that cannot be opened is left out, and `on_problem` is called. Raises its StenologError
    or OSError if no place can be opened.
    """
    opened: list[StorePlace] = []
    problems: list[Exception] = []
    try:
        prefixes = _prefixes(places)
        # Transcripts without a prefix share one store: their keys differ by program.
        plain = [place for place in places if place.program != STENOLOG and not prefixes[place]]
        if plain:
            opened.append(StorePlace(store=_transcripts(plain)))
        for place in places:
            if place in plain:
                continue
            try:
                opened.extend(_opened(place, prefixes[place]))
            except (StenologError, OSError) as error:
                problems.append(error)
                if on_problem is not None:
                    on_problem(place, error)
    except BaseException:
        for one in opened:
            one.store.close()
        raise
    if problems and not opened:
        raise problems[0]
    return CombinedStore(opened, catalog=catalog)


def open_unchanged(where: str | os.PathLike[str], *, namespace: str) -> Store:
    """Open a store read-only, so that not even a temporary file appears next to it.

    Raises StoreUnavailable.
    """
    found = address(where)
    if found.engine != "sqlite":
        return open_store(where, namespace=namespace, read_only=True)
    from stenolog.stores.sqlite import SQLiteStore

    return SQLiteStore(found.path, namespace=namespace, read_only=True, leave_no_files=True)


def _opened(place: ViewedPlace, prefix: str) -> Iterator[StorePlace]:
    path = Path(place.where)
    if place.program != STENOLOG:
        yield StorePlace(store=_transcripts([place]), prefix=prefix)
    elif path.is_dir():
        for folder in log_folders(path):
            *above, name = folder.split("/")
            if name not in _HIDDEN:
                part = (unescape_key(above[-1]) or "") if above else name
                inner = path.joinpath(*above)
                opened = open_unchanged(inner, namespace=name)
                at = _joined(prefix, part)
                yield StorePlace(store=opened, prefix=at, exists=(inner / name).exists)
    else:
        where = place.where if "://" in place.where else f"sqlite:{place.where}"
        exists = (lambda: True) if "://" in place.where else path.exists
        for name in _namespaces(where):
            part = unescape_key(name.removeprefix(f"{AGENTS}.")) or name
            opened = open_unchanged(where, namespace=name)
            yield StorePlace(store=opened, prefix=_joined(prefix, part), exists=exists)


def _transcripts(places: Sequence[ViewedPlace]) -> TranscriptStore:
    return TranscriptStore([(PROGRAMS[one.program](), Path(one.where)) for one in places])


def _namespaces(where: str) -> list[str]:
    with open_unchanged(where, namespace=NAMESPACE) as store:
        names = store.namespaces() if isinstance(store, NamespacedStore) else []
    return [NAMESPACE, *(name for name in names if name not in (*_HIDDEN, NAMESPACE))]


def _joined(prefix: str, part: str) -> str:
    return prefix if part == NAMESPACE else f"{prefix}{part}/"


def _prefixes(places: Iterable[ViewedPlace]) -> dict[ViewedPlace, str]:
    """Return a prefix for the keys of each place, so that no two places share keys.

    The only place needs none, and transcripts have keys with the name of their program.
    """
    listed = list(dict.fromkeys(places))
    made: dict[ViewedPlace, str] = {}
    for place in listed:
        rivals = [one for one in listed if one is not place and one.program == place.program]
        is_free = len(listed) == 1 or (place.program != STENOLOG and not rivals)
        made[place] = "" if is_free else f"{_label(place, listed)}/"
    return made


def _label(place: ViewedPlace, places: Sequence[ViewedPlace]) -> str:
    """Return a short name of the place, which no other place has."""
    name = _name(place)
    if sum(_name(one) == name for one in places) > 1:
        return f"{name}-{sha256(place.where.encode()).hexdigest()[:6]}"
    return name


def _name(place: ViewedPlace) -> str:
    return place.where.rpartition("/")[2].partition("?")[0] or STENOLOG


# --- the cache -----------------------------------------------------------------------------------

_FOLDER: Final = "view"
_PLACES: Final = ".places"
"""Suffix of the file that lists the places of an index."""
_MAX_AGE: Final = 90 * 86_400
"""Seconds after which an index that was not used is deleted."""


def index_file(places: Sequence[ViewedPlace], cache: Path) -> Path:
    """Return the file of the search index of these places, in a private folder of the cache.

    Deletes indexes of places that no longer exist: an index quotes messages. Raises OSError.
    """
    folder = cache / _FOLDER
    disk.make_private(folder)
    folder.chmod(0o700)
    _delete_old_indexes(folder)
    listed = sorted((place.program, place.where) for place in places)
    name = sha256(repr(listed).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    # Not the URLs of databases, which may contain a password.
    paths = [where for _, where in listed if "://" not in where]
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        disk.replace_file(descriptor, f"{name}{_PLACES}", msgspec.json.encode(paths))
    finally:
        os.close(descriptor)
    return folder / f"{name}.db"


def _delete_old_indexes(folder: Path) -> None:
    for listed in folder.glob(f"*{_PLACES}"):
        try:
            paths = msgspec.json.decode(listed.read_bytes(), type=list[str])
            is_old = time() - listed.stat().st_mtime > _MAX_AGE
        except (OSError, msgspec.DecodeError):
            paths, is_old = [], True
        if is_old or not all(map(os.path.lexists, paths)):
            for file in folder.glob(f"*{listed.name.removesuffix(_PLACES)}.*"):
                file.unlink(missing_ok=True)
