"""Import of transcripts into a store: a later import adds only new messages.

Messages are recognized by their identities. If an import is killed, the next import finds the
messages that are already stored, and adds only the rest. If a program changed a message, the new
version is appended and the old version is hidden, so that nothing is lost and nothing is visible
twice.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from secrets import token_hex
from typing import Any, Final

from msgspec import Raw, Struct, field

from stenolog.catalog.message_metadata import identity_of, response_of, usage_of, without_usage
from stenolog.codec import encode_object
from stenolog.errors import RefusedMessage, SessionExists
from stenolog.records import Message, timestamp
from stenolog.stores import spans
from stenolog.stores.base import Store, find_info
from stenolog.stores.snapshots import Snapshot, SnapshotStore
from stenolog.transfer.transcripts.transcript import (
    Transcript,
    TranscriptFile,
    TranscriptMessage,
    TranscriptReader,
    as_dict,
    digest_of_json,
)

META_FIELD: Final = "transcript"
"""Meta field of an imported session: facts about the session, and size and time of its file."""
LEASE_SECONDS: Final = 60.0
"""Seconds for which an import leases a session that it updates."""
_CONTENT_FIELDS: Final = (
    "role",
    "content",
    "reasoning_content",
    "tool_calls",
    "tool_call_id",
    "name",
)
"""Fields with the content of a message."""
MAX_BATCH_MESSAGES: Final = 500
"""Maximum number of messages in one append."""
MAX_BATCH_BYTES: Final = 4 * 1024 * 1024
"""Size in bytes from which an append or a batch of new sessions is stored."""
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
    """Whether the file is unchanged since the last import. An unchanged file is not read."""
    left_out: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def import_transcript(
    reader: TranscriptReader, file: TranscriptFile, store: Store
) -> TranscriptReport:
    """Import a transcript, or its new messages. Raises OSError and the errors of the store."""
    transcript_import = TranscriptImport(reader, store)
    transcript_import.add(file)
    transcript_import.flush()
    return transcript_import.reports[0]


class TranscriptImport:
    """An import of many transcripts. New sessions are stored in batches, with few syncs.

    `reports` has the reports of stored sessions. Call `flush` at the end to store the last batch.
    With `dry_run` the reports are the same, and nothing is stored.
    """

    def __init__(self, reader: TranscriptReader, store: Store, *, dry_run: bool = False) -> None:
        self._reader = reader
        self._store = store
        self._dry_run = dry_run
        self._previewed_files: dict[str, list[TranscriptFile]] = {}
        """Files that a dry run has read, by the key of their session."""
        self._pending: list[tuple[TranscriptFile, TranscriptReport, Snapshot, list[Message]]] = []
        self._pending_bytes = 0
        self.reports: list[TranscriptReport] = []

    def add(self, file: TranscriptFile) -> None:
        """Import a transcript now or in the next batch.

        Raises NotASession, OSError and the errors of the store.
        """
        if any(file.key == pending.key for pending, *_ in self._pending):
            self.flush()
        info = find_info(self._store, file.key)
        earlier_files = self._previewed_files.get(file.key, [])
        is_unchanged = info is not None and _is_same_file(info.meta, file)
        if earlier_files:
            last_file = earlier_files[-1]
            is_unchanged = (last_file.size, last_file.modified) == (file.size, file.modified)
        if is_unchanged:
            self.reports.append(TranscriptReport(key=file.key, is_unchanged=True))
            return
        transcript = self._reader.read(file, include_copies=False)
        report = TranscriptReport(
            key=file.key,
            messages=len(transcript.messages),
            left_out=transcript.left_out,
            problems=transcript.problems,
        )
        if self._dry_run:
            earlier = [(self._reader.read(f, include_copies=False), f) for f in earlier_files]
            _update_session(self._store, transcript, file, report, earlier, dry_run=True)
            if transcript.messages or info is not None:
                self._previewed_files[file.key] = [*earlier_files, file]
        elif info is not None:
            # The hook and --watch may import the same transcript at once, so the session is leased.
            with self._store.lease(file.key, ttl=LEASE_SECONDS) as lease:
                _update_session(lease.store, transcript, file, report)
        elif transcript.messages and isinstance(self._store, SnapshotStore):
            self._add_to_batch(transcript, file, report)
            return
        elif transcript.messages:
            _update_session(self._store, transcript, file, report)
        self.reports.append(report)

    def _add_to_batch(
        self, transcript: Transcript, file: TranscriptFile, report: TranscriptReport
    ) -> None:
        """Add a new session to the next batch."""
        problems, uid = report.problems, token_hex(8)
        snapshot, messages = make_snapshot(transcript, file, uid=uid, problems=problems)
        report.added = len(messages)
        self._pending.append((file, report, snapshot, messages))
        self._pending_bytes += sum(len(message.to_json()) for message in messages)
        if len(self._pending) >= MAX_BATCH_SESSIONS or self._pending_bytes >= MAX_BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Store the sessions of the batch. Raises the errors of the store."""
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        if not pending or not isinstance(self._store, SnapshotStore):
            return
        try:
            with self._store.snapshot_writer() as writer:
                for _, _, snapshot, messages in pending:
                    writer.write(snapshot, messages)
        except SessionExists:
            # Another process has just imported one of these sessions.
            for file, *_ in pending:
                self.add(file)
                self.flush()
        else:
            self.reports += [report for _, report, *_ in pending]


