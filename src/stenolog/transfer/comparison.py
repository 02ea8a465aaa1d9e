"""Comparison of a session with its copy, by digest and message by message. Pure functions.

Two sessions have the same digest if all messages are equal, including seqs, times and idempotency
keys, and if all other fields are equal, for example key, deletion time and summary. Digests do not
depend on the storage engine.
"""

import json
from collections.abc import Iterable, Iterator
from hashlib import sha256
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from stenolog.records import Message, Span
from stenolog.stores import spans
from stenolog.stores.snapshots import Snapshot, SnapshotReading, token_of

if TYPE_CHECKING:
    from hashlib import _Hash

_DIGEST_VERSION: Final = b"stenolog life 1\n"
"""First bytes of the digested data. They must change if the layout of the data changes."""
_UNCHANGED: Final = "The destination was not changed"
TARGET_NEWER_REASON: Final = (
    "the destination has newer messages that the source does not have. "
    f"{_UNCHANGED}: copy in the other direction, or to another destination"
)
DIVERGED_REASON: Final = (
    "source and destination have the same session with different content: both were written to. "
    f"{_UNCHANGED}: fork, rename or purge one of the two, or copy to another destination"
)
SOURCE_DAMAGED_REASON: Final = (
    "the source has lost messages to damage that the destination still has. "
    f"{_UNCHANGED}: copy the session back from the destination"
)
TARGET_DAMAGED_REASON: Final = (
    f"the copy in the destination is damaged. {_UNCHANGED}: purge the session there and copy again"
)


class UnknownDamage(Exception):
    """Raised if messages are missing because of damage that the store did not know of."""

    def __init__(self, snapshot: Snapshot, seqs: list[Span]) -> None:
        self.snapshot = snapshot
        self.seqs = seqs
        super().__init__(f"damaged: {seqs}")


class MessagesDigest:
    """Incremental digest of the messages of a session, in the order of their seqs."""

    __slots__ = ("_hash", "bytes", "messages")

    def __init__(self) -> None:
        self._hash: _Hash = sha256(_DIGEST_VERSION)
        self.messages = 0
        """Number of messages added."""
        self.bytes = 0
        """Total length of the bodies of all added messages, in bytes."""

    def add(self, message: Message) -> None:
        """Add a message to the digest."""
        body = message.to_json()
        token = b""
        if message._once is not None and (token_and_count := token_of(message)) is not None:
            token = json.dumps(token_and_count).encode()
        self._hash.update(b"%d %b %b %d\n" % (message.seq, message._at.encode(), token, len(body)))
        self._hash.update(body)
        self.messages += 1
        self.bytes += len(body)

    def session_digest(self, snapshot: Snapshot) -> str:
        """Return the digest of a complete session: the added messages and this snapshot.

        The digests of idempotency keys are left out, because some engines do not keep them.
        """
        fields: dict[str, Any] = msgspec.to_builtins(snapshot)
        fields["tokens"] = [(token.token, token.first, token.count) for token in snapshot.tokens]
        digest = self._hash.copy()
        # `dumps` writes lone surrogates as ASCII escapes, so `encode` accepts every text.
        digest.update(json.dumps(fields, separators=(",", ":")).encode())
        return digest.hexdigest()

    def add_and_yield(self, snapshot: Snapshot, messages: Iterable[Message]) -> Iterator[Message]:
        """Add each message to the digest, and yield it.

        Raises UnknownDamage at the end if messages are missing without a known reason.
        """
        expected_seq, gaps, add = 1, list[Span](), self.add
        for message in messages:
            if message.seq != expected_seq:
                gaps.append((expected_seq, message.seq - 1))
            expected_seq = message.seq + 1
            add(message)
            yield message
        if expected_seq <= snapshot.last_seq:
            gaps.append((expected_seq, snapshot.last_seq))
        if gaps and (new_gaps := spans.minus(gaps, missing_seqs(snapshot))):
            raise UnknownDamage(snapshot, new_gaps)


def missing_seqs(snapshot: Snapshot) -> list[Span]:
    """Return the seqs of a snapshot that are known to have no message."""
    return spans.union(snapshot.lost, snapshot.void, snapshot.purged)


def combined_digest(digests: Iterable[tuple[str, str, str]]) -> str:
    """Return one digest for many sessions, given as namespace, uid and digest."""
    lines = [json.dumps(entry) for entry in digests]
    return sha256("\n".join(sorted(lines)).encode()).hexdigest()


