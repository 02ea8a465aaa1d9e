"""The layout of a workspace: its sessions, the sessions of named agents, and other namespaces.

A workspace of files has the folders `sessions`, `agents/NAME/sessions` and any other folder that
contains logs. A database has a namespace for each of these folders.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

from stenolog.errors import UsageError
from stenolog.stores.base import Store
from stenolog.stores.file_names import LOG_SUFFIX, escape_key, unescape_key
from stenolog.stores.jsonl.directory import (
    has_logs,
    is_log,
    log_files,
    store_error,
    system_errors,
)
from stenolog.stores.open_store import check_no_file, open_store, parse_address
from stenolog.stores.sql.store import SQLStore

NAMESPACE: Final = "sessions"
NOTES: Final = "notes"
AGENTS: Final = "agents"
"""Folder that contains a workspace for each named agent."""

FALLBACK: Final = ".fallback"
"""Suffix that the fallback store adds to the name of a folder or a database."""

CHANNELS: Final = "channels"
"""Namespace in which gateways keep the state of chat apps, but no conversations."""

_KNOWN_NAMESPACES: Final = (NAMESPACE, NOTES, CHANNELS)


class SessionsLocation(Struct, frozen=True, kw_only=True):
    """The location of the sessions of an agent."""

    where: str | os.PathLike[str]
    """Argument for `open_store`."""
    namespace: str
    old: Path | None = None
    """Folder that is searched for old sessions."""
    fallback: Path | None = None
    """Workspace of the fallback store, which no other store uses."""
    json_fallback: Path | None = None
    """Folder of JSON files that is used if the fallback store cannot be written."""

    def legacy_folders(self) -> list[tuple[Path, bool]]:
        """Return folders with old sessions, and whether each is the folder of the JSON fallback."""
        if self.old is None or self.json_fallback is None:
            return []
        if self.old == self.json_fallback:
            return [(self.old, True)]
        return [(self.old, False), (self.json_fallback, True)]


class OtherNamespaces(Struct, frozen=True, kw_only=True):
    """Agents and namespaces with sessions besides those that `steno list` shows."""

    agents: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    """Names of other namespaces, except those without conversations, such as the notes."""


def agent_namespace(agent: str) -> str:
    """Return the namespace of an agent's sessions in a database."""
    return f"{AGENTS}.{escape_key(agent)}"


def agent_in_namespace(namespace: str) -> str | None:
    """Return the agent of a namespace in a database; None if it is not an agent's namespace."""
    agent = unescape_key(namespace.removeprefix(f"{AGENTS}."))
    return agent if agent is not None and agent_namespace(agent) == namespace else None


def locate_sessions(where: str | os.PathLike[str], agent: str | None) -> SessionsLocation:
    """Return the location of the sessions of an agent; None is the agent without a name.

    Raises UsageError.
    """
    if agent is not None and (not isinstance(agent, str) or not agent):
        raise UsageError(f"agent must be a name or None, not {agent!r}")
    address = parse_address(where)
    path = Path(address.path)
    namespace = NAMESPACE if agent is None else agent_namespace(agent)
    match address.engine:
        case "jsonl":
            check_no_file(path)
            workspace = path if agent is None else path / AGENTS / escape_key(agent)
            folder = workspace / NAMESPACE
            return SessionsLocation(
                where=workspace,
                namespace=NAMESPACE,
                old=folder,
                # The fallback is in the workspace, because a container may persist nothing else.
                fallback=workspace / f"{NAMESPACE}{FALLBACK}",
                json_fallback=folder,
            )
        case "sqlite":
            suffix = f".{NAMESPACE}" if agent is None else f".{AGENTS}/{escape_key(agent)}"
            fallback = Path(f"{path}{FALLBACK}")  # guard: fallback-folder-per-database
            return SessionsLocation(
                where=where,
                namespace=namespace,
                old=_legacy_folder(path.parent, agent),
                fallback=fallback if agent is None else fallback / AGENTS / escape_key(agent),
                # The folder of the old sessions is not used: other databases and logs may share it.
                json_fallback=Path(f"{path}{suffix}"),
            )
    return SessionsLocation(where=where, namespace=namespace)


def _legacy_folder(folder: Path, agent: str | None) -> Path:
    if agent is not None:
        return folder / AGENTS / escape_key(agent) / NAMESPACE
    # A database may be in the folder of the old sessions itself.
    # A folder with another name is not searched, because its files may belong to any program.
    return folder if folder.name == NAMESPACE else folder / NAMESPACE


