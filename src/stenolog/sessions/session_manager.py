"""SessionManager: the legacy store, which keeps each session as one JSON file.

The store of picoclaw keeps sessions in memory until `save`. In this module, every write rewrites
the session's file before it returns, so that an acknowledged message survives the process (P1). To
write, a process locks the folder, reads the changes of other processes, and then writes.
"""

import copy
import os
import shutil
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
from stenolog.records import (
    CompactionResult,
    Health,
    Message,
    PurgeResult,
    Span,
    TrashedSession,
    UndoResult,
    timestamp,
)
from stenolog.sessions.session_store import JSONLBackend
from stenolog.stores import disk, json_file, spans
from stenolog.stores.arguments import check_count, check_int, encode_messages
from stenolog.stores.base import SessionView, find_info
from stenolog.stores.following import NewMessages, poll_messages
from stenolog.stores.in_memory import InMemoryLease, InMemoryStore
from stenolog.stores.json_file import JSONMessage, JSONSession, file_name
from stenolog.stores.locks import ThreadLock
from stenolog.stores.snapshots import Snapshot, token_of

BUSY_TIMEOUT_SECONDS: Final = 5.0
"""Seconds that a write waits for the lock of the folder."""
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


def _make_write_method(
    method: Callable[Concatenate[InMemoryStore, P], T],
) -> "Callable[Concatenate[JSONFileStore, P], T]":
    """Return a method that runs `method` in memory and writes the changed file."""

    @wraps(method)
    def call(self: "JSONFileStore", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._change_session(
            _checked_key(*args, **kwargs), lambda memory: method(memory, *args, **kwargs)
        )

    return call


def _make_read_method(
    method: Callable[Concatenate[InMemoryStore, P], T],
) -> "Callable[Concatenate[JSONFileStore, P], T]":
    """Return a method that runs `method` in memory, on the content of the file."""

    @wraps(method)
    def call(self: "JSONFileStore", /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = _checked_key(*args, **kwargs)
        with self._mutex:
            memory = self._to_memory_store(key, self._read_session(key))
        return method(memory, *args, **kwargs)

    return call


def _checked_key(key: Any, *_: object, **__: object) -> str:
    """Return the key of the session, which is the first argument. Raises InvalidKey."""
    check_key(key)
    return str(key)


class JSONFileStore:
    """A Store on JSON files. Calls that JSON files cannot support raise UsageError.

    Each call runs in memory, on the current content of the session's file.
    """

    def __init__(self, directory: Path, *, because: str | None, old: Path | None) -> None:
        self.directory = directory
        self.because = because
        self._old = old
        self._mutex = ThreadLock()
        self._closed = Event()
        self._lease: InMemoryLease | None = None
        self._local = InMemoryStore()
        """Meta, markers and leases, which are not stored in files."""
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
            # A file stores one idempotency key per message, so a batch gets numbered keys.
            tokens = [
                f"{once}:{number}" if once is not None and len(new_messages) > 1 else once
                for number in range(len(new_messages))
            ]
            return [
                memory.add_messages(key, [message], once=token, at=[message_time])[0]
                for message, token, message_time in zip(new_messages, tokens, times, strict=True)
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

    set_summary = _make_write_method(InMemoryStore.set_summary)
    set_history = _make_write_method(InMemoryStore.set_history)
    truncate_history = _make_write_method(InMemoryStore.truncate_history)
    checkpoint = _make_write_method(InMemoryStore.checkpoint)
    clear = _make_write_method(InMemoryStore.clear)
    hide = _make_write_method(InMemoryStore.hide)
    pop = _make_write_method(InMemoryStore.pop)

    def set_meta(self, key: str, /, **fields: Any) -> None:
        """Set fields of meta, for this process only; None removes a field."""
        self._check_writable()
        self._local.set_meta(key, **fields)

    def compact(self, key: str) -> CompactionResult:
        """Do nothing, because a file has no archive."""
        check_key(key)
        return CompactionResult(archived=0, bytes_before=0, bytes_after=0)

    def save(self, key: str) -> None:
        """Write the file of a session again if it was removed."""
        check_key(key)
        with self._lock_folder() as folder:
            session = self._read_current_session(folder, key)
            if session.is_ours and _file_version(folder, file_name(key)) is None:
                self._write_file(folder, session)

    def _change_session(self, key: str, call: Callable[[InMemoryStore], T]) -> T:
        """Run a call in memory, and write the session's file before the change is visible."""
        check_key(key)
        self._check_writable()
        with self._lock_folder() as folder:
            old_session = self._read_current_session(folder, key)
            memory = self._to_memory_store(key, old_session)
            result = call(memory)
            new_session = _session_from_memory(old_session, memory)
            if new_session != old_session:
                self._write_file(folder, new_session)
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
                first_summary=self._known_session(key).session.summary,
            )
        session = replace(session, updated=now)
        try:
            self._keep_foreign_file(folder, name, key)
            disk.replace_file(folder, name, json_file.compose_file(session))
        except OSError as error:
            # The rename may have succeeded before the sync failed, so the next call reads the file.
            self._known_files.pop(name, None)
            raise StoreUnavailable(f"writing {self.directory / name}: {error.strerror}") from error
        self._remember_session(key, session)
        version = _file_version(folder, name) or (0, 0, 0)
        self._known_files[name] = _KnownFile(version, key, is_ours=True)

    def _keep_foreign_file(self, folder: int, name: str, key: str) -> None:
        """Copy a file of picoclaw to another name. Call this before our file replaces it.

        If both files have the same session, our file contains the whole session, and the copy, with
        the ending `.original`, is never read. A copy of another session counts as a session file.
        """
        known_file = self._known_files.get(name)
        is_same_session = known_file is None or known_file.key == key
        is_ours = known_file is not None and known_file.is_ours and is_same_session
        if not is_ours and _file_version(folder, name) is not None:
            _copy_to_unused_name(folder, name, ".original" if is_same_session else json_file.SUFFIX)

    # --- unsupported calls -------------------------------------------------------------------

    def show(self, key: str, first: int, last: int) -> None:
        """Always raises UsageError, because JSON files have no hidden messages."""
        del first, last
        _raise_unsupported("show", key)

    def undo(self, key: str, *, answered: Span | None = None) -> UndoResult:
        """Always raises UsageError, because JSON files have no undo steps."""
        del answered
        _raise_unsupported("undo", key)

    def fork(self, key: str, new_key: str, *, at: int | None = None) -> None:
        """Always raises UsageError, because JSON files cannot be forked."""
        del new_key, at
        _raise_unsupported("fork", key)

    def delete(self, key: str) -> TrashedSession:
        """Delete a session that has only meta. Raises UsageError for any other session."""
        if not _is_empty(self._read_session(key)):
            _raise_unsupported("delete", key)
        return self._local.delete(key)

    def restore(self, key: str, *, uid: str | None = None, as_key: str | None = None) -> None:
        """Always raises UsageError, because JSON files have no trash."""
        del uid, as_key
        _raise_unsupported("restore", key)

    def list_trash(self) -> list[TrashedSession]:
        """Return an empty list, because JSON files have no trash."""
        self._check_open()
        return []

    def purge(self, key: str, *, before: int | None = None) -> PurgeResult:
        """Always raises UsageError. A user can delete the file instead."""
        del before
        _raise_unsupported("purge", key)

    # --- reading -----------------------------------------------------------------------------

    get_history = _make_read_method(InMemoryStore.get_history)
    get_summary = _make_read_method(InMemoryStore.get_summary)
    info = _make_read_method(InMemoryStore.info)
    view = _make_read_method(InMemoryStore.view)

    def _to_memory_store(self, key: str, session: JSONSession) -> InMemoryStore:
        """Return a store in memory that has only this session."""
        memory = InMemoryStore()
        local_info = find_info(self._local, key)
        meta = {} if local_info is None else dict(local_info.meta)
        local_change = 0 if local_info is None else local_info.change
        if _is_empty(session) and not meta:
            return memory
        times = [message.at for message in session.messages if message.at is not None]
        created = session.created or min(times, default=None)
        floor = session.floor()
        hidden_seqs = [seq for seq, message in enumerate(session.messages, 1) if message.hidden]
        snapshot = Snapshot(
            key=key,
            uid=_make_uid(key),
            created=_format_time(created),
            updated=_format_time(session.updated or max(times, default=created)),
            last_seq=len(session.messages),
            floor=floor,
            hidden=spans.from_seqs(seq for seq in hidden_seqs if seq > floor),
            number=self._known_session(key).rewrites + local_change,
            summary=session.summary,
            meta=meta,
        )
        messages = [
            Message(
                seq=seq,
                _at=_format_time(message.at or session.created),
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
        """Return at most `limit` keys after the key `after`, in order."""
        check_count(limit=limit)
        self._load_all_files()
        keys = sorted(key for key in self._sessions if key.startswith(prefix))
        return [key for key in keys if after is None or key > after][:limit]

    def stamps(self) -> dict[str, str]:
        """Return a stamp for each session: a text that changes with every change of the session."""
        self._load_all_files()
        local_stamps = self._local.stamps()
        return {
            key: f"{known.changes}:{local_stamps.get(key, '')}"
            for key, known in self._sessions.items()
        }

    def follow(
        self, key: str, *, after: int = 0, uid: str | None = None, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield each message with a seq greater than `after` once, in order, as it arrives."""
        check_int(after=after)
        check_key(key)
        self._check_open()
        read = partial(self._read_new_messages, key)
        return poll_messages(
            read, self._closed.wait, key, after=after, uid=uid, timeout=timeout, poll=_POLL_SECONDS
        )

    def _read_new_messages(self, key: str, after: int) -> NewMessages | None:
        session = self._read_session(key)
        if _is_empty(session):
            return None
        return _make_uid(key), len(session.messages), self.get_history(key, after=after, full=True)

    # --- leases, markers, health -------------------------------------------------------------

    def lease(self, key: str, *, ttl: float, wait: float | None = None) -> "ManagerLease":
        """Acquire the lease of this session. Other processes do not see the lease."""
        self.info(key)
        self._local.set_summary(key, "leased")  # creates the session in `_local`
        return ManagerLease(self._local.lease(key, ttl=ttl, wait=wait), self)

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
        write_obstacle = why_not_writable(self.directory) if self.because is not None else None
        if write_obstacle is not None:
            errors.append(
                f"nothing can be stored: the store is unusable ({self.because}), and so are "
                f"{write_obstacle}"
            )
        elif self.because is not None:
            errors.append(
                f"sessions are kept as JSON files in {self.directory} for this run, and merged "
                f"when the store can be used again: {self.because}"
            )
        free_space: int | None = None
        try:
            free_space = shutil.disk_usage(self.directory).free
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
                folder_label = f"the folder {self.directory}"
                disk.wait_for_lock(folder, seconds=BUSY_TIMEOUT_SECONDS, name=folder_label)
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
        known = self._known_session(key)
        is_rewrite = key in self._sessions and not _has_only_appended(known.session, session)
        self._sessions[key] = _KnownSession(session, known.changes + 1, known.rewrites + is_rewrite)

    def _known_session(self, key: str) -> _KnownSession:
        return self._sessions.get(key) or _KnownSession(JSONSession(key=key))

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise StoreClosed("the store is closed")

    def _read_session(self, key: str) -> JSONSession:
        check_key(key)
        with self._mutex:
            self._check_open()
            with suppress(FileNotFoundError), self._open_folder() as folder:
                self._read_current_session(folder, key)
            return self._known_session(key).session

    def _read_current_session(self, folder: int, key: str) -> JSONSession:
        """Return the session from its file if another process changed the file, else from memory.

        If the file is gone, another process imported it, and the content in memory is still valid.
        """
        self._load_changed_file(folder, file_name(key))
        return self._known_session(key).session

    def _load_all_files(self) -> None:
        """Load all new or changed files."""
        with self._mutex:
            self._check_open()
            for old in (None,) if self._old is None else (None, self._old):
                with suppress(FileNotFoundError), self._open_folder(old) as folder:
                    for name in _session_file_names(folder):
                        self._load_changed_file(folder, name, old)

    def _load_changed_file(self, folder: int, name: str, old: Path | None = None) -> None:
        """Load a file if it is new or changed. `old`: path of the folder, if it is the old folder.

        If two files have the same key, the file with stenolog's name for that key wins. A file of
        the old folder is not loaded if stenolog wrote it for another store.
        """
        known_name = name if old is None else str(old / name)
        version, known_file = _file_version(folder, name), self._known_files.get(known_name)
        if version is None or (known_file is not None and version == known_file.version):
            return
        try:
            session = json_file.parse(_read_file(folder, name))
            key = session.key or name.removesuffix(json_file.SUFFIX)
            check_key(key)
        except (ValueError, UsageError, OSError) as error:
            self._known_files[known_name] = _KnownFile(version, problem=str(error))
            return
        self._known_files[known_name] = _KnownFile(version, key, session.is_ours)
        if old is not None and session.is_ours:
            return
        has_own_name = old is None and file_name(key) == name
        if has_own_name or key not in self._sessions:
            self._remember_session(key, replace(session, key=key))


class ManagerLease:
    """The lease of a session that is stored as a JSON file."""

    def __init__(self, lease: InMemoryLease, files: JSONFileStore) -> None:
        self._lease = lease
        self.key = lease.key
        self.epoch = lease.epoch
        self.store = copy.copy(files)
        self.store._lease = lease

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
    key, old_count = session.key or "", len(session.messages)
    tokens: dict[int, str] = {}
    for snapshot in memory.list_snapshots():
        with memory.read_snapshot(snapshot, after=old_count) as reading:
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
        for new in history[old_count:]
    ]
    messages = (*old_messages, *new_messages)
    return replace(session, messages=messages, summary=memory.get_summary(key))


def _has_only_appended(old_session: JSONSession, new_session: JSONSession) -> bool:
    """Return whether a session has changed only by added messages."""
    kept_messages = new_session.messages[: len(old_session.messages)]
    return old_session.summary == new_session.summary and kept_messages == old_session.messages


def _format_time(moment: datetime | None) -> str:
    return json_file.NO_TIME.isoformat() if moment is None else timestamp(moment)


def _is_empty(session: JSONSession) -> bool:
    return not session.messages and not session.summary


def _make_uid(key: str) -> str:
    return sha256(key.encode()).hexdigest()[:16]


# --- system calls ----------------------------------------------------------------------------


def _session_file_names(folder: int) -> list[str]:
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


def _copy_to_unused_name(folder: int, name: str, suffix: str) -> None:
    """Copy a file to an unused name with this suffix. Raises OSError.

    If `suffix` is the suffix of session files, the copy counts as a session file, too.
    """
    content = _read_file(folder, name)
    for copy_name in _generate_copy_names(name, suffix):
        if _file_version(folder, copy_name) is None:
            disk.replace_file(folder, copy_name, content)
            return
        with suppress(OSError):
            if _read_file(folder, copy_name) == content:
                return  # a process made this copy and was then killed


def _generate_copy_names(name: str, suffix: str) -> Iterator[str]:
    if suffix != json_file.SUFFIX:
        yield name + suffix
    for copy_number in count(2):
        stem = name.removesuffix(suffix)
        yield f"{stem}-{copy_number}{suffix}" if stem != name else f"{name}{suffix}-{copy_number}"


def why_not_writable(directory: Path) -> str | None:
    """Return why no file can be written to a folder; None if it is writable. Creates the folder."""
    files = f"JSON files in {directory}"
    try:
        disk.create_private_folder(directory)
    except OSError as error:
        return f"{files} ({error.strerror})"
    is_writable = os.access(directory, os.W_OK | os.X_OK)
    return None if is_writable else f"{files} (it may not be written)"
