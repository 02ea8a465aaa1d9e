"""The session from which stenolog or another program forked a session."""

from contextlib import suppress
from typing import Final

from stenolog.catalog.searchable_text import last_copied_from, source_from
from stenolog.errors import StenologError
from stenolog.records import SessionInfo
from stenolog.stores.base import Store, forked_at

_MAX_SEARCHED: Final = 20_000
"""The source session is searched only if it has at most this many messages."""


def fork_source_text(store: Store, info: SessionInfo) -> str:
    """Return `forked from KEY at message N` or `continues KEY at message N`; empty for others.

    A session that another program forked continues its source: it has only its own messages.
    """
    source = info.forked_from or source_from(info.meta)
    if not source:
        return ""
    seq = forked_at(info) or _last_copied_seq(store, source, last_copied_from(info.meta))
    verb = "forked from" if info.forked_from else "continues"
    return f"{verb} {source} at message {seq}" if seq else f"{verb} {source}"


def _last_copied_seq(store: Store, source: str, identity: str) -> int:
    """Return the seq of the message with this identity in the source session, or 0."""
    with suppress(StenologError):  # The source may be missing or damaged, or have an invalid key.
        if identity and store.info(source).count <= _MAX_SEARCHED:
            # This import is slow and only needed for forks of other programs.
            from stenolog.transfer.transcripts.transcript import identity_of

            encoded_id = identity.encode()
            messages = store.get_history(source, full=True)
            candidates = (m for m in messages if encoded_id in m.to_json())
            seqs = (m.seq for m in candidates if identity_of(m.to_dict()) == identity)
            return max(seqs, default=0)
    return 0
