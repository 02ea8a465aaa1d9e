"""Tests that nothing copied from the source of a fork is resumed, delivered or matched again."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stenolog.agent.instance import AgentInstance, AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.agent.tools import Tool, tool
from stenolog.agent.turn_events import Answer, ignore_event
from stenolog.catalog.message_metadata import mark_model, mark_received, origin_of
from stenolog.channels import delivery
from stenolog.channels.channel import IncomingMessage, NotSent
from stenolog.channels.claims import Claims
from stenolog.channels.delivery import Delivery
from stenolog.channels.inbox import Inbox
from stenolog.gateway.chat_turns import ChatTurnRequest, answer_chat
from stenolog.sessions.chat_marks import DELIVERY_FIELD
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from support.agents import calls, open_agent
from support.bots import FakeApp

KEY = "telegram:7"
FORK = "telegram:try:7"
ORIGIN = {"channel": "telegram", "chat": 7}
every_store = pytest.mark.parametrize("store", ["jsonl", "sqlite"])


def _echo(messages: Any, tools: Any) -> str:
    del tools
    return f"answer to: {messages[-1]['content']}"


class _Process:
    """An agent with the delivery of one chat app, until it is closed."""

    def __init__(self, loop: AgentLoop, app: FakeApp, delivery: Delivery, claims: Claims) -> None:
        self.loop, self.app, self.delivery = loop, app, delivery
        self._inbox = Inbox(loop, channel="telegram", claims=claims, delivery=delivery)
        self._number = 0

    @property
    def store(self) -> Store:
        """The store of the agent."""
        store = self.loop.registry.agent().store
        assert store is not None
        return store

    async def say(self, text: str, *, number: int = 0) -> Answer:
        """Pass a message on as the app does, and wait until its answer was sent."""
        self._number = number or self._number + 1
        name = f"u{self._number}"
        arrival = IncomingMessage(
            sender="7", text=text, id=name, message_number=self._number, origin=ORIGIN
        )
        answer = await self._inbox.accept(arrival).answer
        assert answer is not None
        return answer


@asynccontextmanager
async def _process(
    store: str,
    folder: Path,
    *,
    script: Any = _echo,
    reachable: bool = True,
    tools: Sequence[Tool | Callable[..., Any]] = (),
) -> AsyncIterator[_Process]:
    instance: AgentInstance = open_agent(store, folder, ScriptedModel(script), tools=tools)
    loop, claims = AgentLoop(AgentRegistry([instance]), ttl=5.0), Claims()
    app = FakeApp() if reachable else FakeApp(*[NotSent("not reachable")] * 99)
    try:
        yield _Process(loop, app, Delivery(loop, app, claims, pause=0.001), claims)
    finally:
        await loop.close()
        await claims.close()
    assert all(origin == ORIGIN for origin in app.origins)


def _where(store: str, folder: Path) -> str:
    return f"sqlite:{folder / 'steno.db'}" if store == "sqlite" else str(folder)


@every_store
async def test_answers_in_a_fork_at_an_earlier_message_are_delivered(
    store: str, tmp_path: Path
) -> None:
    async with _process(store, tmp_path) as process:
        for number in range(1, 6):
            await process.say(f"question {number}")
        process.store.fork(KEY, FORK, at=2)
        process.app.sent.clear()
        assert (await process.say(f"/resume {FORK}")).key == FORK
        process.app.sent.clear()
        for number in range(6, 9):
            assert (await process.say(f"question {number}")).key == FORK
        assert process.app.sent == [f"answer to: question {n}" for n in range(6, 9)]


@every_store
async def test_owed_answer_is_sent_by_the_source_and_not_by_its_forks(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_MAX_RETRY_SECONDS", 0.002)

    async with _process(store, tmp_path) as process:
        await process.say("question 1", number=1)
    async with _process(store, tmp_path, reachable=False) as process:
        await process.say("question 2", number=2)
        process.store.fork(KEY, FORK)
        process.store.fork(KEY, "research")
    async with _process(store, tmp_path) as process:
        await process.delivery.recover_answers()
        assert process.app.sent == ["answer to: question 2"]
        for key in (FORK, "research"):
            assert DELIVERY_FIELD not in process.store.info(key).meta


@every_store
async def test_unanswered_message_is_resumed_and_delivered_by_the_source_and_not_by_its_fork(
    store: str, tmp_path: Path
) -> None:
    ran: list[int] = []

    def pay(amount: int) -> str:
        """Pay."""
        ran.append(amount)
        return "paid"

    def script(messages: Any, tools: Any) -> Any:
        del tools
        if messages[-1]["role"] == "tool":
            return "It is paid."
        return calls(("pay", '{"amount": 100}', "c1"))

    body = mark_received({"role": "user", "content": "pay my bill"}, sender=KEY, origin=ORIGIN)
    assert origin_of(body) == ORIGIN
    with open_store(_where(store, tmp_path)) as opened:
        opened.add_full_message(KEY, body, once="update-1")
        opened.fork(KEY, FORK)

    async with _process(store, tmp_path, script=script, tools=[pay]) as process:
        assert [one.key for one in await process.loop.resume()] == [KEY]
        await process.delivery.recover_answers()
        assert process.app.sent == ["It is paid."]
        assert [one.to_dict() for one in process.store.get_history(FORK)] == [body]
    assert ran == [100]


@every_store
async def test_open_calls_copied_by_a_fork_are_not_executed(store: str, tmp_path: Path) -> None:
    ran: list[str] = []

    @tool(repeatable=True)
    def look(name: str) -> str:
        """Look something up."""
        ran.append(name)
        return f"seen {name}"

    call = {"role": "assistant", "content": None, **calls(("look", '{"name": "a"}', "1"))}
    with open_store(_where(store, tmp_path)) as opened:
        opened.add_full_message(KEY, mark_received({"role": "user", "content": "look"}, sender=KEY))
        opened.add_full_message(KEY, mark_model(call, model="m", seconds=0.1))
        opened.fork(KEY, FORK)

    async with _process(store, tmp_path, tools=[look]) as process:
        await process.say(f"/resume {FORK}")
        assert (await process.say("and now?")).key == FORK
    assert ran == []


@every_store
async def test_request_of_the_source_is_not_matched_in_its_fork(store: str, tmp_path: Path) -> None:
    def user(text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}

    async with _process(store, tmp_path) as process:

        async def ask(key: str, *talk: dict[str, Any], once: str, again: bool = False) -> str:
            wanted = ChatTurnRequest(key=key, messages=talk, once=once, is_retry=again)
            return (await answer_chat(process.loop, wanted, ignore_event)).text

        history = (user("a"), {"role": "assistant", "content": "b"}, user("c"))
        assert await ask("s", *history, once="job-1") == "answer to: c"
        process.store.fork("s", "f", at=1)
        assert await ask("f", user("x1"), once="n1") == "answer to: x1"
        assert await ask("f", user("x2"), once="n2") == "answer to: x2"
        assert await ask("f", user("x3"), once="job-1") == "answer to: x3"
        process.store.fork("s", "g")
        assert await ask("g", user("c"), once="", again=True) == "answer to: c"
        assert [one.content for one in process.store.get_history("g")] == [
            *("a", "b", "c", "answer to: c", "c", "answer to: c")
        ]
