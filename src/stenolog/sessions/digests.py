"""What two lives of a session are compared by: a sha256 of all that is carried. Pure.

Equal digests mean equal messages with their seqs, times and tokens, equal state, equal undo steps,
and the same place, among the living or in the trash. They do not depend on the engine.
"""

import json
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from stenolog.records import Message, Span
from stenolog.stores import spans
from stenolog.stores.whole import Life, Reading, token_of

if TYPE_CHECKING:
    from hashlib import _Hash

_FORM: Final = b"stenolog life 1\n"
"""The form in which a life is digested: another one must not give equal digests."""


class NewlyLost(Exception):
    """Messages that should have come by did not: they are damaged, and nobody knew."""

    def __init__(self, seqs: list[Span]) -> None:
        self.seqs = seqs
        super().__init__(f"damaged: {seqs}")


class MessagesDigest:
    """Grows with each message, in the order of their seqs."""

    __slots__ = ("_hash", "bytes", "messages")

    def __init__(self) -> None:
        self._hash: _Hash = sha256(_FORM)
        self.messages = 0
        """How many went in."""
        self.bytes = 0
        """How long their bodies were."""

    def add(self, message: Message) -> None:
        """One more."""
        body = message.to_json()
        token = b""
        if message._once is not None and (found := token_of(message)) is not None:
            token = json.dumps(found).encode()
        self._hash.update(b"%d %b %b %d\n" % (message.seq, message._at.encode(), token, len(body)))
        self._hash.update(body)
        self.messages += 1
        self.bytes += len(body)

    def copy(self) -> "MessagesDigest":
        """One that goes on from here by itself."""
        twin = MessagesDigest()
        twin._hash, twin.messages, twin.bytes = self._hash.copy(), self.messages, self.bytes
        return twin

    def with_life(self, life: Life) -> str:
        """The digest of a life that has these messages."""
        whole = self._hash.copy()
        whole.update(canonical(life))
        return whole.hexdigest()

    def passing(
        self, life: Life, messages: Iterable[Message], *, after: int = 0
    ) -> Iterator[Message]:
        """The messages of a life past a seq, taken in as they go by. Raises NewlyLost."""
        expected, gaps, add = after + 1, list[Span](), self.add
        for message in messages:
            if message.seq != expected:
                gaps.append((expected, message.seq - 1))
            expected = message.seq + 1
            add(message)
            yield message
        if expected <= life.last_seq:
            gaps.append((expected, life.last_seq))
        if gaps and (new := spans.minus(gaps, missing(life))):
            raise NewlyLost(new)


def missing(life: Life) -> list[Span]:
    """The seqs of a life that have no message, and are known not to."""
    return spans.union(life.lost, life.void, life.purged)


def canonical(life: Life) -> bytes:
    """A life as the bytes that are digested. What an engine may not keep is not among them."""
    fields: dict[str, Any] = msgspec.to_builtins(life)
    fields["tokens"] = [(token.token, token.first, token.count) for token in life.tokens]
    # Escapes, because a text may hold lone surrogates.
    return json.dumps(fields, separators=(",", ":")).encode()


def of_many(digests: Iterable[tuple[str, str, str]]) -> str:
    """One digest for many lives, given as namespace, uid and digest."""
    lines = [json.dumps(one) for one in digests]
    return sha256("\n".join(sorted(lines)).encode()).hexdigest()


def digest_of(reading: Reading) -> str:
    """The digest of a life that is looked at, from its first message on.

    What is found to be damaged on the way is lost, whatever the store knew of it.
    """
    digest = MessagesDigest()
    lost: list[Span] = []
    try:
        for _ in digest.passing(reading.life, reading.messages):
            pass
    except NewlyLost as met:
        lost = met.seqs
    whole = spans.union(reading.life.lost, lost)
    return digest.with_life(replace(reading.life, lost=whole) if lost else reading.life)
