"""Decides which old data is added to an existing session. Newer data is never replaced.

Messages with a token (idempotency key) are recognized by their token, at any position. Each message
that was added to a fallback store has a token. A session forgets old tokens. So the receipt of an
import from a fallback store also has a digest of the merged messages.

Messages without a token are compared by content. Either the existing messages are a prefix of the
old session, or the old session is a prefix of the existing messages. If a program truncates its
files, the old session may also start with the end of the existing messages. In any other case, the
old session is another conversation and gets a separate session. All functions are pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from typing import Any, Final

from msgspec import Struct

from stenolog.codec import MAX_KEY_BYTES
from stenolog.records import decode_object
from stenolog.stores.json_file import JSONMessage
from stenolog.transfer.importers.legacy_session import REFERENCE_LAYOUTS, LegacySession

MESSAGES_DIGEST: Final = "said_sha256"
"""Receipt field: digest of the messages merged from a fallback store (`prefix_digests`)."""
SUMMARY_DIGEST: Final = "summary_sha256"
"""Receipt field: digest of the imported summary."""
IMPORT_TIME: Final = "taken"
"""Receipt field: time of the import. For retention rules, the session is no older than this."""
REMEMBERED_TOKENS: Final = 1_000
"""Number of the newest messages whose tokens a session is certain to know."""
SEPARATE_SUFFIX: Final = " (legacy "
"""Text between the old key and the date in the key of a session that is kept separately."""
TRUNCATING_LAYOUTS: Final = ("nanobot",)
"""Programs that keep only the newest messages. The times make their messages unique."""
OTHER_PROGRAMS: Final = REFERENCE_LAYOUTS - {"stenolog-json"}
"""Programs whose sessions do not record which summary they started with."""
MAX_SEPARATE_SESSIONS: Final = 100
"""Maximum number of separate sessions per key and day; more are an error."""


class ExistingSession(Struct, frozen=True, kw_only=True):
    """The data of an existing session that a merge needs."""

    payloads: Sequence[bytes] = ()
    seqs: Sequence[int] = ()
    times: Sequence[datetime] = ()
    """Time of each message."""
    summary: str = ""
    floor: int = 0
    meta: Mapping[str, Any] = {}
    updated: datetime | None = None

    def started_import(self, digest: str) -> bool | None:
        """Return `include_state` of an unfinished import of the content with this digest.

        Return None if there is no such import. A resumed import keeps its first decision, even if
        the session has changed since.
        """
        mark = self.meta.get("importing")
        if not isinstance(mark, dict) or mark.get("sha256") != digest:
            return None
        return mark.get("carry") is True


class Merge(Struct, frozen=True, kw_only=True):
    """The decision how an old session is merged with an existing session."""

    seqs: tuple[int, ...] = ()
    """Seqs, in the existing session, of the first messages of the old session.

    The existing session already has these messages. The seq is 0 for a message that was imported
    earlier and has since been moved or purged.
    """
    include_state: bool = True
    """Whether the old summary is imported, and hidden messages stay hidden."""


def plan_merge(old_session: LegacySession, digest: str, existing: ExistingSession) -> Merge | None:
    """Return how to merge the old session with the existing session.

    Return None if the old session is another conversation.
    """
    payloads = [message.payload for message in old_session.messages]
    merged_count = count_merged_messages(old_session, existing.meta)
    token_indexes = (n for n, m in enumerate(old_session.messages) if m.once is not None)
    # A session that was merged once is not another conversation, even if it was changed since.
    first_with_token = 0 if merged_count else next(token_indexes, len(payloads))
    common = _common_prefix(payloads, existing.payloads)
    old_has_all = common == len(existing.payloads)
    if (
        common < first_with_token
        and not old_has_all
        and (known_seqs := _overlapping_seqs(old_session, payloads, existing))
    ):
        return Merge(seqs=tuple(known_seqs), include_state=False)
    if common < first_with_token and not old_has_all:  # guard: import-keeps-conversations-apart
        return None
    known_seqs = existing.seqs[: min(common, first_with_token)]
    if first_with_token < len(payloads):
        known_seqs = max(known_seqs, _seqs_of_old_merge(payloads, existing), key=len)
    if merged_count > len(known_seqs):
        known_seqs = (*existing.seqs[: min(common, merged_count)], *[0] * (merged_count - common))
    resumed_choice = existing.started_import(digest)
    has_grown = len(existing.payloads) < len(payloads) or old_session.layout == "stenolog-json"
    saw_all = old_has_all and merged_count <= common and has_grown
    saw_all = saw_all or (old_has_all and _has_hidden_more(old_session, existing))
    include_state = saw_all if resumed_choice is None else resumed_choice
    is_old_summary = existing.summary in ("", old_session.previous_summary, old_session.summary)
    if old_session.layout not in OTHER_PROGRAMS:
        is_old_summary = is_old_summary or _is_imported_summary(existing)
    is_untouched = is_old_summary and existing.floor <= hidden_prefix(old_session)
    return Merge(seqs=tuple(known_seqs), include_state=is_untouched and include_state)


def import_receipts(meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the receipts of all imports into a session."""
    receipts = meta.get("imported")
    return [r for r in receipts if isinstance(r, dict)] if isinstance(receipts, list) else []


