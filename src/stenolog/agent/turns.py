"""Turns, one at a time per session: in this process by a lock, between processes by the lease.

A message is stored before anything else happens. Who comes while a turn runs waits, in the log and
here; when it is their turn, they look first whether the one before has answered them, too. What
follows an answer (a compaction, notes) is done behind it; a new turn of the session waits for the
compaction only.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from msgspec import Struct

from stenolog.agent import leasing
from stenolog.agent.blocking import Closing
from stenolog.agent.events import Answer, Compacted, Noticed, Outcome, Tell, nobody
from stenolog.agent.in_hand import InHand
from stenolog.agent.instance import AgentInstance
from stenolog.agent.notetaking import Notetaking
from stenolog.agent.registry import AgentRegistry
from stenolog.context.standing import answer_to, standing
from stenolog.agent.threads import Threads
from stenolog.agent.turn import Turn
from stenolog.context.compaction import Compaction
from stenolog.context.shapes import words_of
from stenolog.errors import LeaseLost, NoSuchSession, StenologError, StoreBusy, StoreClosed
from stenolog.records import Message
from stenolog.sessions.session_store import SessionStore
from stenolog.stores.base import Lease

TTL: Final = 60.0
"""For so many seconds a turn is reserved; it is renewed for as long as it runs."""
_WAIT: Final = 0.5
"""After so many seconds of waiting for another's turn it is looked whether that has answered."""
_AT_ONCE: Final = 4
"""So many interrupted turns are gone on with side by side."""

_logger = logging.getLogger("stenolog")


class Left(Struct, frozen=True, kw_only=True):
    """What is left for the next start."""

    turns: tuple[str, ...] = ()
    """The sessions whose turn was cut off; their messages are stored, and answered next time."""
    not_saved: int = 0
    """How many messages could not be stored, and are lost with this process."""

    def __str__(self) -> str:
        words = []
        if self.turns:
            words.append(f"unfinished, and gone on with at the next start: {', '.join(self.turns)}")
        if self.not_saved:
            words.append(f"{self.not_saved} messages could not be saved and are lost")
        return "; ".join(words) or "nothing is left undone"


class _Seat:
    """What this process knows of one session."""

    def __init__(self, in_hand: InHand) -> None:
        self.turn_lock = asyncio.Lock()
        self.in_hand = in_hand
        self.turn: Turn | None = None
        self.task: asyncio.Task[Answer] | None = None
        self.settling: asyncio.Task[None] | None = None
        self.tell: Tell = nobody
        self.users = 0

    @property
    def idle(self) -> bool:
        return not (self.users or self.in_hand.bodies or self.settling or self.task)


