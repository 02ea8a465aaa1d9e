"""Turn scheduler: one turn at a time per session, by a lock in this process and a lease.

A message is stored first. If a turn is running, the message waits for it. That turn may have
answered the message too, so the next one checks this before it asks the model. Summaries and notes
are made in the background after the answer; only the summary delays the next turn of the session.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, Final

from msgspec import Struct

from stenolog.agent import turn_lease
from stenolog.agent.background_notes import BackgroundNotes
from stenolog.agent.blocking_model import ModelClosing
from stenolog.agent.instance import AgentInstance
from stenolog.agent.registry import AgentRegistry
from stenolog.agent.shielded_wait import wait_shielded
from stenolog.agent.threads import Threads
from stenolog.agent.turn import (
    TRIES,
    CancelReason,
    Turn,
    answer_from_log,
    missing_session_error,
    withdraw_message,
)
from stenolog.agent.turn_events import (
    Answer,
    EventHandler,
    MessageStored,
    Notice,
    Outcome,
    SummaryCreated,
    ignore_event,
)
from stenolog.agent.turn_options import DEFAULT_OPTIONS, TurnOptions
from stenolog.agent.unsaved import UnsavedMessages, new_idempotency_key
from stenolog.context.summarize import SummaryReport
from stenolog.context.turn_state import answer_to
from stenolog.errors import (
    LeaseLost,
    NoSuchSession,
    SessionDeleted,
    StenologError,
    StoreBusy,
    StoreClosed,
    StoreUnavailable,
)
from stenolog.records import Message
from stenolog.sessions.session_store import SessionStore
from stenolog.stores.base import Lease, SessionView, Store

TTL: Final = 20.0
"""Lifetime of a lease in seconds; it is renewed while the turn runs."""
_LEASE_POLL: Final = 0.1
"""Interval in seconds between attempts to acquire a lease that another process holds."""
_CANCEL_TIMEOUT: Final = 5.0
"""Time limit in seconds for cancelled turns to end; after that they are abandoned."""
TAKEN_OVER: Final = "another process has taken this turn over"
_MAX_UNSAVED_BYTES: Final = 32 * 2**20
"""Maximum size of all unsaved messages in bytes; further messages are rejected."""
CLOSING: Final = "the agent closes; this is answered at the next start"

_logger = logging.getLogger("stenolog")


class CloseReport(Struct, frozen=True, kw_only=True):
    """Unfinished work when the scheduler closes."""

    turns: tuple[str, ...] = ()
    """Sessions with a cancelled turn, whose messages are stored. The next start resumes them."""
    not_saved: int = 0
    """Number of messages that could not be stored and are lost with this process."""
    hanging: int = 0
    """Number of turns that did not end after they were cancelled."""

    def __str__(self) -> str:
        words = []
        if self.turns:
            words.append(f"unfinished, and gone on with at the next start: {', '.join(self.turns)}")
        if self.not_saved:
            words.append(f"{self.not_saved} messages could not be saved and are lost")
        if self.hanging:
            words.append(f"{self.hanging} turns hang, in a tool that does not end")
        return "; ".join(words) or "nothing is left undone"


class SessionBusy(Exception):
    """Another turn holds the lock or the lease."""


class NotLeased(StenologError):
    """The lease of a session cannot be acquired, so its turn does not run."""

    def __init__(self, cause: StenologError) -> None:
        self.cause = cause
        super().__init__(
            f"the turn in this session could not be reserved for this process: {cause}. "
            "The message is answered as soon as this is repaired"
        )


class ActiveSession:
    """The state of one session in this process."""

    def __init__(self, unsaved: UnsavedMessages) -> None:
        self.turn_lock = asyncio.Lock()
        self.unsaved = unsaved
        self.turn: Turn | None = None
        self.task: asyncio.Task[Answer] | None = None
        self.settling: asyncio.Task[None] | None = None
        self.on_event: EventHandler = ignore_event
        self.users = 0
        self.asking = 0
        """Number of messages that are being stored or wait for their answer."""
        self.waits = False
        """Whether a turn waits for the lease."""

    @property
    def idle(self) -> bool:
        """Whether this process has nothing to do in the session."""
        return not (self.users or self.unsaved.bodies or self.settling or self.task)

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Count a message that waits for its answer."""
        self.asking += 1
        try:
            yield
        finally:
            self.asking -= 1

    def cancel(self, fate: CancelReason) -> None:
        """Cancel the turn. If it is cancelled twice, the first reason is kept."""
        if self.turn is not None and self.task is not None:
            if not self.turn.fate:
                self.turn.fate = fate
            self.task.cancel()


