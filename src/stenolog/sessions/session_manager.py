"""SessionManager: picoclaw's legacy sessions, one JSON file per session.

picoclaw keeps sessions in memory until `save`. Here each write replaces the session's file before
the call returns, so that an acknowledged message survives the process (P1).
"""

import hashlib
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Never

from msgspec.structs import replace

from stenolog.codec import check_key
from stenolog.errors import DamagedStore, MaybeStored, NotStored, UsageError
from stenolog.records import CompactionResult, Health
from stenolog.sessions.session_store import JSONLBackend
from stenolog.stores import disk, json_file
from stenolog.stores.in_memory import InMemoryAdmin, InMemoryStore
from stenolog.stores.json_file import JSONSession, file_name
from stenolog.stores.snapshots import SnapshotMark

BUSY_TIMEOUT_SECONDS: Final = 5.0
"""Seconds that a write waits for an import, which locks the folder."""

_logger = logging.getLogger("stenolog")

_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FileVersion = tuple[int, int, int]
"""Version of a file: its inode, size and modification time."""


class _KnownFile(NamedTuple):
    """A file as this process last read or wrote it.

    `key`: key of the session in the file. `is_ours`: whether stenolog wrote the file. `problem`:
    reason why the file is unreadable.
    """

    name: str
    version: _FileVersion
    key: str = ""
    is_ours: bool = False
    problem: str = ""


