"""A folder with old sessions: finds the files that belong together, reads and renames them.

An imported file gets the ending `.migrated`. During the import it may have the ending `.importing`:
a log of another program can have the very name that ours needs (docs/decisions/0005). Nothing is
ever deleted or overwritten here, no rename replaces a file, and symbolic links are not followed.
"""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from json import loads
from pathlib import Path
from typing import Any, Final, Self

from msgspec.structs import replace

from stenolog.codec import parse_line
from stenolog.sessions import keys
from stenolog.stores import disk, file_names, json_file
from stenolog.stores.json_file import META_SUFFIX, NotASession
from stenolog.stores.jsonl.scan import looks_torn
from stenolog.transfer.importers import langchain, nanobot, picoclaw, plain_messages, zeroclaw
from stenolog.transfer.importers.legacy_session import (
    OF_THE_REFERENCE,
    TAKEN_IN,
    Layout,
    LegacySession,
    Line,
    Source,
    SourceFiles,
    dated,
    lines,
    with_state_that_fits,
    with_summary_that_fits,
)
from stenolog.transfer.importers.log_pairs import (
    LOG_SUFFIX,
    MIGRATED,
    ending,
    endings,
    is_aside,
    pairs,
    plain_name,
)

__all__ = ["Folder", "Source", "SourceFiles"]