class TurnScheduler:
    """Runs the turns of all sessions of the agents in a registry."""

    def __init__(self, registry: AgentRegistry, *, ttl: float = TTL) -> None:
        """Create a scheduler; an event loop must be running.

        `ttl`: lifetime of a lease in seconds, the longest wait after a killed lease holder.
        """
        self.threads = Threads()
        self._registry = registry
        self._ttl = ttl
        self._active: dict[tuple[str | None, str], ActiveSession] = {}
        self._notetaking: dict[str | None, BackgroundNotes] = {}
        self._closed = False
        self._left_off: set[str] = set()
        self._nobody_here = asyncio.Event()
        self._nobody_here.set()
        for instance in registry:
            instance.ask.bind(self.threads.event_loop)
            instance.on_summary = partial(self._compacted, instance)
            if instance.memory is not None and instance.spec.consolidation:
                self._notetaking[instance.id] = BackgroundNotes(instance, self.threads)

    def check_open(self) -> None:
        """Raise StoreClosed if the scheduler is closed."""
        if self._closed:
            raise StoreClosed("the agent was closed before this call")

    def is_asked(self, instance: AgentInstance, key: str) -> bool:
        """Return whether a message of this process waits for its answer in this session."""
        session = self._active.get((instance.id, key))
        return session is not None and session.asking > 0

    def is_active(self, instance: AgentInstance, key: str) -> bool:
        """Return whether this process is working on the session."""
        return (instance.id, key) in self._active

    @property
    def busy(self) -> set[str]:
        """Keys of the sessions in which this process writes an answer."""
        return {key for (_, key), session in self._active.items() if session.task is not None}

    async def answer(
        self,
        instance: AgentInstance,
        key: str,
        body: Mapping[str, Any],
        *,
        once: str = "",
        on_event: EventHandler = ignore_event,
        options: TurnOptions = DEFAULT_OPTIONS,
        view: SessionView | None = None,
    ) -> Answer:
        """Store a message, and run a turn that answers it and all other unanswered messages.

        `view`: an earlier view of the session, so that the turn reads only newer messages. Raises
        UsageError for a message that can never be stored; errors of the model's server and of the
        store are in the returned Answer.
        """
        token = once or new_idempotency_key()
        if sum(session.unsaved.size for session in self._active.values()) > _MAX_UNSAVED_BYTES:
            raise StoreUnavailable(
                "nothing can be stored now, and too much waits for it already; try again later"
            )
        with self.used(instance, key) as session, session.asked():
            seq = await session.unsaved.say(instance.sessions, body, on_event=on_event, once=token)
            is_new = view is not None and seq is not None and seq > view.upto
            # Another process may have stored and acknowledged a message with an id of the client.
            own = not once  # guard: withdraw-own-message
            if own and view is not None and seq is not None and not is_new:
                # The session of this view is gone, and the message has created a new session.
                error = await self.threads.run(_withdraw, instance.store, view, seq, body)
                return failed(key, session, error)
            if seq is not None:
                on_event(MessageStored(seq=seq))
            if once and not is_new:
                found = await self._found(instance, key, session, seq, token, "again")
                if found is not None:
                    return found
            view = view if is_new else None
            async with session.turn_lock:
                if session.settling is not None:
                    await asyncio.wait([session.settling])
                seq = seq or session.unsaved.seq_of(token)
                if seq is None and (found := _unsaved_answer(key, session, token)):
                    return found
                return await self._take_turn(
                    instance, key, session, seq, token, on_event, options, view
                )

    async def alone(
        self,
        instance: AgentInstance,
        key: str,
        change: Callable[[SessionStore], Awaitable[Answer | None]],
        *,
        on_event: EventHandler,
        wait: bool = False,
        options: TurnOptions = DEFAULT_OPTIONS,
        view: SessionView | None = None,
    ) -> Answer:
        """Run `change` while holding the lease. Raise SessionBusy if another turn runs.

        If `change` returns None, answer the unanswered messages. `wait`: wait for the lease instead
        of raising SessionBusy. `view`: an earlier view of the session, so that the turn reads only
        newer messages.
        """
        with self.used(instance, key) as session:
            if session.turn_lock.locked() and not wait:
                raise SessionBusy
            async with session.turn_lock:
                if session.settling is not None:
                    await asyncio.wait([session.settling])
                lease = await self._alone(instance, key, session, on_event, wait=wait, known=view)
                if isinstance(lease, Answer):
                    return lease
                async with self.held(instance, session, lease) as sessions:
                    session.on_event = on_event
                    done = await change(sessions)
                    if done is not None:
                        return done
                    if lease is None:
                        # Another process created the session in the meantime.
                        raise SessionBusy
                    answer, turn = await self.run_turn(
                        instance, key, session, sessions, None, on_event, options, view
                    )
                self.settle_later(instance, key, session, on_event, turn)
                return answer

    async def _alone(
        self,
        instance: AgentInstance,
        key: str,
        session: ActiveSession,
        on_event: EventHandler,
        *,
        wait: bool,
        known: SessionView | None,
    ) -> Lease | Answer | None:
        """Acquire the lease for a change; return None if the session does not exist.

        Raises SessionBusy and the errors of `Store.lease`, with `wait` also NoSuchSession if the
        session of the view `known` is gone.
        """
        if wait:
            try:
                lease = await self._waited_for(instance, key, session, None, on_event)
                if lease is None and known is not None:
                    raise await self.threads.run(missing_session_error, instance.store, key)
                if lease is None:
                    # A session that does not exist has no lease, so create it first.
                    await self.threads.run(instance.store.set_meta, key, **{TRIES: [0, 0]})
                    lease = await self._waited_for(instance, key, session, None, on_event)
            except NotLeased as error:
                # The change stored nothing, so there is nothing to answer later.
                raise error.cause from error
            return lease
        try:
            return await self.lease(instance, key)
        except StoreBusy as error:
            raise SessionBusy from error
        except NoSuchSession:
            return None

    async def stop(self, instance: AgentInstance, key: str) -> bool:
        """Stop the answer in progress in a session and store it; return False if there is none."""
        session = self._active.get((instance.id, key))
        if session is None:
            return False
        task, waited = session.task, session.waits
        session.waits = False
        if task is None:
            return waited
        session.cancel("")
        await asyncio.wait([task])
        return True

    # --- closing -----------------------------------------------------------------------------

    async def close(self, *, patience: float) -> CloseReport:
        """Wait up to `patience` seconds for turns in progress, then cancel them.

        Cancelled turns stay in the log, and the next start resumes them. If two calls overlap, the
        shorter patience counts.
        """
        self._closed = True
        await self._all_gone(patience)
        for (_, key), session in self._active.items():
            if session.task is not None:
                self._left_off.add(key)
                session.cancel("left")
        for instance in self._registry:
            instance.ask.close()
        await self._all_gone(_CANCEL_TIMEOUT)
        for instance in self._registry:
            await self.save_unsaved(instance)
        for notetaking in self._notetaking.values():
            await notetaking.close()
        return CloseReport(
            turns=tuple(sorted(self._left_off)),
            not_saved=sum(len(session.unsaved.bodies) for session in self._active.values()),
            hanging=len(self.busy),
        )

    async def save_unsaved(self, instance: AgentInstance) -> None:
        """Retry storing the unsaved messages of sessions without a running turn."""
        for (id, key), session in list(self._active.items()):
            if id != instance.id or not session.unsaved.bodies or session.turn_lock.locked():
                continue
            async with session.turn_lock:
                with suppress(StenologError):
                    try:
                        lease = await self.lease(instance, key)
                    except NoSuchSession:
                        lease = None
                    async with self.held(instance, session, lease) as sessions:
                        await session.unsaved.flush(sessions, on_event=session.on_event)
            self._tidy(instance, key, session)

    async def _all_gone(self, patience: float) -> None:
        """Wait until no turn, background task or caller is left, for at most `patience` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(patience, 0)):
                while tasks := self._tasks():
                    await asyncio.wait(tasks)
                await self._nobody_here.wait()

    async def quiet(self) -> None:
        """Wait until summaries and notes are done too, for tests and scripts."""
        while tasks := self._tasks():
            await asyncio.wait(tasks)
        for notetaking in self._notetaking.values():
            await notetaking.idle()

    # --- one turn ----------------------------------------------------------------------------

    async def _take_turn(
        self,
        instance: AgentInstance,
        key: str,
        session: ActiveSession,
        seq: int | None,
        token: str,
        on_event: EventHandler,
        options: TurnOptions,
        view: SessionView | None,
    ) -> Answer:
        try:
            while True:
                lease = await self._waited_for(instance, key, session, seq, on_event)
                if isinstance(lease, Answer):
                    return lease
                async with self.held(instance, session, lease) as sessions:
                    await session.unsaved.flush(sessions, on_event=on_event)
                    seq = seq or session.unsaved.seq_of(token)
                    if lease is None and seq is not None:
                        # The session has just been created; acquire its lease before running the
                        # turn.
                        continue
                    if seq is None and (found := _unsaved_answer(key, session, token)):
                        return found
                    # The turn first checks whether another process has answered this message.
                    answer, turn = await self.run_turn(
                        instance, key, session, sessions, seq, on_event, options, view
                    )
                    break
        except NotLeased as error:
            return failed(key, session, error.cause, words=str(error))
        except StenologError as error:
            return failed(key, session, await self.cause(instance, key, error))
        if answer.outcome != "elsewhere":
            self.settle_later(instance, key, session, on_event, turn)
        return answer

    async def cause(self, instance: AgentInstance, key: str, error: StenologError) -> StenologError:
        """Return the error for the client. A lost lease can mean that the session is gone."""
        if isinstance(error, SessionDeleted) or not isinstance(error, LeaseLost | NoSuchSession):
            return error
        return await self.threads.run(_cause, instance.store, key, error)

    async def run_turn(
        self,
        instance: AgentInstance,
        key: str,
        session: ActiveSession,
        sessions: SessionStore,
        seq: int | None,
        on_event: EventHandler,
        options: TurnOptions = DEFAULT_OPTIONS,
        view: SessionView | None = None,
    ) -> tuple[Answer, Turn]:
        """Run a turn as a separate task, which `stop` and the caller can cancel."""
        if self._closed:
            raise StoreClosed(CLOSING)
        turn = self.new_turn(instance, key, session, sessions, seq, on_event, options, view)
        notetaking = self._notetaking.get(instance.id)
        if notetaking is not None:
            notetaking.hold()
        session.turn, session.on_event = turn, on_event
        session.task = task = asyncio.create_task(turn.run())
        try:
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                session.cancel("")
                await wait_shielded(task)
                raise
        finally:
            session.turn = session.task = None
            if notetaking is not None:
                notetaking.let_go()
        if task.cancelled() and turn.fate == "left":
            raise StoreClosed(CLOSING)
        try:
            # A task that was cancelled before it started has not stored the interruption.
            answer = await turn.close("stopped") if task.cancelled() else task.result()
        except ModelClosing:
            raise StoreClosed(CLOSING) from None
        return answer, turn

    def new_turn(
        self,
        instance: AgentInstance,
        key: str,
        session: ActiveSession,
        sessions: SessionStore,
        seq: int | None,
        on_event: EventHandler,
        options: TurnOptions = DEFAULT_OPTIONS,
        view: SessionView | None = None,
    ) -> Turn:
        """Create a turn without starting it."""
        return Turn(
            instance,
            key,
            sessions,
            session.unsaved,
            threads=self.threads,
            on_event=on_event,
            asked_for=seq,
            options=options,
            view=view,
        )

    async def _waited_for(
        self,
        instance: AgentInstance,
        key: str,
        session: ActiveSession,
        seq: int | None,
        on_event: EventHandler,
    ) -> Lease | Answer | None:
        """Wait for the lease, or until another process has answered the message at `seq`.

        Returns None if the session does not exist because its first message is unsaved. Raises
        NotLeased if the lease cannot be acquired for any other reason.
        """
        session.waits, told = True, False
        try:
            while not self._closed:
                try:
                    return await self.lease(instance, key)
                except StoreBusy as error:
                    if seq is not None and (found := await self._answered(instance, key, seq)):
                        return answer_from_log(key, found, "elsewhere")
                    if not told:
                        on_event(Notice(words=f"waiting for the turn in this session: {error}"))
                        told = True
                except NoSuchSession:
                    if seq is not None:
                        raise  # the session was purged, with the message
                    return None  # the first message of the session is unsaved
                except StoreClosed:
                    raise
                except StenologError as error:
                    raise NotLeased(error) from error  # guard: unleased-turn
                await asyncio.sleep(_LEASE_POLL)
                if not session.waits:
                    words = "Not waited for any longer; the message is kept."
                    return Answer(key=key, text=words, outcome="interrupted")
        finally:
            session.waits = False
        raise StoreClosed(CLOSING)

    async def lease(self, instance: AgentInstance, key: str) -> Lease:
        """Acquire the lease of a session if it is free. Raise StoreBusy and NoSuchSession."""
        return await turn_lease.acquire_lease(self.threads, instance.store, key, ttl=self._ttl)

    @asynccontextmanager
    async def held(
        self, instance: AgentInstance, session: ActiveSession, lease: Lease | None
    ) -> AsyncIterator[SessionStore]:
        """Yield sessions that write through the lease; without a lease, the agent's sessions."""
        if lease is None:
            yield instance.sessions
            return
        lost = partial(session.cancel, "lost")
        async with turn_lease.renewed_lease(
            self.threads, lease, ttl=self._ttl, lost=lost
        ) as sessions:
            yield sessions

    async def _found(
        self,
        instance: AgentInstance,
        key: str,
        session: ActiveSession,
        seq: int | None,
        token: str,
        outcome: Outcome,
    ) -> Answer | None:
        """Return the answer to a message, stored or unsaved; None if it has none."""
        if seq is None:
            return _unsaved_answer(key, session, token, outcome)
        found = await self._answered(instance, key, seq)
        return None if found is None else answer_from_log(key, found, outcome)

    async def _answered(self, instance: AgentInstance, key: str, seq: int) -> Message | None:
        """Return the answer to the message at this seq; the message itself if it is hidden."""
        read = partial(self.threads.run, instance.sessions.get_history, key, after=seq - 1)
        shown: list[Message] = await read()
        if shown and shown[0].seq == seq:
            return answer_to(shown, seq)
        everything: list[Message] = await read(full=True)
        return answer_to(everything, seq) or next(iter(everything), None)

    # --- after the answer --------------------------------------------------------------------

    def settle_later(
        self,
        instance: AgentInstance,
        key: str,
        session: ActiveSession,
        on_event: EventHandler,
        turn: Turn,
    ) -> None:
        """Summarize in the background; the next turn of the session waits for it."""
        session.settling = asyncio.create_task(self._settle(instance, key, session, on_event, turn))

    async def _settle(
        self,
        instance: AgentInstance,
        key: str,
        session: ActiveSession,
        on_event: EventHandler,
        turn: Turn,
    ) -> None:
        """Summarize if needed, and queue the session for notes."""
        try:
            session.on_event = on_event
            if await self.threads.ask(_summarize, instance, key, turn):
                await self.threads.run(instance.sessions.save, key)
            if instance.id in self._notetaking and not self._closed:
                self._notetaking[instance.id].add(key)
        except (ModelClosing, NoSuchSession):
            return
        except StenologError as error:
            on_event(Notice(words=f"the conversation could not be compacted: {error}"))
        except Exception:
            _logger.exception("what follows an answer in %r failed", key)
        finally:
            session.settling = None
            self._tidy(instance, key, session)

    def _compacted(self, instance: AgentInstance, done: SummaryReport) -> None:
        """Forward a summary event from the thread that made the summary."""
        self.threads.event_loop.call_soon_threadsafe(self._emit_summary, instance, done)

    def _emit_summary(self, instance: AgentInstance, done: SummaryReport) -> None:
        session = self._active.get((instance.id, done.key))
        if session is not None:
            session.on_event(SummaryCreated(report=done))

    def _tasks(self) -> list[asyncio.Task[Any]]:
        found = [
            task for session in self._active.values() for task in (session.task, session.settling)
        ]
        return [task for task in found if task is not None]

    # --- active sessions ---------------------------------------------------------------------

    @contextmanager
    def used(self, instance: AgentInstance, key: str) -> Iterator[ActiveSession]:
        """Yield the state of a session and keep it while it is in use."""
        self.check_open()
        place = (instance.id, key)
        if place not in self._active:
            self._active[place] = ActiveSession(UnsavedMessages(key, self.threads.run))
        session = self._active[place]
        session.users += 1
        self._nobody_here.clear()
        try:
            yield session
        finally:
            session.users -= 1
            self._tidy(instance, key, session)
            if not any(one.users for one in self._active.values()):
                self._nobody_here.set()

    def _tidy(self, instance: AgentInstance, key: str, session: ActiveSession) -> None:
        """Drop the state of an idle session."""
        if session.idle and self._active.get((instance.id, key)) is session:
            del self._active[instance.id, key]


