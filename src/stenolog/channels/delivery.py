"""Delivery of answers to an app, at most once.

The log contains every answer exactly once, but an app cannot guarantee the same: a message that was
sent just before a crash may or may not have arrived. An answer is sent in pieces. A mark in the
session's meta is set to `sending` before the first piece and to `sent` after the last piece. A
process that finds `sending` notifies the user and does not send the answer again. An answer without
a mark was never sent, and is delivered at the next start. An answer that was certainly not sent is
recorded as owed, and is still sent after newer answers.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, TypeGuard

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from stenolog.agent.instance import AgentInstance
from stenolog.agent.loop import AgentLoop
from stenolog.agent.threads import cancel_and_wait, start_task
from stenolog.agent.turn_events import Answer
from stenolog.agent.turn_ownership import read_forked_at
from stenolog.catalog.entries import Entry
from stenolog.catalog.message_metadata import is_received, origin_of
from stenolog.channels.channel import Channel, Destination, MaybeSent, NotSent, Undeliverable
from stenolog.channels.claims import Claims, delivery_claim
from stenolog.channels.splitting import split_text
from stenolog.context.turn_state import answer_to
from stenolog.errors import NoSuchSession, StenologError, StoreBusy, StoreUnavailable
from stenolog.messages import text_parts_of
from stenolog.records import Message

# --- marks ----------------------------------------------------------------------------------------


MARK_FIELD: Final = "delivery"
"""Meta field of a session that contains its delivery mark."""

DeliveryState = Literal["sending", "sent", "unsure", "refused", "owed"]
"""Delivery state of an answer.

`owed` means that the answer was certainly not sent. `unsure` means that the answer may have
arrived, and that the user was notified.
"""
MAX_OWED: Final = 20
"""Maximum number of owed answers per session. Only the newest owed answers are kept."""


class DeliveryMark(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Progress of delivery in a session, with the result of the last attempt."""

    seq: int
    """Seq of the newest answer that a process started to send."""
    state: DeliveryState = field(name="mark")
    """State of the answer that was tried last, which may be an owed answer older than `seq`."""
    origin: Destination
    owed: list[int] = []
    """Seqs of the answers up to `seq` that were certainly not sent, in order."""


class DueAnswer(Struct, frozen=True, kw_only=True):
    """An answer to be delivered."""

    seq: int
    text: str
    origin: Destination


def read_mark(meta: Mapping[str, Any]) -> DeliveryMark | None:
    """Return the mark in a session's meta, or None."""
    stored_mark = meta.get(MARK_FIELD)
    if not isinstance(stored_mark, Mapping):
        return None
    seqs = stored_mark.get("owed")
    # A damaged list must not lose the mark: without the mark, answers would be sent twice.
    owed_seqs = sorted(seq for seq in seqs if type(seq) is int) if isinstance(seqs, list) else []
    try:
        return msgspec.convert({**stored_mark, "owed": owed_seqs}, DeliveryMark)
    except msgspec.ValidationError:
        return None


def is_due(mark: DeliveryMark | None, seq: int) -> bool:
    """Return whether the answer at `seq` was certainly not sent, so that it must be sent."""
    return mark is None or seq > mark.seq or seq in mark.owed


def make_sending_mark(
    mark: DeliveryMark | None, answer: DueAnswer, due: Sequence[DueAnswer]
) -> DeliveryMark:
    """Return the mark for an answer that is being sent.

    Other due answers become owed, except answers above the `seq` of the new mark.
    """
    last_seq = answer.seq if mark is None else max(mark.seq, answer.seq)
    owed = {other.seq for other in due if other.seq <= last_seq}.union(mark.owed if mark else ())
    owed.discard(answer.seq)
    return DeliveryMark(
        seq=last_seq, state="sending", origin=answer.origin, owed=sorted(owed)[-MAX_OWED:]
    )


def make_owed_mark(mark: DeliveryMark, seq: int) -> DeliveryMark:
    """Return the mark that records that the answer at `seq` was certainly not sent."""
    return replace(mark, state="owed", owed=sorted({*mark.owed, seq})[-MAX_OWED:])


def due_answers(
    history: Sequence[Message],
    *,
    mark: DeliveryMark | None,
    channel: str,
    since: datetime,
    after: int = 0,
    allows: Callable[[Destination], bool] = lambda _: False,
) -> list[DueAnswer]:
    """Return the answers to send to a channel, sorted by seq, so that owed answers come first.

    The result has only answers to messages that have a seq above `after` and were stored at or
    after `since`. The origin of a message is trusted if the message has the field `received`,
    because an agent writes `origin` and `received` in one append. Older versions wrote `origin`
    without `received`. Answers to messages without `received` are sent only if `allows` returns
    True for the origin.
    """
    answers: dict[int, DueAnswer] = {}
    for index, message in enumerate(history):
        body = message.to_dict()
        origin = origin_of(body)
        if origin is None or origin.get("channel") != channel or message.at < since:
            continue
        if message.seq <= after:
            continue  # the source session of the fork sends this answer
        if not is_received(body) and not allows(origin):  # guard: deliver-own-origin
            continue
        answer = answer_to(history[index:], message.seq)
        if answer is not None and is_due(mark, answer.seq):
            text = text_parts_of(answer.to_dict())
            answers[answer.seq] = DueAnswer(seq=answer.seq, text=text, origin=origin)
    return [answers[seq] for seq in sorted(answers)]


