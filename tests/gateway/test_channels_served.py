"""Chat apps and webhooks of a real `steno serve`: heard through all of it, killed and stopped."""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest

from stenolog.channels.webhook import MAX_SIGNATURE_AGE_SECONDS, SIGNATURE_HEADER, make_signature
from stenolog.sessions.chat_marks import DELIVERY_FIELD
from stenolog.stores.open_store import open_store
from stenolog.testing.model_server import ModelServer
from support import temporary_folders
from support.gateway.clients import wait_until
from support.gateway.gateway_process import Process
from support.telegram_server import TOKEN, TelegramServer

ALICE: Final = 1001
KEY: Final = "telegram:1001"
SECRET: Final = "0123456789abcdef-both-sides"


class BusyTelegram(TelegramServer):
    """A small Telegram that can be too busy to take messages."""

    busy = False
    refused = 0

    def call(self, token: str, method: str, given: dict[str, str]) -> tuple[int, Any] | None:
        """While it is busy, what is sent is to come again much later."""
        if method != "sendMessage" or not self.busy:
            return super().call(token, method, given)
        with self._changed:
            self.refused += 1
            self._changed.notify_all()
        words, later = "Too Many Requests: retry after 600", {"retry_after": 600}
        told = {"ok": False, "error_code": 429, "description": words, "parameters": later}
        return 429, told


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that costs no syncs: what is killed here is the process, not the machine."""
    with temporary_folders.folder() as path:
        yield path


@pytest.fixture
def telegram() -> Iterator[BusyTelegram]:
    """A small Telegram."""
    with BusyTelegram() as server:
        yield server


@pytest.fixture
def model() -> Iterator[ModelServer]:
    """A model that says again what was said to it."""

    def answer(request: Mapping[str, Any]) -> str:
        return f"You said: {request['messages'][-1]['content']}"

    with ModelServer(answer) as server:
        yield server


def _config(telegram: BusyTelegram) -> str:
    return (
        f"shutdown_timeout = 0.5\n[channels.telegram]\ntoken = '{TOKEN}'\nallow = ['{ALICE}']\n"
        f"base_url = '{telegram.url}'\n"
        f"[webhooks.shop]\nsecret = '{SECRET}'\nallow = ['alice']\n"
    )


@pytest.fixture(
    params=[
        "jsonl",
        # There the lock on the bot of a killed gateway is free after 20 seconds.
        pytest.param("postgresql", marks=pytest.mark.slow),
    ]
)
def where(request: pytest.FixtureRequest, place: Path) -> str:
    """A store of each kind that gateways lock differently."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("own_url"))
    return str(place / "workspace")


@pytest.fixture
def gateway(
    place: Path, where: str, telegram: BusyTelegram, model: ModelServer
) -> Iterator[Process]:
    """A gateway with a bot and a webhook."""
    process = Process(place, sessions=where, model=model.url, config=_config(telegram))
    yield process.start()
    process.close()


def _delivery(where: str) -> Any:
    with open_store(where, read_only=True) as store:
        return store.info(KEY).meta[DELIVERY_FIELD]


def _said(where: str) -> list[Any]:
    with open_store(where, read_only=True) as store:
        return [message.content for message in store.get_history(KEY)]


def _wait_for(telegram: BusyTelegram, *texts: str) -> None:
    """Wait until these were sent, and nothing else."""
    assert telegram.wait_until(lambda: len(telegram.texts(ALICE)) >= len(texts), timeout=60)
    assert telegram.texts(ALICE) == list(texts)


def test_restarted_bot_sends_every_answer_once(
    where: str, telegram: BusyTelegram, model: ModelServer, gateway: Process
) -> None:
    number = telegram.say("one")
    _wait_for(telegram, "You said: one")
    wait_until(lambda: bool(_delivery(where)["mark"] == "sent"))
    assert telegram.wait_until(lambda: number not in telegram.unconfirmed, timeout=60)
    gateway.kill()
    telegram.say("one", message=1)  # handed over once more
    telegram.say("two")
    gateway.start()
    _wait_for(telegram, "You said: one", "You said: two")
    shown = [body["content"] for body in model.requests[-1]["messages"]]
    assert shown[-3:] == ["one", "You said: one", "two"]
    # Asked to end while the app is busy, it says that nothing was sent.
    telegram.busy = True
    telegram.say("three")
    assert telegram.wait_until(lambda: telegram.refused > 0, timeout=60)
    assert gateway.stop() == 0
    assert "Traceback" not in gateway.words.read_text()
    assert (_delivery(where)["mark"], _delivery(where)["owed"]) == ("owed", [6])
    telegram.busy = False
    gateway.start()
    _wait_for(telegram, "You said: one", "You said: two", "You said: three")
    assert gateway.stop() == 0
    assert _delivery(where)["mark"] == "sent"
    _wait_for(telegram, "You said: one", "You said: two", "You said: three")
    assert _said(where)[1::2] == telegram.texts(ALICE)


def test_webhook_needs_only_its_signature(
    gateway: Process, telegram: BusyTelegram, model: ModelServer
) -> None:
    body = json.dumps({"sender": "alice", "text": "hello", "id": "1"}).encode()
    now = int(time.time())

    def post(name: str, body: bytes, **headers: str) -> httpx2.Response:
        with httpx2.Client(trust_env=False, timeout=60) as client:
            return client.post(f"{gateway.url}{name}", content=body, headers=headers)

    def signed(at: int) -> dict[str, str]:
        return {SIGNATURE_HEADER: make_signature(SECRET, body, signed_at=at)}

    def code(response: httpx2.Response) -> tuple[int, str]:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "code"}
        return response.status_code, error["code"]

    refused = (401, "wrong_signature")
    assert code(post("/webhooks/shop", body)) == refused
    assert (
        code(post("/webhooks/shop", body, **signed(now - int(MAX_SIGNATURE_AGE_SECONDS) - 60)))
        == refused
    )
    assert code(post("/webhooks/other", body, **signed(now))) == refused
    assert code(post("/webhooks/shop", b"x" * 2**21, **signed(now))) == (413, "too_long")
    # Another name of the same path is not a way around the token.
    assert post("/webhooks/../v1/sessions", body, **signed(now)).status_code in (401, 404)
    assert post("/webhooks/%2e%2e/v1/sessions", body, **signed(now)).status_code in (401, 404)
    assert model.request_count == 0
    heard = post("/webhooks/shop", body, **signed(now))
    assert (heard.status_code, heard.json()["answer"]) == (200, "You said: hello")
    assert heard.json()["session"] == "webhook-shop:alice"
    assert telegram.sent == []


@pytest.mark.slow
def test_two_gateways_on_postgresql_poll_one_bot_alternately(
    place: Path, own_url: str, telegram: BusyTelegram, model: ModelServer
) -> None:
    gateways = [
        Process(place / name, sessions=own_url, model=model.url, config=_config(telegram))
        for name in ("one", "other")
    ]
    try:
        for gateway in gateways:
            gateway.start()
        telegram.say("one")
        _wait_for(telegram, "You said: one")
        # Asked to end, a gateway lets another one poll at once.
        assert gateways[0].stop() == 0
        telegram.say("two")
        _wait_for(telegram, "You said: one", "You said: two")
        gateways[0].start()
        assert gateways[1].stop() == 0
        telegram.say("three")
        _wait_for(telegram, "You said: one", "You said: two", "You said: three")
        assert gateways[0].stop() == 0
    finally:
        for gateway in gateways:
            gateway.close()
    assert _said(own_url)[1::2] == telegram.texts(ALICE)
