"""Turn scheduler: a lock in this process and a lease allow one turn at a time per session.

A new message is stored immediately and waits until the running turn has ended. The running turn may
already answer the new message, so the next turn checks the log before it asks the model. Summaries
and notes are written in the background after the answer. The next turn of the session waits for the
summary, but not for the notes.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Final

from msgspec import Struct, field

from stenolog.agent.background_notes import BackgroundNotes
from stenolog.agent.instance import AgentInstance, AgentRegistry, ModelClosing
from stenolog.agent.lease_renewal import (
    HeldLease,
    acquire_lease,
    release_lease,
    renew_lease,
)
from stenolog.agent.model_exchange import ModelExchange
from stenolog.agent.session_history import (
    append_once,
    missing_session_error,
    withdraw_message,
)
from stenolog.agent.stored_answers import answer_from_log, find_answer
from stenolog.agent.threads import Threads, wait_shielded
from stenolog.agent.turn import CancelReason, Turn
from stenolog.agent.turn_events import (
    DEFAULT_OPTIONS,
    Answer,
    EventHandler,
    MessageStored,
    Notice,
    Outcome,
    SummaryCreated,
    TurnOptions,
    ignore_event,
)
from stenolog.agent.turn_log import TRIES_FIELD, TurnLog
from stenolog.agent.turn_memory import TurnMemory
from stenolog.context.summarize import SummaryReport
from stenolog.errors import (
    LeaseLost,
    NoSuchSession,
    OnceConflict,
    ReadOnly,
    SessionDeleted,
    StenologError,
    StoreBusy,
    StoreClosed,
    UsageError,
)
from stenolog.stores.base import Lease, SessionView, Store, find_info

_LEASE_POLL_SECONDS: Final = 0.1
"""Interval in seconds between attempts to acquire a lease that another process holds."""
_CANCEL_TIMEOUT_SECONDS: Final = 5.0
"""Time limit in seconds for cancelled turns to end; after that, the turns are abandoned."""
TAKEN_OVER_TEXT: Final = "Another process has taken over this turn."
CLOSING_TEXT: Final = "Shutting down. Unanswered messages are answered after the restart."

_logger = logging.getLogger("stenolog")


class CloseReport(Struct, frozen=True, kw_only=True):
    """The work that was unfinished when the scheduler closed."""

    turns: tuple[str, ...] = ()
    """Sessions with a cancelled turn, which the next start resumes from the stored messages."""
    hanging: int = 0
    """Number of turns that did not end after they were cancelled."""

    def __str__(self) -> str:
        problems = []
        if self.turns:
            problems.append(f"unfinished, resumed at the next start: {', '.join(self.turns)}")
        if self.hanging:
            problems.append(f"{self.hanging} turns did not stop because a tool still runs")
        return "; ".join(problems) or "all turns are finished"


class SessionBusy(Exception):
    """Another turn holds the lock or the lease of the session."""


def unleased_text(error: StenologError) -> str:
    """Return the text for a user whose turn cannot run because the lease cannot be acquired."""
    if isinstance(error, NoSuchSession | StoreClosed):
        return str(error)
    return (
        f"the session could not be reserved for this process: {error}. "
        "The message is answered as soon as the problem is fixed"
    )


class ActiveSession(Struct, eq=False):
    """The state of one session in this process."""

    instance: AgentInstance
    key: str
    turn: Turn | None = None
    task: asyncio.Task[Answer] | None = None
    summary_task: asyncio.Task[None] | None = None
    lease: HeldLease | None = None
    on_event: EventHandler = ignore_event
    caller_count: int = 0
    waiting_messages: int = 0
    waits_for_lease: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that a turn or a session change holds while it runs or waits for the lease."""
    seq_lists: list[list[int]] = []
    """The lists of all `collect_new_seqs` blocks in progress."""

    @property
    def is_idle(self) -> bool:
        """Whether this process has no work in the session."""
        return not (self.caller_count or self.summary_task or self.task)

    @asynccontextmanager
    async def hold_lock(self) -> AsyncIterator[None]:
        """Wait until a summary in progress ends, and hold the lock in the `async with` block."""
        async with self.lock:
            if self.summary_task is not None:
                await asyncio.wait([self.summary_task])
            yield

    @contextmanager
    def count_as_waiting(self) -> Iterator[None]:
        """Count a message as waiting while the `with` block runs."""
        self.waiting_messages += 1
        try:
            yield
        finally:
            self.waiting_messages -= 1

    @contextmanager
    def collect_new_seqs(self) -> Iterator[list[int]]:
        """Yield a list that collects the seqs of user messages stored during the `with` block."""
        seqs: list[int] = []
        self.seq_lists.append(seqs)
        try:
            yield seqs
        finally:
            # `list.remove` compares by value and could remove another, equal list.
            self.seq_lists = [other for other in self.seq_lists if other is not seqs]

    def add_new_seq(self, seq: int) -> None:
        """Record the seq of a user message that has just been stored."""
        for seqs in self.seq_lists:
            seqs.append(seq)

    def cancel(self, reason: CancelReason) -> None:
        """Cancel the turn. A second call does not replace the first reason."""
        if self.turn is not None and self.task is not None:
            if not self.turn.cancel_reason:
                self.turn.cancel_reason = reason
            self.task.cancel()

    def failed_answer(self, error: StenologError, *, text: str = "", saved: bool = True) -> Answer:
        """Return the Answer for a failed turn.

        `text` replaces the text of the error. `saved`: whether the user's message is stored.
        """
        if isinstance(error, LeaseLost):
            text = TAKEN_OVER_TEXT
        return Answer(
            key=self.key, text=text or str(error), outcome="failed", saved=saved, error=error
        )


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

    def append_and_lease(self, store: Store, key: str, *, ttl: float) -> int:
        """Append the message, take the lease if it is free, return the seq. This call blocks."""
        if self.prepare is not None:
            self.view = self.prepare()
        seq = append_once(store, key, self.body, once=self.once)
        if self.view is None or seq > self.view.upto:
            # The error is ignored: `_wait_for_lease` tries again and reports the next error.
            with suppress(StenologError):
                self.leases.append(store.lease(key, ttl=ttl, wait=0.0))
        return seq


