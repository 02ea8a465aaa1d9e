"""Values in database rows: sessions, states, changes, times and keys. Pure functions."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from stenolog.errors import DamagedStore
from stenolog.records import Change, SessionInfo, Span, State, Undo, timestamp
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.base import conversation_times
from stenolog.stores.log_reports import DamageReports

MAX_SEQ: Final = (1 << 63) - 1
"""A number greater than every seq."""

_encode = msgspec.json.Encoder().encode
T = TypeVar("T", State, Change)

_reported_damage = DamageReports()
"""Damaged session states that this process has already reported."""


class Session(Struct):
    """A session, as read in a transaction."""

    id: int
    """Row id; 0 if the session does not exist yet."""
    updated: str
    last_seq: int
    bytes: int
    """Size of the messages that are not archived."""
    state: State


_last_second = 0, ""  # cached: the next append is usually in the same second


def now() -> str:
    """Return the current time as the text that is stored in rows."""
    global _last_second
    seconds, micros = divmod(time.time_ns() // 1000, 1_000_000)
    cached_seconds, text = _last_second
    if cached_seconds != seconds:
        text = timestamp(datetime.fromtimestamp(seconds, UTC))[:-8]
        _last_second = (seconds, text)
    return f"{text}.{micros:06d}Z"


# --- states and changes ----------------------------------------------------------------------


def encode(value: State | Change) -> bytes:
    """Encode a state or a change as JSON, without the values that have their own columns."""
    if isinstance(value, State):
        value = msgspec.structs.replace(value, key="", uid="", created="", forked_from=None)
    try:
        return _encode(value)
    except (UnicodeEncodeError, TypeError):
        # The encoder of msgspec rejects lone surrogates and subclasses of str.
        return json.dumps(msgspec.to_builtins(value), separators=(",", ":")).encode()


def read_state(
    body: bytes | None, key: str, *, uid: str, changes: Callable[[], Iterable[tuple[int, bytes]]]
) -> State:
    """Return the state of a session; rebuild a damaged state from the session's changes.

    `changes` returns number and body of each recorded change, in order of the numbers.
    """
    stored_state = _intact_state(body, key)
    if stored_state is not None:
        return stored_state
    state = rebuilt_state(key, changes())
    _reported_damage.report_once(
        f"the state of session {uid} ({key!r})", action_taken="rebuilt from its changes"
    )
    return state


def rebuilt_state(key: str, changes: Iterable[tuple[int, bytes]]) -> State:
    """Return the state that results from the recorded changes; damaged changes are skipped."""
    state = states.blank_state(key, "", 1, "")
    readable_changes, newest_number = [], 0
    for number, body in changes:
        newest_number = max(newest_number, number)
        with suppress(DamagedStore):
            readable_changes.append(_decode(body, Change, key))
    states.replay_changes(state, readable_changes)  # guard: rebuild-damaged-state
    state.number = max(state.number, newest_number)
    return state


def _intact_state(body: bytes | None, key: str) -> State | None:
    """Return the decoded state; None if the body is missing or damaged.

    Values that have their own columns are not set, except the key.
    """
    if body is not None:
        with suppress(DamagedStore):
            state = _decode(body, State, key)
            state.key = key
            return state
    return None


class StateCheck(Struct, frozen=True):
    """Result of examining a state and the changes that undo needs."""

    state: State
    """The stored state, or the rebuilt state if the stored state is damaged."""
    is_rebuilt: bool
    damaged_steps: list[int]
    """Numbers of unreadable changes that undo needs."""


def check_state(
    body: bytes | None, key: str, changes: Callable[[], Iterable[tuple[int, bytes]]]
) -> StateCheck:
    """Examine the state of a session. `read_state` describes the argument `changes`."""
    stored_state = _intact_state(body, key)
    bodies_by_number: dict[int, bytes] = {}
    if stored_state is None or any(entry.elsewhere for entry in stored_state.undo):
        bodies_by_number = dict(changes())
    state = rebuilt_state(key, bodies_by_number.items()) if stored_state is None else stored_state
    damaged_steps = []
    for entry in state.undo:
        bodies = [bodies_by_number[entry.number]] if entry.number in bodies_by_number else []
        try:
            if entry.elsewhere:
                undo_step_from(bodies, key, entry)
        except DamagedStore:
            damaged_steps.append(entry.number)
    return StateCheck(state, stored_state is None, damaged_steps)


def repaired_state(
    check: StateCheck, body: bytes | None, *, last_seq: int, seqs: Iterable[int]
) -> tuple[State, Change]:
    """Return the state without damaged undo steps, and a change that records the repair.

    The change contains the damaged bytes, so that the repair destroys nothing. A rebuilt state does
    not know which messages were purged: messages without a row count as purged.
    """
    state = states.copy_state(check.state)
    if check.is_rebuilt:
        present_spans = spans.union((seq, seq) for seq in seqs)
        state.purged = spans.minus([(1, last_seq)], present_spans) if last_seq > 0 else []
    last_damaged = max(check.damaged_steps, default=0)
    state.undo = [entry for entry in state.undo if entry.number > last_damaged]
    damaged_body = (
        body.decode(errors="backslashreplace") if check.is_rebuilt and body is not None else None
    )
    change = Change(
        op="repair",
        number=state.number + 1,
        floor=state.floor,
        hidden=state.hidden,
        summary=state.summary,
        meta=state.meta,
        was=damaged_body,
    )
    states.apply_change(state, change)
    return state, change


def readable_undo_steps(state: State, complete_step: Callable[[Undo], Undo]) -> list[Undo]:
    """Return the complete undo steps after the last damaged step.

    Steps are undone newest first, so no step before a damaged step can be undone.
    """
    steps: list[Undo] = []
    for entry in state.undo:
        try:
            steps.append(complete_step(entry))
        except DamagedStore:
            steps = []
    return steps


def undo_step_from(bodies: Iterable[bytes], key: str, entry: Undo) -> Undo:
    """Complete an undo step from its change. Raises DamagedStore."""
    for body in bodies:
        with suppress(DamagedStore):
            return states.undo_step_of(_decode(body, Change, key))
    raise DamagedStore(
        f"{key!r}: change {entry.number} is damaged and cannot be undone; run `steno doctor`"
    )


def _decode(body: bytes, kind: type[T], key: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise damaged_session(key, error) from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        # A lone surrogate is stored as an escape, which only the slower decoder accepts.
        return msgspec.convert(json.loads(body), kind)
    except (ValueError, msgspec.ValidationError) as error:
        raise damaged_session(key, error) from error


def damaged_session(key: str, error: Exception) -> DamagedStore:
    """Return the error for a session that cannot be read."""
    return DamagedStore(
        f"{key!r}: its state cannot be read ({error}); run `steno doctor` for details"
    )


def message_count(state: State, last_seq: int) -> int:
    """Return the number of messages, visible or hidden."""
    return spans.size(states.present_seqs(state, last_seq))


# --- times and keys ---------------------------------------------------------------------------

# `parse_iso(at).tzinfo` checks a stored time without another Python call per message.
# For a damaged time, `tzinfo` is None or `parse_iso` raises ValueError.
parse_iso = datetime.fromisoformat
"""Function that parses an ISO time."""


def parse_time(text: str | bytes) -> datetime:
    """Parse a stored time. Raises ValueError, which includes UnicodeDecodeError."""
    moment = parse_iso(text if isinstance(text, str) else text.decode())
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return moment


def deletion_time(earlier_times: Iterable[str | bytes]) -> str:
    """Return the time for a deletion: now, or later than all earlier deletions of the key.

    The last deleted session of a key thus has the latest time, even if the clock was set back.
    """
    at = now()
    with suppress(ValueError, OverflowError):
        newest = max(_parsed_times(earlier_times), default=None)
        if newest is not None and newest >= parse_time(at):
            return timestamp(newest + timedelta(microseconds=1))
    return at


def _parsed_times(times: Iterable[str | bytes]) -> Iterator[datetime]:
    for text in times:
        with suppress(ValueError):
            yield parse_time(text).astimezone(UTC)


def prefix_end(prefix: str) -> str | None:
    """Return the smallest text above all texts with this prefix; None if no text is greater."""
    while prefix:
        code = ord(prefix[-1])
        if code < 0x10FFFF:
            # Skip surrogates, which are not characters.
            return prefix[:-1] + chr(0xE000 if code == 0xD7FF else code + 1)
        prefix = prefix[:-1]
    return None


def session_info(session: Session, damaged_seqs: list[Span]) -> SessionInfo:
    """Return the SessionInfo of a session with these damaged messages. Raises DamagedStore."""
    end = session.last_seq
    # A message counts as lost if it was lost before a copy, or is damaged in this database.
    lost = spans.union(session.state.lost, damaged_seqs)
    state = session.state if not damaged_seqs else msgspec.structs.replace(session.state, lost=lost)
    try:
        stored_times = parse_time(state.created), parse_time(session.updated)
    except ValueError as error:
        raise damaged_session(state.key, error) from error
    created, updated = conversation_times(
        *stored_times, meta={} if state.forked_from is not None else state.meta, last_seq=end
    )
    visible = states.visible_seqs(state, end)
    return SessionInfo(
        key=state.key,
        uid=state.uid,
        created=created,
        updated=updated,
        last_seq=end,
        floor=state.floor,
        visible=spans.size(visible),
        count=message_count(state, end),
        lost=spans.size(lost),
        damaged=spans.size(damaged_seqs),
        void_bytes=0,
        archived=states.archived_upto(state),
        generation=state.generation,
        bytes=session.bytes,
        undoable=len(state.undo),
        summary=state.summary,
        meta=state.meta,
        forked_from=state.forked_from,
        in_sight=tuple(visible),
        change=state.number,
    )
