"""The inbox of a channel: stores the messages of an app, and delivers the agent's answers.

Messages of one chat are stored in the order in which they arrived. Chats do not wait for each
other, and only /stop is processed out of order. A message becomes durable before the agent answers
it. If an app resends unconfirmed messages, a message is confirmed only when it is durable.
"""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Annotated, Any, Final
from weakref import WeakValueDictionary

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from stenolog.agent import commands
from stenolog.agent.active_sessions import TAKEN_OVER_TEXT
from stenolog.agent.instance import AgentInstance
from stenolog.agent.loop import AgentLoop
from stenolog.agent.scheduler import CLOSING_TEXT
from stenolog.agent.threads import cancel_and_wait, start_task
from stenolog.agent.turn import HISTORY_CHANGED_TEXT
from stenolog.agent.turn_events import (
    Answer,
    Event,
    InboundMessage,
    MessageStored,
    may_run_again,
)
from stenolog.channels.channel import Destination, IncomingMessage
from stenolog.channels.claims import Claims, register_name
from stenolog.channels.delivery import Delivery
from stenolog.errors import (
    AnswerUnknown,
    ContextTooSmall,
    ModelRefused,
    ModelUnavailable,
    OnceConflict,
    StenologError,
    StoreClosed,
    StoreUnavailable,
    UnsupportedFormat,
    UsageError,
)
from stenolog.sessions.chat_marks import MOVE_FIELD
from stenolog.sessions.keys import key_for
from stenolog.stores.base import find_info

# --- moving a chat to another session ------------------------------------------------------------
# After /new, /resume and /fork, a chat continues in another session.
# The moves are stored in the meta of the chat's first session, its root. If an app sends an old
# message again after a move, the message belongs to the session before the move. To find that
# session, each move records the message number of its command.


_MAX_EARLIER_MOVES: Final = 50
"""Maximum number of earlier moves that are stored."""
_logger = logging.getLogger("stenolog")


class ChatMove(Struct, frozen=True, kw_only=True):
    """The move of a chat from session `before` to session `key`.

    `number` is the message number of the command that moved the chat.
    """

    key: Annotated[str, Meta(min_length=1)]
    before: Annotated[str, Meta(min_length=1)]
    chat: str = ""
    number: int = 0
    earlier: tuple[tuple[int, str], ...] = ()
    """Earlier moves of this chat: message number of the command, and session before the move."""

    @property
    def all_moves(self) -> tuple[tuple[int, str], ...]:
        """Earlier moves and this move, oldest first."""
        return (*self.earlier, (self.number, self.before))


def find_session_key(
    root_key: str, last_move: ChatMove | None, message: IncomingMessage
) -> str | None:
    """Return the session key for a message, or None for a command that was already executed."""
    if last_move is None:
        return root_key
    if not message.message_number or not last_move.number or (message.chat or "") != last_move.chat:
        return last_move.key
    for number, before in last_move.all_moves:
        if message.message_number == number:
            return None
        if message.message_number < number:
            return before
    return last_move.key


def read_move(meta: Mapping[str, Any]) -> ChatMove | None:
    """Return the last move of a chat from the meta of its root session, or None."""
    stored_move = meta.get(MOVE_FIELD)
    if not isinstance(stored_move, Mapping):
        return None
    # If other fields are damaged, `key` and `before` are enough to find the chat's last session.
    for fields in (stored_move, {name: stored_move.get(name) for name in ("key", "before")}):
        with suppress(msgspec.ValidationError):
            return msgspec.convert(fields, ChatMove)
    return None


# --- register -------------------------------------------------------------------------------------
# Messages of webhooks have ids but no numbers, so the register assigns a number to each message.
# A message that is sent again keeps its number.
# The number shows whether a repeated message came before or after the chat moved to a new session.
# The log contains no commands, so a session of the claims store lists the ids in order of arrival.


