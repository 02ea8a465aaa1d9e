"""Unsaved messages of a session: a queue of writes that failed and are retried in order.

Later messages wait for an unsaved message, so no answer is stored before its user message.
Every message keeps the idempotency key of its first attempt, so a retry stores nothing twice if the
first write did reach the store. Messages of a turn are written only by the lease holder, and
only if the log still needs the messages, because another process may have answered in the meantime.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from itertools import takewhile
from typing import Any, Final

from msgspec import Struct

from stenolog.agent.turn_events import EventHandler, SaveFailed, SaveRecovered
from stenolog.catalog.message_metadata import mark_seen, without_marks
from stenolog.codec import check_key, check_once, encode_message
from stenolog.context.turn_state import turn_state
from stenolog.errors import (
    DamagedStore,
    LeaseLost,
    NoSuchSession,
    OnceConflict,
    ReadOnly,
    StenologError,
    StoreClosed,
    UsageError,
)
from stenolog.messages import calls_of, text_parts_of
from stenolog.records import Message
from stenolog.sessions.session_store import SessionStore
from stenolog.stores.base import Store

RunInThread = Callable[..., Awaitable[Any]]
"""Function that runs another function in a thread and returns its result."""
AppendFunction = Callable[..., int | None]
"""Function that stores a message with the idempotency key `once=` and returns the seq or None."""

_MAX_REMEMBERED_SEQS: Final = 1_000
"""Maximum number of seqs that `UnsavedMessages.seq_of` knows; the oldest are dropped."""


class SeenMessages(Struct, frozen=True, kw_only=True):
    """The messages that a model received: stored messages, and after them unsaved messages.

    `upto` is the seq of the last stored message. `once` is the idempotency key of the last unsaved
    message; empty if the model received no unsaved message.
    """

    upto: int
    once: str = ""
    answers: tuple[int, ...] = ()
    """Seqs of the stored user messages that the model had to answer."""
    unsaved_keys: tuple[str, ...] = ()
    """Idempotency keys of the unsaved user messages that the model had to answer."""
    interrupted: str = ""
    """Reason why the answer was cut off; empty for a complete answer."""


class _UnsavedMessage(Struct, frozen=True, kw_only=True):
    body: Mapping[str, Any]
    once: str
    seen: SeenMessages | None
    """Messages that the answer is based on; None for a message that is not an answer."""

    size: int = 0
    """Size of the encoded message in bytes."""

    @property
    def belongs_to_turn(self) -> bool:
        return self.body.get("role") != "user"


class UnsavedMessages:
    """The unsaved messages of one session."""

    def __init__(
        self, key: str, run: RunInThread, *, nonempty_queues: "set[UnsavedMessages] | None" = None
    ) -> None:
        """Create an empty queue.

        `nonempty_queues`: a set to which the queue adds itself when a message stays unsaved.
        """
        self._key = key
        self._run = run
        self._nonempty_queues = set() if nonempty_queues is None else nonempty_queues
        self._queue: list[_UnsavedMessage] = []
        self._stored_seqs: dict[str, int] = {}
        """Seqs of messages that were stored after a failed write, by idempotency key."""
        self._write_lock = asyncio.Lock()

    @property
    def bodies(self) -> list[Mapping[str, Any]]:
        """The unsaved messages, oldest first."""
        return [message.body for message in self._queue]

    @property
    def size(self) -> int:
        """Approximate size of the unsaved messages in bytes."""
        return sum(message.size for message in self._queue)

    @property
    def newest_idempotency_key(self) -> str:
        """Idempotency key of the newest unsaved message; empty if all messages are stored."""
        return self._queue[-1].once if self._queue else ""

    @property
    def question_keys(self) -> tuple[str, ...]:
        """Idempotency keys of the unsaved user messages, oldest first."""
        return tuple(message.once for message in self._queue if not message.belongs_to_turn)

    def seq_of(self, once: str) -> int | None:
        """Return the seq of the message with this idempotency key if a retry stored it, or None."""
        return self._stored_seqs.get(once)

    def find_answer_text(self, once: str) -> str | None:
        """Return the unsaved answer text for the message with this idempotency key, or None."""
        queued_keys = [message.once for message in self._queue]
        for message in self._queue:
            last_seen_key = "" if message.seen is None else message.seen.once
            if last_seen_key not in queued_keys or calls_of(message.body):
                continue
            if once in queued_keys[: queued_keys.index(last_seen_key) + 1]:
                return text_parts_of(message.body)
        return None

    async def store_user_message(
        self,
        sessions: SessionStore,
        body: Mapping[str, Any],
        *,
        on_event: EventHandler,
        once: str,
        append: AppendFunction | None = None,
    ) -> int | None:
        """Store a user message and return its seq; None if the message stays unsaved.

        `append`: see `store_turn_message`. Emits SaveFailed if the message stays unsaved. Raises
        UsageError if the store can never accept the message.
        """
        check_key(self._key)
        check_once(once)
        message = _UnsavedMessage(body=body, once=once, seen=None, size=len(encode_message(body)))
        async with self._write_lock:
            if any(waiting.once == once for waiting in self._queue):
                return None
            seq = None
            if await self._flush_queue(sessions, on_event, has_lease=False):
                seq = await self._write_message(sessions, message, append)
            if seq is None:
                self._queue_message(message)
            is_new_failure = seq is None and not any(
                waiting.belongs_to_turn for waiting in self._queue
            )
        if is_new_failure:
            await self._report_failure(sessions, on_event)
        return seq

    async def store_turn_message(
        self,
        sessions: SessionStore,
        body: Mapping[str, Any],
        *,
        on_event: EventHandler,
        seen: SeenMessages | None = None,
        append: AppendFunction | None = None,
    ) -> int | None:
        """Store a message of a turn and return its seq; None if the message stays unsaved.

        Only the lease holder may call this method. `append`: a function to use instead of
        `add_full_message`. The function runs in a thread, and its errors are raised here. Raises
        LeaseLost, and UsageError if the store can never accept the message.
        """
        size = len(encode_message(body))
        message = _UnsavedMessage(body=body, once=secrets.token_hex(12), seen=seen, size=size)
        async with self._write_lock:
            try:
                seq = None
                if await self._flush_queue(sessions, on_event, has_lease=True):
                    seq = await self._write_message(sessions, message, append)
            except (LeaseLost, NoSuchSession):
                self._drop_turn_messages()
                raise
            if seq is None:
                self._queue_message(message)
        if seq is None:
            await self._report_failure(sessions, on_event)
        return seq

    @asynccontextmanager
    async def pause_writes(self) -> AsyncIterator[None]:
        """Prevent writes of unsaved messages inside the `async with` block."""
        if not self._queue:
            yield
            return
        async with self._write_lock:
            yield

    async def flush(self, sessions: SessionStore, *, on_event: EventHandler) -> bool:
        """Store the unsaved messages and return whether all are stored.

        Only the lease holder may call this method. Raises LeaseLost.
        """
        async with self._write_lock:
            try:
                if await self._flush_queue(sessions, on_event, has_lease=True):
                    return True
            except LeaseLost:
                self._drop_turn_messages()
                raise
        await self._report_failure(sessions, on_event)
        return False

    async def _flush_queue(
        self, sessions: SessionStore, on_event: EventHandler, *, has_lease: bool
    ) -> bool:
        queued_count = len(self._queue)
        if not queued_count:
            return True
        if not has_lease and any(message.belongs_to_turn for message in self._queue):
            return False
        is_turn_checked = False
        while self._queue:
            message = self._queue[0]
            if message.belongs_to_turn and not is_turn_checked:
                # Messages that the answer depends on have a seq by now, as `_is_stale` requires.
                is_turn_checked = True
                if await self._is_stale(sessions, message):
                    self._drop_stale_answer(on_event)
                    continue
            is_turn_checked = is_turn_checked and message.belongs_to_turn
            try:
                seq = await self._write_message(sessions, message)
            except LeaseLost:
                raise
            except UsageError as error:
                # The store will never accept this message, so drop it and continue with the next.
                on_event(
                    SaveFailed(count=1, text=f"one message cannot be stored and is lost: {error}")
                )
                del self._queue[0]
                continue
            if seq is None:
                return False
            self._stored_seqs[message.once] = seq
            while len(self._stored_seqs) > _MAX_REMEMBERED_SEQS:
                del self._stored_seqs[next(iter(self._stored_seqs))]
            del self._queue[0]
        on_event(SaveRecovered(count=queued_count))
        return True

    def _queue_message(self, message: _UnsavedMessage) -> None:
        self._queue.append(message)
        self._nonempty_queues.add(self)

    def _drop_turn_messages(self) -> None:
        self._queue = [message for message in self._queue if not message.belongs_to_turn]

    def _drop_stale_answer(self, on_event: EventHandler) -> None:
        """Drop the messages before the next user message, and emit SaveFailed."""
        turn_messages = takewhile(lambda message: message.belongs_to_turn, self._queue)
        dropped_count = len(list(turn_messages))
        del self._queue[:dropped_count]
        reason = "another process has answered in the meantime, so this answer is not stored"
        on_event(SaveFailed(count=dropped_count, text=reason))

    async def _is_stale(self, sessions: SessionStore, unsaved: _UnsavedMessage) -> bool:
        """Return whether another process has continued the turn of this message."""
        history: list[Message] = await self._run(sessions.get_history, self._key)
        state = turn_state(history)
        if unsaved.seen is None:
            open_call_ids = {call.id for call in state.open_calls}
            return unsaved.body.get("tool_call_id") not in open_call_ids
        upto = self._last_seen_seq(unsaved.seen)
        if not any(seq <= upto for seq in state.unanswered):
            return True
        stored_seqs = set(self._stored_seqs.values())
        return any(
            message.seq > upto
            and message.seq not in stored_seqs
            and getattr(message, "role", None) != "user"
            for message in history
        )

    def _last_seen_seq(self, seen: SeenMessages) -> int:
        return max(seen.upto, self._stored_seqs.get(seen.once, 0))

    async def _write_message(
        self, sessions: SessionStore, message: _UnsavedMessage, append: AppendFunction | None = None
    ) -> int | None:
        body, seen = message.body, message.seen
        if seen is not None:
            upto = self._last_seen_seq(seen)
            unsaved_seqs = (self._stored_seqs.get(once) for once in seen.unsaved_keys)
            answers = {*seen.answers, *(seq for seq in unsaved_seqs if seq is not None)}
            answered = sorted(seq for seq in answers if seq <= upto)
            # Only the answer after the tool results answers the messages.
            body = mark_seen(
                body,
                seen=upto,
                answers=None if calls_of(body) else answered,
                interrupted=seen.interrupted,
            )
        if append is None:
            append = partial(sessions.add_full_message, self._key)
        seq: int | None = await self._run(append, body, once=message.once)
        if seq is None:
            # The SessionStore hides the error, so repeat the write on the store to get the error.
            # The idempotency key makes this second write safe.
            seq = await self._run(_retry_write, sessions, self._key, body, message.once)
        return seq

    async def _report_failure(self, sessions: SessionStore, on_event: EventHandler) -> None:
        reason = await self._run(_read_failure_reason, sessions)
        on_event(SaveFailed(count=len(self._queue), text=reason))


def new_idempotency_key() -> str:
    """Return an idempotency key for a message without an id."""
    return secrets.token_hex(12)


def _retry_write(
    sessions: SessionStore, key: str, body: Mapping[str, Any], once: str
) -> int | None:
    """Repeat a write on the store itself. Raises only errors that a later retry cannot fix."""
    store = sessions.store
    try:
        return store.add_full_message(key, body, once=once)
    except OnceConflict as conflict:
        # Another version of stenolog may have stored the same message with different metadata.
        if _read_stored_content(store, key, conflict.seq) == without_marks(body):
            return conflict.seq
        raise
    except Exception as error:
        if isinstance(error, UsageError) and not isinstance(error, ReadOnly | StoreClosed):
            raise
        if isinstance(error, DamagedStore):
            raise  # the message may be stored, and cannot be compared
        return None  # the SessionStore has logged the first error; the write is retried later


def _read_stored_content(store: Store, key: str, seq: int) -> dict[str, Any] | None:
    """Return the message at this seq without stenolog's metadata; None if it is unreadable."""
    try:
        messages = store.get_history(key, after=seq - 1, full=True)[:1]
    except StenologError:
        return None
    return without_marks(messages[0].to_dict()) if messages and messages[0].seq == seq else None


def _read_failure_reason(sessions: SessionStore) -> str:
    """Return the reason for the failed write, without the prefixes that the SessionStore adds."""
    health = sessions.health()
    _, _, reason = (health.last_error or "").partition(" failed: ")
    return reason.partition(": ")[2] or "; ".join(health.problems) or "the store gave no reason"