class SessionManager(JSONLBackend):
    """The SessionStore on JSON files, one per session, for one process.

    The files are read when the SessionManager is created. A write fails if another process has
    changed the session's file since. The calls fork, delete, restore and purge of its `store` raise
    UsageError, and other processes do not see its leases. `because`: reason why this store replaces
    another store; with a reason, `health()` is not ok and reports the reason. `old`: a folder of
    legacy sessions to continue; nothing is written to that folder.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        reason: str | None = None,
        old: str | os.PathLike[str] | None = None,
    ) -> None:
        self.directory = Path(directory)
        old_folder = None if old is None else Path(old)
        super().__init__(SessionManagerStore(self.directory, reason=reason, old=old_folder))

    def __repr__(self) -> str:
        return f"SessionManager({str(self.directory)!r})"


def _refuse(*_arguments: Any, **_options: Any) -> Never:
    raise UsageError(
        "SessionManager keeps sessions as plain JSON files, which cannot be forked, deleted, "
        "restored or purged; a person can delete the file"
    )


class SessionManagerStore(InMemoryStore):
    """A store in memory whose writes return only after the session's JSON file was replaced.

    If a file cannot be written, the session in memory does not change either. The calls that raise
    UsageError are `fork`, `delete`, and in `admin` `delete_unchanged`, `restore`, `purge` and
    `snapshot_writer`. `compact` does nothing. Leases and change markers exist in this process only.
    Reads of one session wait while another thread writes a file.
    """

    def __init__(self, directory: Path, *, reason: str | None, old: Path | None) -> None:
        super().__init__()
        self.directory = directory
        self.reason = reason
        self._known_files: dict[str, _KnownFile] = {}
        """The files of the folders, by path."""
        self._file_sessions: dict[str, JSONSession] = {}
        """Sessions by key, as their files have them."""
        self._folder_problems: list[str] = []
        for path in (old, directory):
            if path is not None:
                self._load_folder(path)
        uids: set[str] = set()
        with super().admin.snapshot_writer() as writer:
            for session in self._file_sessions.values():
                # A copy of a file has the uid of another session.
                snapshot = json_file.snapshot_of(session, new_uid=session.uid in uids)
                uids.add(snapshot.uid)
                writer.write(snapshot, json_file.messages_of(session))

    def __repr__(self) -> str:
        return f"SessionManagerStore({str(self.directory)!r})"

    # --- writing -----------------------------------------------------------------------------

    @contextmanager
    def _session_to_change(self, key: str, *, must_exist: bool = False) -> Iterator[Any]:
        """Yield the session, let the caller change it, and write the session's file."""
        with self._locked_session(key):
            before = self._sessions.get(key)
            if before is not None:
                # The caller changes a copy, which is dropped if the file cannot be written.
                self._sessions[key] = replace(
                    before,
                    messages=dict(before.messages),
                    tokens=dict(before.tokens),
                    undo_steps=before.undo_steps.copy(),
                )
            session = None
            try:
                with super()._session_to_change(key, must_exist=must_exist) as session:
                    yield session
                is_stored = self._sessions.get(key) is session
                if is_stored and (before is None or _version(before) != _version(session)):
                    self._write_session(key)
            except BaseException:
                # While a caller waits for a lease, other threads may replace the session.
                if session is not None and self._sessions.get(key) is session:
                    if before is None:
                        del self._sessions[key]
                    else:
                        self._sessions[key] = before  # guard: manager-memory-follows-file
                raise

    def _write_session(self, key: str) -> None:
        """Replace the session's file. Raises NotStored, MaybeStored, StoreBusy, DamagedStore."""
        session = self._to_file_session(key)
        deadline = time.monotonic() + BUSY_TIMEOUT_SECONDS
        try:
            disk.create_private_folder(self.directory)
            folder = disk.open_descriptor(self.directory, _READ_FLAGS | os.O_DIRECTORY)
            with disk.locked(folder, deadline, f"the folder {self.directory}"):
                self._replace_file(folder, file_name(key), session)
        except OSError as error:
            raise NotStored(f"writing to {self.directory}: {error.strerror}") from error
        self._file_sessions[key] = session

    def _replace_file(self, folder: int, name: str, session: JSONSession) -> None:
        """Write the session to its file. Raises OSError only if nothing was written."""
        key, path = session.key or "", self.directory / name
        old_version, known_file = _find_file_version(folder, name), self._known_files.get(str(path))
        if old_version is not None:
            # guard: manager-is-alone
            if known_file is None or known_file.version != old_version:
                raise NotStored(
                    f"{path} was changed by another process, and only one process can use a "
                    "SessionManager; restart this one, so that it reads the change"
                )
            problem = known_file.problem
            if not problem and known_file.key != key:
                problem = f"the file has the session {known_file.key!r}"
            if problem:
                raise DamagedStore(
                    f"{path}: {problem}; move it away, so that {key!r} can be kept there"
                )
            if not known_file.is_ours:
                content = _read_file(folder, name)
                digest = hashlib.sha256(content).hexdigest()[:8]
                disk.replace_file(folder, f"{name}.{digest}.original", content)
        try:
            disk.replace_file(folder, name, json_file.compose_file(session))
        except OSError as error:
            is_unchanged = _find_file_version(folder, name) == old_version
            failure = NotStored if is_unchanged else MaybeStored
            raise failure(f"writing {path}: {error.strerror}") from error
        finally:
            # The file may have been replaced although the call failed.
            new_version = _find_file_version(folder, name)
            if new_version is not None and new_version != old_version:
                self._known_files[str(path)] = _KnownFile(name, new_version, key, is_ours=True)

    def _to_file_session(self, key: str) -> JSONSession:
        """Return the session as its file is to have it."""
        old = self._file_sessions.get(key) or JSONSession(key=key)
        mark = SnapshotMark(key=key, uid=self._sessions[key].uid)
        with self.admin.read_snapshot(mark, after=len(old.messages)) as reading:
            return json_file.updated_session(old, reading.snapshot, list(reading.messages))

    def _load_folder(self, path: Path) -> None:
        """Read the session files of a folder, and record the files that cannot be read."""
        try:
            files = list(_read_files(path))
        except FileNotFoundError:
            return  # the first write creates the folder
        except OSError as error:
            self._folder_problems.append(f"{path} cannot be read: {error.strerror}")
            _logger.warning("%s", self._folder_problems[-1])
            return
        # If two files have the same key, the file with stenolog's name for that key wins.
        for file, session in sorted(files, key=lambda pair: pair[0].name == file_name(pair[0].key)):
            self._known_files[str(path / file.name)] = file
            # A file that stenolog wrote in the old folder belongs to another store.
            if session is not None and not (session.is_ours and path != self.directory):
                self._file_sessions[file.key] = session

    # --- refused calls -----------------------------------------------------------------------

    fork = delete = _refuse

    @property
    def admin(self) -> "SessionManagerAdmin":
        """The calls that administer the store."""
        return SessionManagerAdmin(self)

    def compact(self, key: str) -> CompactionResult:
        """Do nothing, because a file has no archive."""
        check_key(key)
        return CompactionResult(archived=0, bytes_before=0, bytes_after=0)


