"""Bots for the tests: an agent, its channels and a fake Telegram server."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from stenolog.agent.instance import AgentInstance, AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.agent.spec import AgentSpec
from stenolog.channels.channel import Destination
from stenolog.channels.channel_group import Channels
from stenolog.channels.claims import Claims
from stenolog.channels.delivery import Delivery
from stenolog.providers.chat_model import ChatModel
from stenolog.sessions.chat_marks import DELIVERY_FIELD
from stenolog.settings.values import (
    ChannelSettings,
    Settings,
    TelegramSettings,
    WebhookSettings,
)
from stenolog.testing.scripted_model import ScriptedModel
from support.agents import SPEC, agent_loop, open_agent
from support.telegram_server import TOKEN, TelegramServer

KEY: Final = "telegram:1001"
ALICE: Final = 1001
PATIENCE: Final = 120.0


def telegram_settings(server: TelegramServer, **fields: Any) -> Settings:
    """Return settings with a bot that alice may talk to."""
    given = {"token": TOKEN, "allow": (str(ALICE),), "base_url": server.url, **fields}
    return Settings(channels=ChannelSettings(telegram=TelegramSettings(**given)))


def webhook_settings(secret: str, **fields: Any) -> Settings:
    """Return settings with one webhook, `ci`."""
    given: dict[str, Any] = {"secret": secret, "allow": ("alice",), **fields}
    return Settings(webhooks={"ci": WebhookSettings(**given)})


@asynccontextmanager
async def agent_and_channels(
    folder: Path,
    settings: Settings,
    script: Iterable[Any] | ChatModel,
    *,
    store: str = "jsonl",
    spec: AgentSpec = SPEC,
    opened: Callable[[AgentInstance], object] = repr,
) -> AsyncIterator[tuple[AgentLoop, Channels]]:
    """Yield a loop and its channels, not yet started, and close them as the daemon does.

    `opened` is called with the agent.
    """
    model = script if isinstance(script, ChatModel) else ScriptedModel(script)
    instance = open_agent(store, folder, model, spec=spec)
    opened(instance)
    loop = AgentLoop(AgentRegistry([instance]), ttl=5.0)
    channels = Channels(loop, settings, pause=0.01)
    try:
        yield loop, channels
    finally:
        await channels.drain(wait_seconds=PATIENCE)
        await asyncio.wait_for(loop.close(patience=1.0), 30)
        await channels.close()


@asynccontextmanager
async def bot(
    folder: Path,
    server: TelegramServer,
    script: Iterable[Any] | ChatModel,
    *,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[AgentLoop]:
    """Run a Telegram bot and yield its loop."""
    told = telegram_settings(server, **(settings or {}))
    async with agent_and_channels(folder, told, script, **options) as (loop, channels):
        await channels.start()
        yield loop


@asynccontextmanager
async def in_the_end(let_go: Callable[[], object]) -> AsyncIterator[None]:
    """Release what the test blocks when it ends, so that everything can be closed."""
    try:
        yield
    finally:
        let_go()


async def until(server: TelegramServer, met: Callable[[], bool]) -> None:
    """Wait for a condition on the fake Telegram server without blocking the bot."""
    assert await asyncio.to_thread(server.wait_until, met, timeout=PATIENCE), "it never came about"


def confirmed(server: TelegramServer, number: int) -> Callable[[], bool]:
    """Return a condition: the update with this number is confirmed."""
    return lambda: number not in server.unconfirmed


def mark(loop: AgentLoop, key: str = KEY) -> Any:
    """Return the delivery mark in the session's metadata."""
    store = loop.registry.agent().store
    assert store is not None
    return store.info(key).meta.get(DELIVERY_FIELD)


class FakeApp:
    """A chat app that plays a given response for each message."""

    name = "telegram"
    max_length = 64
    sends_replies = True

    def __init__(self, *plays: Exception | Callable[[], object] | None) -> None:
        self.plays = list(plays)
        self.sent: list[str] = []
        self.origins: list[Destination] = []

    async def run(self, receiver: object) -> None:
        """Receive nothing."""

    async def send(self, origin: Destination, text: str) -> None:
        """Play the next response."""
        self.origins.append(origin)
        play = self.plays.pop(0) if self.plays else None
        if isinstance(play, Exception):
            raise play
        if play is not None:
            play()
        self.sent.append(text)

    async def show_typing(self, origin: Destination) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


async def recovered(folder: Path, *, store: str = "jsonl") -> list[str]:
    """Return the texts that a new process sends during recovery."""
    app, claims = FakeApp(), Claims()
    async with agent_loop(store, folder, []) as loop:
        await Delivery(loop, app, claims).recover_answers()
    await claims.close()
    return app.sent
