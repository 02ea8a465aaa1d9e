"""Resumes interrupted turns, for example after a process was killed."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from time import monotonic
from typing import Final

from msgspec import Struct

from stenolog.agent.active_sessions import ActiveSession, failed_answer
from stenolog.agent.instance import AgentInstance
from stenolog.agent.scheduler import TurnScheduler, unleased_text
from stenolog.agent.session_history import (
    is_own_turn,
    last_user_message,
)
from stenolog.agent.turn import Turn
from stenolog.agent.turn_events import Answer, EventHandler, TurnOptions
from stenolog.catalog.entries import Entry
from stenolog.context.turn_state import TurnState, turn_state
from stenolog.errors import (
    AnswerUnknown,
    ContextTooSmall,
    ModelRefused,
    NoSuchSession,
    StenologError,
    StoreBusy,
    StoreClosed,
    UnsupportedFormat,
)
from stenolog.stores.base import Lease, Store, fork_seq_of

_MAX_CONCURRENT_TURNS: Final = 4
"""Maximum number of turns of one agent that are resumed at the same time."""
_FIRST_DELAY_SECONDS: Final = 10.0
"""Delay in seconds after the first failed resume."""
_MAX_DELAY_SECONDS: Final = 3_600.0
_TAIL_MESSAGES: Final = 50
"""Number of newest messages to read first, which usually include the last user message."""
_MAX_CACHED_SESSIONS: Final = 100_000
"""Maximum number of sessions in a ForeignTurnCache."""
_MAX_REMEMBERED_TURNS: Final = 10_000

_logger = logging.getLogger("stenolog")


class UnfinishedTurn(Struct):
    """What this process remembers of an unfinished turn, until the session has a newer message."""

    last_seq: int
    first_seen: float
    """Time of the clock of this process; the clock of the message's writer may be wrong."""
    failure_count: int = 0
    blocked_until: float = 0.0

    def record_failure(self, error: StenologError, *, double_delay: bool) -> None:
        """Record that resuming failed.

        After ModelRefused, ContextTooSmall, UnsupportedFormat or AnswerUnknown, the turn is not
        resumed again. After other errors, for example if the model is unreachable, the delay
        doubles from 10 seconds up to an hour. Without `double_delay`, the delay is 10 seconds.
        """
        self.failure_count = self.failure_count + 1 if double_delay else 1
        delay = min(_FIRST_DELAY_SECONDS * 2 ** min(self.failure_count - 1, 30), _MAX_DELAY_SECONDS)
        if isinstance(error, ModelRefused | ContextTooSmall | UnsupportedFormat | AnswerUnknown):
            delay = float("inf")
        self.blocked_until = monotonic() + delay


