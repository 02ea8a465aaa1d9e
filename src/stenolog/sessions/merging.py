"""What an old session adds to one that is there: pure, and never old over newer.

Messages with a token (those of a fallback have one each) are merged by it, wherever they belong. A
session forgets tokens in time, so the receipt of a fallback says how far it was merged.
The others are compared: what is there must be a beginning of the old session, or the old session a
beginning of what is there (or, where its program cuts its files down, begin with the end of it);
anything else is another conversation and gets a session of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from typing import Any, Final

from msgspec import Struct

from stenolog.codec import MAX_KEY_BYTES
from stenolog.records import decode_object
from stenolog.sessions.importers.old import OF_THE_REFERENCE, OldSession
from stenolog.stores.json_file import KeptMessage

SAID: Final = "said_sha256"
"""In the receipt of a fallback: the messages and tokens that were merged, as `digests` has them."""
SUMMARY: Final = "summary_sha256"
"""In a receipt: the summary that was carried."""
TAKEN: Final = "taken"
"""In a receipt: when it was made. Retention counts from then on."""
TOKENS_KEPT: Final = 1_000
"""For so many of its newest messages a session surely knows the tokens."""
APART: Final = " (legacy "
"""What follows the key in the name of a session that is kept apart."""
CUT_DOWN: Final = ("nanobot",)
"""Who rewrites a session with its newest messages alone; each has its time, so none is like it."""
OTHER_PROGRAMS: Final = OF_THE_REFERENCE - {"stenolog-json"}
"""Programs that do not say which summary they began with."""
MAX_NAMES: Final = 100
"""How many sessions of one key, and one day, are kept apart before it is called a fault."""


class There(Struct, frozen=True, kw_only=True):
    """A session of the store, as far as merging must know it."""

    payloads: Sequence[bytes] = ()
    seqs: Sequence[int] = ()
    said: Sequence[datetime] = ()
    """When each message was."""
    summary: str = ""
    floor: int = 0
    meta: Mapping[str, Any] = {}
    updated: datetime | None = None

    def begun(self, digest: str) -> "Begun | None":
        """What was decided when somebody began to take exactly this in, and did not finish."""
        mark = self.meta.get("importing")
        if not isinstance(mark, dict) or mark.get("sha256") != digest:
            return None
        return Begun(carry=mark.get("carry") is True)


class Begun(Struct, frozen=True):
    """A merge that was begun: it goes on as it was decided then, whatever it finds by now."""

    carry: bool


class Merge(Struct, frozen=True, kw_only=True):
    """What is to be done."""

    seqs: tuple[int, ...] = ()
    """Where the first old messages stand that are there already.

    0 for one that was taken in earlier and stands elsewhere by now, or was purged.
    """
    carry: bool = True
    """Whether the old summary and hidden part are taken over, too."""


def decide(old: OldSession, digest: str, there: There) -> Merge | None:
    """How the old session merges with what is there; None: it is another conversation."""
    given = [message.payload for message in old.messages]
    merged = merged_before(old, there.meta)
    tokened = (n for n, m in enumerate(old.messages) if m.once is not None)
    # What was merged once is no other conversation, whatever became of it here.
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
    """What was taken in into a session so far."""
    found = meta.get("imported")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def is_taken_in(meta: Mapping[str, Any], digest: str) -> bool:
    """Whether exactly these bytes were taken in into a session, to the end."""
    return any(one.get("sha256") == digest for one in receipts(meta))


def merged_before(old: OldSession, meta: Mapping[str, Any]) -> int:
    """Return how many of its first messages a fallback has given to this session already."""
    if old.layout != "stenolog-json":
        return 0
    receipted = {one[SAID] for one in receipts(meta) if isinstance(one.get(SAID), str)}
    if not receipted:
        return 0
    found = (n for n, digest in enumerate(digests(old.messages), 1) if digest in receipted)
    return max(found, default=0)


def digests(messages: Sequence[KeptMessage]) -> Iterator[str]:
    """For each message: that of all from the first one to it, with their tokens."""
    so_far = sha256()
    for message in messages:
        token = (message.once or "").encode("utf-8", "surrogatepass")
        so_far.update(b"%d:%d:" % (len(token), len(message.payload)) + token + message.payload)
        yield so_far.hexdigest()


def hidden_start(old: OldSession) -> int:
    """How many messages are hidden from the first one on."""
    visible = (n for n, message in enumerate(old.messages) if not message.hidden)
    return next(visible, len(old.messages))


def begins_apart(key: str) -> str:
    """How the names begin that sessions of this key get beside another conversation."""
    return f"{key}{APART}"


def names_apart(key: str, day: datetime) -> Iterator[str]:
    """Keys for an old session whose own key belongs to another conversation."""
    for number in range(1, MAX_NAMES + 1):
        ending = f"{APART}{day:%Y-%m-%d}{'' if number == 1 else f' {number}'})"
        room = MAX_KEY_BYTES - len(ending.encode())
        yield key.encode()[:room].decode(errors="ignore") + ending


def _common(given: Sequence[bytes], there: Sequence[bytes]) -> int:
    """How many messages are the same from the first one on."""
    same = 0
    for old, stored in zip(given, there, strict=False):
        if old != stored and not _same_but_for_time(old, stored):
            break
        same += 1
    return same


def _same_but_for_time(old: bytes, stored: bytes) -> bool:
    """A message that picoclaw dated when it took it over from its older store."""
    if b'"created_at"' not in stored or b'"created_at"' in old:
        return False
    fields = decode_object(stored)
    fields.pop("created_at", None)
    return fields == decode_object(old)


def _kept_end(old: OldSession, given: Sequence[bytes], there: There) -> Sequence[int]:
    """Where the first old messages stand, if that program cut its file down to the newest ones."""
    if old.layout not in CUT_DOWN:
        return ()
    # The longest: what is there ends with what the file begins with.
    for length in range(min(len(given), len(there.payloads)), 0, -1):
        same = there.payloads[-length] == given[0]
        if same and list(there.payloads[-length:]) == list(given[:length]):
            return there.seqs[-length:]
    return ()


def _hid_more(old: OldSession, there: There) -> bool:
    """Whether a program that goes on has hidden more since, and nothing was said anywhere."""
    return old.layout not in OF_THE_REFERENCE and hidden_start(old) > there.floor


def _was_carried(there: There) -> bool:
    """Whether the summary that is here came with an earlier import."""
    return any(one.get(SUMMARY) == summary_digest(there.summary) for one in receipts(there.meta))


def summary_digest(text: str) -> str:
    """Tells a summary that was carried from one that was written here."""
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _settled(given: Sequence[bytes], there: There) -> Sequence[int]:
    """Where those old messages stand that were merged so long ago that tokens may be forgotten.

    An interrupted merge left them at the end of what is there, in their order.
    """
    for length in range(min(len(given), len(there.payloads)), TOKENS_KEPT, -1):
        same = there.payloads[-length] == given[0]
        if same and list(there.payloads[-length:]) == list(given[:length]):
            return there.seqs[-length:][: length - TOKENS_KEPT]
    return ()
