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
    agents_namespace,
    check_workspace,
    find_place,
    log_folders,
)
from stenolog.stores.base import Store
from stenolog.stores.disk import write_problem
from stenolog.stores.file_names import unescape_key
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import Address, address, open_store
from stenolog.stores.snapshots import EmptyStore, NamespacedStore, SharedPlace, SnapshotStore
from stenolog.transfer.comparison import of_many
from stenolog.transfer.copy import (
    CopiedSession,
    CopyTotals,
    Problem,
    Step,
    copy_snapshots,
    preview_copy,
)

Watch = Callable[[str, Step], None]
"""Progress callback: called with the namespace and each step."""

_EMPTY: Final = "memory:"


class CopyReport(Struct, frozen=True, kw_only=True):
    """Result of copying a whole place."""

    namespaces: dict[str, CopyTotals]
    seconds: float
    dry_run: bool = False

    @property
    def sessions(self) -> int:
        """Number of sessions, not deleted, that are equal in the source and the destination."""
        return sum(one.deleted is None for one in self._carried())

    @property
    def deleted(self) -> int:
        """Number of deleted sessions in the trash that are equal in both."""
        return sum(one.deleted is not None for one in self._carried())

    @property
    def not_compared(self) -> int:
        """Number of sessions that are unchanged since an earlier copy and were not read again."""
        return sum(not one.compared for one in self._carried())

    @property
    def written(self) -> int:
        """Number of sessions for which data was written."""
        return sum(one.written for one in self._carried())

    @property
    def messages(self) -> int:
        """Number of messages that were written."""
        return sum(found.messages for found in self.namespaces.values())

    @property
    def digest(self) -> str:
        """One digest of all copied sessions."""
        return of_many(
            (namespace, one.uid, one.digest)
            for namespace, found in self.namespaces.items()
            for one in found.carried
        )

    @property
    def unlocked(self) -> bool:
        """Whether the source could not be locked."""
        return any(found.unlocked for found in self.namespaces.values())

    @property
    def problems(self) -> int:
        """Number of sessions that could not be copied."""
        return sum(len(found.problems) for found in self.namespaces.values())

    def _carried(self) -> Iterator[CopiedSession]:
        for found in self.namespaces.values():
            yield from found.carried


def copy_place(
    source: str, target: str, *, dry_run: bool = False, watch: Watch | None = None
) -> CopyReport:
    """Copy all namespaces of one place to another. Raises as copy_snapshots, and UsageError.

    A namespace that cannot be opened in the destination is reported as a problem; if none can be
    opened, that error is raised.
    """
    check_apart(source, target)
    begun = time.monotonic()
    found = {}
    openings = Openings()
    for name in namespaces_of(source):
        with opened(source, name, source=True) as here:
            opening = _opened_to_look(target, name) if dry_run else opened(target, name)
            with openings.tried(name, opening) as there:
                if there is None:
                    continue
                if dry_run:
                    found[name] = preview_copy(here, there)
                else:
                    found[name] = copy_namespace(here, there, name, watch)
    found |= openings.refused(any_taken=bool(found))
    return CopyReport(namespaces=found, seconds=time.monotonic() - begun, dry_run=dry_run)