class Turns:
    """The turns of all sessions of the agents of a registry."""

    def __init__(self, registry: AgentRegistry, *, ttl: float = TTL) -> None:
        """Made where an event loop runs. `ttl`: a killed holder is waited for so long, at most."""
        self.threads = Threads()
        self._registry = registry
        self._ttl = ttl
        self._seats: dict[tuple[str | None, str], _Seat] = {}
        self._notetaking: dict[str | None, Notetaking] = {}
        self._closed = False
        self._left: Left | None = None
        self._nobody_here = asyncio.Event()
        self._nobody_here.set()
        for instance in registry:
            instance.ask.bind(self.threads.event_loop)
            instance.on_compaction = partial(self._compacted, instance)
            if instance.memory is not None and instance.spec.consolidation:
                self._notetaking[instance.id] = Notetaking(instance.memory, self.threads.run)

    @property
    def busy(self) -> set[str]:
        """The sessions in which an answer is being made, by this process."""
        return {key for (_, key), seat in self._seats.items() if seat.task is not None}

    def check_open(self) -> None:
        """Raise StoreClosed where nothing is taken in any more."""
        if self._closed:
            raise StoreClosed("the agent was closed before this call")

    async def answer(
        self,
        instance: AgentInstance,
        key: str,
        body: Mapping[str, Any] | None,
        *,
        once: str = "",
        tell: Tell = nobody,
    ) -> Answer:
        """Store a message, where there is one, and run the turn that answers what is unanswered.

        Raises UsageError for a message that can never be stored; what the model's server or the
        store raises is the answer.
        """
        with self._used(instance, key) as seat:
            seq = None
            if body is not None:
                seq = await seat.in_hand.keep(instance.sessions, body, tell=tell, once=once)
                if seq is not None and once:
                    found = await self._answered(instance, key, seq)
                    if found is not None:
                        return _told(key, found, "again")
            async with seat.turn_lock:
                if seat.settling is not None:
                    await asyncio.wait([seat.settling])
                if seq is not None and (found := await self._answered(instance, key, seq)):
                    return _told(key, found, "elsewhere")
                answer = await self._take_turn(instance, key, seat, seq, tell)
                if answer.outcome in ("answered", "interrupted"):
                    self._settle_later(instance, key, seat, tell)
                return answer

    async def stop(self, instance: AgentInstance, key: str) -> bool:
        """End the answer that is being made in a session, and store it; False where none is."""
        seat = self._seats.get((instance.id, key))
        if seat is None or seat.task is None:
            return False
        task = seat.task
        task.cancel()
        await asyncio.wait([task])
        return True

    async def resume(self, instance: AgentInstance, key: str, *, tell: Tell) -> Answer | None:
        """Go on with a turn that was cut off, or close it; None where there is none.

        A session in which another process has the turn is left to it.
        """
        with self._used(instance, key) as seat:
            async with seat.turn_lock:
                try:
                    taken = await self._lease(instance, key, wait=0.0)
                    if taken is None:
                        answer = await self._go_on(instance, key, seat, instance.sessions, tell)
                    else:
                        async with leasing.held(self.threads, taken, ttl=self._ttl) as sessions:
                            answer = await self._go_on(instance, key, seat, sessions, tell)
                except (StoreBusy, NoSuchSession):
                    return None
                except StenologError as error:
                    return _failed(key, seat, error)
                if answer is not None:
                    self._settle_later(instance, key, seat, tell)
                return answer

    async def resume_all(self, instance: AgentInstance, *, tell: Tell) -> list[Answer]:
        """The same for all sessions of an agent whose last turn did not come to its end."""
        side_by_side = asyncio.Semaphore(_AT_ONCE)

        async def one(key: str) -> Answer | None:
            async with side_by_side:
                return await self.resume(instance, key, tell=tell)

        keys = await self.threads.run(_interrupted, instance)
        found = await asyncio.gather(*map(one, keys))
        return [answer for answer in found if answer is not None]

    async def close(self, *, patience: float) -> Left:
        """Let the turns in flight end, for so many seconds; then cut them off.

        What is cut off stays in the log as it is, and is gone on with at the next start.
        """
        if self._left is not None:
            return self._left
        self._closed = True
        if tasks := self._tasks():
            await asyncio.wait(tasks, timeout=max(patience, 0))
        cut = []
        for (_, key), seat in self._seats.items():
            if seat.task is not None and seat.turn is not None:
                cut.append(key)
                seat.turn.abandoned = True
                seat.task.cancel()
        for instance in self._registry:
            instance.ask.close()
        for notetaking in self._notetaking.values():
            await notetaking.close()
        while tasks := self._tasks():
            await asyncio.wait(tasks)
        # Who waited for a turn finds that there are none any more, and goes.
        await self._nobody_here.wait()
        self._left = Left(
            turns=tuple(sorted(cut)),
            not_saved=sum(len(seat.in_hand.bodies) for seat in self._seats.values()),
        )
        return self._left

    async def quiet(self) -> None:
        """Wait until nothing is going on behind the answers, either: for tests and scripts."""
        while tasks := self._tasks():
            await asyncio.wait(tasks)
        for notetaking in self._notetaking.values():
            await notetaking.idle()

    # --- one turn ----------------------------------------------------------------------------

    async def _take_turn(
        self, instance: AgentInstance, key: str, seat: _Seat, seq: int | None, tell: Tell
    ) -> Answer:
        try:
            taken = await self._waited_for(instance, key, seq, tell)
            if isinstance(taken, Message):
                return _told(key, taken, "elsewhere")
            if taken is None:
                return await self._run_turn(instance, key, seat, instance.sessions, tell)
            async with leasing.held(self.threads, taken, ttl=self._ttl) as sessions:
                return await self._run_turn(instance, key, seat, sessions, tell)
        except LeaseLost:
            words = "another process has taken this turn over"
            return Answer(key=key, text=words, outcome="elsewhere")
        except StenologError as error:
            return _failed(key, seat, error)

    async def _run_turn(
        self,
        instance: AgentInstance,
        key: str,
        seat: _Seat,
        sessions: SessionStore,
        tell: Tell,
    ) -> Answer:
        """Run it as a task of its own, which `stop` can cancel, and so can who waits here."""
        if self._closed:
            raise StoreClosed("the agent closes; this is answered at the next start")
        turn = Turn(instance, key, sessions, seat.in_hand, run=self.threads.run, tell=tell)
        notetaking = self._notetaking.get(instance.id)
        if notetaking is not None:
            notetaking.hold()
        seat.turn, seat.tell = turn, tell
        seat.task = task = asyncio.create_task(turn.run())
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])
            raise
        finally:
            seat.turn = seat.task = None
            if notetaking is not None:
                notetaking.let_go()
        if turn.abandoned and (task.cancelled() or task.exception() is not None):
            raise StoreClosed("the agent closes; this is answered at the next start")
        # Stopped before it began, it has not said so itself.
        return await turn.close("stopped") if task.cancelled() else task.result()

    async def _go_on(
        self,
        instance: AgentInstance,
        key: str,
        seat: _Seat,
        sessions: SessionStore,
        tell: Tell,
    ) -> Answer | None:
        history = await self.threads.run(sessions.get_history, key)
        if not standing(history).unfinished:
            return None
        age = (datetime.now(UTC) - history[-1].at).total_seconds()
        if age <= instance.spec.resume_within:
            return await self._run_turn(instance, key, seat, sessions, tell)
        turn = Turn(instance, key, sessions, seat.in_hand, run=self.threads.run, tell=tell)
        return await turn.close("too old to be answered")

    async def _waited_for(
        self, instance: AgentInstance, key: str, seq: int | None, tell: Tell
    ) -> Lease | Message | None:
        """The lease; the answer, where another process gave it meanwhile; None without a store."""
        told = False
        while not self._closed:
            try:
                return await self._lease(instance, key, wait=_WAIT)
            except StoreBusy:
                if seq is not None and (found := await self._answered(instance, key, seq)):
                    return found
                if not told:
                    tell(Noticed(words="another process answers in this session; waiting for it"))
                    told = True
            except NoSuchSession:
                return None  # nothing of it could be stored yet
            except StoreClosed:
                raise
            except StenologError as error:
                tell(Noticed(words=f"this turn is not reserved for this process: {error}"))
                return None
        raise StoreClosed("the agent closes; this is answered at the next start")

    async def _lease(self, instance: AgentInstance, key: str, *, wait: float) -> Lease | None:
        store = instance.store
        if store is None:
            return None
        return await leasing.take(self.threads, store, key, ttl=self._ttl, wait=wait)

    async def _answered(self, instance: AgentInstance, key: str, seq: int) -> Message | None:
        """The answer to the message at this seq; for one that is out of sight, what followed it."""
        read = partial(self.threads.run, instance.sessions.get_history, key, after=seq - 1)
        shown: list[Message] = await read()
        if shown and shown[0].seq == seq:
            return answer_to(shown, seq)
        # Its own answer went out of sight with it; the next in sight is somebody else's.
        everything: list[Message] = await read(full=True)
        return answer_to(everything, seq) or next(iter(everything), None)

    # --- behind the answer -------------------------------------------------------------------

    def _settle_later(self, instance: AgentInstance, key: str, seat: _Seat, tell: Tell) -> None:
        seat.settling = asyncio.create_task(self._settle(instance, key, seat, tell))

    async def _settle(self, instance: AgentInstance, key: str, seat: _Seat, tell: Tell) -> None:
        """Compact where that is due, and have notes made."""
        try:
            seat.tell = tell
            model = await self.threads.run(instance.model_of, key)
            if await self.threads.run(instance.context(model).settle, key) is not None:
                await self.threads.run(instance.sessions.save, key)
            if instance.id in self._notetaking and not self._closed:
                self._notetaking[instance.id].add(key)
        except Closing:
            return
        except StenologError as error:
            tell(Noticed(words=f"the conversation could not be compacted: {error}"))
        except Exception:
            _logger.exception("what follows an answer in %r failed", key)
        finally:
            seat.settling = None
            self._tidy(instance, key, seat)

    def _compacted(self, instance: AgentInstance, done: Compaction) -> None:
        """Hand a compaction on from the thread that made it."""
        self.threads.event_loop.call_soon_threadsafe(self._tell_of, instance, done)

    def _tell_of(self, instance: AgentInstance, done: Compaction) -> None:
        seat = self._seats.get((instance.id, done.key))
        if seat is not None:
            seat.tell(Compacted(compaction=done))

    def _tasks(self) -> list[asyncio.Task[Any]]:
        found = [task for seat in self._seats.values() for task in (seat.task, seat.settling)]
        return [task for task in found if task is not None]

    # --- seats -------------------------------------------------------------------------------

    @contextmanager
    def _used(self, instance: AgentInstance, key: str) -> Iterator[_Seat]:
        self.check_open()
        place = (instance.id, key)
        if place not in self._seats:
            self._seats[place] = _Seat(InHand(key, self.threads.run))
        seat = self._seats[place]
        seat.users += 1
        self._nobody_here.clear()
        try:
            yield seat
        finally:
            seat.users -= 1
            self._tidy(instance, key, seat)
            if not any(one.users for one in self._seats.values()):
                self._nobody_here.set()

    def _tidy(self, instance: AgentInstance, key: str, seat: _Seat) -> None:
        """Forget a session in which nothing is going on."""
        if seat.idle and self._seats.get((instance.id, key)) is seat:
            del self._seats[instance.id, key]


def _interrupted(instance: AgentInstance) -> list[str]:
    """The sessions whose last turn may not have come to its end: the log will decide."""
    if instance.catalog is None:
        return instance.sessions.list_sessions()
    keys: dict[str, None] = {}
    after: str | None = None
    while True:
        page = instance.catalog.list(state="interrupted", limit=500, after=after)
        keys.update({entry.key: None for entry in page.entries if entry.problem is None})
        after = page.after
        if after is None:
            return list(keys)


def _failed(key: str, seat: _Seat, error: StenologError) -> Answer:
    return Answer(key=key, text=str(error), outcome="failed", saved=not seat.in_hand.bodies)


def _told(key: str, message: Message, outcome: Outcome) -> Answer:
    body = message.to_dict()
    said = words_of(body) if body.get("role") == "assistant" else ""
    return Answer(key=key, text=said, outcome=outcome, seq=message.seq)
