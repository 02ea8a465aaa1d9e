"""Tests P8: the typed error for each error of the driver and the system."""

import errno
import os

import apsw
import pytest

from stenolog import (
    DamagedStore,
    MaybeStored,
    NotStored,
    StenologError,
    StoreBusy,
    StoreUnavailable,
)
from stenolog.errors import NewerFormat
from stenolog.stores.sqlite.sqlite_errors import commit_failure, read_failure, write_failure


def _error(code: int) -> Exception:
    error: Exception = apsw.exception_for(code)
    return error


_CASES: list[tuple[Exception, type[StenologError], type[StenologError], type[StenologError]]] = [
    (_error(apsw.SQLITE_BUSY), StoreBusy, StoreBusy, StoreBusy),
    (_error(apsw.SQLITE_LOCKED), StoreBusy, StoreBusy, StoreBusy),
    (_error(apsw.SQLITE_FULL), StoreUnavailable, NotStored, NotStored),
    (_error(apsw.SQLITE_IOERR_WRITE), StoreUnavailable, NotStored, MaybeStored),
    (_error(apsw.SQLITE_IOERR_FSYNC), StoreUnavailable, NotStored, MaybeStored),
    (_error(apsw.SQLITE_READONLY), StoreUnavailable, NotStored, MaybeStored),
    (_error(apsw.SQLITE_CANTOPEN), StoreUnavailable, NotStored, MaybeStored),
    (_error(apsw.SQLITE_NOMEM), StoreUnavailable, NotStored, MaybeStored),
    (_error(apsw.SQLITE_CORRUPT), DamagedStore, DamagedStore, MaybeStored),
    (_error(apsw.SQLITE_NOTADB), DamagedStore, DamagedStore, MaybeStored),
    (_error(apsw.SQLITE_ERROR), DamagedStore, DamagedStore, MaybeStored),
    (_error(apsw.SQLITE_CONSTRAINT), DamagedStore, DamagedStore, MaybeStored),
    (PermissionError(errno.EACCES, "no"), StoreUnavailable, NotStored, MaybeStored),
    (FileNotFoundError(errno.ENOENT, "no"), StoreUnavailable, NotStored, MaybeStored),
]


@pytest.mark.parametrize(
    ("error", "reading", "writing", "committing"),
    _CASES,
    ids=[f"{type(error).__name__}-{getattr(error, 'extendedresult', '')}" for error, *_ in _CASES],
)
def test_p8_driver_errors_are_converted(
    error: Exception,
    reading: type[StenologError],
    writing: type[StenologError],
    committing: type[StenologError],
) -> None:
    assert type(read_failure(error, "x")) is reading
    assert type(write_failure(error, "x")) is writing
    assert type(commit_failure(error, "x")) is committing


def test_p8_own_errors_are_returned_unchanged() -> None:
    error = NewerFormat("x")
    assert read_failure(error, "y") is error
    assert write_failure(error, "y") is error


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_p8_commit_rejected_for_lack_of_space_is_not_stored(number: int) -> None:
    refused = commit_failure(_error(apsw.SQLITE_IOERR_WRITE), "x", system_errno=number)
    assert type(refused) is NotStored
    assert os.strerror(number) in str(refused)
    unknown = commit_failure(_error(apsw.SQLITE_IOERR_FSYNC), "x", system_errno=number)
    assert type(unknown) is MaybeStored
    assert type(commit_failure(_error(apsw.SQLITE_IOERR_WRITE), "x", system_errno=errno.EIO)) is (
        MaybeStored
    )