def _withdraw(store: Store, view: SessionView, seq: int, body: Mapping[str, Any]) -> NoSuchSession:
    """Withdraw a message that has created a new session; return the error for it. Blocks."""
    error = missing_session_error(store, view.key)
    withdraw_message(store, view, seq, body)
    return error


def _cause(store: Store, key: str, error: StenologError) -> StenologError:
    try:
        store.info(key)
    except NoSuchSession:
        return missing_session_error(store, key)
    except StenologError:
        pass
    return error


def _summarize(instance: AgentInstance, key: str, turn: Turn) -> bool:
    """Store the provider's token counts and summarize if needed; return whether it did. Blocks."""
    turn.report_usage()
    old = turn.view
    view = instance.store.view(key) if old is None else old.merged(instance.store.refresh(old))
    turn.hide_late_messages(instance.store, view)
    context = instance.context(instance.chosen_model(view.info.meta))
    return context.summarize_if_needed(key, view=view) is not None


def failed(key: str, session: ActiveSession, error: StenologError, *, words: str = "") -> Answer:
    """Return the Answer for a failed turn."""
    if isinstance(error, LeaseLost):
        words = TAKEN_OVER
    return Answer(
        key=key,
        text=words or str(error),
        outcome="failed",
        saved=not session.unsaved.bodies,
        error=error,
    )


def _unsaved_answer(
    key: str, session: ActiveSession, token: str, outcome: Outcome = "elsewhere"
) -> Answer | None:
    """Return the unsaved answer to an unsaved message; None if there is none."""
    text = session.unsaved.answer_to(token)
    return None if text is None else Answer(key=key, text=text, outcome=outcome, saved=False)
