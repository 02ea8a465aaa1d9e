"""Import of the old sessions of a folder; afterwards their files are renamed, or left in place.

All sessions are imported before any file is renamed: a failure leaves every original in place, and
the next run continues an import that was killed. The steps for each session: its meta is marked
with the digest of the file, the messages are added, hidden messages are hidden and the summary is
set, and the mark becomes a receipt. `merging` decides what an old session adds to an existing one.
"""

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from datetime import datetime
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
from stenolog.stores.base import MarkedStore, Store
from stenolog.stores.file_names import escape_key
from stenolog.stores.json_file import SUFFIX, NotASession
from stenolog.transfer import merge as merging
from stenolog.transfer.importers.folder import Folder
from stenolog.transfer.importers.legacy_session import (
    LOG_SUFFIX,
    REFERENCE_LAYOUTS,
    Layout,
    LegacySession,
    Source,
    SourceContent,
    SourceFolder,
    without_control_fields,
    without_reserved_field,
)
from stenolog.transfer.merge import ExistingSession, Merge
from stenolog.transfer.session_import import SessionImport, add_aliases

__all__ = [
    "ImportReport",
    "ImportedSession",
    "Progress",
    "SkippedFile",
    "import_folder",
    "log_report",
    "migrate_from_json",
]

LOCK_TIMEOUT: Final = 60.0
"""Seconds to wait for another process that imports the same files.

Longer than a store call waits for a lock: the other process works as long as it holds the folder,
and a process that starts without the old sessions would create second ones of the same keys.
"""
MAX_ALIAS_BYTES: Final = 16 * 1024
"""Maximum size of all aliases of a session together, in bytes. The meta has room for more."""


class ImportedSession(Struct, frozen=True, kw_only=True):
    """An old session that is now in the store."""

    file: str
    layout: str
    key: str
    """Key of the session that contains it."""
    messages: int
    """Number of messages in the file."""
    added: int
    """Number of messages that were not in the store before."""
    already_imported: bool
    """Whether exactly this file was imported before."""
    dropped: int
    """Number of lines or messages of the file that could not be imported."""
    problems: tuple[str, ...]
    """Content that could not be imported and the reason, each as a sentence."""
    aliases: tuple[str, ...] = ()
    """Other keys that open the session from now on."""
    unaccepted_aliases: tuple[str, ...] = ()
    """Other keys that the file names for the session, and that the user has not accepted."""
    notes: tuple[str, ...] = ()
    """What was converted to the chat format, each as a sentence."""


class SkippedFile(Struct, frozen=True):
    """A file that was not imported."""

    file: str
    reason: str


class ImportReport(Struct, frozen=True, kw_only=True):
    """Result of an import."""

    imported: tuple[ImportedSession, ...] = ()
    skipped: tuple[SkippedFile, ...] = ()
    migrated: int = 0
    """Number of files with the ending of imported files, from this or an earlier import."""

    def combined_with(self, more: "ImportReport") -> "ImportReport":
        """Return the sum of both results."""
        return ImportReport(
            imported=self.imported + more.imported,
            skipped=self.skipped + more.skipped,
            migrated=self.migrated + more.migrated,
        )

    @property
    def sessions(self) -> int:
        """Number of old sessions that were imported now and not before."""
        return sum(not one.already_imported for one in self.imported)

    @property
    def messages(self) -> int:
        """Number of messages that were added to the store."""
        return sum(one.added for one in self.imported)

    @property
    def dropped(self) -> int:
        """Number of lines or messages that could not be imported."""
        return sum(one.dropped for one in self.imported)


Progress = Callable[[float], None]
"""Called repeatedly with the number of bytes of old files that were just imported."""
KeyMapper = Callable[[str], str]
"""Function that maps an old key to the key in the store."""

OnImported = Callable[[Source, ImportedSession], None]
"""Called with each session once all of it is in the store."""

_logger = logging.getLogger("stenolog")


