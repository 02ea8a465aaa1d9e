"""Turn scheduler: a lock in this process and a lease allow one turn at a time per session.

Summaries and notes are written in the background after the answer. The next turn of the session
waits for the summary, but not for the notes.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Final

from msgspec import Struct

from stenolog.agent.active_sessions import ActiveSession, ActiveSessions, failed_answer
from stenolog.agent.background_notes import BackgroundNotes
from stenolog.agent.instance import AgentInstance, AgentRegistry, ModelClosing
from stenolog.agent.lease_renewal import acquire_lease, renew_lease
from stenolog.agent.model_exchange import ModelExchange
from stenolog.agent.session_history import missing_session_error
from stenolog.agent.stored_answers import answer_from_log, find_answer
from stenolog.agent.threads import Threads, wait_shielded
from stenolog.agent.turn import Turn
from stenolog.agent.turn_events import (
    DEFAULT_OPTIONS,
    Answer,
    EventHandler,
    Notice,
    Outcome,
    SummaryCreated,
    TurnOptions,
)
from stenolog.agent.turn_log import TRIES_FIELD, TurnLog
from stenolog.context.summarize import SummaryReport
from stenolog.errors import (
    LeaseLost,
    NoSuchSession,
    SessionDeleted,
    StenologError,
    StoreBusy,
    StoreClosed,
)
from stenolog.stores.base import Lease, SessionView, Store, find_info

_LEASE_POLL_SECONDS: Final = 0.1
"""Interval in seconds between attempts to acquire a lease that another process holds."""
_CANCEL_TIMEOUT_SECONDS: Final = 5.0
"""Time limit in seconds for cancelled turns to end; after that, the turns are abandoned."""
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


class TurnScheduler:
    """Runs the turns of all sessions of the agents in a registry."""

    def __init__(self, registry: AgentRegistry, *, ttl: float) -> None:
        """Create a scheduler. An asyncio event loop must be running.

        `ttl`: lifetime of a lease in seconds. The lease of a killed process ends after this time.
        """
        self.threads = Threads()
        self._registry = registry
        self.ttl = ttl
        self._sessions = ActiveSessions()
        self._notes: dict[str | None, BackgroundNotes] = {}
        self._closed = False
        self._cancelled_sessions: set[str] = set()
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
        session = self._sessions.find(instance, key)
        return session is not None and session.waiting_messages > 0

    def is_active(self, instance: AgentInstance, key: str) -> bool:
        """Return whether this process is working on the session."""
        return self._sessions.find(instance, key) is not None

    @property
    def busy(self) -> set[str]:
        """Keys of the sessions in which this process writes an answer."""
        return self._sessions.busy

    @contextmanager
    def use_session(self, instance: AgentInstance, key: str) -> Iterator[ActiveSession]:
        """Yield the state of a session. Raises StoreClosed if the scheduler is closed."""
        self.check_open()
        with self._sessions.use(instance, key) as session:
            yield session

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
                    lease = await self.wait_for_lease(session, on_event)
                except NoSuchSession:
                    if view is not None:
                        raise await self.threads.run(
                            missing_session_error, instance.store, key
                        ) from None
                    # A session that does not exist has no lease, so create the session first.
                    await self.threads.run(instance.store.set_meta, key, **{TRIES_FIELD: [0, 0]})
                    lease = await self.wait_for_lease(session, on_event)
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
        session = self._sessions.find(instance, key)
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
        for session in self._sessions:
            if session.task is not None:
                self._cancelled_sessions.add(session.key)
                session.cancel("left")
        for instance in self._registry:
            instance.blocking_model.close()
        await self._wait_for_turns(_CANCEL_TIMEOUT_SECONDS)
        for notes in self._notes.values():
            await notes.close()
        cancelled_keys = tuple(sorted(self._cancelled_sessions))
        return CloseReport(turns=cancelled_keys, hanging=len(self.busy))

    async def _wait_for_turns(self, patience: float) -> None:
        """Wait up to `patience` seconds until all turns, background tasks and callers are done."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(patience, 0)):
                while tasks := self._sessions.tasks:
                    await asyncio.wait(tasks)
                await self._sessions.no_callers.wait()

    async def wait_until_idle(self) -> None:
        """Wait until turns, summaries and notes are done, for tests and scripts."""
        while tasks := self._sessions.tasks:
            await asyncio.wait(tasks)
        for notes in self._notes.values():
            await notes.wait_until_queue_empty()

    # --- one turn ----------------------------------------------------------------------------

    async def make_failed_answer(
        self, instance: AgentInstance, key: str, error: StenologError, *, text: str = ""
    ) -> Answer:
        """Return the Answer for a failed turn, with the error to report to the client.

        If the lease was lost because the session is gone, the error is that for a missing session.
        """
        if isinstance(error, LeaseLost | NoSuchSession) and not isinstance(error, SessionDeleted):
            error = await self.threads.run(_error_if_missing, instance.store, key, error)
        return failed_answer(key, error, text=text)

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
        uid: str = "",
    ) -> Turn:
        """Create a turn without starting it. `uid`: uid of the session, if it is known."""
        instance, key = session.instance, session.key
        log = TurnLog(leased_store=store, store=instance.store, key=key, view=view, uid=uid)
        return Turn(
            instance,
            log,
            ModelExchange(instance, self.threads, log, on_event, options),
            threads=self.threads,
            on_event=on_event,
            user_seq=user_seq,
            options=options,
            release_lease=None if session.lease is None else session.lease.release,
        )

    async def wait_for_lease(
        self, session: ActiveSession, on_event: EventHandler, *, seq: int = 0, uid: str = ""
    ) -> Lease | None:
        """Wait for the lease of a session.

        Returns None if `stop` ends the wait, or if another process has answered the message at
        `seq` of the session with this uid. Raises StoreClosed if the scheduler closes, and the
        errors of `Store.lease`.
        """
        session.waits_for_lease, is_notified = True, False
        try:
            while not self._closed:
                try:
                    return await self.acquire_lease(session)
                except StoreBusy as error:
                    if seq and await self._has_answer(session, seq, uid):
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

    async def _has_answer(self, session: ActiveSession, seq: int, uid: str) -> bool:
        with suppress(StenologError):  # with the lease, the turn reports the error
            return await self.read_answer(session, seq, "elsewhere", uid=uid) is not None
        return False

    async def acquire_lease(self, session: ActiveSession) -> Lease:
        """Acquire the lease of a session without waiting. Raises the errors of `Store.lease`."""
        return await acquire_lease(self.threads, session.instance.store, session.key, ttl=self.ttl)

    @asynccontextmanager
    async def hold_lease(self, session: ActiveSession, lease: Lease) -> AsyncIterator[Store]:
        """Renew `lease` in the `async with` block, and release it at the end.

        Yields the store whose writes are fenced by the lease.
        """
        cancel = partial(session.cancel, "lost")
        async with renew_lease(self.threads, lease, ttl=self.ttl, on_lost=cancel) as session.lease:
            try:
                yield lease.store
            finally:
                session.lease = None

    async def read_answer(
        self, session: ActiveSession, seq: int, outcome: Outcome, *, uid: str = ""
    ) -> Answer | None:
        """Return the stored answer to the message at `seq`; None if it has to be answered.

        Raises the errors of `find_answer`.
        """
        store = session.instance.store
        found = await self.threads.run(find_answer, store, session.key, seq, uid=uid)
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
            self._sessions.drop_if_idle(session)

    def _forward_summary(self, instance: AgentInstance, report: SummaryReport) -> None:
        """Emit SummaryCreated in the event loop; called in the thread that made the summary."""

        def emit() -> None:
            session = self._sessions.find(instance, report.key)
            if session is not None:
                session.on_event(SummaryCreated(report=report))

        self.threads.event_loop.call_soon_threadsafe(emit)


def _error_if_missing(store: Store, key: str, default: StenologError) -> StenologError:
    """Return the error for a missing session, or `default` if the session exists.

    This call blocks.
    """
    with suppress(StenologError):
        if find_info(store, key) is None:
            return missing_session_error(store, key)
    return default
