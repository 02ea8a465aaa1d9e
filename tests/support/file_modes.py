"""Files of mode 0 that cannot be read, by root as little as by anybody else."""

import errno
import os
import stat

import pytest

from stenolog.stores.disk import Descriptor, open_descriptor
from stenolog.stores.jsonl import archive, directory, trash


def _open_unless_shut(name: str, *arguments: int, dir_fd: int | None = None) -> Descriptor:
    descriptor = open_descriptor(name, *arguments, dir_fd=dir_fd)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and not stat.S_IMODE(found.st_mode):
        descriptor.close()
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
    return descriptor


@pytest.fixture
def obey_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to open files of mode 0 in JSONL stores, as the system does unless root asks."""
    for module in (archive, directory, trash):
        monkeypatch.setattr(module, "open_descriptor", _open_unless_shut)