def check_workspace(place: Path) -> None:
    """Raise UsageError if `place` cannot be a workspace, StoreUnavailable if it cannot be read.

    A folder without `.jsonl` files may be a new workspace.
    """
    with system_errors(f"looking into {place}"):
        if not place.is_dir():
            check_no_file(place)
            raise UsageError(f"there is no workspace at {place}; check the path")
        names = [entry.name for entry in place.iterdir()]
    log_names = [name for name in names if name.endswith(LOG_SUFFIX)]
    if NAMESPACE not in names and log_names:
        if not any(is_log(str(place / name)) for name in log_names):
            check_stenolog_folder(place)
            return
        name = place.resolve().name
        hint = "" if name == NAMESPACE else f", with --namespace {name}"
        raise UsageError(
            f"{place} contains logs itself; give the workspace, which is its parent folder{hint}"
        )


def check_stenolog_folder(place: Path) -> None:
    """Raise UsageError if a folder is not empty and contains no files of stenolog."""
    with system_errors(f"looking into {place}"):
        folders = _subfolders(place, follow_links=True)
        is_known = any(os.path.lexists(place / name) for name in (NAMESPACE, NOTES, AGENTS))
        if is_known or log_folders(place) or not any(place.iterdir()):
            return
        workspaces = [name for name in folders if (place / name / NAMESPACE).is_dir()]
    suggestion = f"; did you mean {os.path.join(place, workspaces[0])}?" if workspaces else ""  # noqa: PTH118
    raise UsageError(f"there is no stenolog data in {place}{suggestion}")


def log_folders(workspace: Path) -> list[str]:
    """Return every folder of logs, relative to the workspace. Raises StoreUnavailable."""
    try:
        folders = list(_log_folder_names(workspace))
        agents = workspace / AGENTS
        # Links are followed, because the folder of an agent is a workspace, which may be a link.
        for agent in _subfolders(agents, follow_links=True) if agents.is_dir() else ():
            folders += [f"{AGENTS}/{agent}/{name}" for name in _log_folder_names(agents / agent)]
    except OSError as error:
        raise store_error(error, f"looking into {error.filename or workspace}") from error
    return folders


def other_namespaces(where: str | os.PathLike[str]) -> OtherNamespaces:
    """Return the named agents and other namespaces with sessions. Raises errors of open_store."""
    address = parse_address(where)
    match address.engine:
        case "jsonl":
            return _other_namespaces_in_folders(Path(address.path))
        case "sqlite" | "postgresql":
            with open_store(where, read_only=True) as store:
                return _other_namespaces_in_database(store)
        case _:
            return OtherNamespaces()


def _other_namespaces_in_folders(workspace: Path) -> OtherNamespaces:
    agents, namespaces = [], []
    for folder in log_folders(workspace):
        *parents, name = folder.split("/")
        agent = unescape_key(parents[-1]) if parents else None
        if not any(True for _ in log_files(workspace / folder)):
            continue
        if agent is not None and name == NAMESPACE:
            agents.append(agent)
        elif not parents and name not in _KNOWN_NAMESPACES:
            namespaces.append(name)
    return OtherNamespaces(agents=tuple(agents), namespaces=tuple(namespaces))


def _other_namespaces_in_database(store: Store) -> OtherNamespaces:
    assert isinstance(store, SQLStore), "the address names a database"
    names = store.namespaces()
    agents = (agent for name in names if (agent := agent_in_namespace(name)) is not None)
    other_names = (name for name in names if agent_in_namespace(name) is None)
    return OtherNamespaces(
        agents=tuple(agents),
        namespaces=tuple(name for name in other_names if name not in _KNOWN_NAMESPACES),
    )


def _log_folder_names(place: Path) -> Iterator[str]:
    """Yield the name of each folder with logs: `sessions`, and any other folder that has a log."""
    if os.path.lexists(place / NAMESPACE):  # if it is not a folder, the reader reports the error
        yield NAMESPACE
    for name in _subfolders(place, follow_links=False):
        if name != NAMESPACE and _has_logs(place / name, by_name=name == NOTES):
            yield name


def _has_logs(folder: Path, *, by_name: bool) -> bool:
    """Return whether a folder has logs. With `by_name`, an unreadable folder counts, too."""
    try:
        return has_logs(folder, by_name=by_name)
    except OSError:
        return by_name


def _subfolders(place: Path, *, follow_links: bool) -> list[str]:
    with os.scandir(place) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=follow_links))