_REJECTED_PREFIX: Final = "undone-"
"""Prefix of the meta field that records that a command was rejected before it ran."""


async def assign_number(claims: Claims, register_session: str, message: IncomingMessage) -> int:
    """Return the number of a message in its chat, or 0 if the number cannot be stored.

    `register_session`: the chat's session in the claims store, from `register_name`.
    Raises OnceConflict if another message had this id.
    """
    content = _digest(message.sender, message.text)
    try:
        return await claims.assign_number(register_session, _digest(message.id), content)
    except UsageError:
        raise
    except StenologError as error:
        # The message is accepted without a number.
        _logger.warning(
            "could not store the id of message %r; if it is sent again, it may be answered "
            "twice: %s",
            message.id,
            error,
        )
        return 0


async def begin_command(claims: Claims, register_session: str, message: IncomingMessage) -> bool:
    """Record that a command is started, and return whether to execute it.

    Return False if a process has already started the command and did not reject it. After a crash,
    a command is not executed again, because it may have had an effect.
    """
    if not message.message_number:
        return True
    try:
        # Each attempt uses the same key with different content, so only one process succeeds.
        once = f"{_digest(message.id)}-begun"
        await claims.assign_number(register_session, once, secrets.token_hex(8))
    except OnceConflict:
        rejection_field = f"{_REJECTED_PREFIX}{message.message_number}"
        if not (await claims.read_saved(register_session)).get(rejection_field):
            return False
        await claims.save(register_session, **{rejection_field: None})
    except UsageError:
        raise
    except StenologError as error:
        _logger.warning(
            "could not store that command %r was run; if it is sent again, it runs again: %s",
            message.id,
            error,
        )
    return True


async def record_rejection(claims: Claims, register_session: str, message: IncomingMessage) -> None:
    """Record that a command was rejected, so that it runs when the app sends it again."""
    if message.message_number:
        with suppress(StenologError):
            await claims.save(
                register_session, **{f"{_REJECTED_PREFIX}{message.message_number}": True}
            )


def _digest(*texts: str) -> str:
    # The register contains digests instead of ids and texts.
    content = "\0".join(texts).encode("utf-8", "surrogatepass")
    return hashlib.sha256(content).hexdigest()


# --- inbox ----------------------------------------------------------------------------------------


_SILENT_ANSWERS: Final = (CLOSING_TEXT, TAKEN_OVER_TEXT)
"""Answers that are not sent to the user, because the resumed turn's answer is delivered later."""
_NOT_SAVED_TEXT: Final = "Your message is not saved yet."
_NOT_KEPT_TEXT: Final = f"({HISTORY_CHANGED_TEXT[0].upper()}{HISTORY_CHANGED_TEXT[1:]}.)"
_REASON_TEXTS: Final[Mapping[type[StenologError], str]] = {
    AnswerUnknown: "the earlier answer to this message is damaged, so please write it again",
    ContextTooSmall: "the conversation is too long for the model",
    ModelRefused: "the model did not accept the request",
    ModelUnavailable: "the model cannot be reached right now",
    UnsupportedFormat: "the model cannot read the earlier messages of this conversation",
    StoreUnavailable: "storage is not available right now",
}
_INTERNAL_ERROR_TEXT: Final = "Your message could not be answered because of an internal error."
_MAX_CRASHES: Final = 3
"""Number of crashes after which a message is not processed again, and its sender is notified."""
_MAX_REMEMBERED_IDS: Final = 1_000
_TYPING_SECONDS: Final = 4.0
"""Seconds between typing indicators, which apps show for about this long."""


class PendingMessage(Struct, frozen=True, kw_only=True):
    """A message that is being processed.

    If the inbox has no delivery, `answer` raises UsageError for a message that can never be stored.
    """

    durable: asyncio.Future[bool]
    """Whether the app may forget the message. If False, the app must send the message again."""
    answer: "asyncio.Task[Answer | None]"
    """Task whose result is the answer, or None if no answer is due."""


