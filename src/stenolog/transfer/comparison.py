"""Comparison of a session with its copy, by digest. Pure functions.

Two sessions have the same digest if all messages are equal, including seqs, times and idempotency
keys, and if all other fields are equal, for example key, deletion time and summary. Digests do not
depend on the storage engine.
"""

import json
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from stenolog.records import Message, Span
from stenolog.stores import spans
from stenolog.stores.snapshots import Snapshot, SnapshotReading, token_of

if TYPE_CHECKING:
    from hashlib import _Hash


class UnknownDamage(Exception):
    """Raised if messages are missing because of damage that the store did not know of."""

    def __init__(self, seqs: list[Span]) -> None:
        self.seqs = seqs
        super().__init__(f"damaged: {seqs}")


class MessagesDigest:
    """Incremental digest of the messages of a session, in the order of their seqs."""

    __slots__ = ("_hash", "bytes", "messages")

    def __init__(self) -> None:
        self._hash: _Hash = sha256()
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
        if gaps and (new_gaps := spans.minus(gaps, _missing_seqs(snapshot))):
            raise UnknownDamage(new_gaps)


def _missing_seqs(snapshot: Snapshot) -> list[Span]:
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
