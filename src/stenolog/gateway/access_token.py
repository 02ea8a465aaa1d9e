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

_MIN_LENGTH: Final = 32
_MAX_LENGTH: Final = 512
# The syntax of a bearer token (RFC 6750).
_TOKEN_PATTERN: Final = re.compile(rf"[A-Za-z0-9._~+/=-]{{{_MIN_LENGTH},{_MAX_LENGTH}}}".encode())


class Token(Struct, frozen=True):
    """The access token. The repr of a Token does not contain the value."""

    value: bytes

    def __repr__(self) -> str:
        return "Token(***)"

    def is_equal(self, other: bytes) -> bool:
        """Return whether the other token has the same value. The check takes constant time."""
        return hmac.compare_digest(self.value, other)  # guard: token-compared-whole

    def derive_key(self, purpose: str) -> bytes:
        """Derive a key from the token. Each purpose has a different key."""
        return hmac.digest(self.value, f"stenolog {purpose}".encode(), hashlib.sha256)

    def host_name(self) -> str:
        """Return the host name of the gateways with this token, for browsers on this machine.

        Browsers send a host's cookie to every port of the host. A cookie for `localhost` would also
        be sent to other servers at `localhost`. Only holders of the token know the returned name.
        Browsers resolve all names below `localhost` to this machine.
        """
        return f"steno-{self.derive_key('host name').hex()[:16]}.localhost"

    def proof(self, *texts: str) -> str:
        """Return a signature of these texts, which proves that the signer has the token."""
        key = self.derive_key("login link")
        return hmac.digest(key, "\n".join(texts).encode(), hashlib.sha256).hex()


def token_path(setting: str) -> Path:
    """Return the path of the token file: the setting, or a file next to the user's config file."""
    return expand_home(setting) if setting else config_path(None, {}).with_name("gateway.token")


def read_token(file: Path) -> Token:
    """Read the token. Raises WrongSettings if the file is missing, invalid or open to others."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        # guard: token-file-no-symlink
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(file, flags)
    except OSError as error:
        raise _token_file_error(file, _open_error_reason(error)) from error
    try:
        return Token(_read_token_value(file, descriptor))
    except OSError as error:
        raise _token_file_error(file, f"it cannot be read: {error.strerror or error}") from error
    finally:
        os.close(descriptor)


def read_or_create_token(file: Path) -> Token:
    """Read the token; create the file if it does not exist. Raises WrongSettings."""
    if not os.path.lexists(file):
        try:
            _create_token_file(file)
        except OSError as error:
            reason = f"it cannot be created: {error.strerror or error}"
            raise _token_file_error(file, reason) from error
    return read_token(file)


def new_token() -> Token:
    """Return a random token."""
    return Token(secrets.token_urlsafe(32).encode())


def _read_token_value(file: Path, descriptor: int) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise _token_file_error(file, "this is not a regular file")
    # The owner is checked even if root runs the gateway: another owner can change the file.
    if status.st_uid not in (os.geteuid(), 0):
        raise _token_file_error(file, "it belongs to another user, who could read and change it")
    if status.st_mode & 0o077:  # guard: token-file-mode
        raise _token_file_error(file, f"other users can read or change it; run: chmod 600 {file}")
    content = os.read(descriptor, _MAX_LENGTH + 3).rstrip(b"\r\n")
    if not _TOKEN_PATTERN.fullmatch(content):
        reason = (
            f"it must contain one line of {_MIN_LENGTH} to {_MAX_LENGTH} letters, digits and "
            "- . _ ~ + / =; remove the file, and `steno serve` creates a new one"
        )
        raise _token_file_error(file, reason)
    return content


def _create_token_file(file: Path) -> None:
    """Create a token file, unless another process has just created one. Raises OSError."""
    disk.create_private_folder(file.parent)
    temporary_file = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary_file, flags, 0o600)
    try:
        disk.write_all(descriptor, new_token().value + b"\n")
        disk.sync_file(descriptor)
        # Creating a hard link makes a complete file visible and never replaces a file.
        # If two processes start at the same time, both use the token that was linked first.
        with suppress(FileExistsError):
            os.link(temporary_file, file)
    finally:
        os.close(descriptor)
        temporary_file.unlink()
    disk.sync_entries(file.parent)


def _open_error_reason(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "there is no such file; `steno serve` creates it"
    if error.errno in (errno.ELOOP, errno.EMLINK):
        return "it is a symbolic link, which others may be able to change; name the file itself"
    return f"it cannot be read: {error.strerror or error}"


def _token_file_error(file: Path, reason: str) -> WrongSettings:
    return WrongSettings([Problem(source=str(file), field="gateway.token_file", reason=reason)])