class SessionManagerAdmin(InMemoryAdmin):
    """Administration of the sessions of a SessionManager, without trash and purges."""

    _store: SessionManagerStore

    delete_unchanged = restore = purge = snapshot_writer = _refuse

    def health(self) -> Health:
        """Return the health of the folder: its free space and problems."""
        store = self._store
        with store._locked_store():
            files = sorted(store._known_files.items())
        problems = [f"{path}: {file.problem}" for path, file in files if file.problem]
        errors = []
        write_obstacle = why_not_writable(store.directory) if store.reason is not None else None
        if write_obstacle is not None:
            errors.append(
                f"nothing can be stored: the store is unusable ({store.reason}), and so are "
                f"{write_obstacle}"
            )
        elif store.reason is not None:
            errors.append(
                f"sessions are kept as JSON files in {store.directory} for this run, and merged "
                f"when the store can be used again: {store.reason}"
            )
        free_space: int | None = None
        try:
            free_space = shutil.disk_usage(store.directory).free
        except FileNotFoundError:
            pass  # the first write creates the folder
        except OSError as error:
            errors.append(f"looking at {store.directory}: {error.strerror}")
        errors += store._folder_problems
        return Health(ok=not errors, free_bytes=free_space, problems=(*errors, *problems))


def _version(session: Any) -> tuple[int, int]:
    """Return numbers of a session, of which every change increases one."""
    return session.last_seq, session.change_number


# --- system calls ----------------------------------------------------------------------------


def _read_files(path: Path) -> Iterator[tuple[_KnownFile, JSONSession | None]]:
    """Yield the files of a folder that may contain a session, each with its session.

    Raises OSError if the folder cannot be read.
    """
    with disk.open_descriptor(path, _READ_FLAGS | os.O_DIRECTORY) as folder:
        with os.scandir(folder) as entries:
            names = sorted(filter(json_file.is_session_name, (entry.name for entry in entries)))
        for name in names:
            version = _find_file_version(folder, name)
            if version is None:
                continue  # another process has just imported the file
            try:
                session = json_file.parse(_read_file(folder, name))
                key = session.key or name.removesuffix(json_file.SUFFIX)
                check_key(key)
            except (ValueError, UsageError, OSError) as error:
                yield _KnownFile(name, version, problem=str(error)), None
            else:
                yield _KnownFile(name, version, key, session.is_ours), replace(session, key=key)


def _read_file(folder: int, name: str) -> bytes:
    """Return the content of a regular file, following no link. Raises OSError."""
    descriptor = os.open(name, _READ_FLAGS, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{name} is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def _find_file_version(folder: int, name: str) -> _FileVersion | None:
    """Return the current version of a file, or None if it does not exist.

    Returns zeros, which no file has, if the file cannot be examined.
    """
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    except OSError:
        return (0, 0, 0)
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def why_not_writable(directory: Path) -> str | None:
    """Return why no file can be written to a folder; None if it is writable. Creates the folder."""
    files = f"JSON files in {directory}"
    try:
        disk.create_private_folder(directory)
    except OSError as error:
        return f"{files} ({error.strerror})"
    is_writable = os.access(directory, os.W_OK | os.X_OK)
    return None if is_writable else f"{files} (it may not be written)"
