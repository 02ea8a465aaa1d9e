"""Archives: compressed files with the hidden first lines of a log, byte for byte.

The state of a log names the newest archive, and the first line of each archive names the archive
before it. Readers follow this chain from the newest archive back.
"""

import errno
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from msgspec import Struct

from stenolog.errors import DamagedStore
from stenolog.records import Archive, Change, ChangeRecord, Message, State, StateRecord
from stenolog.stores.disk import (
    lock_until,
    open_descriptor,
    read_all,
    sync_file,
    sync_folder,
    write_all,
)
from stenolog.stores.jsonl.directory import Directory, create_private_file, store_error
from stenolog.stores.jsonl.scan import DamagedBytes, read_records

FOLDER: Final = "archive"

_GZIP: Final = 31  # window bits that make zlib read a gzip header and trailer
_BLOCK: Final = 1024 * 1024


class ArchiveContent(Struct, frozen=True):
    """Content of one archive."""

    path: str
    messages: list[Message] = []
    changes: list[Change] = []
    before: Archive | None = None
    """Name of the previous archive; None for the first archive."""
    bad: list[DamagedBytes] = []


def chain(directory: Directory, state: State, low: int) -> Iterator[ArchiveContent]:
    """Yield the archives from the newest down to the archive that contains the seq `low`."""
    named = state.archive
    while named is not None and named.last >= low:
        opened = read(directory, state.uid, named)
        yield opened
        named = opened.before if is_before(opened.before, named) else None


def is_before(named: Archive | None, other: Archive) -> bool:
    """Return whether the archive `named` may precede `other`, so that no chain is circular."""
    return named is not None and named.last < other.first


def read(directory: Directory, uid: str, named: Archive) -> ArchiveContent:
    """Return the content of one archive; `bad` lists the unreadable parts."""
    path = f"{FOLDER}/{uid}/{named.name}"
    try:
        packed = _load(directory, uid, named.name)
    except OSError as error:
        raise store_error(error, f"reading {directory.path / path}") from error
    if packed is None:
        return ArchiveContent(path, bad=[DamagedBytes(0, 0, False, b"")])
    text, complete = decompress(packed)
    records, bad = read_records(text, offset=0)
    if not complete and not bad:
        bad = [DamagedBytes(len(text), 0, False, b"")]
    states = [record.body for record in records if isinstance(record, StateRecord)]
    return ArchiveContent(
        path,
        messages=[record for record in records if isinstance(record, Message)],
        changes=[record.body for record in records if isinstance(record, ChangeRecord)],
        before=states[0].archive if states else None,
        bad=bad,
    )


def read_text(directory: Directory, uid: str, named: Archive) -> bytes:
    """Return all lines of one archive, decompressed. Raises DamagedStore if a line is missing."""
    path = directory.path / FOLDER / uid / named.name
    try:
        packed = _load(directory, uid, named.name)
    except OSError as error:
        raise store_error(error, f"reading {path}") from error
    text, complete = decompress(packed) if packed is not None else (b"", False)
    if not complete:
        raise DamagedStore(f"{path} is missing or damaged; restore it from a backup")
    return text


def _load(directory: Directory, uid: str, name: str) -> bytes | None:
    folder = directory.subfolder(FOLDER, uid, create=False)
    if folder is None:
        return None
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = open_descriptor(name, flags, dir_fd=folder)
    except FileNotFoundError:
        return None
    finally:
        folder.close()
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.ENXIO, "not a regular file", name)
        return read_all(descriptor, 0, status.st_size)
    finally:
        descriptor.close()


def decompress(packed: bytes) -> tuple[bytes, bool]:
    """Return the readable part of a gzip file, and whether the whole file is readable."""
    stream = zlib.decompressobj(_GZIP)
    parts = []
    try:
        for start in range(0, len(packed), _BLOCK):
            parts.append(stream.decompress(packed[start : start + _BLOCK]))
        parts.append(stream.flush())
    except zlib.error:
        return b"".join(parts), False
    return b"".join(parts), stream.eof


def write(folder: int, name: str, blocks: Iterable[bytes], *, level: int = 6) -> None:
    """Write these lines to a new archive, durably. Raises OSError and the errors of `blocks`."""
    packer = zlib.compressobj(level, wbits=_GZIP)
    temporary = f".{name}.new"
    descriptor = create_private_file(folder, temporary)
    try:
        for block in blocks:
            for start in range(0, len(block), _BLOCK):
                write_all(descriptor, packer.compress(block[start : start + _BLOCK]))
        write_all(descriptor, packer.flush())
        sync_file(descriptor)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    finally:
        descriptor.close()
    sync_folder(folder)


@contextmanager
def locked_folder(
    directory: Directory, uid: str, deadline: float, *, create: bool
) -> Iterator[int | None]:
    """Lock the folder of a session's archives, so that no other process changes the folder.

    Yields None if the folder does not exist. A purge removes the folder while holding this lock, so
    the folder may be gone when the lock is acquired. Raises OSError, StoreBusy.
    """
    folder = directory.subfolder(FOLDER, uid, create=create)
    if folder is None:
        yield None
        return
    try:
        lock_until(folder, deadline, f"the archive folder of the session {uid}")
        yield folder
    finally:
        folder.release()


def delete_others(folder: int, keep: frozenset[str]) -> None:
    """Delete all files except `keep` in a folder of archives.

    The caller holds the lock of the folder. Raises OSError.
    """
    with os.scandir(folder) as listing:
        other_names = [entry.name for entry in listing if entry.name not in keep]
    for name in other_names:
        os.unlink(name, dir_fd=folder)
    if other_names:
        sync_folder(folder)


def delete_all(directory: Directory, folder: int, uid: str) -> None:
    """Delete the archives of a purged session, and their folder. Raises OSError."""
    delete_others(folder, frozenset())
    above = directory.subfolder(FOLDER, create=False)
    if above is not None:
        try:
            os.rmdir(uid, dir_fd=above)
            sync_folder(above)
        finally:
            above.close()