class Openings:
    """The namespaces that cannot be opened in a destination while others are copied."""

    def __init__(self) -> None:
        self._errors: dict[str, UsageError | StoreUnavailable] = {}

    @contextmanager
    def tried(
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

    def refused(self, *, any_taken: bool) -> dict[str, CopyTotals]:
        """Return each failure as a problem. If no namespace was opened, raise the first error."""
        if self._errors and not any_taken:
            raise next(iter(self._errors.values()))
        return {
            name: CopyTotals(carried=(), problems=(Problem(key="", uid="", reason=str(error)),))
            for name, error in self._errors.items()
        }


def copy_namespace(
    here: SnapshotStore, there: SnapshotStore, name: str, watch: Watch | None = None
) -> CopyTotals:
    """Copy one namespace, and make processes that use the destination reload its aliases."""
    with alias_looks(here, there):
        return copy_snapshots(
            here, there, progress=None if watch is None else lambda step: watch(name, step)
        )


@contextmanager
def alias_looks(here: SnapshotStore, there: SnapshotStore) -> Iterator[None]:
    """Change the alias marker of the destination, because copied sessions may have aliases."""
    given = isinstance(here, Store) and alias_mark(here) != NO_ALIASES
    if not given or not isinstance(there, Store):
        yield
        return
    prepare_alias_mark(there)
    try:
        yield
    finally:
        change_alias_mark(there)


# --- namespaces ------------------------------------------------------------------------------


def namespaces_of(where: str) -> list[str]:
    """Return the namespaces of a place that have sessions. Raises UsageError, StoreUnavailable."""
    found = address(where)
    if found.engine == "jsonl":
        check_workspace(Path(found.path))
        return [_name_of(where, folder) for folder in log_folders(Path(found.path))]
    with open_store(where, read_only=found.engine != "memory") as store:
        return store.namespaces() if isinstance(store, NamespacedStore) else [NAMESPACE]


def _name_of(where: str, folder: str) -> str:
    *above, name = folder.split("/")
    if not above:
        return name
    agent = unescape_key(above[-1])
    if agent is None or name != NAMESPACE:
        raise UsageError(
            f"{where}: {folder} is in no place that a database has; move it to a folder of its own"
        )
    return agents_namespace(agent)


def check_apart(source: str, target: str) -> None:
    """Raise UsageError if both are the same place, or one of them is a temporary store."""
    if _EMPTY in (source, target):
        raise UsageError("memory: is empty at first and forgotten at the end; name another place")
    here, there = address(source), address(target)
    if here.engine != there.engine:
        return
    if source == target or _is_same(here, there):
        # The message does not name the place: its URL may contain a password.
        raise UsageError("both are the same place; name another one")


def _is_same(here: Address, there: Address) -> bool:
    """Return whether two addresses of one engine refer to the same place."""
    if here.engine == "postgresql":
        return _is_same_database(str(here.path), str(there.path))
    try:
        # By inode, which symlinks, hard links and bind mounts share.
        return Path(here.path).samefile(there.path)
    except OSError:
        return Path(here.path).resolve() == Path(there.path).resolve()


def _is_same_database(source: str, target: str) -> bool:
    try:
        with (
            open_store(source, read_only=True) as here,
            open_store(target, read_only=True) as there,
        ):
            # URLs cannot show it: host names, sockets and poolers may lead to one server.
            return (
                isinstance(here, SharedPlace)
                and isinstance(there, SharedPlace)
                and here.is_same_place(there)
            )
    except StoreUnavailable:
        return False  # not created yet; otherwise opening it for the copy reports the reason


# --- opening ---------------------------------------------------------------------------------


@contextmanager
def opened(where: str, namespace: str, *, source: bool = False) -> Iterator[SnapshotStore]:
    """Open the store of one namespace as the destination or the source of a copy.

    A read-only source is read without its locks. Raises as open_store.
    """
    try:
        store = _open(where, namespace, read_only=source and _is_shut(where))
    except (StoreUnavailable, ReadOnly):
        if not source:
            raise
        store = _open(where, namespace, read_only=True)
    with store:
        yield _whole(store, where)


@contextmanager
def opened_to_read(where: str, namespace: str) -> Iterator[SnapshotStore]:
    """Open the store of one namespace read-only."""
    with _open(where, namespace, read_only=True) as store:
        yield _whole(store, where)


@contextmanager
def _opened_to_look(where: str, namespace: str) -> Iterator[SnapshotStore]:
    """Open a destination read-only; an empty store if it does not exist."""
    try:
        store = _open(where, namespace, read_only=True)
    except EmptyStore:
        store = InMemoryStore()
    except StoreUnavailable:
        if _stands(where, namespace):
            raise
        store = InMemoryStore()
    with store:
        yield _whole(store, where)


def _stands(where: str, namespace: str) -> bool:
    found = address(where)
    path = Path(found.path)
    match found.engine:
        case "jsonl":
            place = find_place(where, _agent(namespace))
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
    place = find_place(where, _agent(namespace))
    return open_store(place.where, namespace=_folder(namespace), read_only=read_only)


def _agent(namespace: str) -> str | None:
    agent = unescape_key(namespace.removeprefix(f"{AGENTS}."))
    return agent if agent is not None and agents_namespace(agent) == namespace else None


def _folder(namespace: str) -> str:
    return namespace if _agent(namespace) is None else NAMESPACE


def _is_shut(where: str) -> bool:
    """Return whether a folder is read-only."""
    found = address(where)
    if found.engine != "jsonl":
        return False
    try:
        return write_problem(Path(found.path)) is not None
    except OSError:
        return False


def _whole(store: Store, where: str) -> SnapshotStore:
    if not isinstance(store, SnapshotStore):
        raise UsageError(f"{address(where).engine}: this engine can be neither copied from nor to")
    return store
