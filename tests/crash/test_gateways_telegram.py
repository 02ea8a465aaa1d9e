"""Tests two gateways with one Telegram bot on one PostgreSQL when the answering one is killed.

The other one resumes the turn and sends the answer. Every message is in the log once, is answered
once, and its answer is sent once.
"""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from stenolog.stores.open_store import open_store
from stenolog.testing.model_server import ModelServer
from support.crash.reporting import Say
from support.gateway.gateway_process import Process
from support.telegram_server import TOKEN, TelegramServer

ALICE: Final = 1001
KEY: Final = "telegram:1001"
PATIENCE: Final = 150.0
_CONFIG: Final = (
    "takeover = 2.0\n[channels.telegram]\ntoken = '{}'\nallow = ['{}']\nbase_url = '{}'\n"
)


class _Model:
    """The model of one gateway, whose answer can be delayed."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, request: Mapping[str, Any]) -> str:
        self.asked.set()
        self.go_on.wait(PATIENCE)
        return f"You said: {request['messages'][-1]['content']}"


class _Gateway:
    """A gateway process with its own model, which shows which gateway runs the turn."""

    def __init__(self, place: Path, where: str, telegram: TelegramServer) -> None:
        self.model = _Model()
        self.server = ModelServer(self.model)
        config = _CONFIG.format(TOKEN, ALICE, telegram.url)
        self.process = Process(place, sessions=where, model=self.server.url, config=config)

    def close(self) -> None:
        self.model.go_on.set()
        self.process.close()
        self.server.close()


@pytest.fixture
def telegram() -> Iterator[TelegramServer]:
    with TelegramServer() as server:
        yield server


@pytest.fixture
def gateways(tmp_path: Path, own_url: str, telegram: TelegramServer) -> Iterator[list[_Gateway]]:
    made = [_Gateway(tmp_path / name, own_url, telegram) for name in ("one", "other")]
    try:
        for gateway in made:
            gateway.process.start()
        yield made
    finally:
        for gateway in made:
            gateway.close()


def _wait_for(telegram: TelegramServer, count: int) -> None:
    assert telegram.wait_until(lambda: len(telegram.texts(ALICE)) >= count, timeout=PATIENCE)


def _asked(gateways: list[_Gateway]) -> _Gateway:
    """Wait until the model of one gateway is called, and return the gateway."""
    for _ in range(int(PATIENCE / 0.05)):
        for gateway in gateways:
            if gateway.model.asked.wait(0.05):
                return gateway
    raise AssertionError("no gateway asked its model")


@pytest.mark.full
def test_answer_is_sent_once_if_the_answering_gateway_is_killed(
    telegram: TelegramServer, gateways: list[_Gateway], own_url: str, say: Say
) -> None:
    said = [f"message {number}" for number in range(6)]
    killed = 0
    for number, text in enumerate(said):
        for gateway in gateways:
            gateway.model.asked.clear()
            if number % 2:
                gateway.model.go_on.clear()
        telegram.say(text)
        if number % 2:
            struck = _asked(gateways)
            struck.process.kill()
            killed += 1
            for gateway in gateways:
                gateway.model.go_on.set()
        _wait_for(telegram, number + 1)
        if number % 2:
            struck.process.start()
    for gateway in gateways:
        assert gateway.process.stop() == 0
    answers = [f"You said: {text}" for text in said]
    assert telegram.texts(ALICE) == answers
    with open_store(own_url, read_only=True) as store:
        history = store.get_history(KEY, full=True)
    assert [one.content for one in history if one.role == "user"] == said
    assert [one.content for one in history if one.role == "assistant"] == answers
    say(f"two gateways, one bot: {len(said)} messages, {killed} gateways killed in a turn")
