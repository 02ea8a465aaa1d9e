"""Finds and repairs damage in the sessions of a database, for `steno doctor`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Final

from stenolog.errors import StenologError
from stenolog.records import Span
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.findings import (
    Finding,
    RepairResult,
    damaged_changes,
    damaged_state,
    lost_before,
    past_the_end,
    unreadable,
)
from stenolog.stores.sql.changes import add_change
from stenolog.stores.sql.dialect import Transaction
from stenolog.stores.sql.rows import Session, check_state, encode, parse_time, repaired_state
from stenolog.stores.sql.session_rows import decode_text, printable_text, recorded_changes, to_bytes

_TEXT_COLUMNS: Final = ("key", "uid", "namespace", "fork_of")
_TIME_COLUMNS: Final = ("created", "updated", "deleted")
"""Text columns of a session in the order of the statement; columns with times are last."""


def examine_sessions(transaction: Transaction, *, advice: str) -> tuple[int, list[Finding]]:
    """Return the number of sessions and the findings. `advice`: advice for lost data."""
    findings: list[Finding] = []
    sessions = transaction.run("every_session")
    for number, last_seq, body, *columns in sessions:
        texts = dict(zip(_TEXT_COLUMNS + _TIME_COLUMNS, columns, strict=True))
        key, where = printable_text(texts["key"]), f"session {printable_text(texts['uid'])}"
        findings += _examine_texts(key, where, texts, advice)
        findings += _examine_session(
            transaction,
            number,
            where,
            key,
            last_seq,
            None if body is None else to_bytes(body),
            advice,
        )
    return len(sessions), findings


def _examine_texts(
    key: str, where: str, texts: Mapping[str, str | bytes | None], advice: str
) -> Iterator[Finding]:
    for name, value in texts.items():
        try:
            if value is not None and name in _TIME_COLUMNS:
                parse_time(value)
            elif value is not None:
                decode_text(value)
        except ValueError:
            yield Finding(
                kind="damaged session",
                key=key,
                where=where,
                meaning=f"Its {name} cannot be read: {printable_text(value)!r}.",
                advice=advice,
            )


def _examine_session(
    transaction: Transaction,
    number: int,
    where: str,
    key: str,
    last_seq: int,
    body: bytes | None,
    advice: str,
) -> Iterator[Finding]:
    check = check_state(body, key, partial(recorded_changes, transaction, number))
    state = check.state
    if check.rebuilt:
        yield damaged_state(key, where)
    if check.damaged_steps:
        yield damaged_changes(key, where, check.damaged_steps)
    readable: list[Span] = []
    broken: list[Span] = []
    beyond_end = 0
    for seq, is_intact in transaction.examine_messages(number):
        if not 1 <= seq <= last_seq:
            beyond_end += 1
        else:
            (readable if is_intact else broken).append((seq, seq))
    missing = spans.minus(states.present(state, last_seq), spans.union(readable, broken))
    if check.rebuilt:
        missing = []  # messages without a row may have been purged
    if state.lost:
        yield lost_before(key, where, state.lost)
    yield from unreadable(key, where, missing, spans.union(broken), advice=advice)
    if beyond_end:
        yield past_the_end(key, where, beyond_end, last_seq, advice=advice)


def repair_sessions(
    change: Callable[[Callable[[Transaction], str]], str], findings: Iterable[Finding]
) -> list[RepairResult]:
    """Store rebuilt states and remove damaged undo steps; `change` runs each transaction."""
    results = []
    for finding in findings:
        if finding.repairable:
            try:
                repair_text = change(partial(_repair_session, finding=finding))
                results.append(RepairResult(finding=finding, done=True, words=repair_text))
            except StenologError as error:
                results.append(RepairResult(finding=finding, done=False, words=str(error)))
    return results


def _repair_session(transaction: Transaction, *, finding: Finding) -> str:
    key, uid = finding.key or "", finding.where.removeprefix("session ")
    for number, last_seq, stored_body in transaction.run("lock_states", uid):
        body = None if stored_body is None else to_bytes(stored_body)
        check = check_state(body, key, partial(recorded_changes, transaction, number))
        if check.rebuilt or check.damaged_steps:
            seqs = [seq for (seq,) in transaction.run("seqs", number)]
            state, change = repaired_state(check, body, last_seq=last_seq, seqs=seqs)
            add_change(transaction, Session(number, "", 0, 0, state), change)
            transaction.run("repair_state", number, transaction.body(encode(state)))
    return "the session has a readable state again"
