"""Write copies of sessions from another store as logs.

A copy is always written completely: to a new file, with one archive for the messages that were
archived. The new file is synced, then renamed to its final path while the writer holds the lock of
the replaced copy. If the session has moved (another key, into or out of the trash), the new file
gets its name before the old file is removed. A note in the folder names the session, the old file
and the new file. If this process is killed, the next copy reads the note, and deletes the old file
and the archives that no state names.

The last line of a new copy is a change without effect. As long as only state records follow this
change, the copy has not been changed since it was written.
"""

import errno
import fcntl
import os
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from stenolog.codec import control_line, message_line, payload_digest, plain_line
from stenolog.errors import DamagedStore, SessionExists, StoreBusy
from stenolog.records import Archive, Change, Message, State, Token, Void
from stenolog.stores import file_names
from stenolog.stores import state as states
from stenolog.stores.disk import (
    EXCLUSIVE_NOWAIT,
    create_private_file,
    replace_file,
    sync_file,
    sync_folder,
    write_all,
)
from stenolog.stores.jsonl import archive, snapshots, trash
from stenolog.stores.jsonl.directory import Directory
from stenolog.stores.jsonl.lifecycle import Lifecycle
from stenolog.stores.jsonl.log import TOKEN_WINDOW, Log
from stenolog.stores.jsonl.open_logs import OpenLogCache
from stenolog.stores.jsonl.writer import Outcome
from stenolog.stores.snapshots import Snapshot, state_of, token_of

_BLOCK_BYTES: Final = 1024 * 1024
_MAX_UNPUBLISHED: Final = 64
"""Maximum number of new files that are open at once."""
_MAX_PARALLEL_SYNCS: Final = 16
"""Number of files that are synced at the same time; disks combine parallel syncs."""
_COMPRESSION_LEVEL: Final = 1
"""Compression level of archives: fast rather than small."""

_NOTE_NAME: Final = re.compile(r"\.[0-9a-f]{1,64}-archives\.copy")
_TEMPORARY_NAME: Final = re.compile(r"\.[0-9a-f]{1,64}-[0-9a-f]{8}\.copy")


