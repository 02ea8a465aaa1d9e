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
from stenolog.agent.turn_events import Answer, EventHandler, TurnOptions
from stenolog.agent.turn_ownership import ForeignTurns, hide_late_message, is_own_turn, late_seq
from stenolog.context.turn_state import turn_state
from stenolog.errors import ContextTooSmall, ModelRefused, NoSuchSession, StenologError, StoreBusy
from stenolog.sessions.session_store import SessionStore
from stenolog.stores.base import SessionView, forked_at

_MAX_CONCURRENT_TURNS: Final = 4
FIRST_DELAY_SECONDS: Final = 10.0
"""Delay in seconds after the first failed resume."""
_MAX_DELAY_SECONDS: Final = 3_600.0
_MAX_REMEMBERED_SESSIONS: Final = 10_000
"""Maximum number of sessions whose failures or last messages are remembered."""
_UNITS: Final = ((86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second"))
_MAX_LOGGED_SESSIONS: Final = 5
_MAX_RECENT_SESSIONS: Final = 500
"""Number of recent sessions to search at start-up for late messages, as defined in `late_seq`."""

_logger = logging.getLogger("stenolog")


class Resumer:
    """Resumes or closes the unfinished turns of sessions."""

    def __init__(self, turns: TurnScheduler) -> None:
        self._turns = turns
        self._backoff = ResumeBackoff()
        self._idle_sessions = IdleSessions()
        self._foreign_turns = ForeignTurns()
        self._too_old_sessions: list[str] = []
        """Sessions whose turn was closed as too old and that no log line has named yet."""
        self._searched_agents: set[str | None] = set()
        """Agents whose recent sessions were searched for late messages."""

    async def resume(
        self, instance: AgentInstance, key: str, *, on_event: EventHandler, idle_for: float = 0.0
    ) -> Answer | None:
        """Resume the unfinished turn of a session, or close the turn if it is too old.

        Returns None if the session has no unfinished turn or is skipped. A session is skipped if
        another process holds its lease, if its last message is younger than `idle_for` seconds, or
        if the delay after a failure has not ended.
        """
        last_seq, age = await self._turns.threads.run(_last_message, instance, key)
        age = max(age, self._idle_sessions.idle_seconds(instance.id, key, last_seq))
        if (idle_for and age < idle_for) or self._backoff.is_blocked(instance.id, key, last_seq):
            return None
        with self._turns.use_session(instance, key) as session:
            async with session.hold_lock():
                try:
                    lease = await self._turns.acquire_lease(session)
                except (StoreBusy, NoSuchSession):
                    return None
                except StenologError as error:
                    self._backoff.record_failure(instance.id, key, last_seq, error, doubles=False)
                    return session.failed_answer(error, text=str(NotLeased(error)))
                try:
                    async with self._turns.hold_lease(session, lease) as sessions:
                        answer, turn = await self._resume_turn(session, sessions, on_event)
                except (StoreBusy, NoSuchSession):
                    return None
                except StenologError as error:
                    self._backoff.record_failure(instance.id, key, last_seq, error)
                    return session.failed_answer(error)
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

        await self._turns.save_unsaved_messages(instance)
        candidates = await self._turns.threads.run(
            _interrupted_sessions, instance, self._foreign_turns
        )
        if instance.id not in self._searched_agents:
            self._searched_agents.add(instance.id)
            candidates += await self._turns.threads.run(_sessions_with_late_message, instance)
        # Skip sessions that this process is working on.
        keys = [
            key for key in dict.fromkeys(candidates) if not self._turns.is_active(instance, key)
        ]
        answers = await asyncio.gather(*map(resume_one, keys))
        closed_sessions, self._too_old_sessions = self._too_old_sessions, []
        if closed_sessions:
            turns = plural(len(closed_sessions), "unanswered turn")
            max_age = duration(instance.spec.resume_within)
            _logger.info("Closed %s older than %s: %s", turns, max_age, join_keys(closed_sessions))
        return [answer for answer in answers if answer is not None]

    async def _resume_turn(
        self, session: ActiveSession, sessions: SessionStore, on_event: EventHandler
    ) -> tuple[Answer | None, Turn | None]:
        key = session.key
        view = await self._turns.threads.run(_view_without_late_message, sessions, key)
        state = turn_state(view.messages)
        is_started_by_agent = is_own_turn(view.messages, after=forked_at(view.info))
        if not state.is_unfinished or not is_started_by_agent:  # guard: resume-own
            return None, None
        if _seconds_since(view.messages[-1].at) <= session.instance.spec.resume_within:
            # Only the channel of the message gets the answer, so the owner's memory may be used.
            options = TurnOptions(sender=None)
            turn = self._turns.new_turn(session, sessions, on_event, options=options, view=view)
            answer = await self._turns.run_turn(session, turn, on_event)
            if answer.outcome == "answered":
                messages_text = plural(len(state.unanswered), "unanswered message")
                _logger.info("Answered %s in %s", messages_text, key)
            return answer, turn
        turn = self._turns.new_turn(session, sessions, on_event, view=view)
        self._too_old_sessions.append(key)
        return await turn.close("too old to be answered"), turn


class ResumeBackoff:
    """Delays before a failed resume is tried again, per session.

    A refused request is not repeated until a new message arrives. If the lease cannot be acquired,
    the delay is always 10 seconds. After other errors, for example if the model is unreachable, the
    delay doubles from 10 seconds up to an hour.
    """

    def __init__(self) -> None:
        self._failures: dict[tuple[str | None, str], tuple[int, int, float]] = {}
        """By agent and session: last seq at the failure, number of failures, end of the delay."""

    def is_blocked(self, agent: str | None, key: str, last_seq: int) -> bool:
        """Return whether a session with this last seq must not be resumed now."""
        failure = self._failures.get((agent, key))
        return failure is not None and failure[0] == last_seq and monotonic() < failure[2]

    def record_failure(
        self, agent: str | None, key: str, seq: int, error: StenologError, *, doubles: bool = True
    ) -> None:
        """Record that resuming failed. `doubles`: the delay doubles with each failure."""
        seq_before, failures, _ = self._failures.pop((agent, key), (seq, 0, 0.0))
        failures = failures + 1 if seq_before == seq and doubles else 1
        delay = min(FIRST_DELAY_SECONDS * 2 ** min(failures - 1, 30), _MAX_DELAY_SECONDS)
        if isinstance(error, ModelRefused | ContextTooSmall):
            delay = float("inf")
        self._failures[agent, key] = (seq, failures, monotonic() + delay)
        while len(self._failures) > _MAX_REMEMBERED_SESSIONS:
            del self._failures[next(iter(self._failures))]


class IdleSessions:
    """A tracker of the time for which each session has had the same last message.

    The time in a message comes from the machine that wrote the message, whose clock may be wrong.
    Therefore this class measures with the clock of this process.
    """

    def __init__(self) -> None:
        self._first_seen: dict[tuple[str | None, str], tuple[int, float]] = {}
        """By agent and session: last seq, and the time at which this process first saw that seq."""

    def idle_seconds(self, agent: str | None, key: str, last_seq: int) -> float:
        """Return how many seconds ago this process first saw `last_seq` as the last seq."""
        now = monotonic()
        earlier_last_seq, first_seen = self._first_seen.pop((agent, key), (last_seq, now))
        if earlier_last_seq != last_seq:
            first_seen = now
        self._first_seen[agent, key] = last_seq, first_seen
        while len(self._first_seen) > _MAX_REMEMBERED_SESSIONS:
            del self._first_seen[next(iter(self._first_seen))]
        return now - first_seen


def _interrupted_sessions(instance: AgentInstance, foreign_turns: ForeignTurns) -> list[str]:
    """Return the sessions whose last turn a stenolog agent may have left unfinished.

    The caller checks the log of each session while it holds the lease. Sessions with an unfinished
    turn of another program are left out, so that they are never leased.
    """
    keys: dict[str, None] = {}
    after: str | None = None
    while True:
        page = instance.catalog.list(state="interrupted", limit=500, after=after)
        for entry in page.entries:
            if entry.problem is None and not foreign_turns.includes(instance, entry):
                keys[entry.key] = None
        after = page.after
        if after is None:
            return list(keys)


def _sessions_with_late_message(instance: AgentInstance) -> list[str]:
    """Return the recent sessions that end with a late message, as defined in `late_seq`.

    The catalog lists sessions with a late message as idle, because their last message is an answer.
    """
    keys = []
    for entry in instance.catalog.list(state="idle", limit=_MAX_RECENT_SESSIONS).entries:
        if entry.problem is None and 0 < entry.visible < entry.count:
            with suppress(StenologError):
                view = instance.store.view(entry.key)
                if late_seq(instance.sessions, view) is not None:
                    keys.append(entry.key)
    return keys


def _view_without_late_message(sessions: SessionStore, key: str) -> SessionView:
    """Hide the late message of a session, if it has one, and return a view of the session."""
    view = sessions.store.view(key)
    return sessions.store.view(key) if hide_late_message(sessions, view) else view


def _last_message(instance: AgentInstance, key: str) -> tuple[int, float]:
    """Return the seq of the last visible message and its age in seconds."""
    last = instance.sessions.get_history(key, last=1)
    return (last[0].seq, _seconds_since(last[0].at)) if last else (0, 0.0)


def _seconds_since(moment: datetime) -> float:
    return (datetime.now(UTC) - moment).total_seconds()


def plural(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 message` or `2 messages`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a duration as a whole number of the largest possible unit, such as `90 minutes`."""
    rounded = round(seconds)
    size, unit = next((pair for pair in _UNITS if rounded and rounded % pair[0] == 0), _UNITS[-1])
    number = rounded // size
    return f"{'an' if unit == 'hour' else 'a'} {unit}" if number == 1 else plural(number, unit)


def join_keys(keys: Sequence[str]) -> str:
    """Return a text with the first keys and the number of the remaining keys."""
    first_keys = ", ".join(keys[:_MAX_LOGGED_SESSIONS])
    more_count = len(keys) - _MAX_LOGGED_SESSIONS
    return f"{first_keys} and {more_count:,} more" if more_count > 0 else first_keys
