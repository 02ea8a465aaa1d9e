"""SessionManager, the legacy store: each session one whole JSON file, rewritten as it changes.

It stands in for a run in which the real store cannot be used. The reference keeps everything in
memory until `save`. Here every write rewrites the file before it is answered: what a loop was
told is stored must survive the process (P1), and the next good start takes it from these files.
That costs a rewrite per message, in a run that is not meant to last. Processes take turns by a
lock on the folder, and read what another one wrote before they add to it.
"""

import os
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
from stenolog.stores import disk, json_file, json_folder
from stenolog.stores.failures import Failures, SessionHealth
from stenolog.stores.json_file import Kept, file_name
from stenolog.stores.locks import ThreadLock

BUSY_TIMEOUT: Final = 5.0

_Result = TypeVar("_Result")

Held = tuple[str, bool]
"""The key of the session in a file, and whether this store wrote it."""


class SessionManager:
    """The SessionStore over whole JSON files; sessions/session_store.py says what a call means.

    `because`: why it stands in for another store; `health()` says so, and is not well. `old`: a
    folder whose sessions of the reference it goes on with; nothing is ever written there.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        because: str | None = None,
        old: str | os.PathLike[str] | None = None,
    ) -> None:
        self.directory = Path(directory)
        self._because = because
        self._old = None if old is None else Path(old)
        self._failures = Failures()
        self._mutex = ThreadLock()
        self._closed = False
        self._sessions: dict[str, Kept] = {}
        self._marks: dict[str, json_folder.Mark] = {}
        """Which version of each file is known, by name."""
        self._held: dict[str, Held] = {}
        """What that version holds."""
        self._unreadable: dict[str, str] = {}
        self._failures.read("opening", None, self._look_around, otherwise=None)

    def __repr__(self) -> str:
        return f"SessionManager({str(self.directory)!r})"

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
            self._change(key, lambda old: (json_file.replaced(old, payloads, _said()), 0))

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
            if session.ours and json_folder.mark(folder, file_name(key)) is None:
                self._write(folder, session)

    def _add(
        self, call: str, key: str, message: Message | Mapping[str, Any], once: str | None
    ) -> int | None:
        def add() -> int:
            check_once(once)
            payload = encode_message(message)
            return self._change(key, lambda old: json_file.added(old, payload, _said(), once=once))

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
            self._make_room(folder, name, key)
            disk.replace_file(folder, name, json_file.compose(session))
        except OSError as error:
            # Perhaps it was renamed and only the last sync failed: then the file is read anew.
            self._marks.pop(name, None)
            raise StoreUnavailable(f"writing {self.directory / name}: {error.strerror}") from error
        self._sessions[key] = session
        self._marks[name] = json_folder.mark(folder, name) or (0, 0, 0)
        self._held[name] = (key, True)

    def _began(self, key: str) -> str:
        known = self._sessions.get(key)
        return known.summary if known is not None else ""

    def _make_room(self, folder: int, name: str, key: str) -> None:
        """A file of the reference under the very name of ours stays, under another one.

        What it holds is in ours, where it is the same session. Where it is another one, whose key
        the reference writes so, the copy is still a session's file.
        """
        if json_folder.mark(folder, name) is None or self._held.get(name) == (key, True):
            return
        is_same = self._held.get(name, (key,))[0] == key
        json_folder.copy_apart(folder, name, ".original" if is_same else json_file.SUFFIX)

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
        cannot = json_folder.refusal(self.directory) if self._because is not None else None
        if cannot is not None:
            wrong.append(
                f"nothing can be saved, neither in the store ({self._because}) nor as {cannot}"
            )
        elif self._because is not None:
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
            self._held.clear()

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
            folder = os.open(path, json_folder.READ | os.O_DIRECTORY)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreUnavailable(f"opening {path}: {error.strerror}") from error
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
                for name in json_folder.session_names(folder):
                    self._catch_up(folder, name)
            if self._old is not None:
                with suppress(FileNotFoundError), self._opened(self._old) as folder:
                    for name in json_folder.session_names(folder):
                        self._go_on_with(folder, name, str(self._old / name))

    def _catch_up(self, folder: int, name: str) -> None:
        """Load a file that is not as it was. Of two with one key, that under our name counts."""
        session = self._changed(folder, name, name)
        if session is None:
            return
        key = session.key or ""
        self._held[name] = (key, session.ours)
        if file_name(key) == name or key not in self._sessions:
            self._sessions[key] = session

    def _go_on_with(self, folder: int, name: str, path: str) -> None:
        """Load a file of the old folder. What a stand-in wrote there is another store's."""
        session = self._changed(folder, name, path)
        if session is not None and not session.ours:
            self._sessions.setdefault(session.key or "", session)

    def _changed(self, folder: int, name: str, known_as: str) -> Kept | None:
        """The session in a file that is not as it was; None where it is, or there is none."""
        mark = json_folder.mark(folder, name)
        if mark is None or mark == self._marks.get(known_as):
            return None
        self._marks[known_as] = mark
        self._held.pop(known_as, None)
        self._unreadable.pop(known_as, None)
        try:
            session = json_file.parse(json_folder.read(folder, name))
            key = session.key or name.removesuffix(json_file.SUFFIX)
            check_key(key)
        except (ValueError, UsageError, OSError) as error:
            self._unreadable[known_as] = str(error)
            return None
        return replace(session, key=key)


def _said() -> json_file.Said:
    return json_file.Said(at=datetime.now(UTC), new_token=lambda: f"json:{os.urandom(10).hex()}")