def _update_session(
    store: Store,
    transcript: Transcript,
    file: TranscriptFile,
    report: TranscriptReport,
    earlier_transcripts: Sequence[tuple[Transcript, TranscriptFile]] = (),
    *,
    dry_run: bool = False,
) -> None:
    """Add new messages to a session, and hide messages that are no longer visible.

    `earlier_transcripts` are other files of the session, which the same dry run has read.
    """
    info = find_info(store, file.key)
    stored = _StoredMessages(store, file.key, dry_run=dry_run)
    for earlier_transcript, earlier_file in earlier_transcripts:
        stored.append(stored.find_new_messages(earlier_transcript), earlier_file, [])
    new_messages = stored.find_new_messages(transcript)
    changed_ids = {message.identity for message in new_messages if message.identity in stored.seqs}
    stored_count = stored.append(new_messages, file, report.problems)
    report.changed = len(changed_ids)
    report.added = max(0, stored_count - len(changed_ids))
    if dry_run:
        return
    stored.hide_older_versions()
    if not stored.has_own_messages:
        _apply_visibility(store, stored, transcript, "" if info is None else info.summary)
    if stored_count or info is not None:
        store.set_meta(file.key, **_make_meta(transcript, file, {} if info is None else info.meta))


def _is_same_file(meta: Any, file: TranscriptFile) -> bool:
    facts = as_dict(meta.get(META_FIELD))
    return facts.get("size") == file.size and facts.get("modified") == file.modified


def make_snapshot(
    transcript: Transcript, file: TranscriptFile, *, uid: str, problems: list[str]
) -> tuple[Snapshot, list[Message]]:
    """Return a transcript as a complete session. Rejected messages are added to `problems`."""
    times = [None if m.at is None else timestamp(m.at) for m in transcript.messages]
    known_times = [at for at in times if at is not None]
    last_change = timestamp(datetime.fromtimestamp(file.modified / 1e9, UTC))
    at = known_times[0] if known_times else last_change
    messages: list[Message] = []
    hidden_seqs: list[int] = []
    for message, time in zip(transcript.messages, times, strict=True):
        try:
            payload = encode_object(message.body)
        except RefusedMessage as error:
            problems.append(f"message {message.identity} cannot be stored: {error}")
            continue
        at = time or at
        messages.append(Message(seq=len(messages) + 1, _at=at, _body=Raw(payload)))
        if message.hidden:
            hidden_seqs.append(len(messages))
    floor = next((n for n, seq in enumerate([*hidden_seqs, -1]) if seq != n + 1), 0)
    snapshot = Snapshot(
        key=file.key,
        uid=uid,
        created=min(known_times, default=at),
        updated=max(known_times, default=at),
        last_seq=len(messages),
        floor=floor,
        hidden=spans.from_seqs(seq for seq in hidden_seqs if seq > floor),
        number=1,
        summary=transcript.summary,
        meta=_make_meta(transcript, file, {}),
    )
    return snapshot, messages


