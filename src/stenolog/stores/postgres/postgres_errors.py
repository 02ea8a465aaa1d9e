"""Converts errors of the driver and of the server into stenolog's errors."""

from typing import Final

import psycopg
from psycopg import errors

from stenolog.errors import (
    DamagedStore,
    MaybeStored,
    StenologError,
    StoreBusy,
    StoreUnavailable,
)
from stenolog.stores.sql.dialect import RETRY_ADVICE, to_not_stored

_CONFLICT_ERRORS: Final = (errors.DeadlockDetected, errors.SerializationFailure)
_READ_ONLY_SERVER: Final = "the server accepts only reads: it is a standby, or read-only"

_SQLSTATE_ADVICE: Final[dict[str, str]] = {
    "28": "check user and password, and the server's pg_hba.conf",
    "3D000": "there is no such database; create it with createdb",
    "42501": "the user lacks the privileges; ask the owner of the database for them",
    "53100": "the server's disk is full; free some space there, then try again",
    "53200": "the server is out of memory",
    "53300": "the server has no connection left; raise its max_connections, or use fewer",
    "57P03": "the server is starting or stopping",
    "25006": _READ_ONLY_SERVER,
}
"""Advice for the user, by SQLSTATE or by the first two characters of the SQLSTATE."""


_REFUSAL_ADVICE: Final[dict[str, str]] = {
    "authentication failed": "check user and password",
    "no password supplied": "set one in the URL, in PGPASSWORD or in ~/.pgpass",
    "no pg_hba.conf entry": "the server does not accept this machine; check its pg_hba.conf",
    'FATAL:  role "': "check the user",
    'FATAL:  database "': "create it with createdb, or check its name",
    "does not support SSL": "check sslmode",
    "sslmode": "check sslmode",
    "certificate": "check sslmode, sslrootcert and the server's certificate",
}
"""Advice for the user, by a phrase in the error of a refused connection, which has no SQLSTATE."""


class FailedBeforeCommit(Exception):
    """A call failed before it could have stored anything."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


def is_connection_lost(error: BaseException) -> bool:
    """Return whether the connection was lost, so that the outcome of its statement is unknown."""
    if isinstance(error, OSError):
        return True  # after an I/O error, the progress of the statement is unknown
    if not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return False
    return error.sqlstate is None or error.sqlstate.startswith(("08", "57P0"))


def is_read_only_server(error: BaseException) -> bool:
    """Return whether the server rejected a write because it accepts only reads.

    After a failover, another server may accept the write.
    """
    return isinstance(error, errors.ReadOnlySqlTransaction)


def is_conflict(error: BaseException) -> bool:
    """Return whether the transaction lost a conflict, so that an immediate retry may work."""
    return isinstance(error, _CONFLICT_ERRORS)


def is_temporary(error: BaseException) -> bool:
    """Return whether connecting may work later, for example after a server restart."""
    is_refused = any(phrase in str(error) for phrase in _REFUSAL_ADVICE)
    return isinstance(error, psycopg.OperationalError) and not is_refused


def read_failure(error: Exception, action: str) -> StenologError:
    """Return the error for a failed read."""
    match error:
        case StenologError():
            return error
        case errors.LockNotAvailable():
            return StoreBusy(f"{action}: another process held the session too long")
        case errors.DeadlockDetected() | errors.SerializationFailure():
            return StoreBusy(f"{action}: it conflicted with other writers; try again")
        case errors.QueryCanceled():
            return StoreBusy(
                f"{action}: the server cancelled it ({describe_error(error)}); "
                "check its statement_timeout"
            )
        case errors.ReadOnlySqlTransaction():
            return StoreUnavailable(f"{action}: {_READ_ONLY_SERVER}")
        case (
            errors.UndefinedTable()
            | errors.UndefinedColumn()
            | errors.DataCorrupted()
            | errors.IndexCorrupted()
        ):
            return DamagedStore(
                f"{action}: the tables are damaged or were changed ({describe_error(error)})"
            )
    return StoreUnavailable(f"{action}: {describe_error(error)}")


def write_failure(error: Exception, action: str) -> StenologError:
    """Return the error for a write that failed before its commit, so that nothing was stored."""
    return to_not_stored(read_failure(error, action))


def commit_failure(error: Exception, action: str) -> StenologError:
    """Return the error for a failed commit: MaybeStored if the connection was lost."""
    if is_connection_lost(error):
        return MaybeStored(f"{action}: {describe_error(error)}. {RETRY_ADVICE}")
    return write_failure(error, action)


def describe_error(error: Exception) -> str:
    """Return one line with the problem and advice."""
    sqlstate = getattr(error, "sqlstate", None) or ""
    text = str(error)
    # The message of the driver or server, without the address and hints.
    server_message = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    line = (server_message or text).strip().split("\n")[0].strip()
    line = line.rpartition(" failed: ")[2] or line or type(error).__name__
    advice = _SQLSTATE_ADVICE.get(sqlstate) or _SQLSTATE_ADVICE.get(sqlstate[:2])
    if advice is None and isinstance(error, psycopg.OperationalError):
        advice = next((hint for phrase, hint in _REFUSAL_ADVICE.items() if phrase in text), None)
    if advice is None and "failed to resolve host" in text:
        advice = "check the name of the host"
    if advice is None and is_connection_lost(error):
        advice = "check that the server runs and can be reached"
    return line if advice is None else f"{line}; {advice}"
