"""Tests that senders find their own conversation again after a restart, and no other."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from stenolog.agent.loop import AgentLoop
from stenolog.errors import ModelUnavailable
from stenolog.testing.model_server import ModelServer
from stenolog.testing.scripted_model import ScriptedModel
from support.agents import STORES, agent_loop, say
from support.crash.agent_process import Agent

SENDERS: Final = 50
every_store = pytest.mark.parametrize("store", STORES)


def _key(sender: int) -> str:
    return f"telegram:{sender}"


def _said(sender: int) -> str:
    return f"My number is {1_000_003 * sender}."


def _noted(words: object) -> str:
    return f"I have noted: {words}"


def _is_unlucky(words: object) -> bool:
    """Return whether a message is one of those that are not answered at first."""
    return any(words == _said(sender) for sender in range(0, SENDERS, 5))


def _noting(messages: Sequence[Mapping[str, Any]], tools: object) -> str:
    del tools
    return _noted(messages[-1]["content"])


def _failing(messages: Sequence[Mapping[str, Any]], tools: object) -> str:
    if _is_unlucky(messages[-1]["content"]):
        raise ModelUnavailable("it is not there")
    return _noting(messages, tools)


async def _all_say(loop: AgentLoop, words: str = "") -> list[str]:
    answers = [say(loop, words or _said(n), key=_key(n)) for n in range(SENDERS)]
    return [answer.outcome for answer in await asyncio.gather(*answers)]


async def _check_new_messages(loop: AgentLoop, model: ScriptedModel) -> None:
    """Check that the new message of each sender is sent with their own earlier turns only."""
    model.asked.clear()
    await _all_say(loop, "What is my number?")
    shown = {asked.messages[1]["content"]: asked.messages for asked in model.asked}
    assert len(model.asked) == len(shown) == SENDERS
    for sender in range(SENDERS):
        said = _said(sender)
        [system, *talk] = shown[said]
        assert [body["content"] for body in talk] == [said, _noted(said), "What is my number?"]
        assert "number" not in system["content"]


@every_store
def test_after_restart_each_of_fifty_senders_sees_their_earlier_turns(
    store: str, tmp_path: Path
) -> None:
    async def before() -> None:
        async with agent_loop(store, tmp_path, ScriptedModel(_failing)) as loop:
            assert sorted(set(await _all_say(loop))) == ["answered", "failed"]

    async def after() -> None:
        model = ScriptedModel(_noting)
        async with agent_loop(store, tmp_path, model) as loop:
            resumed = await loop.resume()
            assert {one.text for one in resumed} == {
                _noted(_said(sender)) for sender in range(0, SENDERS, 5)
            }
            assert [one.outcome for one in resumed] == ["answered"] * 10
            await _check_new_messages(loop, model)

    asyncio.run(before())
    asyncio.run(after())


@pytest.mark.parametrize("store", ["jsonl", "sqlite"])
@pytest.mark.slow
def test_after_a_kill_fifty_senders_are_still_known(store: str, tmp_path: Path) -> None:
    let_go = threading.Event()

    def answer(request: Mapping[str, Any]) -> str:
        words = request["messages"][-1]["content"]
        if _is_unlucky(words):
            let_go.wait(60)  # the process is killed before it returns
        return _noted(words)

    where = f"sqlite:{tmp_path / 'steno.db'}" if store == "sqlite" else str(tmp_path)
    with ModelServer(answer) as server:
        agent = Agent(where, server.url, tmp_path / "journal")
        try:
            for sender in range(SENDERS):
                agent.send(key=_key(sender), id=f"update-{sender}", text=_said(sender))
            agent.until("answer", SENDERS - 10)
            assert server.wait_until(lambda: server.request_count >= SENDERS, timeout=30)
            agent.kill()
        finally:
            agent.close()
            let_go.set()

    async def after() -> None:
        model = ScriptedModel(_noting)
        async with agent_loop(store, tmp_path, model) as loop:
            resumed: set[str] = set()
            async with asyncio.timeout(30):
                # If a process end cannot be detected, its leases have to expire first.
                while len(resumed) < 10:
                    resumed |= {one.text for one in await loop.resume()}
            assert resumed == {_noted(_said(sender)) for sender in range(0, SENDERS, 5)}
            again = await say(loop, _said(5), key=_key(5), id="update-5")
            assert (again.outcome, again.text) == ("again", _noted(_said(5)))
            await _check_new_messages(loop, model)

    asyncio.run(after())
