"""Types that all importers share: sessions of other programs, and the files that hold them."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog.message_metadata import FIELD, without_marks
from stenolog.codec import encode_object
from stenolog.errors import RefusedMessage
from stenolog.records import decode_object
from stenolog.stores import withdrawn_messages
from stenolog.stores.base import FORKED_AT, NOT_FORKED
from stenolog.stores.json_file import JSONMessage

_ReferenceLayout = Literal["picoclaw", "picoclaw-legacy", "zeroclaw", "stenolog-json"]
"""Logs of picoclaw, older JSON files of picoclaw, logs of zeroclaw, JSON files of stenolog."""
Layout = Literal[_ReferenceLayout, "plain"]
"""Program that wrote a session. `plain` means chat messages of any program."""
REFERENCE_LAYOUTS: Final[frozenset[Layout]] = frozenset(get_args(_ReferenceLayout))
"""Layouts that are imported automatically at every start."""
ALL_LAYOUTS: Final[frozenset[Layout]] = frozenset(get_args(Layout))
LOG_SUFFIX: Final = ".jsonl"
MIGRATED_SUFFIX: Final = ".migrated"
IMPORTED_NAME_END: Final = re.compile(rf"\.json(?:l)?{re.escape(MIGRATED_SUFFIX)}(?:-\d+)?$")
"""Pattern for the end of the name of an imported file."""


UNMERGED_FIELDS: Final = NOT_FORKED | {
    *("aliases", "compacted", "imported", "importing", FORKED_AT, withdrawn_messages.META_FIELD)
}
"""Meta fields that are not copied from a fallback store, because they describe seqs or imports."""


class LegacySession(Struct, frozen=True, kw_only=True):
    """A session of another program, converted to the types of stenolog."""

    layout: Layout
    key: str
    messages: tuple[JSONMessage, ...]
    summary: str = ""
    previous_summary: str = ""
    """Summary when the fallback store first wrote the file; empty for files of other programs."""
    aliases: tuple[str, ...] = ()
    """Other names that the program or its users gave the session."""
    agent: str | None = None
    channel: str | None = None
    meta: dict[str, Any] = {}
    """Meta fields, which only sessions of stenolog have."""
    created: datetime
    updated: datetime
    dropped: int = 0
    """Number of lines or messages that could not be read or stored."""
    problems: tuple[str, ...] = ()
    """One sentence for each part that could not be imported, with the reason."""


def make_session(
    messages: Sequence[JSONMessage],
    *,
    mtime: datetime,
    created: datetime | None = None,
    updated: datetime | None = None,
    **fields: Any,
) -> LegacySession:
    """Return the session. Missing times are taken from the messages, or else from `mtime`."""
    times = [message.at for message in messages if message.at is not None]
    created = created or min(times, default=mtime)
    updated = updated or max(times, default=mtime)
    timed_messages = _with_times(messages, created, updated)
    return LegacySession(messages=timed_messages, created=created, updated=updated, **fields)


def without_control_fields(session: LegacySession) -> LegacySession:
    """Return the session without fields that stenolog would act on.

    The reserved field of messages is removed, because it could name a sender, an address for
    answers or a turn to resume. Idempotency keys are removed, because they could make later
    messages look stored. The meta is removed, because it could name a model or an agent.
    """
    plain_messages = [
        replace(message, payload=without_reserved_field(message.payload), once=None)
        for message in session.messages
    ]
    return replace(session, messages=tuple(plain_messages), meta={})


def without_reserved_field(payload: bytes) -> bytes:
    """Return a stored message without the reserved field; unchanged if the field is missing."""
    # The name of the field may be written with JSON escapes, so a backslash requires decoding.
    if FIELD.encode() not in payload and b"\\" not in payload:
        return payload
    fields = decode_object(payload)
    if FIELD not in fields:
        return payload
    return encode_object(without_marks(fields))


def without_oversized_summary(session: LegacySession) -> LegacySession:
    """Return the session, without its summary if the summary is too large to be stored."""
    try:
        encode_object({"summary": session.summary})
    except RefusedMessage as error:
        problem = f"the summary was skipped: {error.reason}"
        return replace(session, summary="", problems=(*session.problems, problem))
    return session


def time_of_nanoseconds(nanoseconds: int) -> datetime:
    """Return the time this many nanoseconds after 1970, cut to microseconds."""
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=nanoseconds // 1000)


def _with_times(
    messages: Sequence[JSONMessage], created: datetime, updated: datetime
) -> tuple[JSONMessage, ...]:
    """Return the messages, each with a time.

    A message without a time gets the time of the message before it. If the first message has no
    time, it gets `created`. If the last message has no time, it gets `updated`.
    """
    timed_messages = []
    at = created
    for position, message in enumerate(messages, 1):
        is_last = 1 < position == len(messages)
        at = message.at or (max(at, updated) if is_last else at)
        timed_messages.append(replace(message, at=at))
    return tuple(timed_messages)


class Source(Struct, frozen=True, kw_only=True):
    """The file or files of one old session."""

    name: str
    """Original name of the session's file, before an import renamed the file."""
    body: str | None
    """Current name of the file with the messages; None if there is only a meta file."""
    meta: str | None = None
    """Current name of the `.meta.json` file."""
    bytes: int = 0

    @property
    def files(self) -> tuple[str, ...]:
        """Files that an import of this session renames, in this order: the meta file first."""
        names = [name for name in (self.meta, self.body) if name is not None]
        return tuple(name for name in names if IMPORTED_NAME_END.search(name) is None)


class SourceContent(Struct, frozen=True):
    """A session that was read from its source."""

    session: LegacySession
    digest: str
    """Digest of the whole source, so that unchanged content is not imported twice."""
    mtime: datetime
    file_versions: tuple[tuple[int, int, int], ...]
    """Inode, size and modification time of each file, to detect changes."""
