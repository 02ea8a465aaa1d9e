"""Delivery of answers to an app, at most once.

The log contains every answer exactly once, but an app cannot guarantee the same: a message that was
sent just before a crash may or may not have arrived. So a mark in the session's meta is set to
`sending` before the first piece and to `sent` after the last one. A process that finds `sending`
notifies the user and does not send the answer again. An answer without a mark was never sent, and
is delivered at the next start.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from stenolog.agent.instance import AgentInstance
from stenolog.agent.loop import AgentLoop
from stenolog.agent.threads import cancel_and_wait
from stenolog.agent.turn_events import Answer
from stenolog.agent.turn_ownership import read_forked_at
from stenolog.catalog.entries import Entry
from stenolog.catalog.message_metadata import is_received, origin_of
from stenolog.channels.channel import Channel, Destination, MaybeSent, NotSent, Undeliverable
from stenolog.channels.claims import Claims, delivery_claim
from stenolog.channels.splitting import split
from stenolog.context.turn_state import answer_to
from stenolog.errors import NoSuchSession, StenologError, StoreBusy, StoreUnavailable
from stenolog.messages import text_parts_of
from stenolog.records import Message

# --- marks ----------------------------------------------------------------------------------------
# Delivery marks in a session's meta, and the answers that are due. The mark is `sending` before the
# first piece of an answer is sent, and `sent` after the last one. So `sending` after a crash means
# that the outcome is unknown. Answers that were certainly not sent are owed, even if later answers
# are sent.


FIELD: Final = "delivery"
"""Meta field of a session that contains its delivery mark."""

State = Literal["sending", "sent", "unsure", "refused", "owed"]
"""State of an answer. owed: certainly not sent. unsure: may have arrived; the user was notified."""
MAX_OWED: Final = 20
"""Maximum number of owed answers per session. Only the newest are kept."""


class DeliveryMark(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Progress of delivery in a session, with the result of the last attempt."""

    seq: int
    """Seq of the newest answer that a process started to send."""
    state: State = field(name="mark")
    """State of the last attempt, which may concern an older, owed answer."""
    origin: Destination
    owed: tuple[int, ...] = ()
    """Seqs of owed answers up to `seq`, in order."""

    def fields(self) -> dict[str, Any]:
        """Return the mark as stored in meta."""
        owed = {"owed": list(self.owed)} if self.owed else {}
        return {**msgspec.to_builtins(self), **owed}


class DueAnswer(Struct, frozen=True, kw_only=True):
    """An answer to be delivered."""

    seq: int
    text: str
    origin: Destination


def read_mark(meta: Mapping[str, Any]) -> DeliveryMark | None:
    """Return the mark in a session's meta, or None."""
    stored = meta.get(FIELD)
    if not isinstance(stored, Mapping):
        return None
    listed = stored.get("owed")
    # A damaged list must not lose the mark: without the mark, answers would be sent twice.
    owed = sorted(seq for seq in listed if type(seq) is int) if isinstance(listed, list) else []
    try:
        return msgspec.convert({**stored, "owed": owed}, DeliveryMark)
    except msgspec.ValidationError:
        return None


def is_due(mark: DeliveryMark | None, seq: int) -> bool:
    """Whether no process has started to send the answer at `seq`."""
    return mark is None or seq > mark.seq or seq in mark.owed


def sending_mark(mark: DeliveryMark | None, answer: DueAnswer) -> DeliveryMark:
    """Return the mark for an answer that is being sent."""
    if mark is None:
        return DeliveryMark(seq=answer.seq, state="sending", origin=answer.origin)
    return DeliveryMark(
        seq=max(mark.seq, answer.seq),
        state="sending",
        origin=answer.origin,
        owed=tuple(seq for seq in mark.owed if seq != answer.seq),
    )


def owed_mark(mark: DeliveryMark, seq: int) -> DeliveryMark:
    """Return the mark after an answer was certainly not sent."""
    owed = sorted({*mark.owed, seq})[-MAX_OWED:]
    return replace(mark, state="owed", owed=tuple(owed))


