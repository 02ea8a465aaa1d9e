"""The import of one old session into a session of the store, in steps.

Every write is idempotent. If the import is killed between two steps, the next run continues the
import.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from msgspec import Raw
from msgspec.structs import replace

from stenolog.errors import OnceConflict, UsageError
from stenolog.records import Message, timestamp
from stenolog.sessions.aliases import aliases_in, change_alias_mark, prepare_alias_mark
from stenolog.stores import spans
from stenolog.stores.base import Store
from stenolog.stores.json_file import JSONMessage
from stenolog.transfer import merge as merging
from stenolog.transfer.importers.legacy_session import LegacySession
from stenolog.transfer.merge import ExistingSession, Merge

BATCH_MESSAGES: Final = 500
"""Maximum number of messages per batch."""
BATCH_BYTES: Final = 4 * 1024 * 1024
MAX_RECEIPTS: Final = 20
"""Maximum number of import receipts that a session keeps."""


class SessionImport:
    """The import of one session, in four steps.

    Call `write_import_mark`, `add_messages`, `apply_visibility` and `write_receipt` in this order.

    `problems` lists the content that could not be imported.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        old: LegacySession,
        digest: str,
        existing: ExistingSession | None,
        merge: Merge,
    ) -> None:
        self._store = store
        self._key = key
        self._digest = digest
        self._seqs = list(merge.seqs)
        self.old = old
        self.existing = existing
        self.merge = merge
        self.problems: list[str] = []

    def write_import_mark(self, names: Sequence[str]) -> None:
        """Record the import in the meta, so that a later run recognizes a partial import."""
        meta = {} if self.existing is None else self.existing.meta
        import_mark = {"sha256": self._digest, "carry": self.merge.include_state}
        fields: dict[str, Any] = {"importing": import_mark}  # guard: import-mark
        aliases = [*aliases_in(meta), *(name for name in names if name not in aliases_in(meta))]
        if aliases:
            fields["aliases"] = aliases
        for name, value in (("agent", self.old.agent), ("channel", self.old.channel)):
            if value is not None and name not in meta:
                fields[name] = value
        if self.old.state and self._has_newest_state(meta):
            fields[self.old.layout] = self.old.state
        if names:
            prepare_alias_mark(self._store)
        try:
            self._store.set_meta(self._key, **self._meta_to_set(meta), **fields)
        except UsageError:
            self.problems.append(
                "the metadata was skipped: together with the existing metadata it is too large"
            )
            self._store.set_meta(self._key, **fields)
        if names:
            change_alias_mark(self._store)

    def _meta_to_set(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Return the meta fields to set: newer values are kept, and a resumed import sets none."""
        if self.existing is not None and self.existing.started_import(self._digest) is not None:
            return {}
        last_update = None if self.existing is None else self.existing.updated
        is_newer = last_update is None or last_update < self.old.created
        return {n: value for n, value in self.old.meta.items() if is_newer or n not in meta}

    def _has_newest_state(self, meta: Mapping[str, Any]) -> bool:
        """Return whether the old session's state is at least as new as the stored state."""
        stored_count = 0 if self.existing is None else len(self.existing.payloads)
        return self.old.layout not in meta or stored_count <= len(self.old.messages)

    def add_messages(self) -> Iterator[list[int]]:
        """Add the missing messages in batches and yield the seqs of each batch."""
        for start, batch in _split_into_batches(self.old.messages, len(self._seqs)):
            token = batch[0].once
            try:
                seqs = self._append_batch(batch, token or f"import:{self._digest}:{start}")
            except OnceConflict:
                self.problems.append(
                    f"another message already has the idempotency key of message {start + 1}: "
                    "the imported message got a new key"
                )
                seqs = self._append_batch(batch, f"import:{self._digest}:{start}")
            self._seqs += seqs
            yield seqs

    def _append_batch(self, batch: Sequence[JSONMessage], once: str) -> list[int]:
        messages = [Message(seq=1, _at="", _body=Raw(message.payload)) for message in batch]
        times = [message.at for message in batch if message.at is not None]
        return self._store.add_messages(self._key, messages, once=once, at=times)

    def apply_visibility(self) -> None:
        """Set the summary, and hide the messages that are hidden in the old session.

        If the session has newer messages, only messages with a token are hidden.
        """
        floor = merging.hidden_prefix(self.old)
        if (
            self.merge.include_state
            and floor
            and not self._hides_only_imported(self._seqs[floor - 1])
        ):
            self.merge = replace(self.merge, include_state=False)
        self.problems += self.describe_skipped_state()
        if not self.merge.include_state:
            self._hide_messages(
                n for n in self._hidden_indexes(floor) if self.old.messages[n].once is not None
            )
            return
        if floor:
            last_hidden_seq = self._seqs[floor - 1]
            self._store.checkpoint(self._key, summary=self.old.summary, upto=last_hidden_seq)
        elif self.old.summary:
            self._store.set_summary(self._key, self.old.summary)
        self._hide_messages(self._hidden_indexes(floor))

    def _hidden_indexes(self, floor: int) -> Iterator[int]:
        """Yield the indexes of hidden messages, starting at the index `floor`."""
        return (
            index
            for index, message in enumerate(self.old.messages)
            if message.hidden and index >= floor
        )

    def _hide_messages(self, indexes: Iterable[int]) -> None:
        seqs = (self._seqs[index] for index in indexes if self._seqs[index])
        # Each write hides consecutive seqs.
        for first, last in spans.union((seq, seq) for seq in seqs):
            self._store.hide(self._key, first, last)

    def _hides_only_imported(self, upto: int) -> bool:
        """Return whether a checkpoint up to this seq hides only messages of the old session."""
        visible_seqs = {message.seq for message in self._store.get_history(self._key)}
        # guard: merge-hides-only-covered
        return all(seq > upto for seq in visible_seqs.difference(self._seqs))

    def describe_skipped_state(self) -> Iterator[str]:
        """Yield a sentence for each item that is skipped because the session has newer messages."""
        if self.merge.include_state or len(self.merge.seqs) == len(self.old.messages):
            return
        if self.old.summary:
            yield "the summary was skipped, because the session has newer messages"
        # Messages with a token are hidden even if the session has newer messages.
        indexes = self._hidden_indexes(merging.hidden_prefix(self.old))
        still_hidden_count = sum(self.old.messages[index].once is not None for index in indexes)
        if hidden_count := self.old.hidden - still_hidden_count:
            yield f"{hidden_count} messages that were hidden in the source are visible here"

    def write_receipt(self, name: str) -> None:
        """Finish the import: remove the import mark and add the receipt in one write."""
        info = self._store.info(self._key)
        message_times = [message.at for message in self.old.messages if message.at is not None]
        existing_times = () if self.existing is None else self.existing.times
        receipt: dict[str, Any] = {
            "from": self.old.layout,
            "file": name,
            "sha256": self._digest,
            "messages": len(self.old.messages),
            "created": timestamp(min([self.old.created, *message_times])),
            # The session has the times of the old conversation until a new message is stored.
            "updated": timestamp(max([self.old.updated, *message_times, *existing_times])),
            "last_seq": info.last_seq,
            merging.IMPORT_TIME: timestamp(datetime.now(UTC)),
        }
        if self.old.layout == "stenolog-json" and self.old.messages:
            *_, receipt[merging.MESSAGES_DIGEST] = merging.prefix_digests(self.old.messages)
        if info.summary == self.old.summary != "":
            receipt[merging.SUMMARY_DIGEST] = merging.summary_digest(info.summary)
        receipts = [*merging.import_receipts(info.meta), receipt][-MAX_RECEIPTS:]
        self._store.set_meta(self._key, importing=None, imported=receipts)


def _split_into_batches(
    messages: Sequence[JSONMessage], start: int
) -> Iterator[tuple[int, Sequence[JSONMessage]]]:
    """Yield batches of messages to add, each with the index of its first message.

    Messages with the same token are in one batch. Messages without a token are in batches of
    limited size.
    """
    while start < len(messages):
        end, size = start + 1, len(messages[start].payload)
        if messages[start].once is not None:
            while end < len(messages) and messages[end].once == messages[start].once:
                end += 1
        else:
            while (
                end < len(messages) and end - start < BATCH_MESSAGES and messages[end].once is None
            ):
                size += len(messages[end].payload)
                if size > BATCH_BYTES:
                    break
                end += 1
        yield start, messages[start:end]
        start = end


def add_aliases(store: Store, key: str, meta: Mapping[str, Any], names: Sequence[str]) -> None:
    """Add aliases to a session that was imported before."""
    prepare_alias_mark(store)
    store.set_meta(key, aliases=[*aliases_in(meta), *names])
    change_alias_mark(store)
