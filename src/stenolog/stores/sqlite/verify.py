"""What is wrong with a database, for the doctor. Nothing is written."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import apsw

from stenolog.errors import DamagedStore, ForeignLog, NewerFormat, StenologError
from stenolog.records import Span, decode_object
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.disk import refusal
from stenolog.stores.findings import Finding, Report, lost_before, past_the_end, unreadable
from stenolog.stores.rows import decode_state, moment
from stenolog.stores.sqlite import life, place
from stenolog.stores.sqlite.connections import Settings, Transaction
from stenolog.stores.sqlite.damage import checksum, legible
from stenolog.stores.sqlite.database import Database
from stenolog.stores.sqlite.queries import SQL
from stenolog.stores.sqlite.versions import known_bugs

_MOST_COMPLAINTS: Final = 20
_TEXTS: Final = ("key", "uid", "namespace", "fork_of")
_TIMES: Final = ("created", "updated", "deleted")
"""The columns of a session as they are asked for, those that hold times last."""
_BACKUP: Final = "Put the file back from a backup, or save what can be read with `steno export`."


def examine(file: str | os.PathLike[str], *, sqlite_version: str | None = None) -> Report:
    """What is wrong with the database. Raises StoreUnavailable where it cannot be opened.

    `sqlite_version`: of the library that is linked, unless another one is to be judged.
    """
    version = apsw.sqlite_lib_version() if sqlite_version is None else sqlite_version
    try:
        database = Database(file, Settings(read_only=True, sqlite_version=version))
    except DamagedStore as error:
        return Report(sessions=0, findings=(_unopened(error),))
    try:
        with database.read() as transaction:
            found = list(_of_the_file(database.file, transaction, version))
            sessions = list(transaction.execute(SQL["every_session"]))
            for number, last_seq, body, *columns in sessions:
                texts = dict(zip(_TEXTS + _TIMES, columns, strict=True))
                key, where = _shown(texts["key"]), f"session {_shown(texts['uid'])}"
                found += _of_a_row(key, where, texts)
                found += _of_a_session(transaction, number, where, key, last_seq, body)
        return Report(sessions=len(sessions), findings=tuple(found))
    except DamagedStore as error:
        return Report(sessions=0, findings=(_damaged(str(error)),))
    finally:
        database.close()


def _unopened(error: DamagedStore) -> Finding:
    match error:
        case ForeignLog():
            kind, advice = "foreign file", "Name another file."
        case NewerFormat():
            kind, advice = "newer format", "Upgrade stenolog."
        case _:
            return _damaged(str(error))
    return Finding(kind=kind, meaning=str(error), advice=advice)


def _of_the_file(file: Path, transaction: Transaction, version: str) -> Iterator[Finding]:
    for meaning in known_bugs(version):
        yield Finding(kind="known bug", meaning=meaning, advice="pip install --upgrade apsw")
    for meaning in place.problems(file):
        yield Finding(kind="wide permissions", meaning=meaning, advice="Do as it says.")
    cannot = refusal(file)
    if cannot is not None:
        meaning = "What is there can be read, but every message from now on is lost."
        yield Finding(kind="not writable", meaning=meaning, advice=f"{cannot}.")
    for (complaint,) in transaction.execute(f"PRAGMA integrity_check({_MOST_COMPLAINTS})"):
        if complaint != "ok":
            yield _damaged(complaint)
    for table, row, parent, _ in transaction.execute("PRAGMA foreign_key_check"):
        yield Finding(
            kind="stray row",
            where=f"{table}, row {row}",
            meaning=f"It belongs to a row of {parent} that is not there.",
            advice=_BACKUP,
        )
    if life.unfinished(transaction):
        yield Finding(
            kind="unfinished purge",
            meaning="A purge was interrupted; bytes of what was purged may still be in the file.",
            advice="Purge anything again, also what is gone already: it finishes the first.",
        )


def _damaged(complaint: str) -> Finding:
    return Finding(kind="damaged database", meaning=f"SQLite says: {complaint}", advice=_BACKUP)


def _shown(text: bytes | None) -> str:
    return "" if text is None else text.decode(errors="backslashreplace")


def _of_a_row(key: str, where: str, texts: Mapping[str, bytes | None]) -> Iterator[Finding]:
    for name, text in texts.items():
        try:
            if text is not None and name in _TIMES:
                moment(text)
            elif text is not None:
                text.decode()
        except ValueError:
            yield Finding(
                kind="damaged session",
                key=key,
                where=where,
                meaning=f"Its {name} cannot be read: {_shown(text)!r}.",
                advice=_BACKUP,
            )


def _of_a_session(
    transaction: Transaction, number: int, where: str, key: str, last_seq: int, body: bytes | None
) -> Iterator[Finding]:
    try:
        if body is None or not isinstance(last_seq, int):
            raise DamagedStore(f"{key!r}: it has no state")
        state = decode_state(body, key)
    except StenologError as error:
        yield Finding(
            kind="damaged state", key=key, where=where, meaning=str(error), advice=_BACKUP
        )
        return
    readable: list[Span] = []
    broken: list[Span] = []
    for row in transaction.execute(SQL["raw_messages"], (number, 1, last_seq)):
        (readable if _is_intact(row) else broken).append((row[0], row[0]))
    missing = spans.minus(states.present(state, last_seq), spans.union(readable, broken))
    if state.lost:
        yield lost_before(key, where, state.lost)
    yield from unreadable(key, where, missing, spans.union(broken), advice=_BACKUP)
    for (seqs,) in transaction.execute(SQL["seqs_past"], (number, last_seq)):
        if seqs:
            yield past_the_end(key, where, seqs, last_seq, advice=_BACKUP)


def _is_intact(row: tuple[Any, ...]) -> bool:
    for seq, _, body, crc in legible([row]):
        if crc is None or crc == checksum(body, seq):
            with suppress(ValueError):
                return isinstance(decode_object(body), dict)
    return False