def due_answers(
    history: Sequence[Message],
    *,
    mark: DeliveryMark | None,
    channel: str,
    since: datetime,
    after: int = 0,
    allows: Callable[[Destination], bool] = lambda _: False,
) -> list[DueAnswer]:
    """Return the answers to send to a channel, by seq, so that owed answers come first.

    The result has only answers to messages above seq `after` that were stored at or after `since`.
    The origin of a message is trusted if an agent received the message: the agent writes origin and
    mark in one append. Older versions wrote the origin without a mark. Answers to such messages are
    sent if `allows` agrees.
    """
    answers: dict[int, DueAnswer] = {}
    for index, message in enumerate(history):
        body = message.to_dict()
        origin = origin_of(body)
        if origin is None or origin.get("channel") != channel or message.at < since:
            continue
        if message.seq <= after:
            continue  # the source of the fork sends this answer
        if not is_received(body) and not allows(origin):  # guard: deliver-own-origin
            continue
        answer = answer_to(history[index:], message.seq)
        if answer is not None and is_due(mark, answer.seq):
            text = text_parts_of(answer.to_dict())
            answers[answer.seq] = DueAnswer(seq=answer.seq, text=text, origin=origin)
    return [answers[seq] for seq in sorted(answers)]


# --- delivery -------------------------------------------------------------------------------------


UNSURE: Final = (
    "An answer may not have reached you: I was interrupted while sending it. "
    "Send /retry to get your last message answered again."
)
_MAX_AGE: Final = timedelta(days=1)
"""Maximum age of a message whose answer is still delivered."""
_MAX_RETRY_SECONDS: Final = 120.0
"""Maximum seconds of retries for a message, in addition to delays that the app asks for."""
_MAX_ATTEMPTS: Final = 5
_PAGE: Final = 200
_REMEMBERED: Final = 10_000

_logger = logging.getLogger("stenolog")