def is_imported(meta: Mapping[str, Any], digest: str) -> bool:
    """Return whether the content with this digest was completely imported into a session."""
    return any(receipt.get("sha256") == digest for receipt in import_receipts(meta))


def count_merged_messages(old_session: LegacySession, meta: Mapping[str, Any]) -> int:
    """Return the number of messages at the start of `old_session` that are already merged."""
    if old_session.layout != "stenolog-json":
        return 0
    digests = {
        receipt[MESSAGES_DIGEST]
        for receipt in import_receipts(meta)
        if isinstance(receipt.get(MESSAGES_DIGEST), str)
    }
    if not digests:
        return 0
    counts = (
        n for n, digest in enumerate(prefix_digests(old_session.messages), 1) if digest in digests
    )
    return max(counts, default=0)


def prefix_digests(messages: Sequence[JSONMessage]) -> Iterator[str]:
    """Yield, for each message, the digest of all messages up to this message and their tokens."""
    digest = sha256()
    for message in messages:
        token = (message.once or "").encode("utf-8", "surrogatepass")
        digest.update(b"%d:%d:" % (len(token), len(message.payload)) + token + message.payload)
        yield digest.hexdigest()


def hidden_prefix(old_session: LegacySession) -> int:
    """Return the number of hidden messages before the first visible message."""
    visible_indexes = (n for n, message in enumerate(old_session.messages) if not message.hidden)
    return next(visible_indexes, len(old_session.messages))


def separate_key_prefix(key: str) -> str:
    """Return the common prefix of the keys that `separate_keys` yields for this key."""
    return f"{key}{SEPARATE_SUFFIX}"


def separate_keys(key: str, day: datetime) -> Iterator[str]:
    """Yield keys for an old session whose own key belongs to another conversation."""
    for number in range(1, MAX_SEPARATE_SESSIONS + 1):
        ending = f"{SEPARATE_SUFFIX}{day:%Y-%m-%d}{'' if number == 1 else f' {number}'})"
        max_bytes = MAX_KEY_BYTES - len(ending.encode())
        yield key.encode()[:max_bytes].decode(errors="ignore") + ending


def _common_prefix(payloads: Sequence[bytes], stored_payloads: Sequence[bytes]) -> int:
    """Return the number of messages at the start that are equal in both sequences."""
    same_count = 0
    for old_payload, stored_payload in zip(payloads, stored_payloads, strict=False):
        if old_payload != stored_payload and not _differs_only_in_time(old_payload, stored_payload):
            break
        same_count += 1
    return same_count


def _differs_only_in_time(old_payload: bytes, stored_payload: bytes) -> bool:
    """Return whether only the stored message has `created_at`, and all other fields are equal.

    picoclaw adds this field to its older messages.
    """
    if b'"created_at"' not in stored_payload or b'"created_at"' in old_payload:
        return False
    fields = decode_object(stored_payload)
    fields.pop("created_at", None)
    return fields == decode_object(old_payload)


def _overlapping_seqs(
    old_session: LegacySession, old_payloads: Sequence[bytes], existing: ExistingSession
) -> Sequence[int]:
    """Return the stored seqs of the first old messages, if the program truncated its file."""
    if old_session.layout not in TRUNCATING_LAYOUTS:
        return ()
    length = _overlap_length(existing.payloads, old_payloads)
    return existing.seqs[-length:] if length else ()


def _overlap_length(stored_payloads: Sequence[bytes], old_payloads: Sequence[bytes]) -> int:
    """Return how many old payloads at the start equal the stored payloads at the end."""
    for length in range(min(len(old_payloads), len(stored_payloads)), 0, -1):
        is_same_start = stored_payloads[-length] == old_payloads[0]
        if is_same_start and list(stored_payloads[-length:]) == list(old_payloads[:length]):
            return length
    return 0


def _has_hidden_more(old_session: LegacySession, existing: ExistingSession) -> bool:
    """Return whether a program still in use has hidden more messages without adding any."""
    return (
        old_session.layout not in REFERENCE_LAYOUTS and hidden_prefix(old_session) > existing.floor
    )


def _is_imported_summary(existing: ExistingSession) -> bool:
    """Return whether the current summary came from an earlier import."""
    return any(
        receipt.get(SUMMARY_DIGEST) == summary_digest(existing.summary)
        for receipt in import_receipts(existing.meta)
    )


def summary_digest(text: str) -> str:
    """Return a digest that identifies an imported summary."""
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _seqs_of_old_merge(payloads: Sequence[bytes], existing: ExistingSession) -> Sequence[int]:
    """Return the seqs of old messages whose tokens the session may have forgotten.

    An interrupted merge left these messages at the end of the existing messages, in order.
    """
    length = _overlap_length(existing.payloads, payloads)
    return existing.seqs[-length:][: max(0, length - REMEMBERED_TOKENS)] if length else ()