_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_OURS: Final = b'{"kind":"state",'
_NO_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of file systems that do not support hard links."""
_SESSION_FIELDS: Final = ("key", "summary", "created", "updated", "stenolog")
"""Fields of a JSON session file besides its messages."""


class Folder:
    """A folder that may contain old sessions.

    A context manager; raises OSError if it is no folder.
    """

    def __init__(
        self,
        path: Path,
        *,
        only: str | None = None,
        follow: bool = False,
        layouts: frozenset[Layout] = OF_THE_REFERENCE,
    ) -> None:
        self.path = path
        self.name = str(path)
        self._only = only
        self._layouts = layouts
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            disk.release_lock(self._descriptor)
        os.close(self._descriptor)

    def lock(self, seconds: float) -> None:
        """Wait until no other process renames or rewrites files here. Raises StoreBusy."""
        # Some network file systems cannot lock folders; tokens still prevent duplicate messages.
        with suppress(OSError):
            what = f"the folder {self.path}"
            disk.wait_for_lock(self._descriptor, seconds=seconds, what=what, poll=0.01)
        self._mend()

    def _mend(self) -> None:
        """Remove second names of files, left by a process that was killed while renaming."""
        with suppress(OSError):
            for name in filter(is_aside, self._names()):
                if self._is_same(name, plain_name(name)):
                    os.unlink(name, dir_fd=self._descriptor)

    # --- finding sources ---------------------------------------------------------------------

    def sources(self, *, thorough: bool) -> list[Source]:
        """Return the old sessions, logs before JSON files: if both have a key, the log is newer.

        Without `thorough`, a file whose name is an escaped key of ours counts as our log without
        being read, so that such files do not slow down the start.
        """
        names = self._names()
        logs = list(self._logs(names, thorough=thorough))
        whole = [
            Source(name=name, body=name)
            for name in sorted(filter(json_file.is_session_name, names))
        ]
        chosen = [source for source in (*logs, *whole) if self._only in (None, source.name)]
        if not chosen and self._is_odd(names):
            # A file that the user names is read whatever its suffix.
            chosen = [Source(name=self._only or "", body=self._only)]
        return [
            replace(source, bytes=self._size(source), layouts=self._layouts) for source in chosen
        ]

    def _is_odd(self, names: set[str]) -> bool:
        """Return whether the given file has a name that no known layout uses."""
        name = self._only or ""
        is_log = name.endswith((LOG_SUFFIX, json_file.SUFFIX)) or TAKEN_IN.search(name) is not None
        return self._layouts > OF_THE_REFERENCE and name in names and not is_log

    def _names(self) -> set[str]:
        with os.scandir(self._descriptor) as entries:
            return {entry.name for entry in entries if not entry.name.startswith(".")}

    def _logs(self, names: set[str], *, thorough: bool) -> Iterator[Source]:
        for pair in pairs(names):
            source = Source(name=pair.stem + LOG_SUFFIX, body=pair.log, meta=pair.meta)
            has_meta = pair.meta is not None
            if source.body != source.name or not self._is_ours(
                source.name, thorough=thorough, beside_meta=has_meta
            ):
                yield source

    def _is_ours(self, name: str, *, thorough: bool, beside_meta: bool) -> bool:
        """Return whether this is a log of stenolog, or the remains of one."""
        # A file whose name is an escaped key of ours is not opened at every start.
        spelled = "%" in name and file_names.key_of_log(name) is not None
        if spelled and not thorough and not beside_meta:
            return True
        try:
            text = self._read(name, len(_OURS))
            if text == _OURS:
                return True
            text = self._read(name)
        except OSError:
            return False
        if any(parse_line(line) is not None for line in text.split(b"\n")):
            return True
        # An empty log may be a new one of ours, or one that picoclaw cleared.
        return looks_torn(text) and not (beside_meta and not text)

    def _size(self, source: Source) -> int:
        found = [self._stat(name) for name in (source.body, source.meta) if name is not None]
        return sum(one.st_size for one in found if one is not None)

    # --- reading -----------------------------------------------------------------------------

    def read(self, source: Source) -> SourceFiles:
        """Return the session of these files. Raises NotASession, OSError."""
        files = [name for name in (source.body, source.meta) if name is not None]
        before = [self._stat(name) for name in files]
        body = self._read(source.body) if source.body is not None else b""
        meta = self._read(source.meta) if source.meta is not None else None
        changed = max((one.st_mtime_ns for one in before if one is not None), default=0)
        moment = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=changed // 1000)
        digest = sha256(b"%d:" % len(body) + body + (meta or b"")).hexdigest()
        session = with_summary_that_fits(_session(source, body, meta, moment))
        return SourceFiles(
            with_state_that_fits(session), digest, moment, tuple(_mark(one) for one in before)
        )

    def taken_in(self) -> int:
        """Return the number of files with the ending of imported files; `only`: of that file."""
        with suppress(OSError), os.scandir(self._descriptor) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(self._only or "")]
            return sum(TAKEN_IN.search(name) is not None for name in names)
        return 0

    def aliases(self, source: Source) -> tuple[str, ...]:
        """Return the aliases that a session claims, reading only its meta."""
        if source.meta is None:
            return ()
        try:
            return picoclaw.read_meta(self._read(source.meta)).aliases
        except OSError:
            return ()

    def is_as_read(self, source: Source, found: SourceFiles) -> bool:
        """Return whether the files are unchanged since they were read."""
        files = [name for name in (source.body, source.meta) if name is not None]
        return tuple(_mark(self._stat(name)) for name in files) == found.marks

    def _read(self, name: str, length: int = -1) -> bytes:
        descriptor = os.open(name, _READ, dir_fd=self._descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(f"{name} is not a regular file")
        with os.fdopen(descriptor, "rb") as file:
            return file.read(length)

    def _stat(self, name: str) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    # --- renaming ----------------------------------------------------------------------------

    def set_aside(self, source: Source) -> Source:
        """Give a log and its meta the ending used during the import. Raises OSError."""
        if not source.name.endswith(LOG_SUFFIX):
            return source
        end = self._ending(source)
        meta, body = source.meta, source.body
        if meta is not None and meta in source.files and not is_aside(meta):
            meta = self._rename(meta, meta + end)
        if body is not None and not is_aside(body):
            body = self._rename(body, body + end)
        return replace(source, meta=meta, body=body)

    def _ending(self, source: Source) -> str:
        """Return the ending that one file already has, else one that is free for both."""
        begun = next(filter(None, map(ending, source.files)), "")
        meta = source.name.removesuffix(LOG_SUFFIX) + META_SUFFIX
        both = (source.name, meta)
        free = (end for end in endings() if not any(self._stat(name + end) for name in both))
        return begun or next(free)

    def put_back(self, source: Source) -> None:
        """Give the files their original names again if those are free. Raises OSError."""
        for name in reversed(source.files):
            if is_aside(name) and self._stat(plain_name(name)) is None:
                with suppress(FileExistsError):
                    self._rename_beside_others(name, plain_name(name))

    def finish(self, source: Source) -> None:
        """Give the files the ending of imported files. Raises OSError."""
        for name in source.files:
            self._make_private(name)
            self._rename(name, self._free(plain_name(name) + MIGRATED))

    def sync(self) -> None:
        """Sync the new names to the disk. Raises OSError."""
        disk.sync_folder(self._descriptor)

    def _make_private(self, name: str) -> None:
        """Restrict the file to its owner. Other users may have read it before."""
        with suppress(OSError):  # a file of another user keeps its permissions
            descriptor = os.open(name, _READ, dir_fd=self._descriptor)
            try:
                os.fchmod(descriptor, 0o600)
            finally:
                os.close(descriptor)

    def _free(self, name: str) -> str:
        number, free = 1, name
        while self._stat(free) is not None:
            number += 1
            free = f"{name}-{number}"
        return free

    def _rename(self, name: str, to: str) -> str:
        """Rename to a name that only we use, under the lock. Raises OSError, FileExistsError."""
        if self._stat(to) is not None:
            raise FileExistsError(errno.EEXIST, "there is a file of that name", to)
        os.rename(name, to, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        return to

    def _rename_beside_others(self, name: str, to: str) -> None:
        """Rename to a name that another program may create at any moment. Raises OSError."""
        # A rename would replace a file created in between; creating a hard link fails instead.
        at = self._descriptor
        try:
            os.link(name, to, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self._rename(name, to)
        else:
            os.unlink(name, dir_fd=at)

    def _is_same(self, name: str, other: str) -> bool:
        one, two = self._stat(name), self._stat(other)
        return one is not None and two is not None and os.path.samestat(one, two)


def _session(source: Source, body: bytes, meta: bytes | None, changed: datetime) -> LegacySession:
    if source.name.endswith(json_file.SUFFIX) or _begins_array(source, body):
        return _whole(source, body, changed)
    return _log(source, body, meta, changed)


def _begins_array(source: Source, body: bytes) -> bool:
    return not source.layouts.isdisjoint(("langchain", "plain")) and body[:99].lstrip()[:1] == b"["


def _whole(source: Source, body: bytes, changed: datetime) -> LegacySession:
    """Return the session in a file that is one JSON value. Raises NotASession."""
    may, name = source.layouts, source.name
    asked = not may.isdisjoint(("langchain", "plain"))
    found, rest = _array(body) if asked else (None, {})
    if found is not None and "langchain" in may and langchain.looks_like(found):
        return langchain.read(found, name=name, changed=changed)
    if found is not None and "plain" in may and plain_messages.looks_like(found):
        return plain_messages.read_array(found, rest, name=name, changed=changed)
    if "plain" in may and any(line.fields is not None for line in lines(body)):
        # JSON lines in a file with the suffix of a single value.
        return plain_messages.read_lines(body, name=name, changed=changed)
    if found == []:
        raise NotASession("it is an empty list: there are no messages in it")
    if may.isdisjoint(("picoclaw-legacy", "stenolog-json")):
        _check_json(body)
        raise NotASession(_not_of(may))
    return _read_json_session(body, name=name, changed=changed)


def _check_json(body: bytes) -> None:
    """Raise NotASession with the reason if the file is not JSON."""
    try:
        loads(body.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise NotASession(f"it is not JSON: {error}") from error


def _array(body: bytes) -> tuple[list[Any] | None, dict[str, Any]]:
    """Return the array of the file, or of its field `messages` along with the other fields."""
    try:
        found = loads(body.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None, {}
    if isinstance(found, dict) and found.keys().isdisjoint(_SESSION_FIELDS):
        # A complete request to a model.
        rest = {name: value for name, value in found.items() if name != "messages"}
        found = found.get("messages")
        return (found, rest) if isinstance(found, list) else (None, {})
    return (found, {}) if isinstance(found, list) else (None, {})


def _log(source: Source, body: bytes, meta: bytes | None, changed: datetime) -> LegacySession:
    """Return the session in a file of JSON lines. Raises NotASession."""
    may, name = source.layouts, source.name
    if "nanobot" in may and nanobot.looks_like(body):
        return nanobot.read(body, name=name, changed=changed)
    found = list(lines(body))
    is_plain = "plain" in may and meta is None and _is_plain(found, name)
    if "picoclaw" in may and (meta is not None or picoclaw.looks_like(found)) and not is_plain:
        return picoclaw.read(body, meta, name=name, changed=changed)
    if "zeroclaw" in may and zeroclaw.looks_like(found) and not is_plain:
        return zeroclaw.read(body, name=name, changed=changed)
    if "plain" in may and any(line.fields is not None for line in found):
        return plain_messages.read_lines(body, name=name, changed=changed)
    if not found:
        raise NotASession("it is empty")
    if may < OF_THE_REFERENCE:
        raise NotASession(_not_of(may))
    raise NotASession(
        next((line.problem for line in found if line.problem), "its layout is unknown")
    )


def _is_plain(found: Sequence[Line], name: str) -> bool:
    """Return whether these messages have no feature of a particular program."""
    messages = [line.fields for line in found if line.fields is not None]
    if not zeroclaw.looks_like(found):
        return all(fields.keys() <= plain_messages.FIELDS for fields in messages)
    packed = any(zeroclaw.unpacked(fields) != fields for fields in messages)
    return not packed and keys.from_reference_name(name.removesuffix(LOG_SUFFIX)) is None


def _not_of(may: frozenset[Layout]) -> str:
    names = ", ".join(sorted(may))
    return f"it is not what {names} writes" if len(may) == 1 else "its layout is unknown"


def _mark(found: os.stat_result | None) -> tuple[int, int, int]:
    return (0, 0, 0) if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)


def _read_json_session(text: bytes, *, name: str, changed: datetime) -> LegacySession:
    """Return the session in a JSON file, of picoclaw or of SessionManager. Raises NotASession."""
    kept = json_file.parse(text)
    stem = name.removesuffix(json_file.SUFFIX)
    created = kept.created or kept.updated or changed
    updated = kept.updated or changed
    return LegacySession(
        layout="stenolog-json" if kept.ours else "picoclaw-legacy",
        key=kept.key or stem,
        messages=dated(kept.messages, created, updated),
        summary=kept.summary,
        began_with=kept.began_with,
        aliases=() if kept.ours or kept.key in (None, stem) else (stem,),
        created=created,
        updated=updated,
        dropped=kept.dropped,
        problems=kept.problems,
    )