class JSONLSnapshotWriter:
    """Writer of session copies into one folder of logs."""

    def __init__(
        self, logs: OpenLogCache, lifecycle: Lifecycle, cache: snapshots.SnapshotCache
    ) -> None:
        self._logs = logs
        self._lifecycle = lifecycle
        self._directory = logs.directory
        self._cache = cache
        self._unpublished: list[tuple[Snapshot, _NewFile]] = []
        """New sessions whose files are not yet synced or renamed to their final path."""
        self._deleted_uids: set[str] = set()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Make the copies durable when the `with` ends. Raises NotStored, MaybeStored."""
        try:
            self._directory.sync_renames()
            self._remove_interrupted_copies()
            self._deleted_uids = {entry.uid for entry in trash.list_entries(self._directory)}
        except OSError as error:
            raise Outcome(0, error).failure(f"writing to {self._directory.path}") from error
        try:
            yield
            self._publish_all()
        finally:
            while self._unpublished:
                self._unpublished.pop()[1].close()
            try:
                self._directory.sync_entries()
            except OSError as error:
                action = f"syncing {self._directory.path}"
                raise Outcome(0, error, is_unknown=True).failure(action) from error

    def write(
        self, snapshot: Snapshot, messages: Iterable[Message], *, instead_of: str = ""
    ) -> None:
        """Write a session in one step. Raises the errors of `SnapshotWriter.write`."""
        try:
            deadline = self._logs.deadline()
            with archive.locked_folder(
                self._directory, snapshot.uid, deadline, create=snapshot.archived > 0
            ) as folder:
                self._write_session(snapshot, messages, instead_of, folder)
        except OSError as error:
            raise Outcome(0, error).failure(f"copying {snapshot.key!r}") from error

    def _write_session(
        self, snapshot: Snapshot, messages: Iterable[Message], instead_of: str, folder: int | None
    ) -> None:
        self._check_replaceable(snapshot, instead_of)
        new_file = _NewFile(self._directory, snapshot.uid)
        try:
            generation = self._replaced_generation(snapshot, instead_of) + 1 if instead_of else 1
            archive_names = _write_snapshot(
                new_file.descriptor, snapshot, messages, generation, folder
            )
            if not instead_of and snapshot.deleted is None and folder is None:
                self._unpublished.append((snapshot, new_file))
            else:
                sync_file(new_file.descriptor)
                if instead_of:
                    self._replace_copy(snapshot, new_file, instead_of, folder, archive_names)
                else:
                    self._publish_file(snapshot, new_file)
                new_file.close()
        except BaseException as error:
            new_file.close()
            if isinstance(error, OSError):
                outcome = Outcome(0, error, is_unknown=new_file.has_final_name)
                raise outcome.failure(f"copying {snapshot.key!r}") from error
            raise
        if len(self._unpublished) >= _MAX_UNPUBLISHED:
            self._publish_all()

    def _publish_all(self) -> None:
        """Sync the new sessions, many at a time, and move each to its final path."""
        try:
            # `concurrent.futures` is slow to import, and only copies of sessions need the module.
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(_MAX_PARALLEL_SYNCS) as pool:
                list(pool.map(sync_file, [file.descriptor for _, file in self._unpublished]))
            while self._unpublished:
                snapshot, new_file = self._unpublished[-1]
                self._publish_file(snapshot, new_file)
                self._cache.synced_stamps.add(new_file.stamp(file_names.log_name(snapshot.key)))
                self._unpublished.pop()[1].close()
        except OSError as error:
            raise Outcome(0, error).failure(f"writing to {self._directory.path}") from error

    # --- checks ------------------------------------------------------------------------------

    def _check_replaceable(self, snapshot: Snapshot, instead_of: str) -> None:
        """Check without a lock that the write can succeed. Raises SessionExists, StoreBusy."""
        if instead_of:
            if snapshots.stamp_of(self._directory, _path_in_stamp(instead_of)) != instead_of:
                raise _changed_error(snapshot)
        elif snapshot.uid in self._deleted_uids:
            raise SessionExists(
                snapshot.key, f"the trash has a session with the uid {snapshot.uid}"
            )
        elif any(unpublished.key == snapshot.key for unpublished, _ in self._unpublished):
            raise SessionExists(snapshot.key)
        if snapshot.deleted is None:
            uid = self._logs.read_log(snapshot.key, lambda log: log.known_state().uid)
            if uid is not None and uid != snapshot.uid:
                raise SessionExists(snapshot.key)

    def _replaced_generation(self, snapshot: Snapshot, instead_of: str) -> int:
        """Return the generation of the copy to be replaced."""
        with self._open_copy(snapshot, _path_in_stamp(instead_of), hold=False) as log, log.mutex:
            return log.known_state().generation

    @contextmanager
    def _open_copy(self, snapshot: Snapshot, path: str, *, hold: bool) -> Iterator[Log]:
        """Open the copy of this session at a path, and lock it if `hold`. Raises StoreBusy."""
        until = self._logs.deadline()
        with snapshots.open_log_at(
            self._directory, path, snapshot.uid, until=until, hold=hold
        ) as log:
            if log is None:
                raise _changed_error(snapshot)
            yield log

    # --- final paths -------------------------------------------------------------------------

    def _publish_file(self, snapshot: Snapshot, new_file: "_NewFile") -> None:
        """Give a new file its final name. Raises SessionExists if the key is in use; OSError."""
        if snapshot.deleted is not None:
            with self._directory.require_subfolder(trash.FOLDER, create=True) as folder:
                new_file.rename(_trash_name(snapshot), folder)
                sync_folder(folder)
            return
        name = file_names.log_name(snapshot.key)
        if self._directory.file_status(name) is None:
            self._logs.check_no_foreign_log(snapshot.key)
            if new_file.link(name, self._directory.descriptor):
                return
        # The name may belong to an empty file, or links are not supported: use a rename.
        self._lifecycle.create_session(
            snapshot.key,
            lambda log: new_file.rename(log.name, self._directory.descriptor),
            f"copying {snapshot.key!r}",
        )

    def _replace_copy(
        self,
        snapshot: Snapshot,
        new_file: "_NewFile",
        instead_of: str,
        folder: int | None,
        archive_names: frozenset[str],
    ) -> None:
        """Give a new file its final name, and remove the replaced copy."""
        note = _ReplacementNote(
            snapshot.key,
            snapshot.uid,
            old_path=_path_in_stamp(instead_of),
            path=_copy_path(snapshot),
        )
        has_note = folder is not None or note.has_new_path
        if has_note:
            replace_file(
                self._directory.descriptor, _note_name(snapshot.uid), msgspec.json.encode(note)
            )
        with self._open_copy(snapshot, note.old_path, hold=True) as log:
            stamp = snapshots.stamp_of(self._directory, note.old_path)
            if stamp != instead_of:
                raise _changed_error(snapshot)
            if note.has_new_path:
                self._publish_file(snapshot, new_file)
                self._directory.sync_entries()
                self._delete_durably(note.old_path)
            else:
                # Delete the temporary file of a killed process; a running one would hold the lock.
                with suppress(FileNotFoundError):
                    os.unlink(f".{log.name}.new", dir_fd=self._directory.descriptor)
                new_file.rename(note.path, self._directory.descriptor)
                self._sync_folder_of(note.path)
        if folder is not None:
            archive.delete_except(folder, archive_names)
        if has_note:
            self._delete_note(snapshot.uid)

    def _delete_durably(self, path: str) -> None:
        """Delete the file at this path, and sync its folder."""
        os.unlink(path, dir_fd=self._directory.descriptor)
        self._sync_folder_of(path)

    def _sync_folder_of(self, path: str) -> None:
        if path.startswith(f"{trash.FOLDER}/"):
            with self._directory.require_subfolder(trash.FOLDER, create=True) as folder:
                sync_folder(folder)
        else:
            self._directory.sync_entries()

    # --- after a copy was interrupted --------------------------------------------------------

    def _remove_interrupted_copies(self) -> None:
        """Remove the files of interrupted copies. Raises OSError, StoreBusy."""
        for name in self._directory.list_names():
            if _TEMPORARY_NAME.fullmatch(name):
                self._remove_unlocked(name)
            elif _NOTE_NAME.fullmatch(name):
                self._finish_replacement(name)

    def _remove_unlocked(self, name: str) -> None:
        """Remove a temporary file unless another process is writing to it."""
        descriptor = self._directory.open_log(name)
        if descriptor is not None:
            with descriptor, suppress(BlockingIOError, FileNotFoundError):
                fcntl.flock(descriptor, EXCLUSIVE_NOWAIT)
                os.unlink(name, dir_fd=self._directory.descriptor)

    def _finish_replacement(self, name: str) -> None:
        """Remove the replaced copy that a note names, and archives that no state names."""
        try:
            note = _parse_note((self._directory.path / name).read_bytes())
        except msgspec.DecodeError as error:
            raise DamagedStore(
                f"{self._directory.path / name} is damaged ({error}); delete it, and find "
                "unreferenced archives with `steno doctor`"
            ) from error
        until = self._logs.deadline()
        with ExitStack() as stack:
            folder = stack.enter_context(
                archive.locked_folder(self._directory, note.uid, until, create=False)
            )
            paths = [note.path, note.old_path] if note.has_new_path else [note.path]
            logs = []
            for path in paths:
                context = snapshots.open_log_at(
                    self._directory, path, note.uid, until=until, hold=True
                )
                if (log := stack.enter_context(context)) is not None:
                    logs.append(log)
            if len(logs) > 1 and snapshots.is_untouched(logs[1]):
                self._delete_durably(note.old_path)
            if folder is not None and logs:
                with logs[0].mutex:
                    state = states.copy_state(logs[0].known_state())
                archives = archive.archive_chain(self._directory, state, 1)
                archive.delete_except(folder, frozenset(c.reference.name for c in archives))
        self._delete_note(note.uid)

    def _delete_note(self, uid: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(_note_name(uid), dir_fd=self._directory.descriptor)


class _NewFile:
    """A temporary file that is deleted on close unless it was given a final name."""

    def __init__(self, directory: Directory, uid: str) -> None:
        self._folder = directory.descriptor
        self._name = f".{uid}-{os.urandom(4).hex()}.copy"
        self.has_final_name = False
        """Whether the file was given its final name, which may not be synced yet."""
        self.descriptor = create_private_file(self._folder, self._name)
        # The lock prevents other copying processes from removing the file.
        # The lock also prevents appends before the name of the file is on the disk.
        fcntl.flock(self.descriptor, EXCLUSIVE_NOWAIT)

    def link(self, name: str, folder: int) -> bool:
        """Link the file to a name; return False if the name is taken or links are not supported."""
        try:
            os.link(self._name, name, src_dir_fd=self._folder, dst_dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                return False
            raise
        self.has_final_name = True
        return True

    def rename(self, name: str, folder: int) -> None:
        """Rename the file, replacing a file of that name. Raises OSError."""
        os.rename(self._name, name, src_dir_fd=self._folder, dst_dir_fd=folder)
        self.has_final_name = True

    def stamp(self, path: str) -> str:
        """Return the change stamp that this file has at a path."""
        return snapshots.file_stamp(path, os.fstat(self.descriptor))

    def close(self) -> None:
        """Close the file, and remove its temporary name."""
        with suppress(FileNotFoundError):
            os.unlink(self._name, dir_fd=self._folder)
        self.descriptor.release()


class _ReplacementNote(Struct, frozen=True):
    """Content of a note file: the paths of a copy that is being replaced and of the new copy."""

    key: str
    uid: str
    old_path: str = ""
    """Path of the replaced copy."""
    path: str = ""
    """Path of the new copy."""

    @property
    def has_new_path(self) -> bool:
        """Whether the new copy has another path than the replaced copy."""
        return self.path != self.old_path


def _parse_note(text: bytes) -> _ReplacementNote:
    """Return the note that a file holds. Raises DecodeError."""
    note = msgspec.json.decode(text, type=_ReplacementNote)
    if not note.path:
        # A note of an earlier version has no paths, because copies were replaced in place.
        path = file_names.log_name(note.key)
        return replace(note, old_path=path, path=path)
    return note


def _note_name(uid: str) -> str:
    return f".{uid}-archives.copy"


def _write_snapshot(
    descriptor: int,
    snapshot: Snapshot,
    messages: Iterable[Message],
    generation: int,
    folder: int | None,
) -> frozenset[str]:
    """Write a complete log; return the names of its archives. Raises OSError."""
    state, changes = state_of(snapshot, generation=generation)
    stream = _MessageStream(messages)
    if snapshot.archived and folder is not None:
        state.archive, state.tokens = _write_archive(folder, state, stream, snapshot.archived)
    _write_log(descriptor, snapshot, state, changes, stream)
    return frozenset() if state.archive is None else frozenset([state.archive.name])


class _MessageStream:
    """Stream of messages by seq; `next_message` peeks at the next message."""

    def __init__(self, messages: Iterable[Message]) -> None:
        self._messages = iter(messages)
        self.next_message = next(self._messages, None)
        """Next message; None at the end."""

    def take_upto(self, seq: int) -> Iterator[Message]:
        """Yield the messages up to this seq, and remove them from the stream."""
        while (message := self.next_message) is not None and message.seq <= seq:
            self.next_message = next(self._messages, None)
            yield message


def _write_archive(
    folder: int, state: State, stream: _MessageStream, upto: int
) -> tuple[Archive, list[Token]]:
    """Write the messages up to a seq to a new archive; return the archive and its tokens.

    The tokens are the idempotency keys of the archived messages.
    """
    # If no archived message is left, the state still records the last archived seq.
    first = min(stream.next_message.seq, upto) if stream.next_message is not None else upto
    generation_suffix = "" if state.generation == 1 else f".{state.generation}"
    reference = Archive(name=f"{first}-{upto}{generation_suffix}.jsonl.gz", first=first, last=upto)
    head = states.blank_state(state.key, state.uid, state.generation, state.created)
    head.purged = state.purged
    tokens: deque[_TokenMessages] = deque(maxlen=TOKEN_WINDOW)
    lines = _message_lines(_collect_tokens(stream.take_upto(upto), tokens))
    first_line = control_line("state", first, state.created, head)
    archive.write_archive(
        folder,
        reference.name,
        _join_into_blocks(chain([first_line], lines)),
        level=_COMPRESSION_LEVEL,
    )
    # An idempotency key with missing messages has an empty digest.
    return reference, [
        Token(token, start, count, payload_digest(bodies) if len(bodies) == count else "")
        for token, count, start, bodies in tokens
    ]


def _write_log(
    descriptor: int, snapshot: Snapshot, state: State, changes: list[Change], stream: _MessageStream
) -> None:
    first = stream.next_message.seq if stream.next_message is not None else snapshot.last_seq + 1
    at, next_seq = snapshot.created, snapshot.last_seq + 1
    # Only the states hold the idempotency keys of missing messages.
    state.tokens = [*state.tokens, *snapshot.tokens]
    head_line = control_line("state", first, at, state)
    lines = [head_line, control_line("state", first, at, state, joined=True)]
    if snapshot.void:
        lines.append(control_line("void", first, at, Void(0, snapshot.void), joined=True))
    for change in changes:
        full_change = replace(change, floor=state.floor, hidden=state.hidden)
        lines.append(control_line("change", first, at, full_change, joined=True))
    op = f"{snapshots.COPIED} {snapshots.location_hash(snapshot.key, snapshot.deleted)}"
    copy_change = Change(op=op, number=0, floor=state.floor, hidden=state.hidden)
    last_lines = [
        control_line("state", next_seq, snapshot.updated, state),
        control_line("change", next_seq, snapshot.updated, copy_change, joined=True),
    ]
    for block in _join_into_blocks(
        chain(lines, _message_lines(stream.take_upto(sys.maxsize)), last_lines)
    ):
        write_all(descriptor, block)


def _join_into_blocks(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines joined into larger blocks."""
    block_lines: list[bytes] = []
    size = 0
    for line in lines:
        block_lines.append(line)
        size += len(line)
        if size >= _BLOCK_BYTES:
            yield b"".join(block_lines)
            block_lines, size = [], 0
    yield b"".join(block_lines)


