"""The inbox of a channel: stores the messages of an app, and delivers the agent's answers.

Messages of one chat are stored in the order in which they arrived. Chats do not wait for each
other, and only /stop is processed out of order. A message becomes durable before the agent answers
it. An app that resends unconfirmed messages may forget a message only when the message is durable.
"""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Annotated, Any, Final, TypeVar
from weakref import WeakValueDictionary

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from stenolog.agent import commands
from stenolog.agent.instance import AgentInstance
from stenolog.agent.loop import AgentLoop
from stenolog.agent.scheduler import CLOSING, TAKEN_OVER
from stenolog.agent.threads import cancel_and_wait
from stenolog.agent.turn_events import Answer, Event, InboundMessage, MessageStored, SaveFailed
from stenolog.channels.channel import AcceptedMessage, Destination, IncomingMessage
from stenolog.channels.claims import Claims, register_name
from stenolog.channels.delivery import Delivery
from stenolog.errors import (
    ContextTooSmall,
    ModelRefused,
    ModelUnavailable,
    NoSuchSession,
    OnceConflict,
    StenologError,
    StoreClosed,
    StoreUnavailable,
    UsageError,
)
from stenolog.sessions.keys import Origin, key_for, owner_for

# --- going on -------------------------------------------------------------------------------------
# The session in which a chat continues after /new, /resume and /fork, stored in the meta of the
# chat's first session. A message that an app sends again after a move belongs to the session in
# which it was first sent. So the number of the command in its chat is stored, too.


FIELD: Final = "goes_on_in"
_MAX_EARLIER: Final = 50
"""Maximum number of earlier moves that are stored."""
_REMEMBERED_CHATS: Final = 10_000
_logger = logging.getLogger("stenolog")


class ChatMove(Struct, frozen=True, kw_only=True):
    """The move of a chat to another session, with the command's number and the earlier session."""

    key: Annotated[str, Meta(min_length=1)]
    before: Annotated[str, Meta(min_length=1)]
    chat: str = ""
    number: int = 0
    earlier: tuple[tuple[int, str], ...] = ()
    """Earlier moves of this chat: number of the command, and the session before the move."""


def session_of(root: str, last_move: ChatMove | None, arrival: IncomingMessage) -> str | None:
    """Return the session of a message, or None for a command that was already executed."""
    if last_move is None:
        return root
    if not arrival.number or not last_move.number or (arrival.chat or "") != last_move.chat:
        return last_move.key
    for number, before in (*last_move.earlier, (last_move.number, last_move.before)):
        if arrival.number == number:
            return None
        if arrival.number < number:
            return before
    return last_move.key


def _moves(last_move: ChatMove | None, chat: str) -> tuple[tuple[int, str], ...]:
    """Return the moves of a chat so far, oldest first."""
    if last_move is None or last_move.chat != chat or not last_move.number:
        return ()
    return (*last_move.earlier, (last_move.number, last_move.before))[-_MAX_EARLIER:]


