"""New user messages: stored immediately, then answered by a turn.

If a message cannot be stored, the model is not asked. If another turn of the session runs, the
message waits. That turn may already answer the message, so the next turn checks the log first.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

from msgspec import Struct

from stenolog.agent.active_sessions import ActiveSession, failed_answer
from stenolog.agent.instance import AgentInstance
from stenolog.agent.lease_renewal import release_lease
from stenolog.agent.scheduler import TurnScheduler, unleased_text
from stenolog.agent.session_history import append_once, missing_session_error, withdraw_message
from stenolog.agent.threads import wait_shielded
from stenolog.agent.turn_events import Answer, EventHandler, MessageStored, TurnOptions
from stenolog.errors import NoSuchSession, OnceConflict, ReadOnly, StenologError, UsageError
from stenolog.stores.base import Lease, SessionView, Store


class NewMessage(Struct, kw_only=True):
    """A user message and its options."""

    body: Mapping[str, Any]
    once: str
    """Idempotency key of the client, or empty."""
    on_event: EventHandler
    options: TurnOptions
    view: SessionView | None
    """An earlier view of the session, so that the turn reads only newer messages."""
    prepare: Callable[[], SessionView] | None
    """Blocking function that reads the view right before the message is stored."""
    leases: list[Lease] = []
    """At most one lease, which `append_and_lease` adds and the turn removes."""
    uid: str = ""
    """Uid of the session, if the message waits for the lease; empty if it is not known."""

    def append_and_lease(self, store: Store, key: str, *, ttl: float) -> int:
        """Append the message, take the lease if it is free, return the seq. This call blocks."""
        if self.prepare is not None:
            self.view = self.prepare()
        seq = append_once(store, key, self.body, once=self.once)
        if self.view is None or seq > self.view.upto:
            # The error is ignored: `_wait_for_lease` tries again and reports the next error.
            with suppress(StenologError):
                self.leases.append(store.lease(key, ttl=ttl, wait=0.0))
        if not self.leases:
            self._read_uid(store, key)
        return seq

    def append(self, store: Store, key: str) -> int:
        """Append the message and return the seq. This call blocks."""
        seq = append_once(store, key, self.body, once=self.once)
        self._read_uid(store, key)
        return seq

    def _read_uid(self, store: Store, key: str) -> None:
        # While the message waits, another session may get the key, with another message at its seq.
        with suppress(StenologError):
            self.uid = store.info(key).uid


class MessageReceiver:
    """Stores new user messages, and runs the turns that answer them."""

    def __init__(self, scheduler: TurnScheduler) -> None:
        self._scheduler = scheduler

    async def answer(self, instance: AgentInstance, key: str, message: NewMessage) -> Answer:
        """Store a message, and run a turn that answers all unanswered messages.

        Raises UsageError for a message that can never be stored. Other errors of the store and of
        the model's server are in the returned Answer. If the message is not stored, or
        `message.prepare` fails, the model is not asked.
        """
        leases = message.leases
        with self._scheduler.use_session(instance, key) as session, session.count_as_waiting():
            # A free lock is not enough, because another caller may be about to acquire the lock.
            is_busy = session.caller_count > 1 or session.lock.locked()
            if is_busy or session.summary_task:
                if message.prepare is not None:
                    message.view = await self._scheduler.threads.run(message.prepare)
                return await self._store_and_answer(session, message)
            async with session.lock:
                try:
                    return await self._store_and_answer(session, message, is_locked=True)
                finally:
                    if leases and await wait_shielded(
                        self._scheduler.threads.run_lease(release_lease, leases.pop())
                    ):
                        raise asyncio.CancelledError

    async def _store_and_answer(
        self, session: ActiveSession, message: NewMessage, *, is_locked: bool = False
    ) -> Answer:
        """Store a message and run its turn. `is_locked`: the caller holds the lock of the session.

        With the lock, one thread call reads the view, stores the message and takes the lease.
        """
        store = session.instance.store
        append = partial(message.append, store, session.key)
        if is_locked:
            append = partial(message.append_and_lease, store, session.key, ttl=self._scheduler.ttl)
        try:
            async with session.store_lock:
                seq = await self._scheduler.threads.run(append)
        except StenologError as error:
            if isinstance(error, UsageError) and not isinstance(error, OnceConflict | ReadOnly):
                raise
            return failed_answer(session.key, error, saved=False)
        view = message.view
        is_newly_stored = view is not None and seq > view.upto
        # Another process may have accepted a message with a client's idempotency key, so keep it.
        has_generated_key = not message.once  # guard: withdraw-own-message
        if has_generated_key and view is not None and not is_newly_stored:
            # The session of `view` is gone: withdraw the message, which has created a new session.
            missing_error = await self._scheduler.threads.run(
                _withdraw_first_message, store, view, seq, message.body
            )
            return failed_answer(session.key, missing_error)
        message.on_event(MessageStored(seq=seq))
        if message.once and not is_newly_stored:
            try:
                answer = await self._scheduler.read_answer(session, seq, "again")
            except StenologError as error:
                return failed_answer(session.key, error)
            if answer is not None:
                return answer
        session.new_seqs.append(seq)
        async with nullcontext() if is_locked else session.hold_lock():
            return await self._answer_message(
                session, seq, message, view if is_newly_stored else None
            )

    async def _answer_message(
        self, session: ActiveSession, seq: int, message: NewMessage, view: SessionView | None
    ) -> Answer:
        """Run the turn that answers the stored message at `seq`, if no other turn answers it."""
        scheduler, on_event, leases = self._scheduler, message.on_event, message.leases
        instance, key = session.instance, session.key
        try:
            lease = (
                leases.pop()
                if leases
                else await scheduler.wait_for_lease(session, on_event, seq=seq, uid=message.uid)
            )
        except StenologError as error:
            text = unleased_text(error)
            return await scheduler.make_failed_answer(instance, key, error, text=text)
        try:
            if lease is None:
                text = "Stopped waiting. The message is saved."
                stopped_answer = Answer(key=key, text=text, outcome="interrupted")
                answer = await scheduler.read_answer(session, seq, "elsewhere", uid=message.uid)
                return answer or stopped_answer
            async with scheduler.hold_lease(session, lease) as store:
                # The turn first checks whether another process has answered this message.
                turn = scheduler.new_turn(
                    session,
                    store,
                    on_event,
                    user_seq=seq,
                    options=message.options,
                    view=view,
                    uid=message.uid,
                )
                answer = await scheduler.run_turn(session, turn)
        except StenologError as error:
            return await scheduler.make_failed_answer(instance, key, error)
        if answer.outcome != "elsewhere":
            scheduler.summarize_later(session, turn)
        return answer


def _withdraw_first_message(
    store: Store, view: SessionView, seq: int, body: Mapping[str, Any]
) -> NoSuchSession:
    """Withdraw a message that has created a new session; return the error for the client.

    This call blocks.
    """
    error = missing_session_error(store, view.key)
    withdraw_message(store, view, seq, body)
    return error
