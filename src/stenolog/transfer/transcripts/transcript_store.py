"""A read-only store of transcripts: other programs' files are shown where they are.

Each session is parsed when it is first read, and again when its file has changed. The sessions that
were read last are kept in memory, up to a number of bytes. Nothing is ever written.
"""

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

from msgspec import Struct

from stenolog.catalog.background_catalog import SessionHead
from stenolog.catalog.catalog_database import to_microseconds
from stenolog.errors import NoSuchSession, StoreClosed
from stenolog.records import Message, SessionInfo
from stenolog.stores.base import SessionView
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
    text_of_parts,
    time_from,
)
from stenolog.transfer.transcripts.transcript_import import snapshot_of

MAX_CACHED_BYTES: Final = 64 * 1024 * 1024
"""Maximum size of the files whose sessions are kept in memory."""
LIST_SECONDS: Final = 2.0
"""How long a listing of the folders is used before they are searched again."""
_POLL: Final = 1.0


class TranscriptStore(ReadOnlyStore):
    """The transcripts of one or more places, as a store that cannot be written.

    `catalog`: file for the search index. [default: in memory]
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
        self._parsed: OrderedDict[str, tuple[TranscriptFile, InMemoryStore]] = OrderedDict()

    # --- sessions ----------------------------------------------------------------------------

    def stamps(self) -> dict[str, str]:
        """Return a stamp for each session. It differs after every change of its files."""
        return {key: _stamp(file) for key, (_, file) in self._found().items()}

    def info(self, key: str) -> SessionInfo:
        """Return the info of the session. Raises NoSuchSession."""
        return self._session(key).info(key)

    def view(self, key: str, last: int | None = None) -> SessionView:
        """Return info, summary and visible messages of one moment. Raises NoSuchSession."""
        return self._session(key).view(key, last)

    def get_history(
        self, key: str, *, last: int | None = None, after: int | None = None, full: bool = False
    ) -> list[Message]:
        """Return the visible messages by seq; with `full` every message."""
        try:
            session = self._session(key)
        except NoSuchSession:
            return []
        return session.get_history(key, last=last, after=after, full=full)

    def get_summary(self, key: str) -> str:
        """Return the summary; empty if there is none."""
        try:
            return self._session(key).get_summary(key)
        except NoSuchSession:
            return ""

    def heads(self, keys: Sequence[str]) -> Iterator[SessionHead]:
        """Yield title, project and time of these sessions, the newest first.

        Only the start of a file is read. A file that several conversations share is not read.
        """
        found = self._found()
        listed = [found[key] for key in keys if key in found]
        for _, file in sorted(listed, key=lambda one: -one[1].modified):
            facts: dict[str, Any] = {"program": file.program, "path": str(file.paths[-1])}
            with suppress(OSError):
                head = read_head(file)
                if head.folder:
                    facts["folders"] = [head.folder]
                at = file.modified // 1_000
                created = at if head.at is None else to_microseconds(head.at)
                yield SessionHead(
                    key=file.key,
                    prompt=head.prompt,
                    created=created,
                    updated=at,
                    meta={"transcript": facts},
                )

    def read_snapshot(
        self, mark: SnapshotMark, *, after: int = 0
    ) -> AbstractContextManager[SnapshotReading]:
        """Read a session and its messages after a seq. Raises NoSuchSession."""
        return self._session(mark.key).read_snapshot(mark, after=after)

    def follow(
        self, key: str, *, after: int = 0, uid: str | None = None, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield each message with a seq greater than `after` once, as its program writes it."""
        ask = partial(self._new_messages, key)
        return poll_messages(
            ask, self._closed.wait, key, after=after, uid=uid, timeout=timeout, poll=_POLL
        )

    def _new_messages(self, key: str, after: int) -> NewMessages | None:
        try:
            info = self.info(key)
        except NoSuchSession:
            return None
        return info.uid, info.last_seq, self.get_history(key, after=after, full=True)

    def _found(self) -> dict[str, tuple[TranscriptReader, TranscriptFile]]:
        """Return the transcripts of all places, searched again after some seconds."""
        if self._closed.is_set():
            raise StoreClosed("the store is closed")
        with self._lock:
            if monotonic() - self._listed_at > LIST_SECONDS:
                files = {}
                for reader, path in self._places:
                    # A place that cannot be read does not hide the others.
                    with suppress(OSError, NotASession):
                        for file in reader.find(path):
                            files[file.key] = reader, file
                self._files = files
                self._listed_at = monotonic()
            return self._files

    def _session(self, key: str) -> InMemoryStore:
        """Return a store with only this session, as its files are now. Raises NoSuchSession."""
        found = self._found().get(key)
        if found is None:
            raise NoSuchSession(key)
        reader, file = found
        with self._lock:
            cached = self._parsed.get(key)
            if cached is not None and cached[0] == file:
                self._parsed.move_to_end(key)
                return cached[1]
        memory = InMemoryStore()
        try:
            transcript = reader.read(file)
        except (OSError, NotASession) as error:
            raise NoSuchSession(key) from error
        snapshot, messages = snapshot_of(transcript, file, uid=_uid(key))
        with memory.snapshot_writer() as writer:
            writer.write(snapshot, messages)
        with self._lock:
            self._parsed[key] = file, memory
            self._parsed.move_to_end(key)
            while len(self._parsed) > 1 and self._cached_bytes() > MAX_CACHED_BYTES:
                self._parsed.popitem(last=False)
        return memory

    def _cached_bytes(self) -> int:
        return sum(file.size for file, _ in self._parsed.values())

    # --- the store itself --------------------------------------------------------------------

    def close(self) -> None:
        """Close the store. Later calls raise StoreClosed."""
        self._closed.set()
        with self._lock:
            self._parsed.clear()


# --- heads ---------------------------------------------------------------------------------------

_HEAD_BYTES: Final = 64 * 1024
"""Maximum number of bytes that are read of a file for the list."""
_MAX_PROMPT: Final = 1_000


class TranscriptHead(Struct, frozen=True, kw_only=True):
    """What the start of a transcript tells."""

    prompt: str = ""
    folder: str = ""
    at: datetime | None = None


def read_head(file: TranscriptFile) -> TranscriptHead:
    """Return the first prompt, the project and the start of a transcript. Raises OSError."""
    path = file.paths[0]
    if file.item or path.suffix != ".jsonl":
        return TranscriptHead()
    with path.open("rb") as opened:
        lines = opened.read(_HEAD_BYTES).split(b"\n")
    folder, prompt = "", ""
    at: datetime | None = None
    for line in lines[:-1]:
        record = as_dict(parse_json(line))
        payload = as_dict(record.get("payload"))
        at = at or time_from(record.get("timestamp"))
        folder = folder or as_text(record.get("cwd")) or as_text(payload.get("cwd"))
        prompt = _prompt_in(record, payload)
        if prompt:
            break
    return TranscriptHead(prompt=prompt[:_MAX_PROMPT], folder=folder, at=at)


def _prompt_in(record: dict[str, Any], payload: dict[str, Any]) -> str:
    """Return the prompt in a record of Claude Code, Codex or Gemini CLI; empty if it has none."""
    if record.get("type") == "user" and kind_of_record(record) is None:
        message = as_dict(record.get("message"))
        return text_of_parts(message.get("content") if message else record.get("content"))
    if payload.get("type") == "user_message":
        return as_text(payload.get("message"))
    return ""


def _stamp(file: TranscriptFile) -> str:
    return f"{file.size}-{file.modified}"


def _uid(key: str) -> str:
    """Return a uid that is the same in every process."""
    return sha256(key.encode()).hexdigest()[:16]
