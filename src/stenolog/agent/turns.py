"""Turns, one at a time per session: in this process by a lock, between processes by the lease.

A message is stored before anything else happens. Who comes while a turn runs waits, in the log and
here; when it is their turn, they look first whether the one before has answered them, too. What
follows an answer (a compaction, notes) is done behind it; a new turn of the session waits for the
compaction only.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from msgspec import Struct

from stenolog.agent import leasing
from stenolog.agent.blocking import Closing
from stenolog.agent.events import Answer, Compacted, Heard, Noticed, Outcome, Tell, nobody
from stenolog.agent.given_up import GivenUp
from stenolog.agent.in_hand import InHand, new_token
from stenolog.agent.instance import AgentInstance
from stenolog.agent.manner import AS_USUAL, Manner
from stenolog.agent.notetaking import Notetaking
from stenolog.agent.registry import AgentRegistry
from stenolog.agent.threads import Threads
from stenolog.agent.turn import TRIES, Fate, Turn
from stenolog.agent.waiting import settled
from stenolog.context.compaction import Compaction
from stenolog.context.shapes import words_of
from stenolog.context.standing import answer_to, standing
from stenolog.errors import (
    LeaseLost,
    NoSuchSession,
    StenologError,
    StoreBusy,
    StoreClosed,
    StoreUnavailable,
)
from stenolog.records import Message
from stenolog.sessions.merging import SAID, receipts
from stenolog.sessions.session_store import SessionStore
from stenolog.stores.base import Lease

TTL: Final = 20.0
"""For so many seconds a turn is reserved; it is renewed for as long as it runs."""
_OFTEN: Final = 0.1
"""So many seconds are between two looks whether another's turn is over."""
_AT_ONCE: Final = 4
"""So many interrupted turns are gone on with side by side."""
_CUT: Final = 5.0
"""So many seconds what was cut off has to end; then it is left to itself."""
TAKEN_OVER: Final = "another process has taken this turn over"
_MOST_IN_HAND: Final = 32 * 2**20
"""So many bytes of messages may wait for a store that cannot be written; more are not taken in."""
CLOSES: Final = "the agent closes; this is answered at the next start"

_logger = logging.getLogger("stenolog")


class Left(Struct, frozen=True, kw_only=True):
    """What is left for the next start."""

    turns: tuple[str, ...] = ()
    """The sessions whose turn was cut off; their messages are stored, and answered next time."""
    not_saved: int = 0
    """How many messages could not be stored, and are lost with this process."""
    hanging: int = 0
    """How many turns did not even end when they were cut off."""

    def __str__(self) -> str:
        words = []
        if self.turns:
            words.append(f"unfinished, and gone on with at the next start: {', '.join(self.turns)}")
        if self.not_saved:
            words.append(f"{self.not_saved} messages could not be saved and are lost")
        if self.hanging:
            words.append(f"{self.hanging} turns hang, in a tool that does not end")
        return "; ".join(words) or "nothing is left undone"


