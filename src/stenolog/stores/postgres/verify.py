"""What is wrong with a database, for the doctor. Nothing is written."""

from collections.abc import Iterator
from typing import Final

from stenolog.errors import DamagedStore, NewerFormat, StenologError
from stenolog.records import Span, decode_object
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.findings import Finding, Report, lost_before, past_the_end, unreadable
from stenolog.stores.postgres.connections import Transaction
from stenolog.stores.postgres.database import Database
from stenolog.stores.rows import decode_state, moment

_BACKUP: Final = "Restore the database from a backup, or save what can be read with `steno export`."
_PAGE: Final = 2_000


def examine(database: Database) -> Report:
    """What is wrong with the tables. Raises StoreUnavailable where they cannot be read."""
    wrong, problems = database.problems()
    found = [
        Finding(kind="server", meaning=meaning, advice="Look at the server's settings.")
        for meaning in (*wrong, *problems)
    ]
    try:
        with database.read() as transaction:
            sessions = transaction.run("every_session")
            for number, key, uid, times, last_seq, body in sessions:
                name, where = key.decode(errors="backslashreplace"), f"session {uid}"
                found += _of_a_session(transaction, number, where, name, times, last_seq, body)
            found += _strays(transaction)
    except NewerFormat as error:
        found.append(Finding(kind="newer format", meaning=str(error), advice="Upgrade stenolog."))
        return Report(sessions=0, findings=tuple(found))
    except DamagedStore as error:
        found.append(Finding(kind="damaged database", meaning=str(error), advice=_BACKUP))
        return Report(sessions=0, findings=tuple(found))
    return Report(sessions=len(sessions), findings=tuple(found))


def _of_a_session(
    transaction: Transaction,
    number: int,
    where: str,
    key: str,
    times: list[str],
    last_seq: int,
    body: str,
) -> Iterator[Finding]:
    try:
        state = decode_state(body.encode(), key)
        for time in times:
            moment(time)
    except (StenologError, ValueError) as error:
        yield Finding(
            kind="damaged state", key=key, where=where, meaning=str(error), advice=_BACKUP
        )
        return
    readable: list[Span] = []
    broken: list[Span] = []
    past = 0
    after = -1
    while rows := transaction.run("some_messages", number, after, _PAGE):
        after = rows[-1][0]
        for seq, at, text in rows:
            if not 1 <= seq <= last_seq:
                past += 1
            else:
                (readable if _is_intact(at, text) else broken).append((seq, seq))
    missing = spans.minus(states.present(state, last_seq), spans.union(readable, broken))
    if state.lost:
        yield lost_before(key, where, state.lost)
    yield from unreadable(key, where, missing, spans.union(broken), advice=_BACKUP)
    if past:
        yield past_the_end(key, where, past, last_seq, advice=_BACKUP)


def _strays(transaction: Transaction) -> Iterator[Finding]:
    for table, count in transaction.run("stray_rows"):
        if count:
            yield Finding(
                kind="stray row",
                where=table,
                meaning=f"{count:,} rows belong to sessions that are not there.",
                advice=_BACKUP,
            )


def _is_intact(at: str, body: str) -> bool:
    try:
        moment(at)
        return isinstance(decode_object(body.encode()), dict)
    except ValueError:
        return False