def digest_of(reading: SnapshotReading) -> str:
    """Return the digest of a session. `reading` must start at the first message.

    Damaged messages count as lost in the digest, even if the store did not know of the damage.
    """
    digest = MessagesDigest()
    snapshot = reading.snapshot
    try:
        for _ in digest.add_and_yield(snapshot, reading.messages):
            pass
    except UnknownDamage as damage:
        snapshot = replace(snapshot, lost=spans.union(snapshot.lost, damage.seqs))
    return digest.session_digest(snapshot)


class Comparison(Struct, frozen=True, kw_only=True):
    """Result of comparing a session with its copy in the destination."""

    digest: MessagesDigest
    """Digest of the source's messages up to the last seq of the destination."""
    equal: bool = False
    reason: str = ""
    """Reason why the destination must not be overwritten; empty if it may be overwritten."""
    is_target_newer: bool = False
    """Whether the destination has everything that the source has, and more."""


def compare(source_reading: SnapshotReading, target_reading: SnapshotReading) -> Comparison:
    """Compare a session in the source with the session of the same uid in the destination.

    An earlier copy may be overwritten if no process has changed the copy. Raises UnknownDamage if
    the source turns out to be damaged.
    """
    source, target = source_reading.snapshot, target_reading.snapshot
    target_last_seq = target.last_seq
    source_digest, target_digest = MessagesDigest(), MessagesDigest()
    source_messages = source_digest.add_and_yield(
        replace(source, last_seq=min(target_last_seq, source.last_seq)),
        takewhile(lambda message: message.seq <= target_last_seq, source_reading.messages),
    )
    target_messages = target_digest.add_and_yield(target, target_reading.messages)
    has_changed = only_in_source = only_in_target = was_purged = False
    try:
        for message, target_message in _pair_by_seq(source_messages, target_messages):
            if target_message is None:
                only_in_source = True
            elif message is not None:
                has_changed |= _compared_fields(message) != _compared_fields(target_message)
            # Messages that were purged in the source do not count as lost.
            elif spans.contains(source.purged, target_message.seq):
                was_purged = True
            else:
                only_in_target = True
    except UnknownDamage as damage:
        if damage.snapshot is not target:
            raise
        return Comparison(digest=source_digest, reason=TARGET_DAMAGED_REASON)
    target_is_ahead = target.last_seq > source.last_seq or target.number > source.number
    messages_differ = has_changed or only_in_source or only_in_target or was_purged
    if (
        not messages_differ
        and source.last_seq == target.last_seq
        and source_digest.session_digest(source) == target_digest.session_digest(target)
    ):
        return Comparison(digest=source_digest, equal=True)
    if has_changed:
        return Comparison(digest=source_digest, reason=DIVERGED_REASON)
    if only_in_target and not target_is_ahead and target_reading.untouched:
        return Comparison(digest=source_digest, reason=SOURCE_DAMAGED_REASON)
    if not target_reading.untouched or target_is_ahead:
        source_is_ahead = source.last_seq > target.last_seq or source.number > target.number
        is_target_newer = not source_is_ahead and not only_in_source
        reason = TARGET_NEWER_REASON if is_target_newer else DIVERGED_REASON
        return Comparison(digest=source_digest, reason=reason, is_target_newer=is_target_newer)
    return Comparison(digest=source_digest)


def _pair_by_seq(
    first: Iterator[Message], second: Iterator[Message]
) -> Iterator[tuple[Message | None, Message | None]]:
    """Yield pairs of messages with the same seq, in the order of seqs.

    If only one iterator has a message with a seq, the other value of the pair is None.
    """
    first_message, second_message = next(first, None), next(second, None)
    while first_message is not None or second_message is not None:
        if second_message is None or (
            first_message is not None and first_message.seq < second_message.seq
        ):
            yield first_message, None
            first_message = next(first, None)
        elif first_message is None or second_message.seq < first_message.seq:
            yield None, second_message
            second_message = next(second, None)
        else:
            yield first_message, second_message
            first_message, second_message = next(first, None), next(second, None)


def _compared_fields(message: Message) -> tuple[str, bytes, tuple[str, int] | None]:
    return message._at, message.to_json(), token_of(message)
