"""SessionManager: the legacy store, which keeps each session as one JSON file.

The store of picoclaw keeps sessions in memory until `save`. In this module, every write rewrites
the session's file before it returns, so that an acknowledged message survives the process (P1). A
process locks the folder during a write, and first reads the changes of other processes.
"""

import copy
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial, wraps
from hashlib import sha256
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any, Concatenate, Final, NamedTuple, Never, ParamSpec, Self, TypeVar

from msgspec import Raw
from msgspec.structs import replace

from stenolog.codec import check_key, check_once, check_times
from stenolog.errors import DamagedStore, LeaseLost, StoreClosed, StoreUnavailable, UsageError
from stenolog.records import Compacted, Health, Message, Purged, Span, Trashed, Undone, timestamp
from stenolog.sessions.session_store import JSONLBackend
from stenolog.stores import disk, json_file, spans
from stenolog.stores.arguments import check_count, check_int, encode_messages
from stenolog.stores.base import SessionView, find_info
from stenolog.stores.following import NewMessages, poll_messages
from stenolog.stores.in_memory import InMemoryLease, InMemoryStore
from stenolog.stores.json_file import JSONMessage, JSONSession, file_name
from stenolog.stores.locks import ThreadLock
from stenolog.stores.snapshots import Snapshot, token_of

BUSY_TIMEOUT: Final = 5.0
_POLL_SECONDS: Final = 0.2
"""Seconds between two checks for messages of other processes."""

P = ParamSpec("P")
T = TypeVar("T")

_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FileVersion = tuple[int, int, int]
"""Version of a file: its inode, size and modification time."""


class _KnownFile(NamedTuple):
    """A file as this process last read or wrote it.

    `key`: key of the session in the file. `is_ours`: whether stenolog wrote the file. `problem`:
    reason why the file is unreadable.
    """

    version: _FileVersion
    key: str = ""
    is_ours: bool = False
    problem: str = ""


class _KnownSession(NamedTuple):
    """The last known content of a session, and how many of its changes this process has seen.

    `rewrites` counts the changes that did more than append messages.
    """

    session: JSONSession
    changes: int = 0
    rewrites: int = 0


