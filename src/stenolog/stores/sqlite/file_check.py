"""Finds damage in a database file, for `steno doctor`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stenolog.errors import DamagedStore, ForeignLog, NewerFormat
from stenolog.stores.admin import Finding, Report
from stenolog.stores.sql.verification import examine_sessions
from stenolog.stores.sqlite import database_file
from stenolog.stores.sqlite.connections import Settings
from stenolog.stores.sqlite.database import Database
from stenolog.stores.sqlite.transactions import Transaction

_MAX_INTEGRITY_PROBLEMS: Final = 20
_RESTORE_ADVICE: Final = (
    "Restore the file from a backup, or save the readable messages with `steno export`."
)


def examine(file: str | os.PathLike[str]) -> Report:
    """Examine the database. Raises StoreUnavailable if the database cannot be opened."""
    try:
        database = Database(file, Settings(read_only=True))
    except DamagedStore as error:
        return Report(sessions=0, findings=(_finding_for_open_error(error),))
    try:
        with database.read_transaction() as transaction:
            findings = list(_examine_file(database.file, transaction))
            sessions, damage_findings = examine_sessions(transaction, advice=_RESTORE_ADVICE)
        return Report(sessions=sessions, findings=(*findings, *damage_findings))
    except DamagedStore as error:
        return Report(sessions=0, findings=(_finding_for_damage(str(error)),))
    finally:
        database.close()


def _finding_for_open_error(error: DamagedStore) -> Finding:
    if isinstance(error, ForeignLog):
        return Finding(kind="foreign file", meaning=str(error), advice="Name another file.")
    if isinstance(error, NewerFormat):
        return Finding(kind="newer format", meaning=str(error), advice="Upgrade stenolog.")
    return _finding_for_damage(str(error))


def _examine_file(file: Path, transaction: Transaction) -> Iterator[Finding]:
    for meaning in database_file.find_wide_modes(file):
        yield Finding(kind="wide permissions", meaning=meaning, advice="Change its mode.")
    for (problem,) in transaction.execute(f"PRAGMA integrity_check({_MAX_INTEGRITY_PROBLEMS})"):
        if problem != "ok":
            yield _finding_for_damage(problem)
    for table, row, parent, _ in transaction.execute("PRAGMA foreign_key_check"):
        yield Finding(
            kind="stray row",
            where=f"{table}, row {row}",
            meaning=f"It refers to a row of {parent} that does not exist.",
            advice=_RESTORE_ADVICE,
        )
    if transaction.unfinished_purges():
        yield Finding(
            kind="unfinished purge",
            meaning="A purge was interrupted; purged bytes may still be in the file.",
            advice="Purge again, even a session that is already gone: that finishes the purge.",
        )


def _finding_for_damage(problem: str) -> Finding:
    return Finding(
        kind="damaged database", meaning=f"SQLite reports: {problem}", advice=_RESTORE_ADVICE
    )
