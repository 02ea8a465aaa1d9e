"""List the sessions of a folder: by file name, or by the first records of a file."""

import os
import re
import stat
import struct
import sys
from contextlib import suppress
from typing import Final

from stenolog.codec import parse_line
from stenolog.errors import StenologError
from stenolog.records import Record, StateRecord
from stenolog.stores import file_names
from stenolog.stores.disk import CLOSED, Descriptor
from stenolog.stores.jsonl.directory import Directory, system_errors
from stenolog.stores.jsonl.scan import read_records
from stenolog.stores.locks import ThreadLock

_FIRST_CHUNK_BYTES: Final = 4 * 1024
_MAX_STALE_NAMES: Final = 1_000
"""Maximum number of names of deleted files in the cache, plus one per existing file."""
_COMMON_NAME: Final = re.compile(r"(?m)^[a-z0-9_-][a-z0-9_.:-]{0,60}(?=\.jsonl$)")
"""Pattern of file names that are decoded in bulk; other names are decoded one by one."""


def list_keys(
    directory: Directory, *, prefix: str, limit: int | None, after: str | None
) -> list[str]:
    """Return the keys in byte order. Opens only the files that may match."""
    candidates = []
    for name in directory.list_names():
        key = file_names.key_of_log(name)
        if key is None and file_names.has_long_key(name):
            key = _key_in_file(directory, name)
        if key is not None and key.startswith(prefix):
            candidates.append((key.encode(), name))
    candidates.sort()
    raw_after = b"" if after is None else after.encode("utf-8", "surrogatepass")
    keys: list[str] = []
    for raw_key, name in candidates:
        if limit is not None and len(keys) >= limit:
            break
        if raw_key > raw_after and _key_in_file(directory, name) == raw_key.decode():
            keys.append(raw_key.decode())
    return keys


def _key_in_file(directory: Directory, name: str) -> str | None:
    """Return the key of the session in a file; None if there is no session or it is unreadable."""
    with suppress(StenologError, OSError):
        descriptor = directory.open_log(name)
        if descriptor is not None:
            with descriptor:
                return _read_key(descriptor, name)
    return None


def _read_key(descriptor: int, name: str) -> str | None:
    """Return the key in the first state, or else in the name; None if there is no session."""
    length = _FIRST_CHUNK_BYTES
    while True:
        text = os.pread(descriptor, length, 0)
        is_whole_file = len(text) < length
        first_record = parse_line(text[: text.find(b"\n")]) if not is_whole_file else None
        if isinstance(first_record, StateRecord):
            return first_record.body.key
        records, _ = read_records(text, offset=0)
        if is_whole_file and all(_is_first_state(record) for record in records):
            return None
        for record in records:
            if isinstance(record, StateRecord):
                return record.body.key
        if is_whole_file:
            return file_names.key_of_log(name)
        length *= 16


def _is_first_state(record: Record) -> bool:
    """Return whether the record is the state of a new log, before any message or change."""
    if not isinstance(record, StateRecord):
        return False
    return record.seq == 1 and record.body.number == 0 and record.body.generation == 1


# --- change stamps ---------------------------------------------------------------------------


def has_grown(old_stamp: str, new_stamp: str) -> bool:
    """Return whether two stamps belong to the same file and the file became longer."""
    inode, size, _ = old_stamp.split(":")
    new_inode, new_size, _ = new_stamp.split(":")
    return inode == new_inode and int(size) < int(new_size)


def write_time(stamp: str) -> int:
    """Return the time of the file's last write, in nanoseconds, from its stamp."""
    return int(stamp.rpartition(":")[2])


class StampCache:
    """Keys and stamps from the last listing of a folder, which the next listing updates."""

    def __init__(self, directory: Directory) -> None:
        self._mutex = ThreadLock()
        self._keys: dict[str, str | None] = {}
        self._stamps: dict[str, str] = {}
        self._listing_count = 0
        self._watch: FolderWatch | None = None
        self._directory = directory

    def stamps(self) -> dict[str, str]:
        """Return the stamp `inode:size:mtime` of each key's file. Each write changes the stamp.

        Empty files and files whose names are not log names are left out. No file is opened, because
        opening ten thousand files is too slow. So the result may include logs of other programs and
        unfinished logs.
        """
        with self._mutex, system_errors(f"listing {self._directory.path}"):
            changed_names = self._watch.changed_names() if self._watch is not None else None
            try:
                if changed_names is None:
                    self._update_all_stamps()
                for name in changed_names or ():
                    self._update_stamp(name)
            except BaseException:
                self._end_watch()
                raise
            return self._stamps.copy()

    def close(self) -> None:
        """Stop watching the folder; `stamps` may still be called again."""
        with self._mutex:
            self._end_watch()

    def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            # Close the watch now: a traceback or a cycle may keep a reference for a long time.
            watch.close()

    def _update_all_stamps(self) -> None:
        directory = self._directory
        self._end_watch()
        # A command that lists once needs no watch.
        # The watch starts before the listing, so that no change is missed.
        if self._listing_count:
            with suppress(OSError):
                self._watch = FolderWatch(directory.descriptor)
        self._listing_count += 1
        stamps_by_key: dict[str, str] = {}
        names = directory.list_names()
        self._decode_names(names)
        folder, keys, lstat, is_file = directory.descriptor, self._keys, os.lstat, stat.S_ISREG
        for name in names:
            key = keys[name] if name in keys else self._key_of_file(name)
            if key is not None:
                try:
                    status = lstat(name, dir_fd=folder)
                except FileNotFoundError:
                    continue
                if status.st_size and is_file(status.st_mode):
                    stamps_by_key[key] = f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
        self._stamps = stamps_by_key

    def _decode_names(self, names: list[str]) -> None:
        """Decode all file names of the most frequent form at once."""
        if len(self._keys) > 2 * len(names) + _MAX_STALE_NAMES:
            self._keys.clear()
        joined_names = "\n".join(names)
        if ":" in joined_names:
            return  # only other programs use ":" in names; decode all names one by one
        keys = _COMMON_NAME.findall(joined_names.replace("%3A", ":"))
        lines = "".join([f"{key}{file_names.LOG_SUFFIX}\n" for key in keys]).replace(":", "%3A")
        self._keys.update(zip(lines.splitlines(), keys, strict=True))

    def _update_stamp(self, name: str) -> None:
        key = self._key_of_file(name)
        if key is None:
            return
        status = self._directory.file_status(name)
        if status is not None and status.st_size and stat.S_ISREG(status.st_mode):
            self._stamps[key] = f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
        else:
            self._stamps.pop(key, None)

    def _key_of_file(self, name: str) -> str | None:
        """Return the key of a file, without opening it if the name contains the key."""
        if name in self._keys:
            return self._keys[name]
        key = file_names.key_of_log(name)
        if key is None and file_names.has_long_key(name):
            key = _key_in_file(self._directory, name)
            if key is None or file_names.log_name(key) != name:
                return None  # not cached, because the file may become a session later
        self._keys[name] = key
        return key


