"""The source of a fork: the session that a session was forked from, and the last copied message."""

from contextlib import suppress
from typing import Final

from msgspec import Struct

from stenolog.catalog.message_metadata import identity_of
from stenolog.catalog.searchable_text import last_copied_from, source_from
from stenolog.errors import StenologError
from stenolog.records import SessionInfo
from stenolog.stores.base import Store, fork_seq_of
from stenolog.stores.snapshots import iterate_messages

_MAX_SEARCHED_MESSAGES: Final = 20_000
"""A source session with more messages is not searched for the last copied message."""


class ForkSource(Struct, frozen=True, kw_only=True):
    """The session that a session was forked from."""

    key: str
    seq: int
    """Seq of the last copied message in the source session; 0 if unknown."""

    def __str__(self) -> str:
        return f"forked from {self.key}" + (f" at message {self.seq}" if self.seq else "")


def fork_source(info: SessionInfo) -> ForkSource | None:
    """Return the source that the session itself names; None if it names none. Pure function."""
    source = info.forked_from or source_from(info.meta)
    if not source:
        return None
    return ForkSource(key=source, seq=fork_seq_of(info))


def find_fork_source(store: Store, info: SessionInfo) -> ForkSource | None:
    """Return the source. If its seq is unknown, search the source for the last copied message.

    If another program made the fork, the meta has the identity of the last copied message instead
    of its seq, because the seqs may differ.
    """
    source, identity = fork_source(info), last_copied_from(info.meta)
    if source is None or source.seq or not identity:
        return source
    encoded_id, seq = identity.encode(), 0
    with suppress(StenologError):  # The source may be missing or damaged, or have an invalid key.
        source_info = store.info(source.key)
        if source_info.count <= _MAX_SEARCHED_MESSAGES:
            messages = iterate_messages(store, source_info)
            candidates = (m for m in messages if encoded_id in m.to_json())
            seqs = (m.seq for m in candidates if identity_of(m.to_dict()) == identity)
            seq = max(seqs, default=0)
    return ForkSource(key=source.key, seq=seq)
