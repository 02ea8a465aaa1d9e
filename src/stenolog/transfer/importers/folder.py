"""A folder with old sessions: finds the files of each session, reads the files and renames them.

An imported file gets the ending `.migrated`. If stenolog needs the name of another program's log,
that log gets the ending `.importing` during the import (docs/decisions/0005). This module never
deletes or overwrites data. No rename replaces a file. Symbolic links to files are not followed.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator, Set
from contextlib import suppress
from datetime import datetime
from hashlib import sha256
from itertools import chain, count
from json import loads
from pathlib import Path
from typing import Any, Final, Self

from msgspec.structs import replace

from stenolog.codec import parse_line
from stenolog.stores import disk, file_names, json_file
from stenolog.stores.json_file import META_SUFFIX, NotASession
from stenolog.stores.jsonl.scan import may_be_torn_log
from stenolog.transfer.importers.layouts import (
    are_plain_messages,
    is_picoclaw_log,
    is_zeroclaw_log,
    messages_in,
    read_array,
    read_lines,
    read_meta,
    read_picoclaw,
    read_plain,
    read_zeroclaw,
)
from stenolog.transfer.importers.legacy_session import (
    IMPORTED_NAME_END,
    LOG_SUFFIX,
    MIGRATED_SUFFIX,
    REFERENCE_LAYOUTS,
    UNMERGED_FIELDS,
    Layout,
    LegacySession,
    Source,
    SourceContent,
    make_session,
    time_of_nanoseconds,
)

# guard: import-no-symlinks
_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_LOG_START: Final = b'{"kind":"state",'
"""First bytes of a log of stenolog."""
_NO_LINK_ERRORS: Final = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of file systems that do not support hard links."""
_SESSION_FIELDS: Final = ("key", "summary", "created", "updated", "stenolog")
"""Fields of a JSON session file besides its messages."""


