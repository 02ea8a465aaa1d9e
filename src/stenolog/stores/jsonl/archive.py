"""Archives: compressed files with the hidden first lines of a log, byte for byte.

The state of a log names the newest archive, and the first line of each archive names the archive
before it. Readers follow this chain from the newest archive back.
"""

import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from msgspec import Struct

from stenolog.errors import DamagedStore
from stenolog.records import Archive, Change, ChangeRecord, Message, State, StateRecord
from stenolog.stores.disk import (
    lock_until,
    read_all,
    sync_file,
    sync_folder,
    temporary_file,
    write_all,
)
from stenolog.stores.jsonl.directory import Directory, names_in, system_errors
from stenolog.stores.jsonl.scan import DamagedBytes, read_records

FOLDER: Final = "archive"

_GZIP_WINDOW_BITS: Final = 31  # with this value, zlib reads and writes gzip files
_BLOCK_BYTES: Final = 1024 * 1024  # maximum input of one call of zlib


class ArchiveContent(Struct, frozen=True):
    """Content of one archive."""

    reference: Archive
    path: str
    messages: list[Message] = []
    changes: list[Change] = []
    previous: Archive | None = None
    """Reference to the previous archive; None for the first archive."""
    damaged: list[DamagedBytes] = []


def archive_chain(directory: Directory, state: State, lowest_seq: int) -> Iterator[ArchiveContent]:
    """Yield the archives from the newest down to the archive that contains `lowest_seq`."""
    reference = state.archive
    while reference is not None and reference.last >= lowest_seq:
        content = read_archive(directory, state.uid, reference)
        yield content
        reference = content.previous if is_before(content.previous, reference) else None


def is_before(reference: Archive | None, other: Archive) -> bool:
    """Return whether `reference` is older than `other`; this check prevents circular chains."""
    return reference is not None and reference.last < other.first


def read_archive(directory: Directory, uid: str, reference: Archive) -> ArchiveContent:
    """Return the content of one archive. Raises StoreUnavailable, DamagedStore.

    If the file is missing or incomplete, the field `damaged` of the result is not empty.
    """
    path = f"{FOLDER}/{uid}/{reference.name}"
    text, is_complete = _read_lines(directory, path)
    records, damaged = read_records(text, offset=0)
    if not is_complete and not damaged:
        damaged = [DamagedBytes(len(text), 0, False, b"")]
    archived_states = [record.body for record in records if isinstance(record, StateRecord)]
    return ArchiveContent(
        reference,
        path,
        messages=[record for record in records if isinstance(record, Message)],
        changes=[record.body for record in records if isinstance(record, ChangeRecord)],
        previous=archived_states[0].archive if archived_states else None,
        damaged=damaged,
    )


def read_archive_text(directory: Directory, uid: str, reference: Archive) -> bytes:
    """Return the decompressed lines of an archive.

    Raises StoreUnavailable; DamagedStore if the file is missing or incomplete.
    """
    path = f"{FOLDER}/{uid}/{reference.name}"
    text, is_complete = _read_lines(directory, path)
    if not is_complete:
        raise DamagedStore(
            f"{directory.path / path} is missing or damaged; restore it from a backup"
        )
    return text


def _read_lines(directory: Directory, path: str) -> tuple[bytes, bool]:
    """Return the readable lines of an archive, and whether the file exists and is complete."""
    descriptor = directory.open_to_read(path)
    if descriptor is None:
        return b"", False
    with descriptor, system_errors(f"reading {directory.path / path}"):
        packed = read_all(descriptor, 0, os.fstat(descriptor).st_size)
    return decompress(packed)


def decompress(packed: bytes) -> tuple[bytes, bool]:
    """Return the readable part of a gzip file, and whether the whole file is readable."""
    decompressor = zlib.decompressobj(_GZIP_WINDOW_BITS)
    parts = []
    try:
        for start in range(0, len(packed), _BLOCK_BYTES):
            parts.append(decompressor.decompress(packed[start : start + _BLOCK_BYTES]))
        parts.append(decompressor.flush())
    except zlib.error:
        return b"".join(parts), False
    return b"".join(parts), decompressor.eof


def write_archive(folder: int, name: str, blocks: Iterable[bytes], *, level: int = 6) -> None:
    """Write blocks of lines to a new archive, durably. Raises OSError and errors of `blocks`."""
    compressor = zlib.compressobj(level, wbits=_GZIP_WINDOW_BITS)
    temporary_name = f".{name}.new"
    with temporary_file(folder, temporary_name) as descriptor:
        for block in blocks:
            for start in range(0, len(block), _BLOCK_BYTES):
                write_all(descriptor, compressor.compress(block[start : start + _BLOCK_BYTES]))
        write_all(descriptor, compressor.flush())
        sync_file(descriptor)
        os.rename(temporary_name, name, src_dir_fd=folder, dst_dir_fd=folder)
    sync_folder(folder)


@contextmanager
def locked_folder(
    directory: Directory, uid: str, deadline: float, *, create: bool
) -> Iterator[int | None]:
    """Lock the folder of a session's archives, so that no other process changes the archives.

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


def delete_except(folder: int, kept_names: frozenset[str]) -> None:
    """Delete all files in a folder of archives, except the files with these names.

    The caller holds the lock of the folder. Raises OSError.
    """
    other_names = [name for name in names_in(folder) if name not in kept_names]
    for name in other_names:
        os.unlink(name, dir_fd=folder)
    if other_names:
        sync_folder(folder)


def delete_archives(directory: Directory, folder: int, uid: str) -> None:
    """Delete the archives of a purged session, and their folder. Raises OSError."""
    delete_except(folder, frozenset())
    with directory.require_subfolder(FOLDER, create=False) as parent:
        os.rmdir(uid, dir_fd=parent)
        sync_folder(parent)
