"""Finds, recognizes and opens the places that `steno view` shows, without changing them.

A place is a workspace, a SQLite file of stenolog, a PostgreSQL database, or transcripts of a known
program.
"""

import errno
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
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
from stenolog.stores.file_names import unescape_key
from stenolog.stores.jsonl.directory import has_logs
from stenolog.stores.open_store import open_store, parse_address
from stenolog.stores.sql.store import SQLStore
from stenolog.transfer.read_only_stores import CombinedStore, StorePlace, TranscriptStore
from stenolog.transfer.transcripts import sqlite_file
from stenolog.transfer.transcripts.programs import PROGRAMS, detect_program, find_transcripts_path
from stenolog.transfer.transcripts.transcript import printable_path

STENOLOG: Final = "stenolog"
_HIDDEN_NAMESPACES: Final = (NOTES, CHANNELS)
"""Namespaces that contain no conversations."""


class ViewedPlace(Struct, frozen=True, kw_only=True):
    """A place that `steno view` shows."""

    program: str
    """`stenolog`, or the name of the program that wrote the transcripts."""
    where: str
    """Path or URL. Paths are absolute."""


def find_usual_places(workspace: str) -> list[ViewedPlace]:
    """Return the places of known programs that exist on this machine, and the workspace."""
    places = [
        ViewedPlace(program=name, where=str(folder))
        for name in PROGRAMS
        if (folder := find_transcripts_path(name)) is not None
    ]
    try:
        return [*places, recognize_place(workspace)]
    except (UsageError, OSError):
        return places


def recognize_place(where: str) -> ViewedPlace:
    """Return the place at a path or URL. Raises UsageError if no place is recognized."""
    # A path without these characters is no address. An address that is wrong may have a password.
    if ":" in where or "=" in where:
        address = parse_address(where)
        if address.engine == "postgresql":
            return ViewedPlace(program=STENOLOG, where=where)
        if address.engine == "memory":
            raise UsageError("'memory:' is empty; give a folder, a file or a database")
        where = os.fspath(address.path)
    path = Path(where).expanduser().absolute()
    if not path.exists():
        raise UsageError(f"there is no file or folder {where}")
    folders = log_folders(path) if path.is_dir() else []
    has_own_logs = False
    with suppress(OSError):  # opening the place reports the error
        has_own_logs = any(has_logs(path / folder) for folder in folders)
    if has_own_logs or sqlite_file.is_stenolog_database(path):
        return ViewedPlace(program=STENOLOG, where=str(path))
    # A folder `sessions` without our logs may belong to another program.
    program = detect_program(path) or (STENOLOG if folders else None)
    if program is None:
        names = ", ".join(PROGRAMS)
        raise UsageError(
            f"{where} is neither a stenolog workspace nor transcripts of a known program ({names})"
        )
    return ViewedPlace(program=program, where=str(path))


def open_places(
    places: Sequence[ViewedPlace],
    *,
    catalog: Path | None,
    on_problem: Callable[[ViewedPlace, Exception], None] | None = None,
) -> CombinedStore:
    """Open places as one store without changing them.

    `catalog`: file of the search index; None for an index in memory. A place that cannot be opened
    is left out, and `on_problem` is called. If no place can be opened, the first StenologError or
    OSError is raised.
    """
    opened_places: list[StorePlace] = []
    problems: dict[ViewedPlace, Exception] = {}
    try:
        prefixes = _choose_prefixes(places)
        # Transcripts without a prefix share one store: their keys differ by program.
        unprefixed_places = [
            place for place in places if place.program != STENOLOG and not prefixes[place]
        ]
        if unprefixed_places:
            opened_places.append(StorePlace(store=_open_transcripts(unprefixed_places)))
        for place in places:
            # Unreadable transcripts are only reported: they are shown once they are readable.
            if on_problem is not None and place.program != STENOLOG and not _is_readable(place):
                on_problem(place, PermissionError(os.strerror(errno.EACCES)))
            if place in unprefixed_places:
                continue
            try:
                opened_places.extend(_open_place(place, prefixes[place]))
            except (StenologError, OSError) as error:
                problems[place] = error
                if on_problem is not None:
                    on_problem(place, error)
    except BaseException:
        for place_store in opened_places:
            place_store.store.close()
        raise
    if problems and not opened_places:
        raise next(iter(problems.values()))
    unopened = {_printable_name(place): str(error) for place, error in problems.items()}
    return CombinedStore(opened_places, catalog=catalog, unopened=unopened)


def open_unchanged(where: str | os.PathLike[str], *, namespace: str) -> Store:
    """Open a store read-only, without creating any file next to it.

    Raises StoreUnavailable.
    """
    address = parse_address(where)
    if address.engine != "sqlite":
        return open_store(where, namespace=namespace, read_only=True)
    from stenolog.stores.sqlite import SQLiteStore

    return SQLiteStore(address.path, namespace=namespace, read_only=True, leave_no_files=True)


