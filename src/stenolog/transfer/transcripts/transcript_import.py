"""Import of transcripts into a store: a later import adds only new messages.

Messages are recognized by their identities. If an import is killed, the next import finds the
messages that are already stored, and adds only the rest. If a program changed a message, the new
version is appended and the old version is hidden, so that nothing is lost and nothing is visible
twice. The session's meta records which messages an import hid, so that a later import shows them
again when they are back on the current branch. Messages that the user hid stay hidden.

A session may be in several files, for example after its project was copied. The file that was
changed last decides what is visible, and the summary, the title and the facts. Its version is
recorded in the meta. An older file only adds messages.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from secrets import token_hex
from typing import Any, Final

from msgspec import Raw, Struct, field

from stenolog.catalog.message_metadata import (
    identity_of,
    is_copied,
    response_of,
    usage_of,
    without_usage,
)
from stenolog.codec import encode_object
from stenolog.errors import RefusedMessage, SessionExists
from stenolog.records import Message, Span, timestamp
from stenolog.stores import spans
from stenolog.stores.base import Store, find_info
from stenolog.stores.snapshots import Snapshot
from stenolog.transfer.transcripts.transcript import (
    Transcript,
    TranscriptFile,
    TranscriptMessage,
    TranscriptReader,
    as_dict,
    digest_of_json,
    list_or_empty,
    non_empty,
    printable_path,
)

META_FIELD: Final = "transcript"
"""Meta field of an imported session: facts about the session, and size and time of its file."""
_HIDDEN_FACT: Final = "hidden"
"""Fact: spans of the messages that imports hid."""
_SUMMARY_FACT: Final = "summary_digest"
"""Fact: digest of the summary that the last import stored."""
MAX_RECORDED_SPANS: Final = 1_000
"""Maximum number of spans of hidden messages that are recorded."""
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
    With `dry_run`, nothing is stored, and of several files of a session, only the first is read.
    """

    def __init__(self, reader: TranscriptReader, store: Store, *, dry_run: bool = False) -> None:
        self._reader = reader
        self._store = store
        self._dry_run = dry_run
        self._previewed_keys: set[str] = set()
        """Keys of the sessions of which a dry run has read a file."""
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
        is_same_file = info is not None and _is_same_file(info.meta, file)
        if is_same_file or file.key in self._previewed_keys:
            self.reports.append(TranscriptReport(key=file.key, is_unchanged=True))
            return
        transcript = self._reader.read(file)
        if not transcript.has_own_messages():
            transcript.messages.clear()  # a fork without messages of its own
        report = TranscriptReport(
            key=file.key,
            messages=len(transcript.messages),
            problems=transcript.problems,
        )
        if self._dry_run:
            _update_session(self._store, transcript, file, report, dry_run=True)
            if transcript.messages:
                self._previewed_keys.add(file.key)
        elif info is not None:
            # The hook and --watch may import the same transcript at once, so the session is leased.
            with self._store.lease(file.key, ttl=LEASE_SECONDS) as lease:
                _update_session(lease.store, transcript, file, report)
        elif transcript.messages:
            self._add_to_batch(transcript, file, report)
            return
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
        if not pending:
            return
        try:
            with self._store.admin.snapshot_writer() as writer:
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
    *,
    dry_run: bool = False,
) -> None:
    """Add new messages to a session, and hide and show messages as in the file."""
    info = find_info(store, file.key)
    old_facts = {} if info is None else as_dict(info.meta.get(META_FIELD))
    is_newest = _is_newest(file, old_facts)
    stored = _StoredMessages(store, file.key, dry_run=dry_run)
    new_messages = stored.find_new_messages(transcript, may_be_newer=is_newest)
    changed_ids = {message.identity for message in new_messages if message.identity in stored.seqs}
    stored_count = stored.append(new_messages, file, report.problems)
    report.changed = len(changed_ids)
    report.added = max(0, stored_count - len(changed_ids))
    if dry_run:
        return
    if stored_count or (info is not None and is_newest):
        if not is_newest:
            new_ids = {message.identity for message in new_messages}
            transcript.messages = [m for m in transcript.messages if m.identity in new_ids]
        visibility = _Visibility(store, stored, transcript, old_facts)
        visibility.apply(with_summary=is_newest)
        facts = {**old_facts, _HIDDEN_FACT: visibility.hidden_spans()}
        meta = {} if info is None else info.meta
        store.set_meta(file.key, **_make_meta(transcript, file, meta, facts, is_newest=is_newest))


