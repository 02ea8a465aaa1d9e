"""Decides what an import adds to an existing session. Newer data is never replaced.

Messages with a token (idempotency key) are recognized by their token, at any position. Each message
that was added to a SessionManager has a token. A session forgets old tokens, so an import of a JSON
file of SessionManager also records a digest of the merged messages.

Messages without a token are compared by content. Two sessions are the same conversation if the
messages of one are a prefix of the messages of the other. In any other case, the old session is
another conversation and gets a separate session.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from typing import Any, Final

from msgspec import Raw, Struct

from stenolog.catalog.message_metadata import (
    FIELD,
    AnsweredMessages,
    answered_seqs,
    last_seen_seq,
    mark_seen,
    without_seqs,
)
from stenolog.codec import MAX_KEY_BYTES, encode_object
from stenolog.errors import NoSuchSession, RefusedMessage
from stenolog.messages import calls_of, has_text
from stenolog.records import Message, decode_object
from stenolog.stores.base import SessionView, Store
from stenolog.stores.json_file import JSONMessage
from stenolog.transfer.importers.legacy_session import LegacySession

MESSAGES_DIGEST: Final = "said_sha256"
"""Field of an import receipt: digest of the messages of a JSON file of SessionManager."""
SUMMARY_DIGEST: Final = "summary_sha256"
"""Field of an import receipt: digest of the imported summary."""
IMPORT_TIME: Final = "taken"
"""Field of an import receipt: time of the import. Retention periods do not start earlier."""
REMEMBERED_TOKENS: Final = 1_000
"""Number of newest messages whose tokens every session still knows."""
SEPARATE_SUFFIX: Final = " (legacy "
"""Text between the old key and the date in the key of a session that is kept separately."""
MAX_SEPARATE_SESSIONS: Final = 100
"""Maximum number of separate sessions per key and day. One more is an error."""


class ExistingSession(Struct, frozen=True, kw_only=True):
    """The data of an existing session that a merge needs."""

    payloads: Sequence[bytes] = ()
    """Messages without the seqs that they name, which differ in the old session."""
    seqs: Sequence[int] = ()
    times: Sequence[datetime] = ()
    """Time of each message."""
    summary: str = ""
    floor: int = 0
    meta: Mapping[str, Any] = {}
    updated: datetime | None = None

    def earlier_include_state(self, digest: str) -> bool | None:
        """Return the `include_state` that an unfinished import of this digest decided.

        Return None if no unfinished import has this digest. A resumed import keeps its first
        decision, even if the session has changed since.
        """
        import_mark = self.meta.get("importing")
        if not isinstance(import_mark, dict) or import_mark.get("sha256") != digest:
            return None
        return import_mark.get("carry") is True


class MergePlan(Struct, frozen=True, kw_only=True):
    """Plan for merging an old session into an existing session."""

    seqs: tuple[int, ...] = ()
    """Seqs of the first old messages, which are stored already.

    0 for a message that was moved or purged after an earlier import.
    """
    include_state: bool = True
    """Whether the old summary is imported, and hidden messages stay hidden."""


def plan_merge(
    old_session: LegacySession, digest: str, existing: ExistingSession
) -> MergePlan | None:
    """Return how to merge the old session with the existing session.

    Return None if the old session is another conversation.
    """
    payloads = [without_answer_seqs(message.payload) for message in old_session.messages]
    merged_count = count_merged_messages(old_session, existing.meta)
    token_indexes = (n for n, m in enumerate(old_session.messages) if m.once is not None)
    # A session that was merged before is the same conversation, even if it was changed since.
    compared_count = 0 if merged_count else next(token_indexes, len(payloads))
    common_count = _common_prefix_length(payloads, existing.payloads)
    has_all_existing = common_count == len(existing.payloads)
    has_diverged = common_count < compared_count and not has_all_existing
    if has_diverged:  # guard: import-keeps-conversations-apart
        return None
    earlier_decision = existing.earlier_include_state(digest)
    if earlier_decision is not None:
        # The first tokens of the unfinished import may be forgotten.
        compared_count = max(compared_count, common_count - REMEMBERED_TOKENS)
    known_seqs = existing.seqs[: min(common_count, compared_count)]
    if merged_count > len(known_seqs):
        known_seqs = (
            *existing.seqs[: min(common_count, merged_count)],
            *[0] * (merged_count - common_count),
        )
    has_grown = len(existing.payloads) < len(payloads) or old_session.layout == "stenolog-json"
    is_newest_state = has_all_existing and has_grown and merged_count <= common_count
    include_state = is_newest_state if earlier_decision is None else earlier_decision
    is_old_summary = existing.summary in ("", old_session.previous_summary, old_session.summary)
    # The files of picoclaw and zeroclaw do not record the first summary of a session.
    if old_session.layout == "stenolog-json":
        is_old_summary = is_old_summary or _has_imported_summary(existing)
    is_untouched = is_old_summary and existing.floor <= hidden_prefix_length(old_session)
    return MergePlan(seqs=tuple(known_seqs), include_state=is_untouched and include_state)


def receipts_of_imports(meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the receipts of all imports into a session."""
    receipts = meta.get("imported")
    return [r for r in receipts if isinstance(r, dict)] if isinstance(receipts, list) else []


