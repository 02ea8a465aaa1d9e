"""Copying of all sessions of a workspace or database to another one, namespace by namespace.

A workspace has the sessions of a named agent in the folder `agents/NAME/sessions`. A database has
these sessions in the namespace `agents.NAME`. This module uses the name of the namespace for both.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from msgspec import Struct

from stenolog.errors import StoreUnavailable, UsageError
from stenolog.sessions.aliases import NO_ALIASES, alias_mark, change_alias_mark, prepare_alias_mark
from stenolog.sessions.folders import (
    NAMESPACE,
    agent_in_namespace,
    agent_namespace,
    check_workspace,
    locate_sessions,
    log_folders,
)
from stenolog.stores.base import Store
from stenolog.stores.file_names import unescape_key
from stenolog.stores.open_store import Address, open_store, parse_address
from stenolog.stores.postgres import PostgresStore
from stenolog.stores.sql.store import SQLStore
from stenolog.transfer.copy import (
    CopiedSession,
    CopyProblem,
    CopyStep,
    CopyTotals,
    copy_snapshots,
)

OnProgress = Callable[[str, CopyStep], None]
"""Progress callback: called with the namespace and each step."""


class CopyReport(Struct, frozen=True, kw_only=True):
    """Result of copying all namespaces of a workspace or database."""

    namespaces: dict[str, CopyTotals]
    seconds: float

    @property
    def sessions(self) -> int:
        """Number of live sessions that are equal in the source and the destination."""
        return sum(session.deleted is None for session in self._copied_sessions())

    @property
    def deleted(self) -> int:
        """Number of sessions in the trash that are equal in the source and the destination."""
        return sum(session.deleted is not None for session in self._copied_sessions())

    @property
    def written(self) -> int:
        """Number of sessions for which data was written."""
        return sum(session.written for session in self._copied_sessions())

    @property
    def messages(self) -> int:
        """Number of messages that were written."""
        return sum(totals.messages for totals in self.namespaces.values())

    @property
    def problems(self) -> int:
        """Number of sessions and namespaces that could not be copied."""
        return sum(len(totals.problems) for totals in self.namespaces.values())

    def _copied_sessions(self) -> Iterator[CopiedSession]:
        for totals in self.namespaces.values():
            yield from totals.copied


def copy_place(source: str, target: str, *, on_progress: OnProgress | None = None) -> CopyReport:
    """Copy all namespaces of one workspace or database to another one.

    A namespace that cannot be opened in the destination is reported as a problem. If no namespace
    can be opened, the first error is raised. Raises UsageError and the errors of `copy_snapshots`.
    """
    check_different_places(source, target)
    started_at = time.monotonic()
    copied_totals: dict[str, CopyTotals] = {}
    errors: dict[str, UsageError | StoreUnavailable] = {}
    for name in list_namespaces(source):
        with _open_namespace(source, name, read_only=True) as source_store, ExitStack() as stack:
            try:
                target_store = stack.enter_context(_open_namespace(target, name))
            except (UsageError, StoreUnavailable) as error:
                errors[name] = error
                continue
            if alias_mark(source_store) != NO_ALIASES:
                # The new mark makes processes that use the destination reload the aliases.
                prepare_alias_mark(target_store)
                stack.callback(change_alias_mark, target_store)
            progress = None if on_progress is None else partial(on_progress, name)
            copied_totals[name] = copy_snapshots(source_store, target_store, progress=progress)
    if errors and not copied_totals:
        raise next(iter(errors.values()))
    failed_totals = {
        name: CopyTotals(copied=(), problems=(CopyProblem(key="", uid="", reason=str(error)),))
        for name, error in errors.items()
    }
    seconds = time.monotonic() - started_at
    return CopyReport(namespaces=copied_totals | failed_totals, seconds=seconds)


# --- namespaces ------------------------------------------------------------------------------


def list_namespaces(where: str) -> list[str]:
    """Return the namespaces of a place that have sessions. Raises UsageError, StoreUnavailable."""
    address = parse_address(where)
    if address.engine == "jsonl":
        check_workspace(Path(address.path))
        return [_folder_to_namespace(where, folder) for folder in log_folders(Path(address.path))]
    with open_store(where, read_only=address.engine != "memory") as store:
        return store.namespaces() if isinstance(store, SQLStore) else [NAMESPACE]


def _folder_to_namespace(where: str, folder: str) -> str:
    *parent, name = folder.split("/")
    if not parent:
        return name
    agent = unescape_key(parent[-1])
    if agent is None or name != NAMESPACE:
        raise UsageError(
            f"{where}: {folder} has no equivalent in a database; move it to a separate folder"
        )
    return agent_namespace(agent)


def check_different_places(source: str, target: str) -> None:
    """Raise UsageError if source and target are the same place, or one is a temporary store."""
    if "memory:" in (source, target):
        raise UsageError("'memory:' is a temporary store; give another place")
    source_address, target_address = parse_address(source), parse_address(target)
    if source_address.engine != target_address.engine:
        return
    if source == target or _is_same_place(source_address, target_address):
        # The message does not contain the address, because a URL may contain a password.
        raise UsageError("source and destination are the same place; give another one")


def _is_same_place(source: Address, target: Address) -> bool:
    """Return whether two addresses of one engine refer to the same place."""
    if source.engine == "postgresql":
        return _is_same_database(str(source.path), str(target.path))
    try:
        # Inodes are compared: one inode can have several paths (symlinks, hard links, bind mounts).
        return Path(source.path).samefile(target.path)
    except OSError:
        return Path(source.path).resolve() == Path(target.path).resolve()


def _is_same_database(source: str, target: str) -> bool:
    try:
        with (
            open_store(source, read_only=True) as source_store,
            open_store(target, read_only=True) as target_store,
        ):
            assert isinstance(source_store, PostgresStore), (
                "the address names a PostgreSQL database"
            )
            assert isinstance(target_store, PostgresStore), (
                "the address names a PostgreSQL database"
            )
            # Different URLs may lead to the same server, for example through a socket or a pooler.
            return source_store.is_same_place(target_store)
    except StoreUnavailable:
        return False  # the database is missing, or the copy will report the problem


# --- opening ---------------------------------------------------------------------------------


def _open_namespace(where: str, namespace: str, *, read_only: bool = False) -> Store:
    if parse_address(where).engine != "jsonl":
        return open_store(where, namespace=namespace, read_only=read_only)
    agent = agent_in_namespace(namespace)
    folder = namespace if agent is None else NAMESPACE
    return open_store(locate_sessions(where, agent).where, namespace=folder, read_only=read_only)
