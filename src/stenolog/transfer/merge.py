"""Decides what an old session adds to an existing one, never old data over newer. Pure.

Messages with a token (each message of a fallback has one) are merged by it, wherever they belong. A
session forgets tokens in time, so the receipt of a fallback records how far it was merged.

Other messages are compared. Either the existing messages are a prefix of the old session, or the
old session is a prefix of the existing messages. If its program truncates its files, the old
session may also start with the end of the existing messages. Anything else is another conversation
and gets a separate session.
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
"""Receipt field of a fallback: digest of the merged messages and tokens, as in `prefix_digests`."""
SUMMARY_DIGEST: Final = "summary_sha256"
"""Receipt field: digest of the imported summary."""
IMPORT_TIME: Final = "taken"
"""Receipt field: time of the import. Retention counts from then on."""
REMEMBERED_TOKENS: Final = 1_000
"""Number of the newest messages whose tokens a session is certain to know."""
SEPARATE_SUFFIX: Final = " (legacy "
"""Follows the key in the name of a session that is kept separately."""
TRUNCATING_LAYOUTS: Final = ("nanobot",)
"""Programs that keep only the newest messages. Each message has its time and is thus unique."""
OTHER_PROGRAMS: Final = REFERENCE_LAYOUTS - {"stenolog-json"}
"""Programs that do not record which summary they started with."""
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
        """Return `include_state` of an unfinished import of exactly this content, else None.

        That import continues with its first decision, whatever the session contains now.
        """
        mark = self.meta.get("importing")
        if not isinstance(mark, dict) or mark.get("sha256") != digest:
            return None
        return mark.get("carry") is True


class Merge(Struct, frozen=True, kw_only=True):
    """The decision how to merge."""

    seqs: tuple[int, ...] = ()
    """Seqs of the first old messages, as far as the session has them already.

    0 for a message that was imported earlier and has since been moved or purged.
    """
    include_state: bool = True
    """Whether the old summary and the hidden messages are imported too."""


def plan_merge(old: LegacySession, digest: str, existing: ExistingSession) -> Merge | None:
    """Decide how the old session merges with the existing one; None: it is another conversation."""
    payloads = [message.payload for message in old.messages]
    merged_count = count_merged(old, existing.meta)
    tokened = (n for n, m in enumerate(old.messages) if m.once is not None)
    # A session that was merged once is not another conversation, whatever changed here since.
    first_with_token = 0 if merged_count else next(tokened, len(payloads))
    common = _common_prefix(payloads, existing.payloads)
    has_all = common == len(existing.payloads)
    if (
        common < first_with_token
        and not has_all
        and (known := _overlapping_seqs(old, payloads, existing))
    ):
        return Merge(seqs=tuple(known), include_state=False)
    if common < first_with_token and not has_all:  # guard: import-keeps-conversations-apart
        return None
    known = existing.seqs[: min(common, first_with_token)]
    if first_with_token < len(payloads):
        known = max(known, _seqs_of_old_merge(payloads, existing), key=len)
    if merged_count > len(known):
        known = (*existing.seqs[: min(common, merged_count)], *[0] * (merged_count - common))
    started = existing.started_import(digest)
    has_grown = len(existing.payloads) < len(payloads) or old.layout == "stenolog-json"
    saw_all = has_all and merged_count <= common and has_grown
    saw_all = saw_all or (has_all and _hides_more(old, existing))
    # guard: resumed-merge-keeps-decision
    include_state = saw_all if started is None else started
    is_their_summary = existing.summary in ("", old.previous_summary, old.summary)
    if old.layout not in OTHER_PROGRAMS:
        is_their_summary = is_their_summary or _is_imported_summary(existing)
    untouched = is_their_summary and existing.floor <= hidden_prefix(old)
    return Merge(seqs=tuple(known), include_state=untouched and include_state)


def import_receipts(meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the receipts of all imports into a session."""
    found = meta.get("imported")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def is_imported(meta: Mapping[str, Any], digest: str) -> bool:
    """Return whether exactly these bytes were completely imported into a session."""
    return any(one.get("sha256") == digest for one in import_receipts(meta))


