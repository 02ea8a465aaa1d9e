"""SessionManager: the legacy store, which keeps each session as one JSON file.

The reference keeps sessions in memory until `save`. Here every write rewrites the session's file
before it returns, so that an acknowledged message survives the process (P1). Processes take turns
through a lock on the folder, and read the changes of other processes before they write.
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
from typing import Any, Concatenate, Final, Never, ParamSpec, Self, TypeVar

from msgspec import Raw
from msgspec.structs import replace

from stenolog.codec import check_key, check_once, check_times
from stenolog.errors import (
    DamagedStore,
    LeaseLost,
    NoSuchSession,
    StoreClosed,
    StoreUnavailable,
    UsageError,
)
from stenolog.records import (
    Compacted,
    Health,
    Message,
    Purged,
    Span,
    Trashed,
    Undone,
    timestamp,
)
from stenolog.sessions.session_store import JSONLBackend
from stenolog.stores import disk, json_file, spans
from stenolog.stores.arguments import check_int, check_optional_int, encode_messages
from stenolog.stores.base import SessionView
from stenolog.stores.following import NewMessages, poll_messages
from stenolog.stores.in_memory import InMemoryLease, InMemoryStore
from stenolog.stores.json_file import JSONMessage, JSONSession, file_name
from stenolog.stores.locks import ThreadLock
from stenolog.stores.snapshots import Snapshot, token_of

BUSY_TIMEOUT: Final = 5.0
_POLL: Final = 0.2
"""Seconds between two checks for messages of other processes."""

P = ParamSpec("P")
T = TypeVar("T")

_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FileVersion = tuple[int, int, int]
"""Identifies a version of a file: inode, size, modification time."""

FileContent = tuple[str, bool]
"""The key of the session in a file, and whether stenolog wrote it."""


class SessionManager(JSONLBackend):
    """The SessionStore on JSON files, one per session.

    Its `store` has no undo, fork, delete, restore and purge (UsageError), and keeps meta and leases
    for this process only. `because`: why it replaces another store; `health()` then reports it and
    is not ok. `old`: a folder of legacy sessions to continue; nothing is written there.
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
        no_keys: list[str] = []
        self._failures.read("opening", None, self._files.list_sessions, default=no_keys)

    def __repr__(self) -> str:
        return f"SessionManager({str(self.directory)!r})"

    def save(self, key: str) -> None:
        """Write the file again if it was removed; every write was on disk when it returned.

        Raises an error if that fails.
        """
        self._files.save(key)


