"""Values in database rows: sessions, states, changes, times and keys. No access to the database."""

import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from stenolog.errors import DamagedStore
from stenolog.records import Change, SessionInfo, Span, State, Undo, timestamp
from stenolog.stores import spans
from stenolog.stores import state as states
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


_cached_second = 0, ""  # the last second and its text: the next append is usually in that second


def now() -> str:
    """Return the current time as the text that is stored in rows."""
    global _cached_second
    seconds, micros = divmod(time.time_ns() // 1000, 1_000_000)
    cached_seconds, date_and_time = _cached_second
    if cached_seconds != seconds:
        date_and_time = timestamp(datetime.fromtimestamp(seconds, UTC))[:-8]
        _cached_second = (seconds, date_and_time)
    return f"{date_and_time}.{micros:06d}Z"


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
    encoded: bytes | None, key: str, *, uid: str, changes: Callable[[], Iterable[tuple[int, bytes]]]
) -> State:
    """Return the state of a session; rebuild a damaged state from the session's changes.

    `changes` returns number and JSON of each recorded change, in order of the numbers.
    """
    stored_state = _intact_state(encoded, key)
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
    for number, encoded_change in changes:
        newest_number = max(newest_number, number)
        with suppress(DamagedStore):
            readable_changes.append(_decode(encoded_change, Change, key))
    states.replay_changes(state, readable_changes)  # guard: rebuild-damaged-state
    state.number = max(state.number, newest_number)
    return state


def _intact_state(encoded: bytes | None, key: str) -> State | None:
    """Return the decoded state; None if `encoded` is missing or damaged.

    Of the values that have their own columns, only the key is set.
    """
    if encoded is not None:
        with suppress(DamagedStore):
            state = _decode(encoded, State, key)
            state.key = key
            return state
    return None


class StateCheck(Struct, frozen=True):
    """Result of `check_state`."""

    state: State
    """The stored state, or the rebuilt state if the stored state is damaged."""
    is_rebuilt: bool
    damaged_change_numbers: list[int]
    """Numbers of unreadable changes that undo needs."""


def check_state(
    encoded: bytes | None, key: str, changes: Callable[[], Iterable[tuple[int, bytes]]]
) -> StateCheck:
    """Examine a state and the changes that undo needs. `changes`: see `read_state`."""
    stored_state = _intact_state(encoded, key)
    encoded_changes: dict[int, bytes] = {}
    if stored_state is None or any(step.elsewhere for step in stored_state.undo):
        encoded_changes = dict(changes())
    state = rebuilt_state(key, encoded_changes.items()) if stored_state is None else stored_state
    damaged_change_numbers = []
    for step in state.undo:
        candidates = [encoded_changes[step.number]] if step.number in encoded_changes else []
        try:
            if step.elsewhere:
                undo_step_from_changes(candidates, key, step)
        except DamagedStore:
            damaged_change_numbers.append(step.number)
    return StateCheck(state, stored_state is None, damaged_change_numbers)


def readable_undo_steps(state: State, complete_step: Callable[[Undo], Undo]) -> list[Undo]:
    """Return the complete undo steps after the last damaged step.

    Steps are undone newest first, so no step before a damaged step can be undone.
    """
    steps: list[Undo] = []
    for step in state.undo:
        try:
            steps.append(complete_step(step))
        except DamagedStore:
            steps = []
    return steps


def undo_step_from_changes(encoded_changes: Iterable[bytes], key: str, step: Undo) -> Undo:
    """Return the undo step of the first readable change. Raises DamagedStore if there is none."""
    for encoded_change in encoded_changes:
        with suppress(DamagedStore):
            return states.undo_step_of(_decode(encoded_change, Change, key))
    raise DamagedStore(
        f"{key!r}: change {step.number} is damaged and cannot be undone; run `steno doctor`"
    )


def _decode(encoded: bytes, record_type: type[T], key: str) -> T:
    try:
        return msgspec.json.decode(encoded, type=record_type)
    except msgspec.ValidationError as error:
        raise damage_error(key, error) from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        # A lone surrogate is stored as an escape, which only the slower decoder accepts.
        return msgspec.convert(json.loads(encoded), record_type)
    except (ValueError, msgspec.ValidationError) as error:
        raise damage_error(key, error) from error


def damage_error(key: str, error: Exception) -> DamagedStore:
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
    parsed_time = parse_iso(text if isinstance(text, str) else text.decode())
    if parsed_time.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return parsed_time


def deletion_time(earlier_times: Iterable[str]) -> str:
    """Return the time for a deletion: now, or later than all earlier deletions of the key.

    The last deleted session of a key thus has the latest time, even if the clock was set back.
    """
    current_time = now()
    latest_time = max(earlier_times, default="")
    if latest_time >= current_time:
        with suppress(ValueError, OverflowError):  # the row is damaged
            return timestamp(parse_time(latest_time) + timedelta(microseconds=1))
    return current_time


def prefix_end(prefix: str) -> str | None:
    """Return the smallest text above all texts with this prefix; None if no text is greater."""
    while prefix:
        code_point = ord(prefix[-1])
        if code_point < 0x10FFFF:
            # Skip surrogates, which are not characters.
            return prefix[:-1] + chr(0xE000 if code_point == 0xD7FF else code_point + 1)
        prefix = prefix[:-1]
    return None


def session_info(session: Session, damaged_seqs: list[Span]) -> SessionInfo:
    """Return the SessionInfo of a session with these damaged messages. Raises DamagedStore."""
    last_seq = session.last_seq
    # A message counts as lost if it was lost before a copy, or is damaged in this database.
    lost = spans.union(session.state.lost, damaged_seqs)
    state = session.state if not damaged_seqs else msgspec.structs.replace(session.state, lost=lost)
    try:
        stored_times = parse_time(state.created), parse_time(session.updated)
    except ValueError as error:
        raise damage_error(state.key, error) from error
    return states.session_info(
        state,
        last_seq,
        times=stored_times,
        lost=lost,
        count=message_count(state, last_seq),
        size=session.bytes,
        damaged=spans.size(damaged_seqs),
    )
