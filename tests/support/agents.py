"""Agents for the tests, on each kind of store that an agent loop supports."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from stenolog.agent.instance import AgentInstance, AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.agent.spec import AgentSpec
from stenolog.agent.tools import Tool
from stenolog.agent.turn_events import Answer, Event, InboundMessage
from stenolog.providers.chat_model import ChatModel
from stenolog.sessions.keys import cli_sender
from stenolog.sessions.session_manager import SessionManager
from stenolog.testing.scripted_model import ScriptedModel
from stenolog.transfer.open_sessions import open_sessions

KEY: Final = "cli:default"
STORES: Final = ("jsonl", "sqlite", "legacy")
SPEC: Final = AgentSpec(system="Be brief.", consolidation=False)


def called(name: str, arguments: str = "{}", id: str = "c1") -> dict[str, Any]:
    """Return an answer that calls one tool."""
    return calls((name, arguments, id))


def calls(*made: tuple[str, str, str]) -> dict[str, Any]:
    """Return an answer that calls several tools."""
    return {
        "tool_calls": [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments, id in made
        ]
    }


def open_agent(
    store: str,
    folder: Path,
    model: ChatModel,
    *,
    spec: AgentSpec = SPEC,
    tools: Sequence[Tool | Callable[..., Any]] = (),
    open_model: Callable[[str], ChatModel] | None = None,
) -> AgentInstance:
    """Open an agent on a store of this kind; `legacy` is a SessionManager."""
    if store == "legacy":
        manager = SessionManager(folder / "sessions", reason="a test wants it")
        return AgentInstance(
            spec, model=model, sessions=manager, tools=tools, open_model=open_model
        )
    where = f"sqlite:{folder / 'steno.db'}" if store == "sqlite" else str(folder)
    return AgentInstance.open(
        replace(spec, sessions=where), model=model, tools=tools, open_model=open_model
    )


@asynccontextmanager
async def agent_loop(
    store: str,
    folder: Path,
    script: Iterable[Any] | ChatModel,
    *,
    spec: AgentSpec = SPEC,
    tools: Sequence[Tool | Callable[..., Any]] = (),
    open_model: Callable[[str], ChatModel] | None = None,
    patience: float = 10.0,
) -> AsyncIterator[AgentLoop]:
    """Yield a loop with one agent, and close it at the end."""
    model = script if isinstance(script, ChatModel) else ScriptedModel(script)
    instance = open_agent(store, folder, model, spec=spec, tools=tools, open_model=open_model)
    loop = AgentLoop(AgentRegistry([instance]), ttl=5.0)
    try:
        yield loop
    finally:
        await asyncio.wait_for(loop.close(patience=patience), 30)


class Heard:
    """Event handler that records all events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def of(self, *kinds: type) -> list[Any]:
        """Return the events of these kinds."""
        return [event for event in self.events if isinstance(event, kinds)]


async def say(
    loop: AgentLoop, text: str, *, key: str = KEY, id: str = "", on_event: Any = None
) -> Answer:
    """Send a message and wait for the answer."""
    inbound = InboundMessage(key=key, content=text, id=id, sender=cli_sender(key))
    return await asyncio.wait_for(loop.handle(inbound, on_event=on_event or Heard()), 30)


def bodies(loop: AgentLoop, key: str = KEY) -> list[dict[str, Any]]:
    """Return the visible messages without the metadata of answers."""
    history = loop.registry.agent().sessions.get_history(key)
    return [
        {name: value for name, value in message.to_dict().items() if name != "stenolog"}
        for message in history
    ]


def roles(loop: AgentLoop, key: str = KEY) -> list[str]:
    """Return the roles of the visible messages, in order."""
    return [body["role"] for body in bodies(loop, key)]


def reopened(store: str, folder: Path) -> list[dict[str, Any]]:
    """Return the messages that a new process reads."""
    if store == "legacy":
        with_manager = SessionManager(folder / "sessions", reason="a test wants it")
        return [message.to_dict() for message in with_manager.get_history(KEY)]
    where = f"sqlite:{folder / 'steno.db'}" if store == "sqlite" else str(folder)
    sessions = open_sessions(where)
    try:
        return [message.to_dict() for message in sessions.get_history(KEY)]
    finally:
        sessions.close()


async def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds for which there is no event."""
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - polls a condition
            await asyncio.sleep(0.002)