class ChatSessions:
    """Sessions in which chats continue after /new, /resume and /fork.

    The moves are stored in the meta of the chat's first session. A message that an app sends again
    after a move belongs to the session before the move. So the number of the command is stored,
    too.
    """

    def __init__(self, loop: AgentLoop) -> None:
        self._loop = loop
        self._kept: dict[tuple[str | None, str], ChatMove] = {}
        """Moves that could not be stored."""

    async def session_of(
        self, instance: AgentInstance, root: str, arrival: IncomingMessage
    ) -> str | None:
        """Return the session of a message; `root` is the first session of its chat."""
        return session_of(root, await self._found(instance, root), arrival)

    async def current_session(self, instance: AgentInstance, root: str) -> str:
        """Return the session in which the chat continues now."""
        last_move = await self._found(instance, root)
        return root if last_move is None else last_move.key

    async def move(
        self, instance: AgentInstance, root: str, arrival: IncomingMessage, *, before: str, key: str
    ) -> None:
        """Record that the chat continues in another session from this message on."""
        chat = arrival.chat or ""
        earlier: tuple[tuple[int, str], ...] = ()
        with suppress(StenologError):  # this command was executed before
            earlier = _moves(await self._found(instance, root), chat)
        place = ChatMove(key=key, before=before, chat=chat, number=arrival.number, earlier=earlier)
        self._kept[instance.id, root] = place
        while len(self._kept) > _REMEMBERED_CHATS:
            del self._kept[next(iter(self._kept))]
        try:
            await self._loop.run(
                instance.store.set_meta, root, **{FIELD: msgspec.to_builtins(place)}
            )
        except StenologError as error:
            _logger.warning(
                "could not store which session %r continues in; a restart returns to the old one: "
                "%s",
                root,
                error,
            )
        else:
            del self._kept[instance.id, root]

    async def _found(self, instance: AgentInstance, root: str) -> ChatMove | None:
        return self._kept.get((instance.id, root)) or await self._stored(instance, root)

    async def _stored(self, instance: AgentInstance, root: str) -> ChatMove | None:
        try:
            return read_move((await self._loop.run(instance.store.info, root)).meta)
        except NoSuchSession:
            return None
        # Temporary errors are not caught: the message would be stored in the wrong session.


def read_move(meta: Mapping[str, Any]) -> ChatMove | None:
    """Return the move in a session's meta, or None."""
    stored = meta.get(FIELD)
    if not isinstance(stored, Mapping):
        return None
    # If details are damaged, the chat still continues in its newest session.
    for fields in (stored, {name: stored.get(name) for name in ("key", "before")}):
        with suppress(msgspec.ValidationError):
            return msgspec.convert(fields, ChatMove)
    return None


# --- register -------------------------------------------------------------------------------------
# Numbers for the messages of programs. A message that is sent again keeps its number. Programs send
# ids without numbers. Without a number, the session of a repeated message would be unknown after
# the chat moved to another session, and the log contains no commands. So the ids of a chat are
# stored in a session of the claims store, in the order of their arrival.


_UNDONE: Final = "undone-"
"""Prefix of the meta field of a command that was started and not executed."""


class MessageRegister:
    """Numbers for the messages of a channel whose app has no message numbers."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims

    async def number_of(self, instance: AgentInstance, root: str, arrival: IncomingMessage) -> int:
        """Return the number of a message in its chat, or 0 if the number cannot be stored.

        Raises OnceConflict if another message had this id.
        """
        content = _digest(arrival.sender, arrival.text)
        place = register_name(instance.id, root)
        try:
            return await self._claims.number_for(place, _digest(arrival.id), content)
        except UsageError:
            raise
        except StenologError as error:
            # Accept the message without a number, as if the log could not be written.
            _logger.warning(
                "could not store the id of a message in %r; if it is sent again, it may be "
                "answered twice: %s",
                root,
                error,
            )
            return 0

    async def begin(self, instance: AgentInstance, root: str, arrival: IncomingMessage) -> bool:
        """Return whether to execute a command: False if any process has started the command before.

        A command is not executed again after a crash, because it may have had an effect.
        """
        if not arrival.number:
            return True
        place = register_name(instance.id, root)
        try:
            # Each attempt has different content, so only one process succeeds.
            await self._claims.number_for(
                place, f"{_digest(arrival.id)}-begun", secrets.token_hex(8)
            )
        except OnceConflict:
            undone = f"{_UNDONE}{arrival.number}"
            if not (await self._claims.read_note(place)).get(undone):
                return False
            await self._claims.note(place, **{undone: None})
        except UsageError:
            raise
        except StenologError as error:
            _logger.warning(
                "could not store that a command in %r was run; if it is sent again, it runs "
                "again: %s",
                root,
                error,
            )
        return True

    async def undo(self, instance: AgentInstance, root: str, arrival: IncomingMessage) -> None:
        """Record that a command was rejected, so that it runs when the app sends it again."""
        if arrival.number:
            with suppress(StenologError):
                place = register_name(instance.id, root)
                await self._claims.note(place, **{f"{_UNDONE}{arrival.number}": True})


def _digest(*words: str) -> str:
    # An id or text becomes an idempotency key.
    content = "\0".join(words).encode("utf-8", "surrogatepass")
    return hashlib.sha256(content).hexdigest()


# --- inbox ----------------------------------------------------------------------------------------


T = TypeVar("T")

_QUIET: Final = (CLOSING, TAKEN_OVER)
"""Outcomes that send no text to the user, because the resumed turn's answer is delivered later."""
_EMPTY_ANSWER: Final = "(The model returned an empty answer.)"
_NOT_SAVED: Final = "This is not saved yet, because storage is not available right now."
_REASONS: Final[Mapping[type[StenologError], str]] = {
    ContextTooSmall: "the conversation is too long for the model",
    ModelRefused: "the model did not accept the request",
    ModelUnavailable: "the model cannot be reached right now",
    StoreUnavailable: "storage is not available right now",
}
_UNKNOWN: Final = "something went wrong"
_INTERNAL_ERROR: Final = "Your message could not be answered because of an internal error."
_MAX_CRASHES: Final = 3
_REMEMBERED: Final = 1_000
_TYPING: Final = 4.0
"""Seconds between typing indicators, which apps show for about this long."""


