"""Comparison of a session with its copy, by digest and message by message. Pure.

Equal digests mean equal messages with their seqs, times and tokens, equal state, equal undo steps,
and the same place: the same key, or the trash. Digests do not depend on the engine.
"""

import json
from collections.abc import Iterable, Iterator
from hashlib import sha256
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
"""Version of the digested form: a different form must never give equal digests."""
_UNCHANGED: Final = "The destination was not changed"
TARGET_NEWER: Final = (
    "the destination has newer messages that the source does not have. "
    f"{_UNCHANGED}: copy in the other direction, or to another destination"
)
DIVERGED: Final = (
    "source and destination have the same session with different content: both were written to. "
    f"{_UNCHANGED}: fork, rename or purge one of the two, or copy to another destination"
)
SOURCE_DAMAGED: Final = (
    "the source has lost messages to damage that the destination still has. "
    f"{_UNCHANGED}: copy the session back from the destination"
)
TARGET_DAMAGED: Final = (
    f"the copy in the destination is damaged. {_UNCHANGED}: purge the session there and copy again"
)


class UnknownDamage(Exception):
    """Messages are missing through damage that was not known before."""

    def __init__(self, seqs: list[Span]) -> None:
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
        """Total length of their bodies, in bytes."""

    def add(self, message: Message) -> None:
        """Add a message to the digest."""
        body = message.to_json()
        token = b""
        if message._once is not None and (found := token_of(message)) is not None:
            token = json.dumps(found).encode()
        self._hash.update(b"%d %b %b %d\n" % (message.seq, message._at.encode(), token, len(body)))
        self._hash.update(body)
        self.messages += 1
        self.bytes += len(body)

    def with_snapshot(self, snapshot: Snapshot) -> str:
        """Return the digest of a snapshot that has these messages."""
        all_lost = self._hash.copy()
        all_lost.update(canonical(snapshot))
        return all_lost.hexdigest()

    def digesting(self, snapshot: Snapshot, messages: Iterable[Message]) -> Iterator[Message]:
        """Yield all messages of a snapshot and add each to the digest. Raises UnknownDamage."""
        expected, gaps, add = 1, list[Span](), self.add
        for message in messages:
            if message.seq != expected:
                gaps.append((expected, message.seq - 1))
            expected = message.seq + 1
            add(message)
            yield message
        if expected <= snapshot.last_seq:
            gaps.append((expected, snapshot.last_seq))
        if gaps and (new := spans.minus(gaps, missing_seqs(snapshot))):
            raise UnknownDamage(new)


def missing_seqs(snapshot: Snapshot) -> list[Span]:
    """Return the seqs of a snapshot that are known to have no message."""
    return spans.union(snapshot.lost, snapshot.void, snapshot.purged)


def canonical(snapshot: Snapshot) -> bytes:
    """Return the digested bytes of a snapshot, without fields that an engine may not keep."""
    fields: dict[str, Any] = msgspec.to_builtins(snapshot)
    fields["tokens"] = [(token.token, token.first, token.count) for token in snapshot.tokens]
    # ASCII escapes, because a text may contain lone surrogates.
    return json.dumps(fields, separators=(",", ":")).encode()


def combined_digest(digests: Iterable[tuple[str, str, str]]) -> str:
    """Return one digest for many sessions, given as namespace, uid and digest."""
    lines = [json.dumps(one) for one in digests]
    return sha256("\n".join(sorted(lines)).encode()).hexdigest()


def digest_of(reading: SnapshotReading) -> str:
    """Return the digest of a snapshot, read from its first message on.

    Messages found to be damaged are digested as lost, even if the store did not know.
    """
    digest = MessagesDigest()
    lost: list[Span] = []
    try:
        for _ in digest.digesting(reading.snapshot, reading.messages):
            pass
    except UnknownDamage as damage:
        lost = damage.seqs
    all_lost = spans.union(reading.snapshot.lost, lost)
    return digest.with_snapshot(
        replace(reading.snapshot, lost=all_lost) if lost else reading.snapshot
    )


class Comparison(Struct, frozen=True, kw_only=True):
    """Result of a comparison."""

    digest: MessagesDigest
    """Digest of the source's messages up to the last seq of the destination."""
    equal: bool = False
    reason: str = ""
    """Why the destination must not be written to; empty if it may be."""
    is_newer: bool = False
    """The destination has everything that the source has."""