def count_merged(old: LegacySession, meta: Mapping[str, Any]) -> int:
    """Return how many of its first messages a fallback has already added to this session."""
    if old.layout != "stenolog-json":
        return 0
    receipted = {
        one[MESSAGES_DIGEST]
        for one in import_receipts(meta)
        if isinstance(one.get(MESSAGES_DIGEST), str)
    }
    if not receipted:
        return 0
    found = (n for n, digest in enumerate(prefix_digests(old.messages), 1) if digest in receipted)
    return max(found, default=0)


def prefix_digests(messages: Sequence[JSONMessage]) -> Iterator[str]:
    """Yield for each message the digest of all messages up to it, with their tokens."""
    so_far = sha256()
    for message in messages:
        token = (message.once or "").encode("utf-8", "surrogatepass")
        so_far.update(b"%d:%d:" % (len(token), len(message.payload)) + token + message.payload)
        yield so_far.hexdigest()


def hidden_prefix(old: LegacySession) -> int:
    """Return how many messages are hidden from the first one on."""
    visible = (n for n, message in enumerate(old.messages) if not message.hidden)
    return next(visible, len(old.messages))


def separate_key_prefix(key: str) -> str:
    """Return the prefix of the keys for sessions kept separately from this key."""
    return f"{key}{SEPARATE_SUFFIX}"


def separate_keys(key: str, day: datetime) -> Iterator[str]:
    """Yield keys for an old session whose own key belongs to another conversation."""
    for number in range(1, MAX_SEPARATE_SESSIONS + 1):
        ending = f"{SEPARATE_SUFFIX}{day:%Y-%m-%d}{'' if number == 1 else f' {number}'})"
        room = MAX_KEY_BYTES - len(ending.encode())
        yield key.encode()[:room].decode(errors="ignore") + ending


def _common_prefix(payloads: Sequence[bytes], existing: Sequence[bytes]) -> int:
    """Return how many messages are the same from the first one on."""
    same = 0
    for old, stored in zip(payloads, existing, strict=False):
        if old != stored and not _same_but_for_time(old, stored):
            break
        same += 1
    return same


def _same_but_for_time(old: bytes, stored: bytes) -> bool:
    """Return whether only `created_at` differs, which picoclaw adds to its older messages."""
    if b'"created_at"' not in stored or b'"created_at"' in old:
        return False
    fields = decode_object(stored)
    fields.pop("created_at", None)
    return fields == decode_object(old)


def _overlapping_seqs(
    old: LegacySession, payloads: Sequence[bytes], existing: ExistingSession
) -> Sequence[int]:
    """Return the seqs of the first old messages, if the program truncated its file."""
    if old.layout not in TRUNCATING_LAYOUTS:
        return ()
    # Longest match first: the existing messages end with the start of the file.
    for length in range(min(len(payloads), len(existing.payloads)), 0, -1):
        same = existing.payloads[-length] == payloads[0]
        if same and list(existing.payloads[-length:]) == list(payloads[:length]):
            return existing.seqs[-length:]
    return ()


def _hides_more(old: LegacySession, existing: ExistingSession) -> bool:
    """Return whether a program still in use has hidden more messages without adding any."""
    return old.layout not in REFERENCE_LAYOUTS and hidden_prefix(old) > existing.floor


def _is_imported_summary(existing: ExistingSession) -> bool:
    """Return whether the current summary came from an earlier import."""
    return any(
        one.get(SUMMARY_DIGEST) == summary_digest(existing.summary)
        for one in import_receipts(existing.meta)
    )


def summary_digest(text: str) -> str:
    """Return a digest that identifies an imported summary."""
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _seqs_of_old_merge(payloads: Sequence[bytes], existing: ExistingSession) -> Sequence[int]:
    """Return the seqs of old messages that were merged so long ago that tokens may be forgotten.

    An interrupted merge left them at the end of the existing messages, in their order.
    """
    for length in range(min(len(payloads), len(existing.payloads)), REMEMBERED_TOKENS, -1):
        same = existing.payloads[-length] == payloads[0]
        if same and list(existing.payloads[-length:]) == list(payloads[:length]):
            return existing.seqs[-length:][: length - REMEMBERED_TOKENS]
    return ()