class PendingAnswer(AcceptedMessage, frozen=True, kw_only=True):
    """A message that is being processed, and its answer."""

    answer: "asyncio.Task[Answer | None]"
    """Future of the answer; its result is None if no answer is due.

    Without a delivery, the future raises UsageError for a message that can never be stored.
    """


class Inbox:
    """The processing of one channel's messages: storing, answering, delivering."""

    def __init__(
        self,
        loop: AgentLoop,
        *,
        channel: str,
        delivery: Delivery | None = None,
        register: MessageRegister | None = None,
        limit: int = 256,
    ) -> None:
        """Create the inbox of a channel.

        Without a `delivery`, answers are returned to the caller. `most`: maximum number of messages
        that are processed at once. `register`: assigns numbers, if the app has no numbers.
        """
        self._loop = loop
        self._channel = channel
        self._delivery = delivery
        self._register = register
        self._most = limit
        self._chat_sessions = ChatSessions(loop)
        self._chat_locks: WeakValueDictionary[tuple[str | None, str], asyncio.Lock] = (
            WeakValueDictionary()
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        self._recovering: set[asyncio.Task[Any]] = set()
        self._crashes: dict[str, int] = {}
        self._failed: set[str] = set()

    @property
    def full(self) -> bool:
        """Whether the maximum number of messages is being processed."""
        return len(self._tasks) >= self._most

    async def wait_for_capacity(self) -> None:
        """Wait until another message can be accepted."""
        while self.full:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    def accept(self, arrival: IncomingMessage) -> PendingAnswer:
        """Start to store and answer a message. Messages of one session keep their order."""
        durable: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        task = _start_task(self._process(arrival, durable), self._tasks)
        return PendingAnswer(durable=durable, answer=task)

    async def tell(self, origin: Destination, text: str) -> None:
        """Send a text that is not an answer. Raises nothing."""
        if self._delivery is not None:
            await self._delivery.tell(origin, text)

    def recover(self) -> None:
        """Start to deliver answers that a killed process did not deliver."""
        if self._delivery is not None:
            # Use a separate task, so that messages that are being sent still arrive if the caller
            # is cancelled.
            _start_task(self._delivery.recover(), self._recovering)

    async def drain(self, wait_seconds: float) -> None:
        """Wait at most `wait_seconds` until all messages are answered and answers delivered."""
        self.stop_recovering()
        if under_way := self._tasks | self._recovering:
            await asyncio.wait(under_way, timeout=max(wait_seconds, 0))

    def stop_recovering(self) -> None:
        """Stop recovering answers of a killed process; the next start continues."""
        if self._delivery is not None:
            self._delivery.stop_recovering()

    async def close(self) -> None:
        """Cancel running tasks. Complete answers stay in the log."""
        await cancel_and_wait(self._tasks | self._recovering)

    # --- one message -------------------------------------------------------------------------

    async def _process(
        self, arrival: IncomingMessage, durable: asyncio.Future[bool]
    ) -> Answer | None:
        try:
            return await self._answered(arrival, durable)
        except StoreClosed:
            return None  # the app sends the message again at the next start
        except UsageError as error:
            # The message can never be stored, however often the app sends it.
            _settle(durable, True)
            if self._delivery is None:
                raise
            await self._say(arrival, f"Your message cannot be accepted: {error}.")
            return None
        except StenologError as error:
            _logger.warning("%s: a message was not stored: %s", self._channel, error)
            return None
        except Exception:
            _logger.exception("%s: a message could not be answered", self._channel)
            if (durable.done() and durable.result()) or self._crashes_too_often(arrival):
                # The app does not send the message again.
                _settle(durable, True)
                await self._say(arrival, _INTERNAL_ERROR)
            return None
        finally:
            _settle(durable, False)

    async def _answered(
        self, arrival: IncomingMessage, durable: asyncio.Future[bool]
    ) -> Answer | None:
        instance = self._loop.registry.route(self._channel, arrival.sender)
        base = key_for(self._origin_of(arrival), scope=arrival.scope)
        task = _MessageTask(self, arrival, durable)
        command = commands.parse_command(arrival.text)
        if command is not None and command.name == "stop":
            # /stop does not wait, because it ends the turn that other messages wait for.
            earlier_answer = await self._begin(instance, base, arrival, task)
        else:
            order = self._chat_locks.setdefault((instance.id, base), asyncio.Lock())
            async with order:
                earlier_answer = await self._begin(instance, base, arrival, task)
        answer = earlier_answer or await task.answer()
        if answer.error is not None or answer.outcome == "failed":
            _logger.warning("%s: %r was not answered: %s", self._channel, answer.key, answer.text)
        if task.not_saved:
            _logger.warning("%s: %r is not stored: %s", self._channel, answer.key, task.not_saved)
        is_durable = answer.outcome != "failed" or answer.saved
        _settle(durable, is_durable)
        if not is_durable and not self._is_first(arrival):
            return answer  # the user was notified the first time
        if self._delivery is not None and arrival.origin is not None:
            text = text_for_user(answer)
            await self._delivery.deliver(instance, answer, text, arrival.origin)
        return answer

    async def _begin(
        self, instance: AgentInstance, base: str, arrival: IncomingMessage, task: "_MessageTask"
    ) -> Answer | None:
        """Pass a message to the agent, and wait until the message is durable or answered.

        Return an answer if the agent was not called, because the command was executed before.
        """
        root = await self._loop.run(instance.resolve_key, base)
        listed = None if arrival.number else self._register
        if listed is not None:
            arrival = replace(arrival, number=await listed.number_of(instance, root, arrival))
        key = await self._chat_sessions.session_of(instance, root, arrival)
        if commands.parse_command(arrival.text) is None:
            listed = None
        if key is None or (listed is not None and not await listed.begin(instance, root, arrival)):
            now = await self._chat_sessions.current_session(instance, root)
            return Answer(key=now, text="", outcome="again")
        inbound = InboundMessage(
            key=key,
            content=arrival.text,
            id=arrival.id,
            origin=arrival.origin,
            sender=owner_for(self._origin_of(arrival), scope=arrival.scope),
        )
        try:
            answer = await task.begin(self._loop, inbound, instance)
        except StenologError:
            if listed is not None:
                await listed.undo(instance, root, arrival)
            raise
        if answer is not None and answer.outcome == "command" and answer.key != key:
            await self._chat_sessions.move(instance, root, arrival, before=key, key=answer.key)
        return None

    def _origin_of(self, arrival: IncomingMessage) -> Origin:
        return Origin(
            channel=self._channel, sender=arrival.sender, chat=arrival.chat, thread=arrival.thread
        )

    def _crashes_too_often(self, arrival: IncomingMessage) -> bool:
        """Count a crash while a message was processed; return whether to give the message up."""
        crashes = self._crashes.pop(arrival.id, 0) + 1
        if crashes >= _MAX_CRASHES:
            return True
        self._crashes[arrival.id] = crashes
        while len(self._crashes) > _REMEMBERED:
            del self._crashes[next(iter(self._crashes))]
        return False

    def _is_first(self, arrival: IncomingMessage) -> bool:
        """Whether this is the first time that the message was neither stored nor answered."""
        known = arrival.id in self._failed
        if len(self._failed) >= _REMEMBERED:
            self._failed.clear()
        self._failed.add(arrival.id)
        return not known

    async def _say(self, arrival: IncomingMessage, text: str) -> None:
        if arrival.origin is not None:
            await self.tell(arrival.origin, text)

    async def keep_typing(self, origin: Destination) -> None:
        """Show that an answer is being written, until cancelled."""
        while self._delivery is not None:
            await self._delivery.channel.typing(origin)
            await asyncio.sleep(_TYPING)


class _MessageTask:
    """The agent's processing of one message."""

    def __init__(
        self, inbox: Inbox, arrival: IncomingMessage, durable: asyncio.Future[bool]
    ) -> None:
        self._inbox = inbox
        self._arrival = arrival
        self._durable = durable
        self._task: asyncio.Task[Answer] | None = None
        self._typing: asyncio.Task[None] | None = None
        self.not_saved = ""

    async def begin(
        self, loop: AgentLoop, inbound: InboundMessage, instance: AgentInstance
    ) -> Answer | None:
        """Start processing.

        Return the answer if it is ready before the message is durable, else None.
        """
        self._task = asyncio.create_task(
            loop.handle(inbound, on_event=self._heard, agent=instance.id)
        )
        try:
            waited: list[asyncio.Future[Any]] = [self._task, self._durable]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            return self._task.result() if self._task.done() else None
        except BaseException:
            await self._end()
            raise

    async def answer(self) -> Answer:
        """Return the answer, after `begin`."""
        assert self._task is not None, "it was begun"
        try:
            return await self._task
        finally:
            await self._end()

    def _heard(self, event: Event) -> None:
        if isinstance(event, MessageStored):
            _settle(self._durable, True)
            if self._arrival.origin is not None and self._typing is None:
                self._typing = asyncio.create_task(self._inbox.keep_typing(self._arrival.origin))
        elif isinstance(event, SaveFailed):
            self.not_saved = event.text

    async def _end(self) -> None:
        await cancel_and_wait(task for task in (self._typing, self._task) if task is not None)


def text_for_user(answer: Answer) -> str:
    """Return the text for the user, which may be empty.

    An error becomes one plain sentence. The details are only in the log, because they may contain
    host and file names of the operator.
    """
    text = answer.text
    if answer.error is not None or answer.outcome == "failed":
        if text in _QUIET:
            return ""
        saved_text = "Your message is saved." if answer.saved else _NOT_SAVED
        return f"I could not answer: {_reason(answer.error)}. {saved_text}"
    if answer.outcome == "answered" and not text.strip():
        text = _EMPTY_ANSWER
    if text and not answer.saved:
        text += f"\n\n({_NOT_SAVED})"
    return text


def _reason(error: StenologError | None) -> str:
    return next((reason for kind, reason in _REASONS.items() if isinstance(error, kind)), _UNKNOWN)


def _start_task(work: Coroutine[Any, Any, T], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[T]:
    """Start a task and keep it in `tasks` until it ends."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


def _settle(durable: asyncio.Future[bool], is_durable: bool) -> None:
    if not durable.done():
        durable.set_result(is_durable)
