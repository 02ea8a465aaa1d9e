"""The doctor's checks outside the logs: disk space, catalog, versions, unfinished turns.

Problems that will cause failures are findings. Other facts are notes, which do not change the
doctor's exit code. The checks write nothing.
"""

import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from shlex import quote
from typing import Final

from msgspec import Struct

from stenolog.catalog import Entry, open_catalog
from stenolog.catalog.catalog_database import CatalogDamaged, CatalogUnusable
from stenolog.catalog.catalog_files import FileDatabase
from stenolog.catalog.index import database_of
from stenolog.catalog.indexing import NotIndexable, SessionReader
from stenolog.errors import StenologError
from stenolog.sessions.folders import locate_sessions, other_namespaces
from stenolog.stores.base import Store
from stenolog.stores.catalog_file import CatalogFileStore
from stenolog.stores.disk import filesystem_type_at, network_filesystem
from stenolog.stores.file_names import log_name
from stenolog.stores.findings import Finding
from stenolog.stores.jsonl.directory import LOW_DISK_BYTES
from stenolog.stores.open_store import open_store, parse_address

_MOUNTS_FILE: Final = "/proc/self/mounts"
_MAX_NAMED_SESSIONS: Final = 5
"""Maximum number of sessions that a note names."""
_TEMPORARY_FILESYSTEMS: Final = {
    "tmpfs": "in memory: a restart or a power cut deletes everything",
    "ramfs": "in memory: a restart or a power cut deletes everything",
    "overlay": "in the writable layer of a container: it is deleted with the container",
}


class CheckNote(Struct, frozen=True, kw_only=True):
    """A fact about a workspace that is not a problem."""

    kind: str
    """One of: disk, index, version, interrupted turns, turns under way."""
    meaning: str
    advice: str = ""


# --- findings --------------------------------------------------------------------------------


def check_disk_space(workspace: str, *, min_bytes: int = LOW_DISK_BYTES) -> list[Finding]:
    """Return a finding if fewer than `min_bytes` bytes are free on the disk."""
    folder = _sessions_folder(workspace)
    try:
        free_bytes = min_bytes if folder is None else shutil.disk_usage(folder).free
    except OSError:
        return []  # `examine` reports a folder that cannot be read
    if free_bytes >= min_bytes:
        return []
    return [
        Finding(
            kind="low disk space",
            path=str(folder),
            meaning=f"Only {free_bytes:,} bytes are free. "
            "When the disk is full, messages are rejected.",
            advice="Free some space. `steno archive --all` compresses hidden messages.",
        )
    ]


def _sessions_folder(workspace: str) -> Path | None:
    """Return the folder of the logs or of the SQLite file; None for other kinds of stores."""
    address = parse_address(workspace)
    if address.engine == "jsonl":
        return Path(address.path)
    return Path(address.path).absolute().parent if address.engine == "sqlite" else None


def check_indexing(workspace: str) -> list[Finding]:
    """Return a finding for each session that the catalog cannot index."""
    findings: list[Finding] = []
    with suppress(StenologError):  # `examine` reports why a store cannot be read
        for agent in (None, *other_namespaces(workspace).agents):
            findings += _check_indexing_of_agent(workspace, agent)
    return findings


def _check_indexing_of_agent(workspace: str, agent: str | None) -> Iterator[Finding]:
    location = locate_sessions(workspace, agent)
    folder = Path(location.where, location.namespace)
    is_jsonl = parse_address(location.where).engine == "jsonl"
    if is_jsonl and not folder.is_dir():
        return
    root = parse_address(workspace).path
    with open_store(location.where, namespace=location.namespace, read_only=True) as store:
        for key, error in find_unindexable_sessions(store):
            agent_option = "" if agent is None else f" --agent {quote(agent)}"
            yield Finding(
                kind="not indexed",
                key=key,
                path=str((folder / log_name(key)).relative_to(root) if is_jsonl else workspace),
                meaning=f"`steno list` and `steno search` do not find its messages: {error}.",
                advice=f"Save the session with `steno export {quote(key)}{agent_option} --all` and "
                "report this as a bug of stenolog. All other sessions work. If you delete this "
                "session, the problem is gone.",
            )


# --- notes -----------------------------------------------------------------------------------


def list_notes(workspace: str, *, mounts: str = _MOUNTS_FILE) -> list[CheckNote]:
    """Return the notes on a workspace or a database.

    `mounts` is the path of the file that lists the mounted file systems.
    """
    notes = list(_disk_notes(workspace, mounts))
    try:
        agents = other_namespaces(workspace).agents
    except StenologError:
        return notes  # `examine` reports why the store cannot be read
    for agent in (None, *agents):
        with suppress(StenologError):
            notes += _session_notes(workspace, agent)
    return [*notes, *_version_notes(workspace)]