class Resumer:
    """Resumes or closes the unfinished turns of sessions."""

    def __init__(self, scheduler: TurnScheduler) -> None:
        self._scheduler = scheduler
        self._turns: dict[tuple[str | None, str], UnfinishedTurn] = {}
        """By agent and session, the most recently examined last."""
        self._foreign_turns = ForeignTurnCache()

    async def resume(
        self, instance: AgentInstance, key: str, *, on_event: EventHandler, idle_for: float = 0.0
    ) -> Answer | None:
        """Resume the unfinished turn of a session, or close the turn if it is too old.

        Returns None if the session has no unfinished turn or is skipped. A session is skipped if
        another process holds its lease, if its last message is younger than `idle_for` seconds, or
        if the delay after a failure has not ended.
        """
        try:
            last_seq, age = await self._scheduler.threads.run(_read_last_seq_and_age, instance, key)
        except StoreClosed:
            raise
        except StenologError as error:
            return failed_answer(key, error)
        unfinished_turn = self._find_turn(instance.id, key, last_seq)
        now = monotonic()
        age = max(age, now - unfinished_turn.first_seen)
        if (idle_for and age < idle_for) or now < unfinished_turn.blocked_until:
            return None
        with self._scheduler.use_session(instance, key) as session:
            async with session.hold_lock():
                lease: Lease | None = None
                try:
                    lease = await self._scheduler.acquire_lease(session)
                    async with self._scheduler.hold_lease(session, lease) as store:
                        answer, turn = await self._resume_turn(session, store, on_event)
                except (StoreBusy, NoSuchSession):
                    return None
                except StenologError as error:
                    has_lease = lease is not None
                    unfinished_turn.record_failure(error, double_delay=has_lease)
                    text = "" if has_lease else unleased_text(error)
                    return failed_answer(key, error, text=text)
                if answer is not None and turn is not None:
                    self._scheduler.summarize_later(session, turn)
                return answer

    async def resume_all(
        self,
        instance: AgentInstance,
        *,
        on_event: EventHandler,
        idle_for: float,
        each: Callable[[Answer], Awaitable[None]] | None,
    ) -> list[Answer]:
        """Resume the unfinished turns of all sessions of an agent."""
        slots = asyncio.Semaphore(_MAX_CONCURRENT_TURNS)

        async def resume_one(key: str) -> Answer | None:
            async with slots:
                try:
                    answer = await self.resume(instance, key, on_event=on_event, idle_for=idle_for)
                    if answer is not None and each is not None:
                        await each(answer)
                    return answer  # noqa: TRY300 - errors of `each` are logged too
                except Exception as error:
                    _logger.exception("the turn in %r could not be resumed", key)
                    return Answer(key=key, text=repr(error), outcome="failed")

        candidates = await self._scheduler.threads.run(
            _find_interrupted, instance, self._foreign_turns
        )
        # Skip sessions that this process is working on.
        keys = [key for key in candidates if not self._scheduler.is_active(instance, key)]
        answers = await asyncio.gather(*map(resume_one, keys))
        return [answer for answer in answers if answer is not None]

    def _find_turn(self, agent: str | None, key: str, last_seq: int) -> UnfinishedTurn:
        turn = self._turns.pop((agent, key), None)
        if turn is None or turn.last_seq != last_seq:
            turn = UnfinishedTurn(last_seq, monotonic())
        self._turns[agent, key] = turn
        if len(self._turns) > _MAX_REMEMBERED_TURNS:
            del self._turns[next(iter(self._turns))]
        return turn

    async def _resume_turn(
        self, session: ActiveSession, store: Store, on_event: EventHandler
    ) -> tuple[Answer | None, Turn | None]:
        key = session.key
        view = await self._scheduler.threads.run(store.view, key)
        state = turn_state(view.messages, view.info.lost_spans)
        is_started_by_agent = is_own_turn(view.messages, after=fork_seq_of(view.info))
        if is_started_by_agent:
            _check_known(key, state)
        if not state.is_unfinished or not is_started_by_agent:  # guard: resume-own
            return None, None
        if _seconds_since(view.messages[-1].at) <= session.instance.spec.resume_within:
            # Only the channel of the message gets the answer, so the owner's memory may be used.
            options = TurnOptions(sender=None)
            turn = self._scheduler.new_turn(session, store, on_event, options=options, view=view)
            answer = await self._scheduler.run_turn(session, turn)
            if answer.outcome == "answered":
                _logger.info("Answered the unanswered messages in %s", key)
            return answer, turn
        turn = self._scheduler.new_turn(session, store, on_event, view=view)
        answer = await turn.close("too old to be answered")
        _logger.info("Closed the unanswered turn in %s: it is too old", key)
        return answer, turn


class ForeignTurnCache:
    """Cache of sessions with an unfinished turn that another program started.

    A cached session is examined again only after it has changed.
    """

    def __init__(self) -> None:
        self._versions = OrderedDict[tuple[str | None, str], tuple[str, datetime | None]]()
        """Uid and last change of each cached session, by agent and session key."""

    def includes(self, instance: AgentInstance, entry: Entry) -> bool:
        """Return whether another program started the unfinished turn of this session."""
        agent_and_key, version = (instance.id, entry.key), (entry.uid, entry.updated)
        if self._versions.get(agent_and_key) == version:
            return True
        view = instance.store.view(entry.key, last=_TAIL_MESSAGES)
        if last_user_message(view.messages) is None:
            view = instance.store.view(entry.key)
        if is_own_turn(view.messages, after=fork_seq_of(view.info)):
            self._versions.pop(agent_and_key, None)
            return False
        self._versions[agent_and_key] = version
        if len(self._versions) > _MAX_CACHED_SESSIONS:
            self._versions.popitem(last=False)
        return True


def _find_interrupted(instance: AgentInstance, foreign_turns: ForeignTurnCache) -> list[str]:
    """Return the sessions whose last turn a stenolog agent may have left unfinished.

    The caller then leases each session and checks the log. Sessions whose unfinished turn
    another program started are left out, so that they are never leased.
    """
    keys: list[str] = []
    cursor: str | None = None
    while True:
        page = instance.catalog.list(state="interrupted", limit=500, after=cursor)
        for entry in page.entries:
            if entry.problem is None:
                with suppress(StenologError):  # resuming the session reports the error
                    if foreign_turns.includes(instance, entry):
                        continue
                keys.append(entry.key)
        cursor = page.after
        if cursor is None:
            return keys


def _check_known(key: str, state: TurnState) -> None:
    """Raise AnswerUnknown if the only messages without an answer may have been answered."""
    if state.unknown and not state.unanswered:
        reason = "a later message of the session is lost, see `steno doctor`"
        raise AnswerUnknown(key, state.unknown[-1], reason)


def _read_last_seq_and_age(instance: AgentInstance, key: str) -> tuple[int, float]:
    """Return the seq of the last visible message and its age in seconds."""
    for message in instance.store.get_history(key, last=1):
        return message.seq, _seconds_since(message.at)
    return 0, 0.0


def _seconds_since(moment: datetime) -> float:
    return (datetime.now(UTC) - moment).total_seconds()
