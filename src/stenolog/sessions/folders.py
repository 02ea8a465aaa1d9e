"""The layout of a workspace: its sessions, those of each named agent, and other namespaces.

In a folder of files they are `sessions`, `agents/NAME/sessions` and any other folder that contains
logs. In a database all of them are namespaces.
"""

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final

from msgspec import Struct

from stenolog.errors import UsageError
from stenolog.stores.base import Store
from stenolog.stores.file_names import LOG_SUFFIX, escape_key, unescape_key
from stenolog.stores.jsonl.directory import TRASH, store_error
from stenolog.stores.open_store import address, check_no_file, open_store
from stenolog.stores.snapshots import NamespacedStore

NAMESPACE: Final = "sessions"
NOTES: Final = "notes"
AGENTS: Final = "agents"
"""Folder that contains a workspace for each named agent."""

FALLBACK: Final = ".fallback"
"""Suffix that the fallback store adds to the name of a folder or a database."""

_RECORD_START: Final = b'{"kind":"'
"""Start of every line of a log."""
CHANNELS: Final = "channels"
"""State of chat apps that gateways keep. It contains no conversations."""

_KNOWN_NAMESPACES: Final = (NAMESPACE, NOTES, CHANNELS)


class SessionsLocation(Struct, frozen=True, kw_only=True):
    """The location of the sessions of an agent."""

    where: str | os.PathLike[str]
    """Argument for `open_store`."""
    namespace: str
    old: Path | None
    """Folder that is searched for old sessions."""
    fallback: Path | None
    """Workspace of the fallback store, used by this store only."""
    json_fallback: Path | None
    """Folder of JSON files that is used if the fallback store cannot be written."""

    def legacy_folders(self) -> list[tuple[Path, bool]]:
        """Return folders with old sessions, and whether JSON files of a fallback there are ours."""
        if self.old is None or self.json_fallback is None:
            return []
        if self.old == self.json_fallback:
            return [(self.old, True)]
        return [(self.old, False), (self.json_fallback, True)]


class OtherNamespaces(Struct, frozen=True, kw_only=True):
    """Agents and namespaces with sessions besides those that `steno list` shows."""

    agents: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    """Without the notes: they are not conversations."""


def agent_namespace(agent: str) -> str:
    """Return the namespace of an agent's sessions in a database."""
    return f"{AGENTS}.{escape_key(agent)}"


def locate_sessions(where: str | os.PathLike[str], agent: str | None) -> SessionsLocation:
    """Return the store and the folders of an agent. Raises UsageError."""
    if agent is not None and (not isinstance(agent, str) or not agent):
        raise UsageError(f"agent must be a name or None, not {agent!r}")
    found = address(where)
    path = Path(found.path)
    match found.engine:
        case "jsonl":
            check_no_file(path)
            workspace = path if agent is None else path / AGENTS / escape_key(agent)
            folder = workspace / NAMESPACE
            return SessionsLocation(
                where=workspace,
                namespace=NAMESPACE,
                old=folder,
                # Inside the workspace, which may be the only volume that outlives a container.
                fallback=workspace / f"{NAMESPACE}{FALLBACK}",
                json_fallback=folder,
            )
        case "sqlite":
            old: Path | None = _legacy_folder(path.parent, agent)
            # Other databases and logs may share the folder of the old sessions.
            suffix = f".{NAMESPACE}" if agent is None else f".{AGENTS}/{escape_key(agent)}"
            json_fallback: Path | None = Path(f"{path}{suffix}")
            fallback_folder = Path(f"{path}{FALLBACK}")  # guard: fallback-folder-per-database
            fallback: Path | None = (
                fallback_folder if agent is None else fallback_folder / AGENTS / escape_key(agent)
            )
        case _:
            old = fallback = json_fallback = None
    namespace = NAMESPACE if agent is None else agent_namespace(agent)
    return SessionsLocation(
        where=where, namespace=namespace, old=old, fallback=fallback, json_fallback=json_fallback
    )


def _legacy_folder(folder: Path, agent: str | None) -> Path:
    if agent is not None:
        return folder / AGENTS / escape_key(agent) / NAMESPACE
    # A database may be in the folder of the old sessions itself. A folder of any other name is not
    # searched, because its files may belong to any program.
    return folder if folder.name == NAMESPACE else folder / NAMESPACE


