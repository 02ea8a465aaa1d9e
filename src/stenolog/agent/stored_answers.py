"""The stored answer to a message that was sent before.

A message is answered once. Whoever sends it again, with the same id or idempotency key, gets the
stored answer, even if a summary or a command has hidden it or it was archived. Each answer stores
the seqs of the messages that it answers, so no other answer is ever returned in its place.

Four cases must not be mistaken for each other:

- The answer is hidden or archived: it is returned like a visible one.
- The answer may be damaged: a message after the question is lost, or a later answer does not say
  what it answers. `AnswerUnknown` is raised, and the message is not answered again.
- The store cannot be read: the error of the store is raised.
- There is no answer: the question waits for one, was hidden before it was answered, or was purged.
"""

from collections.abc import Iterable, Sequence
from typing import Final, Literal

from msgspec import Struct

from stenolog.agent.turn_events import Answer, Outcome
from stenolog.catalog.message_metadata import answered_seqs, last_seen_seq
from stenolog.context.turn_state import answer_to, is_finished_answer
from stenolog.errors import AnswerUnknown, SessionDeleted
from stenolog.messages import text_parts_of
from stenolog.records import Message, Span
from stenolog.stores import spans
from stenolog.stores.base import SessionView, Store
from stenolog.stores.snapshots import SnapshotMark

HIDDEN_UNANSWERED_TEXT: Final = (
    "This message was hidden (by /clear, /retry, /edit or a changed history) before it was "
    "answered. Send it again to have it answered."
)


class StoredAnswer(Struct, frozen=True):
    """What a session contains for one question."""

    state: Literal["answered", "unanswered", "hidden", "gone"]
    """`hidden`: the question was hidden before it was answered. `gone`: it was purged."""
    message: Message | None = None
    """The answer; for `hidden`, the hidden question."""


def find_answer(
    store: Store,
    key: str,
    seq: int,
    view: SessionView | None = None,
    *,
    after: int = 0,
    uid: str = "",
) -> StoredAnswer:
    """Return the stored answer to the message at `seq`. Blocks.

    `view`: a view with all visible messages, if the caller has read it. `after`: answers up to this
    seq do not count, because the message was asked again after them. `uid`: uid of the session, if
    it is known. Raises AnswerUnknown, NoSuchSession, and the errors of the store.
    """
    after = max(after, seq)  # guard: rejected-answer
    if view is None:
        view = store.view(key, last=1)
        if uid and view.uid != uid:
            raise SessionDeleted(key, recreated=True)
    else:
        visible = [message for message in view.messages if message.seq >= seq]
        answer = answer_to((message for message in visible if message.seq > after), seq)
        if answer is not None:
            return StoredAnswer("answered", answer)
        if len(visible) == end_of(view) - seq + 1:  # no message from the question on is missing
            _check_marks(key, visible, seq)
            return StoredAnswer("unanswered")
    stored = store.get_history(key, after=seq - 1, full=True)
    later = [message for message in stored if message.seq > after]
    # After /retry, the hidden first answer precedes the visible one.
    answer = answer_to((message for message in later if not message.hidden), seq)
    answer = answer or answer_to(reversed(later), seq)
    is_rejected = (
        answer is not None and answer.hidden and stored[0].seq == seq and not stored[0].hidden
    )
    if answer is not None and not is_rejected:
        return StoredAnswer("answered", answer)
    # An answer that was hidden alone may have been replaced by one that is lost.
    lost = find_lost(store, view, stored, seq if answer is None else answer.seq)
    if lost:  # guard: damaged-answer-is-unknown
        raise AnswerUnknown(key, seq, f"{_messages_text(lost)} cannot be read, see `steno doctor`")
    if answer is not None:
        return StoredAnswer("answered", answer)
    _check_marks(key, stored, seq)
    if not stored or stored[0].seq != seq:
        return StoredAnswer("gone")
    return StoredAnswer("hidden", stored[0]) if stored[0].hidden else StoredAnswer("unanswered")


def _check_marks(key: str, history: Iterable[Message], seq: int) -> None:
    """Raise AnswerUnknown if an answer after the message at `seq` does not say what it answers."""
    for message in history:
        if message.seq > seq:
            body = message.to_dict()
            has_seen = last_seen_seq(body, message.seq) >= seq
            if is_finished_answer(body) and has_seen and answered_seqs(body) is None:
                reason = f"the answer at seq {message.seq} does not say which messages it answers"
                raise AnswerUnknown(key, seq, reason)


def find_lost(
    store: Store, view: SessionView, stored: Sequence[Message], seq: int
) -> Sequence[Span]:
    """Return the seqs from `seq` on whose messages are neither readable nor known to be absent."""
    missing = spans.minus([(seq, end_of(view))], spans.from_seqs(message.seq for message in stored))
    if not missing:
        return missing
    with store.admin.read_snapshot(SnapshotMark(key=view.key, uid=view.uid)) as reading:
        return spans.minus(missing, spans.union(reading.snapshot.void, reading.snapshot.purged))


def end_of(view: SessionView) -> int:
    """Return the last seq whose message is stored completely, even if it is damaged."""
    return max(view.upto, max((last for _, last in view.info.lost_spans), default=0))


def _messages_text(lost: Sequence[Span]) -> str:
    first, last = lost[0]
    text = f"message {first}" if first == last else f"messages {first} to {last}"
    return text if len(lost) == 1 else f"{text} and others"


def answer_from_log(key: str, found: StoredAnswer, outcome: Outcome) -> Answer | None:
    """Return the Answer to a message that needs no turn; None if a turn must answer it."""
    if found.message is None:
        return None
    if found.state == "hidden":
        # This text is not in the log: with a seq, it would count as sent with any later answer.
        return Answer(key=key, text=HIDDEN_UNANSWERED_TEXT, outcome=outcome)
    text = text_parts_of(found.message.to_dict())
    return Answer(key=key, text=text, outcome=outcome, seq=found.message.seq)
