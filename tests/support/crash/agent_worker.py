"""Agent process that tests kill; run by its path.

It reads messages and `resume` as JSON lines from standard input and prints events, one line each.
It ends when its input ends. It prints `ack` for a message when it calls the model for the answer,
or when the answer is stored: before that, nothing was promised.
"""

import asyncio
import json
import os
import sys
import time
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

from stenolog.agent.instance import AgentInstance, AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.agent.spec import AgentSpec
from stenolog.agent.tools import Tool, tool
from stenolog.agent.turn_events import (
    Event,
    EventHandler,
    InboundMessage,
    ModelCalled,
    TextDelta,
    ToolFinished,
    ToolStarted,
)
from stenolog.context.window import Limits
from stenolog.providers.openai_chat import OpenAIChat
from stenolog.sessions.session_manager import SessionManager


def _say(*words: object) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


def _teller(id: str) -> EventHandler:
    """Return an event handler that prints the events of a message or a resumed turn."""

    def tell(event: Event) -> None:
        match event:
            case ModelCalled():
                _say("ack" if id else "asked", id)
            case TextDelta():
                _say("said", id)
            case ToolStarted():
                _say("began", event.id)
            case ToolFinished():
                _say("ended", event.id)
            case _:
                pass

    return tell


def _tools(journal: Path) -> list[Tool]:
    """Return a repeatable tool, and one that is not repeatable and records its calls."""

    @tool(repeatable=True)
    async def look(what: Annotated[str, "what to look at"]) -> str:
        """Look at something."""
        await asyncio.sleep(0.03)
        return f"seen {what}"

    @tool
    def pay(what: Annotated[str, "what to pay for"]) -> str:
        """Pay for something, which must not happen twice."""
        book = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(book, f"begin {what}\n".encode())
            time.sleep(0.03)
            os.write(book, f"end {what}\n".encode())
        finally:
            os.close(book)
        return f"paid {what}"

    return [look, pay]


class _Worker:
    def __init__(self, loop: AgentLoop) -> None:
        self._loop = loop

    async def work(self, lines: asyncio.StreamReader) -> None:
        """Run the commands of all lines concurrently until all are done."""
        async with asyncio.TaskGroup() as tasks:
            async for line in lines:
                tasks.create_task(self._careful(self._one(json.loads(line))))

    async def _careful(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:  # noqa: BLE001 - told, and the test fails by it
            _say("bug", traceback.format_exc())

    async def _one(self, wanted: dict[str, str]) -> None:
        if wanted.get("do") == "resume":
            for answer in await self._loop.resume(on_event=_teller("")):
                _say("resumed", answer.key, answer.outcome, answer.text, answer.seq)
            _say("all resumed")
            return
        id = wanted["id"]
        inbound = InboundMessage(key=wanted["key"], content=wanted["text"], id=id)
        answer = await self._loop.handle(inbound, on_event=_teller(id))
        if answer.saved:
            _say("ack", id)
        _say("answer", id, answer.outcome, answer.text, answer.seq)


async def _main(where: str, url: str, journal: Path, ttl: float, resume_within: float) -> None:
    spec = AgentSpec(
        sessions=where,
        system="Do as you are told.",
        limits=Limits(max_history_messages=80),
        resume_within=resume_within,
    )
    model, tools = OpenAIChat("scripted", base_url=url), _tools(journal)
    kind, _, folder = where.partition(":")
    if kind == "manager":
        agent = AgentInstance(spec, model=model, sessions=SessionManager(folder), tools=tools)
    else:
        agent = AgentInstance.open(spec, model=model, tools=tools)
    loop = AgentLoop(AgentRegistry([agent]), ttl=ttl)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    _say("open")
    await _Worker(loop).work(lines)
    await loop.wait_until_idle()
    _say("left", str(await loop.close()))


if __name__ == "__main__":
    where, url, journal, ttl, resume_within = sys.argv[1:]
    asyncio.run(_main(where, url, Path(journal), float(ttl), float(resume_within)))