def _is_same_file(meta: Any, file: TranscriptFile) -> bool:
    facts = as_dict(meta.get(META_FIELD))
    recorded = [facts.get(name) for name in ("path", "size", "modified")]
    return recorded == [printable_path(file.paths[-1]), file.size, file.modified]


def _is_newest(file: TranscriptFile, facts: Mapping[str, Any]) -> bool:
    """Return whether `file` decides what is visible, and not the recorded file of the session."""
    match [facts.get(name) for name in ("modified", "size", "path")]:
        case [int(modified), int(size), str(path)]:
            own_path = printable_path(file.paths[-1])
            # The recorded file may have been moved. `Path.exists` raises in a private folder.
            rank = modified, size, path if os.path.exists(path) else ""  # noqa: PTH110
            return path == own_path or rank < (file.modified, file.size, own_path)
    return True


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
        meta=_make_meta(
            transcript,
            file,
            {},
            {_HIDDEN_FACT: _recorded(spans.from_seqs(hidden_seqs))},
            is_newest=True,
        ),
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
        self.older_seqs: set[int] = set()
        """Seqs of the messages that a newer version replaced."""
        self._last_seq = 0
        self.all_seqs: set[int] = set()
        self.has_own_messages = False
        """Whether the session was continued in stenolog. Then only older versions are hidden."""
        self._counted_responses: set[str] = set()
        for message in store.get_history(key, full=True):
            body = message.to_dict()
            self._last_seq = message.seq
            self.all_seqs.add(message.seq)
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
            self.older_seqs.add(self.seqs[identity])
        self.seqs[identity] = seq
        self._digests[identity] = digest

    def find_new_messages(
        self, transcript: Transcript, *, may_be_newer: bool = True
    ) -> list[TranscriptMessage]:
        """Return the messages that are not stored, or stored with another content.

        With `may_be_newer=False`, a message with another content is not newer than the stored one.
        Messages that a fork copied precede its own, so they are added only to an empty session.
        """
        new_messages: list[TranscriptMessage] = []
        for message in transcript.messages:
            digest = self._digests.get(message.identity)
            if digest is None:
                is_new = not (self.seqs and is_copied(message.body))
            else:
                is_new = may_be_newer and digest != content_digest(message.body)
            if is_new:
                new_messages.append(message)
        return new_messages

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
                self.all_seqs.add(seq)
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