def is_imported(meta: Mapping[str, Any], digest: str) -> bool:
    """Return whether the content with this digest was completely imported into a session."""
    return any(receipt.get("sha256") == digest for receipt in receipts_of_imports(meta))


def count_merged_messages(old_session: LegacySession, meta: Mapping[str, Any]) -> int:
    """Return the number of messages at the start of `old_session` that are already merged."""
    if old_session.layout != "stenolog-json":
        return 0
    digests = {
        receipt[MESSAGES_DIGEST]
        for receipt in receipts_of_imports(meta)
        if isinstance(receipt.get(MESSAGES_DIGEST), str)
    }
    if not digests:
        return 0
    numbered_digests = enumerate(prefix_digests(old_session.messages), 1)
    return max((n for n, digest in numbered_digests if digest in digests), default=0)


def prefix_digests(messages: Sequence[JSONMessage]) -> Iterator[str]:
    """Yield the digest of each prefix of the messages: of the first, of the first two, and so on.

    A digest covers the content and the token of each message in the prefix.
    """
    digest = sha256()
    for message in messages:
        token = (message.once or "").encode("utf-8", "surrogatepass")
        digest.update(b"%d:%d:" % (len(token), len(message.payload)) + token + message.payload)
        yield digest.hexdigest()


def hidden_prefix_length(old_session: LegacySession) -> int:
    """Return the number of hidden messages before the first visible message."""
    visible_indexes = (n for n, message in enumerate(old_session.messages) if not message.hidden)
    return next(visible_indexes, len(old_session.messages))


def separate_keys(key: str, day: datetime) -> Iterator[str]:
    """Yield keys for an old session whose own key belongs to another conversation."""
    for number in range(1, MAX_SEPARATE_SESSIONS + 1):
        ending = f"{SEPARATE_SUFFIX}{day:%Y-%m-%d}{'' if number == 1 else f' {number}'})"
        max_bytes = MAX_KEY_BYTES - len(ending.encode())
        yield key.encode()[:max_bytes].decode(errors="ignore") + ending


def _common_prefix_length(payloads: Sequence[bytes], stored_payloads: Sequence[bytes]) -> int:
    """Return the number of messages at the start that are equal in both sequences."""
    for count, (old, stored) in enumerate(zip(payloads, stored_payloads, strict=False)):
        if old != stored and not _differs_only_in_time(old, stored):
            return count
    return min(len(payloads), len(stored_payloads))


def _differs_only_in_time(old_payload: bytes, stored_payload: bytes) -> bool:
    """Return whether only the stored message has `created_at`, and all other fields are equal.

    picoclaw adds `created_at` to its older messages.
    """
    if b'"created_at"' not in stored_payload or b'"created_at"' in old_payload:
        return False
    fields = decode_object(stored_payload)
    fields.pop("created_at", None)
    return fields == decode_object(old_payload)


def _has_imported_summary(existing: ExistingSession) -> bool:
    """Return whether the summary of the existing session came from an earlier import."""
    return any(
        receipt.get(SUMMARY_DIGEST) == summary_digest(existing.summary)
        for receipt in receipts_of_imports(existing.meta)
    )


def summary_digest(text: str) -> str:
    """Return a digest that identifies an imported summary."""
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


# --- seqs that answers name ------------------------------------------------------------------
# An agent's messages name messages of their session by seq (`seen` and `answers`, see
# catalog/message_metadata.py). A merge adds messages to a session that has other messages, so they
# get other seqs there. With the old seqs, an answer would count as the answer to another message.


