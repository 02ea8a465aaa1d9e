"""Tests a real small model in this process: chunks, usage, schema, cancellation and end.

The model is very small and seldom right, so the tests check what holds for every answer.
"""

import asyncio
import json
import socket
import threading
from contextlib import aclosing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from stenolog.errors import ModelRefused
from stenolog.providers.chat_model import ChatModel, StreamedAnswer
from stenolog.providers.local_model import LocalModel, find_weights, is_installed
from stenolog.providers.request_errors import read_overflow
from stenolog.settings.model_selection import ModelChoice, find_model, open_model
from support.small_model import weights

pytestmark = pytest.mark.llm

ASKED = [{"role": "user", "content": "Name three colours of the rainbow."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture
def path() -> Path:
    return weights()


async def answer(model: ChatModel, **how: object) -> tuple[StreamedAnswer, int]:
    reply, pieces = StreamedAnswer(), 0
    async for delta in model.stream(ASKED, **how):  # type: ignore[arg-type]
        reply.add(delta)
        pieces += 1
    return reply, pieces


def test_installed_weights_are_found_and_opened(path: Path) -> None:
    assert is_installed()
    assert find_weights() == path
    choice = find_model(environment={}, weights=find_weights)
    assert isinstance(choice, ModelChoice)
    model = open_model(choice, environment={})
    assert isinstance(model, LocalModel)
    assert model.path == path


def test_local_model_streams_follows_a_schema_and_is_freed_on_close(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def talk() -> tuple[tuple[StreamedAnswer, int], StreamedAnswer, str]:
        model = LocalModel(path, context=2_048, extra={"temperature": 0})
        told = await answer(model, max_tokens=40)
        shaped, _ = await answer(model, schema=SCHEMA, max_tokens=60)
        where = model._server.listening_address
        await model.close()
        await model.close()
        return told, shaped, where

    before = threading.active_count()
    (reply, pieces), shaped, where = asyncio.run(talk())
    assert pieces > 3
    assert reply.text
    assert reply.finish in ("stop", "length")
    assert reply.usage is not None
    assert 0 < reply.usage.answer <= 40
    assert set(json.loads(shaped.text)) == {"city"}
    address = urlsplit(where)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.hostname or "", address.port or 0), timeout=5)
    assert threading.active_count() == before
    # Its log does not appear on the terminal.
    assert capfd.readouterr() == ("", "")


def test_too_long_request_is_recognized_as_overflow(path: Path) -> None:
    async def overflow() -> ModelRefused:
        model = LocalModel(path, context=256)
        asked = [{"role": "user", "content": "tides and the moon " * 300}]
        try:
            with pytest.raises(ModelRefused) as caught:
                await anext(model.stream(asked))
        finally:
            await model.close()
        return caught.value

    found = read_overflow(asyncio.run(overflow()))
    assert found is not None
    assert found.limit == 256


def test_new_request_works_after_a_stopped_stream(path: Path) -> None:
    async def stopped() -> StreamedAnswer:
        model = LocalModel(path, context=2_048)
        async with aclosing(model.stream(ASKED, max_tokens=1_500)) as deltas:
            await anext(deltas)
        # An unread answer would use the CPU for many seconds.
        reply, _ = await answer(model, max_tokens=5)
        await model.close()
        return reply

    assert asyncio.run(stopped()).finish


def test_invalid_model_file_is_reported(tmp_path: Path) -> None:
    weights()
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"GGUF" + b"\0" * 100)

    async def load() -> None:
        await anext(LocalModel(wrong).stream(ASKED))

    with pytest.raises(ModelRefused, match="cannot be loaded"):
        asyncio.run(load())
