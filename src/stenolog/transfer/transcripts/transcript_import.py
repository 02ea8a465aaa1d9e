"""Import of transcripts into a store: a later import adds only what is new.

Messages are recognized by their identities. If an import is killed, the next one continues it: the
messages that are stored already are found again, and only the rest is added. If a program changed a
message, the new version is appended and the older one is hidden, so that nothing is lost and
nothing is visible twice.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from secrets import token_hex
from typing import Any, Final

from msgspec import Raw, Struct, field

from stenolog.catalog.message_metadata import FIELD
from stenolog.codec import encode_object
from stenolog.errors import NoSuchSession, RefusedMessage, SessionExists
from stenolog.records import Message, SessionInfo, timestamp
from stenolog.stores import spans
from stenolog.stores.base import Store
from stenolog.stores.snapshots import Snapshot, SnapshotStore
from stenolog.transfer.transcripts.transcript import (
    RESPONSE,
    Transcript,
    TranscriptFile,
    TranscriptMessage,
    TranscriptReader,
    as_dict,
    digest_of,
    identity_of,
)

META: Final = "transcript"
"""Meta field of an imported session: facts about it, and the state of its file."""
LEASE_SECONDS: Final = 60.0
_CONTENT: Final = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
"""Fields of a message that say something."""
MAX_BATCH: Final = 500
"""Maximum number of messages in one append."""
MAX_BATCH_BYTES: Final = 4 * 1024 * 1024
MAX_BATCH_SESSIONS: Final = 64
"""Maximum number of new sessions that are stored together."""


class TranscriptReport(Struct, kw_only=True):
    """Result of the import of one transcript."""

    key: str
    messages: int = 0
    """Number of messages in the transcript."""
    added: int = 0
    changed: int = 0
    """Number of messages whose content the program changed since they were imported."""
    is_unchanged: bool = False
    """Whether the file has not changed since the last import. It is not read then."""
    left_out: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def import_transcript(
    reader: TranscriptReader, file: TranscriptFile, store: Store
) -> TranscriptReport:
    """Import a transcript, or its new messages. Raises OSError and the errors of the store."""
    info = _info(store, file.key)
    if info is not None and _is_same_file(info.meta, file):
        return TranscriptReport(key=file.key, is_unchanged=True)
    transcript, report = _read(reader, file)
    if not transcript.messages and info is None:
        return report
    if info is None and isinstance(store, SnapshotStore):
        # If another process imports the session at the same moment, it is updated instead.
        with suppress(SessionExists):
            report.added = _write_new(store, transcript, file, report.problems)
            return report
    if info is None and not isinstance(store, SnapshotStore):
        _update(store, transcript, file, report)
        return report
    # Two processes may import the same transcript, for example the hook and --watch.
    with store.lease(file.key, ttl=LEASE_SECONDS) as lease:
        _update(lease.store, transcript, file, report)
    return report


def _read(reader: TranscriptReader, file: TranscriptFile) -> tuple[Transcript, TranscriptReport]:
    transcript = reader.read(file, is_complete=False)
    return transcript, TranscriptReport(
        key=file.key,
        messages=len(transcript.messages),
        left_out=transcript.left_out,
        problems=transcript.problems,
    )


def _update(
    store: Store, transcript: Transcript, file: TranscriptFile, report: TranscriptReport
) -> None:
    """Add what is new to a session, and hide what is no longer visible."""
    info = _info(store, file.key)
    stored = _Stored(store, file.key, exists=info is not None)
    new = [one for one in transcript.messages if stored.is_new(one)]
    known = {one.identity for one in new if one.identity in stored.seqs}
    count = stored.append(new, file, report.problems)
    report.changed = len(known)
    report.added = max(0, count - len(known))
    stored.hide_older_versions()
    if not stored.has_own_messages:
        _hide(store, stored, transcript, "" if info is None else info.summary)
    if count or info is not None:
        store.set_meta(file.key, **_meta(transcript, file, {} if info is None else info.meta))


class TranscriptImport:
    """An import of many transcripts. New sessions are stored in batches, with few syncs.

    `reports` has the sessions that are stored; call `flush` at the end to store the rest.
    """

    def __init__(self, reader: TranscriptReader, store: Store) -> None:
        self._reader = reader
        self._store = store
        self._waiting: list[tuple[TranscriptFile, TranscriptReport, Snapshot, list[Message]]] = []
        self._bytes = 0
        self.reports: list[TranscriptReport] = []

    def add(self, file: TranscriptFile) -> None:
        """Import a transcript now or in the next batch.

        Raises NotASession, OSError and the errors of the store.
        """
        if any(file.key == waiting.key for waiting, *_ in self._waiting):
            self.flush()
        if not isinstance(self._store, SnapshotStore) or _info(self._store, file.key) is not None:
            self.reports.append(import_transcript(self._reader, file, self._store))
            return
        transcript, report = _read(self._reader, file)
        if not transcript.messages:
            self.reports.append(report)
            return
        snapshot, messages = snapshot_of(
            transcript, file, uid=token_hex(8), problems=report.problems
        )
        report.added = len(messages)
        self._waiting.append((file, report, snapshot, messages))
        self._bytes += sum(len(message.to_json()) for message in messages)
        if len(self._waiting) >= MAX_BATCH_SESSIONS or self._bytes >= MAX_BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Store the sessions that wait. Raises the errors of the store."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        if not waiting or not isinstance(self._store, SnapshotStore):
            return
        try:
            with self._store.snapshot_writer() as writer:
                for _, _, snapshot, messages in waiting:
                    writer.write(snapshot, messages)
        except SessionExists:
            # Another process has imported one of them meanwhile.
            for file, *_ in waiting:
                self.reports.append(import_transcript(self._reader, file, self._store))
        else:
            self.reports += [report for _, report, *_ in waiting]


def is_imported(file: TranscriptFile, store: Store) -> bool:
    """Return whether the store has the transcript as it is on disk now."""
    info = _info(store, file.key)
    return info is not None and _is_same_file(info.meta, file)


def _is_same_file(meta: Any, file: TranscriptFile) -> bool:
    known = as_dict(meta.get(META))
    return known.get("size") == file.size and known.get("modified") == file.modified


def _write_new(
    store: SnapshotStore, transcript: Transcript, file: TranscriptFile, problems: list[str]
) -> int:
    """Write a session that is not in the store yet, in one step."""
    snapshot, messages = snapshot_of(transcript, file, uid=token_hex(8), problems=problems)
    with store.snapshot_writer() as writer:
        writer.write(snapshot, messages)
    return len(messages)


def snapshot_of(
    transcript: Transcript, file: TranscriptFile, *, uid: str, problems: list[str] | None = None
) -> tuple[Snapshot, list[Message]]:
    """Return a transcript as a complete session. A message that cannot be stored is a problem."""
    times = [None if one.at is None else timestamp(one.at) for one in transcript.messages]
    known = [at for at in times if at is not None]
    last_change = timestamp(datetime.fromtimestamp(file.modified / 1e9, UTC))
    at = known[0] if known else last_change
    messages: list[Message] = []
    hidden: list[int] = []
    for one, time in zip(transcript.messages, times, strict=True):
        try:
            payload = encode_object(one.message)
        except RefusedMessage as error:
            if problems is not None:
                problems.append(f"message {one.identity} cannot be stored: {error}")
            continue
        at = time or at
        messages.append(Message(seq=len(messages) + 1, _at=at, _body=Raw(payload)))
        if one.hidden:
            hidden.append(len(messages))
    floor = next((n for n, seq in enumerate([*hidden, -1]) if seq != n + 1), 0)
    snapshot = Snapshot(
        key=file.key,
        uid=uid,
        created=min(known, default=at),
        updated=max(known, default=at),
        last_seq=len(messages),
        floor=floor,
        hidden=spans.union((seq, seq) for seq in hidden if seq > floor),
        number=1,
        summary=transcript.summary,
        meta=_meta(transcript, file, {}),
    )
    return snapshot, messages


class _Stored:
    """The messages of a session in the store."""

    def __init__(self, store: Store, key: str, *, exists: bool) -> None:
        self._store = store
        self._key = key
        self.seqs: dict[str, int] = {}
        """Seq of each identity; of its newest version, if it has several."""
        self._digests: dict[str, str] = {}
        self._older: set[int] = set()
        self._last_seq = 0
        self.visible: set[int] = set()
        self.has_own_messages = False
        """Whether the session continued in stenolog: then an import hides nothing."""
        self._counted: set[str] = set()
        if exists:
            for message in store.get_history(key, full=True):
                body = message.to_dict()
                self._last_seq = message.seq
                identity = identity_of(body)
                if identity is None:
                    self.has_own_messages = True
                    continue
                self._note(identity, message.seq, content_digest(body))
                if response := as_dict(body.get(FIELD)).get(RESPONSE):
                    self._counted.add(response)
            self.visible = {message.seq for message in store.get_history(key)}

    def _note(self, identity: str, seq: int, digest: str) -> None:
        if identity in self.seqs:
            self._older.add(self.seqs[identity])
        self.seqs[identity] = seq
        self._digests[identity] = digest

    def is_new(self, message: TranscriptMessage) -> bool:
        """Return whether the message is not stored, or stored with another content."""
        return self._digests.get(message.identity) != content_digest(message.message)

    def hide_older_versions(self) -> None:
        """Hide the messages that a newer version replaced."""
        older = self._older & self.visible
        for first, last in spans.union((seq, seq) for seq in older):
            self._store.hide(self._key, first, last)
        self.visible -= older

    def append(
        self, messages: Sequence[TranscriptMessage], file: TranscriptFile, problems: list[str]
    ) -> int:
        """Append messages in batches and return how many were stored."""
        count = 0
        for batch in self._batches(messages, file, problems):
            bodies = [body for _, body, _ in batch]
            times = [at for _, _, at in batch]
            # The same messages after the same ones: a version may come back later.
            token = digest_of([self._last_seq, [content_digest(body) for body in bodies]])
            seqs = self._store.add_messages(self._key, bodies, once=f"transcript:{token}", at=times)
            for (message, body, _), seq in zip(batch, seqs, strict=True):
                self._note(message.identity, seq, content_digest(body))
                self.visible.add(seq)
            self._last_seq = max(seqs)
            count += len(batch)
        return count

    def _batches(
        self, messages: Sequence[TranscriptMessage], file: TranscriptFile, problems: list[str]
    ) -> Iterator[list[tuple[TranscriptMessage, dict[str, Any], datetime]]]:
        batch: list[tuple[TranscriptMessage, dict[str, Any], datetime]] = []
        size = 0
        at = datetime.fromtimestamp(file.modified / 1e9, UTC)
        at = next((one.at for one in messages if one.at is not None), at)
        for message in messages:
            at = message.at or at
            body = self._counted_once(message.message)
            try:
                size += len(encode_object(body))
            except RefusedMessage as error:
                problems.append(f"message {message.identity} cannot be stored: {error}")
                continue
            batch.append((message, body, at))
            if len(batch) == MAX_BATCH or size >= MAX_BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _counted_once(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the message without usage that an earlier part of the response has stored."""
        notes = as_dict(body.get(FIELD))
        response = notes.get(RESPONSE)
        if not isinstance(response, str) or response not in self._counted:
            if isinstance(response, str):
                self._counted.add(response)
            return body
        return {**body, FIELD: {n: v for n, v in notes.items() if n not in ("usage", RESPONSE)}}


