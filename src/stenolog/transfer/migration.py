"""Import of the old sessions of a folder, with or without renaming the imported files.

All sessions are imported before any file is renamed, so a failure leaves every file in place.
The next run continues an import that was killed. `merge.py` decides which messages an old session
adds to an existing session. Each session is imported in four steps:

1. The digest of the file is written to the meta of the session, as an import mark.
2. The messages are added.
3. The messages that are hidden in the file become hidden, and the summary is set.
4. The import mark is replaced by a receipt.
"""

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from stenolog.codec import check_key
from stenolog.errors import (
    DamagedStore,
    ForeignLog,
    NoSuchSession,
    StenologError,
    StoreBusy,
    UsageError,
)
from stenolog.records import SessionInfo
from stenolog.sessions.aliases import Aliases, aliases_in
from stenolog.stores.arguments import check_store
from stenolog.stores.base import Store
from stenolog.stores.file_names import escape_key
from stenolog.stores.json_file import SUFFIX, NotASession
from stenolog.stores.snapshots import SnapshotMark
from stenolog.transfer import merge as merging
from stenolog.transfer.importers.folder import Folder
from stenolog.transfer.importers.legacy_session import (
    LOG_SUFFIX,
    REFERENCE_LAYOUTS,
    Layout,
    LegacySession,
    Source,
    SourceContent,
    without_control_fields,
    without_oversized_summary,
    without_reserved_field,
)
from stenolog.transfer.merge import ExistingSession, MergePlan, without_answer_seqs
from stenolog.transfer.session_import import SessionImport, add_aliases

LOCK_TIMEOUT: Final = 60.0
"""Seconds to wait for another process that imports the same files.

This is longer than a store call waits, because a process that starts without the old sessions would
create new sessions with the same keys.
"""
MAX_ALIAS_BYTES: Final = 16 * 1024
"""Maximum size of all aliases of a session together, in bytes."""


class ImportedSession(Struct, frozen=True, kw_only=True):
    """An old session that is now in the store."""

    file: str
    layout: str
    key: str
    """Key of the stored session that contains the old session."""
    messages: int
    """Number of messages in the file."""
    added: int
    """Number of messages that were not in the store before."""
    already_imported: bool
    """Whether there was nothing to import, for example because this file was imported before."""
    dropped: int
    """Number of lines or messages of the file that could not be imported."""
    problems: tuple[str, ...]
    """One sentence for each part that could not be imported, with the reason."""
    aliases: tuple[str, ...] = ()
    """Other keys that open the session from now on."""
    unaccepted_aliases: tuple[str, ...] = ()
    """Other keys that the file gives the session, but that the user has not accepted."""


class SkippedFile(Struct, frozen=True):
    """A file that was not imported."""

    file: str
    reason: str


class ImportReport(Struct, frozen=True, kw_only=True):
    """Result of an import."""

    imported: tuple[ImportedSession, ...] = ()
    skipped: tuple[SkippedFile, ...] = ()
    migrated: int = 0
    """Number of files that this or an earlier import renamed after importing them."""

    def combined_with(self, more: "ImportReport") -> "ImportReport":
        """Return one report with the results of both reports."""
        return ImportReport(
            imported=self.imported + more.imported,
            skipped=self.skipped + more.skipped,
            migrated=self.migrated + more.migrated,
        )

    @property
    def sessions(self) -> int:
        """Number of old sessions that were imported now and not before."""
        return sum(not session.already_imported for session in self.imported)

    @property
    def messages(self) -> int:
        """Number of messages that were added to the store."""
        return sum(session.added for session in self.imported)

    @property
    def dropped(self) -> int:
        """Number of lines or messages that could not be imported."""
        return sum(session.dropped for session in self.imported)


_logger = logging.getLogger("stenolog")


def migrate_from_json(directory: str | os.PathLike[str], store: Store) -> ImportReport:
    """Import the old sessions of a folder into the store and rename their files to `.migrated`.

    Reads legacy `.json` files, picoclaw's `.jsonl` with `.meta.json`, zeroclaw's `.jsonl`, and
    files of stenolog's SessionManager. Files that cannot be read are left unchanged and reported.
    The function can be called again at any time. A missing folder counts as empty. If the store
    cannot be written, the function raises the store's error, and every file keeps its name.

    The folder must belong to the agent, because unfinished turns of a SessionManager are resumed
    and aliases are accepted. Use `steno import` for files of other people.
    """
    check_store(store, "migrate_from_json")
    return import_folder(Path(directory), store, is_own=True)