def _write_method(
    method: Callable[Concatenate[InMemoryStore, P], T],
) -> "Callable[Concatenate[JSONFileStore, P], T]":
    """Return a method that makes this call in memory and writes the file."""

    @wraps(method)
    def call(self: "JSONFileStore", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._change(
            _first_argument(*args, **kwargs), lambda memory: method(memory, *args, **kwargs)
        )

    return call


def _read_method(
    method: Callable[Concatenate[InMemoryStore, P], T],
) -> "Callable[Concatenate[JSONFileStore, P], T]":
    """Return a method that makes this call on the content of the file."""

    @wraps(method)
    def call(self: "JSONFileStore", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self._memory_of(_first_argument(*args, **kwargs)), *args, **kwargs)

    return call


def _first_argument(key: Any, *_: object, **__: object) -> str:
    """Return the first argument of a call."""
    check_key(key)
    return str(key)


class JSONFileStore:
    """The Store calls that JSON files can support; the others raise UsageError.

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
        self._sessions: dict[str, JSONSession] = {}
        self._versions: dict[str, int] = {}
        """Number of changes of each session that this process has seen."""
        self._rewrites: dict[str, int] = {}
        """The same without changes that only appended messages."""
        self._file_versions: dict[str, _FileVersion] = {}
        """The known version of each file, by name."""
        self._file_contents: dict[str, FileContent] = {}
        """The content of that version."""
        self._unreadable: dict[str, str] = {}

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
        given = [
            Message(seq=1, _at="", _body=Raw(payload)) for payload in encode_messages(messages)
        ]
        if at is not None:
            check_times(at, len(given))
        times = at or [datetime.now(UTC)] * len(given)

        def add(memory: InMemoryStore) -> list[int]:
            # A file has a token for each message, and none for a batch.
            tokens = [
                f"{once}:{number}" if once is not None and len(given) > 1 else once
                for number in range(len(given))
            ]
            return [
                memory.add_messages(key, [message], once=token, at=[moment])[0]
                for message, token, moment in zip(given, tokens, times, strict=True)
            ]

        return self._change(key, add)

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
        """Set fields for this process; None removes one."""
        self._check_writable()
        self._local.set_meta(key, **fields)

    def compact(self, key: str) -> Compacted:
        """Do nothing: a file has no archive."""
        check_key(key)
        return Compacted(archived=0, bytes_before=0, bytes_after=0)

    def save(self, key: str) -> None:
        """Write the file of a session again if it was removed."""
        check_key(key)
        with self._locked() as folder:
            session = self._current(folder, key)
            if session.ours and _file_version(folder, file_name(key)) is None:
                self._write(folder, session)

    def _change(self, key: str, call: Callable[[InMemoryStore], T]) -> T:
        """Make a call on the file's current content, and write the result before it is visible."""
        check_key(key)
        self._check_writable()
        with self._locked() as folder:
            before = self._current(folder, key)
            memory = self._in_memory(key, before)
            result = call(memory)
            after = _session_from_memory(before, memory)
            if after != before:
                self._write(folder, after)
            return result

    def _check_writable(self) -> None:
        self._check_open()
        if self._lease is not None and self._lease.taken_over:
            raise LeaseLost(self._lease.key, self._lease.epoch)

    def _write(self, folder: int, session: JSONSession) -> None:
        key = session.key or ""
        name = file_name(key)
        if name in self._unreadable:
            raise DamagedStore(
                f"{self.directory / name}: {self._unreadable[name]}; move it away, so that {key!r} "
                "can be kept there"
            )
        now = datetime.now(UTC)
        if not session.ours:
            known = self._sessions.get(key, JSONSession(key=key))
            session = replace(
                session, ours=True, created=session.created or now, began_with=known.summary
            )
        session = replace(session, updated=now)
        try:
            self._keep_foreign_file(folder, name, key)
            disk.replace_file(folder, name, json_file.compose(session))
        except OSError as error:
            # If the rename succeeded and only the last sync failed, the file is read again.
            self._file_versions.pop(name, None)
            raise StoreUnavailable(f"writing {self.directory / name}: {error.strerror}") from error
        self._remember(key, session)
        self._file_versions[name] = _file_version(folder, name) or (0, 0, 0)
        self._file_contents[name] = (key, True)

    def _keep_foreign_file(self, folder: int, name: str, key: str) -> None:
        """Keep the reference's file under another name if it has the name of our file.

        If it is the same session, our file has its content. If it is another one, whose key the
        reference writes the same way, the copy is still a session file.
        """
        if _file_version(folder, name) is None or self._file_contents.get(name) == (key, True):
            return
        is_same = self._file_contents.get(name, (key,))[0] == key
        _keep_copy(folder, name, ".original" if is_same else json_file.SUFFIX)

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
        """Delete a session that has only meta; raise UsageError for any other."""
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
        meta: Mapping[str, Any] = {}
        change = self._rewrites.get(key, 0)
        with suppress(NoSuchSession):
            local = self._local.info(key)
            meta, change = local.meta, change + local.change
        if _is_empty(session) and not meta:
            return memory
        times = [message.at for message in session.messages if message.at is not None]
        created = session.created or min(times, default=None)
        floor = session.floor()
        hidden = [seq for seq, message in enumerate(session.messages, 1) if message.hidden]
        snapshot = Snapshot(
            key=key,
            uid=_uid(key),
            created=_stored_time(created),
            updated=_stored_time(session.updated or max(times, default=created)),
            last_seq=len(session.messages),
            floor=floor,
            hidden=spans.union((seq, seq) for seq in hidden if seq > floor),
            number=change,
            summary=session.summary,
            meta=dict(meta),
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
        """Return a full view."""
        return self.view(view.key, view.last)

    def list_sessions(
        self, *, prefix: str = "", limit: int | None = None, after: str | None = None
    ) -> list[str]:
        """Return a page of keys in order."""
        check_optional_int(limit=limit)
        if limit is not None and limit < 0:
            raise UsageError(f"limit must be 0 or more, not {limit}")
        self._load_all()
        keys = sorted(key for key in self._sessions if key.startswith(prefix))
        return [key for key in keys if after is None or key > after][:limit]

    def stamps(self) -> dict[str, str]:
        """Return for each session a stamp that changes with every change."""
        self._load_all()
        local = self._local.stamps()
        return {key: f"{n}:{local.get(key, '')}" for key, n in self._versions.items()}

    def follow(
        self, key: str, *, after: int = 0, uid: str | None = None, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield each message with a seq greater than `after` once, in order, as it arrives."""
        check_int(after=after)
        check_key(key)
        self._check_open()
        ask = partial(self._news, key)
        return poll_messages(
            ask, self._closed.wait, key, after=after, uid=uid, timeout=timeout, poll=_POLL
        )

    def _news(self, key: str, after: int) -> NewMessages | None:
        session = self._session_of(key)
        if _is_empty(session):
            return None
        return _uid(key), len(session.messages), self.get_history(key, after=after, full=True)

    # --- leases, markers, health -------------------------------------------------------------

    def lease(self, key: str, *, ttl: float, wait: float | None = None) -> "ManagerLease":
        """Acquire the lease of this session among the threads of this process."""
        self.info(key)
        self._local.set_summary(key, "leased")  # creates the session there
        return ManagerLease(self._local.lease(key, ttl=ttl, wait=wait), self)

    def _with_lease(self, lease: InMemoryLease) -> "JSONFileStore":
        fenced = copy.copy(self)
        fenced._lease = lease
        return fenced

    def mark(self, name: str) -> str:
        """Return the change marker of this name in this process."""
        return self._local.mark(name)

    def change_mark(self, name: str) -> None:
        """Change the marker in this process."""
        self._local.change_mark(name)

    def health(self) -> Health:
        """Return the state of the folder."""
        self._check_open()
        problems = [f"{name}: {reason}" for name, reason in sorted(self._unreadable.items())]
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
        free: int | None = None
        try:
            filesystem = os.statvfs(self.directory)
            free = filesystem.f_bavail * filesystem.f_frsize
        except FileNotFoundError:
            pass  # created with the first write
        except OSError as error:
            errors.append(f"looking at {self.directory}: {error.strerror}")
        return Health(ok=not errors, free_bytes=free, problems=(*errors, *problems))

    def close(self) -> None:
        """Release everything; a second call does nothing."""
        with self._mutex:
            self._closed.set()
            self._local.close()
            self._sessions.clear()
            self._file_versions.clear()
            self._file_contents.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- the files ---------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Yield a descriptor of the folder, locked against other threads and processes."""
        with self._mutex:
            self._check_open()
            try:
                disk.make_private(self.directory)
            except OSError as error:
                raise StoreUnavailable(f"making {self.directory}: {error.strerror}") from error
            with self._opened() as folder:
                label = f"the folder {self.directory}"
                disk.wait_for_lock(folder, seconds=BUSY_TIMEOUT, name=label)
                try:
                    yield folder
                finally:
                    disk.release_lock(folder)

    @contextmanager
    def _opened(self, path: Path | None = None) -> Iterator[int]:
        """Yield a descriptor of this folder or our own.

        Raises FileNotFoundError, StoreUnavailable.
        """
        # Opened each time: a forked child that inherited it would share the lock.
        path = path or self.directory
        try:
            folder = os.open(path, _READ | os.O_DIRECTORY)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreUnavailable(f"opening {path}: {error.strerror}") from error
        try:
            yield folder
        finally:
            os.close(folder)

    def _remember(self, key: str, session: JSONSession) -> None:
        before = self._sessions.get(key)
        self._sessions[key] = session
        self._versions[key] = self._versions.get(key, 0) + 1
        if before is not None and not _only_appends(before, session):
            self._rewrites[key] = self._rewrites.get(key, 0) + 1

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise StoreClosed("the store is closed")

    def _session_of(self, key: str) -> JSONSession:
        check_key(key)
        with self._mutex:
            self._check_open()
            with suppress(FileNotFoundError), self._opened() as folder:
                self._current(folder, key)
            return self._sessions.get(key, JSONSession(key=key))

    def _memory_of(self, key: str) -> InMemoryStore:
        """Return a store in memory with the current content of a session's file."""
        with self._mutex:
            return self._in_memory(key, self._session_of(key))

    def _current(self, folder: int, key: str) -> JSONSession:
        """Return the session from its file if another process has written it, else from memory.

        If the file is gone, another process imported it, and the content in memory is still valid.
        """
        self._load_changed(folder, file_name(key))
        return self._sessions.get(key, JSONSession(key=key))

    def _load_all(self) -> None:
        """Load all new or changed files."""
        with self._mutex:
            self._check_open()
            with suppress(FileNotFoundError), self._opened() as folder:
                for name in _session_names(folder):
                    self._load_changed(folder, name)
            if self._old is not None:
                with suppress(FileNotFoundError), self._opened(self._old) as folder:
                    for name in _session_names(folder):
                        self._load_old(folder, name, str(self._old / name))

    def _load_changed(self, folder: int, name: str) -> None:
        """Load a file that changed.

        Of two files with one key, the one with our file name counts.
        """
        session = self._changed_session(folder, name, name)
        if session is None:
            return
        key = session.key or ""
        self._file_contents[name] = (key, session.ours)
        if file_name(key) == name or key not in self._sessions:
            self._remember(key, session)

    def _load_old(self, folder: int, name: str, path: str) -> None:
        """Load a file of the old folder, unless stenolog wrote it for another store."""
        session = self._changed_session(folder, name, path)
        if session is not None and not session.ours:
            key = session.key or ""
            if key not in self._sessions:
                self._remember(key, session)

    def _changed_session(self, folder: int, name: str, name_in_cache: str) -> JSONSession | None:
        """Return the session in a changed file; None if the file is unchanged or missing."""
        mark = _file_version(folder, name)
        if mark is None or mark == self._file_versions.get(name_in_cache):
            return None
        self._file_versions[name_in_cache] = mark
        self._file_contents.pop(name_in_cache, None)
        self._unreadable.pop(name_in_cache, None)
        try:
            session = json_file.parse(_read_file(folder, name))
            key = session.key or name.removesuffix(json_file.SUFFIX)
            check_key(key)
        except (ValueError, UsageError, OSError) as error:
            self._unreadable[name_in_cache] = str(error)
            return None
        return replace(session, key=key)


class ManagerLease:
    """The lease of a session of JSON files."""

    def __init__(self, lease: InMemoryLease, files: JSONFileStore) -> None:
        self._lease = lease
        self.key = lease.key
        self.epoch = lease.epoch
        self.store = files._with_lease(lease)

    @property
    def lost(self) -> bool:
        """Whether it was released, has expired, or was taken over."""
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


def _session_from_memory(before: JSONSession, memory: InMemoryStore) -> JSONSession:
    """Return a session with the changes that a call made in memory."""
    key, last = before.key or "", len(before.messages)
    tokens: dict[int, str] = {}
    for mark in memory.list_snapshots():
        with memory.read_snapshot(mark, after=last) as reading:
            tokens = {one.seq: token[0] for one in reading.messages if (token := token_of(one))}
    history = memory.get_history(key, full=True)
    old = [
        was if was.hidden == now.hidden else replace(was, hidden=now.hidden)
        for was, now in zip(before.messages, history, strict=False)
    ]
    new = [
        # By its token the next successful start recognizes a message that it already has.
        JSONMessage(
            one.to_json(), one.at, tokens.get(one.seq) or f"json:{os.urandom(10).hex()}", one.hidden
        )
        for one in history[last:]
    ]
    return replace(before, messages=(*old, *new), summary=memory.get_summary(key))


def _only_appends(before: JSONSession, after: JSONSession) -> bool:
    """Return whether the only change to a session is added messages."""
    kept = after.messages[: len(before.messages)]
    return before.summary == after.summary and kept == before.messages


def _stored_time(moment: datetime | None) -> str:
    return json_file.NO_TIME.isoformat() if moment is None else timestamp(moment)


def _is_empty(session: JSONSession) -> bool:
    return not session.messages and not session.summary


def _uid(key: str) -> str:
    return sha256(key.encode()).hexdigest()[:16]


# --- system calls ----------------------------------------------------------------------------


def _session_names(folder: int) -> list[str]:
    """Return the sorted names of the files that may contain a session."""
    with os.scandir(folder) as entries:
        return sorted(filter(json_file.is_session_name, (entry.name for entry in entries)))


def _read_file(folder: int, name: str) -> bytes:
    """Return the content of a regular file, following no link. Raises OSError."""
    descriptor = os.open(name, _READ, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{name} is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def _file_version(folder: int, name: str) -> _FileVersion | None:
    """Return the current version of a file; None if it does not exist."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def _keep_copy(folder: int, name: str, suffix: str) -> None:
    """Copy a file to a free name with this ending before it is replaced.

    With the ending of session files the copy is a session file too. Raises OSError.
    """
    text = _read_file(folder, name)
    for other in _copy_names(name, suffix):
        if _file_version(folder, other) is None:
            disk.replace_file(folder, other, text)
            return
        with suppress(OSError):
            if _read_file(folder, other) == text:
                return  # copied by a process that was killed before it replaced the file


def _copy_names(name: str, suffix: str) -> Iterator[str]:
    if suffix != json_file.SUFFIX:
        yield name + suffix
    for number in count(2):
        stem = name.removesuffix(suffix)
        yield f"{stem}-{number}{suffix}" if stem != name else f"{name}{suffix}-{number}"


def why_not_writable(directory: Path) -> str | None:
    """Return why no file can be written to a folder; None if it can. Creates the folder."""
    files = f"JSON files in {directory}"
    try:
        disk.make_private(directory)
    except OSError as error:
        return f"{files} ({error.strerror})"
    is_writable = os.access(directory, os.W_OK | os.X_OK)
    return None if is_writable else f"{files} (it may not be written)"
