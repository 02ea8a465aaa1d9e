"""Requests to a model in a test; return the complete answer and the error, if any."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from stenolog.errors import StenologError
from stenolog.providers.chat_model import ChatModel, StreamedAnswer


def messages(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


async def ask(
    model: ChatModel,
    asked: str | Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    schema: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
) -> tuple[StreamedAnswer, StenologError | None]:
    """Send a request; return the answer and the error that ended it."""
    reply = StreamedAnswer()
    given = messages(asked) if isinstance(asked, str) else asked
    try:
        async for delta in model.stream(given, tools=tools, schema=schema, max_tokens=max_tokens):
            reply.add(delta)
    except StenologError as error:
        return reply, error
    finally:
        await model.close()
    return reply, None


def asked_once(
    model: ChatModel,
    asked: str | Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    schema: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
) -> tuple[StreamedAnswer, StenologError | None]:
    """Send a request in its own event loop."""
    return asyncio.run(ask(model, asked, tools=tools, schema=schema, max_tokens=max_tokens))
