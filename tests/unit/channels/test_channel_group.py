"""Tests that only configured channels are opened, and that all of them are closed."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stenolog.agent.instance import AgentInstance, AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.channels.channel_group import Channels
from stenolog.errors import UsageError
from stenolog.settings.values import (
    ChannelSettings,
    Settings,
    TelegramSettings,
    WebhookSettings,
)
from stenolog.testing.scripted_model import ScriptedModel
from support.agents import SPEC, agent_loop
from support.bots import ALICE, agent_and_channels, telegram_settings, until
from support.telegram_server import TOKEN, TelegramServer


async def test_no_channel_is_opened_without_settings(tmp_path: Path) -> None:
    async with agent_and_channels(tmp_path, Settings(), []) as (_, channels):
        await channels.start()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert channels.routes == []
    assert not (tmp_path / "channels").exists()


@pytest.mark.parametrize(
    "settings",
    [
        Settings(channels=ChannelSettings(telegram=TelegramSettings(token_env="BOT_TOKEN"))),
        Settings(webhooks={"ci": WebhookSettings(secret_env="HOOK_SECRET")}),
        Settings(webhooks={"ci": WebhookSettings(secret_env="SHORT")}, keys={"SHORT": "short"}),
        Settings(webhooks={"ci": WebhookSettings()}),
    ],
)
async def test_missing_secret_is_an_error_at_the_start(settings: Settings, tmp_path: Path) -> None:
    async with agent_loop("jsonl", tmp_path, []) as loop:
        with pytest.raises(UsageError):
            Channels(loop, settings)


async def test_token_can_come_from_the_environment(tmp_path: Path) -> None:
    with TelegramServer() as server:
        told = telegram_settings(server, token="", token_env="BOT_TOKEN")
        settings = replace(told, keys={"BOT_TOKEN": TOKEN})
        async with agent_and_channels(tmp_path, settings, ["Hello."]) as (_, channels):
            await channels.start()
            server.say("hello")
            await until(server, lambda: server.texts(ALICE) == ["Hello."])


async def test_channels_of_in_memory_sessions_write_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with TelegramServer() as server:
        spec = replace(SPEC, sessions="memory:")
        instance = AgentInstance.open(spec, model=ScriptedModel(["Hello."]))
        loop = AgentLoop(AgentRegistry([instance]))
        channels = Channels(loop, telegram_settings(server), pause=0.01)
        await channels.start()
        server.say("hello")
        await until(server, lambda: server.texts(ALICE) == ["Hello."])
        await channels.drain(wait_seconds=10)
        await loop.close()
        await channels.close()
    assert _files(tmp_path) == []


async def test_answer_in_progress_is_sent_before_close(tmp_path: Path) -> None:
    with TelegramServer() as server:
        slow: Any = ScriptedModel(["word " * 40], pause=0.01)
        settings = telegram_settings(server)
        async with agent_and_channels(tmp_path, settings, slow) as (_, channels):
            await channels.start()
            server.say("talk")
            await until(server, lambda: bool(server.typing))
        assert server.texts(ALICE) == [("word " * 40).strip()]


def _files(folder: Path) -> list[Path]:
    return list(folder.iterdir())