def _disk_notes(workspace: str, mounts: str) -> Iterator[CheckNote]:
    folder = _sessions_folder(workspace)
    if folder is None:
        return
    try:
        network_type = network_filesystem(folder)
        mounts_text = Path(mounts).read_text(encoding="utf-8", errors="replace")
        filesystem_type = filesystem_type_at(str(folder.resolve()), mounts_text)
    except OSError:
        return  # only Linux has this list of mounts
    if network_type:
        yield CheckNote(
            kind="disk",
            meaning=f"{folder} is on a network file system ({network_type}), where locks and "
            "syncs are not reliable.",
            advice="Use a local disk, or PostgreSQL for many machines.",
        )
    elif filesystem_type in _TEMPORARY_FILESYSTEMS:
        meaning = f"{folder} is {_TEMPORARY_FILESYSTEMS[filesystem_type]}."
        advice = "Use a disk or a volume for data that must be kept."
        yield CheckNote(kind="disk", meaning=meaning, advice=advice)


def _session_notes(workspace: str, agent: str | None) -> Iterator[CheckNote]:
    location = locate_sessions(workspace, agent)
    is_jsonl = parse_address(location.where).engine == "jsonl"
    if is_jsonl and not Path(location.where, location.namespace).is_dir():
        return
    owner_text = "" if agent is None else f" of the agent {agent}"
    with open_store(location.where, namespace=location.namespace, read_only=True) as store:
        if isinstance(store, CatalogFileStore) and (path := store.catalog_file()) is not None:
            yield from _catalog_notes(path)
        # An outdated catalog is updated only in memory, because the doctor writes nothing.
        with open_catalog(store, keep=False) as catalog:
            interrupted_entries = catalog.list(state="interrupted", limit=1 << 62).entries
            running_entries = catalog.list(state="running", limit=1 << 62).entries
        if interrupted_entries:
            yield CheckNote(
                kind="interrupted turns",
                meaning=_describe_sessions(
                    interrupted_entries, f"{owner_text} with an unanswered last message"
                ),
                advice="An agent resumes only messages that it received itself, not imported or "
                "copied ones. `steno list --state interrupted` lists the sessions.",
            )
        if running_entries:
            meaning = _describe_sessions(running_entries, f"{owner_text} with a turn in progress")
            yield CheckNote(kind="turns under way", meaning=meaning)


def _catalog_notes(path: Path) -> Iterator[CheckNote]:
    if not path.exists():
        return
    try:
        with closing(FileDatabase(path, writable=False)) as database, database.read_transaction():
            pass
    except (CatalogDamaged, CatalogUnusable) as error:
        meaning = f"The search index cannot be used: {error}. No messages are lost."
        advice = "The next `steno list` rebuilds the index."
        yield CheckNote(kind="index", meaning=meaning, advice=advice)


def _describe_sessions(entries: Sequence[Entry], description: str) -> str:
    """Return a sentence with the number of sessions, the description, and the first keys."""
    count = len(entries)
    count_text = "There is 1 session" if count == 1 else f"There are {count:,} sessions"
    keys = ", ".join(entry.key for entry in entries[:_MAX_NAMED_SESSIONS])
    more_text = f" and {count - _MAX_NAMED_SESSIONS:,} more" if count > _MAX_NAMED_SESSIONS else ""
    return f"{count_text}{description}: {keys}{more_text}."


def _version_notes(workspace: str) -> Iterator[CheckNote]:
    engine = parse_address(workspace).engine
    if engine == "jsonl":
        yield CheckNote(kind="version", meaning=f"SQLite {sqlite3.sqlite_version}, for the index.")
    elif engine == "sqlite":
        # The driver is optional. If a store of this engine was opened, the driver is installed.
        import apsw

        version = f"SQLite {apsw.sqlite_lib_version()}, with apsw {apsw.apsw_version()}."
        yield CheckNote(kind="version", meaning=version)
    elif engine == "postgresql":
        with open_store(workspace, read_only=True) as store:
            from stenolog.stores.postgres import PostgresStore

            assert isinstance(store, PostgresStore), "the address names a PostgreSQL database"
            with store.database.read_transaction() as transaction:
                [(version,)] = transaction.execute("SELECT current_setting('server_version')")
        yield CheckNote(kind="version", meaning=f"PostgreSQL {version}.")


# --- sessions that the catalog cannot index --------------------------------------------------


def find_unindexable_sessions(store: Store) -> Iterator[tuple[str, NotIndexable]]:
    """Yield the key of each session that cannot be indexed, and the reason.

    Sessions that are unchanged since the catalog indexed them are not read again.
    Sessions that the store itself cannot read are skipped.
    """
    indexed_stamps = _read_indexed_stamps(store)
    reader = SessionReader(store)
    for key, stamp in store.stamps().items():
        if indexed_stamps.get(key) == stamp:
            continue
        try:
            for _ in reader.steps_to_current(key, stamp, None):
                pass
        except NotIndexable as error:
            yield key, error
        except StenologError:
            continue


def _read_indexed_stamps(store: Store) -> dict[str, str]:
    """Return, by key, the change stamps of sessions that the catalog indexed without a problem."""
    with (
        closing(database_of(store, keep=False)) as database,
        suppress(CatalogDamaged, CatalogUnusable),
        database.read_transaction() as transaction,
    ):
        return {key: stamp for key, stamp in transaction.run("sound")}  # noqa: C416 - rows have any length
    return {}
