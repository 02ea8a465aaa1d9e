"""Delivery of answers to an app, at most once.

The log contains every answer exactly once, but an app cannot guarantee the same: a message that was
sent just before a crash may or may not have arrived. An answer is sent in pieces. A mark in the
session's meta is set to `sending` before the first piece and to `sent` after the last piece. A
process that finds `sending` notifies the user and does not send the answer again. An answer newer
than the mark was never sent, and is delivered at the next start. If sending an answer fails and the
answer certainly did not arrive, it is recorded as owed, and is sent even after newer answers.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeGuard

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from stenolog.agent.instance import AgentInstance
from stenolog.agent.loop import AgentLoop
from stenolog.agent.session_history import read_fork_seq
from stenolog.agent.threads import cancel_and_wait, start_task
from stenolog.agent.turn_events import Answer
from stenolog.catalog.entries import Entry
from stenolog.catalog.message_metadata import is_received, origin_of
from stenolog.channels.channel import Channel, Destination, MaybeSent, NotSent, Undeliverable
from stenolog.channels.claims import Claims, delivery_claim_name
from stenolog.context.turn_state import answer_to
from stenolog.errors import StenologError, StoreBusy, StoreUnavailable
from stenolog.messages import text_parts_of
from stenolog.records import Message
from stenolog.sessions.chat_marks import DELIVERY_FIELD, MAX_OWED, DeliveryMark, read_mark
from stenolog.stores.base import Store, find_info

# --- marks ----------------------------------------------------------------------------------------


class DueAnswer(Struct, frozen=True, kw_only=True):
    """An answer to be delivered."""

    seq: int
    text: str
    origin: Destination
    other_origins: tuple[Destination, ...] = ()
    """Destinations of further messages that it answers."""


def is_due(mark: DeliveryMark | None, seq: int) -> bool:
    """Return whether the answer at `seq` was certainly not sent, so that it must be sent."""
    return mark is None or seq > mark.seq or seq in mark.owed


def make_sending_mark(
    mark: DeliveryMark | None, answer: DueAnswer, due_answers: Sequence[DueAnswer]
) -> DeliveryMark:
    """Return the delivery mark for an answer that is being sent.

    The other `due_answers` become owed, except answers above the `seq` of the new mark.
    """
    last_seq = answer.seq if mark is None else max(mark.seq, answer.seq)
    owed_seqs = {other.seq for other in due_answers if other.seq <= last_seq}
    owed_seqs.update(mark.owed if mark else ())
    owed_seqs.discard(answer.seq)
    return DeliveryMark(
        seq=last_seq, state="sending", origin=answer.origin, owed=sorted(owed_seqs)[-MAX_OWED:]
    )


def make_owed_mark(mark: DeliveryMark, seq: int) -> DeliveryMark:
    """Return the delivery mark with the answer at `seq` recorded as certainly not sent."""
    return replace(mark, state="owed", owed=sorted({*mark.owed, seq})[-MAX_OWED:])


# --- delivery -------------------------------------------------------------------------------------


UNSURE_NOTICE: Final = (
    "An answer may not have reached you: I was interrupted while sending it. "
    "Send /retry to get your last message answered again."
)
_MAX_MESSAGE_AGE: Final = timedelta(days=1)
"""Maximum age of a message whose unsent answer is still delivered later."""
_MAX_SCANNED_MESSAGES: Final = 1_000
"""Number of newest messages that are searched for answers that a summary hid."""
_MAX_RETRY_SECONDS: Final = 120.0
"""Maximum total seconds between the retries of a piece, not counting delays set by the app."""
_MAX_ATTEMPTS: Final = 5
"""Maximum number of attempts to deliver an answer while the store is unavailable."""
_CATALOG_PAGE_SIZE: Final = 200

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
    ) -> None:
        """Create the delivery of a channel.

        `pause`: seconds before the first retry of a message that was not sent; later retries wait
        longer.
        """
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
        """Send `text` as the answer, unless a process already started to send it. Raises nothing.

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
        """Stop sending; the next start continues. Call this while the stores are still open."""
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
        """Deliver the answers that a killed process left unsent, in all sessions. Raises nothing.

        Answers that were certainly not sent are sent. If it is unknown whether an answer
        arrived, the user is notified once. If another process holds the claim of a session, the
        session is checked again later, because a killed process keeps its claim until the claim
        expires.
        """
        sessions_to_retry: list[tuple[AgentInstance, str, bool]] = []
        since = datetime.now(UTC) - _MAX_MESSAGE_AGE
        for instance in self._loop.registry:
            async for entry in self._list_entries(instance):
                if self._stopping.is_set():
                    return
                is_recent = entry.updated is not None and entry.updated >= since
                is_relevant = is_recent or entry.channel == self.channel.name
                if entry.problem is not None or not is_relevant:
                    continue
                if not await self._recover_session(instance, entry.key, is_recent):
                    sessions_to_retry.append((instance, entry.key, is_recent))
        while sessions_to_retry and not await self._wait_for_stop(self._claims.ttl):
            sessions_to_retry = [
                session
                for session in sessions_to_retry
                if not await self._recover_session(*session)
            ]

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

    async def _wait_for_stop(self, seconds: float) -> bool:
        """Wait at most `seconds`; return whether the recovery must stop."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        return self._stopping.is_set()

    def stop_recovering(self) -> None:
        """Recover no more sessions; the next start continues."""
        self._stopping.set()

    async def send_due(self, instance: AgentInstance, key: str, *, only_owed: bool = False) -> None:
        """Deliver the answers of a session that are owed, or that no process started to send.

        With `only_owed`, deliver only the owed answers.
        """
        mark = await self._read_mark(instance, key)
        if only_owed and (mark is None or not mark.owed):
            return
        for answer in await self._find_due_answers(instance, key, mark):
            if only_owed and mark is not None and answer.seq not in mark.owed:
                continue  # the task that wrote the answer is about to send it
            await self._try_deliver(instance, key, answer)

    async def _find_due_answers(
        self, instance: AgentInstance, key: str, mark: DeliveryMark | None
    ) -> list[DueAnswer]:
        """Return the answers to send in a session, sorted by seq, so that owed answers come first.

        The origin of a message is trusted only if the message has the field `received`, because an
        agent writes `origin` and `received` in one append.
        """
        history = await self._loop.run(_read_history, instance.store, key, mark)
        fork_seq = await self._loop.run(read_fork_seq, instance.store, key)
        since = datetime.now(UTC) - _MAX_MESSAGE_AGE
        answers: dict[int, DueAnswer] = {}
        for index, message in enumerate(history):
            body = message.to_dict()
            origin = origin_of(body)
            if origin is None or origin.get("channel") != self.channel.name or message.at < since:
                continue
            if message.seq <= fork_seq:
                continue  # the source session of the fork sends this answer
            # guard: deliver-own-origin
            if not is_received(body):
                continue
            later = history[index:]
            answer = answer_to((other for other in later if not other.hidden), message.seq)
            # Of several hidden answers, the newest one was not replaced.
            answer = answer or answer_to(reversed(later), message.seq)
            if answer is not None and is_due(mark, answer.seq):
                text = text_parts_of(answer.to_dict())
                if text.strip():
                    due_answer = answers.get(answer.seq)
                    answers[answer.seq] = (
                        DueAnswer(seq=answer.seq, text=text, origin=origin)
                        if due_answer is None
                        else _add_origins(due_answer, [origin])
                    )
        return [answers[seq] for seq in sorted(answers)]

    async def _list_entries(self, instance: AgentInstance) -> AsyncIterator[Entry]:
        cursor: str | None = None
        while True:
            try:
                page = await self._loop.run(
                    instance.catalog.list, limit=_CATALOG_PAGE_SIZE, after=cursor
                )
            except StenologError as error:
                _logger.warning("could not search for unsent answers: %s", error)
                return
            for entry in page.entries:
                yield entry
            cursor = page.after
            if cursor is None:
                return

    async def _notify_if_unsure(self, instance: AgentInstance, key: str) -> None:
        if not self._is_sending_mark(await self._read_mark(instance, key)):
            return
        async with self._claims.hold_claim(delivery_claim_name(instance.id, key), wait=False):
            mark = await self._read_mark(instance, key)
            if self._is_sending_mark(mark):
                _logger.warning(
                    "it is unknown whether answer %s in %r was delivered", mark.seq, key
                )
                await self._notify_unsure(instance, key, mark)

    def _is_sending_mark(self, mark: DeliveryMark | None) -> TypeGuard[DeliveryMark]:
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
        async with self._claims.hold_claim(delivery_claim_name(instance.id, key)):
            previous_mark = await self._read_mark(instance, key)
            if not is_due(previous_mark, answer.seq):
                return False
            if self._is_sending_mark(previous_mark):
                # A killed process was sending an answer.
                # The user must be notified before the new mark replaces the mark of that answer.
                await self._notify_unsure(instance, key, previous_mark)
            # Earlier answers that a killed process left unsent become owed in the new mark.
            due_answers = await self._find_due_answers(instance, key, previous_mark)
            mark = make_sending_mark(previous_mark, answer, due_answers)
            for due_answer in due_answers:
                origins = [due_answer.origin, *due_answer.other_origins]
                # A command has an origin of its own.
                if due_answer.seq == answer.seq and answer.origin in origins:
                    answer = _add_origins(answer, origins)  # guard: answer-to-each-origin
            sent_pieces: list[str] = []
            try:
                await self._set_mark(instance, key, mark)
                await self._send_pieces(answer.origin, answer.text, sent_pieces)
                await self._send_to_others(answer)
            except Undeliverable as error:
                _logger.warning(
                    "answer %s in %r was rejected by the app: %s", answer.seq, key, error
                )
                await self._send_to_others(answer)
                await self._set_mark(instance, key, replace(mark, state="refused"))
            except (NotSent, MaybeSent) as error:
                _logger.warning("answer %s in %r: %s", answer.seq, key, error)
                if sent_pieces:
                    await self._notify_unsure(instance, key, mark)
                    await self._send_to_others(answer)
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

    async def _send_to_others(self, answer: DueAnswer) -> None:
        for origin in answer.other_origins:
            await self.send_notice(origin, answer.text)

    async def _send_pieces(self, origin: Destination, text: str, sent_pieces: list[str]) -> None:
        """Send a text in pieces. Each piece that may have arrived is added to `sent_pieces`."""
        for piece in split_text(text, self.channel.max_length):
            waited_seconds, pause = 0.0, self._pause
            while True:
                sent_pieces.append(piece)
                try:
                    await self.channel.send(origin, piece)
                except NotSent as error:
                    sent_pieces.pop()
                    if not error.pause:
                        waited_seconds += pause
                    if waited_seconds > _MAX_RETRY_SECONDS:
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
        info = await self._loop.run(find_info, instance.store, key)
        return None if info is None else read_mark(info.meta)

    async def _set_mark(self, instance: AgentInstance, key: str, mark: DeliveryMark) -> None:
        await self._loop.run(
            instance.store.set_meta, key, **{DELIVERY_FIELD: msgspec.to_builtins(mark)}
        )


def _add_origins(answer: DueAnswer, origins: Sequence[Destination]) -> DueAnswer:
    """Return the answer with these destinations added, each once."""
    others = list(answer.other_origins)
    others += (origin for origin in origins if origin not in (answer.origin, *others))
    return replace(answer, other_origins=tuple(others))


def _read_history(store: Store, key: str, mark: DeliveryMark | None) -> list[Message]:
    """Return the visible messages, and those that a summary hid before their answers were sent.

    This call blocks.
    """
    first_due = 1 if mark is None else min([mark.seq + 1, *mark.owed])
    floor = store.info(key).floor
    if floor < first_due:
        return list(store.get_history(key))
    # guard: deliver-hidden-answer
    history = store.get_history(key, last=_MAX_SCANNED_MESSAGES, full=True)
    return [message for message in history if not message.hidden or message.seq <= floor]


# --- splitting ------------------------------------------------------------------------------------
# Pure functions that split a long answer into messages of an app.
# A text is cut at the end of a paragraph if possible, else of a line, sentence or word, else
# anywhere.


_BREAK_PATTERNS: Final = (
    re.compile(r"\n[ \t]*\n"),
    re.compile(r"\n"),
    # The end of a sentence, with up to two closing quotes or brackets.
    re.compile(
        r"(?:(?<=[.!?…。！？])"  # noqa: RUF001 - these end sentences, too
        r"|(?<=[.!?…。！？][\"'”’)\]])"  # noqa: RUF001
        r"|(?<=[.!?…。！？][\"'”’)\]]{2}))\s+"  # noqa: RUF001
    ),
    re.compile(r"\s+"),
)
_MIN_LENGTH_DIVISOR: Final = 3
"""Minimum length of a message that is cut at a break: the maximum divided by this number."""


def utf16_len(text: str) -> int:
    """Return the length of a text in UTF-16 code units, as Telegram and others count."""
    return len(text) + sum(character > "\uffff" for character in text)


def split_text(text: str, limit: int) -> list[str]:
    """Split a text into messages. No message is blank or has more than `limit` UTF-16 code units.

    Only white space at the cuts is dropped, but not the indentation of a line.
    """
    messages: list[str] = []
    rest = text.strip("\n")
    while rest.strip():
        end, next_start = _find_cut(rest, limit)
        if message := rest[:end].rstrip():
            messages.append(message)
        rest = rest[next_start:].lstrip("\n")
    return messages


def _find_cut(text: str, limit: int) -> tuple[int, int]:
    """Return where the next message ends, and where the message after it starts."""
    max_length = _count_fitting_characters(text, limit)
    if max_length == len(text):
        return max_length, max_length
    for pattern in _BREAK_PATTERNS:
        matches = [*pattern.finditer(text, 0, max_length + 1)][-1:]
        if matches and matches[0].start() >= max(1, max_length // _MIN_LENGTH_DIVISOR):
            return matches[0].span()
    return max_length, max_length


def _count_fitting_characters(text: str, max_units: int) -> int:
    """Return how many characters of the text fit into `max_units` UTF-16 code units."""
    length = min(len(text), max_units)
    while (excess_units := utf16_len(text[:length]) - max_units) > 0:
        length -= (excess_units + 1) // 2
    return length
