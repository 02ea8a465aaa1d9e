"""All exceptions of stenolog, grouped by the party that can fix the cause.

StenologError
├── UsageError            the caller: the call is wrong, nothing was written
│   ├── RefusedMessage        cannot be stored without loss; names the field
│   ├── NoSuchSession
│   │   └── SessionDeleted        in the trash, or deleted while it was followed
│   ├── SessionExists         the key is in use
│   ├── NothingToUndo
│   ├── OnceConflict          same idempotency key, other content
│   ├── Conflict              the session changed since the caller read it
│   ├── LeaseLost             released, taken over, or the session was purged
│   ├── ContextTooSmall       the request does not fit; names the setting to change
│   ├── UnsupportedFormat     a stored message has a format that cannot be sent
│   ├── ModelRefused          the model's server rejects the request: key, name, content
│   ├── WrongSettings         file, environment or flags; lists every Problem
│   ├── ReadOnly
│   └── StoreClosed
├── StoreUnavailable      time or the operator: disk, permissions, another process
│   ├── StoreBusy             the lock was not free within the time limit
│   ├── NotStored             not stored: retry when the cause is gone
│   └── MaybeStored           unknown: retry with the same `once`
├── ModelUnavailable      time or the operator: the model's server does not answer
└── DamagedStore          a person: the files are not what they should be
    ├── AnswerUnknown         a stored answer cannot be read, or names no message
    ├── ForeignLog            another program's file; `steno import` reads it
    └── NewerFormat           written by a newer stenolog

ForeignLog, NewerFormat and WrongSettings are internal: programs catch their base classes.
"""

from collections.abc import Sequence
from typing import TypeVar

from msgspec import Struct, json

__all__ = [
    "AnswerUnknown",
    "Conflict",
    "ContextTooSmall",
    "DamagedStore",
    "LeaseLost",
    "MaybeStored",
    "ModelRefused",
    "ModelUnavailable",
    "NoSuchSession",
    "NotStored",
    "NothingToUndo",
    "OnceConflict",
    "ReadOnly",
    "RefusedMessage",
    "SessionDeleted",
    "SessionExists",
    "StenologError",
    "StoreBusy",
    "StoreClosed",
    "StoreUnavailable",
    "UnsupportedFormat",
    "UsageError",
]

E = TypeVar("E", bound=BaseException)


class StenologError(Exception):
    """Base class of all exceptions of stenolog."""


# --- fixed by the caller ---------------------------------------------------------------------


class UsageError(StenologError):
    """The call is wrong; nothing was written."""


class RefusedMessage(UsageError):
    """The message cannot be stored exactly as given; nothing was written."""

    def __init__(self, field: str, reason: str) -> None:
        self.field = field
        """Path of the field, such as `content[2].score`; empty for the message itself."""
        self.reason = reason
        super().__init__(f"{field or 'message'}: {reason}")


class NoSuchSession(UsageError):
    """No session has this key."""

    def __init__(self, key: str, reason: str = "there is no such session") -> None:
        self.key = key
        super().__init__(f"{key!r}: {reason}")


class SessionDeleted(NoSuchSession):
    """The session was deleted."""

    def __init__(self, key: str, *, recreated: bool = False, advice: str = "") -> None:
        reason = "the session was deleted"
        if recreated:
            reason += "; another one has its key now"
        if advice:
            reason += f"; {advice}"
        super().__init__(key, reason)


class SessionExists(UsageError):
    """A session with this key exists; nothing was written."""

    def __init__(self, key: str, reason: str = "there is such a session already") -> None:
        self.key = key
        super().__init__(f"{key!r}: {reason}")


class NothingToUndo(UsageError):
    """No operation is left to undo."""


class OnceConflict(UsageError):
    """The idempotency key was used in this session with other content."""

    def __init__(self, key: str, token: str, seq: int) -> None:
        self.key = key
        self.token = token
        self.seq = seq
        """Seq of the first message with this idempotency key."""
        super().__init__(
            f"{key!r}: the idempotency key {token!r} was used at seq {seq} for other content; "
            "use a new idempotency key for a new message"
        )


class Conflict(UsageError):
    """The session changed since the caller read it. Read the session again."""

    def __init__(self, key: str, what: str, expected: int, found: int) -> None:
        self.key = key
        self.expected = expected
        self.found = found
        super().__init__(f"{key!r}: expected {what} {expected}, found {found}")


