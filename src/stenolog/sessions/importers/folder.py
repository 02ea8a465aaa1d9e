"""A folder with old sessions: which files belong together, reading them, and renaming them.

Once taken in, a file gets the ending `.migrated`. While it is being taken in it may have the
ending `.importing`: a log of another program can stand under the very name that ours needs
(docs/decisions/0005). Nothing is ever deleted or overwritten here, no rename replaces a file, and
no file that is a link is followed.
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
from stenolog.sessions.importers import langchain, nanobot, picoclaw, plain, zeroclaw
from stenolog.sessions.importers.old import (
    OF_THE_REFERENCE,
    TAKEN_IN,
    Found,
    Layout,
    Line,
    OldSession,
    Source,
    dated,
    lines,
    with_state_that_fits,
    with_summary_that_fits,
)
from stenolog.sessions.importers.pairs import (
    LOG_SUFFIX,
    MIGRATED,
    ending,
    endings,
    is_aside,
    pairs,
    plain_name,
)
from stenolog.stores import disk, json_file
from stenolog.stores.json_file import META_SUFFIX, NotASession
from stenolog.stores.jsonl import names
from stenolog.stores.jsonl.scan import looks_torn

__all__ = ["Folder", "Found", "Source"]

_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_OURS: Final = b'{"kind":"state",'
_NO_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""What a file system says that knows no second name for a file."""
_SESSION_FIELDS: Final = ("key", "summary", "created", "updated", "stenolog")
"""Fields of a JSON session file beside its messages."""