def _message_lines(messages: Iterable[Message]) -> Iterator[bytes]:
    """Yield the line of each message; messages of one idempotency key form a batch."""
    batch = (0, 0)  # first seq and number of messages
    for message in messages:
        seq, body = message.seq, message.to_json()
        token = token_of(message)
        if token is not None:
            batch = (seq, token[1])
        position = seq - batch[0] + 1
        if token is None and position > batch[1]:
            yield plain_line(seq, message._at, body)
        else:
            part = (position, batch[1]) if batch[1] > 1 else None
            yield message_line(seq, message._at, body, part=part, once=message._once)


_TokenMessages = tuple[str, int, int, list[bytes]]
"""Idempotency key, and the number, first seq and bodies of the messages with this key."""


def _collect_tokens(
    messages: Iterable[Message], tokens: deque[_TokenMessages]
) -> Iterator[Message]:
    """Yield these messages, and add their idempotency keys to `tokens`."""
    for message in messages:
        if (token := token_of(message)) is not None:
            tokens.append((*token, message.seq, []))
        if tokens:
            _, count, first, bodies = tokens[-1]
            if message.seq < first + count:
                bodies.append(message.to_json())
        yield message


# --- names -----------------------------------------------------------------------------------


def _path_in_stamp(stamp: str) -> str:
    """Return the path that a change stamp contains, relative to the folder."""
    return stamp.rsplit(":", 3)[0]


def _copy_path(snapshot: Snapshot) -> str:
    """Return the path for the copy of a session, relative to the folder."""
    if snapshot.deleted is None:
        return file_names.log_name(snapshot.key)
    return f"{trash.FOLDER}/{_trash_name(snapshot)}"


def _trash_name(snapshot: Snapshot) -> str:
    deleted = snapshot.deleted or ""  # guard: copy-keeps-time-of-deletion
    stamp = deleted.replace("-", "").replace(":", "")
    return f"{snapshot.uid}.{stamp}{file_names.LOG_SUFFIX}"


def _changed_error(snapshot: Snapshot) -> StoreBusy:
    return StoreBusy(f"{snapshot.key!r}: the copy to replace has changed; try again")
