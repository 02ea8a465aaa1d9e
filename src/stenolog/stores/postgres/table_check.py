"""Finding and repairing damage in the tables, for `steno doctor`."""

from collections.abc import Iterator
from typing import Final

from stenolog.errors import DamagedStore, NewerFormat
from stenolog.stores.findings import Finding, RepairResult, Report
from stenolog.stores.postgres.database import Database
from stenolog.stores.postgres.transactions import Transaction
from stenolog.stores.sql.verification import examine_sessions, repair_sessions

_RESTORE_ADVICE: Final = (
    "Restore the database from a backup, or save the readable messages with `steno export`."
)


def examine(database: Database) -> Report:
    """Examine the server and the tables. Raises StoreUnavailable if they cannot be read."""
    errors, problems = database.problems()
    found = [
        Finding(kind="server", meaning=meaning, advice="Check the server's settings.")
        for meaning in (*errors, *problems)
    ]
    try:
        with database.read() as transaction:
            sessions, damaged = examine_sessions(transaction, advice=_RESTORE_ADVICE)
            found += damaged
            found += _stray_rows(transaction)
    except NewerFormat as error:
        found.append(Finding(kind="newer format", meaning=str(error), advice="Upgrade stenolog."))
        return Report(sessions=0, findings=tuple(found))
    except DamagedStore as error:
        found.append(Finding(kind="damaged database", meaning=str(error), advice=_RESTORE_ADVICE))
        return Report(sessions=0, findings=tuple(found))
    return Report(sessions=sessions, findings=tuple(found))


def repair(database: Database) -> list[RepairResult]:
    """Examine the tables, store rebuilt states and remove damaged undo steps.

    Raises StoreUnavailable.
    """
    return repair_sessions(database.run_write, examine(database).findings)


def _stray_rows(transaction: Transaction) -> Iterator[Finding]:
    for table, count in transaction.run("stray_rows"):
        if count:
            yield Finding(
                kind="stray row",
                where=table,
                meaning=f"{count:,} rows belong to sessions that do not exist.",
                advice=_RESTORE_ADVICE,
            )
