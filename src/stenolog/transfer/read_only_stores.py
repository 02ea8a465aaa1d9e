"""Read-only stores: one for transcripts of other programs, one that combines several places.

The stores write nothing to workspaces, databases and transcripts. Their search index is in memory,
or in a file outside of the workspaces and transcripts.
"""

import os
import threading
from abc import abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from time import monotonic, time_ns
from typing import Any, Final, NoReturn, Self

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog.background_catalog import SessionHead
from stenolog.catalog.catalog_database import to_microseconds
from stenolog.catalog.indexing import read_state
from stenolog.catalog.message_metadata import identity_of
from stenolog.catalog.searchable_text import source_from
from stenolog.errors import NoSuchSession, ReadOnly, StenologError, StoreClosed
from stenolog.records import Health, Message, SessionInfo, TrashedSession
from stenolog.stores import log_reports
from stenolog.stores.admin import Place
from stenolog.stores.base import SessionView, Store, find_info
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.json_file import NotASession
from stenolog.stores.operations import (
    AdminOperations,
    Decide,
    NewMessages,
    SessionOperations,
    T,
    poll_messages,
)
from stenolog.stores.snapshots import SnapshotMark, SnapshotReading
from stenolog.transfer.transcripts.claude_code import prompt_of_record
from stenolog.transfer.transcripts.transcript import (
    TranscriptFile,
    TranscriptReader,
    as_dict,
    as_text,
    open_transcript,
    parse_json,
    parse_time,
    path_and_reason,
    printable_path,
    text_of_parts,
)
from stenolog.transfer.transcripts.transcript_import import META_FIELD, make_snapshot

MAX_CACHED_BYTES: Final = 64 * 1024 * 1024
"""Maximum total size, in bytes, of the files whose sessions are kept in memory."""
LIST_SECONDS: Final = 2.0
"""Seconds for which a listing of the folders is used before the folders are searched again."""
RUNNING_SECONDS: Final = 300.0
"""Seconds after the last write to a transcript for which an open turn counts as running."""
_POLL_SECONDS: Final = 1.0
"""Seconds between two checks for new messages."""
_HEAD_BYTES: Final = 64 * 1024
"""Maximum number of bytes to read from each file when transcripts are listed."""
_MAX_PROMPT_CHARS: Final = 1_000


