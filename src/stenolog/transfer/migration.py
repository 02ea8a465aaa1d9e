"""Import of the old sessions of a folder; afterwards their files are renamed, or left in place.

All sessions are imported before any file is renamed: a failure leaves every original in place, and
the next run continues an import that was killed. The steps for each session: its meta is marked
with the digest of the file, the messages are added, hidden messages are hidden and the summary is
set, and the mark becomes a receipt. `merging` decides what an old session adds to an existing one.
"""

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
    StoreBusy,
    UsageError,
)
from stenolog.records import SessionInfo
from stenolog.sessions.aliases import Aliases, claimed
from stenolog.stores.arguments import check_store
from stenolog.stores.base import Store
from stenolog.stores.file_names import escape_key
from stenolog.stores.json_file import SUFFIX, NotASession
from stenolog.transfer import merge as merging
from stenolog.transfer.import_report import ImportedSession, ImportReport, SkippedFile, report
from stenolog.transfer.importers.folder import Folder
from stenolog.transfer.importers.legacy_session import (
    OF_THE_REFERENCE,
    Layout,
    LegacySession,
    Source,
    SourceFiles,
    SourceFolder,
    as_data,
    without_reserved,
)
from stenolog.transfer.importers.log_pairs import LOG_SUFFIX
from stenolog.transfer.merge import ExistingSession, Merge
from stenolog.transfer.session_import import SessionImport, give_aliases

__all__ = [
    "ImportReport",
    "ImportedSession",
    "Progress",
    "SkippedFile",
    "import_folder",
    "migrate_from_json",
    "report",
]

PATIENCE: Final = 60.0
"""Seconds to wait for another process that imports the same files.

Longer than a store call waits for a lock: the other process works as long as it holds the folder,
and a process that starts without the old sessions would create second ones of the same keys.
"""
MAX_ALIAS_BYTES: Final = 16 * 1024
"""Maximum size of all aliases of a session together, in bytes. The meta has room for more."""

Progress = Callable[[float], None]
"""Called repeatedly with the number of bytes of old files that were just imported."""
Renamed = Callable[[str], str]
"""Function that maps an old key to the key in the store."""

Done = Callable[[Source, ImportedSession], None]
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
    return import_folder(Path(directory), store, own=True)


