"""A folder with old sessions: finds the files that belong together, reads and renames them.

An imported file gets the ending `.migrated`. During the import it may have the ending `.importing`:
a log of another program can have the very name that ours needs (docs/decisions/0005). Nothing is
ever deleted or overwritten here, no rename replaces a file, and symbolic links are not followed.
"""

import errno
import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence, Set
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from json import loads
from pathlib import Path
from typing import Any, Final, Self

from msgspec import Struct
from msgspec.structs import replace

from stenolog.codec import parse_line
from stenolog.sessions import keys
from stenolog.stores import disk, file_names, json_file
from stenolog.stores.json_file import META_SUFFIX, NotASession
from stenolog.stores.jsonl.scan import looks_torn
from stenolog.transfer.importers import chat_format, langchain, nanobot, picoclaw, zeroclaw
from stenolog.transfer.importers.legacy_session import (
    IMPORTED_NAME,
    LOG_SUFFIX,
    MIGRATED,
    REFERENCE_LAYOUTS,
    Layout,
    LegacySession,
    Line,
    Source,
    SourceContent,
    drop_oversized_state,
    drop_oversized_summary,
    read_lines,
    with_times,
)

__all__ = ["Folder", "Source", "SourceContent"]

_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_LOG_START: Final = b'{"kind":"state",'
_NO_LINK_ERRORS: Final = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
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
        layouts: frozenset[Layout] = REFERENCE_LAYOUTS,
        exclude: Collection[str] = (),
        time_field: str = "",
    ) -> None:
        self.path = path
        self.name = str(path)
        self._only = only
        self._layouts = layouts
        self._exclude = exclude
        self._time_field = time_field
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
            disk.wait_for_lock(self._descriptor, seconds=seconds, name=what, poll=0.01)
        self._remove_second_names()

    def _remove_second_names(self) -> None:
        """Remove second names of files, left by a process that was killed while renaming."""
        with suppress(OSError):
            for name in filter(has_import_suffix, self._names()):
                if self._is_same(name, original_name(name)):
                    os.unlink(name, dir_fd=self._descriptor)

    # --- finding sources ---------------------------------------------------------------------

    def sources(self, *, thorough: bool) -> list[Source]:
        """Return the old sessions, logs before JSON files: if both have a key, the log is newer.

        Without `thorough`, a file whose name is an escaped key of ours counts as our log without
        being read, so that such files do not slow down the start.
        """
        names = self._names()
        logs = list(self._logs(names, thorough=thorough))
        json_files = [
            Source(name=name, body=name)
            for name in sorted(filter(json_file.is_session_name, names))
        ]
        selected = [source for source in (*logs, *json_files) if self._only in (None, source.name)]
        if not selected and self._has_unknown_name(names):
            # A file that the user names is read whatever its suffix.
            selected = [Source(name=self._only or "", body=self._only)]
        return [
            replace(
                source,
                bytes=self._size(source),
                layouts=self._layouts,
                time_field=self._time_field,
            )
            for source in selected
            if source.name not in self._exclude
        ]

    def _has_unknown_name(self, names: set[str]) -> bool:
        """Return whether the given file has a name that no known layout uses."""
        name = self._only or ""
        is_log = (
            name.endswith((LOG_SUFFIX, json_file.SUFFIX)) or IMPORTED_NAME.search(name) is not None
        )
        return self._layouts > REFERENCE_LAYOUTS and name in names and not is_log

    def _names(self) -> set[str]:
        with os.scandir(self._descriptor) as entries:
            return {entry.name for entry in entries if not entry.name.startswith(".")}

    def _logs(self, names: set[str], *, thorough: bool) -> Iterator[Source]:
        for pair in find_pairs(names):
            source = Source(name=pair.stem + LOG_SUFFIX, body=pair.log, meta=pair.meta)
            has_meta = pair.meta is not None
            if source.body != source.name or not self._is_stenolog_log(
                source.name, thorough=thorough, has_meta_file=has_meta
            ):
                yield source

    def _is_stenolog_log(self, name: str, *, thorough: bool, has_meta_file: bool) -> bool:
        """Return whether this is a log of stenolog, or the remains of one."""
        # A file whose name is an escaped key of ours is not opened at every start.
        has_escaped_key = "%" in name and file_names.key_of_log(name) is not None
        if has_escaped_key and not thorough and not has_meta_file:
            return True
        try:
            text = self._read(name, len(_LOG_START))
            if text == _LOG_START:
                return True
            text = self._read(name)
        except OSError:
            return False
        if any(parse_line(line) is not None for line in text.split(b"\n")):
            return True
        # An empty log may be a new one of ours, or one that picoclaw cleared.
        return looks_torn(text) and not (has_meta_file and not text)

    def _size(self, source: Source) -> int:
        found = [self._stat(name) for name in (source.body, source.meta) if name is not None]
        return sum(one.st_size for one in found if one is not None)

    # --- reading -----------------------------------------------------------------------------

    def read(self, source: Source) -> SourceContent:
        """Return the session of these files. Raises NotASession, OSError."""
        files = [name for name in (source.body, source.meta) if name is not None]
        before = [self._stat(name) for name in files]
        body = self._read(source.body) if source.body is not None else b""
        meta = self._read(source.meta) if source.meta is not None else None
        changed = max((one.st_mtime_ns for one in before if one is not None), default=0)
        moment = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=changed // 1000)
        digest = sha256(b"%d:" % len(body) + body + (meta or b"")).hexdigest()
        session = drop_oversized_summary(_read_session(source, body, meta, moment))
        return SourceContent(
            drop_oversized_state(session),
            digest,
            moment,
            tuple(_file_version(one) for one in before),
        )

    def count_imported(self) -> int:
        """Return the number of files with the ending of imported files; `only`: of that file."""
        with suppress(OSError), os.scandir(self._descriptor) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(self._only or "")]
            return sum(IMPORTED_NAME.search(name) is not None for name in names)
        return 0

    def aliases(self, source: Source) -> tuple[str, ...]:
        """Return the aliases that a session claims, reading only its meta."""
        if source.meta is None:
            return ()
        try:
            return picoclaw.read_meta(self._read(source.meta)).aliases
        except OSError:
            return ()

    def is_unchanged(self, source: Source, found: SourceContent) -> bool:
        """Return whether the files are unchanged since they were read."""
        files = [name for name in (source.body, source.meta) if name is not None]
        return tuple(_file_version(self._stat(name)) for name in files) == found.file_versions

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

    def rename_for_import(self, source: Source) -> Source:
        """Give a log and its meta the ending used during the import. Raises OSError."""
        if not source.name.endswith(LOG_SUFFIX):
            return source
        end = self._ending(source)
        meta, body = source.meta, source.body
        if meta is not None and meta in source.files and not has_import_suffix(meta):
            meta = self._rename(meta, meta + end)
        if body is not None and not has_import_suffix(body):
            body = self._rename(body, body + end)
        return replace(source, meta=meta, body=body)

    def _ending(self, source: Source) -> str:
        """Return the ending that one file already has, else one that is free for both."""
        existing = next(filter(None, map(import_suffix, source.files)), "")
        meta = source.name.removesuffix(LOG_SUFFIX) + META_SUFFIX
        both = (source.name, meta)
        free = (
            end for end in import_suffixes() if not any(self._stat(name + end) for name in both)
        )
        return existing or next(free)

    def restore_names(self, source: Source) -> None:
        """Give the files their original names again if those are free. Raises OSError."""
        for name in reversed(source.files):
            if has_import_suffix(name) and self._stat(original_name(name)) is None:
                with suppress(FileExistsError):
                    self._rename_unless_exists(name, original_name(name))

    def rename_imported(self, source: Source) -> None:
        """Give the files the ending of imported files. Raises OSError."""
        for name in source.files:
            self._make_private(name)
            self._rename(name, self._free_name(original_name(name) + MIGRATED))

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

    def _free_name(self, name: str) -> str:
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

    def _rename_unless_exists(self, name: str, to: str) -> None:
        """Rename to a name that another program may create at any moment. Raises OSError."""
        # A rename would replace a file created in between; creating a hard link fails instead.
        at = self._descriptor
        try:
            os.link(name, to, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINK_ERRORS:
                raise
            self._rename(name, to)
        else:
            os.unlink(name, dir_fd=at)

    def _is_same(self, name: str, other: str) -> bool:
        one, two = self._stat(name), self._stat(other)
        return one is not None and two is not None and os.path.samestat(one, two)


def _read_session(
    source: Source, body: bytes, meta: bytes | None, changed: datetime
) -> LegacySession:
    if source.name.endswith(json_file.SUFFIX) or _begins_array(source, body):
        return _read_json(source, body, changed)
    return _read_log(source, body, meta, changed)


def _begins_array(source: Source, body: bytes) -> bool:
    return not source.layouts.isdisjoint(("langchain", "plain")) and body[:99].lstrip()[:1] == b"["


def _read_json(source: Source, body: bytes, changed: datetime) -> LegacySession:
    """Return the session in a file that is one JSON value. Raises NotASession."""
    allowed, name = source.layouts, source.name
    wants_arrays = not allowed.isdisjoint(("langchain", "plain"))
    found, rest = _find_array(body) if wants_arrays else (None, {})
    if found is not None and "langchain" in allowed and langchain.looks_like(found):
        return langchain.read(found, name=name, changed=changed)
    if found is not None and "plain" in allowed and chat_format.has_message(found):
        return chat_format.read_plain_array(
            found, rest, name=name, changed=changed, time_field=source.time_field
        )
    if "plain" in allowed and any(line.fields is not None for line in read_lines(body)):
        # JSON lines in a file with the suffix of a single value.
        return chat_format.read_plain_lines(
            body, name=name, changed=changed, time_field=source.time_field
        )
    if found == []:
        raise NotASession("it is an empty list: there are no messages in it")
    if allowed.isdisjoint(("picoclaw-legacy", "stenolog-json")):
        _check_json(body)
        raise NotASession(_wrong_layout(allowed))
    return _read_json_session(body, name=name, changed=changed)


def _check_json(body: bytes) -> None:
    """Raise NotASession with the reason if the file is not JSON."""
    try:
        loads(body.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise NotASession(f"it is not JSON: {error}") from error


def _find_array(body: bytes) -> tuple[list[Any] | None, dict[str, Any]]:
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


def _read_log(source: Source, body: bytes, meta: bytes | None, changed: datetime) -> LegacySession:
    """Return the session in a file of JSON lines. Raises NotASession."""
    allowed, name = source.layouts, source.name
    if "nanobot" in allowed and nanobot.looks_like(body):
        return nanobot.read(body, name=name, changed=changed)
    found = list(read_lines(body))
    is_plain = "plain" in allowed and meta is None and _is_plain(found, name)
    if "picoclaw" in allowed and (meta is not None or picoclaw.looks_like(found)) and not is_plain:
        return picoclaw.read(body, meta, name=name, changed=changed)
    if "zeroclaw" in allowed and zeroclaw.looks_like(found) and not is_plain:
        return zeroclaw.read(body, name=name, changed=changed)
    if "plain" in allowed and any(line.fields is not None for line in found):
        return chat_format.read_plain_lines(
            body, name=name, changed=changed, time_field=source.time_field
        )
    if not found:
        raise NotASession("it is empty")
    if allowed < REFERENCE_LAYOUTS:
        raise NotASession(_wrong_layout(allowed))
    raise NotASession(
        next((line.problem for line in found if line.problem), "its layout is unknown")
    )


def _is_plain(found: Sequence[Line], name: str) -> bool:
    """Return whether these messages have no feature of a particular program."""
    messages = [line.fields for line in found if line.fields is not None]
    if not zeroclaw.looks_like(found):
        return all(fields.keys() <= chat_format.CHAT_FIELDS for fields in messages)
    packed = any(zeroclaw.unpack_content(fields) != fields for fields in messages)
    return not packed and keys.key_from_zeroclaw_name(name.removesuffix(LOG_SUFFIX)) is None


def _wrong_layout(allowed: frozenset[Layout]) -> str:
    names = ", ".join(sorted(allowed))
    return f"it is not what {names} writes" if len(allowed) == 1 else "its layout is unknown"


def _file_version(found: os.stat_result | None) -> tuple[int, int, int]:
    return (0, 0, 0) if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)


def _read_json_session(text: bytes, *, name: str, changed: datetime) -> LegacySession:
    """Return the session in a JSON file, of picoclaw or of SessionManager. Raises NotASession."""
    parsed = json_file.parse(text)
    stem = name.removesuffix(json_file.SUFFIX)
    created = parsed.created or parsed.updated or changed
    updated = parsed.updated or changed
    return LegacySession(
        layout="stenolog-json" if parsed.ours else "picoclaw-legacy",
        key=parsed.key or stem,
        messages=with_times(parsed.messages, created, updated),
        summary=parsed.summary,
        previous_summary=parsed.began_with,
        aliases=() if parsed.ours or parsed.key in (None, stem) else (stem,),
        created=created,
        updated=updated,
        dropped=parsed.dropped,
        problems=parsed.problems,
    )


# --- names of log files ----------------------------------------------------------------------
# An old log may have the name that our log needs. During the import it and its meta file then get a
# different ending: `.importing`, or `.importing-2` and so on if the first name is taken. Both files
# of a pair have the same ending, unless the import was killed between the two renames.

IMPORTING: Final = ".importing"

_LOG: Final = re.compile(rf"(.*)\.jsonl((?:{re.escape(IMPORTING)}(?:-\d+)?)?)", re.DOTALL)
_META: Final = re.compile(rf"(.*)\.meta\.json((?:{re.escape(IMPORTING)}(?:-\d+)?)?)", re.DOTALL)
_MIGRATED_META: Final = re.compile(rf"(.*)\.meta\.json({re.escape(MIGRATED)}(?:-\d+)?)", re.DOTALL)


class LogPair(Struct, frozen=True):
    """The current names of a log and its meta file; one of them may be missing."""

    stem: str
    log: str | None
    meta: str | None


def find_pairs(names: Set[str]) -> Iterator[LogPair]:
    """Yield every log with its meta file, then meta files without a log; oldest endings first."""
    logs, metas, migrated = (
        _suffixes_by_stem(names, which) for which in (_LOG, _META, _MIGRATED_META)
    )
    for stem in sorted({*logs, *metas}):
        log_suffixes, meta_suffixes = logs.get(stem, []), metas.get(stem, [])
        unpaired = [suffix for suffix in meta_suffixes if suffix not in log_suffixes]
        for suffix in log_suffixes:
            meta = suffix if suffix in meta_suffixes else _matching_meta_suffix(suffix, unpaired)
            if meta in unpaired:
                unpaired.remove(meta)
            if meta is None and stem in migrated:
                meta = migrated[stem][-1]
            name = None if meta is None else stem + META_SUFFIX + meta
            yield LogPair(stem, stem + LOG_SUFFIX + suffix, name)
        for suffix in unpaired:
            yield LogPair(stem, None, stem + META_SUFFIX + suffix)


def has_import_suffix(name: str) -> bool:
    """Return whether a file has an ending of a running import."""
    return original_name(name) != name


def original_name(name: str) -> str:
    """Return the name that a file had before the import renamed it."""
    found = _LOG.fullmatch(name) or _META.fullmatch(name)
    return name if found is None else name.removesuffix(found[2])


def import_suffix(name: str) -> str:
    """Return the ending of a file that the import renamed; empty for any other."""
    return name[len(original_name(name)) :]


def import_suffixes() -> Iterator[str]:
    """Yield the endings that a pair may get, in order of preference."""
    yield IMPORTING
    number = 1
    while True:
        number += 1
        yield f"{IMPORTING}-{number}"


def _suffixes_by_stem(names: Set[str], which: re.Pattern[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        if match := which.fullmatch(name):
            found.setdefault(match[1], []).append(match[2])
    return {stem: sorted(suffixes, key=_suffix_age) for stem, suffixes in found.items()}


def _suffix_age(suffix: str) -> tuple[bool, int]:
    """Return a sort key by number; a file with its original name is the newest."""
    return (not suffix, int(suffix.partition("-")[2] or 1))


def _matching_meta_suffix(suffix: str, unpaired: list[str]) -> str | None:
    """Return the ending of the meta file that belongs to a log with this ending."""
    if suffix:
        return "" if "" in unpaired else None
    return next((other for other in reversed(unpaired)), None)
