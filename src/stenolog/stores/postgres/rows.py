"""Sessions and keys as PostgreSQL keeps them; stores/rows.py says what a row holds."""

import hashlib
from typing import TYPE_CHECKING

from stenolog.stores.postgres.schema import check_version
from stenolog.stores.rows import NO_END, Session, decode_state, past

if TYPE_CHECKING:
    from stenolog.stores.postgres.connections import Transaction


class Clash(Exception):
    """Somebody else stored the same at the same moment, where it can stand once only."""


def name_of(namespace: str, key: str) -> str:
    """What a session is called in a notification, which takes few letters."""
    text = f"{namespace}\0{key}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def copied_mark(uid: str) -> str:
    """The mark that says in which version a copy left a life."""
    return f"copied:{uid}"


def find(
    transaction: "Transaction", namespace: str, key: str, *, lock: bool = False
) -> Session | None:
    """The session that lives under this key. Raises NewerFormat, DamagedStore.

    `lock`: nobody else changes it before the transaction has ended.
    """
    name = "lock_session" if lock else "find_session"
    for row in transaction.run(name, namespace, key.encode()):
        number, uid, created, updated, last_seq, size, fork_of, body, version = row
        check_version(version)
        state = decode_state(body.encode(), key)
        state.uid, state.created = uid, created
        state.forked_from = None if fork_of is None else fork_of.decode()
        return Session(number, updated, last_seq, size, state)
    return None


def keys(
    transaction: "Transaction", namespace: str, *, prefix: str, limit: int | None, after: str | None
) -> list[str]:
    """A page of keys by their bytes."""
    end = past(prefix)
    found = transaction.run(
        "list_keys",
        namespace,
        prefix.encode(),
        (after or "").encode(),
        None if end is None else end.encode(),
        NO_END if limit is None else min(limit, NO_END),
    )
    return [key.decode() for (key,) in found]


def stamps(transaction: "Transaction", namespace: str) -> dict[str, str]:
    """For each session a mark that is another one after every change."""
    rows = transaction.run("stamps", namespace)
    return {key.decode(): f"{uid}:{version}" for key, uid, version in rows}
