"""Telegram: a bot that receives updates by long polling, with python-telegram-bot's `Bot`.

An update is confirmed only when its message is durable; the library's own polling cannot do that.
If several gateways share a database, only the gateway that holds the claim polls. The token never
appears in a log or an error.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal, cast

import httpx
from telegram import Bot, Message, Update
from telegram.constants import ChatAction, ChatType, MessageLimit
from telegram.error import (
    BadRequest,
    ChatMigrated,
    Conflict,
    Forbidden,
    InvalidToken,
    NetworkError,
    RetryAfter,
    TelegramError,
)
from telegram.request import HTTPXRequest

from stenolog.agent.threads import cancel_and_wait, start_task
from stenolog.channels.channel import (
    AllowList,
    Destination,
    IncomingMessage,
    MaybeSent,
    NotSent,
    Undeliverable,
    is_local,
    uses_tls,
)
from stenolog.channels.claims import Claims
from stenolog.channels.inbox import Inbox
from stenolog.errors import StenologError, StoreBusy
from stenolog.settings.values import TelegramSettings


class UpdateTracker:
    """The states of Telegram's updates: open, durable, or to be fetched again. Does no I/O.

    Telegram forgets the updates below the `offset` of a request. Therefore the offset never
    passes an update that is not durable, even if later updates are durable.
    """

    def __init__(self) -> None:
        self._states: dict[int, Literal["open", "durable", "retry"]] = {}
        self.next_number: int | None = None
        """First update number to request; None if no update is known yet."""

    @property
    def has_open_updates(self) -> bool:
        """Whether an update is still open or must be fetched again."""
        return any(state != "durable" for state in self._states.values())

    def add_updates(self, update_numbers: Iterable[int]) -> list[int]:
        """Return the numbers of the updates to process now, and mark these updates as open."""
        received_numbers = sorted(set(update_numbers))
        highest_number = max(received_numbers, default=0)
        for number, state in self._states.items():
            # The server no longer has an update that is missing below a received number.
            if state == "retry" and number < highest_number and number not in received_numbers:
                self._states[number] = "durable"
        new_numbers = []
        for number in received_numbers:
            if self._states.get(number, "retry") == "retry" and number >= (self.next_number or 0):
                self._states[number] = "open"
                new_numbers.append(number)
        self._advance_next_number()
        return new_numbers

    def settle_update(self, update_number: int, *, durable: bool) -> None:
        """Record that an update is durable, or must be fetched again."""
        self._states[update_number] = "durable" if durable else "retry"
        self._advance_next_number()

    def _advance_next_number(self) -> None:
        for number in sorted(self._states):
            if self._states[number] != "durable":
                self.next_number = number
                return
            del self._states[number]
            self.next_number = max(number + 1, self.next_number or 0)


CHANNEL_NAME: Final = "telegram"
_DEFAULT_SERVER_URL: Final = "https://api.telegram.org"
_CONFLICT_TEXT: Final = "another program receives the messages of this bot; waiting until it stops"
_TEXT_ONLY_NOTICE: Final = "I can only read text messages."
_LONG_POLL_SECONDS: Final = 25
"""Seconds that the server keeps a request for updates open."""
_MAX_PAUSE_SECONDS: Final = 60.0
"""Maximum seconds between two attempts of a failing request, unless Telegram asks for more."""
_URL_LOGGERS: Final = ("httpx", "telegram.Bot", "telegram.request.BaseRequest")
"""Loggers of libraries that log complete URLs, which contain the token."""

_logger = logging.getLogger("stenolog")


class _TokenRejected(Exception):
    """Telegram rejected the bot's token, so the bot can never work."""