class Busy(Exception):
    """Somebody has the turn."""


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
        self.waits = False
        """Whether it is waited for another process."""

    @property
    def idle(self) -> bool:
        return not (self.users or self.in_hand.bodies or self.settling or self.task)

    def cancel(self, fate: Fate) -> None:
        """Cut the turn off; why it was first is what counts."""
        if self.turn is not None and self.task is not None:
            if not self.turn.fate:
                self.turn.fate = fate
            self.task.cancel()


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
        self._given_up = GivenUp()
        self._left_off: set[str] = set()
        self._nobody_here = asyncio.Event()
        self._nobody_here.set()
        for instance in registry:
            instance.ask.bind(self.threads.event_loop)
            instance.on_compaction = partial(self._compacted, instance)
            if instance.memory is not None and instance.spec.consolidation:
                self._notetaking[instance.id] = Notetaking(instance, self.threads)

    def check_open(self) -> None:
        """Raise StoreClosed where nothing is taken in any more."""
        if self._closed:
            raise StoreClosed("the agent was closed before this call")

    @property
    def busy(self) -> set[str]:
        """The sessions in which an answer is being made, by this process."""
        return {key for (_, key), seat in self._seats.items() if seat.task is not None}

    async def answer(
        self,
        instance: AgentInstance,
        key: str,
        body: Mapping[str, Any],
        *,
        once: str = "",
        tell: Tell = nobody,
        manner: Manner = AS_USUAL,
    ) -> Answer:
        """Store a message, and run the turn that answers it and what else is unanswered.

        Raises UsageError for a message that can never be stored; what the model's server or the
        store raises is the answer.
        """
        token = once or new_token()
        if sum(seat.in_hand.size for seat in self._seats.values()) > _MOST_IN_HAND:
            raise StoreUnavailable(
                "nothing can be stored now, and too much waits for it already; try again later"
            )
        with self._used(instance, key) as seat:
            seq = await seat.in_hand.say(instance.sessions, body, tell=tell, once=token)
            if seq is not None:
                tell(Heard(seq=seq))
            if once and (found := await self._found(instance, key, seat, seq, token, "again")):
                return found
            async with seat.turn_lock:
                if seat.settling is not None:
                    await asyncio.wait([seat.settling])
                seq = seq or seat.in_hand.seq_of(token)
                if found := await self._found(instance, key, seat, seq, token, "elsewhere"):
                    return found
                return await self._take_turn(instance, key, seat, seq, token, tell, manner)

    async def alone(
        self,
        instance: AgentInstance,
        key: str,
        change: Callable[[SessionStore], Awaitable[Answer | None]],
        *,
        tell: Tell,
        wait: bool = False,
        manner: Manner = AS_USUAL,
    ) -> Answer:
        """Carry a change out while nobody has the turn. Raises Busy where somebody has it.

        Where it gives no answer, what is unanswered then is answered. `wait`: for who has the turn.
        """
        with self._used(instance, key) as seat:
            if seat.turn_lock.locked() and not wait:
                raise Busy
            async with seat.turn_lock:
                if seat.settling is not None:
                    await asyncio.wait([seat.settling])
                lease = await self._alone(instance, key, seat, tell, wait=wait)
                if isinstance(lease, Answer):
                    return lease
                async with self._held(instance, seat, lease) as sessions:
                    seat.tell = tell
                    done = await change(sessions)
                    if done is not None:
                        return done
                    answer = await self._run_turn(instance, key, seat, sessions, None, tell, manner)
                self._settle_later(instance, key, seat, tell)
                return answer

    async def _alone(
        self, instance: AgentInstance, key: str, seat: _Seat, tell: Tell, *, wait: bool
    ) -> Lease | Answer | None:
        """The lease for a change; None where there is nothing to take one of. Raises Busy."""
        if wait:
            lease = await self._waited_for(instance, key, seat, None, tell)
            if lease is None and instance.store is not None:
                # It is new, and made first: of what is not there, two could have the turn.
                with suppress(StenologError):
                    await self.threads.run(instance.store.set_meta, key, **{TRIES: [0, 0]})
                    lease = await self._waited_for(instance, key, seat, None, tell)
            return lease
        try:
            return await self._lease(instance, key)
        except StoreBusy as error:
            raise Busy from error
        except NoSuchSession:
            return None

    async def stop(self, instance: AgentInstance, key: str) -> bool:
        """End the answer that is being made in a session, and store it; False where none is."""
        seat = self._seats.get((instance.id, key))
        if seat is None:
            return False
        task, waited = seat.task, seat.waits
        seat.waits = False
        if task is None:
            return waited
        seat.cancel("")
        await asyncio.wait([task])
        return True

    async def resume(
        self, instance: AgentInstance, key: str, *, tell: Tell, idle_for: float = 0.0
    ) -> Answer | None:
        """Go on with a turn that was cut off, or close it; None where there is none.

        A session in which another process has the turn is left to it, and so is one in which
        something was said within the last `idle_for` seconds.
        """
        last, age = await self.threads.run(_last_said, instance, key)
        if (idle_for and age < idle_for) or self._given_up.holds(instance.id, key, last):
            return None
        with self._used(instance, key) as seat:
            async with seat.turn_lock:
                if seat.settling is not None:
                    await asyncio.wait([seat.settling])
                try:
                    lease = await self._lease(instance, key)
                    async with self._held(instance, seat, lease) as sessions:
                        answer = await self._go_on(instance, key, seat, sessions, tell)
                except (StoreBusy, NoSuchSession):
                    return None
                except StenologError as error:
                    self._given_up.note(instance.id, key, last, error)
                    return _failed(key, seat, error)
                if answer is not None:
                    self._settle_later(instance, key, seat, tell)
                return answer

    async def resume_all(
        self,
        instance: AgentInstance,
        *,
        tell: Tell,
        idle_for: float = 0.0,
        each: Callable[[Answer], Awaitable[None]] | None = None,
    ) -> list[Answer]:
        """The same for all sessions of an agent whose last turn did not come to its end."""
        side_by_side = asyncio.Semaphore(_AT_ONCE)

        async def one(key: str) -> Answer | None:
            async with side_by_side:
                try:
                    answer = await self.resume(instance, key, tell=tell, idle_for=idle_for)
                    if answer is not None and each is not None:
                        await each(answer)
                    return answer  # noqa: TRY300 - what fails in `each` is told as well
                except Exception as error:
                    _logger.exception("the turn in %r could not be gone on with", key)
                    return Answer(key=key, text=repr(error), outcome="failed")

        await self._save_in_hand(instance)
        found_now = await self.threads.run(_interrupted, instance)
        # Where a turn runs here, somebody is at it already.
        keys = [key for key in found_now if (instance.id, key) not in self._seats]
        found = await asyncio.gather(*map(one, keys))
        return [answer for answer in found if answer is not None]

    # --- the end -----------------------------------------------------------------------------

    async def close(self, *, patience: float) -> Left:
        """Let the turns in flight end, for so many seconds; then cut them off.

        What is cut off stays in the log as it is, and is gone on with at the next start. Called
        again meanwhile, it waits no longer than the more impatient of the two.
        """
        self._closed = True
        await self._all_gone(patience)
        for (_, key), seat in self._seats.items():
            if seat.task is not None:
                self._left_off.add(key)
                seat.cancel("left")
        for instance in self._registry:
            instance.ask.close()
        await self._all_gone(_CUT)
        for instance in self._registry:
            await self._save_in_hand(instance)
        for notetaking in self._notetaking.values():
            await notetaking.close()
        return Left(
            turns=tuple(sorted(self._left_off)),
            not_saved=sum(len(seat.in_hand.bodies) for seat in self._seats.values()),
            hanging=len(self.busy),
        )

    async def _save_in_hand(self, instance: AgentInstance) -> None:
        """Store what could not be stored when it was said, where that is possible now."""
        for (id, key), seat in list(self._seats.items()):
            if id != instance.id or not seat.in_hand.bodies or seat.turn_lock.locked():
                continue
            async with seat.turn_lock:
                with suppress(StenologError):
                    try:
                        lease = await self._lease(instance, key)
                    except NoSuchSession:
                        lease = None
                    async with self._held(instance, seat, lease) as sessions:
                        await seat.in_hand.flush(sessions, tell=seat.tell)
            self._tidy(instance, key, seat)

    async def _all_gone(self, patience: float) -> None:
        """Wait until no turn runs, nothing is done behind one and nobody waits for one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(patience, 0)):
                while tasks := self._tasks():
                    await asyncio.wait(tasks)
                await self._nobody_here.wait()

    async def quiet(self) -> None:
        """Wait until nothing is going on behind the answers, either: for tests and scripts."""
        while tasks := self._tasks():
            await asyncio.wait(tasks)
        for notetaking in self._notetaking.values():
            await notetaking.idle()

    # --- one turn ----------------------------------------------------------------------------

    async def _take_turn(
        self,
        instance: AgentInstance,
        key: str,
        seat: _Seat,
        seq: int | None,
        token: str,
        tell: Tell,
        manner: Manner,
    ) -> Answer:
        try:
            lease = await self._waited_for(instance, key, seat, seq, tell)
            if isinstance(lease, Answer):
                return lease
            async with self._held(instance, seat, lease) as sessions:
                # Whoever had the turn until now may have answered this, too.
                await seat.in_hand.flush(sessions, tell=tell)
                seq = seq or seat.in_hand.seq_of(token)
                if found := await self._found(instance, key, seat, seq, token, "elsewhere"):
                    return found
                answer = await self._run_turn(instance, key, seat, sessions, seq, tell, manner)
        except StenologError as error:
            return _failed(key, seat, await self._cause(instance, key, error))
        self._settle_later(instance, key, seat, tell)
        return answer

    async def _cause(
        self, instance: AgentInstance, key: str, error: StenologError
    ) -> StenologError:
        """What is to be told: a turn is also lost where its session is gone for good."""
        if isinstance(error, LeaseLost) and instance.store is not None:
            try:
                await self.threads.run(instance.store.info, key)
            except NoSuchSession as gone:
                return gone
            except StenologError:
                pass
        return error

    async def _run_turn(
        self,
        instance: AgentInstance,
        key: str,
        seat: _Seat,
        sessions: SessionStore,
        seq: int | None,
        tell: Tell,
        manner: Manner = AS_USUAL,
    ) -> Answer:
        """Run it as a task of its own, which `stop` can cancel, and so can who waits here."""
        if self._closed:
            raise StoreClosed(CLOSES)
        turn = self._turn(instance, key, seat, sessions, seq, tell, manner)
        notetaking = self._notetaking.get(instance.id)
        if notetaking is not None:
            notetaking.hold()
        seat.turn, seat.tell = turn, tell
        seat.task = task = asyncio.create_task(turn.run())
        try:
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                seat.cancel("")
                await settled(task)
                raise
        finally:
            seat.turn = seat.task = None
            if notetaking is not None:
                notetaking.let_go()
        if task.cancelled() and turn.fate == "left":
            raise StoreClosed(CLOSES)
        try:
            # Stopped before it began, it has not said so itself.
            return await turn.close("stopped") if task.cancelled() else task.result()
        except Closing:
            raise StoreClosed(CLOSES) from None

    def _turn(
        self,
        instance: AgentInstance,
        key: str,
        seat: _Seat,
        sessions: SessionStore,
        seq: int | None,
        tell: Tell,
        manner: Manner = AS_USUAL,
    ) -> Turn:
        return Turn(
            instance,
            key,
            sessions,
            seat.in_hand,
            threads=self.threads,
            tell=tell,
            asked_for=seq,
            manner=manner,
        )

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
        if _seconds_since(history[-1].at) <= instance.spec.resume_within:
            return await self._run_turn(instance, key, seat, sessions, None, tell)
        turn = self._turn(instance, key, seat, sessions, None, tell)
        return await turn.close("too old to be answered")

    async def _waited_for(
        self, instance: AgentInstance, key: str, seat: _Seat, seq: int | None, tell: Tell
    ) -> Lease | Answer | None:
        """The lease; None where there is nothing to take one of; or how it was answered instead."""
        seat.waits, told = True, False
        try:
            while not self._closed:
                try:
                    return await self._lease(instance, key)
                except StoreBusy as error:
                    if seq is not None and (found := await self._answered(instance, key, seq)):
                        return _told(key, found, "elsewhere")
                    if not told:
                        tell(Noticed(words=f"waiting for the turn in this session: {error}"))
                        told = True
                except NoSuchSession:
                    if seq is not None:
                        raise  # it was purged, and what was said with it
                    return None  # nothing of it could be stored yet
                except StoreClosed:
                    raise
                except StenologError as error:
                    tell(Noticed(words=f"this turn is not reserved for this process: {error}"))
                    return None
                await asyncio.sleep(_OFTEN)
                if not seat.waits:
                    words = "Not waited for any longer; the message is kept."
                    return Answer(key=key, text=words, outcome="interrupted")
        finally:
            seat.waits = False
        raise StoreClosed(CLOSES)

    async def _lease(self, instance: AgentInstance, key: str) -> Lease | None:
        store = instance.store
        return (
            None if store is None else await leasing.take(self.threads, store, key, ttl=self._ttl)
        )

    @asynccontextmanager
    async def _held(
        self, instance: AgentInstance, seat: _Seat, lease: Lease | None
    ) -> AsyncIterator[SessionStore]:
        """The sessions, to be written by who has the turn."""
        if lease is None:
            yield instance.sessions
            return
        lost = partial(seat.cancel, "lost")
        async with leasing.held(self.threads, lease, ttl=self._ttl, lost=lost) as sessions:
            yield sessions

    async def _found(
        self,
        instance: AgentInstance,
        key: str,
        seat: _Seat,
        seq: int | None,
        token: str,
        outcome: Outcome,
    ) -> Answer | None:
        """How a message was answered already, in the log or in hand; None where it was not."""
        if seq is not None:
            found = await self._answered(instance, key, seq)
            return None if found is None else _told(key, found, outcome)
        text = seat.in_hand.answer_to(token)
        return None if text is None else Answer(key=key, text=text, outcome=outcome, saved=False)

    async def _answered(self, instance: AgentInstance, key: str, seq: int) -> Message | None:
        """The answer to the message at this seq; of one that somebody hid, the message itself."""
        read = partial(self.threads.run, instance.sessions.get_history, key, after=seq - 1)
        shown: list[Message] = await read()
        if shown and shown[0].seq == seq:
            return answer_to(shown, seq)
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
            if await self.threads.ask(instance.context(model).settle, key) is not None:
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
            return [key for key in keys if not _is_as_taken_in(instance, key)]


def _is_as_taken_in(instance: AgentInstance, key: str) -> bool:
    """Whether it came from another program, and nobody has gone on with it here.

    Whoever asked there does not wait for an answer from us.
    """
    if instance.store is None:
        return False
    try:
        info = instance.store.info(key)
    except StenologError:
        return False
    # What our own stand-in kept for us was asked of us.
    others = [one for one in receipts(info.meta) if SAID not in one]
    return any(one.get("last_seq") == info.last_seq for one in others)


def _last_said(instance: AgentInstance, key: str) -> tuple[int, float]:
    """The last seq in sight, and for how many seconds nothing was said after it."""
    last = instance.sessions.get_history(key, last=1)
    return (last[0].seq, _seconds_since(last[0].at)) if last else (0, 0.0)


def _seconds_since(moment: datetime) -> float:
    return (datetime.now(UTC) - moment).total_seconds()


def _failed(key: str, seat: _Seat, error: StenologError) -> Answer:
    words = TAKEN_OVER if isinstance(error, LeaseLost) else ""
    return Answer(
        key=key,
        text=words or str(error),
        outcome="failed",
        saved=not seat.in_hand.bodies,
        error=error,
    )


def _told(key: str, message: Message, outcome: Outcome) -> Answer:
    body = message.to_dict()
    said = words_of(body) if body.get("role") == "assistant" else ""
    return Answer(key=key, text=said, outcome=outcome, seq=message.seq)