class ReadOnlyStore(SessionOperations):
    """A store that cannot be written."""

    refusal = "the sessions are shown read-only"
    """The error text of a call that would write."""
    problems: Mapping[str, str]
    """Reasons why places could not be read at the last attempt, by the name of the place.

    A new dict replaces this dict after each read; the dict itself is never modified.
    """

    @property
    def admin(self) -> "ReadOnlyAdmin":
        """The calls that administer the store; calls that write raise ReadOnly."""
        return ReadOnlyAdmin(self)

    @abstractmethod
    def _read_stamps(self) -> dict[str, str]:
        """Return the change stamp of each session: a text that differs after every change."""

    @abstractmethod
    def _find_leased(self, keys: Collection[str]) -> set[str]:
        """Return the keys of sessions that any process leases, or another program writes, now."""

    @abstractmethod
    def _open_snapshot(
        self, mark: SnapshotMark, after: int
    ) -> AbstractContextManager[SnapshotReading]:
        """Read a session and its messages with a seq above `after`. Raises NoSuchSession."""

    def _read_marker(self, _name: str) -> str:
        """Return the change marker of this name; empty for a marker without a value."""
        return ""

    def _catalog_file(self) -> Path | None:
        """Return the path of the search index; None if the index is in memory."""
        return None

    def _list_problems(self) -> tuple[str, ...]:
        """Return the places that could not be read, with the reasons."""
        return tuple(f"{place}: {reason}" for place, reason in self.problems.items())

    @abstractmethod
    def view(
        self, key: str, last: int | None = None, *, since: SessionView | None = None
    ) -> SessionView:
        """Return info, summary and visible messages, read together. Raises NoSuchSession.

        With `since`, return a full view.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the store. Later calls raise StoreClosed."""

    def list_sessions(
        self, *, prefix: str = "", limit: int | None = None, after: str | None = None
    ) -> list[str]:
        """Return the keys in byte order."""
        start = after or ""  # every key is greater than an empty text
        keys = sorted(key for key in self._read_stamps() if key.startswith(prefix) and key > start)
        return keys[:limit]

    def _refuse(self, *_args: Any, **_options: Any) -> NoReturn:
        raise ReadOnly(self.refusal)

    add_message = add_full_message = add_messages = _refuse
    compact = fork = delete = lease = _refuse

    def _change(self, _key: str, _decide: Decide[T]) -> NoReturn:
        self._refuse()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ReadOnlyAdmin(AdminOperations):
    """Administration of a store that cannot be written."""

    def __init__(self, store: ReadOnlyStore) -> None:
        super().__init__(store)
        self._store = store

    def _refuse(self, *_args: Any, **_options: Any) -> NoReturn:
        raise ReadOnly(self._store.refusal)

    restore = delete_unchanged = purge = finish_purge = _refuse
    update_marker = snapshot_writer = _refuse

    def list_trash(self, *, unfinished: bool = False) -> list[TrashedSession]:
        """Return an empty list, because a read-only store cannot restore sessions."""
        del unfinished
        return []

    def stamps(self) -> dict[str, str]:
        """Return the change stamp of each session: a text that differs after every change."""
        return self._store._read_stamps()

    def leased(self, keys: Collection[str]) -> set[str]:
        """Return the keys of sessions that any process leases, or another program writes, now."""
        return self._store._find_leased(keys)

    def read_marker(self, name: str) -> str:
        """Return the value of the change marker `name`; empty for a marker without a value."""
        return self._store._read_marker(name)

    def list_snapshots(self) -> list[SnapshotMark]:
        """Return an empty list, because a copy reads each workspace or database directly."""
        return []

    def read_snapshot(
        self, mark: SnapshotMark, *, after: int = 0
    ) -> AbstractContextManager[SnapshotReading]:
        """Read a session and its messages with a seq above `after`. Raises NoSuchSession."""
        return self._store._open_snapshot(mark, after)

    def health(self) -> Health:
        """Return the health: always ok, with the places that could not be read as problems."""
        return Health(ok=True, free_bytes=None, problems=self._store._list_problems())

    @property
    def place(self) -> Place:
        """The place of the search index."""
        return Place(namespace="sessions", catalog_file=self._store._catalog_file())


# --- transcripts ----------------------------------------------------------------------------------


