"""Files of mode 0 that not even root can read."""

import ctypes
import errno
import os
import stat
from collections.abc import Iterator

import pytest

from stenolog.stores.disk import Descriptor, open_descriptor
from stenolog.stores.jsonl import directory


def _open_unless_shut(name: str, *arguments: int, dir_fd: int | None = None) -> Descriptor:
    descriptor = open_descriptor(name, *arguments, dir_fd=dir_fd)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and not stat.S_IMODE(found.st_mode):
        descriptor.close()
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
    return descriptor


@pytest.fixture
def obey_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to open files of mode 0 in JSONL stores, as the system does for users except root."""
    monkeypatch.setattr(directory, "open_descriptor", _open_unless_shut)


_CAPABILITIES_VERSION = 0x20080522
_READ_ANYTHING = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, with which root ignores modes."""


@pytest.fixture
def modes_of_root() -> Iterator[None]:
    """Make the system check modes also for root, in this thread and the threads that it starts."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    # Effective, permitted and inheritable capabilities, twice.
    capabilities = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, capabilities) == 0
    effective = capabilities[0]
    capabilities[0] = effective & ~_READ_ANYTHING
    assert libc.capset(header, capabilities) == 0
    yield
    capabilities[0] = effective
    assert libc.capset(header, capabilities) == 0
