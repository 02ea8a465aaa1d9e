"""Gives messages that are added to another session the seqs of that session.

An agent's messages name messages of their session by seq (`seen` and `answers`, see
catalog/message_metadata.py). A merge adds messages to a session that has other messages, so they
get other seqs there. With the old seqs, an answer would count as the answer to another message.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from msgspec import Raw, Struct

from stenolog.catalog.message_metadata import (
    FIELD,
    AnsweredMessages,
    answered_seqs,
    last_seen_seq,
    mark_seen,
    without_seqs,
)
from stenolog.codec import encode_object
from stenolog.errors import NoSuchSession, RefusedMessage
from stenolog.messages import calls_of, has_text
from stenolog.records import Message, decode_object
from stenolog.stores.base import SessionView, Store


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
