"""All configured channels, started and closed together by the daemon."""

import asyncio
import logging
from itertools import product
from typing import TYPE_CHECKING, Any

from starlette.routing import Route

from stenolog.agent.loop import AgentLoop
from stenolog.agent.threads import cancel_and_wait
from stenolog.agent.turn_events import Answer
from stenolog.channels.channel import Channel
from stenolog.channels.claims import Claims
from stenolog.channels.delivery import Delivery
from stenolog.channels.inbox import Inbox
from stenolog.channels.webhook import Webhook, webhook_routes
from stenolog.errors import StenologError, UsageError, install_command
from stenolog.sessions.folders import CHANNELS
from stenolog.settings.fields import MIN_SECRET_LENGTH
from stenolog.settings.values import Settings
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store

if TYPE_CHECKING:
    from stenolog.channels.telegram import Telegram

_logger = logging.getLogger("stenolog")


class Channels:
    """The configured chat apps and webhooks.

    The daemon calls `start`, then resumes turns with the agent and passes each answer to `deliver`.
    At the end the daemon calls `drain` and `stop_sending`, closes the agent, and calls `close`.
    """

    def __init__(self, loop: AgentLoop, settings: Settings, *, pause: float = 2.0) -> None:
        """Create the channels. An event loop must be running.

        `pause`: as in `Telegram`. Raises UsageError if a secret is missing or too short, or if the
        Telegram library is not installed.
        """
        self._loop = loop
        self._settings = settings
        self._tasks: list[asyncio.Task[Any]] = []
        self._channels: list[tuple[Channel, Inbox]] = []
        self._deliveries: list[Delivery] = []
        bot = settings.channels.telegram
        token = _read_secret(settings, bot.token, bot.token_env, "channels.telegram.token_env")
        webhook_secrets = {name: _read_webhook_secret(settings, name) for name in settings.webhooks}
        store = _open_claims_store(loop, settings) if token or webhook_secrets else None
        try:
            self._claims = Claims(store)
            webhooks = [
                Webhook(name, settings.webhooks[name], secret)
                for name, secret in webhook_secrets.items()
            ]
            self.routes: list[Route] = webhook_routes(
                [(webhook, self._set_up_channel(webhook)) for webhook in webhooks]
            )
            """Routes of the webhooks, for the gateway. The routes check signatures."""
            if token:
                self._set_up_channel(_make_telegram(settings, token, self._claims, pause))
        except BaseException:
            if store is not None:
                store.close()
            raise

    async def start(self) -> None:
        """Start to receive messages."""
        self._tasks += [asyncio.create_task(_run_channel(*setup)) for setup in self._channels]

    async def deliver(self, answer: Answer) -> None:
        """Deliver this answer, and all other unsent answers in its session. Raises nothing.

        The destinations are read from the log. An answer that a killed process had started to send
        is not sent again.
        """
        for instance, delivery in product(self._loop.registry, self._deliveries):
            try:
                await delivery.send_due(instance, answer.key)
            except StenologError as error:
                _logger.warning("an answer in %r was not sent: %s", answer.key, error)

    async def drain(self, *, wait_seconds: float) -> None:
        """Stop receiving, and wait at most `wait_seconds` for answers to be sent."""
        for delivery in self._deliveries:
            delivery.stop_recovering()
        tasks, self._tasks = self._tasks, []
        if await cancel_and_wait(tasks):
            raise asyncio.CancelledError
        await asyncio.gather(*(inbox.drain(wait_seconds) for _, inbox in self._channels))

    async def stop_sending(self) -> None:
        """Stop sending, and record unsent answers. The stores must still be open."""
        await asyncio.gather(*(delivery.stop_sending() for delivery in self._deliveries))

    async def close(self) -> None:
        """Cancel all remaining work, and close the channels. A second call does nothing."""
        await self.drain(wait_seconds=0)
        for channel, inbox in self._channels:
            await inbox.close()
            await channel.close()
        await self._claims.close()

    def _set_up_channel(self, channel: Channel) -> Inbox:
        delivery = None
        if channel.sends_replies:
            delivery = Delivery(self._loop, channel, self._claims)
            self._deliveries.append(delivery)
        inbox = Inbox(
            self._loop,
            channel=channel.name,
            delivery=delivery,
            claims=self._claims,
            max_messages=self._settings.gateway.max_turns,
        )
        self._channels.append((channel, inbox))
        return inbox


async def _run_channel(channel: Channel, inbox: Inbox) -> None:
    try:
        await channel.run(inbox)
    except Exception:
        _logger.exception("channel %s stopped after an error", channel.name)


def _make_telegram(settings: Settings, token: str, claims: Claims, pause: float) -> "Telegram":
    try:
        # Import the library only if a bot is configured.
        from stenolog.channels.telegram import Telegram
    except ImportError as error:
        raise UsageError(
            f"a Telegram bot needs `{install_command('telegram')}`: {error}"
        ) from error
    return Telegram(settings.channels.telegram, token, claims=claims, pause=pause)


def _open_claims_store(loop: AgentLoop, settings: Settings) -> Store | None:
    """Open the store for claims; return None if no other process shares the sessions."""
    store_place = loop.registry.agent().shared_place
    if store_place is None or not settings.channels.session_persistence:
        return None
    return open_store(store_place, namespace=CHANNELS)


def _read_webhook_secret(settings: Settings, name: str) -> str:
    hook, setting = settings.webhooks[name], f"webhooks.{name}.secret_env"
    secret = _read_secret(settings, hook.secret, hook.secret_env, setting)
    if len(secret) < MIN_SECRET_LENGTH:
        raise UsageError(
            f"webhooks.{name} needs a secret of at least {MIN_SECRET_LENGTH} characters: set "
            "secret, or the variable that secret_env names"
        )
    return secret


def _read_secret(settings: Settings, secret: str, variable: str, setting: str) -> str:
    """Return the secret, or else the value of the environment variable, or else empty text.

    `setting` is the setting that names the variable. Raises UsageError if the variable is not set.
    """
    if secret or not variable:
        return secret
    value = settings.keys.get(variable, "")
    if not value:
        raise UsageError(f"{setting} names the variable {variable}, which is not set; set it")
    return value
