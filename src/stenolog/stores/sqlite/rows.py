"""Sessions and keys as SQLite keeps them; stores/rows.py says what a row holds."""

import operator
from typing import TYPE_CHECKING

from stenolog.stores.damage import Damage
from stenolog.stores.rows import NO_END, Session, damaged, decode_state, past
from stenolog.stores.sqlite.queries import SQL

if TYPE_CHECKING:
    from stenolog.stores.sqlite.connections import Transaction


def find(transaction: "Transaction", namespace: str, key: str) -> Session | None:
    """The session that lives under this key. Raises DamagedStore."""
    try:
        for row in transaction.execute(SQL["find_session"], (namespace, key)):
            number, uid, created, updated, last_seq, size, fork_of, body = row
            state = decode_state(body, key)
            state.uid, state.created, state.forked_from = uid, created, fork_of
            return Session(number, updated, operator.index(last_seq), size, state)
    except (UnicodeDecodeError, TypeError) as error:
        raise damaged(key, error) from error
    return None


# --- keys ------------------------------------------------------------------------------------


def keys(
    transaction: "Transaction",
    namespace: str,
    damage: Damage,
    *,
    prefix: str,
    limit: int | None,
    after: str | None,
) -> list[str]:
    """A page of keys by their bytes, which is the order of their characters."""
    values = (namespace, prefix, after or "", -1 if limit is None else min(limit, NO_END))
    end = past(prefix)
    if end is None:
        found = transaction.execute(SQL["list_keys"], values)
    else:
        found = transaction.execute(SQL["list_keys_below"], (*values, end))
    try:
        return [key for (key,) in found]
    except UnicodeDecodeError:
        # A key is damaged, and is not to hide the others: the slow way.
        legible = stamps(transaction, namespace, damage)
        listed = sorted(key for key in legible if key.startswith(prefix) and key > (after or ""))
        return listed[:limit]


def stamps(transaction: "Transaction", namespace: str, damage: Damage) -> dict[str, str]:
    """For each session a mark that is another one after every change."""
    try:
        rows = transaction.execute(SQL["stamps"], (namespace,))
        return {key: f"{uid}:{version}" for key, uid, version in rows}
    except UnicodeDecodeError:
        rows = list(transaction.execute(SQL["raw_stamps"], (namespace,)))
    found: dict[str, str] = {}
    for key, uid, version in rows:
        try:
            found[key.decode()] = f"{uid.decode(errors='replace')}:{version}"
        except UnicodeDecodeError:
            damage.tell(f"the session with the key {key!r}")
    return found


def namespaces(transaction: "Transaction") -> list[str]:
    """The namespaces that have a life, be it a deleted one, in the order of their bytes."""
    found: list[str] = []
    last = ""
    while True:
        # One step in the index for each: there may be many sessions in a namespace.
        ((last,),) = transaction.execute(SQL["next_namespace"], (last,))
        if last is None:
            return found
        found.append(last)