class Folder:
    """A folder that may hold old sessions. A context manager; raises OSError where it is none."""

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
        """Wait until nobody else renames or rewrites here. Raises StoreBusy."""
        # Some network file systems lock no folders; tokens still keep messages from coming twice.
        with suppress(OSError):
            what = f"the folder {self.path}"
            disk.wait_for_lock(self._descriptor, seconds=seconds, what=what, poll=0.01)
        self._mend()

    def _mend(self) -> None:
        """Who was killed while giving a file its name back left two names of one file."""
        with suppress(OSError):
            for name in filter(is_aside, self._names()):
                if self._is_same(name, plain_name(name)):
                    os.unlink(name, dir_fd=self._descriptor)

    # --- what is there -----------------------------------------------------------------------

    def sources(self, *, thorough: bool) -> list[Source]:
        """The old sessions, logs before whole files: where both have a key, the log is newer.

        Without `thorough`, a name that spells out one of our keys with escapes is taken for one of
        our logs without a look inside, so that starting costs nothing for them.
        """
        names = self._names()
        logs = list(self._logs(names, thorough=thorough))
        whole = [
            Source(name=name, body=name)
            for name in sorted(filter(json_file.is_session_name, names))
        ]
        chosen = [source for source in (*logs, *whole) if self._only in (None, source.name)]
        if not chosen and self._is_odd(names):
            # Whoever names a file means it, whatever its name ends with.
            chosen = [Source(name=self._only or "", body=self._only)]
        return [
            replace(source, bytes=self._size(source), layouts=self._layouts) for source in chosen
        ]

    def _is_odd(self, names: set[str]) -> bool:
        """Whether one file is meant that is called as no session is called."""
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
        """Whether this is a log of stenolog, or what is left of one."""
        # A name that spells out a key of ours need not be opened at every start.
        spelled = "%" in name and names.key_of(name) is not None
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
        # An empty one may be the first moment of ours, or what picoclaw has cleared.
        return looks_torn(text) and not (beside_meta and not text)

    def _size(self, source: Source) -> int:
        found = [self._stat(name) for name in (source.body, source.meta) if name is not None]
        return sum(one.st_size for one in found if one is not None)

    # --- reading -----------------------------------------------------------------------------

    def read(self, source: Source) -> Found:
        """The session of these files. Raises NotASession, OSError."""
        files = [name for name in (source.body, source.meta) if name is not None]
        before = [self._stat(name) for name in files]
        body = self._read(source.body) if source.body is not None else b""
        meta = self._read(source.meta) if source.meta is not None else None
        changed = max((one.st_mtime_ns for one in before if one is not None), default=0)
        moment = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=changed // 1000)
        digest = sha256(b"%d:" % len(body) + body + (meta or b"")).hexdigest()
        session = with_summary_that_fits(_session(source, body, meta, moment))
        return Found(
            with_state_that_fits(session), digest, moment, tuple(_mark(one) for one in before)
        )

    def taken_in(self) -> int:
        """How many files have the ending that says so; `only`: of that file."""
        with suppress(OSError), os.scandir(self._descriptor) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(self._only or "")]
            return sum(TAKEN_IN.search(name) is not None for name in names)
        return 0

    def aliases(self, source: Source) -> tuple[str, ...]:
        """The aliases that a session claims, by a look at its meta alone."""
        if source.meta is None:
            return ()
        try:
            return picoclaw.read_meta(self._read(source.meta)).aliases
        except OSError:
            return ()

    def is_as_read(self, source: Source, found: Found) -> bool:
        """Whether nobody has changed the files since."""
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
        """Give a log the ending that keeps it out of the way, and its meta. Raises OSError."""
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
        """The one that half of the pair has already, else one that is free for both."""
        begun = next(filter(None, map(ending, source.files)), "")
        meta = source.name.removesuffix(LOG_SUFFIX) + META_SUFFIX
        both = (source.name, meta)
        free = (end for end in endings() if not any(self._stat(name + end) for name in both))
        return begun or next(free)

    def put_back(self, source: Source) -> None:
        """Give its files their own names again, where those are free. Raises OSError."""
        for name in reversed(source.files):
            if is_aside(name) and self._stat(plain_name(name)) is None:
                with suppress(FileExistsError):
                    self._rename_beside_others(name, plain_name(name))

    def finish(self, source: Source) -> None:
        """Give its files the ending that says they were taken in. Raises OSError."""
        for name in source.files:
            self._make_private(name)
            self._rename(name, self._free(plain_name(name) + MIGRATED))

    def sync(self) -> None:
        """Return only when the new names are on the disk. Raises OSError."""
        disk.sync_folder(self._descriptor)

    def _make_private(self, name: str) -> None:
        """Whoever could read it may have it read already; from now on it is only its owner's."""
        with suppress(OSError):  # it is somebody else's, who decides
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
        """To a name that only we give, under the lock. Raises OSError, FileExistsError."""
        if self._stat(to) is not None:
            raise FileExistsError(errno.EEXIST, "there is a file of that name", to)
        os.rename(name, to, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        return to

    def _rename_beside_others(self, name: str, to: str) -> None:
        """To a name that another program may take at any moment. Raises OSError."""
        # A rename would replace what has come meanwhile; a second name is refused then.
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


def _session(source: Source, body: bytes, meta: bytes | None, changed: datetime) -> OldSession:
    if source.name.endswith(json_file.SUFFIX) or _begins_array(source, body):
        return _whole(source, body, changed)
    return _log(source, body, meta, changed)


def _begins_array(source: Source, body: bytes) -> bool:
    return not source.layouts.isdisjoint(("langchain", "plain")) and body[:99].lstrip()[:1] == b"["


def _whole(source: Source, body: bytes, changed: datetime) -> OldSession:
    """The session in a file that is one JSON value. Raises NotASession."""
    may, name = source.layouts, source.name
    asked = not may.isdisjoint(("langchain", "plain"))
    found, rest = _array(body) if asked else (None, {})
    if found is not None and "langchain" in may and langchain.looks_like(found):
        return langchain.read(found, name=name, changed=changed)
    if found is not None and "plain" in may and plain.looks_like(found):
        return plain.read_array(found, rest, name=name, changed=changed)
    if "plain" in may and any(line.fields is not None for line in lines(body)):
        # Lines in a file that is called as if it were one value.
        return plain.read_lines(body, name=name, changed=changed)
    if found == []:
        raise NotASession("it is an empty list: there are no messages in it")
    if may.isdisjoint(("picoclaw-legacy", "stenolog-json")):
        _check_json(body)
        raise NotASession(_not_of(may))
    return _read_json_session(body, name=name, changed=changed)


def _check_json(body: bytes) -> None:
    """Raise NotASession with the reason if it is not JSON at all."""
    try:
        loads(body.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise NotASession(f"it is not JSON: {error}") from error


def _array(body: bytes) -> tuple[list[Any] | None, dict[str, Any]]:
    """The array that a file is, or that of its messages, and what stands beside that."""
    try:
        found = loads(body.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None, {}
    if isinstance(found, dict) and found.keys().isdisjoint(_SESSION_FIELDS):
        # What is sent to a model, as a whole.
        rest = {name: value for name, value in found.items() if name != "messages"}
        found = found.get("messages")
        return (found, rest) if isinstance(found, list) else (None, {})
    return (found, {}) if isinstance(found, list) else (None, {})


def _log(source: Source, body: bytes, meta: bytes | None, changed: datetime) -> OldSession:
    """The session in a file of lines. Raises NotASession."""
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
        return plain.read_lines(body, name=name, changed=changed)
    if not found:
        raise NotASession("it is empty")
    if may < OF_THE_REFERENCE:
        raise NotASession(_not_of(may))
    raise NotASession(
        next((line.problem for line in found if line.problem), "its layout is unknown")
    )


def _is_plain(found: Sequence[Line], name: str) -> bool:
    """Whether nothing in these messages is of a program's own."""
    messages = [line.fields for line in found if line.fields is not None]
    if not zeroclaw.looks_like(found):
        return all(fields.keys() <= plain.FIELDS for fields in messages)
    packed = any(zeroclaw.unpacked(fields) != fields for fields in messages)
    return not packed and keys.from_reference_name(name.removesuffix(LOG_SUFFIX)) is None


def _not_of(may: frozenset[Layout]) -> str:
    names = ", ".join(sorted(may))
    return f"it is not what {names} writes" if len(may) == 1 else "its layout is unknown"


def _mark(found: os.stat_result | None) -> tuple[int, int, int]:
    return (0, 0, 0) if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)


def _read_json_session(text: bytes, *, name: str, changed: datetime) -> OldSession:
    """Return the session in a JSON file, of picoclaw or of SessionManager. Raises NotASession."""
    kept = json_file.parse(text)
    stem = name.removesuffix(json_file.SUFFIX)
    created = kept.created or kept.updated or changed
    updated = kept.updated or changed
    return OldSession(
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