def import_folder(
    path: Path,
    store: Store,
    *,
    only: str | None = None,
    thorough: bool = True,
    rename_files: bool = True,
    with_fallbacks: bool = True,
    is_own: bool = False,
    accept_aliases: bool = False,
    dry_run: bool = False,
    layouts: frozenset[Layout] = REFERENCE_LAYOUTS,
    map_key: Callable[[str], str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> ImportReport:
    """Import the old sessions of a folder, or of the single file `only` in it.

    - `thorough`: also read files whose names suggest that they are logs of stenolog.
    - `rename_files`: rename imported files. If False, nothing in the folder changes, and without
      `is_own`, sessions that were deleted in the store are imported again.
    - `with_fallbacks`: import JSON files of a fallback store. If False, these files are skipped,
      because another store merges them.
    - `is_own`: the folder belongs to this agent, so messages of its fallback store keep their
      reserved fields and idempotency keys, and aliases are accepted. Without `is_own`, these fields
      and keys are dropped.
    - `accept_aliases`: accept aliases even without `is_own`. If False, they are only reported.
    - `dry_run`: write nothing.
    - `layouts`: layouts to import.
    - `map_key`: function that returns the new key for the old key of a session.
    - `progress`: function that is called with the size of each imported file, in bytes.

    Raises the errors of the store.
    """
    options = _ImportOptions(
        rename_files=rename_files,
        with_fallbacks=with_fallbacks,
        is_own=is_own,
        accept_aliases=accept_aliases or is_own,
        dry_run=dry_run,
        map_key=map_key,
        progress=progress,
    )
    try:
        folder = Folder(
            path,
            only=only,
            follow_links=not rename_files,
            thorough=thorough,
            layouts=layouts,
        )
    except FileNotFoundError:
        return ImportReport()
    except OSError as error:
        return _skipped_report(str(path), f"it cannot be opened: {error.strerror}")
    with folder:
        try:
            if rename_files and not dry_run:
                folder.lock(LOCK_TIMEOUT)
        except StoreBusy as error:
            # The process that holds the lock imports the same files, so they are skipped here.
            return _skipped_report(str(path), str(error))
        return _ImportRun(store, folder, options).import_all()


def log_report(report: ImportReport, store: Store) -> None:
    """Log the result of an import. A skipped file is logged as a warning only the first time."""
    if report.sessions:
        _logger.info("imported %d old sessions with %d messages", report.sessions, report.messages)
    for session in report.imported:
        for problem in session.problems:
            _logger.warning("%s: %s", session.file, problem)
    for file in report.skipped:
        level = logging.WARNING if _is_new_problem(file, store) else logging.DEBUG
        _logger.log(level, "%s was not imported: %s", file.file, file.reason)


def _is_new_problem(file: SkippedFile, store: Store) -> bool:
    """Record in the store that this file was skipped. Return whether this reason is new."""
    digest = hashlib.sha256(f"{file.file}\0{file.reason}".encode("utf-8", "replace")).hexdigest()
    marker = f"left-{digest[:16]}"
    with suppress(StenologError):  # after an error, the next start logs the warning again
        if store.admin.read_marker(marker):
            return False
        store.admin.update_marker(marker)
    return True


def _skipped_report(file: str, reason: str) -> ImportReport:
    """Return the result of an import that skipped a file or folder as a whole."""
    return ImportReport(skipped=(SkippedFile(file, reason),))


class _ImportOptions(Struct, frozen=True, kw_only=True):
    """The options of `import_folder`."""

    rename_files: bool = False
    with_fallbacks: bool = True
    is_own: bool
    accept_aliases: bool
    dry_run: bool = False
    map_key: Callable[[str], str] | None = None
    progress: Callable[[int], None] | None = None


class _ImportJob(Struct):
    """The import of one source."""

    source: Source
    file: str
    key: str = ""
    content: SourceContent | None = None
    imported: ImportedSession | None = None


class _ImportRun:
    """The import of all sessions of a folder."""

    def __init__(self, store: Store, folder: Folder, options: _ImportOptions) -> None:
        self._store = store
        self._folder = folder
        self._options = options
        self._renames_files = options.rename_files and not options.dry_run
        self._is_agent_start = options.is_own or self._renames_files
        self._map_key = options.map_key or (lambda key: key)
        self._progress = options.progress or (lambda _: None)
        self._alias_claims: Counter[str] = Counter()
        self._skipped: list[SkippedFile] = []

    def import_all(self) -> ImportReport:
        """Import all sessions, then rename all files."""
        try:
            sources = self._folder.sources()
        except OSError as error:
            reason = f"it cannot be read: {error.strerror or error}"
            return _skipped_report(str(self._folder.path), reason)
        jobs = [_ImportJob(source, str(self._folder.path / source.name)) for source in sources]
        try:
            finished_jobs = self._import_and_retry_blocked(jobs)
        except BaseException:
            self._restore_names(jobs)
            raise
        self._restore_names([job for job in jobs if job.imported is None])
        if self._renames_files:
            self._rename_imported(finished_jobs)
        imported = tuple(job.imported for job in finished_jobs if job.imported is not None)
        migrated = self._folder.count_imported()
        return ImportReport(imported=imported, skipped=tuple(self._skipped), migrated=migrated)

    def _import_and_retry_blocked(self, jobs: list[_ImportJob]) -> list[_ImportJob]:
        """Run all jobs, and return the finished jobs.

        If a file has the name that the store needs for its log, rename the file and retry its job.
        """
        # Count the claims of each alias. An alias that two sessions claim is given to neither.
        for job in jobs:
            self._alias_claims.update(self._folder.aliases(job.source))
        blocked_jobs = self._import_jobs(jobs)
        if self._renames_files:
            # These logs have names that the store needs for its own logs.
            renamed_jobs = []
            for job, _ in blocked_jobs:
                try:
                    job.source = self._folder.rename_for_import(job.source)
                    renamed_jobs.append(job)
                except OSError as error:
                    reason = "stenolog's log needs its file name, and the file cannot be renamed"
                    self._skipped.append(SkippedFile(job.file, f"{reason}: {error.strerror}"))
            blocked_jobs = self._import_jobs(_sort_for_import(renamed_jobs))
        self._skipped += [SkippedFile(job.file, reason) for job, reason in blocked_jobs]
        return [job for job in jobs if job.imported is not None]

    def _import_jobs(self, jobs: Sequence[_ImportJob]) -> list[tuple[_ImportJob, str]]:
        """Import these sessions. Return the jobs that a foreign log blocks, each with the error."""
        return [(job, reason) for job in jobs if (reason := self._import_job(job)) is not None]

    def _import_job(self, job: _ImportJob) -> str | None:
        """Import one session, or report why it is skipped. Raises StoreUnavailable.

        Returns the text of the store's error if a log of another program blocks the import.
        """
        try:
            self._read_and_merge(job)
        except ForeignLog as error:
            # Return the text, because the error object would keep a reference to the log.
            return str(error)
        except NotASession as error:
            if not (error.is_other_json and self._renames_files):
                self._skipped.append(SkippedFile(job.file, str(error)))
        except (DamagedStore, UsageError) as error:
            self._skipped.append(SkippedFile(job.file, str(error)))
        return None

    def _read_and_merge(self, job: _ImportJob) -> None:
        try:
            content = self._folder.read(job.source)
        except OSError as error:
            raise NotASession(f"it cannot be read: {error.strerror or error}") from error
        if content.session.layout == "stenolog-json" and not self._options.with_fallbacks:
            raise NotASession(
                "the file belongs to the fallback of another store, which merges it; "
                "`steno import` copies it"
            )
        session = without_oversized_summary(content.session)
        if not (self._options.is_own and session.layout == "stenolog-json"):
            session = without_control_fields(session)  # guard: import-drops-marks
        job.key = self._map_key(session.key)
        check_key(job.key)
        content = replace(content, session=replace(session, key=job.key))
        job.imported = self._merge_session(job, content)
        job.content = content
        self._progress(job.source.bytes)

    # --- one session -------------------------------------------------------------------------

    def _merge_session(self, job: _ImportJob, content: SourceContent) -> ImportedSession:
        old = content.session
        key = self._resolve_key(old.key)
        result = ImportedSession(
            file=job.file,
            layout=old.layout,
            key=key,
            messages=len(old.messages),
            added=0,
            already_imported=True,
            dropped=old.dropped,
            problems=old.problems,
        )
        if not old.messages and not old.summary:
            return result  # the session was cleared: there is nothing to import
        for target_key in self._candidate_keys(key, old):
            existing = self._read_existing_session(target_key, content)
            if existing is None and target_key == key and self._was_deleted(key, content):
                reason = (
                    f"{key!r} was deleted after this file was last written, so it was not imported"
                )
                return replace(result, problems=(*old.problems, reason))
            result = replace(result, key=target_key)
            if existing is not None and merging.is_imported(existing.meta, content.digest):
                if self._is_agent_start:
                    # At start-up problems are reported only once.
                    # `steno import` reports them each time.
                    result = replace(result, dropped=0, problems=())
                is_separate = target_key != key
                return result if is_separate else self._add_aliases(result, old, existing)
            digest = content.digest
            plan = MergePlan() if existing is None else merging.plan_merge(old, digest, existing)
            if plan is None:
                continue
            aliases, problems, unaccepted_aliases = (
                self._aliases_to_add(old, key) if target_key == key else ([], [], [])
            )
            if target_key != key:
                problems.append(
                    f"{key!r} already contains another conversation: imported as {target_key!r}"
                )
            existing = existing or ExistingSession()
            session_import = SessionImport(self._store, target_key, old, digest, existing, plan)
            added, more_problems = self._run_import(job, session_import, aliases)
            return replace(
                result,
                added=added,
                already_imported=False,
                problems=(*old.problems, *problems, *more_problems),
                aliases=tuple(aliases),
                unaccepted_aliases=tuple(unaccepted_aliases),
            )
        raise UsageError(
            f"there are {merging.MAX_SEPARATE_SESSIONS} other conversations named {old.key!r}"
        )

    def _add_aliases(
        self, imported: ImportedSession, old: LegacySession, existing: ExistingSession
    ) -> ImportedSession:
        """Add the new aliases of a file that was imported before. Return `imported` with them."""
        aliases, problems, unaccepted_aliases = self._aliases_to_add(old, imported.key)
        new_aliases = [name for name in aliases if name not in aliases_in(existing.meta)]
        if new_aliases and not self._options.dry_run:
            add_aliases(self._store, imported.key, existing.meta, new_aliases)
        return replace(
            imported,
            problems=(*imported.problems, *(problems if new_aliases else ())),
            aliases=tuple(new_aliases),
            unaccepted_aliases=tuple(unaccepted_aliases),
        )

    def _candidate_keys(self, key: str, old: LegacySession) -> Iterator[str]:
        """Yield possible keys: `key`, keys of earlier separate imports, then unused keys."""
        yield key
        earlier_keys = self._store.list_sessions(prefix=old.key + merging.SEPARATE_SUFFIX)
        new_keys = merging.separate_keys(old.key, old.updated)
        yield from (*earlier_keys, *(name for name in new_keys if name not in earlier_keys))

    def _run_import(
        self, job: _ImportJob, session_import: SessionImport, aliases: Sequence[str]
    ) -> tuple[int, Sequence[str]]:
        """Import a session. Return the number of added messages, and the problems of the import."""
        if self._options.dry_run:
            added_count = len(session_import.old.messages) - len(session_import.plan.seqs)
            return added_count, list(session_import.describe_skipped_state())
        session_import.write_import_mark(aliases)
        session_import.add_messages()
        session_import.apply_visibility()
        session_import.write_receipt(job.source.name)
        last_seq = session_import.existing.seqs[-1] if session_import.existing.seqs else 0
        new_seqs = {seq for seq in session_import.seqs if seq > last_seq}
        return len(new_seqs), session_import.problems

    def _resolve_key(self, key: str) -> str:
        """Return `key` if a session has this key, else the key of the session with this alias."""
        return key if self._find_info(key) is not None else self._alias_owners.get(key, key)

    @cached_property
    def _alias_owners(self) -> dict[str, str]:
        # The aliases are read only once, because other imports wait for the lock of the folder.
        return dict(Aliases(self._store).owners())

    def _find_info(self, key: str) -> SessionInfo | None:
        try:
            return self._store.info(key)
        except NoSuchSession:
            return None
        except ForeignLog:
            if self._options.dry_run:
                return None
            raise

    def _read_existing_session(self, key: str, content: SourceContent) -> ExistingSession | None:
        info = self._find_info(key)
        if info is None:
            return None
        is_imported = merging.is_imported(info.meta, content.digest)
        messages = [] if is_imported else self._store.get_history(key, full=True)
        payloads = [without_answer_seqs(message.to_json()) for message in messages]
        if not self._options.is_own:
            # Files of other programs have no reserved field; messages of an agent have one.
            payloads = [without_reserved_field(payload) for payload in payloads]
        return ExistingSession(
            payloads=payloads,
            seqs=[message.seq for message in messages],
            times=[message.at for message in messages],
            summary=info.summary,
            floor=info.floor,
            meta=info.meta,
            updated=info.updated,
        )

    def _was_deleted(self, key: str, content: SourceContent) -> bool:
        """Return whether the session was deleted after its file was last written or imported.

        False for an import by the user, which may import a deleted session again. The start of an
        agent must not do so. Messages that a SessionManager acknowledged are lost only if they are
        not imported, so only an import of the same file counts for its files.
        """
        if content.session.layout == "stenolog-json" and self._options.is_own:
            return self._is_in_trash(key, content.digest)
        deleted_at = self._deletion_times.get(key) if self._is_agent_start else None
        return deleted_at is not None and deleted_at > content.mtime

    def _is_in_trash(self, key: str, digest: str) -> bool:
        """Return whether content with this digest was imported into a deleted session."""
        for trashed in self._store.admin.list_trash():
            if trashed.key == key:
                mark = SnapshotMark(key=key, uid=trashed.uid)
                with suppress(NoSuchSession), self._store.admin.read_snapshot(mark) as reading:
                    if merging.is_imported(reading.snapshot.meta, digest):
                        return True
        return False

    @cached_property
    def _deletion_times(self) -> dict[str, datetime]:
        # The trash lists the last deletion first. Keep only the last deletion of each key.
        return {
            trashed.key: trashed.deleted for trashed in reversed(self._store.admin.list_trash())
        }

    def _aliases_to_add(
        self, old: LegacySession, key: str
    ) -> tuple[list[str], list[str], list[str]]:
        """Return aliases to add, problems of other aliases, and aliases that are not accepted."""
        if old.aliases and not self._options.accept_aliases:  # guard: import-asks-for-aliases
            return [], [], [name for name in old.aliases if self._alias_owners.get(name) != key]
        accepted_aliases: list[str] = []
        problems = []
        bytes_left = MAX_ALIAS_BYTES
        for name in old.aliases:
            owner = self._alias_owners.get(name)
            bytes_left -= len(name.encode("utf-8", "surrogatepass"))
            if self._alias_claims[name] > 1:
                problems.append(
                    f"the alias {name!r} is claimed by several sessions, so it was skipped"
                )
            elif owner not in (None, key):
                problems.append(f"the alias {name!r} already opens {owner!r}, so it was skipped")
            elif bytes_left < 0:
                problems.append(f"the alias {name!r} was skipped: the session has too many aliases")
            else:
                accepted_aliases.append(name)
        self._alias_owners.update(dict.fromkeys(accepted_aliases, key))
        return accepted_aliases, problems, []

    # --- names of files ----------------------------------------------------------------------

    def _restore_names(self, jobs: Sequence[_ImportJob]) -> None:
        if self._renames_files:
            # If two files had the same name, the newest (last) file gets its name back.
            for job in reversed(jobs):
                try:
                    self._folder.restore_names(job.source)
                except OSError as error:
                    _logger.warning("%s keeps its name %s: %s", job.file, job.source.files, error)

    def _rename_imported(self, jobs: Iterable[_ImportJob]) -> None:
        folder = self._folder
        for job in jobs:
            try:
                if job.content is None or folder.is_unchanged(job.source, job.content):
                    folder.rename_imported(job.source)
                    continue
                reason = "the file changed after it was imported: the next import reads it again"
                folder.restore_names(job.source)
            except OSError as error:
                reason = f"the file was imported, but could not be renamed: {error.strerror}"
            self._skipped.append(SkippedFile(job.file, reason))
        with suppress(OSError):
            folder.sync()


def _sort_for_import(jobs: Sequence[_ImportJob]) -> list[_ImportJob]:
    """Return the jobs in import order. Sessions whose new log takes the old file's name come last.

    After the new log has taken the name, the old file cannot get its name back. If a log and a JSON
    file have the same key, the log comes first.
    """
    same_name_keys = {
        job.key for job in jobs if job.source.name == escape_key(job.key) + LOG_SUFFIX
    }
    return sorted(
        jobs, key=lambda job: (job.key in same_name_keys, job.source.name.endswith(SUFFIX))
    )
