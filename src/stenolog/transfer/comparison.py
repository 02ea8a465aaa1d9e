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

_FORM: Final = b"stenolog life 1\n"
"""Version of the digested form: a different form must never give equal digests."""
_LEFT: Final = "The destination is left as it is"
NEWER: Final = (
    f"the destination went on by itself and has more than the source. {_LEFT}: copy from there to "
    "here, or to another place"
)
DIVERGED: Final = (
    f"the destination has other content under the same uid: both went on by themselves. {_LEFT}: "
    "fork, rename or purge one of the two, or copy to another place"
)
LOST_HERE: Final = (
    f"the source has lost messages to damage that the destination still has. {_LEFT}: copy the "
    "session back from there"
)
DAMAGED_THERE: Final = (
    f"the copy in the destination is damaged. {_LEFT}: purge the session there and copy again"
)


class NewlyLost(Exception):
    """Messages are missing through damage that was not known before."""

    def __init__(self, seqs: list[Span]) -> None:
        self.seqs = seqs
        super().__init__(f"damaged: {seqs}")


class MessagesDigest:
    """Incremental digest of the messages of a session, in the order of their seqs."""

    __slots__ = ("_hash", "bytes", "messages")

    def __init__(self) -> None:
        self._hash: _Hash = sha256(_FORM)
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
        whole = self._hash.copy()
        whole.update(canonical(snapshot))
        return whole.hexdigest()

    def passing(self, snapshot: Snapshot, messages: Iterable[Message]) -> Iterator[Message]:
        """Yield all messages of a snapshot and add each to the digest. Raises NewlyLost."""
        expected, gaps, add = 1, list[Span](), self.add
        for message in messages:
            if message.seq != expected:
                gaps.append((expected, message.seq - 1))
            expected = message.seq + 1
            add(message)
            yield message
        if expected <= snapshot.last_seq:
            gaps.append((expected, snapshot.last_seq))
        if gaps and (new := spans.minus(gaps, missing(snapshot))):
            raise NewlyLost(new)


def missing(snapshot: Snapshot) -> list[Span]:
    """Return the seqs of a snapshot that are known to have no message."""
    return spans.union(snapshot.lost, snapshot.void, snapshot.purged)


def canonical(snapshot: Snapshot) -> bytes:
    """Return the digested bytes of a snapshot, without fields that an engine may not keep."""
    fields: dict[str, Any] = msgspec.to_builtins(snapshot)
    fields["tokens"] = [(token.token, token.first, token.count) for token in snapshot.tokens]
    # ASCII escapes, because a text may contain lone surrogates.
    return json.dumps(fields, separators=(",", ":")).encode()


def of_many(digests: Iterable[tuple[str, str, str]]) -> str:
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
        for _ in digest.passing(reading.snapshot, reading.messages):
            pass
    except NewlyLost as met:
        lost = met.seqs
    whole = spans.union(reading.snapshot.lost, lost)
    return digest.with_snapshot(replace(reading.snapshot, lost=whole) if lost else reading.snapshot)


class Verdict(Struct, frozen=True, kw_only=True):
    """Result of a comparison."""

    digest: MessagesDigest
    """Digest of the source's messages up to the last seq of the destination."""
    equal: bool = False
    reason: str = ""
    """Why the destination must not be written to; empty if it may be."""
    newer: bool = False
    """The destination has everything that the source has."""


def compare(here: SnapshotReading, there: SnapshotReading) -> Verdict:
    """Compare a session in the source with the one of the same uid in the destination.

    An earlier copy that was not written to since may be written to. Raises NewlyLost if the source
    turns out to be damaged.
    """
    source, target = here.snapshot, there.snapshot
    seen = _Seen(source, target.last_seq)
    copied = MessagesDigest()
    try:
        for message in copied.passing(target, there.messages):
            seen.take(message, here.messages)
    except NewlyLost:
        # The destination is damaged; `finish` reports damage of the source.
        return Verdict(digest=seen.digest, reason=DAMAGED_THERE)
    seen.finish(here.messages)
    ahead = target.last_seq > source.last_seq or target.number > source.number
    equal = (
        not seen.differ
        and source.last_seq == target.last_seq
        and seen.digest.with_snapshot(source) == copied.with_snapshot(target)
    )
    found = Verdict(digest=seen.digest, equal=equal)
    if equal:
        return found
    # Messages that were purged in the source do not count as lost.
    if seen.other or (seen.only_there and not ahead and there.untouched):
        reason = DIVERGED if seen.other else LOST_HERE
        return Verdict(digest=seen.digest, reason=reason)
    if not there.untouched or ahead:
        behind = source.last_seq > target.last_seq or source.number > target.number
        newer = not behind and not seen.only_here
        reason = NEWER if newer else DIVERGED
        return Verdict(digest=seen.digest, reason=reason, newer=newer)
    return found


class _Seen:
    """State of a comparison of two sessions, message by message."""

    def __init__(self, source: Snapshot, upto: int) -> None:
        self.digest = MessagesDigest()
        self.other = False
        """A message differs between the two."""
        self.only_here = False
        """A message is missing in the destination."""
        self.only_there = False
        """A message is missing in the source and was not purged."""
        self.purged = False
        """A message was purged in the source, but not in the destination."""
        self._source = source
        self._upto = upto
        self._expected = 1
        self._gaps: list[Span] = []
        self._next: Message | None = None

    @property
    def differ(self) -> bool:
        return self.other or self.only_here or self.only_there or self.purged

    def take(self, there: Message, here: Iterator[Message]) -> None:
        """Compare the next message of the destination."""
        while (mine := self._peek(here)) is not None and mine.seq < there.seq:
            self._pass(mine)
            self.only_here = True
        if mine is None or mine.seq > there.seq:
            if spans.contains(self._source.purged, there.seq):
                self.purged = True
            else:
                self.only_there = True
            return
        self._pass(mine)
        if _content(mine) != _content(there):
            self.other = True

    def finish(self, here: Iterator[Message]) -> None:
        """End the comparison. Raises NewlyLost for messages missing in the source."""
        while (mine := self._peek(here)) is not None and mine.seq <= self._upto:
            self._pass(mine)
            self.only_here = True
        end = min(self._upto, self._source.last_seq)
        self._note_gap(end + 1)
        if self._gaps:
            raise NewlyLost(self._gaps)

    def _peek(self, here: Iterator[Message]) -> Message | None:
        if self._next is None:
            self._next = next(here, None)
        return self._next

    def _pass(self, mine: Message) -> None:
        self._note_gap(mine.seq)
        self._expected = mine.seq + 1
        self.digest.add(mine)
        self._next = None

    def _note_gap(self, upto: int) -> None:
        if upto > self._expected:
            gap = spans.minus([(self._expected, upto - 1)], missing(self._source))
            self._gaps = spans.union(self._gaps, gap)


def _content(message: Message) -> tuple[str, bytes, tuple[str, int] | None]:
    return message._at, message.to_json(), token_of(message)
