"""Everything that stenolog raises, sorted by who must act.

StenologError
├── UsageError            the caller: the call itself is wrong, nothing was written
│   ├── InvalidKey
│   ├── RefusedMessage        it cannot be kept losslessly; names the field
│   ├── NoSuchSession
│   │   └── SessionDeleted        it is in the trash, or was deleted while it was followed
│   ├── SessionExists         the key is taken; name another
│   ├── NoSuchNote
│   ├── NothingToUndo
│   ├── OnceConflict          same token, other content
│   ├── StaleCheckpoint       the floor is not where the caller saw it
│   ├── StaleHistory          the session has messages that the caller has not seen
│   ├── LeaseLost             somebody else has the turn now
│   ├── ContextTooSmall       what must be sent does not fit; names the number to change
│   ├── ModelRefused          the model's server will not take this request: key, name, content
│   ├── WrongSettings         file, environment or flags: each Problem by place and field
│   ├── ReadOnly
│   └── StoreClosed
├── StoreUnavailable      time or the operator: disk, permissions, another process
│   ├── StoreBusy             waited for a lock as long as allowed
│   ├── NotStored             surely absent: try again when the cause is gone
│   └── MaybeStored           unknown: retry with the same `once` token
├── ModelUnavailable      time or the operator: the model's server does not answer
└── DamagedStore          a person: the files are not what they should be
    ├── ForeignLog            not ours; `steno import` takes it in
    └── NewerFormat           written by a newer stenolog
"""

from collections.abc import Sequence

from msgspec import Struct


class StenologError(Exception):
    """The root: catch this to catch all of them."""


# --- the caller must act ---------------------------------------------------------------------


class UsageError(StenologError):
    """The call cannot be carried out as it was made; nothing was written."""


class InvalidKey(UsageError):
    """A key is non-empty text of at most 1,024 bytes of UTF-8."""


class RefusedMessage(UsageError):
    """The message cannot be kept exactly as given; nothing was written."""

    def __init__(self, field: str, reason: str) -> None:
        self.field = field
        """Where in the message, as a path: `content[2].score`; empty for the message itself."""
        self.reason = reason
        super().__init__(f"{field or 'message'}: {reason}")


class NoSuchSession(UsageError):
    """There is no session of that key."""

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
    """The key is taken; nothing was written."""

    def __init__(self, key: str, reason: str = "there is such a session already") -> None:
        self.key = key
        super().__init__(f"{key!r}: {reason}")


class NoSuchNote(UsageError):
    """There is no note of that id in that scope."""

    def __init__(self, id: str) -> None:
        self.id = id
        super().__init__(f"there is no note {id!r}; `steno memory list` shows the ones there are")


class NothingToUndo(UsageError):
    """No operation is left that could be taken back."""


class OnceConflict(UsageError):
    """The session already has this token, with other content."""

    def __init__(self, key: str, token: str, seq: int) -> None:
        self.key = key
        self.token = token
        self.seq = seq
        """Where the first message with this token stands."""
        super().__init__(
            f"{key!r}: token {token!r} was used at seq {seq} for other content; "
            "use a new token for a new message"
        )


class StaleCheckpoint(UsageError):
    """The floor moved since the caller looked; read again and decide again."""

    def __init__(self, key: str, expected: int, found: int) -> None:
        self.key = key
        self.expected = expected
        self.found = found
        super().__init__(f"{key!r}: expected floor {expected}, found {found}")


class StaleHistory(UsageError):
    """A message was appended since the caller looked; read again and decide again."""

    def __init__(self, key: str, expected: int, found: int) -> None:
        self.key = key
        self.expected = expected
        self.found = found
        super().__init__(f"{key!r}: expected last seq {expected}, found {found}")


class LeaseLost(UsageError):
    """Somebody else has the turn by now; what was to be written through the lease was not."""

    def __init__(
        self, key: str, epoch: int, *, reason: str = "has run out and another one was given"
    ) -> None:
        self.key = key
        self.epoch = epoch
        """Which lease it was that ran out."""
        super().__init__(f"{key!r}: lease {epoch} {reason}")


class ContextTooSmall(UsageError):
    """What must be sent does not fit the context; the message says which number to change."""

    def __init__(self, reason: str, *, needed: int, limit: int) -> None:
        self.needed = needed
        """How many tokens must fit."""
        self.limit = limit
        """How many may."""
        super().__init__(reason)


class ModelRefused(UsageError):
    """The model's server will not answer this request, now or later; its words say why."""


class Problem(Struct, frozen=True, kw_only=True):
    """One thing that is wrong with the settings."""

    source: str
    """Where it was said: `FILE:LINE`, a file, a variable, or `the command line`."""
    field: str = ""
    """Which field, with dots: `agent.max_context_tokens`; empty for the file as a whole."""
    reason: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.source, self.field, self.reason) if part)


class WrongSettings(UsageError):
    """The settings cannot be used; nothing was started. All that is wrong is told at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(map(str, problems)))


class ReadOnly(UsageError):
    """The store, or the session, may not be written by this process."""


class StoreClosed(UsageError):
    """The store was closed before this call."""


# --- time or the operator must act -----------------------------------------------------------


class StoreUnavailable(StenologError):
    """The place where sessions live cannot be used right now."""


class StoreBusy(StoreUnavailable):
    """Another writer held the lock for as long as this call was allowed to wait."""


class NotStored(StoreUnavailable):
    """Nothing of this call is in the store; it can be made again when the cause is gone."""


class MaybeStored(StoreUnavailable):
    """Whether this call is in the store is unknown; make it again with the same `once` token."""


class ModelUnavailable(StenologError):
    """The model's server cannot be reached, is busy, or broke off; the same call may do later."""


# --- a person must act -----------------------------------------------------------------------


class DamagedStore(StenologError):
    """The files are not what they should be; `steno doctor` says what and where."""


class ForeignLog(DamagedStore):
    """The file was written by another program; it is left untouched."""


class NewerFormat(DamagedStore):
    """The file was written by a newer stenolog; upgrade this one."""