def compare(source_reading: SnapshotReading, target_reading: SnapshotReading) -> Comparison:
    """Compare a session in the source with the one of the same uid in the destination.

    An earlier copy that was not written to since may be written to. Raises UnknownDamage if the
    source turns out to be damaged.
    """
    source, target = source_reading.snapshot, target_reading.snapshot
    comparison = _MessageComparison(source, target.last_seq)
    copied = MessagesDigest()
    try:
        for message in copied.digesting(target, target_reading.messages):
            comparison.compare_next(message, source_reading.messages)
    except UnknownDamage:
        # The destination is damaged; `finish` reports damage of the source.
        return Comparison(digest=comparison.digest, reason=TARGET_DAMAGED)
    comparison.finish(source_reading.messages)
    target_is_ahead = target.last_seq > source.last_seq or target.number > source.number
    equal = (
        not comparison.differ
        and source.last_seq == target.last_seq
        and comparison.digest.with_snapshot(source) == copied.with_snapshot(target)
    )
    found = Comparison(digest=comparison.digest, equal=equal)
    if equal:
        return found
    # Messages that were purged in the source do not count as lost.
    if comparison.has_different or (
        comparison.only_in_target and not target_is_ahead and target_reading.untouched
    ):
        reason = DIVERGED if comparison.has_different else SOURCE_DAMAGED
        return Comparison(digest=comparison.digest, reason=reason)
    if not target_reading.untouched or target_is_ahead:
        source_is_ahead = source.last_seq > target.last_seq or source.number > target.number
        is_newer = not source_is_ahead and not comparison.only_in_source
        reason = TARGET_NEWER if is_newer else DIVERGED
        return Comparison(digest=comparison.digest, reason=reason, is_newer=is_newer)
    return found


class _MessageComparison:
    """State of a comparison of two sessions, message by message."""

    def __init__(self, source: Snapshot, upto: int) -> None:
        self.digest = MessagesDigest()
        self.has_different = False
        """A message differs between the two."""
        self.only_in_source = False
        """A message is missing in the destination."""
        self.only_in_target = False
        """A message is missing in the source and was not purged."""
        self.was_purged = False
        """A message was purged in the source, but not in the destination."""
        self._source = source
        self._upto = upto
        self._expected = 1
        self._gaps: list[Span] = []
        self._next: Message | None = None

    @property
    def differ(self) -> bool:
        return self.has_different or self.only_in_source or self.only_in_target or self.was_purged

    def compare_next(self, target_message: Message, source_messages: Iterator[Message]) -> None:
        """Compare the next message of the destination."""
        while (
            message := self._peek(source_messages)
        ) is not None and message.seq < target_message.seq:
            self._advance(message)
            self.only_in_source = True
        if message is None or message.seq > target_message.seq:
            if spans.contains(self._source.purged, target_message.seq):
                self.was_purged = True
            else:
                self.only_in_target = True
            return
        self._advance(message)
        if _content(message) != _content(target_message):
            self.has_different = True

    def finish(self, source_messages: Iterator[Message]) -> None:
        """End the comparison. Raises UnknownDamage for messages missing in the source."""
        while (message := self._peek(source_messages)) is not None and message.seq <= self._upto:
            self._advance(message)
            self.only_in_source = True
        end = min(self._upto, self._source.last_seq)
        self._record_gap(end + 1)
        if self._gaps:
            raise UnknownDamage(self._gaps)

    def _peek(self, source_messages: Iterator[Message]) -> Message | None:
        if self._next is None:
            self._next = next(source_messages, None)
        return self._next

    def _advance(self, message: Message) -> None:
        self._record_gap(message.seq)
        self._expected = message.seq + 1
        self.digest.add(message)
        self._next = None

    def _record_gap(self, upto: int) -> None:
        if upto > self._expected:
            gap = spans.minus([(self._expected, upto - 1)], missing_seqs(self._source))
            self._gaps = spans.union(self._gaps, gap)


def _content(message: Message) -> tuple[str, bytes, tuple[str, int] | None]:
    return message._at, message.to_json(), token_of(message)
