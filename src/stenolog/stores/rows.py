"""A session as a row of a database: what stands in it, as values. Pure, for every engine."""

import json
import time
from datetime import UTC, datetime
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from stenolog.errors import DamagedStore
from stenolog.records import Change, SessionInfo, Span, State, timestamp
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.times import conversation_times

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


# --- times and keys ---------------------------------------------------------------------------

read_time = datetime.fromisoformat
"""`read_time(at).tzinfo`, without a call of ours for each message that is read: None or ValueError
where a time is damaged."""


def moment(text: str | bytes) -> datetime:
    """The time that was written like this. Raises ValueError, UnicodeDecodeError among them."""
    found = read_time(text if isinstance(text, str) else text.decode())
    if found.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return found


def past(prefix: str) -> str | None:
    """The least text above all that begin like this; None where nothing is."""
    while prefix:
        code = ord(prefix[-1])
        if code < 0x10FFFF:
            # The codes of surrogates are no characters.
            return prefix[:-1] + chr(0xE000 if code == 0xD7FF else code + 1)
        prefix = prefix[:-1]
    return None


def info(session: Session, met: list[Span]) -> SessionInfo:
    """What is known of the session, of which these seqs were met damaged. Raises DamagedStore."""
    end = session.last_seq
    # What a copy says was lost elsewhere, and what was met here.
    lost = spans.union(session.state.lost, met)
    state = session.state if not met else msgspec.structs.replace(session.state, lost=lost)
    try:
        stored = moment(state.created), moment(session.updated)
    except ValueError as error:
        raise damaged(state.key, error) from error
    created, updated = conversation_times(
        *stored,
        meta={} if state.forked_from is not None else state.meta,
        last_seq=end,
    )
    sight = states.visible(state, end)
    return SessionInfo(
        key=state.key,
        uid=state.uid,
        created=created,
        updated=updated,
        last_seq=end,
        floor=state.floor,
        visible=spans.size(sight),
        count=count(state, end),
        lost=spans.size(lost),
        damaged=spans.size(met),
        void_bytes=0,
        archived=states.archived_upto(state),
        generation=state.generation,
        bytes=session.bytes,
        undoable=len(state.undo),
        summary=state.summary,
        meta=state.meta,
        forked_from=state.forked_from,
        in_sight=tuple(sight),
    )