def migrate_from_json(directory: str | os.PathLike[str], store: Store) -> ImportReport:
    """Import the old sessions of a folder into the store and rename their files to `.migrated`.

    Reads legacy `.json` files, picoclaw's `.jsonl` with `.meta.json`, zeroclaw's `.jsonl`, and
    files of our SessionManager. Files that cannot be read are left unchanged and reported. It can
    be called again at any time; a missing folder counts as empty. If the store cannot be written,
    raises its error, and every file keeps its name.

    The folder must be the agent's own: turns that our SessionManager left there are resumed, and
    aliases are accepted. Use `steno import` for files of others.
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
    fallbacks: bool = True,
    is_own: bool = False,
    aliases: bool = False,
    dry_run: bool = False,
    exclude_keys: Collection[str] = (),
    layouts: frozenset[Layout] = REFERENCE_LAYOUTS,
    map_key: KeyMapper | None = None,
    time_field: str = "",
    progress: Progress | None = None,
) -> ImportReport:
    """Import the old sessions of a folder, or of `only` one file in it.

    - `thorough`: also read files whose names suggest that they are our own logs.
    - `rename_files`: rename imported files. Otherwise nothing in the folder changes, and sessions
      deleted here are imported again unless the folder is our `is_own`.
    - `fallbacks`: import JSON files of a fallback; otherwise they are left to their store.
    - `is_own`: the folder belongs to this agent, so messages of its fallback are stored unchanged
      and aliases are accepted. Other content is foreign data: reserved fields and idempotency keys
      are dropped.
    - `aliases`: accept aliases of foreign data; otherwise the report lists them.
    - `dry_run`: write nothing.
    - `exclude_keys`: keys to skip.
    - `layouts`: layouts to import. Those in databases and trees are only copied.
    - `map_key`: maps the old key of a session to its new one.
    - `time_field`: field with the time of plain messages.

    Raises what the store raised.
    """
    options = _ImportOptions(
        rename_files=rename_files,
        fallbacks=fallbacks,
        is_own=is_own,
        aliases=aliases or is_own,
        dry_run=dry_run,
        exclude_keys=frozenset(exclude_keys),
        map_key=map_key,
        progress=progress,
    )
    if not rename_files and layouts != REFERENCE_LAYOUTS:
        return _import_unchanged_sources(path, store, only, layouts, options, time_field)
    try:
        folder = Folder(path, only=only, follow=not rename_files, layouts=layouts)
    except FileNotFoundError:
        return ImportReport()
    except OSError as error:
        return ImportReport(
            skipped=(SkippedFile(str(path), f"it cannot be opened: {error.strerror}"),)
        )
    with folder:
        run = _ImportRun(store, folder, folder, options)
        try:
            if rename_files and not dry_run:
                folder.lock(LOCK_TIMEOUT)
        except StoreBusy as error:
            # The process that holds it imports the same files and has not finished.
            return ImportReport(skipped=(SkippedFile(str(path), str(error)),))
        return run.all(folder.sources(thorough=thorough))


def log_report(migrated: ImportReport, store: Store) -> None:
    """Log the result of an import. A file that cannot be imported is a warning only once."""
    if migrated.sessions:
        _logger.info(
            "imported %d old sessions with %d messages", migrated.sessions, migrated.messages
        )
    for one in migrated.imported:
        for problem in one.problems:
            _logger.warning("%s: %s", one.file, problem)
    for file in migrated.skipped:
        level = logging.WARNING if _is_new(file, store) else logging.DEBUG
        _logger.log(level, "%s was not imported: %s", file.file, file.reason)


def _is_new(file: SkippedFile, store: Store) -> bool:
    """Return whether the store has not yet recorded that this file fails for this reason."""
    if not isinstance(store, MarkedStore):
        return True
    digest = hashlib.sha256(f"{file.file}\0{file.reason}".encode("utf-8", "replace")).hexdigest()
    mark = f"left-{digest[:16]}"
    try:
        if store.mark(mark):
            return False
        store.change_mark(mark)
    except StenologError:
        pass  # then it is a warning again at the next start
    return True


def merge_source(source: SourceFolder, store: Store, on_imported: OnImported) -> ImportReport:
    """Merge sessions of our own from another place. Raises what the store raised."""
    options = _ImportOptions(rename_files=False, is_own=True, aliases=True, on_imported=on_imported)
    return _ImportRun(store, source, None, options).import_source()


def _import_unchanged_sources(
    path: Path,
    store: Store,
    only: str | None,
    layouts: frozenset[Layout],
    options: "_ImportOptions",
    time_field: str,
) -> ImportReport:
    """Copy the sessions of all sources at this path."""
    # Imports SQLite, which no start of an agent needs.
    from stenolog.transfer.importers.framework_tables import find_sources

    total = ImportReport()
    try:
        found = find_sources(path, only=only, layouts=layouts, time_field=time_field)
    except FileNotFoundError:
        return total
    except OSError as error:
        return ImportReport(
            skipped=(SkippedFile(str(path), f"it cannot be opened: {error.strerror}"),)
        )
    with ExitStack() as opened:
        for source in found:
            if isinstance(source, AbstractContextManager):
                opened.enter_context(source)
        for source in found:
            total = total.combined_with(_ImportRun(store, source, None, options).import_source())
    return total


class _ImportOptions(Struct, frozen=True, kw_only=True):
    """The options of `import_folder`."""

    rename_files: bool
    fallbacks: bool = True
    is_own: bool
    aliases: bool
    dry_run: bool = False
    exclude_keys: frozenset[str] = frozenset()
    map_key: KeyMapper | None = None
    progress: Progress | None = None
    on_imported: OnImported | None = None


class _ImportJob(Struct):
    """The import of one source."""

    source: Source
    file: str
    key: str = ""
    found: SourceContent | None = None
    imported: ImportedSession | None = None


class _ImportRun:
    """One call of `import_folder`."""

    def __init__(
        self, store: Store, source: SourceFolder, folder: Folder | None, options: _ImportOptions
    ) -> None:
        self._store = store
        self._source = source
        self._rename_folder = folder
        self._options = options
        self._renaming = options.rename_files and not options.dry_run
        self._at_start = options.is_own or self._renaming
        self._map_key = options.map_key or (lambda key: key)
        self._progress = options.progress or (lambda _: None)
        self._on_imported = options.on_imported or (lambda *_: None)
        self._alias_owners: dict[str, str] | None = None
        self._alias_claims: Counter[str] = Counter()
        self._deleted: dict[str, datetime] | None = None
        self._skipped: list[SkippedFile] = []

    @property
    def _folder(self) -> Folder:
        """The folder in which files are renamed."""
        if self._rename_folder is None:
            raise UsageError("this source is read-only: its files are not renamed")
        return self._rename_folder

    def import_source(self) -> ImportReport:
        """Import all sessions of a source whose files stay unchanged."""
        try:
            sources = self._source.sources(thorough=True)
        except NotASession as error:
            return ImportReport(skipped=(SkippedFile(self._source.name, str(error)),))
        except OSError as error:
            reason = f"it cannot be read: {error.strerror or error}"
            return ImportReport(skipped=(SkippedFile(self._source.name, reason),))
        return self.all(sources)

    def all(self, sources: Sequence[Source]) -> ImportReport:
        """Import all sessions, then rename all files."""
        jobs = [_ImportJob(source, str(self._source.path / source.name)) for source in sources]
        try:
            finished = self._import_all(jobs)
        except BaseException:
            self._restore_names(jobs)
            raise
        self._restore_names([job for job in jobs if job.imported is None])
        if self._renaming:
            self._rename(finished)
        imported = tuple(job.imported for job in finished if job.imported is not None)
        map_key = self._source.count_imported() if isinstance(self._source, Folder) else 0
        return ImportReport(imported=imported, skipped=tuple(self._skipped), migrated=map_key)

    def _import_all(self, jobs: list[_ImportJob]) -> list[_ImportJob]:
        # An alias that two sessions claim is given to neither.
        if isinstance(self._source, Folder):
            for job in jobs:
                self._alias_claims.update(self._source.aliases(job.source))
        blocked = self._import_jobs(jobs)
        if self._renaming:
            # The logs themselves occupy names that the store needs, for their own key or another
            # one.
            waiting = [job for job, _ in blocked if self._rename_for_import(job)]
            blocked = self._import_jobs(_our_names_last(waiting))
        self._skipped += [SkippedFile(job.file, reason) for job, reason in blocked]
        return [job for job in jobs if job.imported is not None]

    def _rename_for_import(self, job: _ImportJob) -> bool:
        try:
            job.source = self._folder.rename_for_import(job.source)
        except OSError as error:
            reason = f"it has the file name of our log and cannot be renamed: {error.strerror}"
            self._skipped.append(SkippedFile(job.file, reason))
            return False
        return True

    def _import_jobs(self, jobs: Sequence[_ImportJob]) -> list[tuple[_ImportJob, str]]:
        """Import these sessions. Return those blocked by a foreign log, with the store's error."""
        return [(job, reason) for job in jobs if (reason := self._import_job(job)) is not None]

    def _import_job(self, job: _ImportJob) -> str | None:
        """Import one session, or note why it is skipped. Raises StoreUnavailable.

        Returns the store's error if a foreign log blocks the import.
        """
        try:
            self._read_and_merge(job)
        except ForeignLog as error:
            # As text: the error object would keep a reference to the log.
            return str(error)
        except NotASession as error:
            if not (error.something_else and self._renaming):
                self._skipped.append(SkippedFile(job.file, str(error)))
        except (DamagedStore, UsageError) as error:
            self._skipped.append(SkippedFile(job.file, str(error)))
        return None

    def _read_and_merge(self, job: _ImportJob) -> None:
        try:
            found = self._source.read(job.source)
        except OSError as error:
            raise NotASession(f"it cannot be read: {error.strerror or error}") from error
        if found.session.layout == "stenolog-json" and not self._options.fallbacks:
            raise NotASession(
                "it belongs to the fallback of another store, which merges it; "
                "`steno import` copies it"
            )
        if found.session.key in self._options.exclude_keys:  # guard: fallback-purge-not-read-in
            raise NotASession("it was purged in the fallback store")
        if not (self._options.is_own and found.session.layout == "stenolog-json"):
            data = without_control_fields(found.session)  # guard: import-drops-marks
            found = replace(found, session=data)
        key = self._map_key(found.session.key)
        check_key(key)
        if key != found.session.key:
            found = replace(found, session=replace(found.session, key=key))
        job.key = key
        job.imported = self._merge(job, found)
        job.found = found
        self._on_imported(job.source, job.imported)

    # --- one session -------------------------------------------------------------------------

    def _merge(self, job: _ImportJob, found: SourceContent) -> ImportedSession:
        old = found.session
        key = self._resolve_key(old.key)
        imported = ImportedSession(
            file=job.file,
            layout=old.layout,
            key=key,
            messages=len(old.messages),
            added=0,
            already_imported=True,
            dropped=old.dropped,
            problems=old.problems,
            notes=old.notes,
        )
        if not old.messages and not old.summary:
            return imported  # the session was cleared: there is nothing to import
        for target in self._candidate_keys(key, old):
            existing = self._existing_session(target, found)
            if existing is None and target == key and self._was_deleted(key, found):
                reason = (
                    f"{key!r} was deleted after this file was last written, so it was not imported"
                )
                return replace(imported, problems=(*old.problems, reason))
            if existing is not None and merging.is_imported(existing.meta, found.digest):
                # At start-up problems are reported only once; a copy reports them each time.
                outcome = replace(imported, dropped=0, problems=()) if self._at_start else imported
                names, refused, skipped = (
                    self._aliases_to_add(old, target) if target == key else ([], [], [])
                )
                new = [name for name in names if name not in aliases_in(existing.meta)]
                if new and not self._options.dry_run:
                    add_aliases(self._store, target, existing.meta, new)
                problems = (*outcome.problems, *refused) if new else outcome.problems
                return replace(
                    outcome,
                    key=target,
                    problems=problems,
                    aliases=tuple(new),
                    unaccepted_aliases=tuple(skipped),
                )
            merge = Merge() if existing is None else merging.plan_merge(old, found.digest, existing)
            if merge is not None:
                plan = SessionImport(self._store, target, old, found.digest, existing, merge)
                words = [*old.problems]
                names, refused, skipped = (
                    self._aliases_to_add(old, key) if target == key else ([], [], [])
                )
                words += refused
                if target != key:
                    words.append(
                        f"{key!r} already contains another conversation: imported as {target!r}"
                    )
                added, more = self._execute(job, plan, names)
                return replace(
                    imported,
                    key=target,
                    added=added,
                    already_imported=False,
                    problems=(*words, *more),
                    aliases=tuple(names),
                    unaccepted_aliases=tuple(skipped),
                )
        raise UsageError(
            f"there are {merging.MAX_SEPARATE_SESSIONS} other conversations named {old.key!r}"
        )

    def _candidate_keys(self, key: str, old: LegacySession) -> Iterator[str]:
        """Yield the possible keys: its own, keys it was kept under before, and free names."""
        yield key
        apart = self._store.list_sessions(prefix=merging.separate_key_prefix(old.key))
        yield from apart
        yield from (n for n in merging.separate_keys(old.key, old.updated) if n not in apart)

    def _execute(
        self, job: _ImportJob, plan: SessionImport, names: Sequence[str]
    ) -> tuple[int, Sequence[str]]:
        progress = 0.0
        if self._options.dry_run:
            added, problems = (
                len(plan.old.messages) - len(plan.merge.seqs),
                list(plan.skipped_state()),
            )
        else:
            plan.write_import_mark(names)
            before = (
                plan.existing.seqs[-1] if plan.existing is not None and plan.existing.seqs else 0
            )
            new: set[int] = set()
            for seqs in plan.add_messages():
                new.update(seq for seq in seqs if seq > before)
                step = job.source.bytes * len(seqs) / max(1, len(plan.old.messages))
                progress += step
                self._progress(step)
            plan.apply_visibility()
            plan.write_receipt(job.source.name)
            added, problems = len(new), plan.problems
        self._progress(job.source.bytes - progress)
        return added, problems

    def _resolve_key(self, key: str) -> str:
        """Return the key itself if the session exists, else the session with this alias."""
        return key if self._info(key) is not None else self._aliases().get(key, key)

    def _aliases(self) -> dict[str, str]:
        # Looked up once: other imports wait for the lock of the folder.
        if self._alias_owners is None:
            self._alias_owners = dict(Aliases(self._store).owners())
        return self._alias_owners

    def _info(self, key: str) -> SessionInfo | None:
        try:
            return self._store.info(key)
        except NoSuchSession:
            return None
        except ForeignLog:
            if self._options.dry_run:
                return None
            raise

    def _existing_session(self, key: str, found: SourceContent) -> ExistingSession | None:
        info = self._info(key)
        if info is None:
            return None
        is_known = merging.is_imported(info.meta, found.digest)
        messages = [] if is_known else self._store.get_history(key, full=True)
        payloads = [message.to_json() for message in messages]
        if not self._options.is_own:
            # Earlier versions stored the reserved field of imported messages too.
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

    def _was_deleted(self, key: str, found: SourceContent) -> bool:
        """Return whether the session was deleted since: an old file must not restore it."""
        if not self._at_start:
            return False
        if self._deleted is None:
            # The trash lists the last deletion first; keep it for each key.
            trash = self._store.list_trash()
            self._deleted = {one.key: one.deleted for one in reversed(trash)}
        deleted = self._deleted.get(key)
        return deleted is not None and deleted > found.changed

    def _aliases_to_add(
        self, old: LegacySession, key: str
    ) -> tuple[list[str], list[str], list[str]]:
        """Return the aliases that the session gets, problems with others, and unconfirmed ones."""
        if old.aliases and not self._options.aliases:  # guard: import-asks-for-aliases
            return [], [], [name for name in old.aliases if self._aliases().get(name) != key]
        given: list[str] = []
        problems = []
        room = MAX_ALIAS_BYTES
        for name in old.aliases:
            owner = self._aliases().get(name)
            room -= len(name.encode("utf-8", "surrogatepass"))
            if self._alias_claims[name] > 1:
                problems.append(
                    f"the alias {name!r} is claimed by several sessions, so it was skipped"
                )
            elif owner not in (None, key):
                problems.append(f"the alias {name!r} already opens {owner!r}, so it was skipped")
            elif room < 0:
                problems.append(f"the alias {name!r} was skipped: the session has too many aliases")
            else:
                given.append(name)
        self._aliases().update(dict.fromkeys(given, key))
        return given, problems, []

    # --- names of files ----------------------------------------------------------------------

    def _restore_names(self, jobs: Sequence[_ImportJob]) -> None:
        if self._renaming:
            # Of two files with one original name the newest comes last and gets the name.
            for job in reversed(jobs):
                try:
                    self._folder.restore_names(job.source)
                except OSError as error:
                    _logger.warning("%s keeps its name %s: %s", job.file, job.source.files, error)

    def _rename(self, jobs: Iterable[_ImportJob]) -> None:
        for job in jobs:
            try:
                if job.found is not None and not self._folder.is_unchanged(job.source, job.found):
                    reason = (
                        "it was imported, but has changed since: the next import reads it again"
                    )
                    self._skipped.append(SkippedFile(job.file, reason))
                    self._folder.restore_names(job.source)
                else:
                    self._folder.rename_imported(job.source)
            except OSError as error:
                reason = f"it was imported, but could not be renamed: {error.strerror}"
                self._skipped.append(SkippedFile(job.file, reason))
        with suppress(OSError):
            self._folder.sync()


def _our_names_last(jobs: Sequence[_ImportJob]) -> list[_ImportJob]:
    """Sort the jobs so that files with names of our logs come last: they cannot be put back.

    Of one key, the log comes before the JSON file.
    """
    last = {job.key for job in jobs if job.source.name == escape_key(job.key) + LOG_SUFFIX}
    return sorted(jobs, key=lambda job: (job.key in last, job.source.name.endswith(SUFFIX)))
