"""SessionManager: the legacy store, which keeps each session as one JSON file.

The reference keeps sessions in memory until `save`. Here every write rewrites the file before it
returns, so that an acknowledged message survives the process (P1). A write costs a rewrite of the
session. Processes take turns through a lock on the folder, and read what another process wrote
before they add to it.
"""

import copy
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any, Final, Never, Self, TypeVar

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
    SessionInfo,
    Span,
    Trashed,
    Undone,
    timestamp,
)
from stenolog.sessions.session_store import JSONLBackend
from stenolog.stores import disk, json_file, spans
from stenolog.stores.arguments import check_required, check_whole, encoded
from stenolog.stores.base import SessionView
from stenolog.stores.following import News, arrivals
from stenolog.stores.in_memory import InMemoryLease, InMemoryStore
from stenolog.stores.json_file import Kept, file_name
from stenolog.stores.locks import ThreadLock

BUSY_TIMEOUT: Final = 5.0
_POLL: Final = 0.2
"""Seconds between two looks for messages that another process stored."""

_Result = TypeVar("_Result")

_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FileMark = tuple[int, int, int]
"""Tells one version of a file from another: inode, size, time of change."""

Held = tuple[str, bool]
"""The key of the session in a file, and whether stenolog wrote it."""


class SessionManager(JSONLBackend):
    """The SessionStore over whole JSON files.

    Its `store` has no undo, fork, delete, restore and purge (UsageError), and keeps meta and leases
    for this process only. `because`: why it replaces another store; `health()` then says so, and is
    not ok. `old`: a folder of legacy sessions to continue; nothing is written there.
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
        nothing: list[str] = []
        self._failures.read("opening", None, self._files.list_sessions, otherwise=nothing)

    def __repr__(self) -> str:
        return f"SessionManager({str(self.directory)!r})"

    def save(self, key: str) -> None:
        """Write the file again if it is gone; every write was on disk when it returned.

        A failure is raised.
        """
        self._files.save(key)


class JSONFileStore:
    """The Store calls that whole JSON files can serve; the others raise UsageError."""

    def __init__(self, directory: Path, *, because: str | None, old: Path | None) -> None:
        self.directory = directory
        self.because = because
        self._old = old
        self._mutex = ThreadLock()
        self._closed = Event()
        self._lease: InMemoryLease | None = None
        self._local = InMemoryStore()
        """Meta, marks and leases of this process, by the key of the session."""
        self._sessions: dict[str, Kept] = {}
        self._versions: dict[str, int] = {}
        """Number of changes of each session that were seen."""
        self._rewrites: dict[str, int] = {}
        """The same without changes that only appended messages."""
        self._marks: dict[str, _FileMark] = {}
        """Which version of each file is known, by name."""
        self._held: dict[str, Held] = {}
        """What that version holds."""
        self._unreadable: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"JSONFileStore({str(self.directory)!r})"

    # --- writing -----------------------------------------------------------------------------

    def add_message(self, key: str, role: str, content: Any, *, once: str | None = None) -> int:
        """Append `{"role": role, "content": content}`; its seq."""
        return self.add_messages(key, [{"role": role, "content": content}], once=once)[0]

    def add_full_message(
        self, key: str, message: Message | Mapping[str, Any], *, once: str | None = None
    ) -> int:
        """Append one message; its seq."""
        return self.add_messages(key, [message], once=once)[0]

    def add_messages(
        self,
        key: str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        once: str | None = None,
        at: Sequence[datetime] | None = None,
    ) -> list[int]:
        """Append a batch, whole or not at all; its seqs."""
        check_once(once)
        payloads = encoded(messages)
        if at is not None:
            check_times(at, len(payloads))
        times = at or [datetime.now(UTC)] * len(payloads)

        def add(session: Kept) -> tuple[Kept, list[int]]:
            seqs = []
            for number, (payload, moment) in enumerate(zip(payloads, times, strict=True)):
                token = f"{once}:{number}" if once is not None and len(payloads) > 1 else once
                session, seq = json_file.added(session, payload, _said(moment), once=token)
                seqs.append(seq)
            return session, seqs

        return self._change(key, add)

    def set_summary(self, key: str, text: str) -> None:
        """Replace the summary."""
        self._apply(key, lambda session: json_file.summarised(session, text))

    def set_history(
        self,
        key: str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        expect_last: int | None = None,
    ) -> None:
        """Make exactly these messages visible."""
        payloads = encoded(messages)
        self._apply(key, lambda old: json_file.replaced(old, payloads, _said(), expect_last))

    def truncate_history(self, key: str, keep_last: int) -> None:
        """Hide all but the last visible ones."""
        check_required(keep_last=keep_last)
        self._apply(key, lambda session: json_file.truncated(session, keep_last))

    def checkpoint(
        self, key: str, *, summary: str, upto: int, expect_floor: int | None = None
    ) -> None:
        """Replace the summary and hide everything up to this seq."""
        check_required(upto=upto)
        self._apply(key, lambda old: json_file.checkpointed(old, summary, upto, expect_floor))

    def clear(self, key: str, *, upto: int | None = None) -> None:
        """Hide the messages and empty the summary."""
        check_whole(upto=upto)

        def cleared(session: Kept) -> Kept:
            last = len(session.messages)
            end = last if upto is None else min(upto, last)
            return json_file.checkpointed(session, "", end, None)

        self._apply(key, cleared)

    def hide(self, key: str, first: int, last: int) -> None:
        """Hide the messages with these seqs, both included."""
        check_required(first=first, last=last)

        def hidden(session: Kept) -> Kept:
            end = min(last, len(session.messages))
            return json_file.hiding(session, range(max(first, 1), end + 1))

        self._apply(key, hidden)

    def pop(self, key: str) -> Message | None:
        """Hide the last visible message and return it."""
        found = self.get_history(key, last=1)
        if found:
            self.hide(key, found[0].seq, found[0].seq)
        return replace(found[0], hidden=True) if found else None

    def set_meta(self, key: str, /, **fields: Any) -> None:
        """Set fields for this process; None removes one."""
        self._check_writable()
        self._local.set_meta(key, **fields)

    def compact(self, key: str) -> Compacted:
        """Change nothing: a file has no archive."""
        check_key(key)
        return Compacted(archived=0, bytes_before=0, bytes_after=0)

    def save(self, key: str) -> None:
        """Write the file of a session again if it is gone."""
        check_key(key)
        with self._alone() as folder:
            session = self._current(folder, key)
            if session.ours and _file_mark(folder, file_name(key)) is None:
                self._write(folder, session)

    def _apply(self, key: str, decide: Callable[[Kept], Kept]) -> None:
        self._change(key, lambda session: (decide(session), None))

    def _change(self, key: str, decide: Callable[[Kept], tuple[Kept, _Result]]) -> _Result:
        """Decide on what the file holds now, and write the result before anybody sees it."""
        check_key(key)
        self._check_writable()
        with self._alone() as folder:
            before = self._current(folder, key)
            after, result = decide(before)
            if after != before:
                self._write(folder, after)
            return result

    def _check_writable(self) -> None:
        self._check_open()
        if self._lease is not None and self._lease.taken_over:
            raise LeaseLost(self._lease.key, self._lease.epoch)

    def _write(self, folder: int, session: Kept) -> None:
        key = session.key or ""
        name = file_name(key)
        if name in self._unreadable:
            raise DamagedStore(
                f"{self.directory / name}: {self._unreadable[name]}; move it away, so that {key!r} "
                "can be kept there"
            )
        now = datetime.now(UTC)
        if not session.ours:
            session = replace(
                session, ours=True, created=session.created or now, began_with=self._began(key)
            )
        session = replace(session, updated=now)
        try:
            self._make_room(folder, name, key)
            disk.replace_file(folder, name, json_file.compose(session))
        except OSError as error:
            # Perhaps it was renamed and only the last sync failed: then the file is read anew.
            self._marks.pop(name, None)
            raise StoreUnavailable(f"writing {self.directory / name}: {error.strerror}") from error
        self._know(key, session)
        self._marks[name] = _file_mark(folder, name) or (0, 0, 0)
        self._held[name] = (key, True)

    def _began(self, key: str) -> str:
        known = self._sessions.get(key)
        return known.summary if known is not None else ""

    def _make_room(self, folder: int, name: str, key: str) -> None:
        """A file of the reference under the very name of ours stays, under another one.

        What it holds is in ours, where it is the same session. Where it is another one, whose key
        the reference writes so, the copy is still a session's file.
        """
        if _file_mark(folder, name) is None or self._held.get(name) == (key, True):
            return
        is_same = self._held.get(name, (key,))[0] == key
        _copy_apart(folder, name, ".original" if is_same else json_file.SUFFIX)

    # --- what whole files do not have --------------------------------------------------------

    def undo(self, key: str, *, answered: Span | None = None) -> Undone:
        """Raise UsageError: there are no undo steps."""
        del answered
        _refuse("undo", key)

    def fork(self, key: str, new_key: str, *, at: int | None = None) -> None:
        """Raise UsageError."""
        del new_key, at
        _refuse("fork", key)

    def delete(self, key: str) -> Trashed:
        """Delete a session that has only meta; raise UsageError for any other."""
        if not _is_empty(self._known(key)):
            _refuse("delete", key)
        return self._local.delete(key)

    def restore(self, key: str, *, uid: str | None = None, as_key: str | None = None) -> None:
        """Raise UsageError."""
        del uid, as_key
        _refuse("restore", key)

    def list_trash(self) -> list[Trashed]:
        """Return an empty list."""
        self._check_open()
        return []

    def purge(self, key: str, *, before: int | None = None) -> Purged:
        """Raise UsageError: delete the file by hand."""
        del before
        _refuse("purge", key)

    # --- reading -----------------------------------------------------------------------------

    def get_history(
        self, key: str, *, last: int | None = None, after: int | None = None, full: bool = False
    ) -> list[Message]:
        """The messages by seq."""
        check_whole(after=after)
        _check_last(last)
        found = _messages(self._known(key), after=after, full=full)
        return found if last is None else found[max(0, len(found) - last) :]

    def get_summary(self, key: str) -> str:
        """The summary."""
        return self._known(key).summary

    def info(self, key: str) -> SessionInfo:
        """What the file tells. Raises NoSuchSession."""
        return self._info(key, *self._known_and_rewrites(key))

    def _info(self, key: str, session: Kept, rewrites: int) -> SessionInfo:
        meta: Mapping[str, Any] = {}
        with suppress(NoSuchSession):
            local = self._local.info(key)
            meta, rewrites = local.meta, rewrites + local.change
        if _is_empty(session) and not meta:
            raise NoSuchSession(key)
        times = [message.at for message in session.messages if message.at is not None]
        created = session.created or min(times, default=json_file.NO_TIME)
        visible = session.visible()
        return SessionInfo(
            key=key,
            uid=_uid(key),
            created=created,
            updated=session.updated or max(times, default=created),
            last_seq=len(session.messages),
            floor=session.floor(),
            visible=len(visible),
            count=len(session.messages),
            lost=0,
            damaged=0,
            void_bytes=0,
            archived=0,
            generation=1,
            bytes=sum(len(message.payload) for message in session.messages),
            undoable=0,
            summary=session.summary,
            meta=meta,
            forked_from=None,
            in_sight=tuple(spans.union([(seq, seq) for seq in visible])),
            change=rewrites,
        )

    def view(self, key: str, last: int | None = None) -> SessionView:
        """Return info, summary and visible messages of one moment."""
        _check_last(last)
        session, rewrites = self._known_and_rewrites(key)
        info = self._info(key, session, rewrites)
        messages = _messages(session)
        if last is not None:
            messages = messages[max(0, len(messages) - last) :]
        return SessionView(info=info, messages=tuple(messages), upto=info.last_seq, last=last)

    def refresh(self, view: SessionView) -> SessionView:
        """Return a full view."""
        return self.view(view.key, view.last)

    def list_sessions(
        self, *, prefix: str = "", limit: int | None = None, after: str | None = None
    ) -> list[str]:
        """Keys in order, a page at a time."""
        check_whole(limit=limit)
        if limit is not None and limit < 0:
            raise UsageError(f"limit={limit}: a number of sessions is not negative")
        self._look_around()
        keys = sorted(key for key in self._sessions if key.startswith(prefix))
        return [key for key in keys if after is None or key > after][:limit]

    def stamps(self) -> dict[str, str]:
        """For each session a mark that changes with every change."""
        self._look_around()
        local = self._local.stamps()
        return {key: f"{n}:{local.get(key, '')}" for key, n in self._versions.items()}

    def follow(
        self, key: str, *, after: int = 0, uid: str | None = None, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield each message past `after` once, by seq, as it arrives."""
        check_required(after=after)
        check_key(key)
        self._check_open()
        ask = partial(self._news, key)
        return arrivals(
            ask, self._closed.wait, key, after=after, uid=uid, timeout=timeout, poll=_POLL
        )

    def _news(self, key: str, after: int) -> News | None:
        session = self._known(key)
        if _is_empty(session):
            return None
        return _uid(key), len(session.messages), self.get_history(key, after=after, full=True)

    # --- leases, marks, health ---------------------------------------------------------------

    def lease(self, key: str, *, ttl: float, wait: float | None = None) -> "ManagerLease":
        """The turn in this session, among the threads of this process."""
        self.info(key)
        self._local.set_summary(key, "leased")  # it is known there from now on
        return ManagerLease(self._local.lease(key, ttl=ttl, wait=wait), self)

    def _behind(self, lease: InMemoryLease) -> "JSONFileStore":
        fenced = copy.copy(self)
        fenced._lease = lease
        return fenced

    def mark(self, name: str) -> str:
        """The mark of this name in this process."""
        return self._local.mark(name)

    def change_mark(self, name: str) -> None:
        """Change the mark in this process."""
        self._local.change_mark(name)

    def health(self) -> Health:
        """The state of the folder."""
        self._check_open()
        problems = [f"{name}: {reason}" for name, reason in sorted(self._unreadable.items())]
        wrong = []
        cannot = refusal(self.directory) if self.because is not None else None
        if cannot is not None:
            wrong.append(
                f"nothing can be saved, neither in the store ({self.because}) nor as {cannot}"
            )
        elif self.because is not None:
            wrong.append(
                f"sessions are kept as JSON files in {self.directory} for this run, and merged "
                f"when the store can be used again: {self.because}"
            )
        free: int | None = None
        try:
            room = os.statvfs(self.directory)
            free = room.f_bavail * room.f_frsize
        except FileNotFoundError:
            pass  # made with the first write
        except OSError as error:
            wrong.append(f"looking at {self.directory}: {error.strerror}")
        return Health(ok=not wrong, free_bytes=free, problems=(*wrong, *problems))

    def close(self) -> None:
        """Forget everything; a second call does nothing."""
        with self._mutex:
            self._closed.set()
            self._local.close()
            self._sessions.clear()
            self._marks.clear()
            self._held.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- the files ---------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[int]:
        """A descriptor of the folder, while no other thread or process is in here."""
        with self._mutex:
            self._check_open()
            try:
                disk.make_private(self.directory)
            except OSError as error:
                raise StoreUnavailable(f"making {self.directory}: {error.strerror}") from error
            with self._opened() as folder:
                what = f"the folder {self.directory}"
                disk.wait_for_lock(folder, seconds=BUSY_TIMEOUT, what=what)
                try:
                    yield folder
                finally:
                    disk.release_lock(folder)

    @contextmanager
    def _opened(self, path: Path | None = None) -> Iterator[int]:
        """A descriptor of a folder, ours or this. Raises FileNotFoundError, StoreUnavailable."""
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

    def _know(self, key: str, session: Kept) -> None:
        before = self._sessions.get(key)
        self._sessions[key] = session
        self._versions[key] = self._versions.get(key, 0) + 1
        if before is not None and not _only_appends(before, session):
            self._rewrites[key] = self._rewrites.get(key, 0) + 1

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise StoreClosed("the store is closed")

    def _known(self, key: str) -> Kept:
        return self._known_and_rewrites(key)[0]

    def _known_and_rewrites(self, key: str) -> tuple[Kept, int]:
        check_key(key)
        with self._mutex:
            self._check_open()
            with suppress(FileNotFoundError), self._opened() as folder:
                self._current(folder, key)
            return self._sessions.get(key, Kept(key=key)), self._rewrites.get(key, 0)

    def _current(self, folder: int, key: str) -> Kept:
        """The session as its file says, where another process has written it; else as known.

        A file that is gone was taken in by another process: what it held is still known here.
        """
        self._catch_up(folder, file_name(key))
        return self._sessions.get(key, Kept(key=key))

    def _look_around(self) -> None:
        """Load what is new among the files."""
        with self._mutex:
            self._check_open()
            with suppress(FileNotFoundError), self._opened() as folder:
                for name in _session_names(folder):
                    self._catch_up(folder, name)
            if self._old is not None:
                with suppress(FileNotFoundError), self._opened(self._old) as folder:
                    for name in _session_names(folder):
                        self._go_on_with(folder, name, str(self._old / name))

    def _catch_up(self, folder: int, name: str) -> None:
        """Load a file that is not as it was. Of two with one key, that under our name counts."""
        session = self._changed(folder, name, name)
        if session is None:
            return
        key = session.key or ""
        self._held[name] = (key, session.ours)
        if file_name(key) == name or key not in self._sessions:
            self._know(key, session)

    def _go_on_with(self, folder: int, name: str, path: str) -> None:
        """Load a file of the old folder. Files that stenolog wrote are another store's."""
        session = self._changed(folder, name, path)
        if session is not None and not session.ours:
            key = session.key or ""
            if key not in self._sessions:
                self._know(key, session)

    def _changed(self, folder: int, name: str, known_as: str) -> Kept | None:
        """The session in a file that is not as it was; None where it is, or there is none."""
        mark = _file_mark(folder, name)
        if mark is None or mark == self._marks.get(known_as):
            return None
        self._marks[known_as] = mark
        self._held.pop(known_as, None)
        self._unreadable.pop(known_as, None)
        try:
            session = json_file.parse(_read_file(folder, name))
            key = session.key or name.removesuffix(json_file.SUFFIX)
            check_key(key)
        except (ValueError, UsageError, OSError) as error:
            self._unreadable[known_as] = str(error)
            return None
        return replace(session, key=key)


