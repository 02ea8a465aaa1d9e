"""Answers on their way to an app: at most once.

The log has every answer once. Towards an app nobody can have both: what was handed over just before
a crash may have arrived or not. So a mark in the session's meta says `sending` before the first
piece, and `sent` after the last one; who finds `sending` alone tells the reader, and sends nothing
again. An answer without a mark was never begun to be sent, and is delivered at the next start.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, cast, get_args

from msgspec import Struct
from msgspec.structs import replace

from stenolog.agent.events import Answer
from stenolog.agent.instance import AgentInstance
from stenolog.agent.loop import AgentLoop
from stenolog.agent.own_turns import forked_at_in
from stenolog.agent.waiting import ended
from stenolog.catalog.answers import is_received, origin_of
from stenolog.catalog.entries import Entry
from stenolog.channels.base import Channel, MaybeSent, NotSent, Place, Undeliverable
from stenolog.channels.claims import Claims, conversation
from stenolog.channels.splitting import split
from stenolog.context.shapes import words_of
from stenolog.context.standing import answer_to
from stenolog.errors import NoSuchSession, StenologError, StoreBusy, StoreUnavailable
from stenolog.records import Message

# --- marks ----------------------------------------------------------------------------------------
# How far the answers of a session were delivered, as its meta says; and which are due.
#
# `sending` stands there before the first piece of an answer is sent, `sent` after the last one.
# So who finds `sending` alone knows that nobody knows. Answers that surely were not sent are
# owed, also when later ones are sent.


FIELD: Final = "delivery"
"""The field of a session's meta."""

State = Literal["sending", "sent", "unsure", "refused", "owed"]
"""unsure: it may have arrived, and its reader was told so. refused: the app did not take it. owed:
surely it was not sent."""
MOST_OWED: Final = 20
"""So many are sent after all; of a chat that is out of reach for longer, the newest."""


class Mark(Struct, frozen=True, kw_only=True):
    """How far the answers of a session were sent, and what became of the one that was last."""

    seq: int
    """The newest answer that was sent, or begun to be."""
    state: State
    """Of the one that was begun last: an older one, where that was owed."""
    origin: Place
    owed: tuple[int, ...] = ()
    """Those up to `seq` that are still to be sent, in order."""

    def fields(self) -> dict[str, Any]:
        """As it stands in the meta."""
        told = {"seq": self.seq, "mark": self.state, "origin": dict(self.origin)}
        return {**told, "owed": list(self.owed)} if self.owed else told


class Due(Struct, frozen=True, kw_only=True):
    """An answer that is to be delivered."""

    seq: int
    text: str
    origin: Place


def mark_in(meta: Mapping[str, Any]) -> Mark | None:
    """The mark in a session's meta; None where there is none."""
    told = meta.get(FIELD)
    if not isinstance(told, Mapping):
        return None
    seq, state, origin = told.get("seq"), told.get("mark"), told.get("origin")
    if not isinstance(seq, int) or state not in get_args(State) or not isinstance(origin, Mapping):
        return None
    owed = told.get("owed", ())
    found = [one for one in owed if isinstance(one, int)] if isinstance(owed, list | tuple) else []
    return Mark(seq=seq, state=cast(State, state), origin=origin, owed=tuple(sorted(found)))


def is_due(mark: Mark | None, seq: int) -> bool:
    """Whether the answer at this seq was neither sent nor begun to be."""
    return mark is None or seq > mark.seq or seq in mark.owed


def begun(mark: Mark | None, answer: Due) -> Mark:
    """The mark that stands there while an answer is being sent."""
    if mark is None:
        return Mark(seq=answer.seq, state="sending", origin=answer.origin)
    return Mark(
        seq=max(mark.seq, answer.seq),
        state="sending",
        origin=answer.origin,
        owed=tuple(seq for seq in mark.owed if seq != answer.seq),
    )


def owing(mark: Mark, seq: int) -> Mark:
    """The mark once it is sure that this answer was not sent."""
    owed = sorted({*mark.owed, seq})[-MOST_OWED:]
    return replace(mark, state="owed", owed=tuple(owed))


def due(
    history: Sequence[Message],
    *,
    mark: Mark | None,
    channel: str,
    since: datetime,
    after: int = 0,
    allows: Callable[[Place], bool] = lambda _: False,
) -> list[Due]:
    """Return the answers to send to a channel, by seq, so that owed ones come first.

    Only answers to messages at a seq above `after` that were said at or after `since`. The origin
    of a message counts if an agent received the message, which writes both in one append. Versions
    before that mark wrote the origin alone: those are sent if `allows` agrees.
    """
    found: dict[int, Due] = {}
    for index, message in enumerate(history):
        body = message.to_dict()
        origin = origin_of(body)
        if origin is None or origin.get("channel") != channel or message.at < since:
            continue
        if message.seq <= after:
            continue  # a copy: the source of the fork sends it
        if not is_received(body) and not allows(origin):  # guard: deliver-own-origin
            continue
        answer = answer_to(history[index:], message.seq)
        if answer is not None and is_due(mark, answer.seq):
            text = words_of(answer.to_dict())
            found[answer.seq] = Due(seq=answer.seq, text=text, origin=origin)
    return [found[seq] for seq in sorted(found)]


