"""Converts errors of SQLite and of the operating system into stenolog's errors."""

import os
from typing import Final

import apsw

from stenolog.errors import DamagedStore, MaybeStored, StenologError, StoreBusy, StoreUnavailable
from stenolog.stores.disk import NO_SPACE_ERRNOS, describe_os_error
from stenolog.stores.sql.dialect import RETRY_ADVICE, to_not_stored

_DISK_FULL_REASON: Final = "the disk is full; free some space, then try again"


def read_failure(error: Exception, action: str) -> StenologError:
    """Return the error for a failed read."""
    match error:
        case StenologError():
            return error
        case apsw.BusyError() | apsw.LockedError() | apsw.ProtocolError():
            return StoreBusy(f"{action}: another process held the database too long")
        case apsw.CorruptError() | apsw.NotADBError() | apsw.FormatError():
            return DamagedStore(f"{action}: {error}; run `steno doctor` for details")
        case UnicodeDecodeError():
            return DamagedStore(f"{action}: a text is damaged; run `steno doctor` to find it")
        case apsw.SQLError() | apsw.ConstraintError() | apsw.MismatchError():
            return DamagedStore(
                f"{action}: the tables are damaged or were changed ({error}); "
                "run `steno doctor` for details"
            )
    return StoreUnavailable(f"{action}: {_reason_text(error)}")


def write_failure(error: Exception, action: str) -> StenologError:
    """Return the error for a write that failed before its commit, so that nothing was stored."""
    return to_not_stored(read_failure(error, action))


def commit_failure(error: Exception, action: str, *, system_errno: int = 0) -> StenologError:
    """Return the error for a failed commit; `system_errno` is the errno of the failed call.

    A commit that failed for lack of space, or because of a lock, stored nothing. After any other
    error, above all a failed sync, the write-ahead log may still contain the complete transaction.
    """
    if isinstance(error, apsw.FullError | apsw.BusyError | apsw.LockedError):
        return write_failure(error, action)
    if (
        system_errno in NO_SPACE_ERRNOS
        and getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_WRITE
    ):
        return write_failure(OSError(system_errno, os.strerror(system_errno)), action)
    # guard: sqlite-failed-commit-unknown
    return MaybeStored(f"{action}: {_reason_text(error)}. {RETRY_ADVICE}")


def is_no_space_for_index(error: apsw.Error) -> bool:
    """Return whether there was no space for the index of the write-ahead log (`-shm`)."""
    code = getattr(error, "extendedresult", 0)
    return code in (apsw.SQLITE_IOERR_SHMSIZE, apsw.SQLITE_IOERR_SHMOPEN)


def _reason_text(error: Exception) -> str:
    match error:
        case apsw.FullError():
            return _DISK_FULL_REASON
        case apsw.ReadOnlyError() | apsw.PermissionsError() | apsw.AuthError():
            return f"{error}; check the permissions of the file and its folder"
        case apsw.CantOpenError():
            return "the file cannot be opened; check that it exists, and its permissions"
        case apsw.IOError() if is_no_space_for_index(error):
            return f"{_DISK_FULL_REASON} ({_error_code(error)})"
        case apsw.IOError():
            return f"{error} ({_error_code(error)}); check the disk and the system log"
        case OSError():
            return describe_os_error(error)
    return f"{type(error).__name__}: {error}"


def _error_code(error: apsw.Error) -> str:
    """Return the name of SQLite's extended error code, which identifies the kind of I/O error."""
    code = getattr(error, "extendedresult", 0)
    return str(apsw.mapping_extended_result_codes.get(code, code))
