"""Answers on their way to an app: at most once.

The log has every answer once. Towards an app nobody can have both: what was handed over just before
a crash may have arrived or not. So a mark in the session's meta says `sending` before the first
piece, and `sent` after the last one; who finds `sending` alone tells the reader, and sends nothing
again. An answer without a mark was never begun to be sent, and is delivered at the next start.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from msgspec.structs import replace

from stenolog.agent.events import Answer
from stenolog.agent.instance import AgentInstance
from stenolog.agent.loop import AgentLoop
from stenolog.agent.waiting import ended
from stenolog.catalog.entries import Entry
from stenolog.channels.base import Channel, MaybeSent, NotSent, Place, Undeliverable
from stenolog.channels.claims import Claims, conversation
from stenolog.channels.marks import FIELD, Due, Mark, begun, due, is_due, mark_in, owing
from stenolog.channels.splitting import split
from stenolog.errors import NoSuchSession, StenologError, StoreBusy, StoreUnavailable

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
        self, loop: AgentLoop, channel: Channel, claims: Claims, *, pause: float = 1.0
    ) -> None:
        """`pause`: seconds before what was surely not sent is sent again; longer each time."""
        self.channel = channel
        self._loop = loop
        self._claims = claims
        self._pause = pause
        self._stopping = asyncio.Event()
        self._cut = False
        self._running: set[asyncio.Task[Any]] = set()
        """The answers that are being sent."""
        self._kept: dict[tuple[str | None, str], Mark] = {}
        """The marks of sessions that a stand-in keeps."""

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
        for one in due(history, mark=mark, channel=self.channel.name, since=since):
            if only_owed and mark is not None and one.seq not in mark.owed:
                continue  # whoever made it is about to send it
            if one.text.strip():
                await self._safely(instance, key, one)

    async def _entries(self, instance: AgentInstance) -> AsyncIterator[Entry]:
        after: str | None = None
        while instance.catalog is not None:
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
        if instance.store is None:
            return self._kept.get((instance.id, key))
        try:
            return mark_in((await self._loop.run(instance.store.info, key)).meta)
        except NoSuchSession:
            return None

    async def _set_mark(self, instance: AgentInstance, key: str, mark: Mark) -> None:
        if instance.store is not None:
            await self._loop.run(instance.store.set_meta, key, **{FIELD: mark.fields()})
        else:
            self._kept[instance.id, key] = mark
            while len(self._kept) > _REMEMBERED:
                del self._kept[next(iter(self._kept))]
