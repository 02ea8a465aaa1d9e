"""Resumes interrupted turns, for example after a process was killed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from time import monotonic
from typing import Final

from stenolog.agent.instance import AgentInstance
from stenolog.agent.scheduler import ActiveSession, NotLeased, TurnScheduler
from stenolog.agent.turn import Turn
from stenolog.agent.turn_events import DEFAULT_OPTIONS, Answer, EventHandler, TurnOptions
from stenolog.agent.turn_ownership import ForeignTurns, hide_late_message, is_own_turn, late_message
from stenolog.context.turn_state import turn_state
from stenolog.errors import (
    ContextTooSmall,
    ModelRefused,
    NoSuchSession,
    StenologError,
    StoreBusy,
)
from stenolog.sessions.session_store import SessionStore
from stenolog.stores.base import SessionView, forked_at

_MAX_CONCURRENT: Final = 4
"""Maximum number of turns that are resumed at the same time."""
FIRST_DELAY: Final = 10.0
"""Delay in seconds after the first failed resume."""
_MAX_DELAY: Final = 3_600.0
_MAX_SESSIONS: Final = 10_000
"""Maximum number of sessions whose failures or last messages are remembered."""
_UNITS: Final = ((86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second"))
_LISTED: Final = 5
"""Maximum number of session names in one log line."""
_RECENT: Final = 500
"""Number of recent sessions that are searched for late messages at start-up."""

_logger = logging.getLogger("stenolog")


class Resumer:
    """Resumes or closes the unfinished turns of sessions."""

    def __init__(self, turns: TurnScheduler) -> None:
        self._turns = turns
        self._backoff = ResumeBackoff()
        self._idle = IdleSessions()
        self._others = ForeignTurns()
        self._too_old: list[str] = []
        """Sessions whose turn was closed as too old since the last log line."""
        self._searched: set[str | None] = set()
        """Agents whose recent sessions were searched for late messages."""

    async def resume(
        self, instance: AgentInstance, key: str, *, on_event: EventHandler, idle_for: float = 0.0
    ) -> Answer | None:
        """Resume an unfinished turn, or close a turn that is too old; return None without a turn.

        Skips a session whose lease another process holds, and a session with a message of the last
        `idle_for` seconds.
        """
        last, age = await self._turns.threads.run(_last_message, instance, key)
        age = max(age, self._idle.seconds(instance.id, key, last))
        if (idle_for and age < idle_for) or self._backoff.is_blocked(instance.id, key, last):
            return None
        with self._turns.use(instance, key) as session:
            async with session.locked():
                try:
                    lease = await self._turns.acquire_lease(session)
                except (StoreBusy, NoSuchSession):
                    return None
                except StenologError as error:
                    self._backoff.record_failure(instance.id, key, last, error, grows=False)
                    return session.failed(error, text=str(NotLeased(error)))
                try:
                    async with self._turns.hold_lease(session, lease) as sessions:
                        answer, turn = await self._resume(session, sessions, on_event)
                except (StoreBusy, NoSuchSession):
                    return None
                except StenologError as error:
                    self._backoff.record_failure(instance.id, key, last, error)
                    return session.failed(error)
                if answer is not None and turn is not None:
                    self._turns.summarize_later(session, on_event, turn)
                return answer

    async def resume_all(
        self,
        instance: AgentInstance,
        *,
        on_event: EventHandler,
        idle_for: float = 0.0,
        each: Callable[[Answer], Awaitable[None]] | None = None,
    ) -> list[Answer]:
        """Resume the unfinished turns of all sessions of an agent."""
        concurrent = asyncio.Semaphore(_MAX_CONCURRENT)

        async def resume_one(key: str) -> Answer | None:
            async with concurrent:
                try:
                    answer = await self.resume(instance, key, on_event=on_event, idle_for=idle_for)
                    if answer is not None and each is not None:
                        await each(answer)
                    return answer  # noqa: TRY300 - errors of `each` are logged too
                except Exception as error:
                    _logger.exception("the turn in %r could not be resumed", key)
                    return Answer(key=key, text=repr(error), outcome="failed")

        await self._turns.save_unsaved(instance)
        candidates = await self._turns.threads.run(_interrupted, instance, self._others)
        if instance.id not in self._searched:
            self._searched.add(instance.id)
            candidates += await self._turns.threads.run(_with_late_message, instance)
        # Skip sessions that this process is working on.
        keys = [
            key for key in dict.fromkeys(candidates) if not self._turns.is_active(instance, key)
        ]
        answers = await asyncio.gather(*map(resume_one, keys))
        closed, self._too_old = self._too_old, []
        if closed:
            turns, age = (
                count(len(closed), "unanswered turn"),
                duration(instance.spec.resume_within),
            )
            _logger.info("Closed %s older than %s: %s", turns, age, join_names(closed))
        return [answer for answer in answers if answer is not None]

    async def _resume(
        self, session: ActiveSession, sessions: SessionStore, on_event: EventHandler
    ) -> tuple[Answer | None, Turn | None]:
        key = session.key
        view = await self._turns.threads.run(_view, sessions, key)
        state = turn_state(view.messages)
        is_own = is_own_turn(view.messages, after=forked_at(view.info))
        if not state.is_unfinished or not is_own:  # guard: resume-own
            return None, None
        if _seconds_since(view.messages[-1].at) <= session.instance.spec.resume_within:
            # Only the channel of the message gets the answer, so the owner's memory may be used.
            options = TurnOptions(sender=None)
            answer, turn = await self._turns.run_turn(
                session, sessions, None, on_event, options, view
            )
            if answer.outcome == "answered":
                messages = count(len(state.unanswered), "unanswered message")
                _logger.info("Answered %s in %s", messages, key)
            return answer, turn
        turn = self._turns.new_turn(session, sessions, None, on_event, DEFAULT_OPTIONS, view)
        self._too_old.append(key)
        return await turn.close("too old to be answered"), turn


class ResumeBackoff:
    """Delays before a failed resume is tried again, per session.

    A refused request is not repeated until a new message arrives. If the model is unreachable, the
    delay doubles from 10 seconds up to an hour. Other errors are retried after 10 seconds.
    """

    def __init__(self) -> None:
        self._until: dict[tuple[str | None, str], tuple[int, int, float]] = {}
        """Last seq at the failure, number of failures, and end of the delay."""

    def is_blocked(self, agent: str | None, key: str, last: int) -> bool:
        """Return whether a session with this last seq must not be resumed now."""
        failure = self._until.get((agent, key))
        return failure is not None and failure[0] == last and monotonic() < failure[2]

    def record_failure(
        self,
        agent: str | None,
        key: str,
        last: int,
        error: StenologError,
        *,
        grows: bool = True,
    ) -> None:
        """Record that resuming failed. `grows`: the delay doubles with each failure."""
        before, times, _ = self._until.pop((agent, key), (last, 0, 0.0))
        times = times + 1 if before == last and grows else 1
        pause = min(FIRST_DELAY * 2 ** min(times - 1, 30), _MAX_DELAY)
        if isinstance(error, ModelRefused | ContextTooSmall):
            pause = float("inf")
        self._until[agent, key] = (last, times, monotonic() + pause)
        while len(self._until) > _MAX_SESSIONS:
            del self._until[next(iter(self._until))]


class IdleSessions:
    """A tracker of the time for which each session has had the same last message.

    The time in a message comes from the machine that wrote it, whose clock may be wrong. This
    process measures with its own clock.
    """

    def __init__(self) -> None:
        self._since: dict[tuple[str | None, str], tuple[int, float]] = {}

    def seconds(self, agent: str | None, key: str, last: int) -> float:
        """Return the number of seconds for which this process has seen `last` as the last seq."""
        now = monotonic()
        seq, since = self._since.pop((agent, key), (last, now))
        if seq != last:
            since = now
        self._since[agent, key] = last, since
        while len(self._since) > _MAX_SESSIONS:
            del self._since[next(iter(self._since))]
        return now - since


def _interrupted(instance: AgentInstance, foreign_turns: ForeignTurns) -> list[str]:
    """Return the sessions whose last turn a stenolog agent may have left unfinished.

    The log is checked once the session is leased. Sessions of other programs are never leased.
    """
    keys: dict[str, None] = {}
    after: str | None = None
    while True:
        page = instance.catalog.list(state="interrupted", limit=500, after=after)
        for entry in page.entries:
            if entry.problem is None and not foreign_turns.include(instance, entry):
                keys[entry.key] = None
        after = page.after
        if after is None:
            return list(keys)


def _with_late_message(instance: AgentInstance) -> list[str]:
    """Return the recent sessions that end with a late message.

    The catalog lists such sessions as idle, because their last message is an answer.
    """
    keys = []
    for entry in instance.catalog.list(state="idle", limit=_RECENT).entries:
        if entry.problem is None and 0 < entry.visible < entry.count:
            with suppress(StenologError):
                view = instance.store.view(entry.key)
                if late_message(instance.sessions, view) is not None:
                    keys.append(entry.key)
    return keys


def _view(sessions: SessionStore, key: str) -> SessionView:
    """Hide a late message of a session, and return a view of the session."""
    view = sessions.store.view(key)
    return sessions.store.view(key) if hide_late_message(sessions, view) else view


def _last_message(instance: AgentInstance, key: str) -> tuple[int, float]:
    """Return the seq of the last visible message and its age in seconds."""
    last = instance.sessions.get_history(key, last=1)
    return (last[0].seq, _seconds_since(last[0].at)) if last else (0, 0.0)


def _seconds_since(moment: datetime) -> float:
    return (datetime.now(UTC) - moment).total_seconds()


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 message`, `2 messages`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a duration as text, in the largest unit that divides it: `a day`, `90 minutes`."""
    whole = round(seconds)
    size, unit = next((pair for pair in _UNITS if whole and whole % pair[0] == 0), _UNITS[-1])
    number = whole // size
    return f"{'an' if unit == 'hour' else 'a'} {unit}" if number == 1 else count(number, unit)


def join_names(names: Sequence[str]) -> str:
    """Return the first names, and the number of the remaining names."""
    listed = ", ".join(names[:_LISTED])
    more = len(names) - _LISTED
    return f"{listed} and {more:,} more" if more > 0 else listed