class SessionManager(JSONLBackend):
    """The SessionStore on JSON files, one per session.

    The calls undo, fork, delete, restore and purge of its `store` raise UsageError. Meta and leases
    are kept for this process only. `because`: reason why this store replaces another store; with a
    reason, `health()` is not ok and reports the reason. `old`: a folder of legacy sessions to
    continue; nothing is written to that folder.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        because: str | None = None,
        old: str | os.PathLike[str] | None = None,
    ) -> None:
        self.directory = Path(directory)
        self._files = JSONFileStore(
            self.directory, because=because, old=None if old is None else Path(old)
        )
        super().__init__(self._files)
        self._read("opening", None, self._files.list_sessions, default=list[str]())

    def __repr__(self) -> str:
        return f"SessionManager({str(self.directory)!r})"

    def save(self, key: str) -> None:
        """Write the file again if it was removed; every earlier write is already on disk.

        Raises an error if writing the file fails.
        """
        self._files.save(key)


def _write_method(
    method: Callable[Concatenate[InMemoryStore, P], T],
) -> "Callable[Concatenate[JSONFileStore, P], T]":
    """Return a method that runs `method` in memory and writes the changed file."""

    @wraps(method)
    def call(self: "JSONFileStore", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._change_session(
            _first_argument(*args, **kwargs), lambda memory: method(memory, *args, **kwargs)
        )

    return call


def _read_method(
    method: Callable[Concatenate[InMemoryStore, P], T],
) -> "Callable[Concatenate[JSONFileStore, P], T]":
    """Return a method that runs `method` in memory, on the content of the file."""

    @wraps(method)
    def call(self: "JSONFileStore", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self._memory_of(_first_argument(*args, **kwargs)), *args, **kwargs)

    return call


def _first_argument(key: Any, *_: object, **__: object) -> str:
    """Return the first argument of a call, which is the key of the session."""
    check_key(key)
    return str(key)


class JSONFileStore:
    """A Store on JSON files. Calls that JSON files cannot support raise UsageError.

    Each call is made in memory, on the current content of the file.
    """

    def __init__(self, directory: Path, *, because: str | None, old: Path | None) -> None:
        self.directory = directory
        self.because = because
        self._old = old
        self._mutex = ThreadLock()
        self._closed = Event()
        self._lease: InMemoryLease | None = None
        self._local = InMemoryStore()
        """Meta, markers and leases of this process, by the key of the session."""
        self._sessions: dict[str, _KnownSession] = {}
        self._known_files: dict[str, _KnownFile] = {}
        """The files of the folder by name, and the files of the old folder by path."""

    def __repr__(self) -> str:
        return f"JSONFileStore({str(self.directory)!r})"

    # --- writing -----------------------------------------------------------------------------

    def add_messages(
        self,
        key: str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        once: str | None = None,
        at: Sequence[datetime] | None = None,
    ) -> list[int]:
        """Append a batch atomically and return its seqs."""
        check_once(once)
        new_messages = [
            Message(seq=1, _at="", _body=Raw(payload)) for payload in encode_messages(messages)
        ]
        if at is not None:
            check_times(at, len(new_messages))
        times = at or [datetime.now(UTC)] * len(new_messages)

        def add(memory: InMemoryStore) -> list[int]:
            # A file has an idempotency key for each message, and none for a batch.
            tokens = [
                f"{once}:{number}" if once is not None and len(new_messages) > 1 else once
                for number in range(len(new_messages))
            ]
            return [
                memory.add_messages(key, [message], once=token, at=[moment])[0]
                for message, token, moment in zip(new_messages, tokens, times, strict=True)
            ]

        return self._change_session(key, add)

    def add_message(self, key: str, role: str, content: Any, *, once: str | None = None) -> int:
        """Append `{"role": role, "content": content}` and return its seq."""
        return self.add_messages(key, [{"role": role, "content": content}], once=once)[0]

    def add_full_message(
        self, key: str, message: Message | Mapping[str, Any], *, once: str | None = None
    ) -> int:
        """Append one message and return its seq."""
        return self.add_messages(key, [message], once=once)[0]

    set_summary = _write_method(InMemoryStore.set_summary)
    set_history = _write_method(InMemoryStore.set_history)
    truncate_history = _write_method(InMemoryStore.truncate_history)
    checkpoint = _write_method(InMemoryStore.checkpoint)
    clear = _write_method(InMemoryStore.clear)
    hide = _write_method(InMemoryStore.hide)
    pop = _write_method(InMemoryStore.pop)

    def set_meta(self, key: str, /, **fields: Any) -> None:
        """Set fields of meta, for this process only; None removes a field."""
        self._check_writable()
        self._local.set_meta(key, **fields)

    def compact(self, key: str) -> Compacted:
        """Do nothing: a file has no archive."""
        check_key(key)
        return Compacted(archived=0, bytes_before=0, bytes_after=0)

    def save(self, key: str) -> None:
        """Write the file of a session again if it was removed."""
        check_key(key)
        with self._lock_folder() as folder:
            session = self._current_session(folder, key)
            if session.is_ours and _file_version(folder, file_name(key)) is None:
                self._write_file(folder, session)

    def _change_session(self, key: str, call: Callable[[InMemoryStore], T]) -> T:
        """Run a call in memory, and write the session's file before the change is visible."""
        check_key(key)
        self._check_writable()
        with self._lock_folder() as folder:
            before = self._current_session(folder, key)
            memory = self._in_memory(key, before)
            result = call(memory)
            after = _session_from_memory(before, memory)
            if after != before:
                self._write_file(folder, after)
            return result

    def _check_writable(self) -> None:
        self._check_open()
        if self._lease is not None and self._lease.taken_over:
            raise LeaseLost(self._lease.key, self._lease.epoch)

    def _write_file(self, folder: int, session: JSONSession) -> None:
        key = session.key or ""
        name = file_name(key)
        known_file = self._known_files.get(name)
        if known_file is not None and known_file.problem:
            raise DamagedStore(
                f"{self.directory / name}: {known_file.problem}; move it away, so that {key!r} "
                "can be kept there"
            )
        now = datetime.now(UTC)
        if not session.is_ours:
            session = replace(
                session,
                is_ours=True,
                created=session.created or now,
                first_summary=self._last_known(key).summary,
            )
        session = replace(session, updated=now)
        try:
            self._keep_foreign_file(folder, name, key)
            disk.replace_file(folder, name, json_file.compose_file(session))
        except OSError as error:
            # The rename may have succeeded although the last sync failed, so read the file again.
            self._known_files.pop(name, None)
            raise StoreUnavailable(f"writing {self.directory / name}: {error.strerror}") from error
        self._remember_session(key, session)
        version = _file_version(folder, name) or (0, 0, 0)
        self._known_files[name] = _KnownFile(version, key, is_ours=True)

    def _keep_foreign_file(self, folder: int, name: str, key: str) -> None:
        """Keep a file of picoclaw under another name if it has the name of our file.

        If both files have the same session, our file contains the whole session. If picoclaw uses
        the same name for another session, the renamed file still counts as a session file.
        """
        known_file = self._known_files.get(name)
        is_same_session = known_file is None or known_file.key == key
        is_ours = known_file is not None and known_file.is_ours and is_same_session
        if not is_ours and _file_version(folder, name) is not None:
            _keep_copy(folder, name, ".original" if is_same_session else json_file.SUFFIX)

    # --- unsupported calls -------------------------------------------------------------------

    def undo(self, key: str, *, answered: Span | None = None) -> Undone:
        """Raise UsageError: there are no undo steps."""
        del answered
        _raise_unsupported("undo", key)

    def fork(self, key: str, new_key: str, *, at: int | None = None) -> None:
        """Raise UsageError."""
        del new_key, at
        _raise_unsupported("fork", key)

    def delete(self, key: str) -> Trashed:
        """Delete a session that has only meta; raise UsageError for any other session."""
        if not _is_empty(self._session_of(key)):
            _raise_unsupported("delete", key)
        return self._local.delete(key)

    def restore(self, key: str, *, uid: str | None = None, as_key: str | None = None) -> None:
        """Raise UsageError."""
        del uid, as_key
        _raise_unsupported("restore", key)

    def list_trash(self) -> list[Trashed]:
        """Return an empty list."""
        self._check_open()
        return []

    def purge(self, key: str, *, before: int | None = None) -> Purged:
        """Raise UsageError: delete the file by hand."""
        del before
        _raise_unsupported("purge", key)

    # --- reading -----------------------------------------------------------------------------

    get_history = _read_method(InMemoryStore.get_history)
    get_summary = _read_method(InMemoryStore.get_summary)
    info = _read_method(InMemoryStore.info)
    view = _read_method(InMemoryStore.view)

    def _in_memory(self, key: str, session: JSONSession) -> InMemoryStore:
        """Return a store in memory that has only this session."""
        memory = InMemoryStore()
        local_info = find_info(self._local, key)
        meta = {} if local_info is None else dict(local_info.meta)
        change_number = self._sessions[key].rewrites if key in self._sessions else 0
        if local_info is not None:
            change_number += local_info.change
        if _is_empty(session) and not meta:
            return memory
        times = [message.at for message in session.messages if message.at is not None]
        created = session.created or min(times, default=None)
        floor = session.floor()
        hidden_seqs = [seq for seq, message in enumerate(session.messages, 1) if message.hidden]
        snapshot = Snapshot(
            key=key,
            uid=_make_uid(key),
            created=_stored_time(created),
            updated=_stored_time(session.updated or max(times, default=created)),
            last_seq=len(session.messages),
            floor=floor,
            hidden=spans.union((seq, seq) for seq in hidden_seqs if seq > floor),
            number=change_number,
            summary=session.summary,
            meta=meta,
        )
        messages = [
            Message(
                seq=seq,
                _at=_stored_time(message.at or session.created),
                _body=Raw(message.payload),
                _once=message.once,
            )
            for seq, message in enumerate(session.messages, 1)
        ]
        with memory.snapshot_writer() as writer:
            writer.write(snapshot, messages)
        return memory

    def refresh(self, view: SessionView) -> SessionView:
        """Return a new full view of the session."""
        return self.view(view.key, view.last)

    def list_sessions(
        self, *, prefix: str = "", limit: int | None = None, after: str | None = None
    ) -> list[str]:
        """Return a page of keys in order."""
        check_count(limit=limit)
        self._load_all()
        keys = sorted(key for key in self._sessions if key.startswith(prefix))
        return [key for key in keys if after is None or key > after][:limit]

    def stamps(self) -> dict[str, str]:
        """Return a stamp for each session: a text that changes with every change of the session."""
        self._load_all()
        local = self._local.stamps()
        return {
            key: f"{known.changes}:{local.get(key, '')}" for key, known in self._sessions.items()
        }

    def follow(
        self, key: str, *, after: int = 0, uid: str | None = None, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield each message with a seq greater than `after` once, in order, as it arrives."""
        check_int(after=after)
        check_key(key)
        self._check_open()
        ask = partial(self._new_messages, key)
        return poll_messages(
            ask, self._closed.wait, key, after=after, uid=uid, timeout=timeout, poll=_POLL_SECONDS
        )

    def _new_messages(self, key: str, after: int) -> NewMessages | None:
        session = self._session_of(key)
        if _is_empty(session):
            return None
        return _make_uid(key), len(session.messages), self.get_history(key, after=after, full=True)

    # --- leases, markers, health -------------------------------------------------------------

    def lease(self, key: str, *, ttl: float, wait: float | None = None) -> "ManagerLease":
        """Acquire the lease of this session among the threads of this process."""
        self.info(key)
        self._local.set_summary(key, "leased")  # creates the session in `_local`
        return ManagerLease(self._local.lease(key, ttl=ttl, wait=wait), self)

    def _with_lease(self, lease: InMemoryLease) -> "JSONFileStore":
        leased_store = copy.copy(self)
        leased_store._lease = lease
        return leased_store

    def read_marker(self, name: str) -> str:
        """Return the change marker of this name in this process."""
        return self._local.read_marker(name)

    def update_marker(self, name: str) -> None:
        """Update the change marker of this name in this process."""
        self._local.update_marker(name)

    def health(self) -> Health:
        """Return the health of the folder: its free space and problems."""
        self._check_open()
        files = sorted(self._known_files.items())
        problems = [f"{name}: {file.problem}" for name, file in files if file.problem]
        errors = []
        not_writable = why_not_writable(self.directory) if self.because is not None else None
        if not_writable is not None:
            errors.append(
                f"nothing can be stored: the store is unusable ({self.because}), and so are "
                f"{not_writable}"
            )
        elif self.because is not None:
            errors.append(
                f"sessions are kept as JSON files in {self.directory} for this run, and merged "
                f"when the store can be used again: {self.because}"
            )
        free_space: int | None = None
        try:
            filesystem = os.statvfs(self.directory)
            free_space = filesystem.f_bavail * filesystem.f_frsize
        except FileNotFoundError:
            pass  # the first write creates the folder
        except OSError as error:
            errors.append(f"looking at {self.directory}: {error.strerror}")
        return Health(ok=not errors, free_bytes=free_space, problems=(*errors, *problems))

    def close(self) -> None:
        """Release all resources; a second call does nothing."""
        with self._mutex:
            self._closed.set()
            self._local.close()
            self._sessions.clear()
            self._known_files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- the files ---------------------------------------------------------------------------

    @contextmanager
    def _lock_folder(self) -> Iterator[int]:
        """Yield a descriptor of the folder, locked against other threads and processes."""
        with self._mutex:
            self._check_open()
            try:
                disk.create_private_folder(self.directory)
            except OSError as error:
                raise StoreUnavailable(f"making {self.directory}: {error.strerror}") from error
            with self._open_folder() as folder:
                label = f"the folder {self.directory}"
                disk.wait_for_lock(folder, seconds=BUSY_TIMEOUT, name=label)
                try:
                    yield folder
                finally:
                    disk.release_lock(folder)

    @contextmanager
    def _open_folder(self, path: Path | None = None) -> Iterator[int]:
        """Yield a descriptor of the folder `path`, by default the folder of this store.

        Raises FileNotFoundError, StoreUnavailable.
        """
        # The folder is opened each time: a forked child that inherits a descriptor shares its lock.
        path = path or self.directory
        try:
            folder = os.open(path, _READ_FLAGS | os.O_DIRECTORY)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreUnavailable(f"opening {path}: {error.strerror}") from error
        try:
            yield folder
        finally:
            os.close(folder)

    def _remember_session(self, key: str, session: JSONSession) -> None:
        before = self._sessions.get(key) or _KnownSession(JSONSession(key=key))
        is_rewrite = key in self._sessions and not _has_only_appended(before.session, session)
        self._sessions[key] = _KnownSession(
            session, before.changes + 1, before.rewrites + is_rewrite
        )

    def _last_known(self, key: str) -> JSONSession:
        known_session = self._sessions.get(key)
        return JSONSession(key=key) if known_session is None else known_session.session

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise StoreClosed("the store is closed")

    def _session_of(self, key: str) -> JSONSession:
        check_key(key)
        with self._mutex:
            self._check_open()
            with suppress(FileNotFoundError), self._open_folder() as folder:
                self._current_session(folder, key)
            return self._last_known(key)

    def _memory_of(self, key: str) -> InMemoryStore:
        """Return a store in memory with the current content of a session's file."""
        with self._mutex:
            return self._in_memory(key, self._session_of(key))

    def _current_session(self, folder: int, key: str) -> JSONSession:
        """Return the session from its file if another process changed the file, else from memory.

        If the file is gone, another process imported it, and the content in memory is still valid.
        """
        self._load_changed(folder, file_name(key))
        return self._last_known(key)

    def _load_all(self) -> None:
        """Load all new or changed files."""
        with self._mutex:
            self._check_open()
            with suppress(FileNotFoundError), self._open_folder() as folder:
                for name in _session_names(folder):
                    self._load_changed(folder, name)
            if self._old is not None:
                with suppress(FileNotFoundError), self._open_folder(self._old) as folder:
                    for name in _session_names(folder):
                        self._load_old(folder, name, str(self._old / name))

    def _load_changed(self, folder: int, name: str) -> None:
        """Load a file that changed.

        If two files have the same key, the file with stenolog's name for that key counts.
        """
        session = self._changed_session(folder, name, name)
        if session is None:
            return
        key = session.key or ""
        if file_name(key) == name or key not in self._sessions:
            self._remember_session(key, session)

    def _load_old(self, folder: int, name: str, path: str) -> None:
        """Load a file of the old folder, unless stenolog wrote it for another store."""
        session = self._changed_session(folder, name, path)
        if session is not None and not session.is_ours:
            key = session.key or ""
            if key not in self._sessions:
                self._remember_session(key, session)

    def _changed_session(self, folder: int, name: str, known_key: str) -> JSONSession | None:
        """Return the session in a changed file; None if the file is unchanged or missing.

        `known_key`: the key of the file in `_known_files`.
        """
        version = _file_version(folder, name)
        known_file = self._known_files.get(known_key)
        if version is None or (known_file is not None and version == known_file.version):
            return None
        try:
            session = json_file.parse(_read_file(folder, name))
            key = session.key or name.removesuffix(json_file.SUFFIX)
            check_key(key)
        except (ValueError, UsageError, OSError) as error:
            self._known_files[known_key] = _KnownFile(version, problem=str(error))
            return None
        self._known_files[known_key] = _KnownFile(version, key, session.is_ours)
        return replace(session, key=key)


class ManagerLease:
    """The lease of a session that is stored as a JSON file."""

    def __init__(self, lease: InMemoryLease, files: JSONFileStore) -> None:
        self._lease = lease
        self.key = lease.key
        self.epoch = lease.epoch
        self.store = files._with_lease(lease)

    @property
    def lost(self) -> bool:
        """Whether the lease was released, has expired, or was taken over."""
        return self._lease.lost

    def renew(self) -> None:
        """Extend the lease by its ttl from now. Raises LeaseLost."""
        self._lease.renew()

    def release(self) -> None:
        """Release the lease for the next holder."""
        self._lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _raise_unsupported(call: str, key: str) -> Never:
    check_key(key)
    raise UsageError(
        f"{call} is not available here: SessionManager keeps sessions as plain JSON files"
    )


def _session_from_memory(session: JSONSession, memory: InMemoryStore) -> JSONSession:
    """Return a session with the changes that a call made in memory."""
    key, last = session.key or "", len(session.messages)
    tokens: dict[int, str] = {}
    for snapshot in memory.list_snapshots():
        with memory.read_snapshot(snapshot, after=last) as reading:
            tokens = {new.seq: token[0] for new in reading.messages if (token := token_of(new))}
    history = memory.get_history(key, full=True)
    old_messages = [
        replace(old, hidden=current.hidden)
        for old, current in zip(session.messages, history, strict=False)
    ]
    new_messages = [
        # By the idempotency key, a later import recognizes messages that it has already imported.
        JSONMessage(
            new.to_json(), new.at, tokens.get(new.seq) or f"json:{os.urandom(10).hex()}", new.hidden
        )
        for new in history[last:]
    ]
    messages = (*old_messages, *new_messages)
    return replace(session, messages=messages, summary=memory.get_summary(key))


def _has_only_appended(old_session: JSONSession, new_session: JSONSession) -> bool:
    """Return whether a session has changed only by added messages."""
    kept_messages = new_session.messages[: len(old_session.messages)]
    return old_session.summary == new_session.summary and kept_messages == old_session.messages


def _stored_time(moment: datetime | None) -> str:
    return json_file.NO_TIME.isoformat() if moment is None else timestamp(moment)


def _is_empty(session: JSONSession) -> bool:
    return not session.messages and not session.summary


def _make_uid(key: str) -> str:
    return sha256(key.encode()).hexdigest()[:16]


# --- system calls ----------------------------------------------------------------------------


def _session_names(folder: int) -> list[str]:
    """Return the sorted names of the files that may contain a session."""
    with os.scandir(folder) as entries:
        return sorted(filter(json_file.is_session_name, (entry.name for entry in entries)))


def _read_file(folder: int, name: str) -> bytes:
    """Return the content of a regular file, following no link. Raises OSError."""
    descriptor = os.open(name, _READ_FLAGS, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{name} is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def _file_version(folder: int, name: str) -> _FileVersion | None:
    """Return the current version of a file; None if it does not exist."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def _keep_copy(folder: int, name: str, suffix: str) -> None:
    """Copy a file to a free name with this ending before it is replaced.

    If `suffix` is the ending of session files, the copy counts as a session file, too. Raises
    OSError.
    """
    content = _read_file(folder, name)
    for copy_name in _copy_names(name, suffix):
        if _file_version(folder, copy_name) is None:
            disk.replace_file(folder, copy_name, content)
            return
        with suppress(OSError):
            if _read_file(folder, copy_name) == content:
                return  # a process made this copy and was killed before it replaced the file


def _copy_names(name: str, suffix: str) -> Iterator[str]:
    if suffix != json_file.SUFFIX:
        yield name + suffix
    for number in count(2):
        stem = name.removesuffix(suffix)
        yield f"{stem}-{number}{suffix}" if stem != name else f"{name}{suffix}-{number}"


def why_not_writable(directory: Path) -> str | None:
    """Return why no file can be written to a folder; None if it is writable. Creates the folder."""
    files = f"JSON files in {directory}"
    try:
        disk.create_private_folder(directory)
    except OSError as error:
        return f"{files} ({error.strerror})"
    is_writable = os.access(directory, os.W_OK | os.X_OK)
    return None if is_writable else f"{files} (it may not be written)"