class Inbox:
    """The processing of one channel's messages: storing, answering, delivering."""

    def __init__(
        self,
        loop: AgentLoop,
        *,
        channel: str,
        claims: Claims,
        delivery: Delivery | None = None,
        max_messages: int = 256,
    ) -> None:
        """Create the inbox of a channel.

        `claims` assigns message numbers if the app sends none. Without a `delivery`, answers are
        returned to the caller. `max_messages`: maximum number of messages that are processed at
        once.
        """
        self._loop = loop
        self._channel = channel
        self._delivery = delivery
        self._claims = claims
        self._max_messages = max_messages
        self._chat_locks: WeakValueDictionary[tuple[str | None, str], asyncio.Lock] = (
            WeakValueDictionary()
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        self._recovering: set[asyncio.Task[Any]] = set()
        self._crashes: dict[str, int] = {}
        """Number of crashes during the processing of each message, by message id."""
        self._failed_ids: set[str] = set()
        """Ids of messages that were neither stored nor answered."""

    @property
    def is_full(self) -> bool:
        """Whether the maximum number of messages is being processed."""
        return len(self._tasks) >= self._max_messages

    async def wait_for_capacity(self) -> None:
        """Wait until another message can be accepted."""
        while self.is_full:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    def accept(self, message: IncomingMessage) -> PendingMessage:
        """Start to store and answer a message. Messages of one session keep their order."""
        durable: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        task = start_task(self._process_message(message, durable), self._tasks)
        return PendingMessage(durable=durable, answer=task)

    async def send_notice(self, origin: Destination, text: str) -> None:
        """Send a text that is not an answer. Raises nothing."""
        if self._delivery is not None:
            await self._delivery.send_notice(origin, text)

    def recover_answers(self) -> None:
        """Start to deliver answers that a killed process did not deliver."""
        if self._delivery is not None:
            # A separate task completes the sending even if the caller is cancelled.
            start_task(self._delivery.recover_answers(), self._recovering)

    async def drain(self, wait_seconds: float) -> None:
        """Wait at most `wait_seconds` until all messages are answered and answers delivered."""
        if self._delivery is not None:
            self._delivery.stop_recovering()
        if tasks := self._tasks | self._recovering:
            await asyncio.wait(tasks, timeout=max(wait_seconds, 0))

    async def close(self) -> None:
        """Cancel running tasks. Complete answers stay in the log."""
        await cancel_and_wait(self._tasks | self._recovering)

    # --- one message -------------------------------------------------------------------------

    async def _process_message(
        self, message: IncomingMessage, durable: asyncio.Future[bool]
    ) -> Answer | None:
        try:
            return await self._store_and_answer(message, durable)
        except StoreClosed:
            pass  # the app sends the message again at the next start
        except UsageError as error:
            # The message can never be stored, however often the app sends it.
            _set_durable(durable, True)
            if self._delivery is None:
                raise
            await self._notify_sender(message, f"Your message cannot be accepted: {error}.")
        except StenologError as error:
            _logger.warning("%s: a message was not stored: %s", self._channel, error)
        except Exception:
            _logger.exception("%s: a message could not be answered", self._channel)
            if (durable.done() and durable.result()) or self._crashes_too_often(message):
                # The app will not send the message again, so notify the sender.
                _set_durable(durable, True)
                await self._notify_sender(message, _INTERNAL_ERROR_TEXT)
        finally:
            _set_durable(durable, False)
        return None

    async def _store_and_answer(
        self, message: IncomingMessage, durable: asyncio.Future[bool]
    ) -> Answer | None:
        instance = self._loop.registry.route(self._channel, message.sender)
        base_key = self._key_for(message, thread=message.thread)
        task = _MessageTask(self, message, durable)
        command = commands.parse_command(message.text)
        # /stop does not wait, because it ends the turn that other messages wait for.
        is_stop = command is not None and command.name == "stop"
        lock = self._chat_locks.setdefault((instance.id, base_key), asyncio.Lock())
        async with nullcontext() if is_stop else lock:
            earlier_answer = await self._pass_to_agent(instance, base_key, message, task)
        answer = earlier_answer or await task.wait_for_answer()
        if isinstance(answer.error, OnceConflict):
            raise answer.error
        if answer.error is not None or answer.outcome == "failed":
            _logger.warning("%s: %r was not answered: %s", self._channel, answer.key, answer.text)
        is_durable = answer.outcome != "failed" or answer.saved
        _set_durable(durable, is_durable)
        if not is_durable and not self._is_first_failure(message):
            return answer  # the user was notified at the first failure
        if self._delivery is not None and message.origin is not None:
            await self._delivery.deliver(instance, answer, text_for_user(answer), message.origin)
        return answer

    async def _pass_to_agent(
        self, instance: AgentInstance, base_key: str, message: IncomingMessage, task: "_MessageTask"
    ) -> Answer | None:
        """Pass a message to the agent, and wait until the message is durable or answered.

        If the message is a command that was executed before, return an Answer without calling the
        agent. If it moved the chat and the move cannot be stored, return an Answer with the error.
        Otherwise return None.
        """
        root_key = await self._loop.run(instance.resolve_key, base_key)
        register_session = register_name(instance.id, root_key)
        if not message.message_number:
            number = await assign_number(self._claims, register_session, message)
            message = replace(message, message_number=number)
        last_move = await self._read_last_move(instance, root_key)
        key = find_session_key(root_key, last_move, message)
        # The log has the ids of messages, but no commands.
        is_command = commands.parse_command(message.text) is not None
        if key is None or (
            is_command and not await begin_command(self._claims, register_session, message)
        ):
            # Another process may have executed the command and moved the chat in the meantime.
            last_move = await self._read_last_move(instance, root_key)
            current_key = root_key if last_move is None else last_move.key
            return Answer(key=current_key, text="", outcome="again")
        inbound_message = InboundMessage(
            key=key,
            content=message.text,
            id=message.id,
            origin=message.origin,
            # All threads of a sender, or all members of a group, have the same sender.
            sender=self._key_for(message, thread=None),
        )
        try:
            answer = await task.start(self._loop, inbound_message, instance)
        except StenologError:
            if is_command:
                await record_rejection(self._claims, register_session, message)
            raise
        if is_command and answer is not None and may_run_again(answer):
            await record_rejection(self._claims, register_session, message)
        if answer is not None and answer.outcome == "command" and answer.key != key:
            try:
                await self._record_move(instance, root_key, message, key, answer.key)
            except StenologError as error:
                # The chat stays in its session, so its user must send the command again.
                return replace(answer, key=key, outcome="failed", error=error)
        return None

    async def _read_last_move(self, instance: AgentInstance, root_key: str) -> ChatMove | None:
        """Return the last move of a chat, or None. Raises errors of the store."""
        # Errors are raised: without the last move, the message would go into the wrong session.
        info = await self._loop.run(find_info, instance.store, root_key)
        return None if info is None else read_move(info.meta)

    async def _record_move(
        self,
        instance: AgentInstance,
        root_key: str,
        message: IncomingMessage,
        old_key: str,
        new_key: str,
    ) -> None:
        """Store that the command in this message moved the chat. Raises errors of the store."""
        last_move = await self._read_last_move(instance, root_key)
        chat = message.chat or ""
        is_same_chat = last_move is not None and last_move.chat == chat and last_move.number
        earlier = last_move.all_moves[-_MAX_EARLIER_MOVES:] if last_move and is_same_chat else ()
        move = ChatMove(
            key=new_key, before=old_key, chat=chat, number=message.message_number, earlier=earlier
        )
        fields = {MOVE_FIELD: msgspec.to_builtins(move)}
        await self._loop.run(instance.store.set_meta, root_key, **fields)

    def _key_for(self, message: IncomingMessage, *, thread: str | None) -> str:
        scope = message.scope
        return key_for(self._channel, message.sender, chat=message.chat, thread=thread, scope=scope)

    def _crashes_too_often(self, message: IncomingMessage) -> bool:
        """Count a crash while this message was processed; return whether to stop retrying."""
        crash_count = self._crashes.pop(message.id, 0) + 1
        if crash_count >= _MAX_CRASHES:
            return True
        self._crashes[message.id] = crash_count
        while len(self._crashes) > _MAX_REMEMBERED_IDS:
            del self._crashes[next(iter(self._crashes))]
        return False

    def _is_first_failure(self, message: IncomingMessage) -> bool:
        """Record that a message was not answered; return whether this is the first time."""
        is_first = message.id not in self._failed_ids
        if len(self._failed_ids) >= _MAX_REMEMBERED_IDS:
            self._failed_ids.clear()
        self._failed_ids.add(message.id)
        return is_first

    async def _notify_sender(self, message: IncomingMessage, text: str) -> None:
        if message.origin is not None:
            await self.send_notice(message.origin, text)

    async def keep_typing(self, origin: Destination) -> None:
        """Show that an answer is being written, until this task is cancelled."""
        while self._delivery is not None:
            await self._delivery.channel.show_typing(origin)
            await asyncio.sleep(_TYPING_SECONDS)


class _MessageTask:
    """The agent's processing of one message."""

    def __init__(
        self, inbox: Inbox, message: IncomingMessage, durable: asyncio.Future[bool]
    ) -> None:
        self._inbox = inbox
        self._message = message
        self._durable = durable
        self._task: asyncio.Task[Answer] | None = None
        self._typing: asyncio.Task[None] | None = None

    async def start(
        self, loop: AgentLoop, inbound: InboundMessage, instance: AgentInstance
    ) -> Answer | None:
        """Start processing.

        Return the answer if it is ready before the message is durable, else None.
        """
        coroutine = loop.handle(inbound, on_event=self._on_event, agent=instance.id)
        self._task = asyncio.create_task(coroutine)
        try:
            futures: list[asyncio.Future[Any]] = [self._task, self._durable]
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            return self._task.result() if self._task.done() else None
        except BaseException:
            await self._cancel_tasks()
            raise

    async def wait_for_answer(self) -> Answer:
        """Wait for the answer and return it. `start` must have been called."""
        assert self._task is not None, "`start` was called before"
        try:
            return await self._task
        finally:
            await self._cancel_tasks()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, MessageStored):
            _set_durable(self._durable, True)
            if self._message.origin is not None and self._typing is None:
                self._typing = asyncio.create_task(self._inbox.keep_typing(self._message.origin))

    async def _cancel_tasks(self) -> None:
        await cancel_and_wait(task for task in (self._typing, self._task) if task is not None)


def text_for_user(answer: Answer) -> str:
    """Return the text for the user, which may be empty.

    An error becomes one plain sentence. The details are only in the log, because they may contain
    host and file names of the operator.
    """
    text = answer.text
    if answer.error is not None or answer.outcome == "failed":
        if text in _SILENT_ANSWERS:
            return ""
        saved_text = "Your message is saved." if answer.saved else _NOT_SAVED_TEXT
        reasons = (
            reason
            for error_type, reason in _REASON_TEXTS.items()
            if isinstance(answer.error, error_type)
        )
        return f"I could not answer: {next(reasons, 'something went wrong')}. {saved_text}"
    if answer.outcome == "answered" and not text.strip():
        text = "(The model returned an empty answer.)"
    if text and not answer.saved:
        text += f"\n\n{_NOT_KEPT_TEXT}"
    return text


def _set_durable(future: asyncio.Future[bool], is_durable: bool) -> None:
    if not future.done():
        future.set_result(is_durable)
