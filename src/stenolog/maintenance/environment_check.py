"""The doctor's checks outside the logs: disk space, catalog, versions, unfinished turns.

Problems that will cause failures are findings. Other facts are notes, which do not change the
doctor's exit code. The checks write nothing.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Final

from msgspec import Struct

from stenolog.catalog import Entry, State, open_catalog
from stenolog.catalog.catalog_database import CatalogDamaged, CatalogUnusable
from stenolog.catalog.catalog_files import FileDatabase
from stenolog.catalog.index import database_of
from stenolog.catalog.indexing import NotIndexable, SessionReader, StampRules
from stenolog.errors import StenologError
from stenolog.sessions.folders import NAMESPACE, SessionsLocation, locate_sessions, other_namespaces
from stenolog.stores.base import Store
from stenolog.stores.catalog_file import CatalogFileStore
from stenolog.stores.disk import kind_at, network_kind
from stenolog.stores.file_names import log_name
from stenolog.stores.findings import Finding
from stenolog.stores.jsonl.directory import LOW_DISK
from stenolog.stores.open_store import address, open_store
from stenolog.transfer.fallback import purged_since

_MOUNTS: Final = "/proc/self/mounts"
_MAX_NAMED: Final = 5
"""Maximum number of sessions that a note names."""
_TEMPORARY_FILESYSTEMS: Final = {
    "tmpfs": "in memory: a restart or a power cut deletes everything",
    "ramfs": "in memory: a restart or a power cut deletes everything",
    "overlay": "in the writable layer of a container: it is deleted with the container",
}


class CheckNote(Struct, frozen=True, kw_only=True):
    """Useful information that is not a fault."""

    kind: str
    """One of: disk, index, version, interrupted turns, turns under way."""
    meaning: str
    advice: str = ""


# --- findings --------------------------------------------------------------------------------


def low_disk(workspace: str, *, least: int = LOW_DISK) -> list[Finding]:
    """Return a finding if fewer than `least` bytes are free on the disk."""
    folder = _folder(workspace)
    if folder is None:
        return []
    try:
        room = os.statvfs(folder)
    except OSError:
        return []  # the examination reports a folder that cannot be read
    free = room.f_bavail * room.f_frsize
    if free >= least:
        return []
    return [
        Finding(
            kind="low disk space",
            path=str(folder),
            meaning=f"Only {free:,} bytes are free. When the disk is full, messages are rejected.",
            advice="Free some space. `steno archive --all` compresses hidden messages.",
        )
    ]


def _folder(workspace: str) -> Path | None:
    """Return the folder that contains the sessions; None if the sessions are not in files."""
    parsed = address(workspace)
    if parsed.engine == "jsonl":
        return Path(parsed.path)
    return Path(parsed.path).absolute().parent if parsed.engine == "sqlite" else None


def unindexed_sessions(workspace: str) -> list[Finding]:
    """Return a finding for each session that the catalog cannot index."""
    findings: list[Finding] = []
    with suppress(StenologError):  # the examination reports why a store cannot be read
        for agent in (None, *other_namespaces(workspace).agents):
            findings += _unindexed_of_agent(workspace, agent)
    return findings


def purged_but_in_fallback(workspace: str) -> list[Finding]:
    """Return a finding for each purged session that the fallback store still contains."""
    findings: list[Finding] = []
    with suppress(StenologError):  # the examination reports why a store cannot be read
        for agent in (None, *other_namespaces(workspace).agents):
            place = locate_sessions(workspace, agent)
            if place.fallback is None or not place.fallback.is_dir():
                continue
            with open_store(place.where, namespace=place.namespace, read_only=True) as store:
                findings += [
                    Finding(
                        kind="purged text",
                        key=key,
                        path=str(place.fallback.absolute() / NAMESPACE),
                        meaning="The session was purged, but the fallback folder still has its "
                        "messages.",
                        advice=f"Run `steno purge {quote(key)} -w {quote(str(place.fallback))}`.",
                    )
                    for key in purged_since(place, store)
                ]
    return findings


def _unindexed_of_agent(workspace: str, agent: str | None) -> Iterator[Finding]:
    place = locate_sessions(workspace, agent)
    in_folder = address(place.where).engine == "jsonl"
    if in_folder and not Path(place.where, place.namespace).is_dir():
        return
    with open_store(place.where, namespace=place.namespace, read_only=True) as store:
        for key, error in not_indexable(store):
            whose = "" if agent is None else f" --agent {quote(agent)}"
            yield Finding(
                kind="not indexed",
                key=key,
                path=_path_of(workspace, place, key) if in_folder else str(workspace),
                meaning=f"`steno list` and `steno search` omit its messages: {error}.",
                advice=f"Save it with `steno export {quote(key)}{whose} --all` and report this "
                "as a defect of stenolog. All other sessions work; deleting this one also ends "
                "the problem.",
            )


def _path_of(workspace: str, place: SessionsLocation, key: str) -> str:
    log = Path(place.where, place.namespace, log_name(key))
    return str(log.relative_to(address(workspace).path))


# --- notes -----------------------------------------------------------------------------------


def check_notes(workspace: str, *, mounts: str = _MOUNTS) -> list[CheckNote]:
    """Return the notes on a workspace or a database.

    `mounts`: the file in which the system lists its file systems.
    """
    notes = list(_disk_notes(workspace, mounts))
    try:
        agents = other_namespaces(workspace).agents
    except StenologError:
        return notes  # the examination reports why the store cannot be read
    for agent in (None, *agents):
        try:
            notes += _session_notes(workspace, agent)
        except StenologError:
            continue
    return [*notes, *_version_notes(workspace)]


def _disk_notes(workspace: str, mounts: str) -> Iterator[CheckNote]:
    folder = _folder(workspace)
    if folder is None:
        return
    try:
        network = network_kind(folder)
        table = Path(mounts).read_text(encoding="utf-8", errors="replace")
        kind = kind_at(str(folder.resolve()), table)
    except OSError:
        return  # only Linux has this list of mounts
    if network:
        yield CheckNote(
            kind="disk",
            meaning=f"{folder} is on a network file system ({network}), whose locks and syncs "
            "cannot be relied on.",
            advice="Use a local disk, or PostgreSQL for many machines.",
        )
    elif kind in _TEMPORARY_FILESYSTEMS:
        yield CheckNote(
            kind="disk",
            meaning=f"{folder} is {_TEMPORARY_FILESYSTEMS[kind]}.",
            advice="Use a disk or a volume for data that must be kept.",
        )


def _session_notes(workspace: str, agent: str | None) -> Iterator[CheckNote]:
    place = locate_sessions(workspace, agent)
    in_folder = address(place.where).engine == "jsonl"
    if in_folder and not Path(place.where, place.namespace).is_dir():
        return
    whose = "" if agent is None else f" of the agent {agent}"
    with open_store(place.where, namespace=place.namespace, read_only=True) as store:
        if isinstance(store, CatalogFileStore) and (path := store.catalog_file()) is not None:
            yield from _catalog_notes(path)
        interrupted = _in_state(store, "interrupted")
        if interrupted:
            yield CheckNote(
                kind="interrupted turns",
                meaning=f"{_sessions(interrupted)}{whose} with an unanswered last "
                f"message: {_keys(interrupted)}.",
                advice="The agent resumes them when it is started. "
                "`steno list --state interrupted` lists them.",
            )
        running = _in_state(store, "running")
        if running:
            yield CheckNote(
                kind="turns under way",
                meaning=f"{_sessions(running)}{whose} with a turn in progress: {_keys(running)}.",
            )


def _catalog_notes(path: Path) -> Iterator[CheckNote]:
    if not path.exists():
        return
    database = FileDatabase(path, writable=False)
    try:
        with database.read():
            pass
    except (CatalogDamaged, CatalogUnusable) as error:
        yield CheckNote(
            kind="index",
            meaning=f"The search index cannot be used: {error}. No messages are lost.",
            advice="The next `steno list` rebuilds it.",
        )
    finally:
        database.close()


def _in_state(store: Store, state: State) -> list[Entry]:
    # If the catalog is out of date, it is updated in memory: the doctor writes nothing.
    with open_catalog(store, keep=False) as catalog:
        return list(catalog.list(state=state, limit=1 << 62).entries)


def _sessions(entries: list[Entry]) -> str:
    return "There is 1 session" if len(entries) == 1 else f"There are {len(entries):,} sessions"


def _keys(entries: list[Entry]) -> str:
    more = f" and {len(entries) - _MAX_NAMED:,} more" if len(entries) > _MAX_NAMED else ""
    return ", ".join(entry.key for entry in entries[:_MAX_NAMED]) + more


def _version_notes(workspace: str) -> Iterator[CheckNote]:
    engine = address(workspace).engine
    if engine == "jsonl":
        yield CheckNote(kind="version", meaning=f"SQLite {sqlite3.sqlite_version}, for the index.")
    elif engine == "sqlite":
        # The driver is optional, and installed if a store of this engine was opened.
        import apsw

        version = f"SQLite {apsw.sqlite_lib_version()}, with apsw {apsw.apsw_version()}."
        yield CheckNote(kind="version", meaning=version)
    elif engine == "postgresql":
        with open_store(workspace, read_only=True) as store:
            from stenolog.stores.postgres import PostgresStore

            assert isinstance(store, PostgresStore), "it is the engine of this place"
            with store.database.read() as transaction:
                [(version,)] = transaction.execute("SELECT current_setting('server_version')")
        yield CheckNote(kind="version", meaning=f"PostgreSQL {version}.")


# --- checking -------------------------------------------------------------------------------------
# The doctor finds sessions that the catalog cannot index, without writing to the catalog.


def not_indexable(store: Store) -> Iterator[tuple[str, NotIndexable]]:
    """Yield the key of each session that cannot be indexed, and the reason.

    Unchanged sessions that the catalog holds without a problem are not read again. Sessions that
    the store itself cannot read are skipped.
    """
    indexed = _indexed_stamps(store)
    reader = SessionReader(store, StampRules())
    for key, stamp in store.stamps().items():
        if indexed.get(key) == stamp:
            continue
        try:
            for _ in reader.steps(key, stamp, None):
                pass
        except NotIndexable as error:
            yield key, error
        except StenologError:
            continue


def _indexed_stamps(store: Store) -> dict[str, str]:
    """Return the stamps of the sessions that the catalog holds without a problem."""
    database = database_of(store, keep=False)
    try:
        with suppress(CatalogDamaged, CatalogUnusable), database.read() as transaction:
            return {key: stamp for key, stamp in transaction.execute(database.sql["sound"])}  # noqa: C416 - rows have any length
    finally:
        database.close()
    return {}
