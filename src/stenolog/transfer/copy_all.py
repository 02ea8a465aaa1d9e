"""Copying of all sessions of a place to another place, namespace by namespace.

The sessions of a named agent are `agents/NAME/sessions` in a folder and the namespace `agents.NAME`
in a database; this module uses the latter for both.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Final

from msgspec import Struct

from stenolog.errors import ReadOnly, StoreUnavailable, UsageError
from stenolog.sessions.aliases import NO_ALIASES, alias_mark, change_alias_mark, prepare_alias_mark
from stenolog.sessions.folders import (
    AGENTS,
    NAMESPACE,
    agent_namespace,
    check_workspace,
    locate_sessions,
    log_folders,
)
from stenolog.stores.base import Store
from stenolog.stores.disk import write_problem
from stenolog.stores.file_names import unescape_key
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import Address, address, open_store
from stenolog.stores.snapshots import EmptyStore, NamespacedStore, SharedPlace, SnapshotStore
from stenolog.transfer.comparison import combined_digest
from stenolog.transfer.copy import (
    CopiedSession,
    CopyProblem,
    CopyStep,
    CopyTotals,
    copy_snapshots,
    preview_copy,
)

OnProgress = Callable[[str, CopyStep], None]
"""Progress callback: called with the namespace and each step."""

_TEMPORARY: Final = "memory:"


class CopyReport(Struct, frozen=True, kw_only=True):
    """Result of copying a whole place."""

    namespaces: dict[str, CopyTotals]
    seconds: float
    dry_run: bool = False

    @property
    def sessions(self) -> int:
        """Number of sessions, not deleted, that are equal in the source and the destination."""
        return sum(one.deleted is None for one in self._copied())

    @property
    def deleted(self) -> int:
        """Number of deleted sessions in the trash that are equal in both."""
        return sum(one.deleted is not None for one in self._copied())

    @property
    def not_compared(self) -> int:
        """Number of sessions that are unchanged since an earlier copy and were not read again."""
        return sum(not one.compared for one in self._copied())

    @property
    def written(self) -> int:
        """Number of sessions for which data was written."""
        return sum(one.written for one in self._copied())

    @property
    def messages(self) -> int:
        """Number of messages that were written."""
        return sum(found.messages for found in self.namespaces.values())

    @property
    def digest(self) -> str:
        """One digest of all copied sessions."""
        return combined_digest(
            (namespace, one.uid, one.digest)
            for namespace, found in self.namespaces.items()
            for one in found.copied
        )

    @property
    def unlocked(self) -> bool:
        """Whether the source could not be locked."""
        return any(found.unlocked for found in self.namespaces.values())

    @property
    def problems(self) -> int:
        """Number of sessions that could not be copied."""
        return sum(len(found.problems) for found in self.namespaces.values())

    def _copied(self) -> Iterator[CopiedSession]:
        for found in self.namespaces.values():
            yield from found.copied


def copy_place(
    source: str, target: str, *, dry_run: bool = False, on_progress: OnProgress | None = None
) -> CopyReport:
    """Copy all namespaces of one place to another. Raises as copy_snapshots, and UsageError.

    A namespace that cannot be opened in the destination is reported as a problem; if none can be
    opened, that error is raised.
    """
    check_different_places(source, target)
    started = time.monotonic()
    found = {}
    errors = DestinationErrors()
    for name in namespaces_of(source):
        with opened_store(source, name, source=True) as source_store:
            opening = _opened_for_preview(target, name) if dry_run else opened_store(target, name)
            with errors.attempt(name, opening) as target_store:
                if target_store is None:
                    continue
                if dry_run:
                    found[name] = preview_copy(source_store, target_store)
                else:
                    found[name] = copy_namespace(source_store, target_store, name, on_progress)
    found |= errors.problems_by_namespace(any_opened=bool(found))
    return CopyReport(namespaces=found, seconds=time.monotonic() - started, dry_run=dry_run)


class DestinationErrors:
    """The namespaces that cannot be opened in a destination while others are copied."""

    def __init__(self) -> None:
        self._errors: dict[str, UsageError | StoreUnavailable] = {}

    @contextmanager
    def attempt(
        self, name: str, opening: AbstractContextManager[SnapshotStore]
    ) -> Iterator[SnapshotStore | None]:
        """Yield the store; None if it cannot be opened."""
        with ExitStack() as stack:
            store = None
            try:
                store = stack.enter_context(opening)
            except (UsageError, StoreUnavailable) as error:
                self._errors[name] = error
            yield store

    def problems_by_namespace(self, *, any_opened: bool) -> dict[str, CopyTotals]:
        """Return each failure as a problem. If no namespace was opened, raise the first error."""
        if self._errors and not any_opened:
            raise next(iter(self._errors.values()))
        return {
            name: CopyTotals(copied=(), problems=(CopyProblem(key="", uid="", reason=str(error)),))
            for name, error in self._errors.items()
        }


def copy_namespace(
    source_store: SnapshotStore,
    target_store: SnapshotStore,
    name: str,
    on_progress: OnProgress | None = None,
) -> CopyTotals:
    """Copy one namespace, and make processes that use the destination reload its aliases."""
    with updating_alias_marker(source_store, target_store):
        return copy_snapshots(
            source_store,
            target_store,
            progress=None if on_progress is None else lambda step: on_progress(name, step),
        )


@contextmanager
def updating_alias_marker(
    source_store: SnapshotStore, target_store: SnapshotStore
) -> Iterator[None]:
    """Change the alias marker of the destination, because copied sessions may have aliases."""
    has_aliases = isinstance(source_store, Store) and alias_mark(source_store) != NO_ALIASES
    if not has_aliases or not isinstance(target_store, Store):
        yield
        return
    prepare_alias_mark(target_store)
    try:
        yield
    finally:
        change_alias_mark(target_store)


# --- namespaces ------------------------------------------------------------------------------


def namespaces_of(where: str) -> list[str]:
    """Return the namespaces of a place that have sessions. Raises UsageError, StoreUnavailable."""
    found = address(where)
    if found.engine == "jsonl":
        check_workspace(Path(found.path))
        return [_namespace_of(where, folder) for folder in log_folders(Path(found.path))]
    with open_store(where, read_only=found.engine != "memory") as store:
        return store.namespaces() if isinstance(store, NamespacedStore) else [NAMESPACE]


def _namespace_of(where: str, folder: str) -> str:
    *above, name = folder.split("/")
    if not above:
        return name
    agent = unescape_key(above[-1])
    if agent is None or name != NAMESPACE:
        raise UsageError(
            f"{where}: {folder} has no equivalent in a database; move it to a separate folder"
        )
    return agent_namespace(agent)


def check_different_places(source: str, target: str) -> None:
    """Raise UsageError if both are the same place, or one of them is a temporary store."""
    if _TEMPORARY in (source, target):
        raise UsageError("memory: is a temporary store; give another place")
    source_store, target_store = address(source), address(target)
    if source_store.engine != target_store.engine:
        return
    if source == target or _is_same(source_store, target_store):
        # The message does not name the place: its URL may contain a password.
        raise UsageError("source and destination are the same place; give another one")


def _is_same(source_store: Address, target_store: Address) -> bool:
    """Return whether two addresses of one engine refer to the same place."""
    if source_store.engine == "postgresql":
        return _is_same_database(str(source_store.path), str(target_store.path))
    try:
        # By inode, which symlinks, hard links and bind mounts share.
        return Path(source_store.path).samefile(target_store.path)
    except OSError:
        return Path(source_store.path).resolve() == Path(target_store.path).resolve()


def _is_same_database(source: str, target: str) -> bool:
    try:
        with (
            open_store(source, read_only=True) as source_store,
            open_store(target, read_only=True) as target_store,
        ):
            # URLs cannot show it: host names, sockets and poolers may lead to one server.
            return (
                isinstance(source_store, SharedPlace)
                and isinstance(target_store, SharedPlace)
                and source_store.is_same_place(target_store)
            )
    except StoreUnavailable:
        return False  # not created yet; otherwise opening it for the copy reports the reason


# --- opening ---------------------------------------------------------------------------------


@contextmanager
def opened_store(where: str, namespace: str, *, source: bool = False) -> Iterator[SnapshotStore]:
    """Open the store of one namespace as the destination or the source of a copy.

    A read-only source is read without its locks. Raises as open_store.
    """
    try:
        store = _open(where, namespace, read_only=source and _is_read_only(where))
    except (StoreUnavailable, ReadOnly):
        if not source:
            raise
        store = _open(where, namespace, read_only=True)
    with store:
        yield _as_snapshot_store(store, where)


@contextmanager
def opened_read_only(where: str, namespace: str) -> Iterator[SnapshotStore]:
    """Open the store of one namespace read-only."""
    with _open(where, namespace, read_only=True) as store:
        yield _as_snapshot_store(store, where)


@contextmanager
def _opened_for_preview(where: str, namespace: str) -> Iterator[SnapshotStore]:
    """Open a destination read-only; an empty store if it does not exist."""
    try:
        store = _open(where, namespace, read_only=True)
    except EmptyStore:
        store = InMemoryStore()
    except StoreUnavailable:
        if _exists(where, namespace):
            raise
        store = InMemoryStore()
    with store:
        yield _as_snapshot_store(store, where)


def _exists(where: str, namespace: str) -> bool:
    found = address(where)
    path = Path(found.path)
    match found.engine:
        case "jsonl":
            place = locate_sessions(where, _agent(namespace))
            try:
                return Path(place.where, _folder(namespace)).exists()
            except OSError:
                return True  # unknown, or it cannot be created
        case "sqlite":
            return path.exists()
        case _:
            return True


def _open(where: str, namespace: str, *, read_only: bool) -> Store:
    if address(where).engine != "jsonl":
        return open_store(where, namespace=namespace, read_only=read_only)
    place = locate_sessions(where, _agent(namespace))
    return open_store(place.where, namespace=_folder(namespace), read_only=read_only)


def _agent(namespace: str) -> str | None:
    agent = unescape_key(namespace.removeprefix(f"{AGENTS}."))
    return agent if agent is not None and agent_namespace(agent) == namespace else None


def _folder(namespace: str) -> str:
    return namespace if _agent(namespace) is None else NAMESPACE


def _is_read_only(where: str) -> bool:
    """Return whether a folder is read-only."""
    found = address(where)
    if found.engine != "jsonl":
        return False
    try:
        return write_problem(Path(found.path)) is not None
    except OSError:
        return False


def _as_snapshot_store(store: Store, where: str) -> SnapshotStore:
    if not isinstance(store, SnapshotStore):
        raise UsageError(f"{address(where).engine}: this engine does not support copies")
    return store
