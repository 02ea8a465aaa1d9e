"""All configured channels, started and closed together by the daemon."""

import asyncio
import logging
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from starlette.routing import Route

from stenolog.agent.loop import AgentLoop
from stenolog.agent.threads import cancel_and_wait
from stenolog.agent.turn_events import Answer
from stenolog.channels.channel import Channel
from stenolog.channels.claims import Claims
from stenolog.channels.delivery import Delivery
from stenolog.channels.inbox import Inbox, MessageRegister
from stenolog.channels.webhook import Webhook, webhook_routes
from stenolog.errors import StenologError, UsageError, install_command
from stenolog.sessions.folders import CHANNELS
from stenolog.settings.validation import MIN_SECRET_LENGTH
from stenolog.settings.values import Settings
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store

if TYPE_CHECKING:
    from stenolog.channels.telegram import Telegram

_logger = logging.getLogger("stenolog")


class _ChannelSetup(Struct, frozen=True, kw_only=True):
    """A channel with its inbox and delivery."""

    channel: Channel
    inbox: Inbox
    delivery: Delivery | None


class Channels:
    """The configured chat apps and webhooks.

    The daemon calls `start`, then resumes turns with the agent and passes the answers to `deliver`.
    At the end the daemon calls `drain` and `stop_sending`, closes the agent, and calls `close`.
    """

    def __init__(self, loop: AgentLoop, settings: Settings, *, pause: float = 2.0) -> None:
        """Create the channels inside a running event loop. Raises UsageError for a missing secret.

        `pause`: seconds before failed work is tried again.
        """
        self._loop = loop
        self._settings = settings
        self._pause = pause
        self._tasks: list[asyncio.Task[Any]] = []
        self._setups: list[_ChannelSetup] = []
        bot = settings.channels.telegram
        token = _read_secret(settings, bot.token, bot.token_env, "channels.telegram.token_env")
        webhook_secrets = {name: _webhook_secret(settings, name) for name in settings.webhooks}
        store = _open_claims_store(loop, settings) if token or webhook_secrets else None
        try:
            self._claims = Claims(store)
            hooks: list[tuple[Webhook, Inbox]] = []
            for name, secret in webhook_secrets.items():
                hook = Webhook(name, settings.webhooks[name], secret)
                hooks.append((hook, self._set_up(hook, delivers=hook.sends_replies)))
            self.routes: list[Route] = webhook_routes(hooks)
            """Routes of the webhooks, for the gateway. The routes check signatures."""
            if token:
                self._set_up(_make_telegram(settings, token, self._claims, pause), delivers=True)
        except BaseException:
            if store is not None:
                store.close()
            raise

    @property
    def names(self) -> list[str]:
        """Names of the configured channels."""
        return [setup.channel.name for setup in self._setups]

    async def start(self) -> None:
        """Start to receive messages."""
        self._tasks += [asyncio.create_task(_run_channel(setup)) for setup in self._setups]

    async def deliver(self, answers: Sequence[Answer]) -> None:
        """Deliver answers to messages of these channels. Raises nothing.

        The log contains the destination of each answer. An answer that a killed process had started
        to send is not sent again.
        """
        keys = dict.fromkeys(answer.key for answer in answers)
        for key, instance, setup in product(keys, self._loop.registry, self._setups):
            if setup.delivery is not None:
                try:
                    await setup.delivery.send_due(instance, key)
                except StenologError as error:
                    _logger.warning("an answer in %r was not sent: %s", key, error)

    async def drain(self, *, wait_seconds: float) -> None:
        """Stop receiving, and wait at most `wait_seconds` for answers to be sent."""
        for setup in self._setups:
            setup.inbox.stop_recovering()
        tasks, self._tasks = self._tasks, []
        if await cancel_and_wait(tasks):
            raise asyncio.CancelledError
        await asyncio.gather(*(setup.inbox.drain(wait_seconds) for setup in self._setups))

    async def stop_sending(self) -> None:
        """Stop sending before the stores are closed, so that unsent answers can be recorded."""
        deliveries = [setup.delivery for setup in self._setups if setup.delivery is not None]
        await asyncio.gather(*(delivery.stop_sending() for delivery in deliveries))

    async def close(self) -> None:
        """Cancel all remaining work, and close the channels. A second call does nothing."""
        await self.drain(wait_seconds=0)
        for setup in self._setups:
            await setup.inbox.close()
            await setup.channel.close()
        await self._claims.close()

    def _set_up(self, channel: "Webhook | Telegram", *, delivers: bool) -> Inbox:
        delivery = (
            Delivery(self._loop, channel, self._claims, allows=channel.allows) if delivers else None
        )
        inbox = Inbox(
            self._loop,
            channel=channel.name,
            delivery=delivery,
            register=MessageRegister(self._claims),
            limit=self._settings.gateway.max_turns,
        )
        self._setups.append(_ChannelSetup(channel=channel, inbox=inbox, delivery=delivery))
        return inbox


async def _run_channel(setup: _ChannelSetup) -> None:
    try:
        await setup.channel.run(setup.inbox)
    except Exception:
        _logger.exception("channel %s stopped after an error", setup.channel.name)


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
    place = loop.registry.agent().shared_place
    if place is None or not settings.channels.session_persistence:
        return None
    return open_store(place, namespace=CHANNELS)


def _webhook_secret(settings: Settings, name: str) -> str:
    hook = settings.webhooks[name]
    secret = _read_secret(settings, hook.secret, hook.secret_env, f"webhooks.{name}.secret_env")
    if len(secret) < MIN_SECRET_LENGTH:
        raise UsageError(
            f"webhooks.{name} needs a secret of at least {MIN_SECRET_LENGTH} characters: set "
            "secret, or the variable that secret_env names"
        )
    return secret


def _read_secret(settings: Settings, secret: str, variable: str, setting: str) -> str:
    """Return a secret from the setting or the environment.

    Raises UsageError if the variable is empty.
    """
    if secret or not variable:
        return secret
    value = settings.keys.get(variable, "")
    if not value:
        raise UsageError(f"{setting} names the variable {variable}, which is not set; set it")
    return value