class TranscriptStore(ReadOnlyStore):
    """The transcripts of one or more places, as a store that cannot be written."""

    refusal = (
        "transcripts of other programs are read-only; `steno import` copies them into a workspace"
    )

    def __init__(self, places: Sequence[tuple[TranscriptReader, Path]]) -> None:
        self._places = list(places)
        self.problems = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._files: dict[str, tuple[TranscriptReader, TranscriptFile]] = {}
        self._listed_at = float("-inf")
        self._sessions: OrderedDict[str, tuple[TranscriptFile, InMemoryStore]] = OrderedDict()
        self._failures: dict[str, tuple[TranscriptFile, str, str]] = {}
        """File, path and reason of each session that could not be read, by key."""
        self._reported: set[tuple[str, str]] = set()

    # --- sessions ----------------------------------------------------------------------------

    def _read_stamps(self) -> dict[str, str]:
        """Return the change stamp of each session: a text that differs after every change."""
        files = self._find_files()
        return {key: f"{file.size}-{file.modified}" for key, (_, file) in files.items()}

    def info(self, key: str) -> SessionInfo:
        """Return the info of the session. Raises NoSuchSession."""
        return self._read_session(key).info(key)

    def view(
        self, key: str, last: int | None = None, *, since: SessionView | None = None
    ) -> SessionView:
        """Return info, summary and visible messages, read together. Raises NoSuchSession."""
        return self._read_session(key).view(key, last if since is None else since.last)

    def get_history(
        self, key: str, *, last: int | None = None, after: int | None = None, full: bool = False
    ) -> list[Message]:
        """Return the visible messages in the order of their seqs; with `full`, all messages."""
        try:
            session = self._read_session(key)
        except NoSuchSession:
            return []
        return session.get_history(key, last=last, after=after, full=full)

    def get_summary(self, key: str) -> str:
        """Return the summary; empty if there is none."""
        info = find_info(self, key)
        return "" if info is None else info.summary

    def heads(self, keys: Sequence[str]) -> Iterator[SessionHead]:
        """Yield first prompt, project and times of these sessions, the newest first.

        Only the start of a JSONL file is read. Other files, and files with several conversations,
        are not read: their heads have no prompt.
        """
        all_files = self._find_files()
        files = [all_files[key][1] for key in keys if key in all_files]
        for file in sorted(files, key=lambda file: -file.modified):
            with suppress(OSError):
                yield read_head(file)

    def _find_leased(self, keys: Collection[str]) -> set[str]:
        """Return the keys of sessions that their program is probably writing now.

        Their last turn is open, and their file has just been written. The time of a file with
        several conversations does not tell which of them was written.
        """
        all_files, start = self._find_files(), time_ns() - int(RUNNING_SECONDS * 1e9)
        files = [all_files[key][1] for key in keys if key in all_files]
        new_keys = [f.key for f in files if f.modified > start and not f.conversation_id]
        new_infos = [info for key in new_keys if (info := find_info(self, key)) is not None]
        return {info.key for info in new_infos if read_state(self, info)[0] != "idle"}

    def _open_snapshot(
        self, mark: SnapshotMark, after: int
    ) -> AbstractContextManager[SnapshotReading]:
        """Read a session and its messages with a seq above `after`. Raises NoSuchSession."""
        return self._read_session(mark.key).admin.read_snapshot(mark, after=after)

    def follow(
        self, key: str, *, after: int = 0, uid: str | None = None, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield each message with a seq greater than `after` once, as soon as it is written."""
        read = partial(self._read_new_messages, key)
        return poll_messages(
            read, self._closed.wait, key, after=after, uid=uid, timeout=timeout, poll=_POLL_SECONDS
        )

    def _read_new_messages(self, key: str, after: int) -> NewMessages | None:
        info = find_info(self, key)
        if info is None:
            return None
        return info.uid, info.last_seq, self.get_history(key, after=after, full=True)

    def _find_files(self) -> dict[str, tuple[TranscriptReader, TranscriptFile]]:
        """Return the readable transcripts. Places are searched again after LIST_SECONDS."""
        if self._closed.is_set():
            raise StoreClosed("the store is closed")
        with self._lock:
            if monotonic() - self._listed_at > LIST_SECONDS:
                files = {}
                problems: dict[str, str] = {}
                for reader, path in self._places:
                    try:
                        for file in reader.find(path):
                            if all(map(_is_readable, file.paths)):
                                files[file.key] = reader, file
                    except (OSError, NotASession) as error:
                        # Continue, because the other places can still be shown.
                        name, reason = path_and_reason(error, path)
                        problems[name] = reason
                        if not isinstance(error, PermissionError):  # `open_places` reports it
                            self._warn_once(name, reason)
                for key, (file, name, reason) in list(self._failures.items()):
                    if key in files and files[key][1] == file:
                        problems[name] = reason
                    else:
                        del self._failures[key]
                self._files, self.problems = files, problems
                self._listed_at = monotonic()
            return self._files

    def _read_session(self, key: str) -> InMemoryStore:
        """Return a store with the current content of this session only. Raises NoSuchSession."""
        files = self._find_files()
        if key not in files:
            raise NoSuchSession(key)
        reader, file = files[key]
        with self._lock:
            cached_session = self._sessions.get(key)
            if cached_session is not None and cached_session[0] == file:
                self._sessions.move_to_end(key)
                return cached_session[1]
            if self._failures.get(key, (None,))[0] == file:
                raise NoSuchSession(key)  # the file is unchanged, so reading it would fail again
        try:
            session_store = self._make_session(reader, file)
        except FileNotFoundError as error:
            raise NoSuchSession(key) from error
        except (OSError, NotASession, StenologError) as error:  # guard: view-contains-one-session
            self._report_failure(file, error)
            raise NoSuchSession(key) from error
        with self._lock:
            self._sessions[key] = file, session_store
            self._sessions.move_to_end(key)
            size = sum(cached_file.size for cached_file, _ in self._sessions.values())
            while len(self._sessions) > 1 and size > MAX_CACHED_BYTES:
                _, (dropped_file, _) = self._sessions.popitem(last=False)
                size -= dropped_file.size
        return session_store

    def _make_session(self, reader: TranscriptReader, file: TranscriptFile) -> InMemoryStore:
        """Return a store with this session. Raises NotASession, OSError and StenologError."""
        transcript = reader.read(file)
        session_store = InMemoryStore()
        # The uid is derived from the key, so that it is the same in every process.
        uid = sha256(file.key.encode()).hexdigest()[:16]
        snapshot, messages = make_snapshot(transcript, file, uid=uid, problems=[])
        snapshot = replace(snapshot, forked_from=transcript.facts.get("forked_from"))
        with session_store.admin.snapshot_writer() as writer:
            writer.write(snapshot, messages)
        return session_store

    def _report_failure(self, file: TranscriptFile, error: Exception) -> None:
        """Add the failure to the problems. Do not read the file again until it changes."""
        name, reason = path_and_reason(error, file.paths[-1])
        with self._lock:
            self.problems = {**self.problems, name: reason}
            if getattr(error, "errno", None) is None:  # a retry cannot succeed
                self._failures[file.key] = file, name, reason
            self._warn_once(name, reason)

    def _warn_once(self, name: str, reason: str) -> None:
        if (name, reason) not in self._reported:
            self._reported.add((name, reason))
            log_reports.warning("%s cannot be read: %s", name, reason)

    # --- the store itself --------------------------------------------------------------------

    def close(self) -> None:
        """Close the store. Later calls raise StoreClosed."""
        self._closed.set()
        with self._lock:
            self._sessions.clear()


def read_head(file: TranscriptFile) -> SessionHead:
    """Return first prompt, project and times, read from the start of a file. Raises OSError."""
    path = file.paths[0]
    lines: list[bytes] = []
    if not file.conversation_id and path.suffix == ".jsonl":
        with open_transcript(path) as opened:
            lines = opened.read(_HEAD_BYTES).split(b"\n")[:-1]
    folder, prompt = "", ""
    created: datetime | None = None
    for line in lines:
        record = as_dict(parse_json(line))
        payload = as_dict(record.get("payload"))
        created = created or parse_time(record.get("timestamp"))
        folder = folder or as_text(record.get("cwd")) or as_text(payload.get("cwd"))
        prompt = _find_prompt(record, payload)
        if prompt:
            break
    facts: dict[str, Any] = {"program": file.program, "path": printable_path(file.paths[-1])}
    if folder:
        facts["folders"] = [folder]
    updated = file.modified // 1_000
    return SessionHead(
        key=file.key,
        prompt=prompt[:_MAX_PROMPT_CHARS],
        created=updated if created is None else to_microseconds(created),
        updated=updated,
        meta={"transcript": facts},
    )


def _find_prompt(record: dict[str, Any], payload: dict[str, Any]) -> str:
    """Return the prompt in a record of Claude Code, Codex or Gemini CLI; empty if missing."""
    if record.get("type") == "user":
        has_message = isinstance(record.get("message"), dict)
        return prompt_of_record(record) if has_message else text_of_parts(record.get("content"))
    if payload.get("type") == "user_message":
        return as_text(payload.get("message"))
    return ""


def _is_readable(path: Path) -> bool:
    return os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids)


# --- several places -------------------------------------------------------------------------------


class StorePlace(Struct, frozen=True, kw_only=True):
    """An open workspace, database or folder of transcripts.

    In the combined store, the keys of the place's sessions start with `prefix`.
    """

    store: Store
    prefix: str = ""
    name: str = ""
    """Path or address, for messages about the place."""
    exists: Callable[[], bool] = lambda: True
    """Function that returns whether the place still exists. A missing place has no sessions."""


class _ImportedCopy(Struct, frozen=True, kw_only=True):
    """Facts about a session that was imported from a transcript."""

    is_continued: bool
    """Whether the session has messages that are not from the transcript."""
    size: int
    """Size of the transcript at the time of the import, in bytes."""
    modified: int
    """Modification time of the transcript before the import, in nanoseconds."""

    def is_covered_by(self, stamp: str) -> bool:
        """Return whether a transcript with this stamp still has the content of the copy.

        True if the transcript is not smaller, and its last change not earlier, than at the import.
        """
        size, _, modified = stamp.partition("-")
        return int(size) >= self.size and int(modified) >= self.modified


class CombinedStore(ReadOnlyStore):
    """The sessions of several places, as a store that cannot be written.

    Closing the store closes all places. `catalog` is the file for the search index; without a file
    the index is in memory. `unopened` are the places that could not be opened, with the reasons.
    """

    def __init__(
        self,
        places: Sequence[StorePlace],
        *,
        catalog: Path | None = None,
        unopened: Mapping[str, str] | None = None,
    ) -> None:
        # A key belongs to the place with the longest matching prefix, so long prefixes come first.
        self._places = sorted(places, key=lambda place: -len(place.prefix))
        self._catalog = catalog
        self._unopened = self.problems = dict(unopened or {})
        self._stamps: dict[str, dict[str, str]] = {}
        """Last known change stamps of each place, by the prefix of the place."""
        self._copies: dict[str, tuple[str, _ImportedCopy]] = {}
        """Change stamp and facts of each imported copy, as last read, by key."""

    # --- sessions ----------------------------------------------------------------------------

    def _read_stamps(self) -> dict[str, str]:
        """Return the change stamp of each session: a text that differs after every change.

        For a place that cannot be read now, the last known stamps are returned. If a transcript has
        an imported copy, only one of the two is listed: the copy if it was continued in stenolog,
        otherwise the transcript. The unlisted session can still be read. Transcript and copy are
        both listed if the transcript has become smaller or older since the import, and the copy
        was not continued.
        """
        all_stamps: dict[str, str] = {}
        problems = dict(self._unopened)
        for place in reversed(self._places):
            try:
                stamps = place.store.admin.stamps() if place.exists() else {}
            except StenologError as error:
                stamps = self._stamps.get(place.prefix, {}) if place.exists() else {}
                problems[place.name] = str(error)
            self._stamps[place.prefix] = stamps
            all_stamps |= {place.prefix + key: stamp for key, stamp in stamps.items()}
        self.problems = problems
        for key in list(self._unlisted_keys(all_stamps)):
            all_stamps.pop(key, None)
        return all_stamps

    def _unlisted_keys(self, stamps: Mapping[str, str]) -> Iterator[str]:
        transcript_keys: defaultdict[str, list[str]] = defaultdict(list)
        stored_sessions: list[tuple[str, StorePlace, str]] = []
        for key in stamps if len(self._places) > 1 else ():
            place, inner_key = self._find_place(key)
            if isinstance(place.store, TranscriptStore):
                transcript_keys[inner_key].append(key)
            else:
                stored_sessions.append((key, place, inner_key))
        for key, place, inner_key in stored_sessions:
            if inner_key not in transcript_keys:
                continue
            copy = self._read_copy(key, stamps[key], place.store, inner_key)
            if copy is not None and copy.is_continued:
                yield from transcript_keys[inner_key]
            elif copy and any(copy.is_covered_by(stamps[k]) for k in transcript_keys[inner_key]):
                yield key

    def _read_copy(
        self, key: str, stamp: str, store: Store, inner_key: str
    ) -> _ImportedCopy | None:
        """Return the imported copy with this key; None if the session is not a copy."""
        known_stamp, copy = self._copies.get(key, ("", None))
        if copy is None or known_stamp != stamp:
            try:
                facts = store.info(inner_key).meta.get(META_FIELD)
                messages = store.get_history(inner_key, full=True) if facts else []
            except StenologError:
                return None
            if not facts:
                return None
            is_continued = any(identity_of(message.to_dict()) is None for message in messages)
            values = [as_dict(facts).get(name) for name in ("size", "modified")]
            size, modified = (value if isinstance(value, int) else 0 for value in values)
            copy = _ImportedCopy(is_continued=is_continued, size=size, modified=modified)
            self._copies[key] = stamp, copy
        return copy

    def heads(self, keys: Sequence[str]) -> Iterator[SessionHead]:
        """Yield title, project and times of these sessions, without reading all messages."""
        for place in self._places:
            inner_keys = list(self._inner_keys(keys, place).values())
            if isinstance(place.store, TranscriptStore):
                place_heads = place.store.heads(inner_keys)
            else:
                place_heads = _heads_from_info(place.store, inner_keys)
            for head in place_heads:
                yield replace(head, key=place.prefix + head.key)

    def info(self, key: str) -> SessionInfo:
        """Return the info of the session. Raises NoSuchSession."""
        place, inner_key = self._find_place(key)
        return _with_key_prefix(place.store.info(inner_key), place.prefix)

    def view(
        self, key: str, last: int | None = None, *, since: SessionView | None = None
    ) -> SessionView:
        """Return info, summary and visible messages, read together. Raises NoSuchSession."""
        place, inner_key = self._find_place(key)
        view = place.store.view(inner_key, last if since is None else since.last)
        return replace(view, info=_with_key_prefix(view.info, place.prefix))

    def get_history(
        self, key: str, *, last: int | None = None, after: int | None = None, full: bool = False
    ) -> list[Message]:
        """Return the visible messages in the order of their seqs; with `full`, all messages."""
        place, inner_key = self._find_place(key)
        return place.store.get_history(inner_key, last=last, after=after, full=full)

    def get_summary(self, key: str) -> str:
        """Return the summary; empty if there is none."""
        place, inner_key = self._find_place(key)
        return place.store.get_summary(inner_key)

    def follow(
        self, key: str, *, after: int = 0, uid: str | None = None, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield each message with a seq greater than `after` once, as soon as it is written."""
        place, inner_key = self._find_place(key)
        return place.store.follow(inner_key, after=after, uid=uid, timeout=timeout)

    def _open_snapshot(
        self, mark: SnapshotMark, after: int
    ) -> AbstractContextManager[SnapshotReading]:
        """Read a session and its messages with a seq above `after`. Raises NoSuchSession."""
        place, inner_key = self._find_place(mark.key)
        return place.store.admin.read_snapshot(replace(mark, key=inner_key), after=after)

    def _find_leased(self, keys: Collection[str]) -> set[str]:
        """Return the keys of sessions that any process leases, or another program writes, now."""
        all_leased: set[str] = set()
        for place in self._places:
            inner_keys = self._inner_keys(keys, place)
            # Skip a place that cannot be read now, so that the other places are still shown.
            with suppress(StenologError):
                leased = place.store.admin.leased([*inner_keys.values()]) if inner_keys else set()
                all_leased |= {key for key, inner_key in inner_keys.items() if inner_key in leased}
        return all_leased

    def _read_marker(self, name: str) -> str:
        """Return the change marker of this name; empty if there are several places."""
        return self._places[0].store.admin.read_marker(name) if len(self._places) == 1 else ""

    def _find_place(self, key: str) -> tuple[StorePlace, str]:
        """Return the place of a session, and the session's key there. Raises NoSuchSession."""
        for place in self._places:
            if key.startswith(place.prefix):
                return place, key[len(place.prefix) :]
        raise NoSuchSession(key)

    def _inner_keys(self, keys: Iterable[str], place: StorePlace) -> dict[str, str]:
        """Return the keys that belong to a place, each mapped to the key without the prefix."""
        located_keys = ((key, *self._find_place(key)) for key in keys)
        return {key: inner_key for key, key_place, inner_key in located_keys if key_place is place}

    # --- the store itself --------------------------------------------------------------------

    def _list_problems(self) -> tuple[str, ...]:
        """Return the places that could not be opened or read, with the reasons."""
        stores = (place.store for place in self._places if isinstance(place.store, ReadOnlyStore))
        inner_problems = (problem for store in stores for problem in store._list_problems())
        return (*super()._list_problems(), *inner_problems)

    def _catalog_file(self) -> Path | None:
        """Return the path of the search index; None if the index is in memory."""
        return self._catalog

    def close(self) -> None:
        """Close all places. Later calls raise StoreClosed."""
        for place in self._places:
            place.store.close()


def _heads_from_info(store: Store, keys: Sequence[str]) -> Iterator[SessionHead]:
    for key in keys:
        with suppress(StenologError):
            info = store.info(key)
            created, updated = to_microseconds(info.created), to_microseconds(info.updated)
            yield SessionHead(key=key, created=created, updated=updated, meta=info.meta)


def _with_key_prefix(info: SessionInfo, prefix: str) -> SessionInfo:
    if not prefix:
        return info
    forked_from = None if info.forked_from is None else prefix + info.forked_from
    meta = info.meta
    if (source := source_from(meta)) is not None:
        meta = {**meta, META_FIELD: {**meta[META_FIELD], "forked_from": prefix + source}}
    return replace(info, key=prefix + info.key, forked_from=forked_from, meta=meta)
