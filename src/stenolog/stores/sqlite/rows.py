"""Rows ↔ values: a session with its state."""

import json
import operator
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from msgspec import Struct

from stenolog.errors import DamagedStore
from stenolog.records import Change, State, timestamp
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.sqlite.damage import Damage
from stenolog.stores.sqlite.queries import SQL

if TYPE_CHECKING:
    from stenolog.stores.sqlite.connections import Transaction

NO_END: Final = (1 << 63) - 1
"""Past every seq."""

_encode = msgspec.json.Encoder().encode
T = TypeVar("T", State, Change)


class Session(Struct):
    """One life of a session as a transaction finds it."""

    id: int
    """0: it is not there yet."""
    updated: str
    last_seq: int
    bytes: int
    """How much the messages take that are not archived."""
    state: State


_second = (0, "")  # the second that was spelled out last: most appends fall into the same one


def now() -> str:
    """The present moment, as it is written."""
    global _second
    seconds, micros = divmod(time.time_ns() // 1000, 1_000_000)
    known, text = _second
    if known != seconds:
        text = timestamp(datetime.fromtimestamp(seconds, UTC))[:-8]
        _second = (seconds, text)
    return f"{text}.{micros:06d}Z"


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


# --- states and changes ----------------------------------------------------------------------


def encode(value: State | Change) -> bytes:
    """A state or a change as JSON. What stands in columns of its own is not said twice."""
    if isinstance(value, State):
        value = msgspec.structs.replace(value, key="", uid="", created="", forked_from=None)
    try:
        return _encode(value)
    except (UnicodeEncodeError, TypeError):
        # Lone surrogates, and subclasses of text.
        return json.dumps(msgspec.to_builtins(value), separators=(",", ":")).encode()


def decode_state(body: bytes, key: str) -> State:
    """The state of this session, but for what stands in columns. Raises DamagedStore."""
    state = _decode(body, State, key)
    state.key = key
    return state


def decode_change(body: bytes, key: str) -> Change:
    """A change of this session. Raises DamagedStore."""
    return _decode(body, Change, key)


def _decode(body: bytes, kind: type[T], key: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise damaged(key, error) from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        # A lone surrogate is written as an escape, which only the slower decoder takes.
        return msgspec.convert(json.loads(body), kind)
    except (ValueError, msgspec.ValidationError) as error:
        raise damaged(key, error) from error


def damaged(key: str, error: Exception) -> DamagedStore:
    """What is said of a session that cannot be read."""
    return DamagedStore(
        f"{key!r}: its state cannot be read ({error}); `steno doctor` says what is wrong"
    )


def count(state: State, last_seq: int) -> int:
    """How many messages there are."""
    return spans.size(states.present(state, last_seq))


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
    end = _past(prefix)
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


def _past(prefix: str) -> str | None:
    """The least text above all that begin like this; None where nothing is."""
    while prefix:
        code = ord(prefix[-1])
        if code < 0x10FFFF:
            # The codes of surrogates are no characters.
            return prefix[:-1] + chr(0xE000 if code == 0xD7FF else code + 1)
        prefix = prefix[:-1]
    return None


def namespaces(transaction: "Transaction") -> list[str]:
    """The namespaces that have sessions, in the order of their bytes."""
    found: list[str] = []
    last = ""
    while True:
        # One step in the index for each: there may be many sessions in a namespace.
        ((last,),) = transaction.execute(SQL["next_namespace"], (last,))
        if last is None:
            return found
        found.append(last)