def content_digest(body: Mapping[str, Any]) -> str:
    """Return a digest of what the message says.

    Fields of the program and of stenolog are left out: a program that rewrites its file adds fields
    to records whose messages stay the same.
    """
    return digest_of({name: body[name] for name in _CONTENT if body.get(name) is not None})


def _hide(store: Store, stored: _Stored, transcript: Transcript, summary: str) -> None:
    """Hide what the model of that program no longer sees, and store its summary."""
    seqs = stored.seqs
    out = {seqs[one.identity] for one in transcript.messages if one.hidden and one.identity in seqs}
    out &= stored.visible
    if transcript.summary and transcript.summary != summary:
        first = min(stored.visible - out, default=max(stored.visible, default=0) + 1)
        if first > 1:
            store.checkpoint(transcript.key, summary=transcript.summary, upto=first - 1)
            out = {seq for seq in out if seq >= first}
        else:
            store.set_summary(transcript.key, transcript.summary)
    for first, last in spans.union((seq, seq) for seq in out):
        store.hide(transcript.key, first, last)


def _meta(transcript: Transcript, file: TranscriptFile, meta: Any) -> dict[str, Any]:
    """Return the meta fields of the session. A title that the user gave in stenolog stays."""
    before = as_dict(meta.get(META))
    facts = {**transcript.source, "size": file.size, "modified": file.modified}
    fields: dict[str, Any] = {}
    if transcript.title:
        facts["title"] = transcript.title
        if meta.get("title") in (None, "", before.get("title")):
            fields["title"] = transcript.title
    return {**fields, META: facts}


def _info(store: Store, key: str) -> SessionInfo | None:
    try:
        return store.info(key)
    except NoSuchSession:
        return None
