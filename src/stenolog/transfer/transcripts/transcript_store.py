"""A read-only store of transcripts: the files of other programs are read in place.

Each session is parsed when it is first read, and again when its file has changed. The sessions that
were read last are kept in memory, up to a number of bytes. Nothing is ever written.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any, Final

from msgspec.structs import replace

from stenolog.catalog.background_catalog import SessionHead
from stenolog.catalog.catalog_database import to_microseconds
from stenolog.errors import NoSuchSession, StoreClosed
from stenolog.records import Message, SessionInfo
from stenolog.stores.base import SessionView, find_info
from stenolog.stores.following import NewMessages, poll_messages
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.json_file import NotASession
from stenolog.stores.snapshots import SnapshotMark, SnapshotReading
from stenolog.transfer.read_only_store import ReadOnlyStore
from stenolog.transfer.transcripts.claude_code import kind_of_record
from stenolog.transfer.transcripts.transcript import (
    TranscriptFile,
    TranscriptReader,
    as_dict,
    as_text,
    parse_json,
    parse_time,
    path_and_reason,
    text_of_parts,
)
from stenolog.transfer.transcripts.transcript_import import snapshot_of

MAX_CACHED_BYTES: Final = 64 * 1024 * 1024
"""Maximum total size, in bytes, of the files whose sessions are kept in memory."""
LIST_SECONDS: Final = 2.0
"""Seconds for which a listing of the folders is used before the folders are searched again."""
_POLL_SECONDS: Final = 1.0


class TranscriptStore(ReadOnlyStore):
    """The transcripts of one or more places, as a store that cannot be written.

    `catalog` is the file for the search index. Without a file, the index is in memory.
    """

    refusal = (
        "transcripts of other programs are read-only; `steno import` copies them into a workspace"
    )

    def __init__(
        self, places: Sequence[tuple[TranscriptReader, Path]], *, catalog: Path | None = None
    ) -> None:
        self._places = list(places)
        super().__init__(catalog)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._files: dict[str, tuple[TranscriptReader, TranscriptFile]] = {}
        self._listed_at = float("-inf")
        self._sessions: OrderedDict[str, tuple[TranscriptFile, InMemoryStore]] = OrderedDict()

    # --- sessions ----------------------------------------------------------------------------

    def stamps(self) -> dict[str, str]:
        """Return the change stamp of each session: a text that differs after every change."""
        files = self._find_files()
        return {key: f"{file.size}-{file.modified}" for key, (_, file) in files.items()}

    def info(self, key: str) -> SessionInfo:
        """Return the info of the session. Raises NoSuchSession."""
        return self._read_session(key).info(key)

    def view(self, key: str, last: int | None = None) -> SessionView:
        """Return info, summary and visible messages, read together. Raises NoSuchSession."""
        return self._read_session(key).view(key, last)

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
        """Yield title, project and time of these sessions, the newest first.

        Only the start of a file is read. A file that several conversations share is not read.
        """
        all_files = self._find_files()
        files = [all_files[key][1] for key in keys if key in all_files]
        for file in sorted(files, key=lambda file: -file.modified):
            with suppress(OSError):
                yield read_head(file)

    def read_snapshot(
        self, mark: SnapshotMark, *, after: int = 0
    ) -> AbstractContextManager[SnapshotReading]:
        """Read a session and its messages with a seq above `after`. Raises NoSuchSession."""
        return self._read_session(mark.key).read_snapshot(mark, after=after)

    def follow(
        self, key: str, *, after: int = 0, uid: str | None = None, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield each message with a seq greater than `after` once, as soon as it is written."""
        read = partial(self._new_messages, key)
        return poll_messages(
            read, self._closed.wait, key, after=after, uid=uid, timeout=timeout, poll=_POLL_SECONDS
        )

    def _new_messages(self, key: str, after: int) -> NewMessages | None:
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
                problems = {}
                for reader, path in self._places:
                    try:
                        for file in reader.find(path):
                            if all(map(_is_readable, file.paths)):
                                files[file.key] = reader, file
                    except (OSError, NotASession) as error:
                        # Continue, because the other places can still be shown.
                        name, reason = path_and_reason(error, path)
                        problems[name] = reason
                self._files, self.problems = files, problems
                self._listed_at = monotonic()
            return self._files

    def _read_session(self, key: str) -> InMemoryStore:
        """Return a store with only this session, as its files are now. Raises NoSuchSession."""
        files = self._find_files()
        if key not in files:
            raise NoSuchSession(key)
        reader, file = files[key]
        with self._lock:
            cached_session = self._sessions.get(key)
            if cached_session is not None and cached_session[0] == file:
                self._sessions.move_to_end(key)
                return cached_session[1]
        session_store = InMemoryStore()
        try:
            transcript = reader.read(file)
        except (OSError, NotASession) as error:
            raise NoSuchSession(key) from error
        # The uid is derived from the key, so that it is the same in every process.
        uid = sha256(key.encode()).hexdigest()[:16]
        snapshot, messages = snapshot_of(transcript, file, uid=uid)
        snapshot = replace(snapshot, forked_from=transcript.source.get("forked_from"))
        with session_store.snapshot_writer() as writer:
            writer.write(snapshot, messages)
        with self._lock:
            self._sessions[key] = file, session_store
            self._sessions.move_to_end(key)
            size = sum(cached_file.size for cached_file, _ in self._sessions.values())
            while len(self._sessions) > 1 and size > MAX_CACHED_BYTES:
                _, (dropped_file, _) = self._sessions.popitem(last=False)
                size -= dropped_file.size
        return session_store

    # --- the store itself --------------------------------------------------------------------

    def close(self) -> None:
        """Close the store. Later calls raise StoreClosed."""
        self._closed.set()
        with self._lock:
            self._sessions.clear()


# --- heads ---------------------------------------------------------------------------------------

_HEAD_BYTES: Final = 64 * 1024
"""Maximum number of bytes to read from each file when transcripts are listed."""
_MAX_PROMPT_CHARS: Final = 1_000


def read_head(file: TranscriptFile) -> SessionHead:
    """Return first prompt, project and time from the start of a transcript. Raises OSError."""
    path = file.paths[0]
    lines: list[bytes] = []
    if not file.item and path.suffix == ".jsonl":
        with path.open("rb") as opened:
            lines = opened.read(_HEAD_BYTES).split(b"\n")[:-1]
    folder, prompt = "", ""
    at: datetime | None = None
    for line in lines:
        record = as_dict(parse_json(line))
        payload = as_dict(record.get("payload"))
        at = at or parse_time(record.get("timestamp"))
        folder = folder or as_text(record.get("cwd")) or as_text(payload.get("cwd"))
        prompt = _find_prompt(record, payload)
        if prompt:
            break
    facts: dict[str, Any] = {"program": file.program, "path": str(file.paths[-1])}
    if folder:
        facts["folders"] = [folder]
    updated = file.modified // 1_000
    return SessionHead(
        key=file.key,
        prompt=prompt[:_MAX_PROMPT_CHARS],
        created=updated if at is None else to_microseconds(at),
        updated=updated,
        meta={"transcript": facts},
    )


def _find_prompt(record: dict[str, Any], payload: dict[str, Any]) -> str:
    """Return the prompt in a record of Claude Code, Codex or Gemini CLI; empty if it has none."""
    if record.get("type") == "user" and kind_of_record(record) is None:
        message = as_dict(record.get("message"))
        return text_of_parts(message.get("content") if message else record.get("content"))
    if payload.get("type") == "user_message":
        return as_text(payload.get("message"))
    return ""


def _is_readable(path: Path) -> bool:
    return os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids)