def import_folder(
    path: Path,
    store: Store,
    *,
    only: str | None = None,
    thorough: bool = True,
    renaming: bool = True,
    fallbacks: bool = True,
    own: bool = False,
    aliases: bool = False,
    dry_run: bool = False,
    without: Collection[str] = (),
    layouts: frozenset[Layout] = OF_THE_REFERENCE,
    renamed: Renamed | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Import the old sessions of a folder, or of `only` one file in it.

    - `thorough`: also read files whose names suggest that they are our own logs.
    - `renaming`: rename imported files. Otherwise nothing in the folder changes, and sessions
      deleted here are imported again unless the folder is our `own`.
    - `fallbacks`: import JSON files of a fallback; otherwise they are left to their store.
    - `own`: the folder belongs to this agent, so messages of its fallback are stored unchanged and
      aliases are accepted. Other content is foreign data: reserved fields and idempotency keys are
      dropped.
    - `aliases`: accept aliases of foreign data; otherwise the report lists them.
    - `dry_run`: write nothing.
    - `without`: keys to skip.
    - `layouts`: layouts to import. Those in databases and trees are only copied.
    - `renamed`: maps the old key of a session to its new one.

    Raises what the store raised.
    """
    how = _How(
        renaming=renaming,
        fallbacks=fallbacks,
        own=own,
        aliases=aliases or own,
        dry_run=dry_run,
        without=frozenset(without),
        renamed=renamed,
        progress=progress,
    )
    if not renaming and layouts != OF_THE_REFERENCE:
        return _copy(path, store, only, layouts, how)
    try:
        folder = Folder(path, only=only, follow=not renaming, layouts=layouts)
    except FileNotFoundError:
        return ImportReport()
    except OSError as error:
        return ImportReport(
            left=(SkippedFile(str(path), f"it cannot be opened: {error.strerror}"),)
        )
    with folder:
        run = _Run(store, folder, folder, how)
        try:
            if renaming and not dry_run:
                folder.lock(PATIENCE)
        except StoreBusy as error:
            # The process that holds it imports the same files and has not finished.
            return ImportReport(left=(SkippedFile(str(path), str(error)),))
        return run.all(folder.sources(thorough=thorough))


def merge_from(shelf: SourceFolder, store: Store, done: Done) -> ImportReport:
    """Merge sessions of our own from another place. Raises what the store raised."""
    how = _How(renaming=False, own=True, aliases=True, done=done)
    return _Run(store, shelf, None, how).everything()


def _copy(
    path: Path, store: Store, only: str | None, layouts: frozenset[Layout], how: "_How"
) -> ImportReport:
    """Copy the sessions of all sources at this path."""
    # Imports SQLite, which no start of an agent needs.
    from stenolog.transfer.importers.sources import shelves

    total = ImportReport()
    try:
        found = shelves(path, only=only, layouts=layouts)
    except FileNotFoundError:
        return total
    except OSError as error:
        return ImportReport(
            left=(SkippedFile(str(path), f"it cannot be opened: {error.strerror}"),)
        )
    with ExitStack() as opened:
        for shelf in found:
            if isinstance(shelf, AbstractContextManager):
                opened.enter_context(shelf)
        for shelf in found:
            total = total.and_then(_Run(store, shelf, None, how).everything())
    return total


class _How(Struct, frozen=True, kw_only=True):
    """The options of `import_folder`."""

    renaming: bool
    fallbacks: bool = True
    own: bool
    aliases: bool
    dry_run: bool = False
    without: frozenset[str] = frozenset()
    renamed: Renamed | None = None
    progress: Progress | None = None
    done: Done | None = None


class _Job(Struct):
    """The import of one source."""

    source: Source
    file: str
    key: str = ""
    found: SourceFiles | None = None
    taken: ImportedSession | None = None


class _Run:
    """One call of `import_folder`."""

    def __init__(self, store: Store, shelf: SourceFolder, folder: Folder | None, how: _How) -> None:
        self._store = store
        self._shelf = shelf
        self._in_place = folder
        self._how = how
        self._renaming = how.renaming and not how.dry_run
        self._at_start = how.own or self._renaming
        self._renamed = how.renamed or (lambda key: key)
        self._progress = how.progress or (lambda _: None)
        self._done = how.done or (lambda *_: None)
        self._owners: dict[str, str] | None = None
        self._wanted: Counter[str] = Counter()
        self._deleted: dict[str, datetime] | None = None
        self._left: list[SkippedFile] = []

    @property
    def _folder(self) -> Folder:
        """The folder in which files are renamed."""
        if self._in_place is None:
            raise UsageError("what is only copied is never renamed")
        return self._in_place

    def everything(self) -> ImportReport:
        """Import all sessions of a source whose files stay unchanged."""
        try:
            sources = self._shelf.sources(thorough=True)
        except NotASession as error:
            return ImportReport(left=(SkippedFile(self._shelf.name, str(error)),))
        except OSError as error:
            reason = f"it cannot be read: {error.strerror or error}"
            return ImportReport(left=(SkippedFile(self._shelf.name, reason),))
        return self.all(sources)

    def all(self, sources: Sequence[Source]) -> ImportReport:
        """Import all sessions, then rename all files."""
        jobs = [_Job(source, str(self._shelf.path / source.name)) for source in sources]
        try:
            done = self._take_all(jobs)
        except BaseException:
            self._put_back(jobs)
            raise
        self._put_back([job for job in jobs if job.taken is None])
        if self._renaming:
            self._rename(done)
        taken = tuple(job.taken for job in done if job.taken is not None)
        renamed = self._shelf.taken_in() if isinstance(self._shelf, Folder) else 0
        return ImportReport(taken=taken, left=tuple(self._left), migrated=renamed)

    def _take_all(self, jobs: list[_Job]) -> list[_Job]:
        # An alias that two sessions claim is given to neither.
        if isinstance(self._shelf, Folder):
            for job in jobs:
                self._wanted.update(self._shelf.aliases(job.source))
        blocked = self._blocked(jobs)
        if self._renaming:
            # The logs themselves occupy names that the store needs, for their own key or another
            # one.
            waiting = [job for job, _ in blocked if self._set_aside(job)]
            blocked = self._blocked(_in_order(waiting))
        self._left += [SkippedFile(job.file, reason) for job, reason in blocked]
        return [job for job in jobs if job.taken is not None]

    def _set_aside(self, job: _Job) -> bool:
        try:
            job.source = self._folder.set_aside(job.source)
        except OSError as error:
            reason = f"it is in the way, and cannot be renamed: {error.strerror}"
            self._left.append(SkippedFile(job.file, reason))
            return False
        return True

    def _blocked(self, jobs: Sequence[_Job]) -> list[tuple[_Job, str]]:
        """Import these sessions. Return those blocked by a foreign log, with the store's error."""
        return [(job, reason) for job in jobs if (reason := self._take(job)) is not None]

    def _take(self, job: _Job) -> str | None:
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
                self._left.append(SkippedFile(job.file, str(error)))
        except (DamagedStore, UsageError) as error:
            self._left.append(SkippedFile(job.file, str(error)))
        return None

    def _read_and_merge(self, job: _Job) -> None:
        try:
            found = self._shelf.read(job.source)
        except OSError as error:
            raise NotASession(f"it cannot be read: {error.strerror or error}") from error
        if found.session.layout == "stenolog-json" and not self._how.fallbacks:
            raise NotASession(
                "the fallback of another store wrote it, which merges it; `steno import` copies it"
            )
        if found.session.key in self._how.without:  # guard: fallback-purge-not-read-in
            raise NotASession("it was purged in the fallback")
        if not (self._how.own and found.session.layout == "stenolog-json"):
            data = as_data(found.session)  # guard: import-drops-marks
            found = replace(found, session=data)
        key = self._renamed(found.session.key)
        check_key(key)
        if key != found.session.key:
            found = replace(found, session=replace(found.session, key=key))
        job.key = key
        job.taken = self._merge(job, found)
        job.found = found
        self._done(job.source, job.taken)

    # --- one session -------------------------------------------------------------------------

    def _merge(self, job: _Job, found: SourceFiles) -> ImportedSession:
        old = found.session
        key = self._own_key(old.key)
        taken = ImportedSession(
            file=job.file,
            layout=old.layout,
            key=key,
            messages=len(old.messages),
            added=0,
            known=True,
            dropped=old.dropped,
            problems=old.problems,
        )
        if not old.messages and not old.summary:
            return taken  # the session was cleared: there is nothing to import
        for target in self._targets(key, old):
            there = self._look(target, found)
            if there is None and target == key and self._was_deleted(key, found):
                reason = f"{key!r} was deleted after this file was last written: it stays deleted"
                return replace(taken, problems=(*old.problems, reason))
            if there is not None and merging.is_taken_in(there.meta, found.digest):
                # At start-up problems are reported only once; a copy reports them each time.
                told = replace(taken, dropped=0, problems=()) if self._at_start else taken
                names, refused, left = self._names(old, target) if target == key else ([], [], [])
                new = [name for name in names if name not in claimed(there.meta)]
                if new and not self._how.dry_run:
                    give_aliases(self._store, target, there.meta, new)
                problems = (*told.problems, *refused) if new else told.problems
                return replace(
                    told,
                    key=target,
                    problems=problems,
                    aliases=tuple(new),
                    aliases_left=tuple(left),
                )
            merge = Merge() if there is None else merging.decide(old, found.digest, there)
            if merge is not None:
                plan = SessionImport(self._store, target, old, found.digest, there, merge)
                words = [*old.problems]
                names, refused, left = self._names(old, key) if target == key else ([], [], [])
                words += refused
                if target != key:
                    words.append(f"{key!r} is another conversation: it is kept as {target!r}")
                added, more = self._carry_out(job, plan, names)
                return replace(
                    taken,
                    key=target,
                    added=added,
                    known=False,
                    problems=(*words, *more),
                    aliases=tuple(names),
                    aliases_left=tuple(left),
                )
        raise UsageError(f"there are {merging.MAX_NAMES} other conversations named {old.key!r}")

    def _targets(self, key: str, old: LegacySession) -> Iterator[str]:
        """Yield the possible keys: its own, keys it was kept under before, and free names."""
        yield key
        apart = self._store.list_sessions(prefix=merging.begins_apart(old.key))
        yield from apart
        yield from (n for n in merging.names_apart(old.key, old.updated) if n not in apart)

    def _carry_out(
        self, job: _Job, plan: SessionImport, names: Sequence[str]
    ) -> tuple[int, Sequence[str]]:
        done = 0.0
        if self._how.dry_run:
            added, problems = (
                len(plan.old.messages) - len(plan.merge.seqs),
                list(plan.not_carried()),
            )
        else:
            plan.mark(names)
            before = plan.there.seqs[-1] if plan.there is not None and plan.there.seqs else 0
            new: set[int] = set()
            for seqs in plan.add():
                new.update(seq for seq in seqs if seq > before)
                step = job.source.bytes * len(seqs) / max(1, len(plan.old.messages))
                done += step
                self._progress(step)
            plan.settle()
            plan.receipt(job.source.name)
            added, problems = len(new), plan.problems
        self._progress(job.source.bytes - done)
        return added, problems

    def _own_key(self, key: str) -> str:
        """Return the key itself if the session exists, else the session with this alias."""
        return key if self._info(key) is not None else self._aliases().get(key, key)

    def _aliases(self) -> dict[str, str]:
        # Looked up once: other imports wait for the lock of the folder.
        if self._owners is None:
            self._owners = dict(Aliases(self._store).owners())
        return self._owners

    def _info(self, key: str) -> SessionInfo | None:
        try:
            return self._store.info(key)
        except NoSuchSession:
            return None
        except ForeignLog:
            if self._how.dry_run:
                return None
            raise

    def _look(self, key: str, found: SourceFiles) -> ExistingSession | None:
        info = self._info(key)
        if info is None:
            return None
        is_known = merging.is_taken_in(info.meta, found.digest)
        messages = [] if is_known else self._store.get_history(key, full=True)
        payloads = [message.to_json() for message in messages]
        if not self._how.own:
            # Earlier versions stored the reserved field of imported messages too.
            payloads = [without_reserved(payload) for payload in payloads]
        return ExistingSession(
            payloads=payloads,
            seqs=[message.seq for message in messages],
            said=[message.at for message in messages],
            summary=info.summary,
            floor=info.floor,
            meta=info.meta,
            updated=info.updated,
        )

    def _was_deleted(self, key: str, found: SourceFiles) -> bool:
        """Return whether the session was deleted since: an old file must not restore it."""
        if not self._at_start:
            return False
        if self._deleted is None:
            # The trash lists the last deletion first; keep it for each key.
            trash = self._store.list_trash()
            self._deleted = {one.key: one.deleted for one in reversed(trash)}
        deleted = self._deleted.get(key)
        return deleted is not None and deleted > found.changed

    def _names(self, old: LegacySession, key: str) -> tuple[list[str], list[str], list[str]]:
        """Return the aliases that the session gets, problems with others, and unconfirmed ones."""
        if old.aliases and not self._how.aliases:  # guard: import-asks-for-aliases
            return [], [], [name for name in old.aliases if self._aliases().get(name) != key]
        given: list[str] = []
        problems = []
        room = MAX_ALIAS_BYTES
        for name in old.aliases:
            owner = self._aliases().get(name)
            room -= len(name.encode("utf-8", "surrogatepass"))
            if self._wanted[name] > 1:
                problems.append(f"the alias {name!r} is claimed by several sessions: left out")
            elif owner not in (None, key):
                problems.append(f"the alias {name!r} opens {owner!r} already: left out")
            elif room < 0:
                problems.append(f"the alias {name!r} is one too many: left out")
            else:
                given.append(name)
        self._aliases().update(dict.fromkeys(given, key))
        return given, problems, []

    # --- names of files ----------------------------------------------------------------------

    def _put_back(self, jobs: Sequence[_Job]) -> None:
        if self._renaming:
            # Of two files with one original name the newest comes last and gets the name.
            for job in reversed(jobs):
                try:
                    self._folder.put_back(job.source)
                except OSError as error:
                    _logger.warning("%s keeps its name %s: %s", job.file, job.source.files, error)

    def _rename(self, jobs: Iterable[_Job]) -> None:
        for job in jobs:
            try:
                if job.found is not None and not self._folder.is_as_read(job.source, job.found):
                    reason = "it was taken in, but has changed since: it is read again next time"
                    self._left.append(SkippedFile(job.file, reason))
                    self._folder.put_back(job.source)
                else:
                    self._folder.finish(job.source)
            except OSError as error:
                reason = f"it was taken in, but could not be renamed: {error.strerror}"
                self._left.append(SkippedFile(job.file, reason))
        with suppress(OSError):
            self._folder.sync()


def _in_order(jobs: Sequence[_Job]) -> list[_Job]:
    """Sort the jobs so that files with names of our logs come last: they cannot be put back.

    Of one key, the log comes before the JSON file.
    """
    last = {job.key for job in jobs if job.source.name == escape_key(job.key) + LOG_SUFFIX}
    return sorted(jobs, key=lambda job: (job.key in last, job.source.name.endswith(SUFFIX)))