class ManagerLease:
    """The turn in a session of JSON files."""

    def __init__(self, lease: InMemoryLease, files: JSONFileStore) -> None:
        self._lease = lease
        self.key = lease.key
        self.epoch = lease.epoch
        self.store = files._behind(lease)

    @property
    def lost(self) -> bool:
        """Whether it was released, has run out, or was taken over."""
        return self._lease.lost

    def renew(self) -> None:
        """Another ttl from now. Raises LeaseLost."""
        self._lease.renew()

    def release(self) -> None:
        """Let the next one in."""
        self._lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _refuse(call: str, key: str) -> Never:
    check_key(key)
    raise UsageError(
        f"{call} is not available here: SessionManager keeps sessions as plain JSON files"
    )


def _check_last(last: int | None) -> None:
    check_whole(last=last)
    if last is not None and last < 0:
        raise UsageError(f"last={last}: a number of messages is not negative")


def _messages(session: Kept, *, after: int | None = None, full: bool = False) -> list[Message]:
    return [
        Message(
            seq=seq,
            _at=timestamp(message.at or session.created or json_file.NO_TIME),
            _body=Raw(message.payload),
            hidden=message.hidden,
        )
        for seq, message in enumerate(session.messages, 1)
        if (full or not message.hidden) and (after is None or seq > after)
    ]