class LeaseLost(UsageError):
    """The lease has ended: released, taken over, or its session purged; nothing was written."""

    def __init__(
        self, key: str, epoch: int, *, reason: str = "has expired and another one was granted"
    ) -> None:
        self.key = key
        self.epoch = epoch
        """Number of the lost lease."""
        super().__init__(f"{key!r}: lease {epoch} {reason}")


class ContextTooSmall(UsageError):
    """The smallest request exceeds the context window. The message names the setting to change."""

    def __init__(self, reason: str, *, needed: int, limit: int) -> None:
        self.needed = needed
        """Number of tokens of the smallest request."""
        self.limit = limit
        """Maximum number of tokens."""
        super().__init__(reason)


class UnsupportedFormat(UsageError):
    """A stored message has a format that cannot be sent to the model. A retry does not help."""

    def __init__(self, reason: str, *, key: str = "", seq: int | None = None) -> None:
        self.key = key
        """Key of the session; empty if the messages were not read from a store."""
        self.seq = seq
        """Seq of the message; None if the message is not stored."""
        self.reason = reason
        location = "a message" if seq is None else f"the message at seq {seq}"
        super().__init__(f"{f'{key!r}: ' if key else ''}{location} {reason}")


class ModelRefused(UsageError):
    """The model's server rejects the request; the message has the reason. A retry does not help."""


class Problem(Struct, frozen=True, kw_only=True):
    """One wrong setting."""

    source: str
    """Origin of the setting: a file, a variable, or `the command line`."""
    field: str = ""
    """Dotted name, such as `agent.max_context_tokens`; empty for the whole file."""
    reason: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.source, self.field, self.reason) if part)


class WrongSettings(UsageError):
    """The settings cannot be used; nothing was started. Lists all problems."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(map(str, problems)))


class ReadOnly(UsageError):
    """The store or session is read-only for this process."""


class StoreClosed(UsageError):
    """The store was closed before this call."""


# --- temporary, or solved by the operator ----------------------------------------------------


class StoreUnavailable(StenologError):
    """The store cannot be used at the moment."""


class StoreBusy(StoreUnavailable):
    """Another writer held the lock for longer than `busy_timeout`."""


class NotStored(StoreUnavailable):
    """Nothing was stored. Retry when the cause is gone."""


class MaybeStored(StoreUnavailable):
    """The messages may or may not be stored. Retry with the same idempotency key (`once`)."""


class ModelUnavailable(StenologError):
    """The model's server is unreachable, busy, or closed the connection. A later retry may work."""


# --- fixed by a person -----------------------------------------------------------------------


class DamagedStore(StenologError):
    """Stored data is damaged; `steno doctor` names the damaged files and records."""


class AnswerUnknown(DamagedStore):
    """It is unknown whether, and with what text, a stored message was answered."""

    def __init__(self, key: str, seq: int, reason: str) -> None:
        self.key = key
        self.seq = seq
        """Seq of the message whose answer is unknown."""
        super().__init__(
            f"{key!r}: the answer to the message at seq {seq} is unknown: {reason}. "
            "To have the message answered again, send it as a new message"
        )


class ForeignLog(DamagedStore):
    """Another program wrote the file, so stenolog does not change the file."""


class NewerFormat(DamagedStore):
    """A newer version of stenolog wrote the file. Upgrade stenolog to read the file."""


def install_command(extra: str) -> str:
    """Return the shell command that installs an extra of stenolog, for error messages.

    If stenolog was installed from a folder or file, such as a clone or a wheel, the command names
    that place, because a package index may not have stenolog.
    """
    # Imported here, to keep `import stenolog` fast.
    import shlex
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        direct_url_json = distribution("stenolog").read_text("direct_url.json")
    except PackageNotFoundError:
        direct_url_json = None
    install_source = json.decode(direct_url_json) if direct_url_json else {}
    url = urlsplit(install_source.get("url", ""))
    package = url2pathname(url.path) if url.scheme == "file" else "stenolog"
    option = "-e " if install_source.get("dir_info", {}).get("editable") else ""
    return f"pip install {option}{shlex.quote(f'{package}[{extra}]')}"


def copy_error(error: E) -> E:
    """Return a copy of an error, because two threads must not raise the same exception object."""
    error_copy = type(error).__new__(type(error))
    error_copy.args = error.args
    error_copy.__dict__.update(error.__dict__)
    error_copy.__cause__ = error.__cause__
    return error_copy