class TurnScheduler:
    """Runs the turns of all sessions of the agents in a registry."""

    def __init__(self, registry: AgentRegistry, *, ttl: float) -> None:
        """Create a scheduler. An asyncio event loop must be running.

        `ttl`: lifetime of a lease in seconds. The lease of a killed process ends after this time.
        """
        self.threads = Threads()
        self._registry = registry
        self._ttl = ttl
        self._active: dict[tuple[str | None, str], ActiveSession] = {}
        self._notes: dict[str | None, BackgroundNotes] = {}
        self._closed = False
        self._cancelled_sessions: set[str] = set()
        self._no_callers = asyncio.Event()
        self._no_callers.set()
        for instance in registry:
            instance.blocking_model.bind(self.threads.event_loop)
            instance.on_summary = partial(self._forward_summary, instance)
            if instance.memory is not None and instance.spec.consolidation:
                self._notes[instance.id] = BackgroundNotes(instance, self.threads)

    def check_open(self) -> None:
        """Raise StoreClosed if the scheduler is closed."""
        if self._closed:
            raise StoreClosed("the agent was closed before this call")

    def has_waiting_message(self, instance: AgentInstance, key: str) -> bool:
        """Return whether a message of this process waits for its answer in this session."""
        session = self._active.get((instance.id, key))
        return session is not None and session.waiting_messages > 0

    def is_active(self, instance: AgentInstance, key: str) -> bool:
        """Return whether this process is working on the session."""
        return (instance.id, key) in self._active

    @property
    def busy(self) -> set[str]:
        """Keys of the sessions in which this process writes an answer."""
        return {session.key for session in self._active.values() if session.task is not None}

    async def answer(self, instance: AgentInstance, key: str, message: NewMessage) -> Answer:
        """Store a message, and run a turn that answers all unanswered messages.

        If `message.prepare` fails, its error is raised and nothing is stored. Raises UsageError for
        a message that can never be stored. Other errors of the store and of the model's server are
        in the returned Answer; if the message is not stored, the model is not asked.
        """
        leases = message.leases
        with self.use_session(instance, key) as session, session.count_as_waiting():
            # A free lock is not enough, because another caller may be about to acquire the lock.
            is_busy = session.caller_count > 1 or session.lock.locked()
            if is_busy or session.summary_task:
                if message.prepare is not None:
                    message.view = await self.threads.run(message.prepare)
                return await self._store_and_answer(session, message)
            async with session.lock:
                try:
                    return await self._store_and_answer(session, message, is_locked=True)
                finally:
                    if leases and await wait_shielded(
                        self.threads.run_lease(release_lease, leases.pop())
                    ):
                        raise asyncio.CancelledError

    async def _store_and_answer(
        self, session: ActiveSession, message: NewMessage, *, is_locked: bool = False
    ) -> Answer:
        """Store a message and run its turn. `is_locked`: the caller holds the lock of the session.

        With the lock, one thread call reads the view, stores the message and takes the lease.
        """
        store = session.instance.store
        append = partial(append_once, store, session.key, message.body, once=message.once)
        if is_locked:
            append = partial(message.append_and_lease, store, session.key, ttl=self._ttl)
        try:
            seq = await self.threads.run(append)
        except StenologError as error:
            if isinstance(error, UsageError) and not isinstance(error, OnceConflict | ReadOnly):
                raise
            return session.failed_answer(error, saved=False)
        view = message.view
        is_newly_stored = view is not None and seq > view.upto
        # Another process may have accepted a message with a client's idempotency key, so keep it.
        has_generated_key = not message.once  # guard: withdraw-own-message
        if has_generated_key and view is not None and not is_newly_stored:
            # The session of `view` is gone: withdraw the message, which has created a new session.
            missing_error = await self.threads.run(
                _withdraw_first_message, store, view, seq, message.body
            )
            return session.failed_answer(missing_error)
        message.on_event(MessageStored(seq=seq))
        if message.once and not is_newly_stored:
            try:
                answer = await self._read_answer(session, seq, "again")
            except StenologError as error:
                return session.failed_answer(error)
            if answer is not None:
                return answer
        session.add_new_seq(seq)
        async with nullcontext() if is_locked else session.hold_lock():
            return await self._answer_message(
                session, seq, message, view if is_newly_stored else None
            )

    async def change_now(
        self,
        instance: AgentInstance,
        key: str,
        change: Callable[[Store], Awaitable[Answer | None]],
        *,
        on_event: EventHandler,
        options: TurnOptions = DEFAULT_OPTIONS,
    ) -> Answer:
        """Run `change` while holding the lease. Raises SessionBusy if another turn runs.

        If `change` returns None, answer the unanswered messages. If the session does not exist,
        `change` runs without a lease.
        """
        with self.use_session(instance, key) as session:
            if session.lock.locked():
                raise SessionBusy
            async with session.hold_lock():
                try:
                    lease = await self.acquire_lease(session)
                except StoreBusy as error:
                    raise SessionBusy from error
                except NoSuchSession:
                    answer = await change(instance.store)
                    if answer is None:
                        # `change` found messages, so another process has created the session.
                        raise SessionBusy from None
                    return answer
                return await self._change_and_answer(session, lease, change, on_event, options)

    async def change_when_free(
        self,
        instance: AgentInstance,
        key: str,
        change: Callable[[Store], Awaitable[Answer | None]],
        *,
        on_event: EventHandler,
        options: TurnOptions,
        view: SessionView | None,
    ) -> Answer:
        """Wait for the lease, run `change`, and answer the unanswered messages.

        If `change` returns an Answer, no turn runs. A missing session is created. `view`: an
        earlier view of the session, so that the turn reads only newer messages. Raises
        NoSuchSession if the session of `view` is gone.
        """
        with self.use_session(instance, key) as session:
            async with session.hold_lock():
                try:
                    lease = await self._wait_for_lease(session, on_event)
                except NoSuchSession:
                    if view is not None:
                        raise await self.threads.run(
                            missing_session_error, instance.store, key
                        ) from None
                    # A session that does not exist has no lease, so create the session first.
                    await self.threads.run(instance.store.set_meta, key, **{TRIES_FIELD: [0, 0]})
                    lease = await self._wait_for_lease(session, on_event)
                if lease is None:
                    text = "Stopped waiting. Nothing was changed."
                    return Answer(key=key, text=text, outcome="interrupted", saved=False)
                return await self._change_and_answer(
                    session, lease, change, on_event, options, view
                )

    async def _change_and_answer(
        self,
        session: ActiveSession,
        lease: Lease,
        change: Callable[[Store], Awaitable[Answer | None]],
        on_event: EventHandler,
        options: TurnOptions,
        view: SessionView | None = None,
    ) -> Answer:
        async with self.hold_lease(session, lease) as store:
            session.on_event = on_event
            change_answer = await change(store)
            if change_answer is not None:
                return change_answer
            turn = self.new_turn(session, store, on_event, options=options, view=view)
            answer = await self.run_turn(session, turn)
        self.summarize_later(session, turn)
        return answer

    async def stop(self, instance: AgentInstance, key: str) -> bool:
        """Stop the answer in progress and store its text, or end the wait for the lease.

        Returns False if there is neither an answer in progress nor a wait.
        """
        session = self._active.get((instance.id, key))
        if session is None:
            return False
        task, was_waiting = session.task, session.waits_for_lease
        session.waits_for_lease = False
        if task is None:
            return was_waiting
        session.cancel("")
        await asyncio.wait([task])
        return True

    # --- closing -----------------------------------------------------------------------------

    async def close(self, *, patience: float) -> CloseReport:
        """Wait up to `patience` seconds for turns in progress, then cancel the remaining turns.

        The messages of cancelled turns stay in the log, and the next start resumes the turns. If
        two calls overlap, the shorter `patience` applies.
        """
        self._closed = True
        await self._wait_for_turns(patience)
        for session in self._active.values():
            if session.task is not None:
                self._cancelled_sessions.add(session.key)
                session.cancel("left")
        for instance in self._registry:
            instance.blocking_model.close()
        await self._wait_for_turns(_CANCEL_TIMEOUT_SECONDS)
        for notes in self._notes.values():
            await notes.close()
        return CloseReport(
            turns=tuple(sorted(self._cancelled_sessions)),
            hanging=len(self.busy),
        )

    async def _wait_for_turns(self, patience: float) -> None:
        """Wait up to `patience` seconds until all turns, background tasks and callers are done."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(patience, 0)):
                while tasks := self._running_tasks():
                    await asyncio.wait(tasks)
                await self._no_callers.wait()

    async def wait_until_idle(self) -> None:
        """Wait until turns, summaries and notes are done, for tests and scripts."""
        while tasks := self._running_tasks():
            await asyncio.wait(tasks)
        for notes in self._notes.values():
            await notes.wait_until_queue_empty()

    # --- one turn ----------------------------------------------------------------------------

    async def _answer_message(
        self, session: ActiveSession, seq: int, message: NewMessage, view: SessionView | None
    ) -> Answer:
        """Run the turn that answers the stored message at `seq`, if no other turn answers it."""
        on_event, leases = message.on_event, message.leases
        try:
            lease = (
                leases.pop() if leases else await self._wait_for_lease(session, on_event, seq=seq)
            )
        except StenologError as error:
            return await self._failed_answer(session, error, text=unleased_text(error))
        try:
            if lease is None:
                text = "Stopped waiting. The message is saved."
                stopped_answer = Answer(key=session.key, text=text, outcome="interrupted")
                return await self._read_answer(session, seq, "elsewhere") or stopped_answer
            async with self.hold_lease(session, lease) as store:
                # The turn first checks whether another process has answered this message.
                turn = self.new_turn(
                    session, store, on_event, user_seq=seq, options=message.options, view=view
                )
                answer = await self.run_turn(session, turn)
        except StenologError as error:
            return await self._failed_answer(session, error)
        if answer.outcome != "elsewhere":
            self.summarize_later(session, turn)
        return answer

    async def _failed_answer(
        self, session: ActiveSession, error: StenologError, *, text: str = ""
    ) -> Answer:
        client_error = await self.error_for_client(session.instance, session.key, error)
        return session.failed_answer(client_error, text=text)

    async def error_for_client(
        self, instance: AgentInstance, key: str, error: StenologError
    ) -> StenologError:
        """Return the error to report to the client.

        If the lease was lost because the session is gone, return the error for a missing session.
        """
        if isinstance(error, SessionDeleted) or not isinstance(error, LeaseLost | NoSuchSession):
            return error
        return await self.threads.run(_error_if_missing, instance.store, key, error)

    async def run_turn(self, session: ActiveSession, turn: Turn) -> Answer:
        """Run a turn as a separate task, which `stop` and the caller can cancel."""
        if self._closed:
            raise StoreClosed(CLOSING_TEXT)
        notes = self._notes.get(session.instance.id)
        if notes is not None:
            notes.pause()
        session.turn, session.on_event = turn, turn.on_event
        session.task = task = asyncio.create_task(turn.run())
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            session.cancel("")
            await wait_shielded(task)
            raise
        finally:
            session.turn = session.task = None
            if notes is not None:
                notes.resume()
        if task.cancelled() and turn.cancel_reason == "left":
            raise StoreClosed(CLOSING_TEXT)
        try:
            # A task that was cancelled before it started stored no interruption, so store it here.
            return await turn.close("stopped") if task.cancelled() else task.result()
        except ModelClosing:
            raise StoreClosed(CLOSING_TEXT) from None

    def new_turn(
        self,
        session: ActiveSession,
        store: Store,
        on_event: EventHandler,
        *,
        user_seq: int = 0,
        options: TurnOptions = DEFAULT_OPTIONS,
        view: SessionView | None = None,
    ) -> Turn:
        """Create a turn without starting it."""
        instance, key = session.instance, session.key
        return Turn(
            instance,
            TurnLog(leased_store=store, store=instance.store, key=key, view=view),
            TurnMemory(instance, key, options.sender),
            ModelExchange(instance, self.threads, on_event, options),
            threads=self.threads,
            on_event=on_event,
            user_seq=user_seq,
            options=options,
            release_lease=None if session.lease is None else session.lease.release,
        )

    async def _wait_for_lease(
        self, session: ActiveSession, on_event: EventHandler, *, seq: int = 0
    ) -> Lease | None:
        """Wait for the lease of a session.

        Returns None if `stop` ends the wait, or if another process has answered the message at
        `seq`. Raises StoreClosed if the scheduler closes, and the errors of `Store.lease`.
        """
        session.waits_for_lease, is_notified = True, False
        try:
            while not self._closed:
                try:
                    return await self.acquire_lease(session)
                except StoreBusy as error:
                    if seq and await self._has_answer(session, seq):
                        return None
                    if not is_notified:
                        on_event(Notice(text=f"waiting for another turn in this session: {error}"))
                        is_notified = True
                await asyncio.sleep(_LEASE_POLL_SECONDS)
                if not session.waits_for_lease:
                    return None
        finally:
            session.waits_for_lease = False
        raise StoreClosed(CLOSING_TEXT)

    async def _has_answer(self, session: ActiveSession, seq: int) -> bool:
        with suppress(StenologError):  # with the lease, the turn reports the error
            return await self._read_answer(session, seq, "elsewhere") is not None
        return False

    async def acquire_lease(self, session: ActiveSession) -> Lease:
        """Acquire the lease of a session without waiting. Raises the errors of `Store.lease`."""
        return await acquire_lease(self.threads, session.instance.store, session.key, ttl=self._ttl)

    @asynccontextmanager
    async def hold_lease(self, session: ActiveSession, lease: Lease) -> AsyncIterator[Store]:
        """Renew `lease` in the `async with` block, and release it at the end.

        Yields the store whose writes are fenced by the lease.
        """
        cancel = partial(session.cancel, "lost")
        async with renew_lease(self.threads, lease, ttl=self._ttl, on_lost=cancel) as session.lease:
            try:
                yield lease.store
            finally:
                session.lease = None

    async def _read_answer(
        self, session: ActiveSession, seq: int, outcome: Outcome
    ) -> Answer | None:
        """Return the stored answer to the message at `seq`; None if it has to be answered.

        Raises the errors of `find_answer`.
        """
        found = await self.threads.run(find_answer, session.instance.store, session.key, seq)
        return answer_from_log(session.key, found, outcome)

    # --- after the answer --------------------------------------------------------------------

    def summarize_later(self, session: ActiveSession, turn: Turn) -> None:
        """Summarize in the background; the next turn of the session waits for the summary."""
        session.summary_task = asyncio.create_task(self._summarize_and_queue_notes(session, turn))

    async def _summarize_and_queue_notes(self, session: ActiveSession, turn: Turn) -> None:
        """Summarize if needed, and queue the session for notes."""
        instance, key = session.instance, session.key
        try:
            session.on_event = turn.on_event
            if await self.threads.run_model(turn.summarize_if_needed):
                await self.threads.run(instance.sessions.save, key)
            if instance.id in self._notes and not self._closed:
                self._notes[instance.id].add_session(key)
        except (ModelClosing, NoSuchSession):
            return
        except StenologError as error:
            turn.on_event(Notice(text=f"the conversation could not be summarized: {error}"))
        except Exception:
            _logger.exception("could not summarize %r after an answer", key)
        finally:
            session.summary_task = None
            self._drop_if_idle(session)

    def _forward_summary(self, instance: AgentInstance, report: SummaryReport) -> None:
        """Emit SummaryCreated in the event loop; called in the thread that made the summary."""

        def emit() -> None:
            session = self._active.get((instance.id, report.key))
            if session is not None:
                session.on_event(SummaryCreated(report=report))

        self.threads.event_loop.call_soon_threadsafe(emit)

    def _running_tasks(self) -> list[asyncio.Task[Any]]:
        sessions = self._active.values()
        tasks = [task for session in sessions for task in (session.task, session.summary_task)]
        return [task for task in tasks if task is not None]

    # --- active sessions ---------------------------------------------------------------------

    @contextmanager
    def use_session(self, instance: AgentInstance, key: str) -> Iterator[ActiveSession]:
        """Yield the state of a session, and keep the state at least until the block ends."""
        self.check_open()
        agent_and_key = (instance.id, key)
        session = self._active.get(agent_and_key)
        if session is None:
            session = self._active[agent_and_key] = ActiveSession(instance, key)
        session.caller_count += 1
        self._no_callers.clear()
        try:
            yield session
        finally:
            session.caller_count -= 1
            self._drop_if_idle(session)
            if not any(active.caller_count for active in self._active.values()):
                self._no_callers.set()

    def _drop_if_idle(self, session: ActiveSession) -> None:
        """Drop the state of the session if the session is idle."""
        agent_and_key = (session.instance.id, session.key)
        if session.is_idle and self._active.get(agent_and_key) is session:
            del self._active[agent_and_key]


def _withdraw_first_message(
    store: Store, view: SessionView, seq: int, body: Mapping[str, Any]
) -> NoSuchSession:
    """Withdraw a message that has created a new session; return the error for the client.

    This call blocks.
    """
    error = missing_session_error(store, view.key)
    withdraw_message(store, view, seq, body)
    return error


def _error_if_missing(store: Store, key: str, default: StenologError) -> StenologError:
    """Return the error for a missing session, or `default` if the session exists.

    This call blocks.
    """
    with suppress(StenologError):
        if find_info(store, key) is None:
            return missing_session_error(store, key)
    return default