# --- delivery -------------------------------------------------------------------------------------


UNSURE_NOTICE: Final = (
    "An answer may not have reached you: I was interrupted while sending it. "
    "Send /retry to get your last message answered again."
)
_MAX_AGE: Final = timedelta(days=1)
"""Maximum age of a message whose answer is still delivered."""
_MAX_RETRY_SECONDS: Final = 120.0
"""Maximum total seconds between retries of a message; delays set by the app do not count."""
_MAX_ATTEMPTS: Final = 5
_PAGE_SIZE: Final = 200

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
        self._sending_tasks: set[asyncio.Task[Any]] = set()
        """Tasks that send answers now."""

    async def deliver(
        self, instance: AgentInstance, answer: Answer, text: str, origin: Destination
    ) -> None:
        """Send `text` as the answer, unless a process started to send it before. Raises nothing.

        An answer that is not in the log is sent without a mark.
        """
        if not text.strip():
            return
        if answer.seq is None:
            await self.send_notice(origin, text)
            return
        due_answer = DueAnswer(seq=answer.seq, text=text, origin=origin)
        if await self._try_deliver(instance, answer.key, due_answer):
            # The app accepts messages, so send the owed answers, too.
            try:
                await self.send_due(instance, answer.key, only_owed=True)
            except StenologError as error:
                _logger.warning(
                    "unsent answers in %r wait for the next attempt: %s", answer.key, error
                )

    async def stop_sending(self) -> None:
        """Stop sending answers before the stores are closed; the next start continues."""
        self._stopped_sending = True
        self._stopping.set()
        if await cancel_and_wait(self._sending_tasks):
            raise asyncio.CancelledError

    async def send_notice(self, origin: Destination, text: str) -> None:
        """Send a text that is not an answer in the log. Raises nothing."""
        try:
            await self._send_pieces(origin, text, [])
        except (NotSent, MaybeSent, Undeliverable) as error:
            _logger.warning("%s: %s", self.channel.name, error)

    # --- after a restart ---------------------------------------------------------------------

    async def recover_answers(self) -> None:
        """Deliver the answers that a killed process left, in all sessions. Raises nothing.

        Answers that no process started to send are sent. If it is unknown whether an answer
        arrived, the user is notified once. If another process holds the claim of a session, the
        session is checked again later, because a killed process keeps its claim until the claim
        expires.
        """
        retries: list[tuple[AgentInstance, str, bool]] = []
        since = datetime.now(UTC) - _MAX_AGE
        for instance in self._loop.registry:
            async for entry in self._list_entries(instance):
                recent = entry.updated is not None and entry.updated >= since
                if self._stopping.is_set():
                    return
                if entry.problem is not None or not (recent or entry.channel == self.channel.name):
                    continue
                if not await self._recover_session(instance, entry.key, recent):
                    retries.append((instance, entry.key, recent))
        while retries and not await self._is_stopping_within(self._claims.ttl):
            retries = [item for item in retries if not await self._recover_session(*item)]

    async def _recover_session(self, instance: AgentInstance, key: str, is_recent: bool) -> bool:
        """Recover one session; return False if another process holds the claim of the session."""
        if self._stopping.is_set():
            return True
        try:
            await self._notify_if_unsure(instance, key)
            if is_recent:
                await self.send_due(instance, key)
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

    async def send_due(self, instance: AgentInstance, key: str, *, only_owed: bool = False) -> None:
        """Deliver the answers of a session that are owed, or that no process started to send."""
        mark = await self._read_mark(instance, key)
        if only_owed and (mark is None or not mark.owed):
            return
        for due in await self._find_due_answers(instance, key, mark):
            if only_owed and mark is not None and due.seq not in mark.owed:
                continue  # the task that wrote the answer is about to send it
            await self._try_deliver(instance, key, due)

    async def _find_due_answers(
        self, instance: AgentInstance, key: str, mark: DeliveryMark | None
    ) -> list[DueAnswer]:
        answers = due_answers(
            # `instance.sessions` would return an empty history if the log cannot be read.
            await self._loop.run(instance.store.get_history, key),
            mark=mark,
            channel=self.channel.name,
            since=datetime.now(UTC) - _MAX_AGE,
            after=await self._loop.run(read_forked_at, instance.sessions, key),
            allows=self._allows,
        )
        return [answer for answer in answers if answer.text.strip()]

    async def _list_entries(self, instance: AgentInstance) -> AsyncIterator[Entry]:
        after: str | None = None
        while True:
            try:
                page = await self._loop.run(instance.catalog.list, limit=_PAGE_SIZE, after=after)
            except StenologError as error:
                _logger.warning("could not search for unsent answers: %s", error)
                return
            for entry in page.entries:
                yield entry
            after = page.after
            if after is None:
                return

    async def _notify_if_unsure(self, instance: AgentInstance, key: str) -> None:
        if not self._is_sending(await self._read_mark(instance, key)):
            return
        async with self._claims.hold_claim(delivery_claim(instance.id, key), wait=False):
            mark = await self._read_mark(instance, key)
            if self._is_sending(mark):
                _logger.warning(
                    "it is unknown whether answer %s in %r was delivered", mark.seq, key
                )
                await self._notify_unsure(instance, key, mark)

    def _is_sending(self, mark: DeliveryMark | None) -> TypeGuard[DeliveryMark]:
        if mark is None or mark.state != "sending":
            return False
        return mark.origin.get("channel") == self.channel.name

    async def _notify_unsure(self, instance: AgentInstance, key: str, mark: DeliveryMark) -> None:
        # The mark is written first, so that the user is notified at most once.
        await self._set_mark(instance, key, replace(mark, state="unsure"))
        await self.send_notice(mark.origin, UNSURE_NOTICE)

    # --- one answer --------------------------------------------------------------------------

    async def _try_deliver(self, instance: AgentInstance, key: str, answer: DueAnswer) -> bool:
        """Deliver an answer, and return whether this call sent the answer. Raises nothing."""
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            if self._stopped_sending:
                return False
            try:
                return await start_task(self._deliver(instance, key, answer), self._sending_tasks)
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
        async with self._claims.hold_claim(delivery_claim(instance.id, key)):
            previous_mark = await self._read_mark(instance, key)
            if not is_due(previous_mark, answer.seq):
                return False
            if self._is_sending(previous_mark):
                # A killed process was sending an answer, and the new mark replaces its mark.
                # The user must be notified before the old mark is lost.
                await self._notify_unsure(instance, key, previous_mark)
            # The new mark lists earlier answers that a killed process left unsent as owed.
            due = await self._find_due_answers(instance, key, previous_mark)
            mark = make_sending_mark(previous_mark, answer, due)
            sent_pieces: list[str] = []
            try:
                await self._set_mark(instance, key, mark)
                await self._send_pieces(answer.origin, answer.text, sent_pieces)
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
                    await self._set_mark(instance, key, make_owed_mark(mark, answer.seq))
            except asyncio.CancelledError:
                if not sent_pieces:
                    try:
                        await self._set_mark(instance, key, make_owed_mark(mark, answer.seq))
                    except Exception:
                        _logger.exception("could not record that an answer in %r was not sent", key)
                raise
            else:
                await self._set_mark(instance, key, replace(mark, state="sent"))
                return True
        return False

    async def _send_pieces(self, origin: Destination, text: str, sent_pieces: list[str]) -> None:
        """Send a text in pieces. Each piece that may have arrived is added to `sent_pieces`."""
        for piece in split_text(text, self.channel.limit):
            waited, pause = 0.0, self._pause
            while True:
                sent_pieces.append(piece)
                try:
                    await self.channel.send(origin, piece)
                except NotSent as error:
                    sent_pieces.pop()
                    if not error.pause:
                        waited += pause
                    if waited > _MAX_RETRY_SECONDS:
                        raise
                    await asyncio.sleep(error.pause or pause)
                    pause = min(2 * pause, _MAX_RETRY_SECONDS / 4)
                except (MaybeSent, Undeliverable):
                    raise
                except Exception as error:  # noqa: BLE001 - its text might contain a secret
                    raise MaybeSent(f"sending failed with {type(error).__name__}") from None
                else:
                    break

    # --- marks -------------------------------------------------------------------------------

    async def _read_mark(self, instance: AgentInstance, key: str) -> DeliveryMark | None:
        try:
            info = await self._loop.run(instance.store.info, key)
        except NoSuchSession:
            return None
        mark = read_mark(info.meta)
        # Older versions copied the mark of the source session into its fork.
        return None if mark is not None and mark.seq > info.last_seq else mark

    async def _set_mark(self, instance: AgentInstance, key: str, mark: DeliveryMark) -> None:
        await self._loop.run(
            instance.store.set_meta, key, **{MARK_FIELD: msgspec.to_builtins(mark)}
        )
