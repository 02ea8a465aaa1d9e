"""Tests which agent receives a message."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from stenolog.agent.instance import AgentInstance, AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.errors import UsageError
from stenolog.testing.scripted_model import ScriptedModel
from support.agents import KEY, SPEC, open_agent, say


def _agents(folder: Path) -> list[AgentInstance]:
    routes = {
        None: (),
        "work": ("slack", "telegram:boss"),
        "home": (":ann",),
    }
    return [
        open_agent(
            "jsonl",
            folder,
            ScriptedModel([f"From {name}."] * 3),
            spec=replace(SPEC, id=name, routes=given),
        )
        for name, given in routes.items()
    ]


def test_most_specific_route_wins(tmp_path: Path) -> None:
    agents = _agents(tmp_path)
    registry = AgentRegistry(agents)
    found = {
        (channel, sender): registry.route(channel, sender).id
        for channel in ("slack", "telegram", "cli")
        for sender in ("ann", "boss", "")
    }
    asyncio.run(registry.close())
    assert found == {
        ("slack", "ann"): "home",
        ("slack", "boss"): "work",
        ("slack", ""): "work",
        ("telegram", "ann"): "home",
        ("telegram", "boss"): "work",
        ("telegram", ""): None,
        ("cli", "ann"): "home",
        ("cli", "boss"): None,
        ("cli", ""): None,
    }


def test_agents_have_separate_sessions(tmp_path: Path) -> None:
    async def main() -> None:
        registry = AgentRegistry(_agents(tmp_path))
        loop = AgentLoop(registry)
        await say(loop, "To the first.")
        from stenolog.agent.turn_events import InboundMessage

        answer = await loop.handle(InboundMessage(key=KEY, content="To work."), agent="work")
        assert answer.text == "From work."
        assert [len(one.sessions.get_history(KEY)) for one in registry] == [2, 2, 0]
        await loop.close()

    asyncio.run(main())


def test_unknown_agent_error_lists_the_known_agents(tmp_path: Path) -> None:
    agents = _agents(tmp_path)
    registry = AgentRegistry(agents)
    assert registry.agent() is agents[0]
    assert registry.agent("home") is agents[2]
    with pytest.raises(UsageError, match=r"no agent 'play'; known agents: 'work', 'home'"):
        registry.agent("play")
    with pytest.raises(UsageError, match="two agents"):
        AgentRegistry([agents[0], agents[0]])
    with pytest.raises(UsageError, match="at least one"):
        AgentRegistry([])
    asyncio.run(registry.close())
