"""Chats that go on during an outage of the store: nothing is sent twice after the merge."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stenolog.agent.turn_events import InboundMessage
from support.agents import agent_loop
from support.bots import ALICE, KEY, bot, recovered, until
from support.merge_steps import broken
from support.telegram_server import TelegramServer

ORIGIN: Mapping[str, Any] = {"channel": "telegram", "chat": ALICE}


@pytest.fixture(params=["jsonl", "sqlite"])
def store(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def _answer(store: str, folder: Path, id: str) -> None:
    """Store an answer in a process that ends before sending it."""
    async with agent_loop(store, folder, [f"to {id}"]) as loop:
        await loop.handle(InboundMessage(key=KEY, content=id, id=id, origin=ORIGIN))


async def _chat(store: str, folder: Path, server: TelegramServer, *texts: str) -> None:
    async with bot(folder, server, [f"to {text}" for text in texts], store=store):
        for text in texts:
            count = len(server.texts(ALICE))
            server.say(text)
            await until(server, lambda count=count: len(server.texts(ALICE)) > count)  # type: ignore[misc]


@pytest.mark.quick(3)
@pytest.mark.parametrize("old", [[], ["sent"], ["unsent"], ["sent", "unsent"]], ids=str)
async def test_answers_of_an_outage_are_delivered_once(
    server: TelegramServer,
    tmp_path: Path,
    store: str,
    old: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "sent" in old:
        await _chat(store, tmp_path, server, "zero")
    if "unsent" in old:
        await _answer(store, tmp_path, "old")
    with broken(monkeypatch):
        await _chat(store, tmp_path, server, "one", "two")
        await _answer(store, tmp_path, "new")
    due = ["to old", "to new"] if "unsent" in old else ["to new"]
    assert await recovered(tmp_path, store=store) == due
    assert await recovered(tmp_path, store=store) == []


@pytest.mark.parametrize("is_known", [True, False])
async def test_chat_that_moves_during_an_outage_stays_in_its_new_session(
    server: TelegramServer,
    tmp_path: Path,
    store: str,
    is_known: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_known:
        await _chat(store, tmp_path, server, "Old topic.")
    with broken(monkeypatch):
        await _chat(store, tmp_path, server, "/new", "My dog is Rex.")
    await _chat(store, tmp_path, server, "Who is my dog?")
    async with agent_loop(store, tmp_path, []) as loop:
        opened = loop.registry.agent().store
        histories = {
            key: [message.content for message in opened.get_history(key)]
            for key in opened.list_sessions()
        }
    assert len(histories) == 2
    old_texts = histories.pop(KEY)
    assert old_texts == (["Old topic.", "to Old topic."] if is_known else [])
    [new_texts] = histories.values()
    assert [new_texts[0], new_texts[2]] == ["My dog is Rex.", "Who is my dog?"]
