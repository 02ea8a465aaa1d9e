"""Which sessions a folder holds: by file name, and by a look inside."""

import os
import re
import stat
import weakref
from contextlib import suppress
from typing import Final

from stenolog.codec import parse_line
from stenolog.errors import StenologError
from stenolog.records import Record, StateRecord
from stenolog.stores.jsonl import names
from stenolog.stores.jsonl.directory import Directory, explained
from stenolog.stores.jsonl.scan import gather
from stenolog.stores.jsonl.watch import Watch
from stenolog.stores.locks import ThreadLock

_HEAD: Final = 4 * 1024
_MOST_FORGOTTEN: Final = 1_000
_USUAL: Final = re.compile(r"(?m)^[a-z0-9_-][a-z0-9_.:-]{0,60}(?=\.jsonl$)")
"""Keys that are read off their names; the others are looked at one by one."""


def keys(directory: Directory, *, prefix: str, limit: int | None, after: str | None) -> list[str]:
    """Keys in the order of their bytes. Only files that come into question are opened."""
    candidates = []
    for name in directory.names():
        key = names.key_of(name)
        if key is None and names.is_long(name):
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
    """The key of a file that holds a session of ours; None for any other."""
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
        whole = len(text) < length
        first = parse_line(text[: text.find(b"\n")]) if not whole else None
        if isinstance(first, StateRecord):
            return first.body.key
        records, _ = gather(text, offset=0)
        if whole and all(_is_first_state(record) for record in records):
            return None
        for record in records:
            if isinstance(record, StateRecord):
                return record.body.key
        if whole:
            return names.key_of(name)
        length *= 16


def _is_first_state(record: Record) -> bool:
    """Whether it is what a creator that was killed may have left, and nothing more."""
    if not isinstance(record, StateRecord):
        return False
    return record.seq == 1 and record.body.number == 0 and record.body.generation == 1


# --- what changed ----------------------------------------------------------------------------


def stamps(directory: Directory) -> dict[str, str]:
    """For each key a mark of its file, `inode:size:mtime`, another one after every change.

    Empty files and names that are not ours are left out. No file is opened for it (ten thousand
    take too long), so a log of another program is among them, and one that was never finished:
    who goes on to read it is told.
    """
    with _mutex:
        seen = _seen.get(directory)
        if seen is None:
            seen = _seen[directory] = _Seen(directory)
    return seen.stamps()


def close(directory: Directory) -> None:
    """Let go of what was opened to look at this folder; it may be looked at again."""
    with _mutex:
        seen = _seen.pop(directory, None)
    if seen is not None:
        seen.close()


def grew(before: str, now: str) -> bool:
    """Whether two marks are of one file that became longer, as an append makes it."""
    inode, size, _ = before.split(":")
    new_inode, new_size, _ = now.split(":")
    return inode == new_inode and int(size) < int(new_size)


def changed(stamp: str) -> int:
    """When the file of this mark was last written, in nanoseconds."""
    return int(stamp.rpartition(":")[2])


class _Seen:
    """What was found in a folder the last time, so that it is not all looked at again."""

    def __init__(self, directory: Directory) -> None:
        self._mutex = ThreadLock()
        self._keys: dict[str, str | None] = {}
        self._stamps: dict[str, str] = {}
        self._looks = 0
        self._watch: Watch | None = None
        # No more, or the folder would not be let go of together with its store.
        self._directory = weakref.ref(directory)

    def stamps(self) -> dict[str, str]:
        directory = self._directory()
        assert directory is not None, "whoever asks holds it"
        with self._mutex:
            changed = self._watch.changed() if self._watch is not None else None
            try:
                if changed is None:
                    self._look_at_all(directory)
                for name in changed or ():
                    self._look_at(directory, name)
            except OSError as error:
                self._end_watch()
                raise explained(error, f"listing {directory.path}") from error
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
            # An error's traceback, or a cycle, may refer to it for long.
            watch.close()

    def _look_at_all(self, directory: Directory) -> None:
        self._end_watch()
        # A command that looks once does not pay for a watch. It begins before the look.
        if self._looks:
            with suppress(OSError):
                self._watch = Watch(directory.descriptor)
        self._looks += 1
        found: dict[str, str] = {}
        here = directory.names()
        self._learn(here)
        folder, keys, lstat, is_file = directory.descriptor, self._keys, os.lstat, stat.S_ISREG
        for name in here:
            key = keys[name] if name in keys else self._key(directory, name)
            if key is not None:
                try:
                    at = lstat(name, dir_fd=folder)
                except FileNotFoundError:
                    continue
                if at.st_size and is_file(at.st_mode):
                    found[key] = f"{at.st_ino}:{at.st_size}:{at.st_mtime_ns}"
        self._stamps = found

    def _learn(self, here: list[str]) -> None:
        """The keys of all names that are spelled as most are, at once."""
        if len(self._keys) > 2 * len(here) + _MOST_FORGOTTEN:
            self._keys.clear()
        text = "\n".join(here)
        if ":" in text:
            return  # it stands for itself in no name of ours, so somebody else's is here
        keys = _USUAL.findall(text.replace("%3A", ":"))
        lines = "".join([f"{key}{names.SUFFIX}\n" for key in keys]).replace(":", "%3A")
        self._keys.update(zip(lines.splitlines(), keys, strict=True))

    def _look_at(self, directory: Directory, name: str) -> None:
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
        """The key of a file, by its name alone where that spells it out."""
        if name in self._keys:
            return self._keys[name]
        key = names.key_of(name)
        if key is None and names.is_long(name):
            key = _key_inside(directory, name)
            if key is None or names.file_name(key) != name:
                return None  # it may yet become one
        self._keys[name] = key
        return key


def _stamp(found: os.stat_result) -> str | None:
    if not found.st_size or not stat.S_ISREG(found.st_mode):
        return None
    return f"{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"


_mutex: Final = ThreadLock()
_seen: "weakref.WeakKeyDictionary[Directory, _Seen]" = weakref.WeakKeyDictionary()
