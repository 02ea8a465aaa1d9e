"""The import of one old session into a session of the store, in steps.

Every write is idempotent. If the import is killed between two steps, the next run continues the
import.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from stenolog.errors import OnceConflict, UsageError
from stenolog.records import timestamp
from stenolog.sessions.aliases import aliases_in, change_alias_mark, prepare_alias_mark
from stenolog.stores import spans
from stenolog.stores.base import Store, find_view
from stenolog.stores.json_file import JSONMessage
from stenolog.transfer import merge as merging
from stenolog.transfer.importers.legacy_session import LegacySession
from stenolog.transfer.merge import (
    AnswerSeqs,
    ExistingSession,
    MergePlan,
    find_equal_messages,
    message_of,
    names_seqs,
)

BATCH_MESSAGES: Final = 500
"""Maximum number of messages per batch."""
BATCH_BYTES: Final = 4 * 1024 * 1024
"""Maximum total size of the messages in a batch, in bytes. One message may be larger."""
MAX_RECEIPTS: Final = 20
"""Maximum number of import receipts that a session keeps."""


class SessionImport(Struct):
    """The import of one session, in four steps that must be called in this order.

    The steps are `write_import_mark`, `add_messages`, `apply_visibility` and `write_receipt`.
    `problems` lists the content that could not be imported.
    """

    store: Store
    key: str
    old: LegacySession
    digest: str
    existing: ExistingSession
    plan: MergePlan
    problems: list[str] = []
    seqs: list[int] = []
    """Seqs of the old messages that are stored so far."""

    def __post_init__(self) -> None:
        self.seqs = list(self.plan.seqs)

    def write_import_mark(self, aliases: Sequence[str]) -> None:
        """Write the meta fields, including the mark that identifies an unfinished import."""
        meta = self.existing.meta
        import_mark = {"sha256": self.digest, "carry": self.plan.include_state}
        fields: dict[str, Any] = {"importing": import_mark}  # guard: import-mark
        new_aliases = [name for name in aliases if name not in aliases_in(meta)]
        if all_aliases := [*aliases_in(meta), *new_aliases]:
            fields["aliases"] = all_aliases
        for name, value in (("agent", self.old.agent), ("channel", self.old.channel)):
            if value is not None and name not in meta:
                fields[name] = value
        if aliases:
            prepare_alias_mark(self.store)
        try:
            self.store.set_meta(self.key, **self._meta_to_set(), **fields)
        except UsageError:
            self.problems.append(
                "the metadata was skipped: together with the existing metadata it is too large"
            )
            self.store.set_meta(self.key, **fields)
        if aliases:
            change_alias_mark(self.store)

    def _meta_to_set(self) -> dict[str, Any]:
        """Return the old meta fields to set. Newer values stay. A resumed import sets no fields."""
        existing = self.existing
        if existing.earlier_include_state(self.digest) is not None:
            return {}
        overwrites = existing.updated is None or existing.updated < self.old.created
        fields = self.old.meta.items()
        return {name: value for name, value in fields if overwrites or name not in existing.meta}

    def add_messages(self) -> None:
        """Add the missing messages in batches."""
        answer_seqs = self._read_answer_seqs()
        for start, batch in _split_into_batches(self.old.messages, len(self.seqs)):
            token = batch[0].once
            payloads = [
                answer_seqs.payload_for(message.payload, seq)
                for seq, message in enumerate(batch, start + 1)
            ]
            try:
                seqs = self._append_batch(batch, payloads, token or f"import:{self.digest}:{start}")
            except OnceConflict:
                self.problems.append(
                    f"another message already has the idempotency key of message {start + 1}: "
                    "the imported message got a new key"
                )
                seqs = self._append_batch(batch, payloads, f"import:{self.digest}:{start}")
            answer_seqs.add(range(start + 1, start + 1 + len(batch)), seqs)
            self.seqs += seqs

    def _read_answer_seqs(self) -> AnswerSeqs:
        """Return which of the old messages are stored so far."""
        seqs = {old_seq: seq for old_seq, seq in enumerate(self.seqs, 1) if seq}
        view = find_view(self.store, self.key) if self.existing.seqs else None
        return AnswerSeqs(seqs=seqs) if view is None else AnswerSeqs.in_view(view, seqs)

    def _append_batch(
        self, batch: Sequence[JSONMessage], payloads: Sequence[bytes], once: str
    ) -> list[int]:
        messages = [message_of(payload) for payload in payloads]
        times = [message.at for message in batch if message.at is not None]
        try:
            return self.store.add_messages(self.key, messages, once=once, at=times)
        except OnceConflict as conflict:
            seqs = find_equal_messages(self.store, self.key, conflict.seq, payloads)
            if not seqs:
                raise
            return seqs

    def apply_visibility(self) -> None:
        """Set the summary, and hide the messages that are hidden in the old session.

        If the session has newer messages, the summary is skipped, and only messages with an
        idempotency key are hidden.
        """
        prefix_length = merging.hidden_prefix_length(self.old)
        if (
            self.plan.include_state
            and prefix_length
            and not self._hides_only_imported(self.seqs[prefix_length - 1])
        ):
            self.plan = replace(self.plan, include_state=False)
        self.problems += self.describe_skipped_state()
        if not self.plan.include_state:
            indexes = self._hidden_indexes(prefix_length)
            self._hide_messages(n for n in indexes if self.old.messages[n].once is not None)
            return
        if prefix_length:
            last_hidden_seq = self.seqs[prefix_length - 1]
            self.store.checkpoint(self.key, summary=self.old.summary, upto=last_hidden_seq)
        elif self.old.summary:
            self.store.set_summary(self.key, self.old.summary)
        self._hide_messages(self._hidden_indexes(prefix_length))

    def _hidden_indexes(self, start: int) -> Iterator[int]:
        """Yield the indexes of hidden messages, starting at the index `start`."""
        return (
            index
            for index, message in enumerate(self.old.messages)
            if message.hidden and index >= start
        )

    def _hide_messages(self, indexes: Iterable[int]) -> None:
        seqs = (self.seqs[index] for index in indexes if self.seqs[index])
        # Each write hides consecutive seqs.
        for first, last in spans.from_seqs(seqs):
            self.store.admin.hide(self.key, first, last)

    def _hides_only_imported(self, last_seq: int) -> bool:
        """Return whether a checkpoint at this seq would hide only messages of the old session."""
        visible_seqs = {message.seq for message in self.store.get_history(self.key)}
        # guard: merge-hides-only-covered
        return all(seq > last_seq for seq in visible_seqs.difference(self.seqs))

    def describe_skipped_state(self) -> Iterator[str]:
        """Yield a sentence for each item that is skipped because the session has newer messages."""
        if self.plan.include_state or len(self.plan.seqs) == len(self.old.messages):
            return
        if self.old.summary:
            yield "the summary was skipped, because the session has newer messages"
        # Messages with a token are hidden even if the session has newer messages.
        indexes = self._hidden_indexes(merging.hidden_prefix_length(self.old))
        still_hidden_count = sum(self.old.messages[index].once is not None for index in indexes)
        hidden_count = sum(message.hidden for message in self.old.messages)
        if visible_count := hidden_count - still_hidden_count:
            yield f"{visible_count} messages that were hidden in the source are visible here"

    def write_receipt(self, file_name: str) -> None:
        """Finish the import: remove the import mark and add the receipt in one write."""
        info = self.store.info(self.key)
        message_times = [message.at for message in self.old.messages if message.at is not None]
        receipt: dict[str, Any] = {
            "from": self.old.layout,
            "file": file_name,
            "sha256": self.digest,
            "messages": len(self.old.messages),
            "created": timestamp(min([self.old.created, *message_times])),
            # The session shows this time as its last change until a new message is stored.
            "updated": timestamp(max([self.old.updated, *message_times, *self.existing.times])),
            "last_seq": info.last_seq,
            merging.IMPORT_TIME: timestamp(datetime.now(UTC)),
        }
        if self.old.layout == "stenolog-json" and self.old.messages:
            *_, receipt[merging.MESSAGES_DIGEST] = merging.prefix_digests(self.old.messages)
        if info.summary == self.old.summary != "":
            receipt[merging.SUMMARY_DIGEST] = merging.summary_digest(info.summary)
        receipts = [*merging.receipts_of_imports(info.meta), receipt][-MAX_RECEIPTS:]
        self.store.set_meta(self.key, importing=None, imported=receipts)


def _split_into_batches(
    messages: Sequence[JSONMessage], start: int
) -> Iterator[tuple[int, Sequence[JSONMessage]]]:
    """Yield batches of messages to add, each with the index of its first message.

    Messages with the same token are in one batch. Messages without a token are in batches of
    limited size. A message that names other messages by seq starts a batch: their seqs are known
    only when they are stored.
    """
    while start < len(messages):
        end, size = start + 1, len(messages[start].payload)
        if messages[start].once is not None:
            while end < len(messages) and messages[end].once == messages[start].once:
                end += 1
        else:
            while (
                end < len(messages)
                and end - start < BATCH_MESSAGES
                and messages[end].once is None
                and not names_seqs(messages[end].payload)
            ):
                size += len(messages[end].payload)
                if size > BATCH_BYTES:
                    break
                end += 1
        yield start, messages[start:end]
        start = end


def add_aliases(
    store: Store, key: str, meta: Mapping[str, Any], new_aliases: Sequence[str]
) -> None:
    """Add aliases to a session that was imported before."""
    prepare_alias_mark(store)
    store.set_meta(key, aliases=[*aliases_in(meta), *new_aliases])
    change_alias_mark(store)