# --- files that changed since the last call, with inotify --------------------------------------
# Checking 10,000 files takes 25 ms, whatever the method.
# Linux reports every write, creation, rename and deletion in a folder by any process.
# Linux reports a change before the system call that makes the change returns.
# If events are unavailable or incomplete, the caller checks all files.
# Other operating systems, and file systems that other machines may change, provide no events.
# Events are incomplete after an overflow of the event queue, and after the folder was moved.

# Flags of inotify(7):
_MODIFY, _ATTRIB = 0x2, 0x4
_MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x40, 0x80, 0x100, 0x200
_DELETE_SELF, _MOVE_SELF, _UNMOUNT, _OVERFLOW, _IGNORED = 0x400, 0x800, 0x2000, 0x4000, 0x8000
_ONLY_FOLDERS: Final = 0x1000000
_FILE_EVENTS: Final = _MODIFY | _ATTRIB | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE
_FOLDER_EVENTS: Final = _DELETE_SELF | _MOVE_SELF
_INCOMPLETE_EVENTS: Final = _FOLDER_EVENTS | _UNMOUNT | _OVERFLOW | _IGNORED
_EVENT_STRUCT: Final = struct.Struct("iIII")
_READ_BYTES: Final = 64 * 1024

# These file systems change only through the kernel of this machine, which reports every change.
# The file systems with these numbers are ext2 to ext4, xfs, btrfs, f2fs, zfs and tmpfs.
# Each number is the f_type of a file system, the first `long` of statfs(2).
_WATCHABLE_TYPES: Final = {0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x2FC12FC1, 0x01021994}


class FolderWatch:
    """Watch of one folder, which reports the files that changed since the last call.

    The caller holds a lock. A forked child makes its own watch: a child that read the events of its
    parent would take them away.
    """

    def __init__(self, folder: int) -> None:
        """Start the watch; `folder` is a descriptor. Raises OSError if watches are unavailable."""
        self._events = CLOSED
        if sys.platform != "linux":
            raise OSError("only Linux reports changes of a folder")
        # `ctypes` is slow to import, and only callers that list repeatedly need it.
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        statfs_buffer = (ctypes.c_long * 64)()
        if libc.fstatfs(folder, statfs_buffer) < 0 or statfs_buffer[0] not in _WATCHABLE_TYPES:
            raise OSError("this file system may not report all changes")
        # With `map`, Ctrl-C cannot strike between the call and the assignment.
        descriptors = map(libc.inotify_init1, (os.O_NONBLOCK | os.O_CLOEXEC,))
        (self._events,) = map(Descriptor, descriptors)
        if self._events < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        path = f"/proc/self/fd/{folder}".encode()
        mask = _FILE_EVENTS | _FOLDER_EVENTS | _ONLY_FOLDERS
        if libc.inotify_add_watch(self._events, path, ctypes.c_uint32(mask)) < 0:
            error_code = ctypes.get_errno()
            self.close()
            raise OSError(error_code, "inotify_add_watch")

    def changed_names(self) -> set[str] | None:
        """Return the names of the files that changed since the last call.

        Return None if any file may have changed. After None, the watch must be replaced.
        """
        names: set[str] = set()
        while True:
            try:
                events = os.read(self._events, _READ_BYTES)
            except BlockingIOError:
                return names
            except OSError:
                return None
            if not _add_names(events, names):
                return None

    def close(self) -> None:
        """Close the watch. Without this call, dropping the last reference closes it."""
        descriptor, self._events = self._events, CLOSED
        descriptor.close()


def _add_names(events: bytes, names: set[str]) -> bool:
    """Add the file names in these events; return False if events may be missing."""
    offset = 0
    while offset < len(events):
        _, mask, _, length = _EVENT_STRUCT.unpack_from(events, offset)
        offset += _EVENT_STRUCT.size
        if mask & _INCOMPLETE_EVENTS:
            return False
        names.add(os.fsdecode(events[offset : offset + length].rstrip(b"\0")))
        offset += length
    return True
