"""The numbers of the context page add up."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.agent.instance import AgentInstance
from stenolog.agent.spec import AgentSpec
from stenolog.context.window import Limits
from stenolog.gateway.viewer.routes import (
    BAR_WIDTH,
    divide_system_tokens,
    load_context_page,
)
from stenolog.testing.scripted_model import ScriptedModel
from support.tool_samples import SECRET

_KEY = "s"


def _looked_up(what: str) -> str:
    """Look something up."""
    return what


@pytest.mark.parametrize("summary", ["", "Owls are kept.", "A very long tale of owls. " * 400])
@pytest.mark.parametrize("system", ["", "You keep owls."])
def test_parts_add_up_to_the_request_and_the_budget(
    tmp_path: Path, summary: str, system: str
) -> None:
    spec = AgentSpec(
        consolidation=False,
        sessions=str(tmp_path),
        system=system,
        limits=Limits(max_context_tokens=2_000),
    )
    agent = AgentInstance.open(spec, model=ScriptedModel(["x"]), tools=[_looked_up])
    try:
        store = agent.store
        assert store is not None
        bodies: list[dict[str, Any]] = [
            {"role": "user" if number % 2 else "assistant", "content": f"Owl {number}. " * 20}
            for number in range(60)
        ]
        store.add_messages(_KEY, bodies)
        store.checkpoint(_KEY, summary=summary, upto=4)
        found = load_context_page(agent, _KEY)
    finally:
        asyncio.run(agent.close())
    assert found["left_out"] > 0
    assert sum(one["tokens"] for one in found["request_bar"]) == found["tokens"]
    message_tokens = sum(one["tokens"] for one in found["messages"])
    assert message_tokens + found["tools_tokens"] == found["tokens"]
    assert sum(one["tokens"] for one in found["context_bar"]) == found["context_tokens"]
    assert sum(one["width"] for one in found["request_bar"]) == pytest.approx(BAR_WIDTH)
    parts = {one["kind"]: one["tokens"] for one in found["context_bar"]}
    assert min(parts.values()) >= 0
    assert parts["tools"] > 0
    assert bool(parts["summary"]) == bool(summary)


def test_secrets_are_covered_in_every_part_of_the_request(tmp_path: Path) -> None:
    def look_up(key: str) -> str:
        """Look something up."""
        return key

    look_up.__doc__ = f"Look something up with the key {SECRET}."
    spec = AgentSpec(consolidation=False, sessions=str(tmp_path), system=f"Your key is {SECRET}.")
    agent = AgentInstance.open(spec, model=ScriptedModel(["x"]), tools=[look_up])
    call = {"name": "look_up", "arguments": f'{{"key": "{SECRET}"}}'}
    try:
        assert agent.memory is not None
        agent.memory.remember(f"The harbour key is {SECRET}.", key=_KEY)
        agent.store.add_messages(
            _KEY,
            [
                {"role": "user", "content": f"The harbour key is {SECRET}."},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": "1", "type": "function", "function": call}],
                },
                {"role": "tool", "tool_call_id": "1", "content": SECRET},
                {"role": "user", "content": "What is the harbour key?"},
            ],
        )
        agent.store.checkpoint(_KEY, summary=f"They talked about {SECRET}.", upto=0)
        found = load_context_page(agent, _KEY)
    finally:
        asyncio.run(agent.close())
    assert found["recalled"]
    assert found["tools"] is not None
    assert len(found["messages"]) == 5
    parts = [found["tools"], *found["recalled"], *(one["content"] for one in found["messages"])]
    for part in parts:
        assert SECRET not in re.sub(r"<button[^>]*>", "", part)
    assert sum(part.count(f'data-secret="{SECRET}"') for part in parts) >= 5
    assert not any(SECRET[:12] in one["line"] for one in found["messages"])


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500), st.booleans())
def test_parts_of_the_system_message_are_complete(
    head: int, system: int, memory: int, summary: bool
) -> None:
    parts = divide_system_tokens(head, system=system, memory=memory, has_summary=summary)
    assert sum(parts.values()) == head
    assert min(parts.values()) >= 0


def test_session_in_an_unsupported_format_has_a_page_with_the_reason(tmp_path: Path) -> None:
    spec = AgentSpec(consolidation=False, sessions=str(tmp_path))
    agent = AgentInstance.open(spec, model=ScriptedModel(["x"]))
    try:
        item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        agent.store.add_messages(_KEY, [{"role": "user", "content": "hello"}, item])
        found = load_context_page(agent, _KEY)
    finally:
        asyncio.run(agent.close())
    assert "'s': the message at seq 2 is an item of type 'function_call'" in found["problem"]