def _only_appends(before: Kept, after: Kept) -> bool:
    """Return whether a session only has more messages than before."""
    kept = after.messages[: len(before.messages)]
    return before.summary == after.summary and kept == before.messages


def _is_empty(session: Kept) -> bool:
    return not session.messages and not session.summary


def _uid(key: str) -> str:
    return sha256(key.encode()).hexdigest()[:16]


def _said(at: datetime | None = None) -> json_file.Said:
    return json_file.Said(
        at=at or datetime.now(UTC), new_token=lambda: f"json:{os.urandom(10).hex()}"
    )


# --- system calls ----------------------------------------------------------------------------


def _session_names(folder: int) -> list[str]:
    """The files that may hold a session, by name."""
    with os.scandir(folder) as entries:
        return sorted(filter(json_file.is_session_name, (entry.name for entry in entries)))


def _read_file(folder: int, name: str) -> bytes:
    """All of a file that is one, and no link. Raises OSError."""
    descriptor = os.open(name, _READ, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{name} is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def _file_mark(folder: int, name: str) -> _FileMark | None:
    """That of a file as it is now; None where there is none."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def _copy_apart(folder: int, name: str, end: str) -> None:
    """Have what a file holds under another name too, one that was free, before it is replaced.

    The name has this ending; with that of a session's file the copy is one, too. Raises OSError.
    """
    text = _read_file(folder, name)
    for other in _names_apart(name, end):
        if _file_mark(folder, other) is None:
            disk.replace_file(folder, other, text)
            return
        with suppress(OSError):
            if _read_file(folder, other) == text:
                return  # who copied it was killed before the file was replaced


def _names_apart(name: str, end: str) -> Iterator[str]:
    if end != json_file.SUFFIX:
        yield name + end
    for number in count(2):
        stem = name.removesuffix(end)
        yield f"{stem}-{number}{end}" if stem != name else f"{name}{end}-{number}"


def refusal(directory: Path) -> str | None:
    """Why no file can be written to a folder, in words; None where one can. Makes the folder."""
    files = f"JSON files in {directory}"
    try:
        disk.make_private(directory)
    except OSError as error:
        return f"{files} ({error.strerror})"
    may = os.access(directory, os.W_OK | os.X_OK)
    return None if may else f"{files} (it may not be written)"
