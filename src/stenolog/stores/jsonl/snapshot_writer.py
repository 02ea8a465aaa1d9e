"""Write copies of sessions from another store as logs.

A copy is written to a new file, with one archive for the messages that were archived. The new file
is synced, then gets its final name. If this process is killed, the next writer deletes the new
file. The archive stays without a log; the doctor reports it.
"""

import errno
import fcntl
import os
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from typing import Final

from msgspec.structs import replace

from stenolog.codec import control_line, message_line, payload_digest, plain_line
from stenolog.errors import SessionExists
from stenolog.records import Archive, Change, Message, State, Token, Void
from stenolog.stores import file_names
from stenolog.stores import state as states
from stenolog.stores.disk import (
    EXCLUSIVE_NOWAIT,
    create_private_file,
    sync_file,
    sync_folder,
    write_all,
)
from stenolog.stores.jsonl import archive, snapshots, trash
from stenolog.stores.jsonl.directory import Directory
from stenolog.stores.jsonl.lifecycle import Lifecycle
from stenolog.stores.jsonl.log import TOKEN_WINDOW
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

_TEMPORARY_NAME: Final = re.compile(r"\.[0-9a-f]{1,64}-[0-9a-f]{8}\.copy")


class JSONLSnapshotWriter:
    """Writer of session copies into one folder of logs."""

    def __init__(
        self, logs: OpenLogCache, lifecycle: Lifecycle, synced_stamps: dict[str, str]
    ) -> None:
        self._logs = logs
        self._lifecycle = lifecycle
        self._directory = logs.directory
        self._synced_stamps = synced_stamps
        self._unpublished: list[tuple[Snapshot, _NewFile]] = []
        """Sessions whose files are not yet synced or renamed to their final path."""
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

    def write(self, snapshot: Snapshot, messages: Iterable[Message]) -> None:
        """Write a session in one step. Raises the errors of `SnapshotWriter.write`."""
        try:
            self._check_new(snapshot)
            # The lock keeps other processes from changing the archives.
            with (
                archive.locked_folder(
                    self._directory, snapshot.uid, self._logs.deadline(), create=True
                )
                if snapshot.archived
                else nullcontext()
            ) as folder:
                self._write_session(snapshot, messages, folder)
        except OSError as error:
            raise Outcome(0, error).failure(f"copying {snapshot.key!r}") from error

    def _check_new(self, snapshot: Snapshot) -> None:
        """Check without a lock that the write can succeed. Raises SessionExists, ForeignLog."""
        if snapshot.uid in self._deleted_uids:
            raise SessionExists(
                snapshot.key, f"the trash has a session with the uid {snapshot.uid}"
            )
        if snapshot.deleted is not None:
            return
        if any(unpublished.key == snapshot.key for unpublished, _ in self._unpublished):
            raise SessionExists(snapshot.key)
        if self._logs.read_log(snapshot.key, lambda _: True):
            raise SessionExists(snapshot.key)
        self._logs.check_no_foreign_log(snapshot.key)

    def _write_session(
        self, snapshot: Snapshot, messages: Iterable[Message], folder: int | None
    ) -> None:
        new_file = _NewFile(self._directory, snapshot.uid)
        try:
            state, changes = state_of(snapshot)
            stream = _MessageStream(messages)
            if folder is not None:
                state.archive, state.tokens = _write_archive(
                    folder, state, stream, snapshot.archived
                )
            _write_log(new_file.descriptor, snapshot, state, changes, stream)
            if snapshot.deleted is None and folder is None:
                self._unpublished.append((snapshot, new_file))
            else:
                sync_file(new_file.descriptor)
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
                stamp = snapshots.file_stamp(os.fstat(new_file.descriptor))
                self._synced_stamps[file_names.log_name(snapshot.key)] = stamp
                self._unpublished.pop()[1].close()
        except OSError as error:
            raise Outcome(0, error).failure(f"writing to {self._directory.path}") from error

    # --- final paths -------------------------------------------------------------------------

    def _publish_file(self, snapshot: Snapshot, new_file: "_NewFile") -> None:
        """Give a new file its final name. Raises SessionExists if the key is in use; OSError."""
        if snapshot.deleted is not None:
            with self._directory.require_subfolder(trash.FOLDER, create=True) as folder:
                # guard: copy-keeps-time-of-deletion
                stamp = snapshot.deleted.replace("-", "").replace(":", "")
                new_file.rename(f"{snapshot.uid}.{stamp}{file_names.LOG_SUFFIX}", folder)
                sync_folder(folder)
            return
        name = file_names.log_name(snapshot.key)
        if new_file.link(name, self._directory.descriptor):
            return
        # The name may belong to an empty file, or links are not supported: use a rename.
        self._lifecycle.create_session(
            snapshot.key,
            lambda log: new_file.rename(log.name, self._directory.descriptor),
            f"copying {snapshot.key!r}",
        )

    # --- after a copy was interrupted --------------------------------------------------------

    def _remove_interrupted_copies(self) -> None:
        """Remove temporary files, unless another process is writing to them. Raises OSError."""
        for name in filter(_TEMPORARY_NAME.fullmatch, self._directory.list_names()):
            descriptor = self._directory.open_log(name)
            if descriptor is not None:
                with descriptor, suppress(BlockingIOError, FileNotFoundError):
                    fcntl.flock(descriptor, EXCLUSIVE_NOWAIT)
                    os.unlink(name, dir_fd=self._directory.descriptor)


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

    def close(self) -> None:
        """Close the file, and remove its temporary name."""
        with suppress(FileNotFoundError):
            os.unlink(self._name, dir_fd=self._folder)
        self.descriptor.release()


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
    reference = Archive(name=f"{first}-{upto}.jsonl.gz", first=first, last=upto)
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
    last_line = control_line("state", next_seq, snapshot.updated, state)
    for block in _join_into_blocks(
        chain(lines, _message_lines(stream.take_upto(sys.maxsize)), [last_line])
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
