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
from stenolog.transfer.importers.legacy_session import OF_THE_REFERENCE, LegacySession

SAID: Final = "said_sha256"
"""Receipt field of a fallback: digest of the merged messages and tokens, as in `digests`."""
SUMMARY: Final = "summary_sha256"
"""Receipt field: digest of the imported summary."""
TAKEN: Final = "taken"
"""Receipt field: time of the import. Retention counts from then on."""
TOKENS_KEPT: Final = 1_000
"""Number of the newest messages whose tokens a session is certain to know."""
APART: Final = " (legacy "
"""Follows the key in the name of a session that is kept separately."""
CUT_DOWN: Final = ("nanobot",)
"""Programs that keep only the newest messages. Each message has its time and is thus unique."""
OTHER_PROGRAMS: Final = OF_THE_REFERENCE - {"stenolog-json"}
"""Programs that do not record which summary they started with."""
MAX_NAMES: Final = 100
"""Maximum number of separate sessions per key and day; more are an error."""


class ExistingSession(Struct, frozen=True, kw_only=True):
    """The data of an existing session that a merge needs."""

    payloads: Sequence[bytes] = ()
    seqs: Sequence[int] = ()
    said: Sequence[datetime] = ()
    """Time of each message."""
    summary: str = ""
    floor: int = 0
    meta: Mapping[str, Any] = {}
    updated: datetime | None = None

    def begun(self, digest: str) -> "StartedImport | None":
        """Return the decision of an unfinished import of exactly this content, else None."""
        mark = self.meta.get("importing")
        if not isinstance(mark, dict) or mark.get("sha256") != digest:
            return None
        return StartedImport(carry=mark.get("carry") is True)


class StartedImport(Struct, frozen=True):
    """An unfinished merge. It continues with its first decision, whatever the session has now."""

    carry: bool


class Merge(Struct, frozen=True, kw_only=True):
    """The decision how to merge."""

    seqs: tuple[int, ...] = ()
    """Seqs of the first old messages, as far as the session has them already.

    0 for a message that was imported earlier and has since been moved or purged.
    """
    carry: bool = True
    """Whether the old summary and the hidden messages are imported too."""


def decide(old: LegacySession, digest: str, there: ExistingSession) -> Merge | None:
    """Decide how the old session merges with the existing one; None: it is another conversation."""
    given = [message.payload for message in old.messages]
    merged = merged_before(old, there.meta)
    tokened = (n for n, m in enumerate(old.messages) if m.once is not None)
    # A session that was merged once is not another conversation, whatever changed here since.
    plain = 0 if merged else next(tokened, len(given))
    common = _common(given, there.payloads)
    has_all = common == len(there.payloads)
    if common < plain and not has_all and (known := _kept_end(old, given, there)):
        return Merge(seqs=tuple(known), carry=False)
    if common < plain and not has_all:  # guard: import-keeps-conversations-apart
        return None
    known = there.seqs[: min(common, plain)]
    if plain < len(given):
        known = max(known, _settled(given, there), key=len)
    if merged > len(known):
        known = (*there.seqs[: min(common, merged)], *[0] * (merged - common))
    begun = there.begun(digest)
    grown = len(there.payloads) < len(given) or old.layout == "stenolog-json"
    saw_all = has_all and merged <= common and grown
    saw_all = saw_all or (has_all and _hid_more(old, there))
    carry = saw_all if begun is None else begun.carry  # guard: resumed-merge-keeps-decision
    theirs = there.summary in ("", old.began_with, old.summary)
    if old.layout not in OTHER_PROGRAMS:
        theirs = theirs or _was_carried(there)
    untouched = theirs and there.floor <= hidden_start(old)
    return Merge(seqs=tuple(known), carry=untouched and carry)


def receipts(meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the receipts of all imports into a session."""
    found = meta.get("imported")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def is_taken_in(meta: Mapping[str, Any], digest: str) -> bool:
    """Return whether exactly these bytes were completely imported into a session."""
    return any(one.get("sha256") == digest for one in receipts(meta))


def merged_before(old: LegacySession, meta: Mapping[str, Any]) -> int:
    """Return how many of its first messages a fallback has already added to this session."""
    if old.layout != "stenolog-json":
        return 0
    receipted = {one[SAID] for one in receipts(meta) if isinstance(one.get(SAID), str)}
    if not receipted:
        return 0
    found = (n for n, digest in enumerate(digests(old.messages), 1) if digest in receipted)
    return max(found, default=0)


def digests(messages: Sequence[JSONMessage]) -> Iterator[str]:
    """Yield for each message the digest of all messages up to it, with their tokens."""
    so_far = sha256()
    for message in messages:
        token = (message.once or "").encode("utf-8", "surrogatepass")
        so_far.update(b"%d:%d:" % (len(token), len(message.payload)) + token + message.payload)
        yield so_far.hexdigest()


def hidden_start(old: LegacySession) -> int:
    """Return how many messages are hidden from the first one on."""
    visible = (n for n, message in enumerate(old.messages) if not message.hidden)
    return next(visible, len(old.messages))


def begins_apart(key: str) -> str:
    """Return the prefix of the keys for sessions kept separately from this key."""
    return f"{key}{APART}"


def names_apart(key: str, day: datetime) -> Iterator[str]:
    """Yield keys for an old session whose own key belongs to another conversation."""
    for number in range(1, MAX_NAMES + 1):
        ending = f"{APART}{day:%Y-%m-%d}{'' if number == 1 else f' {number}'})"
        room = MAX_KEY_BYTES - len(ending.encode())
        yield key.encode()[:room].decode(errors="ignore") + ending


def _common(given: Sequence[bytes], there: Sequence[bytes]) -> int:
    """Return how many messages are the same from the first one on."""
    same = 0
    for old, stored in zip(given, there, strict=False):
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


def _kept_end(old: LegacySession, given: Sequence[bytes], there: ExistingSession) -> Sequence[int]:
    """Return the seqs of the first old messages, if the program truncated its file."""
    if old.layout not in CUT_DOWN:
        return ()
    # Longest match first: the existing messages end with the start of the file.
    for length in range(min(len(given), len(there.payloads)), 0, -1):
        same = there.payloads[-length] == given[0]
        if same and list(there.payloads[-length:]) == list(given[:length]):
            return there.seqs[-length:]
    return ()


def _hid_more(old: LegacySession, there: ExistingSession) -> bool:
    """Return whether a program still in use has hidden more messages without adding any."""
    return old.layout not in OF_THE_REFERENCE and hidden_start(old) > there.floor


def _was_carried(there: ExistingSession) -> bool:
    """Return whether the current summary came from an earlier import."""
    return any(one.get(SUMMARY) == summary_digest(there.summary) for one in receipts(there.meta))


def summary_digest(text: str) -> str:
    """Return a digest that identifies an imported summary."""
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _settled(given: Sequence[bytes], there: ExistingSession) -> Sequence[int]:
    """Return the seqs of old messages that were merged so long ago that tokens may be forgotten.

    An interrupted merge left them at the end of the existing messages, in their order.
    """
    for length in range(min(len(given), len(there.payloads)), TOKENS_KEPT, -1):
        same = there.payloads[-length] == given[0]
        if same and list(there.payloads[-length:]) == list(given[:length]):
            return there.seqs[-length:][: length - TOKENS_KEPT]
    return ()
