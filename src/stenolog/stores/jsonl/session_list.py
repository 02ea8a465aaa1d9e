"""List the sessions of a folder, by file name and by reading the first records of a file."""

import os
import re
import stat
import weakref
from contextlib import suppress
from typing import Final

from stenolog.codec import parse_line
from stenolog.errors import StenologError
from stenolog.records import Record, StateRecord
from stenolog.stores.jsonl import log_names
from stenolog.stores.jsonl.directory import Directory, store_error
from stenolog.stores.jsonl.folder_watch import FolderWatch
from stenolog.stores.jsonl.scan import read_records
from stenolog.stores.locks import ThreadLock

_HEAD: Final = 4 * 1024
_MAX_STALE_NAMES: Final = 1_000
_COMMON_NAME: Final = re.compile(r"(?m)^[a-z0-9_-][a-z0-9_.:-]{0,60}(?=\.jsonl$)")
"""Keys that can be read from the file name in bulk; other names are handled one by one."""


def list_keys(
    directory: Directory, *, prefix: str, limit: int | None, after: str | None
) -> list[str]:
    """Return the keys in byte order. Opens only the files that may match."""
    candidates = []
    for name in directory.list_names():
        key = log_names.key_of(name)
        if key is None and log_names.is_long(name):
            key = _key_inside(directory, name)
        if key is not None and key.startswith(prefix):
            candidates.append((key.encode(), name))
    candidates.sort()
    start = b"" if after is None else after.encode("utf-8", "surrogatepass")
    found: list[str] = []
    for raw, name in candidates:
        if limit is not None and len(found) >= limit:
            break
        if raw > start and _key_inside(directory, name) == raw.decode():
            found.append(raw.decode())
    return found


def _key_inside(directory: Directory, name: str) -> str | None:
    """Return the key of the session in a file; None if the file holds no session."""
    try:
        descriptor = directory.open(name)
    except StenologError:
        return None
    if descriptor is None:
        return None
    try:
        return _read_key(descriptor, name)
    except OSError:
        return None
    finally:
        descriptor.close()


def _read_key(descriptor: int, name: str) -> str | None:
    length = _HEAD
    while True:
        text = os.pread(descriptor, length, 0)
        complete = len(text) < length
        first = parse_line(text[: text.find(b"\n")]) if not complete else None
        if isinstance(first, StateRecord):
            return first.body.key
        records, _ = read_records(text, offset=0)
        if complete and all(_is_first_state(record) for record in records):
            return None
        for record in records:
            if isinstance(record, StateRecord):
                return record.body.key
        if complete:
            return log_names.key_of(name)
        length *= 16


def _is_first_state(record: Record) -> bool:
    """Return whether the record may be all that a killed creator of a session left."""
    if not isinstance(record, StateRecord):
        return False
    return record.seq == 1 and record.body.number == 0 and record.body.generation == 1


# --- change stamps ---------------------------------------------------------------------------


def stamps(directory: Directory) -> dict[str, str]:
    """Return a stamp for each key, `inode:size:mtime`, that differs after every change of its file.

    Empty files and files with foreign names are left out. No file is opened, because that is too
    slow for ten thousand files. So the result may include logs of other programs and logs that
    were never finished; reading such a log reports the error.
    """
    with _mutex:
        cache = _caches.get(directory)
        if cache is None:
            cache = _caches[directory] = _StampCache(directory)
    return cache.stamps()


def close(directory: Directory) -> None:
    """Release the resources used to observe this folder; `stamps` may still be called again."""
    with _mutex:
        cache = _caches.pop(directory, None)
    if cache is not None:
        cache.close()


def grew(before: str, now: str) -> bool:
    """Return whether two stamps are of the same file and it became longer, as by an append."""
    inode, size, _ = before.split(":")
    new_inode, new_size, _ = now.split(":")
    return inode == new_inode and int(size) < int(new_size)


def write_time(stamp: str) -> int:
    """Return the time of the file's last write, in nanoseconds."""
    return int(stamp.rpartition(":")[2])


class _StampCache:
    """Result of the last listing of a folder, so that the next one only updates it."""

    def __init__(self, directory: Directory) -> None:
        self._mutex = ThreadLock()
        self._keys: dict[str, str | None] = {}
        self._stamps: dict[str, str] = {}
        self._listings = 0
        self._watch: FolderWatch | None = None
        # Weak: a strong reference would keep the folder open after its store is collected.
        self._directory = weakref.ref(directory)

    def stamps(self) -> dict[str, str]:
        directory = self._directory()
        assert directory is not None, "whoever asks holds it"
        with self._mutex:
            write_time = self._watch.changed() if self._watch is not None else None
            try:
                if write_time is None:
                    self._stat_all(directory)
                for name in write_time or ():
                    self._stat_one(directory, name)
            except OSError as error:
                self._end_watch()
                raise store_error(error, f"listing {directory.path}") from error
            except BaseException:
                self._end_watch()
                raise
            return self._stamps.copy()

    def close(self) -> None:
        with self._mutex:
            self._end_watch()

    def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            # Explicitly: a traceback or a cycle may keep a reference for a long time.
            watch.close()

    def _stat_all(self, directory: Directory) -> None:
        self._end_watch()
        # A command that lists once needs no watch. The watch starts before the listing, so that
        # it misses no change.
        if self._listings:
            with suppress(OSError):
                self._watch = FolderWatch(directory.descriptor)
        self._listings += 1
        found: dict[str, str] = {}
        here = directory.list_names()
        self._decode_names(here)
        folder, list_keys, lstat, is_file = directory.descriptor, self._keys, os.lstat, stat.S_ISREG
        for name in here:
            key = list_keys[name] if name in list_keys else self._key(directory, name)
            if key is not None:
                try:
                    at = lstat(name, dir_fd=folder)
                except FileNotFoundError:
                    continue
                if at.st_size and is_file(at.st_mode):
                    found[key] = f"{at.st_ino}:{at.st_size}:{at.st_mtime_ns}"
        self._stamps = found

    def _decode_names(self, here: list[str]) -> None:
        """Decode all names of the most frequent form at once."""
        if len(self._keys) > 2 * len(here) + _MAX_STALE_NAMES:
            self._keys.clear()
        text = "\n".join(here)
        if ":" in text:
            return  # our names escape ":", so a foreign name is present
        list_keys = _COMMON_NAME.findall(text.replace("%3A", ":"))
        lines = "".join([f"{key}{log_names.SUFFIX}\n" for key in list_keys]).replace(":", "%3A")
        self._keys.update(zip(lines.splitlines(), list_keys, strict=True))

    def _stat_one(self, directory: Directory, name: str) -> None:
        key = self._key(directory, name)
        if key is None:
            return
        found = directory.stat(name)
        stamp = _stamp(found) if found is not None else None
        if stamp:
            self._stamps[key] = stamp
        else:
            self._stamps.pop(key, None)

    def _key(self, directory: Directory, name: str) -> str | None:
        """Return the key of a file, without opening it if the name contains the key."""
        if name in self._keys:
            return self._keys[name]
        key = log_names.key_of(name)
        if key is None and log_names.is_long(name):
            key = _key_inside(directory, name)
            if key is None or log_names.file_name(key) != name:
                return None  # not cached: it may become a session later
        self._keys[name] = key
        return key


def _stamp(found: os.stat_result) -> str | None:
    if not found.st_size or not stat.S_ISREG(found.st_mode):
        return None
    return f"{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"


_mutex: Final = ThreadLock()
_caches: "weakref.WeakKeyDictionary[Directory, _StampCache]" = weakref.WeakKeyDictionary()
