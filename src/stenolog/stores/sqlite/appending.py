"""Appending: seqs are taken from the session's row, and nothing else of it is read."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stenolog.errors import OnceConflict
from stenolog.records import State
from stenolog.stores.batches import Batch, token_bytes
from stenolog.stores.rows import encode, now
from stenolog.stores.sqlite.damage import checksum
from stenolog.stores.sqlite.queries import SQL
from stenolog.stores.state import blank

if TYPE_CHECKING:
    from stenolog.stores.sqlite.connections import Transaction

_TAKE_SEQS, _ADD_MESSAGE = SQL["take_seqs"], SQL["add_message"]


def append_one(transaction: "Transaction", namespace: str, key: str, payload: bytes) -> int:
    """One message with nothing special about it: the usual append, in its fewest steps; its seq."""
    at = now()
    found = list(transaction.execute(_TAKE_SEQS, (namespace, key, at, 1, len(payload))))
    if not found:
        return append(transaction, namespace, key, Batch((payload,)))
    [(session, seq)] = found
    transaction.execute(_ADD_MESSAGE, (session, seq, at, payload, checksum(payload, seq)))
    return int(seq)


def append(transaction: "Transaction", namespace: str, key: str, batch: Batch) -> int:
    """A batch; its first seq. Raises OnceConflict, and then nothing was written."""
    once, payloads = batch.once, batch.payloads
    if once is not None:
        known = _known(transaction, namespace, key, once, payloads)
        if known:
            return known
    at, count, size = now(), len(payloads), sum(map(len, payloads))
    found = list(transaction.execute(_TAKE_SEQS, (namespace, key, at, count, size)))
    if found:
        [(session, last)] = found
    else:
        state = blank(key, os.urandom(8).hex(), 1, at)
        session, last = create(transaction, namespace, state, count, size), count
    first: int = last - count + 1
    add_messages(transaction, session, first, payloads, batch.times or [at] * count)
    if once is not None:
        transaction.execute(SQL["add_token"], (session, token_bytes(once), first, count))
    return first


def add_messages(
    transaction: "Transaction",
    session: int,
    first: int,
    payloads: Sequence[bytes],
    times: Sequence[str],
) -> None:
    """Rows for messages whose seqs were taken already."""
    transaction.executemany(
        _ADD_MESSAGE,
        (
            (session, seq, at, payload, checksum(payload, seq))
            for seq, (at, payload) in enumerate(zip(times, payloads, strict=True), first)
        ),
    )


def create(
    transaction: "Transaction", namespace: str, state: State, last_seq: int, size: int
) -> int:
    """A new session under a key that is free; its id."""
    at = state.created
    [(session,)] = transaction.execute(
        SQL["add_session"],
        (namespace, state.key, state.uid, at, at, last_seq, size, state.forked_from),
    )
    transaction.execute(SQL["add_state"], (session, encode(state)))
    return int(session)


def _known(
    transaction: "Transaction", namespace: str, key: str, once: str, payloads: Sequence[bytes]
) -> int:
    """The first seq of what the session has under this token; 0 where it has nothing."""
    for session, first, count in transaction.execute(
        SQL["find_token"], (namespace, key, token_bytes(once))
    ):
        stored = transaction.execute(SQL["bodies"], (session, first, first + count - 1))
        if [body for (body,) in stored] != list(payloads):
            raise OnceConflict(key, once, first)
        return int(first)
    return 0