# --- delivery -------------------------------------------------------------------------------------


UNSURE: Final = (
    "An answer may not have reached you: I was interrupted while I sent it. "
    "/retry has your last message answered again."
)
_FRESH: Final = timedelta(days=1)
"""What was said longer ago is not answered out of the blue."""
_LONGEST: Final = 120.0
"""For so many seconds it is tried again to hand a message over, besides what the app asks for."""
_TRIES: Final = 5
_PAGE: Final = 200
_REMEMBERED: Final = 10_000

_logger = logging.getLogger("stenolog")


class Delivery:
    """Delivers the answers of one channel."""

    def __init__(
        self,
        loop: AgentLoop,
        channel: Channel,
        claims: Claims,
        *,
        pause: float = 1.0,
        allows: Callable[[Place], bool] = lambda _: False,
    ) -> None:
        """`pause`: seconds before what was surely not sent is sent again; longer each time.

        `allows`: whether the allow list of the channel has this origin.
        """
        self._allows = allows
        self.channel = channel
        self._loop = loop
        self._claims = claims
        self._pause = pause
        self._stopping = asyncio.Event()
        self._cut = False
        self._running: set[asyncio.Task[Any]] = set()
        """The answers that are being sent."""

    async def deliver(
        self, instance: AgentInstance, answer: Answer, text: str, origin: Place
    ) -> None:
        """Send an answer in these words, unless that was done or begun before. Raises nothing.

        One that is not in the log has no mark, and is just sent.
        """
        if not text.strip():
            return
        if answer.seq is None:
            await self.tell(origin, text)
            return
        one = Due(seq=answer.seq, text=text, origin=origin)
        if await self._safely(instance, answer.key, one):
            # The app takes messages: also those that it did not take before.
            try:
                await self.catch_up(instance, answer.key, only_owed=True)
            except StenologError as error:
                _logger.warning("what is owed in %r waits: %s", answer.key, error)

    async def cut(self) -> None:
        """End the sending, while the marks can still be written; the next start goes on."""
        self._cut = True
        self._stopping.set()
        if await ended(self._running):
            raise asyncio.CancelledError

    async def tell(self, origin: Place, text: str) -> None:
        """Say something that is no answer of the log. Raises nothing."""
        try:
            await self._send(origin, text, [])
        except (NotSent, MaybeSent, Undeliverable) as error:
            _logger.warning("%s: %s", self.channel.name, error)

    # --- after a restart ---------------------------------------------------------------------

    async def recover(self) -> None:
        """Look through the sessions for what a killed process left. Raises nothing.

        Answers that were never begun to be sent are sent; of those of which nobody knows, the
        reader is told, once. Where somebody else sends, it is looked again until that has ended:
        it may be a killed process whose claim has not run out.
        """
        left: list[tuple[AgentInstance, str, bool]] = []
        since = datetime.now(UTC) - _FRESH
        for instance in self._loop.registry:
            async for entry in self._entries(instance):
                fresh = entry.updated is not None and entry.updated >= since
                if self._stopping.is_set():
                    return
                if entry.problem is not None or not (fresh or entry.channel == self.channel.name):
                    continue
                if not await self._looked_after(instance, entry.key, fresh):
                    left.append((instance, entry.key, fresh))
        while left and not await self._is_stopping_within(self._claims.ttl):
            left = [one for one in left if not await self._looked_after(*one)]

    async def _looked_after(self, instance: AgentInstance, key: str, fresh: bool) -> bool:
        """Look for what was left in a session; False where somebody else sends there."""
        if self._stopping.is_set():
            return True
        try:
            await self._tell_if_unsure(instance, key)
            if fresh:
                await self.catch_up(instance, key)
        except StoreBusy:
            return False
        except StenologError as error:
            _logger.warning("%s could not be looked after: %s", key, error)
        return True

    async def _is_stopping_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def stop_recovering(self) -> None:
        """Look after no further sessions; the next start does."""
        self._stopping.set()

    async def catch_up(self, instance: AgentInstance, key: str, *, only_owed: bool = False) -> None:
        """Deliver the answers of a session that were never begun to be sent, or are owed."""
        mark = await self._mark(instance, key)
        if only_owed and (mark is None or not mark.owed):
            return
        history = await self._loop.run(instance.sessions.get_history, key)
        since = datetime.now(UTC) - _FRESH
        waiting = due(
            history,
            mark=mark,
            channel=self.channel.name,
            since=since,
            after=await self._loop.run(forked_at_in, instance.sessions, key),
            allows=self._allows,
        )
        for one in waiting:
            if only_owed and mark is not None and one.seq not in mark.owed:
                continue  # whoever made it is about to send it
            if one.text.strip():
                await self._safely(instance, key, one)

    async def _entries(self, instance: AgentInstance) -> AsyncIterator[Entry]:
        after: str | None = None
        while True:
            try:
                page = await self._loop.run(instance.catalog.list, limit=_PAGE, after=after)
            except StenologError as error:
                _logger.warning("answers that were not sent could not be looked for: %s", error)
                return
            for entry in page.entries:
                yield entry
            after = page.after
            if after is None:
                return

    async def _tell_if_unsure(self, instance: AgentInstance, key: str) -> None:
        if not self._is_sending(await self._mark(instance, key)):
            return
        async with self._claims.held(conversation(instance.id, key), wait=False):
            mark = await self._mark(instance, key)
            if mark is not None and self._is_sending(mark):
                _logger.warning(
                    "nobody knows whether the answer at %s of %r arrived", mark.seq, key
                )
                await self._tell_unsure(instance, key, mark)

    def _is_sending(self, mark: Mark | None) -> bool:
        own = mark is not None and mark.origin.get("channel") == self.channel.name
        return own and mark is not None and mark.state == "sending"

    async def _tell_unsure(self, instance: AgentInstance, key: str, mark: Mark) -> None:
        # The mark first: it is told at most once, too.
        await self._set_mark(instance, key, replace(mark, state="unsure"))
        await self.tell(mark.origin, UNSURE)

    # --- one answer --------------------------------------------------------------------------

    async def _safely(self, instance: AgentInstance, key: str, answer: Due) -> bool:
        """Deliver an answer, and tell whether it was sent just now. Raises nothing."""
        for attempt in range(1, _TRIES + 1):
            if self._cut:
                return False
            running = asyncio.create_task(self._deliver(instance, key, answer))
            self._running.add(running)
            running.add_done_callback(self._running.discard)
            try:
                return await running
            except StoreUnavailable as error:
                # Without a mark it must not be sent.
                _logger.warning("the answer at %s of %r waits: %s", answer.seq, key, error)
                await asyncio.sleep(self._pause * attempt)
            except StenologError as error:
                _logger.warning("the answer at %s of %r was not sent: %s", answer.seq, key, error)
                return False
        _logger.error("the answer at %s of %r is left to the next start", answer.seq, key)
        return False

    async def _deliver(self, instance: AgentInstance, key: str, answer: Due) -> bool:
        async with self._claims.held(conversation(instance.id, key)):
            before = await self._mark(instance, key)
            if not is_due(before, answer.seq):
                return False
            if before is not None and self._is_sending(before):
                # Who has sent it is gone, and this mark would be the last to tell of it.
                await self._tell_unsure(instance, key, before)
            mark = begun(before, answer)
            handed_over: list[str] = []
            try:
                await self._set_mark(instance, key, mark)
                await self._send(answer.origin, answer.text, handed_over)
            except Undeliverable as error:
                _logger.warning("the answer at %s of %r was refused: %s", answer.seq, key, error)
                await self._set_mark(instance, key, replace(mark, state="refused"))
            except (NotSent, MaybeSent) as error:
                _logger.warning("the answer at %s of %r: %s", answer.seq, key, error)
                if handed_over:
                    await self._tell_unsure(instance, key, mark)
                else:
                    await self._set_mark(instance, key, owing(mark, answer.seq))
            except asyncio.CancelledError:
                if not handed_over:
                    await self._owe(instance, key, owing(mark, answer.seq))
                raise
            else:
                await self._set_mark(instance, key, replace(mark, state="sent"))
                return True
        return False

    async def _owe(self, instance: AgentInstance, key: str, mark: Mark) -> None:
        """Note at the end that an answer was not sent. Raises nothing but CancelledError."""
        try:
            await self._set_mark(instance, key, mark)
        except Exception:
            _logger.exception("that nothing was sent in %r could not be noted", key)

    async def _send(self, origin: Place, text: str, handed_over: list[str]) -> None:
        """Send a text in pieces; `handed_over` holds each that may have arrived."""
        for piece in split(text, self.channel.limit):
            waited, pause = 0.0, self._pause
            while True:
                handed_over.append(piece)
                try:
                    await self.channel.send(origin, piece)
                except NotSent as error:
                    handed_over.pop()
                    if not error.after:
                        waited += pause
                    if waited > _LONGEST:
                        raise
                    await asyncio.sleep(error.after or pause)
                    pause = min(2 * pause, _LONGEST / 4)
                except (MaybeSent, Undeliverable):
                    raise
                except Exception as error:  # noqa: BLE001 - its words might hold a secret
                    raise MaybeSent(f"it failed with {type(error).__name__}") from None
                else:
                    break

    # --- marks -------------------------------------------------------------------------------

    async def _mark(self, instance: AgentInstance, key: str) -> Mark | None:
        try:
            info = await self._loop.run(instance.store.info, key)
        except NoSuchSession:
            return None
        mark = mark_in(info.meta)
        # Older versions copied the mark of the source into a fork.
        return None if mark is not None and mark.seq > info.last_seq else mark

    async def _set_mark(self, instance: AgentInstance, key: str, mark: Mark) -> None:
        await self._loop.run(instance.store.set_meta, key, **{FIELD: mark.fields()})
