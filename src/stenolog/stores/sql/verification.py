"""Finds damage in the sessions of a database, for `steno doctor`."""

import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final

from stenolog.errors import DamagedStore, ForeignLog, NewerFormat
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.admin import Finding
from stenolog.stores.sql.dialect import Database, Transaction
from stenolog.stores.sql.rows import check_state, parse_time
from stenolog.stores.sql.session_rows import (
    decode_text,
    printable_text,
    recorded_changes,
    to_bytes,
)

_TEXT_COLUMNS: Final = ("key", "uid", "namespace", "fork_of")
_TIME_COLUMNS: Final = ("created", "updated", "deleted")
"""Columns with a time, which the statement `every_session` returns after `_TEXT_COLUMNS`."""


_RESTORE_ADVICE: Final = (
    "Restore the database from a backup, or save the readable messages with `steno export`."
)


def damaged_database_finding(meaning: str) -> Finding:
    """Return the finding for damage outside the sessions."""
    return Finding(kind="damaged database", meaning=meaning, advice=_RESTORE_ADVICE)


def stray_row_finding(place: str, meaning: str) -> Finding:
    """Return the finding for rows that belong to no session."""
    return Finding(kind="stray row", where=place, meaning=meaning, advice=_RESTORE_ADVICE)


def opening_error_finding(error: DamagedStore) -> Finding:
    """Return the finding for a database that cannot be opened."""
    if isinstance(error, ForeignLog):
        return Finding(kind="foreign file", meaning=str(error), advice="Name another file.")
    if isinstance(error, NewerFormat):
        return Finding(kind="newer format", meaning=str(error), advice="Upgrade stenolog.")
    return damaged_database_finding(str(error))


def examine_database(database: Database) -> tuple[int, list[Finding]]:
    """Return the number of sessions and the findings. Raises DamagedStore, StoreUnavailable."""
    with database.read_transaction() as transaction:
        findings = list(database.find_damage(transaction))
        sessions = transaction.run("every_session")
        for session_id, last_seq, encoded_state, *columns in sessions:
            texts = dict(zip(_TEXT_COLUMNS + _TIME_COLUMNS, columns, strict=True))
            key, place = printable_text(texts["key"]), f"session {printable_text(texts['uid'])}"
            findings += _examine_texts(key, place, texts)
            row = session_id, key, last_seq, encoded_state
            findings += examine_session(transaction, *row, place=place)
    return len(sessions), findings


def _examine_texts(
    key: str, place: str, texts: Mapping[str, str | bytes | None]
) -> Iterator[Finding]:
    for column, value in texts.items():
        try:
            if value is not None and column in _TIME_COLUMNS:
                parse_time(value)
            elif value is not None:
                decode_text(value)
        except ValueError:
            yield Finding(
                kind="damaged session",
                key=key,
                where=place,
                meaning=f"Its {column} cannot be read: {printable_text(value)!r}.",
                advice=_RESTORE_ADVICE,
            )


def examine_session(
    transaction: Transaction,
    session_id: int,
    key: str,
    last_seq: int,
    encoded_state: str | bytes | None,
    *,
    place: str = "",
) -> Iterator[Finding]:
    """Yield the findings in the state, changes and messages of a session."""
    state_bytes = None if encoded_state is None else to_bytes(encoded_state)
    check = check_state(state_bytes, key, partial(recorded_changes, transaction, session_id))
    state = check.state
    finding = partial(Finding, key=key, where=place)
    if check.is_rebuilt:
        yield finding(
            kind="damaged state",
            meaning="The state of the session (hidden messages, summary, meta) cannot be read. Its "
            "messages can be read. The state is rebuilt from the recorded changes.",
            advice="The next change of the session stores the rebuilt state. To save the messages "
            f"first: `steno export {shlex.quote(key)}`.",
        )
    if check.damaged_change_numbers:
        numbers = ", ".join(map(str, check.damaged_change_numbers))
        yield finding(
            kind="damaged change",
            meaning=f"Undo needs change {numbers}, which cannot be read. No message is missing.",
            advice="Nothing to do. The newer changes can be undone.",
        )
    stored_seqs = spans.from_seqs(seq for (seq,) in transaction.run("seqs", session_id))
    assigned_seqs = spans.clipped(stored_seqs, 1, last_seq)
    intact_seqs = spans.from_seqs(
        seq
        for first, last in assigned_seqs
        for seq, _, _ in transaction.intact_messages(session_id, first, last)
    )
    damaged_seqs = spans.minus(assigned_seqs, intact_seqs)
    missing_seqs = spans.minus(states.present_seqs(state, last_seq), assigned_seqs)
    if check.is_rebuilt:
        missing_seqs = []  # messages without a row may have been purged
    if state.lost:
        yield finding(
            kind="lost message",
            meaning=f"{spans.size(state.lost):,} messages were already damaged when the session "
            "was copied.",
            advice="Run `steno doctor` on the store it was copied from, then copy it again.",
            lost=tuple(state.lost),
        )
    for kind, lost in (
        ("missing message", missing_seqs),
        ("damaged message", damaged_seqs),
    ):
        if lost:
            meaning = f"{spans.size(lost):,} messages cannot be read."
            yield finding(kind=kind, meaning=meaning, advice=_RESTORE_ADVICE, lost=tuple(lost))
    if stray_count := spans.size(stored_seqs) - spans.size(assigned_seqs):
        meaning = f"{stray_count:,} messages have a seq above the last seq, {last_seq:,}."
        yield finding(kind="stray row", meaning=meaning, advice=_RESTORE_ADVICE)