class AnswerSeqs(Struct):
    """The seqs that the added messages have in their new session.

    An added answer was written without the other messages of the new session, so it must not count
    as having seen a message there that waits for an answer.
    """

    seqs: dict[int, int] = {}
    """Seqs in the new session, by the seqs in the old session."""
    upto: int = 0
    """Last known seq of the new session."""
    unseen: int | None = None
    """Seq of the first message of the new session that no added answer has seen, or None."""

    @classmethod
    def in_view(cls, view: SessionView, seqs: dict[int, int]) -> "AnswerSeqs":
        """Return the seqs `seqs` of messages that the new session has already."""
        unseen = find_unseen(view.messages, set(seqs.values()))
        return cls(seqs=seqs, upto=view.upto, unseen=unseen)

    def add(self, old_seqs: Iterable[int], new_seqs: Sequence[int]) -> None:
        """Record that messages were added."""
        self.seqs.update(zip(old_seqs, new_seqs, strict=True))
        if new_seqs[0] > self.upto + 1 and self.unseen is None:
            self.unseen = self.upto + 1  # another process has added messages in the meantime
        self.upto = max(self.upto, new_seqs[-1])

    def payload_for(self, payload: bytes, seq: int) -> bytes:
        """Return the message at `seq` of the old session, with the seqs of the new session."""
        body = _fields_with_seqs(payload)
        if body is None:
            return payload
        last_seen, old_answers = last_seen_seq(body, seq), answered_seqs(body)
        seen = next((self.seqs[n] for n in range(last_seen, 0, -1) if n in self.seqs), 0)
        if self.unseen is not None:  # guard: merged-answer-unseen
            seen = min(seen, self.unseen - 1)
        answers = None
        if old_answers is not None:  # guard: merged-answer-names-its-message
            answers = sorted(self.seqs[n] for n in old_answers if n in self.seqs)
        if (seen, answers) == (last_seen, old_answers):
            return payload
        try:
            return encode_object(mark_seen(body, seen=seen, answers=answers))
        except RefusedMessage:  # longer numbers make it too large
            return without_answer_seqs(payload)


def names_seqs(payload: bytes) -> bool:
    """Return whether a stored message names other messages by seq."""
    return _fields_with_seqs(payload) is not None


def without_answer_seqs(payload: bytes) -> bytes:
    """Return a stored message without `seen` and `answers`; unchanged if it has neither."""
    fields = _fields_with_seqs(payload)
    return payload if fields is None else encode_object(without_seqs(fields))


def _fields_with_seqs(payload: bytes) -> dict[str, Any] | None:
    """Return the fields of a message that has `seen` or `answers`, otherwise None."""
    # The name of the field may be written with JSON escapes, so a backslash requires decoding.
    if FIELD.encode() not in payload and b"\\" not in payload:
        return None
    fields = decode_object(payload)
    return None if without_seqs(fields) == fields else fields


def find_unseen(history: Sequence[Message], own_seqs: Collection[int]) -> int | None:
    """Return the seq of the first user message without an answer, except messages in `own_seqs`.

    `history`: the visible messages of a session.
    """
    answered, unseen = AnsweredMessages(), []
    for message in reversed(history):
        if message.seq <= answered.upto:
            break
        body = message.to_dict()
        if has_text(body):
            unseen.append(message.seq)
        elif body.get("role") == "assistant" and not calls_of(body):
            answered.add(body, message.seq)
    return min((seq for seq in unseen if seq not in answered and seq not in own_seqs), default=None)


def find_equal_messages(store: Store, key: str, first: int, payloads: Sequence[bytes]) -> list[int]:
    """Return the seqs of these messages if they are stored from the seq `first` on, else nothing.

    The seqs that they name may differ: a merge that was killed may have stored them.
    """
    try:
        stored = store.get_history(key, after=first - 1, full=True)[: len(payloads)]
    except NoSuchSession:
        return []
    is_equal = [without_answer_seqs(message.to_json()) for message in stored] == [
        *map(without_answer_seqs, payloads)
    ]
    return [message.seq for message in stored] if is_equal else []


def message_of(payload: bytes) -> Message:
    """Return a message with this content, to be stored."""
    return Message(seq=1, _at="", _body=Raw(payload))