class _Visibility:
    """What an import has to hide and to show, after it added the new messages.

    A session that was continued in stenolog keeps its visible messages and its summary, except for
    older versions of messages.
    """

    def __init__(
        self, store: Store, stored: _StoredMessages, transcript: Transcript, facts: dict[str, Any]
    ) -> None:
        self._store = store
        self._info = store.info(transcript.key)
        self._summary = transcript.summary
        self._facts = facts
        self._continues_source = not stored.has_own_messages
        self._visible = stored.visible_seqs
        recorded_seqs = _seqs_in(facts.get(_HIDDEN_FACT), self._info.last_seq)
        self._hidden_by_import = recorded_seqs - self._visible
        self._hidden_by_user = stored.all_seqs - self._visible - self._hidden_by_import
        is_hidden = {
            stored.seqs[message.identity]: message.hidden
            for message in transcript.messages
            if message.identity in stored.seqs and self._continues_source
        }
        self._to_hide = {seq for seq, hidden in is_hidden.items() if hidden} | stored.older_seqs
        self._to_hide &= self._visible
        shown_by_source = {seq for seq, hidden in is_hidden.items() if not hidden}
        covered = self._covered_by_user()
        self._to_show = {
            seq
            for seq in shown_by_source & self._hidden_by_import
            if not spans.contains(covered, seq)
        }

    def _covered_by_user(self) -> list[Span]:
        """Return the spans that the user hid, with the messages in between that were hidden before.

        A truncate or a checkpoint covers all messages up to the floor.
        """
        covered: list[Span] = []
        for first, last in spans.minus([(1, self._info.last_seq)], self._info.visible_spans):
            seqs = self._hidden_by_user.intersection(range(first, last + 1))
            if seqs:
                covered.append((1, last) if first == 1 else (min(seqs), max(seqs)))
        return covered

    def apply(self, *, with_summary: bool) -> None:
        """Hide and show the messages, and store the program's summary if it has changed."""
        key = self._info.key
        if self._to_hide:
            # Recorded first. If the import is killed, the next one knows that not the user hid
            # these messages.
            facts = {**self._facts, _HIDDEN_FACT: self.hidden_spans()}
            self._store.set_meta(key, **{META_FIELD: facts})
        for first, last in spans.from_seqs(self._to_show):
            self._store.admin.show(key, first, last)
        if with_summary and self._continues_source:
            self._store_summary()
        for first, last in spans.from_seqs(self._to_hide):
            self._store.admin.hide(key, first, last)

    def _store_summary(self) -> None:
        """Store the program's summary, unless the user replaced exactly this summary."""
        if _digest_of_summary(self._summary) == self._facts.get(_SUMMARY_FACT, ""):
            return
        visible = (self._visible | self._to_show) - self._to_hide
        upto = min(visible, default=self._info.last_seq + 1) - 1
        if self._summary:
            # One step, so that the summary never stands beside the messages that it describes.
            self._store.checkpoint(self._info.key, summary=self._summary, upto=upto)
        elif _digest_of_summary(self._info.summary) == self._facts.get(_SUMMARY_FACT):
            self._store.set_summary(self._info.key, "")

    def hidden_spans(self) -> list[Span]:
        """Return the spans of the messages that are hidden by imports after `apply`."""
        return _recorded(spans.from_seqs((self._hidden_by_import | self._to_hide) - self._to_show))


def _seqs_in(recorded: Any, last_seq: int) -> set[int]:
    """Return the seqs in spans that were read from meta, which any client may write."""
    found: set[int] = set()
    for span in list_or_empty(recorded):
        match span:
            case [int(first), int(last)]:
                found.update(range(max(first, 1), min(last, last_seq) + 1))
    return found


def _recorded(hidden_spans: list[Span]) -> list[Span]:
    """Return the spans that are recorded. What is not recorded is not shown again."""
    return hidden_spans[-MAX_RECORDED_SPANS:]


def _digest_of_summary(summary: str) -> str:
    return digest_of_json(summary)[:16] if summary else ""


def _make_meta(
    transcript: Transcript,
    file: TranscriptFile,
    meta: Mapping[str, Any],
    old_facts: Mapping[str, Any],
    *,
    is_newest: bool,
) -> dict[str, Any]:
    """Return the meta fields of the session. A title that the user gave in stenolog stays."""
    if not is_newest:
        return {META_FIELD: non_empty(old_facts)}
    facts = {**transcript.facts, "size": file.size, "modified": file.modified}
    facts |= non_empty(
        {
            _HIDDEN_FACT: old_facts.get(_HIDDEN_FACT),
            _SUMMARY_FACT: _digest_of_summary(transcript.summary),
        }
    )
    fields: dict[str, Any] = {}
    if transcript.title:
        facts["title"] = transcript.title
        if meta.get("title") in (None, "", as_dict(meta.get(META_FIELD)).get("title")):
            fields["title"] = transcript.title
    return {**fields, META_FIELD: facts}