class Telegram:
    """A Telegram bot as a channel."""

    name: Final = CHANNEL_NAME
    max_length: Final = int(MessageLimit.MAX_TEXT_LENGTH)
    sends_replies: Final = True

    def __init__(
        self, settings: TelegramSettings, token: str, *, claims: Claims, pause: float = 2.0
    ) -> None:
        """Create the bot.

        `pause`: seconds before a retry, and between checks of another gateway's claim.
        """
        self._token = token
        self._claims = claims
        self._scope = settings.scope
        self._allowed = AllowList(settings.allow, setting="channels.telegram.allow")
        self._pause = pause
        bot_id = re.match(r"[0-9]+(?=:)", token)
        self._claim_name = f"{CHANNEL_NAME}-{bot_id[0]}" if bot_id else CHANNEL_NAME
        self._notice_tasks: set[asyncio.Task[bool]] = set()
        """Tasks that send a text that is not an answer."""
        for name in _URL_LOGGERS:
            logging.getLogger(name).addFilter(self._is_without_token)
        server_url = settings.base_url.rstrip("/") or _DEFAULT_SERVER_URL
        self._bot = Bot(
            token,
            base_url=f"{server_url}/bot",
            base_file_url=f"{server_url}/file/bot",
            request=_make_http_client(server_url, max_connections=64),
            get_updates_request=_make_http_client(server_url, max_connections=1),
        )

    # --- receiving ---------------------------------------------------------------------------

    async def run(self, inbox: Inbox) -> None:
        """Receive messages until the task is cancelled or the token is rejected."""
        while True:
            try:
                await self._poll_if_unclaimed(inbox)
            except StoreBusy:
                await asyncio.sleep(self._pause)
            except StenologError as error:
                _logger.warning("telegram: %s", error)
                await asyncio.sleep(self._pause)
            except _TokenRejected:
                break
        _logger.error(
            "Telegram rejected the bot's token, so the bot is off; correct the token and start "
            "the gateway again"
        )

    async def _poll_if_unclaimed(self, inbox: Inbox) -> None:
        """Poll while this gateway holds the claim. Raises StoreBusy, _TokenRejected."""
        polling_task: asyncio.Task[None] | None = None

        def on_lost() -> None:
            if polling_task is not None:
                polling_task.cancel()

        async with self._claims.hold_claim(self._claim_name, wait=False, on_lost=on_lost):
            polling_task = asyncio.create_task(self._poll(inbox))
            try:
                await asyncio.wait([polling_task])
            finally:
                await cancel_and_wait([polling_task])
            if not polling_task.cancelled():
                polling_task.result()

    async def _poll(self, inbox: Inbox) -> None:
        await self._call_with_retries(self._bot.initialize)
        inbox.recover_answers()
        settle_tasks: set[asyncio.Task[Any]] = set()
        try:
            tracker = UpdateTracker()
            while True:
                await inbox.wait_for_capacity()
                get_updates = partial(
                    self._bot.get_updates,
                    offset=tracker.next_number,
                    timeout=_LONG_POLL_SECONDS,
                    allowed_updates=["message"],
                )
                updates: Sequence[Update] = await self._call_with_retries(get_updates)
                new_numbers = set(tracker.add_updates(update.update_id for update in updates))
                for update in updates:
                    if update.update_id in new_numbers:
                        durable = self._accept_update(update, inbox)
                        start_task(
                            _settle_when_durable(durable, update.update_id, tracker), settle_tasks
                        )
                if settle_tasks:
                    # The wait is limited, because messages of other chats may arrive.
                    await asyncio.wait(settle_tasks, timeout=self._pause / 2)
                if tracker.has_open_updates and not new_numbers:
                    # The server would return the unconfirmed updates immediately, so wait first.
                    await asyncio.sleep(self._pause)
        finally:
            await cancel_and_wait(settle_tasks)

    async def _call_with_retries(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Retry a call until it succeeds. Raises _TokenRejected."""
        pause, reported_text = self._pause, ""
        while True:
            try:
                return await call()
            except (InvalidToken, Forbidden):
                raise _TokenRejected from None
            except TelegramError as error:
                error_text = self._error_text(error)
                if isinstance(error, Conflict):
                    error_text = _CONFLICT_TEXT
                if error_text != reported_text:
                    reported_text = error_text
                    _logger.warning("telegram: %s", error_text)
                delay = _retry_after_seconds(error) if isinstance(error, RetryAfter) else pause
                if not isinstance(error, Conflict):
                    pause = min(2 * pause, _MAX_PAUSE_SECONDS)
            await asyncio.sleep(delay)

    def _accept_update(self, update: Update, inbox: Inbox) -> asyncio.Future[bool] | None:
        """Start to process an update; return None if the update is not for the agent.

        The result of the future is whether the message is durable.
        """
        message = update.message
        user = None if message is None else message.from_user
        if message is None or user is None or user.is_bot:
            return None
        # guard: telegram-allow-list
        if not self._allowed.allows(str(user.id), user.username or ""):
            return None
        text = message.text or message.caption or ""
        command, at_sign, bot = text.partition(" ")[0].partition("@")
        if command.startswith("/") and at_sign and bot.casefold() != self._bot.username.casefold():
            return None
        if not text.strip():
            return start_task(_notify_text_only(inbox, _origin_of(message)), self._notice_tasks)
        if command == "/start":
            text = "/help"
        is_private = message.chat.type == ChatType.PRIVATE
        thread = message.message_thread_id if message.is_topic_message else None
        incoming = IncomingMessage(
            sender=str(user.id),
            text=text,
            id=f"{CHANNEL_NAME}-{message.chat.id}-{message.message_id}",
            chat=None if is_private else str(message.chat.id),
            thread=None if thread is None else str(thread),
            scope=self._scope,
            origin=_origin_of(message),
            message_number=message.message_id,
        )
        return inbox.accept(incoming).durable

    # --- sending -----------------------------------------------------------------------------

    async def send(self, origin: Destination, text: str) -> None:
        """Send one message. Raises NotSent, MaybeSent, Undeliverable."""
        send = partial(self._bot.send_message, text=text, message_thread_id=origin.get("thread"))
        try:
            try:
                await send(chat_id=cast(int, origin.get("chat")))
            except ChatMigrated as error:
                # A group that became a supergroup has a new id. The message was not sent.
                await send(chat_id=error.new_chat_id)
        except RetryAfter as error:
            raise NotSent(self._error_text(error), pause=_retry_after_seconds(error)) from None
        except InvalidToken as error:
            raise NotSent(self._error_text(error)) from None
        except (BadRequest, Forbidden, ChatMigrated) as error:
            raise Undeliverable(self._error_text(error)) from None
        except TelegramError as error:
            if isinstance(error, NetworkError) and isinstance(error.__cause__, _NOT_SENT_ERRORS):
                raise NotSent(self._error_text(error)) from None
            raise MaybeSent(self._error_text(error)) from None

    async def show_typing(self, origin: Destination) -> None:
        """Show that an answer is being written. Raises nothing."""
        with suppress(TelegramError):
            await self._bot.send_chat_action(
                chat_id=cast(int, origin.get("chat")),
                action=ChatAction.TYPING,
                message_thread_id=origin.get("thread"),
            )

    async def close(self) -> None:
        """Close connections. A second call does nothing."""
        await cancel_and_wait(self._notice_tasks)
        await self._bot.shutdown()
        for name in _URL_LOGGERS:
            logging.getLogger(name).removeFilter(self._is_without_token)

    def _is_without_token(self, record: logging.LogRecord) -> bool:
        return self._token not in record.getMessage()

    def _error_text(self, error: Exception) -> str:
        return str(error).replace(self._token, "***")


_NOT_SENT_ERRORS: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Errors that occur before the message is sent."""


def _make_http_client(server_url: str, *, max_connections: int) -> HTTPXRequest:
    return HTTPXRequest(
        connection_pool_size=max_connections,
        connect_timeout=10.0,
        read_timeout=30.0,
        write_timeout=30.0,
        pool_timeout=30.0,
        httpx_kwargs={
            "trust_env": not is_local(server_url),
            "verify": uses_tls(server_url),  # guard: telegram-tls
        },
    )


def _origin_of(message: Message) -> dict[str, Any]:
    origin: dict[str, Any] = {"channel": CHANNEL_NAME, "chat": message.chat.id}
    if message.is_topic_message and message.message_thread_id is not None:
        origin["thread"] = message.message_thread_id
    return origin


def _retry_after_seconds(error: RetryAfter) -> float:
    delay = error.retry_after
    return delay.total_seconds() if isinstance(delay, timedelta) else float(delay)


async def _notify_text_only(inbox: Inbox, origin: Destination) -> bool:
    await inbox.send_notice(origin, _TEXT_ONLY_NOTICE)
    return True


async def _settle_when_durable(
    durable: asyncio.Future[bool] | None, update_number: int, tracker: UpdateTracker
) -> None:
    """Wait for the result of an update, and record whether the update is durable."""
    # The wait is shielded: when polling stops, messages that have arrived are still processed.
    tracker.settle_update(update_number, durable=durable is None or await asyncio.shield(durable))
