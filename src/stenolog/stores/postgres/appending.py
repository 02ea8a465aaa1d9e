"""Appending, in one round trip: the lock of the session's row gives the seqs."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from stenolog.errors import DamagedStore, LeaseLost, OnceConflict
from stenolog.records import State
from stenolog.stores.batches import Batch, token_bytes
from stenolog.stores.postgres import schema
from stenolog.stores.rows import encode, now
from stenolog.stores.state import blank

if TYPE_CHECKING:
    from stenolog.stores.postgres.connections import Transaction


_TRIES: Final = 4
_TEXT, _BYTEA, _INT8 = 25, 17, 20
_TYPES: Final = (_TEXT, _BYTEA, _TEXT, _TEXT, _INT8, _INT8)
"""What the places of `append_one` hold, by the server's numbers."""


class Place(Struct, frozen=True, gc=False):
    """Where something is to be written, and behind which lease; 0 stands for none."""

    namespace: str
    key: str
    epoch: int = 0


class Absent(Exception):
    """There is no such session, or the tables are not those that this code knows."""


def joined(batches: Sequence[Batch]) -> Batch:
    """Batches without tokens as one; a single one as it is."""
    if len(batches) == 1:
        return batches[0]
    at = now()
    return Batch(
        [payload for batch in batches for payload in batch.payloads],
        None,
        [time for batch in batches for time in batch.times or [at] * len(batch.payloads)],
    )


def append_one(transaction: "Transaction", place: Place, payload: bytes) -> int:
    """One message with nothing special about it: the usual append; its seq. Raises Absent."""
    namespace, key, at, size, format = (
        place.namespace,
        place.key.encode(),
        now(),
        len(payload),
        schema.newest(),
    )
    if transaction.peer.pooled:
        for (seq,) in transaction.run(
            "append_one", namespace, key, at, payload.decode(), size, format
        ):
            return int(seq)
        raise Absent
    found = transaction.run_ready(
        "append_one",
        _TYPES,
        (namespace.encode(), key, at.encode(), payload, _int8(size), _int8(format)),
    )
    if found is None:
        raise Absent
    return int.from_bytes(found, "big")


def _int8(number: int) -> bytes:
    return number.to_bytes(8, "big")


def append(transaction: "Transaction", place: Place, batch: Batch) -> int:
    """A batch; its first seq. Raises OnceConflict, LeaseLost, Absent; then nothing was written."""
    at, payloads, once = now(), batch.payloads, batch.once
    [(first, session, known, count, fence)] = transaction.run(
        "append",
        place.namespace,
        place.key.encode(),
        at,
        [payload.decode() for payload in payloads],
        list(batch.times or [at] * len(payloads)),
        sum(map(len, payloads)),
        schema.newest(),
        None if once is None else token_bytes(once),
        place.epoch or None,
    )
    if known is not None:
        assert once is not None, "only a token can be known"
        stored = transaction.run("bodies", session, known, known + count - 1)
        if [body.encode() for (body,) in stored] != list(payloads):
            raise OnceConflict(place.key, once, known)
        return int(known)
    if place.epoch and not fence:
        raise LeaseLost(place.key, place.epoch)
    if first is None:
        raise Absent
    return int(first)


def append_anew(transaction: "Transaction", place: Place, batch: Batch) -> int:
    """The same where there may be no session yet; inside of a transaction."""
    for _ in range(_TRIES):
        try:
            return append(transaction, place, batch)
        except Absent:
            # Whoever is quicker makes it, and this one waits for the end of that.
            state = blank(place.key, os.urandom(8).hex(), 1, now())
            create(transaction, place.namespace, state, 0, 0)
    raise DamagedStore(f"{place.key!r}: its row is not of the version of the tables")


def create(
    transaction: "Transaction", namespace: str, state: State, last_seq: int, size: int
) -> int:
    """A new session under a key that is free; its id, or 0 where somebody was quicker.

    Raises NewerFormat.
    """
    fork_of = state.forked_from
    for (session,) in transaction.run(
        "add_session",
        namespace,
        state.key.encode(),
        state.uid,
        state.created,
        last_seq,
        size,
        None if fork_of is None else fork_of.encode(),
        encode(state).decode(),
        schema.newest(),
    ):
        return int(session)
    check_format(transaction)
    return 0


def check_format(transaction: "Transaction") -> None:
    """Raise NewerFormat where the tables were changed by newer code."""
    [(version,)] = transaction.run("format")
    schema.check_version(version)


def add_messages(
    transaction: "Transaction",
    session: int,
    first: int,
    payloads: Sequence[bytes],
    times: Sequence[str],
) -> None:
    """Rows for messages whose seqs were taken already."""
    if payloads:
        bodies = [payload.decode() for payload in payloads]
        transaction.run("add_messages", session, first, list(times), bodies)
