"""SessionManager, the legacy store: each session one whole JSON file, rewritten as it changes.

It stands in for a run in which the real store cannot be used. The reference keeps everything in
memory until `save`. Here every write rewrites the file before it is answered: what a loop was
told is stored must survive the process (P1), and the next good start takes it from these files.
That costs a rewrite per message, in a run that is not meant to last. Processes take turns by a
lock on the folder, and read what another one wrote before they add to it.
"""

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec import Raw
from msgspec.structs import replace

from stenolog.codec import check_key, check_once, encode_message
from stenolog.errors import DamagedStore, StoreClosed, StoreUnavailable, UsageError
from stenolog.records import Health, Message, timestamp
from stenolog.stores import disk, json_file
from stenolog.stores.failures import Failures, SessionHealth
from stenolog.stores.json_file import Kept, file_name
from stenolog.stores.locks import ThreadLock

BUSY_TIMEOUT: Final = 5.0

_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_Result = TypeVar("_Result")

Mark = tuple[int, int, int]
"""Tells one version of a file from another: inode, size, time of change."""


class SessionManager:
    """The SessionStore over whole JSON files; sessions/session_store.py says what a call means.

    `because`: why it stands in for another store; `health()` says so, and is not well.
    """

    def __init__(self, directory: str | os.PathLike[str], *, because: str | None = None) -> None:
        self.directory = Path(directory)
        self._because = because
        self._failures = Failures()
        self._mutex = ThreadLock()
        self._closed = False
        self._sessions: dict[str, Kept] = {}
        self._marks: dict[str, Mark] = {}
        """Which version of each file is known, by name."""
        self._unreadable: dict[str, str] = {}
        self._failures.read("opening", None, self._look_around, otherwise=None)

    @property
    def store(self) -> None:
        """None: there is no store beneath whose calls could raise when they fail."""
        return

    # --- writing -----------------------------------------------------------------------------

    def add_message(
        self, key: str, role: str, content: Any, *, once: str | None = None
    ) -> int | None:
        """Append a message; its seq. A failure gives None and is logged and counted."""
        return self._add("add_message", key, {"role": role, "content": content}, once)

    def add_full_message(
        self, key: str, message: Message | Mapping[str, Any], *, once: str | None = None
    ) -> int | None:
        """Append a message; its seq. A failure gives None and is logged and counted."""
        return self._add("add_full_message", key, message, once)

    def set_summary(self, key: str, text: str) -> bool:
        """Replace the summary. A failure gives False and is logged and counted."""
        return self._failures.change(
            "set_summary",
            key,
            lambda: self._change(key, lambda old: (json_file.summarised(old, text), 0)),
        )

    def set_history(self, key: str, messages: Sequence[Message | Mapping[str, Any]]) -> bool:
        """Replace what is visible. A failure gives False and is logged and counted."""

        def change() -> None:
            if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
                raise UsageError(f"a list of messages is wanted, not {type(messages).__name__}")
            payloads = [encode_message(message) for message in messages]
            self._change(key, lambda old: (json_file.replaced(old, payloads), 0))

        return self._failures.change("set_history", key, change)

    def truncate_history(self, key: str, keep_last: int) -> bool:
        """Hide all but the last ones. A failure gives False and is logged and counted."""
        return self._failures.change(
            "truncate_history",
            key,
            lambda: self._change(key, lambda old: (json_file.truncated(old, keep_last), 0)),
        )

    def checkpoint(
        self, key: str, *, summary: str, upto: int, expect_floor: int | None = None
    ) -> bool:
        """Summary and floor in one step. A failure gives False and is logged and counted."""
        return self._failures.change(
            "checkpoint",
            key,
            lambda: self._change(
                key, lambda old: (json_file.checkpointed(old, summary, upto, expect_floor), 0)
            ),
        )

    def save(self, key: str) -> None:
        """Write the file anew where it is gone; every write was on disk when it was answered.

        A failure is raised.
        """
        check_key(key)
        with self._alone() as folder:
            session = self._current(folder, key)
            if session.ours and _mark(folder, file_name(key)) is None:
                self._write(folder, session)

    def _add(
        self, call: str, key: str, message: Message | Mapping[str, Any], once: str | None
    ) -> int | None:
        def add() -> int:
            check_once(once)
            payload = encode_message(message)
            return self._change(key, lambda old: json_file.added(old, payload, once))

        return self._failures.write(call, key, add)

    def _change(self, key: str, decide: Callable[[Kept], tuple[Kept, _Result]]) -> _Result:
        """Decide on what the file says now, and have it on disk before anybody sees it."""
        check_key(key)
        with self._alone() as folder:
            before = self._current(folder, key)
            after, result = decide(before)
            if after != before:
                self._write(folder, after)
            return result

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
            self._keep_original(folder, name, key)
            disk.replace_file(folder, name, json_file.compose(session))
        except OSError as error:
            # Perhaps it was renamed and only the last sync failed: then the file is read anew.
            self._marks.pop(name, None)
            raise StoreUnavailable(f"writing {self.directory / name}: {error.strerror}") from error
        self._sessions[key] = session
        self._marks[name] = _mark(folder, name) or (0, 0, 0)

    def _began(self, key: str) -> str:
        known = self._sessions.get(key)
        return known.summary if known is not None else ""

    def _keep_original(self, folder: int, name: str, key: str) -> None:
        """A file of the reference under the very name of ours stays, under another one."""
        known, original = self._sessions.get(key), f"{name}.original"
        if known is None or known.ours or _mark(folder, name) is None:
            return
        if _mark(folder, original) is None:
            disk.replace_file(folder, original, _read(folder, name))

    # --- reading -----------------------------------------------------------------------------

    def get_history(
        self, key: str, *, last: int | None = None, after: int | None = None, full: bool = False
    ) -> list[Message]:
        """The messages by seq. A failure gives an empty list and is logged and counted."""

        def read() -> list[Message]:
            if last is not None and last < 0:
                raise UsageError(f"last={last}: how many messages, 0 or more")
            found = [
                Message(
                    seq=seq,
                    _at=timestamp(message.at or session.created or json_file.NO_TIME),
                    _body=Raw(message.payload),
                    hidden=message.hidden,
                )
                for session in [self._known(key)]
                for seq, message in enumerate(session.messages, 1)
                if (full or not message.hidden) and (after is None or seq > after)
            ]
            return found if last is None else found[max(0, len(found) - last) :]

        return self._failures.read("get_history", key, read, otherwise=[])

    def get_summary(self, key: str) -> str:
        """The summary. A failure gives an empty text and is logged and counted."""
        return self._failures.read(
            "get_summary", key, lambda: self._known(key).summary, otherwise=""
        )

    def list_sessions(
        self, *, prefix: str = "", limit: int | None = None, after: str | None = None
    ) -> list[str]:
        """A page of keys. A failure gives an empty list and is logged and counted."""

        def read() -> list[str]:
            if limit is not None and limit < 0:
                raise UsageError(f"limit={limit}: how many keys, 0 or more")
            self._look_around()
            keys = sorted(key for key in self._sessions if key.startswith(prefix))
            return [key for key in keys if after is None or key > after][:limit]

        return self._failures.read("list_sessions", None, read, otherwise=[])

    def health(self) -> SessionHealth:
        """The state of the folder and the failures here. A failure to ask is a problem in it."""
        return self._failures.health(self._health)

    def _health(self) -> Health:
        problems = [f"{name}: {reason}" for name, reason in sorted(self._unreadable.items())]
        wrong = []
        if self._because is not None:
            wrong.append(
                f"sessions are kept as JSON files in {self.directory} for this run, and merged "
                f"when the store can be used again: {self._because}"
            )
        free: int | None = None
        if self._closed:
            wrong.append("the store is closed")
        else:
            try:
                room = os.statvfs(self.directory)
                free = room.f_bavail * room.f_frsize
            except FileNotFoundError:
                pass  # made with the first write
            except OSError as error:
                wrong.append(f"looking at {self.directory}: {error.strerror}")
        return Health(ok=not wrong, free_bytes=free, problems=(*wrong, *problems))

    def close(self) -> None:
        """Forget everything, once. A failure would be logged, not raised; there is none."""
        with self._mutex:
            self._closed = True
            self._sessions.clear()
            self._marks.clear()

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
    def _opened(self) -> Iterator[int]:
        """A descriptor of the folder. Raises FileNotFoundError, StoreUnavailable."""
        # Opened each time: a forked child that inherited it would share the lock.
        try:
            folder = os.open(self.directory, _READ | os.O_DIRECTORY)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreUnavailable(f"opening {self.directory}: {error.strerror}") from error
        try:
            yield folder
        finally:
            os.close(folder)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the store is closed")

    def _known(self, key: str) -> Kept:
        check_key(key)
        with self._mutex:
            self._check_open()
            with suppress(FileNotFoundError), self._opened() as folder:
                return self._current(folder, key)
            return self._sessions.get(key, Kept(key=key))

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
                with os.scandir(folder) as entries:
                    names = [entry.name for entry in entries]
                for name in sorted(filter(json_file.is_session_name, names)):
                    self._catch_up(folder, name)

    def _catch_up(self, folder: int, name: str) -> None:
        """Load a file that is not as it was. Of two with one key, that under our name counts."""
        mark = _mark(folder, name)
        if mark is None or mark == self._marks.get(name):
            return
        self._marks[name] = mark
        self._unreadable.pop(name, None)
        try:
            session = json_file.parse(_read(folder, name))
            key = session.key or name.removesuffix(json_file.SUFFIX)
            check_key(key)
        except (ValueError, UsageError, OSError) as error:
            self._unreadable[name] = str(error)
            return
        if file_name(key) == name or key not in self._sessions:
            self._sessions[key] = replace(session, key=key)


def _read(folder: int, name: str) -> bytes:
    """All of a file that is one, and no link. Raises OSError."""
    descriptor = os.open(name, _READ, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{name} is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def _mark(folder: int, name: str) -> Mark | None:
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns)