class Delivery:
    """The delivery of one channel's answers."""

    def __init__(
        self,
        loop: AgentLoop,
        channel: Channel,
        claims: Claims,
        *,
        pause: float = 1.0,
        allows: Callable[[Destination], bool] = lambda _: False,
    ) -> None:
        """Create the delivery of a channel.

        `pause`: seconds before the first retry of a message that was not sent; later retries wait
        longer. `allows`: returns whether the allow list of the channel contains an origin.
        """
        self._allows = allows
        self.channel = channel
        self._loop = loop
        self._claims = claims
        self._pause = pause
        self._stopping = asyncio.Event()
        self._stopped_sending = False
        self._running: set[asyncio.Task[Any]] = set()
        """Answers that this process is sending now."""

    async def deliver(
        self, instance: AgentInstance, answer: Answer, text: str, origin: Destination
    ) -> None:
        """Send `text` as the answer, unless a process started to send it before. Raises nothing.

        An answer that is not in the log is sent without a mark.
        """
        if not text.strip():
            return
        if answer.seq is None:
            await self.tell(origin, text)
            return
        due = DueAnswer(seq=answer.seq, text=text, origin=origin)
        if await self._try_deliver(instance, answer.key, due):
            # The app accepts messages again, so send the owed answers.
            try:
                await self.catch_up(instance, answer.key, only_owed=True)
            except StenologError as error:
                _logger.warning(
                    "unsent answers in %r wait for the next attempt: %s", answer.key, error
                )

    async def stop_sending(self) -> None:
        """Stop sending while marks can still be written; the next start continues."""
        self._stopped_sending = True
        self._stopping.set()
        if await cancel_and_wait(self._running):
            raise asyncio.CancelledError

    async def tell(self, origin: Destination, text: str) -> None:
        """Send a text that is not an answer in the log. Raises nothing."""
        try:
            await self._send(origin, text, [])
        except (NotSent, MaybeSent, Undeliverable) as error:
            _logger.warning("%s: %s", self.channel.name, error)

    # --- after a restart ---------------------------------------------------------------------

    async def recover(self) -> None:
        """Deliver the answers that a killed process left, in all sessions. Raises nothing.

        Answers that no process started to send are sent. If the outcome of an answer is unknown,
        the user is notified once. While another process is sending in a session, this method checks
        again: a killed process keeps its claim until the claim expires.
        """
        remaining: list[tuple[AgentInstance, str, bool]] = []
        since = datetime.now(UTC) - _MAX_AGE
        for instance in self._loop.registry:
            async for entry in self._entries(instance):
                fresh = entry.updated is not None and entry.updated >= since
                if self._stopping.is_set():
                    return
                if entry.problem is not None or not (fresh or entry.channel == self.channel.name):
                    continue
                if not await self._recover_session(instance, entry.key, fresh):
                    remaining.append((instance, entry.key, fresh))
        while remaining and not await self._is_stopping_within(self._claims.ttl):
            remaining = [item for item in remaining if not await self._recover_session(*item)]

    async def _recover_session(self, instance: AgentInstance, key: str, fresh: bool) -> bool:
        """Recover one session; return False if another process is sending there."""
        if self._stopping.is_set():
            return True
        try:
            await self._notify_if_unsure(instance, key)
            if fresh:
                await self.catch_up(instance, key)
        except StoreBusy:
            return False
        except StenologError as error:
            _logger.warning("could not check %r for unsent answers: %s", key, error)
        return True

    async def _is_stopping_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def stop_recovering(self) -> None:
        """Recover no more sessions; the next start continues."""
        self._stopping.set()

    async def catch_up(self, instance: AgentInstance, key: str, *, only_owed: bool = False) -> None:
        """Deliver the answers of a session that are owed, or that no process started to send."""
        mark = await self._mark(instance, key)
        if only_owed and (mark is None or not mark.owed):
            return
        history = await self._loop.run(instance.sessions.get_history, key)
        since = datetime.now(UTC) - _MAX_AGE
        waiting = due_answers(
            history,
            mark=mark,
            channel=self.channel.name,
            since=since,
            after=await self._loop.run(read_forked_at, instance.sessions, key),
            allows=self._allows,
        )
        for due in waiting:
            if only_owed and mark is not None and due.seq not in mark.owed:
                continue  # the task that wrote the answer is about to send it
            if due.text.strip():
                await self._try_deliver(instance, key, due)

    async def _entries(self, instance: AgentInstance) -> AsyncIterator[Entry]:
        after: str | None = None
        while True:
            try:
                page = await self._loop.run(instance.catalog.list, limit=_PAGE, after=after)
            except StenologError as error:
                _logger.warning("could not search for unsent answers: %s", error)
                return
            for entry in page.entries:
                yield entry
            after = page.after
            if after is None:
                return

    async def _notify_if_unsure(self, instance: AgentInstance, key: str) -> None:
        if not self._is_sending(await self._mark(instance, key)):
            return
        async with self._claims.held(delivery_claim(instance.id, key), wait=False):
            mark = await self._mark(instance, key)
            if mark is not None and self._is_sending(mark):
                _logger.warning(
                    "it is unknown whether answer %s in %r was delivered", mark.seq, key
                )
                await self._notify_unsure(instance, key, mark)

    def _is_sending(self, mark: DeliveryMark | None) -> bool:
        is_own = mark is not None and mark.origin.get("channel") == self.channel.name
        return is_own and mark is not None and mark.state == "sending"

    async def _notify_unsure(self, instance: AgentInstance, key: str, mark: DeliveryMark) -> None:
        # The mark is written first, so that the user is notified at most once.
        await self._set_mark(instance, key, replace(mark, state="unsure"))
        await self.tell(mark.origin, UNSURE)

    # --- one answer --------------------------------------------------------------------------

    async def _try_deliver(self, instance: AgentInstance, key: str, answer: DueAnswer) -> bool:
        """Deliver an answer, and return whether it was sent now. Raises nothing."""
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            if self._stopped_sending:
                return False
            running = asyncio.create_task(self._deliver(instance, key, answer))
            self._running.add(running)
            running.add_done_callback(self._running.discard)
            try:
                return await running
            except StoreUnavailable as error:
                # The mark could not be written, so the answer must not be sent.
                _logger.warning("answer %s in %r is sent later: %s", answer.seq, key, error)
                await asyncio.sleep(self._pause * attempt)
            except StenologError as error:
                _logger.warning("answer %s in %r was not sent: %s", answer.seq, key, error)
                return False
        _logger.error("answer %s in %r is sent after the next start", answer.seq, key)
        return False

    async def _deliver(self, instance: AgentInstance, key: str, answer: DueAnswer) -> bool:
        async with self._claims.held(delivery_claim(instance.id, key)):
            before = await self._mark(instance, key)
            if not is_due(before, answer.seq):
                return False
            if before is not None and self._is_sending(before):
                # The process that sent the earlier answer is gone, and the new mark would replace
                # the only record of that answer.
                await self._notify_unsure(instance, key, before)
            mark = sending_mark(before, answer)
            sent_pieces: list[str] = []
            try:
                await self._set_mark(instance, key, mark)
                await self._send(answer.origin, answer.text, sent_pieces)
            except Undeliverable as error:
                _logger.warning(
                    "answer %s in %r was rejected by the app: %s", answer.seq, key, error
                )
                await self._set_mark(instance, key, replace(mark, state="refused"))
            except (NotSent, MaybeSent) as error:
                _logger.warning("answer %s in %r: %s", answer.seq, key, error)
                if sent_pieces:
                    await self._notify_unsure(instance, key, mark)
                else:
                    await self._set_mark(instance, key, owed_mark(mark, answer.seq))
            except asyncio.CancelledError:
                if not sent_pieces:
                    await self._owe(instance, key, owed_mark(mark, answer.seq))
                raise
            else:
                await self._set_mark(instance, key, replace(mark, state="sent"))
                return True
        return False

    async def _owe(self, instance: AgentInstance, key: str, mark: DeliveryMark) -> None:
        """Record that an answer was not sent. Raises only CancelledError."""
        try:
            await self._set_mark(instance, key, mark)
        except Exception:
            _logger.exception("could not record that an answer in %r was not sent", key)

    async def _send(self, origin: Destination, text: str, sent_pieces: list[str]) -> None:
        """Send a text in pieces. Each piece that may have arrived is added to `sent_pieces`."""
        for piece in split(text, self.channel.limit):
            waited, pause = 0.0, self._pause
            while True:
                sent_pieces.append(piece)
                try:
                    await self.channel.send(origin, piece)
                except NotSent as error:
                    sent_pieces.pop()
                    if not error.after:
                        waited += pause
                    if waited > _MAX_RETRY_SECONDS:
                        raise
                    await asyncio.sleep(error.after or pause)
                    pause = min(2 * pause, _MAX_RETRY_SECONDS / 4)
                except (MaybeSent, Undeliverable):
                    raise
                except Exception as error:  # noqa: BLE001 - its text might contain a secret
                    raise MaybeSent(f"sending failed with {type(error).__name__}") from None
                else:
                    break

    # --- marks -------------------------------------------------------------------------------

    async def _mark(self, instance: AgentInstance, key: str) -> DeliveryMark | None:
        try:
            info = await self._loop.run(instance.store.info, key)
        except NoSuchSession:
            return None
        mark = read_mark(info.meta)
        # Older versions copied the mark of the source into a fork.
        return None if mark is not None and mark.seq > info.last_seq else mark

    async def _set_mark(self, instance: AgentInstance, key: str, mark: DeliveryMark) -> None:
        await self._loop.run(instance.store.set_meta, key, **{FIELD: mark.fields()})