class _StoredMessages:
    """The messages of a session in the store. With `dry_run`, `append` stores nothing."""

    def __init__(self, store: Store, key: str, *, dry_run: bool) -> None:
        self._store = store
        self._key = key
        self._dry_run = dry_run
        self.seqs: dict[str, int] = {}
        """Seq of the newest version of each message, by identity."""
        self._digests: dict[str, str] = {}
        self._older_seqs: set[int] = set()
        self._last_seq = 0
        self.has_own_messages = False
        """Whether the session was continued in stenolog. Then only older versions are hidden."""
        self._counted_responses: set[str] = set()
        for message in store.get_history(key, full=True):
            body = message.to_dict()
            self._last_seq = message.seq
            identity = identity_of(body)
            if identity is None:
                self.has_own_messages = True
                continue
            self._record_message(identity, message.seq, content_digest(body))
            if usage_of(body) is not None:
                self._counted_responses.add(response_of(body))
        self.visible_seqs = {message.seq for message in store.get_history(key)}

    def _record_message(self, identity: str, seq: int, digest: str) -> None:
        if identity in self.seqs:
            self._older_seqs.add(self.seqs[identity])
        self.seqs[identity] = seq
        self._digests[identity] = digest

    def find_new_messages(self, transcript: Transcript) -> list[TranscriptMessage]:
        """Return the messages that are not stored, or stored with another content."""
        return [
            message
            for message in transcript.messages
            if self._digests.get(message.identity) != content_digest(message.body)
        ]

    def hide_older_versions(self) -> None:
        """Hide the messages that a newer version replaced."""
        older_seqs = self._older_seqs & self.visible_seqs
        for first, last in spans.from_seqs(older_seqs):
            self._store.hide(self._key, first, last)
        self.visible_seqs -= older_seqs

    def append(
        self, messages: Sequence[TranscriptMessage], file: TranscriptFile, problems: list[str]
    ) -> int:
        """Append messages in batches and return how many were stored."""
        stored_count = 0
        for batch in self._split_batches(messages, file, problems):
            bodies = [body for _, body, _ in batch]
            times = [at for _, _, at in batch]
            seqs = [self._last_seq + number for number in range(1, len(batch) + 1)]
            if not self._dry_run:
                # The token includes the last seq, because an old version may be stored again later.
                token = digest_of_json([self._last_seq, [content_digest(body) for body in bodies]])
                once = f"transcript:{token}"
                seqs = self._store.add_messages(self._key, bodies, once=once, at=times)
            for (message, body, _), seq in zip(batch, seqs, strict=True):
                self._record_message(message.identity, seq, content_digest(body))
                self.visible_seqs.add(seq)
            self._last_seq = max(seqs)
            stored_count += len(batch)
        return stored_count

    def _split_batches(
        self, messages: Sequence[TranscriptMessage], file: TranscriptFile, problems: list[str]
    ) -> Iterator[list[tuple[TranscriptMessage, dict[str, Any], datetime]]]:
        """Yield batches of the messages that can be stored, with their bodies and times."""
        batch: list[tuple[TranscriptMessage, dict[str, Any], datetime]] = []
        size = 0
        at = datetime.fromtimestamp(file.modified / 1e9, UTC)
        at = next((message.at for message in messages if message.at is not None), at)
        for message in messages:
            at = message.at or at
            body = self._without_counted_usage(message.body)
            try:
                size += len(encode_object(body))
            except RefusedMessage as error:
                problems.append(f"message {message.identity} cannot be stored: {error}")
                continue
            batch.append((message, body, at))
            if len(batch) == MAX_BATCH_MESSAGES or size >= MAX_BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _without_counted_usage(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the message, without its usage if the usage of the response is already stored."""
        response = response_of(body)
        if not response or usage_of(body) is None:
            return body
        if response in self._counted_responses:
            return without_usage(body)
        self._counted_responses.add(response)
        return body


def content_digest(body: Mapping[str, Any]) -> str:
    """Return a digest of the content of a message.

    Fields of the program and of stenolog are left out, because a program that rewrites its file may
    add fields to records whose messages stay the same.
    """
    content = {name: body[name] for name in _CONTENT_FIELDS if body.get(name) is not None}
    return digest_of_json(content)


def _apply_visibility(
    store: Store, stored: _StoredMessages, transcript: Transcript, summary: str
) -> None:
    """Hide messages that the program's model no longer sees, and store the program's summary."""
    seqs, visible_seqs = stored.seqs, stored.visible_seqs
    hidden_ids = (message.identity for message in transcript.messages if message.hidden)
    seqs_to_hide = {seqs[identity] for identity in hidden_ids if identity in seqs} & visible_seqs
    if transcript.summary and transcript.summary != summary:
        seq_after_visible = max(visible_seqs, default=0) + 1
        first_visible = min(visible_seqs - seqs_to_hide, default=seq_after_visible)
        if first_visible > 1:
            store.checkpoint(transcript.key, summary=transcript.summary, upto=first_visible - 1)
            seqs_to_hide = {seq for seq in seqs_to_hide if seq >= first_visible}
        else:
            store.set_summary(transcript.key, transcript.summary)
    for first, last in spans.from_seqs(seqs_to_hide):
        store.hide(transcript.key, first, last)


def _make_meta(transcript: Transcript, file: TranscriptFile, meta: Any) -> dict[str, Any]:
    """Return the meta fields of the session. A title that the user gave in stenolog stays."""
    old_facts = as_dict(meta.get(META_FIELD))
    facts = {**transcript.facts, "size": file.size, "modified": file.modified}
    fields: dict[str, Any] = {}
    if transcript.title:
        facts["title"] = transcript.title
        if meta.get("title") in (None, "", old_facts.get("title")):
            fields["title"] = transcript.title
    return {**fields, META_FIELD: facts}