class Folder:
    """A folder that may contain old sessions. A context manager.

    `only`: name of the single file to read. `follow_links`: the path itself may be a symbolic link.
    Raises OSError if the path is not a folder.
    """

    def __init__(
        self,
        path: Path,
        *,
        only: str | None = None,
        follow_links: bool = False,
        thorough: bool = True,
        layouts: frozenset[Layout] = REFERENCE_LAYOUTS,
    ) -> None:
        self.path = path
        self._only = only
        self._thorough = thorough
        self._layouts = layouts
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._descriptor = os.open(path, flags if follow_links else flags | os.O_NOFOLLOW)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            disk.release_lock(self._descriptor)
        os.close(self._descriptor)

    def lock(self, seconds: float) -> None:
        """Lock the folder, so that no other process imports its files. Raises StoreBusy."""
        # Some network file systems have no locks. Idempotency keys still prevent duplicates there.
        with suppress(OSError):
            lock_name = f"the folder {self.path}"
            disk.wait_for_lock(self._descriptor, seconds=seconds, name=lock_name, poll=0.01)
        self._remove_leftover_links()

    def _remove_leftover_links(self) -> None:
        """Remove hard links that a process left when it was killed during a rename."""
        with suppress(OSError):
            for name in filter(import_suffix, self._list_names()):
                link, original = self._stat(name), self._stat(original_name(name))
                if link and original and os.path.samestat(link, original):
                    os.unlink(name, dir_fd=self._descriptor)

    # --- finding sources ---------------------------------------------------------------------

    def sources(self) -> list[Source]:
        """Return the old sessions: logs first, then JSON files.

        Logs come first, because a log is newer than a JSON file with the same key. Unless
        `thorough` is set, a file whose name is an escaped key counts as a log of stenolog without
        being read, so that the start stays fast.
        """
        names = self._list_names()
        logs = list(self._find_logs(names))
        json_names = sorted(filter(json_file.is_session_name, names))
        json_files = [Source(name=name, body=name) for name in json_names]
        selected = [source for source in (*logs, *json_files) if self._only in (None, source.name)]
        if not selected and self._has_unknown_name(names):
            # A file that the user names is read even if its suffix is unknown.
            selected = [Source(name=self._only or "", body=self._only)]
        return [
            replace(source, bytes=sum(size for _, size, _ in self._file_versions(source)))
            for source in selected
        ]

    def _has_unknown_name(self, names: set[str]) -> bool:
        """Return whether the file `only` exists and has a name that no known layout uses."""
        name = self._only or ""
        is_imported = IMPORTED_NAME_END.search(name) is not None
        has_known_name = is_imported or name.endswith((LOG_SUFFIX, json_file.SUFFIX))
        return self._layouts > REFERENCE_LAYOUTS and name in names and not has_known_name

    def _list_names(self) -> set[str]:
        with os.scandir(self._descriptor) as entries:
            return {entry.name for entry in entries if not entry.name.startswith(".")}

    def _find_logs(self, names: set[str]) -> Iterator[Source]:
        for stem, log, meta in find_log_pairs(names):
            name, has_meta_file = stem + LOG_SUFFIX, meta is not None
            if log != name or not self._is_stenolog_log(name, has_meta_file=has_meta_file):
                yield Source(name=name, body=log, meta=meta)

    def _is_stenolog_log(self, name: str, *, has_meta_file: bool) -> bool:
        """Return whether this file is a log of stenolog, even if only its start was written."""
        # A file whose name is an escaped key of stenolog is not opened at every start.
        has_escaped_key = "%" in name and file_names.key_of_log(name) is not None
        if has_escaped_key and not self._thorough and not has_meta_file:
            return True
        try:
            if self._read_file(name, len(_LOG_START)) == _LOG_START:
                return True
            text = self._read_file(name)
        except OSError:
            return False
        if any(parse_line(line) is not None for line in text.split(b"\n")):
            return True
        # An empty log with a meta file is not a new log of stenolog: picoclaw cleared it.
        return may_be_torn_log(text) and not (has_meta_file and not text)

    # --- reading -----------------------------------------------------------------------------

    def read(self, source: Source) -> SourceContent:
        """Return the session in the files of a source. Raises NotASession, OSError."""
        versions = self._file_versions(source)
        text = self._read_file(source.body) if source.body is not None else b""
        meta = self._read_file(source.meta) if source.meta is not None else None
        mtime = time_of_nanoseconds(max((version[-1] for version in versions), default=0))
        digest = sha256(b"%d:" % len(text) + text + (meta or b"")).hexdigest()
        session = self._read_session(source.name, text, meta, mtime)
        return SourceContent(session, digest, mtime, versions)

    def count_imported(self) -> int:
        """Return the number of files that have the ending of imported files."""
        with suppress(OSError), os.scandir(self._descriptor) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(self._only or "")]
            return sum(IMPORTED_NAME_END.search(name) is not None for name in names)
        return 0

    def aliases(self, source: Source) -> tuple[str, ...]:
        """Return the aliases that a session claims, reading only its meta file."""
        with suppress(OSError):
            if source.meta is not None:
                return tuple(read_meta(self._read_file(source.meta))["aliases"])
        return ()

    def is_unchanged(self, source: Source, content: SourceContent) -> bool:
        """Return whether the files are unchanged since they were read."""
        return self._file_versions(source) == content.file_versions

    def _file_versions(self, source: Source) -> tuple[tuple[int, int, int], ...]:
        """Return the inode, size and modification time of each file; zeros for a missing file."""
        names = (name for name in (source.body, source.meta) if name is not None)
        return tuple(
            (0, 0, 0) if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)
            for status in map(self._stat, names)
        )

    def _read_file(self, name: str, length: int = -1) -> bytes:
        descriptor = os.open(name, _READ_FLAGS, dir_fd=self._descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(f"{name} is not a regular file")
        with os.fdopen(descriptor, "rb") as file:
            return file.read(length)

    def _stat(self, name: str) -> os.stat_result | None:
        with suppress(FileNotFoundError):
            return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        return None

    # --- layouts -----------------------------------------------------------------------------

    def _read_session(
        self, name: str, text: bytes, meta: bytes | None, mtime: datetime
    ) -> LegacySession:
        """Return the session in a file. Raises NotASession."""
        may_be_plain = "plain" in self._layouts
        begins_array = may_be_plain and text[:99].lstrip()[:1] == b"["
        if not name.endswith(json_file.SUFFIX) and not begins_array:
            return self._read_log(name, text, meta, mtime)
        if may_be_plain:
            items = _find_message_array(text)
            lines = list(read_array(items or ()))
            if not messages_in(lines):
                # The file may have one JSON value per line, although its suffix is `.json`.
                lines = list(read_lines(text))
            if messages_in(lines):
                return read_plain(lines, name=name, mtime=mtime)
            if items == []:
                raise NotASession("the file is an empty list, without messages")
        session = _read_json_session(text, name=name, mtime=mtime)
        if session.layout not in self._layouts:
            raise NotASession(self._layout_error())
        return session

    def _read_log(
        self, name: str, text: bytes, meta: bytes | None, mtime: datetime
    ) -> LegacySession:
        """Return the session in a file of JSON lines. Raises NotASession."""
        layouts = self._layouts
        lines = list(read_lines(text))
        may_be_plain = "plain" in layouts
        if not (may_be_plain and meta is None and are_plain_messages(lines, name)):
            if "picoclaw" in layouts and (meta is not None or is_picoclaw_log(lines)):
                return read_picoclaw(lines, meta, name=name, mtime=mtime)
            if "zeroclaw" in layouts and is_zeroclaw_log(lines):
                return read_zeroclaw(lines, name=name, mtime=mtime)
        if may_be_plain and messages_in(lines):
            return read_plain(lines, name=name, mtime=mtime)
        if not lines:
            raise NotASession("it is empty")
        if layouts < REFERENCE_LAYOUTS:
            raise NotASession(self._layout_error())
        problems = (line.problem for line in lines if line.problem)
        raise NotASession(next(problems, "its layout is unknown"))

    def _layout_error(self) -> str:
        names = ", ".join(sorted(self._layouts))
        is_single = len(self._layouts) == 1
        return f"it is not a file of {names}" if is_single else "its layout is unknown"

    # --- renaming ----------------------------------------------------------------------------

    def rename_for_import(self, source: Source) -> Source:
        """Give a log and its meta file the ending `.importing`. Raises OSError."""
        if not source.name.endswith(LOG_SUFFIX):
            return source
        ending = self._choose_ending(source)
        meta, body = source.meta, source.body
        if meta is not None and meta in source.files and not import_suffix(meta):
            meta = self._rename(meta, meta + ending)
        if body is not None and not import_suffix(body):
            body = self._rename(body, body + ending)
        return replace(source, meta=meta, body=body)

    def _choose_ending(self, source: Source) -> str:
        """Return the ending that the log or its meta file already has, or else an unused ending."""
        current_ending = next(filter(None, map(import_suffix, source.files)), "")
        meta_name = source.name.removesuffix(LOG_SUFFIX) + META_SUFFIX
        names = (source.name, meta_name)
        endings = _number_names(IMPORTING)
        free_endings = (e for e in endings if not any(self._stat(name + e) for name in names))
        return current_ending or next(free_endings)

    def restore_names(self, source: Source) -> None:
        """Give the files their original names, unless these names are in use. Raises OSError."""
        for name in reversed(source.files):
            if import_suffix(name) and self._stat(original_name(name)) is None:
                with suppress(FileExistsError):
                    self._rename_unless_exists(name, original_name(name))

    def rename_imported(self, source: Source) -> None:
        """Give the files the ending of imported files. Raises OSError."""
        for name in source.files:
            self._make_private(name)
            new_names = _number_names(original_name(name) + MIGRATED_SUFFIX)
            self._rename(name, next(n for n in new_names if self._stat(n) is None))

    def sync(self) -> None:
        """Sync the new names to the disk. Raises OSError."""
        disk.sync_folder(self._descriptor)

    def _make_private(self, name: str) -> None:
        """Restrict the file to its owner. Before the import, other users may have had access."""
        with suppress(OSError):  # a file of another user keeps its permissions
            descriptor = os.open(name, _READ_FLAGS, dir_fd=self._descriptor)
            try:
                os.fchmod(descriptor, 0o600)
            finally:
                os.close(descriptor)

    def _rename(self, name: str, new_name: str) -> str:
        """Rename a file to a name that only stenolog uses. Raises OSError, FileExistsError."""
        if self._stat(new_name) is not None:
            raise FileExistsError(errno.EEXIST, "there is a file of that name", new_name)
        os.rename(name, new_name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        return new_name

    def _rename_unless_exists(self, name: str, new_name: str) -> None:
        """Rename a file to a name that another program may create at any moment. Raises OSError."""
        # A rename would replace a file that was just created. A hard link never replaces a file.
        folder = self._descriptor
        try:
            os.link(name, new_name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINK_ERRORS:
                raise
            self._rename(name, new_name)
        else:
            os.unlink(name, dir_fd=folder)


def _find_message_array(text: bytes) -> list[Any] | None:
    """Return the message array of a file: the whole file, or the field of a request to a model."""
    try:
        value = loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and value.keys().isdisjoint(_SESSION_FIELDS):
        value = value.get("messages")
    return value if isinstance(value, list) else None


def _read_json_session(text: bytes, *, name: str, mtime: datetime) -> LegacySession:
    """Return the session in a JSON file of picoclaw or SessionManager. Raises NotASession."""
    parsed = json_file.parse(text)
    stem = name.removesuffix(json_file.SUFFIX)
    return make_session(
        parsed.messages,
        layout="stenolog-json" if parsed.is_ours else "picoclaw-legacy",
        key=parsed.key or stem,
        mtime=mtime,
        created=parsed.created or parsed.updated or mtime,
        updated=parsed.updated or mtime,
        summary=parsed.summary,
        previous_summary=parsed.first_summary,
        meta={name: v for name, v in parsed.meta.items() if name not in UNMERGED_FIELDS},
        aliases=() if parsed.is_ours or parsed.key in (None, stem) else (stem,),
        dropped=parsed.dropped,
        problems=parsed.problems,
    )


# --- names of log files ----------------------------------------------------------------------
# An old log may have the name that stenolog's log needs.
# During the import, the old log and its meta file therefore get a different ending.
# The ending is `.importing`, or `.importing-2` and so on if the first name is taken.
# Both files have the same ending, unless the import was killed between the two renames.

IMPORTING: Final = ".importing"

_IMPORTING_END: Final = rf"((?:{re.escape(IMPORTING)}(?:-\d+)?)?)"
_LOG_NAME: Final = re.compile(rf"(.*)\.jsonl{_IMPORTING_END}", re.DOTALL)
_META_NAME: Final = re.compile(rf"(.*)\.meta\.json{_IMPORTING_END}", re.DOTALL)
_MIGRATED_META_NAME: Final = re.compile(
    rf"(.*)\.meta\.json({re.escape(MIGRATED_SUFFIX)}(?:-\d+)?)", re.DOTALL
)


def find_log_pairs(names: Set[str]) -> Iterator[tuple[str, str | None, str | None]]:
    """Yield, for each stem, the logs with their meta files, then meta files without a log.

    Each tuple has the stem, the current name of the log, and the current name of the meta file;
    None if the file is missing. Files come in the order of the numbers in their endings, and a file
    without an ending comes last.
    """
    logs = _suffixes_by_stem(names, _LOG_NAME)
    metas = _suffixes_by_stem(names, _META_NAME)
    migrated_metas = _suffixes_by_stem(names, _MIGRATED_META_NAME)
    for stem in sorted({*logs, *metas}):
        log_suffixes, meta_suffixes = logs.get(stem, []), metas.get(stem, [])
        unpaired_suffixes = [suffix for suffix in meta_suffixes if suffix not in log_suffixes]
        for suffix in log_suffixes:
            meta_suffix: str | None = suffix
            if suffix not in meta_suffixes:
                meta_suffix = _matching_meta_suffix(suffix, unpaired_suffixes)
            if meta_suffix in unpaired_suffixes:
                unpaired_suffixes.remove(meta_suffix)
            if meta_suffix is None and stem in migrated_metas:
                meta_suffix = migrated_metas[stem][-1]
            meta_name = None if meta_suffix is None else stem + META_SUFFIX + meta_suffix
            yield stem, stem + LOG_SUFFIX + suffix, meta_name
        for suffix in unpaired_suffixes:
            yield stem, None, stem + META_SUFFIX + suffix


def original_name(name: str) -> str:
    """Return the name that a file had before the import renamed it."""
    match = _LOG_NAME.fullmatch(name) or _META_NAME.fullmatch(name)
    return name if match is None else name.removesuffix(match[2])


def import_suffix(name: str) -> str:
    """Return the ending of a file that the import renamed; empty for any other file."""
    return name[len(original_name(name)) :]


def _number_names(name: str) -> Iterator[str]:
    """Yield the name, then the name with the endings -2, -3 and so on."""
    return chain([name], (f"{name}-{number}" for number in count(2)))


def _suffixes_by_stem(names: Set[str], pattern: re.Pattern[str]) -> dict[str, list[str]]:
    suffixes_by_stem: dict[str, list[str]] = {}
    matches = filter(None, map(pattern.fullmatch, names))
    for match in sorted(matches, key=_suffix_sort_key):
        suffixes_by_stem.setdefault(match[1], []).append(match[2])
    return suffixes_by_stem


def _suffix_sort_key(match: re.Match[str]) -> tuple[bool, int]:
    """Return a key that sorts endings by number. A file without an ending comes last."""
    return (not match[2], int(match[2].partition("-")[2] or 1))


def _matching_meta_suffix(suffix: str, unpaired_suffixes: list[str]) -> str | None:
    """Return the ending of the meta file that belongs to a log with this ending."""
    if suffix:
        return "" if "" in unpaired_suffixes else None
    return unpaired_suffixes[-1] if unpaired_suffixes else None
