"""Chats that go on during an outage of the store: nothing is sent twice after the merge."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stenolog.agent.turn_events import InboundMessage
from stenolog.channels.channel import Destination
from stenolog.channels.claims import Claims
from stenolog.channels.delivery import Delivery
from support.agents import agent_loop
from support.bots import ALICE, KEY, bot, until
from support.merge_steps import broken
from support.telegram_server import TelegramServer

ORIGIN: Mapping[str, Any] = {"channel": "telegram", "chat": ALICE}


@pytest.fixture
def server() -> Iterator[TelegramServer]:
    """Yield a fake Telegram server."""
    with TelegramServer() as telegram:
        yield telegram


@pytest.fixture(params=["jsonl", "sqlite"])
def store(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class _App:
    """An app that records the texts that it gets."""

    name, max_length, sends_replies = "telegram", 4000, True

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def send(self, origin: Destination, text: str) -> None:
        assert origin == ORIGIN
        self.sent.append(text)


async def _answer(store: str, folder: Path, id: str) -> None:
    """Store an answer in a process that ends before sending it."""
    async with agent_loop(store, folder, [f"to {id}"]) as loop:
        await loop.handle(InboundMessage(key=KEY, content=id, id=id, origin=ORIGIN))


async def _recover(store: str, folder: Path) -> list[str]:
    """Return the texts that a new process sends during recovery."""
    app: Any = _App()
    claims = Claims()
    async with agent_loop(store, folder, []) as loop:
        await Delivery(loop, app, claims).recover_answers()
    await claims.close()
    return list(app.sent)


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
    assert await _recover(store, tmp_path) == due
    assert await _recover(store, tmp_path) == []


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