def check_workspace(place: Path) -> None:
    """Raise UsageError if this is not a workspace, StoreUnavailable if it cannot be read."""
    try:
        if not place.is_dir():
            check_no_file(place)
            raise UsageError(f"there is no workspace at {place}; check the path")
        with os.scandir(place) as entries:
            names = [entry.name for entry in entries]
    except OSError as error:
        raise store_error(error, f"looking into {place}") from error
    if NAMESPACE not in names and any(name.endswith(LOG_SUFFIX) for name in names):
        name = place.resolve().name
        other = "" if name == NAMESPACE else f", with --namespace {name}"
        raise UsageError(
            f"{place} contains logs itself; give the workspace, which is its parent folder{other}"
        )


def check_stenolog_folder(place: Path) -> None:
    """Raise UsageError if a folder is not empty and contains nothing of stenolog."""
    try:
        folders = _folders(place, follow=True)
        is_ours = any(os.path.lexists(place / name) for name in (NAMESPACE, NOTES, AGENTS))
        if is_ours or log_folders(place) or not any(place.iterdir()):
            return
        nested = [name for name in folders if (place / name / NAMESPACE).is_dir()]
    except OSError as error:
        raise store_error(error, f"looking into {place}") from error
    suggestion = f"; did you mean {os.path.join(place, nested[0])}?" if nested else ""  # noqa: PTH118
    raise UsageError(f"there is no stenolog data in {place}{suggestion}")


def log_folders(workspace: Path) -> list[str]:
    """Return every folder of logs as a path below the workspace. Raises StoreUnavailable."""
    try:
        found = list(_namespaces(workspace))
        agents = workspace / AGENTS
        # Each is a workspace, and a workspace may be a link.
        for agent in _folders(agents, follow=True) if agents.is_dir() else ():
            # guard: doctor-reads-agents
            found += [f"{AGENTS}/{agent}/{name}" for name in _namespaces(agents / agent)]
    except OSError as error:
        raise store_error(error, f"looking into {error.filename or workspace}") from error
    return found


def other_namespaces(where: str | os.PathLike[str]) -> OtherNamespaces:
    """Return the agents and namespaces that have sessions. Raises as open_store."""
    found = address(where)
    match found.engine:
        case "jsonl":
            return _other_folders(Path(found.path))
        case "sqlite" | "postgresql":
            with open_store(where, read_only=True) as store:
                return _other_in_database(store)
        case _:
            return OtherNamespaces()


def _other_folders(workspace: Path) -> OtherNamespaces:
    agents, namespaces = [], []
    for folder in log_folders(workspace):
        *above, name = folder.split("/")
        agent = unescape_key(above[-1]) if above else None
        if not any(True for _ in _logs(workspace / folder)):
            continue
        if agent is not None and name == NAMESPACE:
            agents.append(agent)
        elif not above and name not in _KNOWN_NAMESPACES:
            namespaces.append(name)
    return OtherNamespaces(agents=tuple(agents), namespaces=tuple(namespaces))


def _other_in_database(store: Store) -> OtherNamespaces:
    assert isinstance(store, NamespacedStore), "a database has namespaces"
    agents, namespaces = [], []
    for name in store.namespaces():
        agent = unescape_key(name.removeprefix(f"{AGENTS}."))
        if agent is not None and agent_namespace(agent) == name:
            agents.append(agent)
        elif name not in _KNOWN_NAMESPACES:
            namespaces.append(name)
    return OtherNamespaces(agents=tuple(agents), namespaces=tuple(namespaces))


def _namespaces(place: Path) -> Iterator[str]:
    """Yield the folders of logs here. Folders with other names are recognized by their files."""
    if os.path.lexists(place / NAMESPACE):  # also if it is not a folder: its reader reports that
        yield NAMESPACE
    for name in _folders(place, follow=False):
        if name != NAMESPACE and _has_logs(place / name, by_name=name == NOTES):
            yield name


def _has_logs(folder: Path, *, by_name: bool) -> bool:
    try:
        logs = chain(_logs(folder), _logs(folder / TRASH))
        return any(by_name or _is_ours(log) for log in logs)
    except OSError:
        return by_name


def _is_ours(log: Path) -> bool:
    with log.open("rb") as file:
        return file.read(len(_RECORD_START)) == _RECORD_START


def _folders(place: Path, *, follow: bool) -> list[str]:
    with os.scandir(place) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=follow))


def _logs(folder: Path) -> Iterator[Path]:
    if folder.is_dir() and not folder.is_symlink():
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(LOG_SUFFIX) and entry.is_file(follow_symlinks=False):
                    yield folder / entry.name
