"""The access token of the gateway: its file, its creation, and comparison."""

import errno
import hashlib
import hmac
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from stenolog.errors import Problem, WrongSettings
from stenolog.settings.file import config_path, expand_home
from stenolog.stores import disk

NAME: Final = "gateway.token"
"""Name of the token file, next to the user's config file."""

_FIELD: Final = "gateway.token_file"
_MIN_LENGTH: Final = 32
_MAX_LENGTH: Final = 512
# The syntax of a bearer token (RFC 6750).
_SYNTAX: Final = re.compile(rf"[A-Za-z0-9._~+/=-]{{{_MIN_LENGTH},{_MAX_LENGTH}}}".encode())


class Token(Struct, frozen=True):
    """The access token. Its repr does not contain the value."""

    value: bytes

    def __repr__(self) -> str:
        return "Token(***)"

    def is_same(self, given: bytes) -> bool:
        """Return whether the given token is equal, in constant time."""
        return hmac.compare_digest(self.value, given)  # guard: token-compared-whole

    def key(self, purpose: str) -> bytes:
        """Derive a key from the token, a different one for each purpose."""
        return hmac.digest(self.value, f"stenolog {purpose}".encode(), hashlib.sha256)

    def host_name(self) -> str:
        """Return the host name of the gateways with this token, for browsers on this machine.

        Browsers send a cookie to every port of its host, so another server at `localhost` would get
        it. Only holders of the token know this name. Browsers resolve all names below `localhost`
        to this machine.
        """
        return f"steno-{self.key('host name').hex()[:16]}.localhost"

    def proof(self, *said: str) -> str:
        """Return a signature of these texts that proves the token without revealing it."""
        return hmac.digest(self.key("login link"), "\n".join(said).encode(), hashlib.sha256).hex()


def token_path(named: str) -> Path:
    """Return the path of the token file: `gateway.token_file` or the default."""
    return expand_home(named) if named else config_path(None, {}).with_name(NAME)


def read_token(file: Path) -> Token:
    """Read the token. Raise WrongSettings if the file is invalid or readable by others."""
    try:
        # O_NONBLOCK: opening a pipe would wait for a writer.
        # guard: token-file-no-symlink
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(file, flags)
    except OSError as error:
        raise _wrong(file, _why_not_opened(error)) from error
    try:
        return Token(_content(file, descriptor))
    except OSError as error:
        raise _wrong(file, f"it cannot be read: {error.strerror or error}") from error
    finally:
        os.close(descriptor)


def read_or_create_token(file: Path) -> Token:
    """Read the token; create the file if it does not exist. Raise WrongSettings."""
    if not os.path.lexists(file):
        try:
            _create(file)
        except OSError as error:
            raise _wrong(file, f"it cannot be created: {error.strerror or error}") from error
    return read_token(file)


def new_token() -> Token:
    """Return a random token."""
    return Token(secrets.token_urlsafe(32).encode())


def _content(file: Path, descriptor: int) -> bytes:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise _wrong(file, "this is not a regular file")
    # Even for root: another owner can read and change the file.
    if found.st_uid not in (os.geteuid(), 0):
        raise _wrong(file, "it belongs to another user, who could read and change it")
    if found.st_mode & 0o077:  # guard: token-file-mode
        raise _wrong(file, f"other users can read or change it; run: chmod 600 {file}")
    content = os.read(descriptor, _MAX_LENGTH + 3).rstrip(b"\r\n")
    if not _SYNTAX.fullmatch(content):
        words = (
            f"it must contain one line of {_MIN_LENGTH} to {_MAX_LENGTH} letters, digits and "
            "- . _ ~ + / =; remove the file, and `steno serve` creates a new one"
        )
        raise _wrong(file, words)
    return content


def _create(file: Path) -> None:
    """Create a token file, unless another process has just created it. Raise OSError."""
    disk.make_private(file.parent)
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600)
    try:
        disk.write_all(descriptor, new_token().value + b"\n")
        disk.sync_file(descriptor)
        # A link appears complete and replaces no file: of two processes that start at the same
        # time, both read the token of the first.
        with suppress(FileExistsError):
            os.link(temporary, file)
    finally:
        os.close(descriptor)
        temporary.unlink()
    disk.sync_entries(file.parent)


def _why_not_opened(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "there is no such file; `steno serve` creates it"
    if error.errno in (errno.ELOOP, errno.EMLINK):
        return "it is a symbolic link, which others may be able to change; name the file itself"
    return f"it cannot be read: {error.strerror or error}"


def _wrong(file: Path, reason: str) -> WrongSettings:
    return WrongSettings([Problem(source=str(file), field=_FIELD, reason=reason)])