def _open_place(place: ViewedPlace, prefix: str) -> Iterator[StorePlace]:
    path = Path(place.where)
    if place.program != STENOLOG:
        yield StorePlace(store=_open_transcripts([place]), prefix=prefix)
    elif path.is_dir():
        for folder in log_folders(path):
            *parent, name = folder.split("/")
            if name not in _HIDDEN_NAMESPACES:
                agent_or_namespace = (unescape_key(parent[-1]) or "") if parent else name
                yield StorePlace(
                    store=open_unchanged(path.joinpath(*parent), namespace=name),
                    prefix=_join_prefix(prefix, agent_or_namespace),
                    name=str(path / folder),
                    exists=(path / folder).exists,
                )
    else:
        where = place.where if "://" in place.where else f"sqlite:{place.where}"
        exists = (lambda: True) if "://" in place.where else path.exists
        for name in _list_namespaces(where):
            agent_or_namespace = unescape_key(name.removeprefix(f"{AGENTS}.")) or name
            yield StorePlace(
                store=open_unchanged(where, namespace=name),
                prefix=_join_prefix(prefix, agent_or_namespace),
                name=_printable_name(place),
                exists=exists,
            )


def _is_readable(place: ViewedPlace) -> bool:
    try:
        os.close(os.open(place.where, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        return not isinstance(error, PermissionError)
    return True


def _open_transcripts(places: Sequence[ViewedPlace]) -> TranscriptStore:
    return TranscriptStore([(PROGRAMS[place.program](), Path(place.where)) for place in places])


def _list_namespaces(where: str) -> list[str]:
    with open_unchanged(where, namespace=NAMESPACE) as store:
        names = store.namespaces() if isinstance(store, SQLStore) else []
    return [NAMESPACE, *(name for name in names if name not in (*_HIDDEN_NAMESPACES, NAMESPACE))]


def _join_prefix(prefix: str, name: str) -> str:
    return prefix if name == NAMESPACE else f"{prefix}{name}/"


def _choose_prefixes(places: Iterable[ViewedPlace]) -> dict[ViewedPlace, str]:
    """Return a prefix for the keys of each place, so that no two places share keys.

    A single place needs no prefix. The only place with transcripts of a program needs no prefix
    either, because the keys of transcripts contain the name of their program.
    """
    distinct_places = list(dict.fromkeys(places))
    programs = Counter(place.program for place in distinct_places)
    names = Counter(map(_short_name, distinct_places))
    prefixes: dict[ViewedPlace, str] = {}
    for place in distinct_places:
        is_only_of_program = place.program != STENOLOG and programs[place.program] == 1
        name = _short_name(place)
        if len(distinct_places) == 1 or is_only_of_program:
            prefixes[place] = ""
        elif names[name] == 1:
            prefixes[place] = f"{name}/"
        else:
            digest = sha256(os.fsencode(place.where)).hexdigest()
            prefixes[place] = f"{name}-{digest[:6]}/"
    return prefixes


def _printable_name(place: ViewedPlace) -> str:
    """Return the path; for a URL, which may contain a password, only the name of the database."""
    return _short_name(place) if "://" in place.where else printable_path(place.where)


def _short_name(place: ViewedPlace) -> str:
    path = re.sub(r"^\w+://[^/?]*(?:[^?]*@)?([^?]*).*", r"\1", place.where, flags=re.DOTALL)
    return printable_path(path.rpartition("/")[2]) or STENOLOG


# --- the cache -----------------------------------------------------------------------------------

_CACHE_FOLDER: Final = "view"
_PLACES_SUFFIX: Final = ".places"
"""Suffix of the file with the paths of the sessions and transcripts that an index covers."""
_MAX_AGE_SECONDS: Final = 90 * 86_400
"""Seconds after which an unused index is deleted."""


def prepare_index_file(places: Sequence[ViewedPlace], cache_folder: Path) -> Path:
    """Return the file for the search index of these places, in a private folder of the cache.

    Deletes indexes that were not used for 90 days, and indexes of places that no longer exist,
    because an index quotes messages. Raises OSError.
    """
    folder = cache_folder / _CACHE_FOLDER
    disk.create_private_folder(folder)
    folder.chmod(0o700)
    _delete_old_indexes(folder)
    sorted_places = sorted((place.program, place.where) for place in places)
    name = sha256(repr(sorted_places).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    # The list leaves out URLs of databases, because a URL may contain a password.
    paths = [os.fsencode(where) for _, where in sorted_places if "://" not in where]
    list_file, text = folder / f"{name}{_PLACES_SUFFIX}", msgspec.json.encode(paths)
    # The list is written only if it changed: writing takes longer than opening the places.
    if not list_file.exists() or list_file.read_bytes() != text:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with closing(disk.open_descriptor(folder, flags)) as descriptor:
            disk.replace_file(descriptor, list_file.name, text)
    list_file.touch()
    return folder / f"{name}.db"


def _delete_old_indexes(folder: Path) -> None:
    for list_file in folder.glob(f"*{_PLACES_SUFFIX}"):
        try:
            paths = msgspec.json.decode(list_file.read_bytes(), type=list[bytes])
            is_old = time() - list_file.stat().st_mtime > _MAX_AGE_SECONDS
        except (OSError, msgspec.DecodeError):
            paths, is_old = [], True
        if is_old or not all(map(os.path.lexists, paths)):
            for file in folder.glob(f"*{list_file.name.removesuffix(_PLACES_SUFFIX)}.*"):
                file.unlink(missing_ok=True)
