"""Tests the options of a turn: a client's system prompt, model, and tools."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from stenolog.agent.loop import AgentLoop
from stenolog.agent.turn_events import Answer, InboundMessage, MessageStored, TurnOptions
from stenolog.context.turn_state import turn_state
from stenolog.errors import UsageError
from stenolog.providers.chat_model import Delta
from stenolog.stores.base import Store
from stenolog.testing.scripted_model import ScriptedModel, tool_call
from support.agents import KEY, STORES, agent_loop, bodies, roles

every_store = pytest.mark.parametrize("store", STORES)

LAMP = {"type": "function", "function": {"name": "lamp", "parameters": {"type": "object"}}}
OPTIONS = TurnOptions(tools=(LAMP,))


def clock() -> str:
    """The time."""
    return "noon"


def _calling(*names: str) -> dict[str, Any]:
    calls = [tool_call(name, id=f"call-{name}") for name in names]
    return {"role": "assistant", "content": "I try.", "tool_calls": calls}


def _model_of(loop: AgentLoop) -> ScriptedModel:
    """Return the model of the agent."""
    model = loop.registry.agent().model
    assert isinstance(model, ScriptedModel)
    return model


async def _ask(loop: AgentLoop, text: str, options: TurnOptions = OPTIONS, id: str = "") -> Answer:
    return await loop.handle(InboundMessage(key=KEY, content=text, id=id), options=options)


async def _result(loop: AgentLoop, text: str) -> Answer:
    async def change(leased: Store) -> None:
        body = {"role": "tool", "tool_call_id": "call-lamp", "content": text}
        assert await loop.run(leased.add_full_message, KEY, body)

    return await loop.change_and_answer(KEY, change, options=OPTIONS)


@every_store
def test_call_of_a_client_tool_ends_the_turn_until_its_result(store: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with agent_loop(store, tmp_path, [_calling("lamp"), "It shines."]) as loop:
            answer = await _ask(loop, "The lamp, please.")
            assert (answer.outcome, answer.text) == ("calls", "I try.")
            assert [call["function"]["name"] for call in answer.calls] == ["lamp"]
            assert roles(loop) == ["user", "assistant"]
            answer = await _result(loop, "on")
            assert (answer.outcome, answer.text) == ("answered", "It shines.")
            assert roles(loop) == ["user", "assistant", "tool", "assistant"]

    asyncio.run(main())


@every_store
def test_agent_calls_run_and_client_calls_are_returned(store: str, tmp_path: Path) -> None:
    async def main() -> None:
        script = [_calling("clock", "lamp"), "Done."]
        async with agent_loop(store, tmp_path, script, tools=[clock]) as loop:
            answer = await _ask(loop, "Both, please.")
            assert [call["id"] for call in answer.calls] == ["call-lamp"]
            assert roles(loop) == ["user", "assistant", "tool"]
            await _result(loop, "on")
            results = {body.get("tool_call_id"): body["content"] for body in bodies(loop)}
            assert (results["call-clock"], results["call-lamp"]) == ("noon", "on")

    asyncio.run(main())


@every_store
def test_turn_that_waits_for_its_client_is_not_interrupted(store: str, tmp_path: Path) -> None:
    async def begin() -> None:
        async with agent_loop(store, tmp_path, [_calling("lamp")]) as loop:
            await _ask(loop, "The lamp, please.", id="m1")

    async def after_a_restart() -> None:
        async with agent_loop(store, tmp_path, ["It shines."]) as loop:
            assert await loop.resume() == []
            assert roles(loop) == ["user", "assistant"]
            # If asked again, the same calls are returned again without a request to the model.
            answer = await _ask(loop, "The lamp, please.", id="m1")
            assert [call["id"] for call in answer.calls] == ["call-lamp"]
            answer = await _result(loop, "on")
            assert answer.text == "It shines."

    asyncio.run(begin())
    asyncio.run(after_a_restart())


def test_turn_options_apply_to_one_turn_only(tmp_path: Path) -> None:
    async def main() -> None:
        async with agent_loop("jsonl", tmp_path, ["Arr.", "Hello."], tools=[clock]) as loop:
            own = TurnOptions(system="Speak like a pirate.", tools=(LAMP,), own_tools=False)
            await _ask(loop, "Hello.", own)
            await _ask(loop, "Hello.", TurnOptions())
            first, second = _model_of(loop).asked
            assert first.messages[0]["content"].startswith("Speak like a pirate.")
            assert [tool["function"]["name"] for tool in first.tools] == ["lamp"]
            assert "pirate" not in str(second.messages[0])
            assert "lamp" not in str(second.tools)

    asyncio.run(main())


def test_client_tool_shadows_an_agent_tool(tmp_path: Path) -> None:
    async def main() -> None:
        async with agent_loop("jsonl", tmp_path, [_calling("clock")], tools=[clock]) as loop:
            mine = {"type": "function", "function": {"name": "clock"}}
            answer = await _ask(loop, "The time?", TurnOptions(tools=(mine,)))
            assert answer.outcome == "calls"
            names = [tool["function"]["name"] for tool in _model_of(loop).asked[0].tools]
            assert names.count("clock") == 1

    asyncio.run(main())


def test_client_call_in_a_cut_off_answer_does_not_run_the_agent_tool(tmp_path: Path) -> None:
    made: list[str] = []

    def lamp() -> str:
        """Switch a lamp."""
        made.append("lamp")
        return "on"

    class CutOffModel(ScriptedModel):
        async def stream(self, messages: Any, **options: Any) -> Any:
            async for delta in super().stream(messages, **options):
                yield delta
            if len(self.asked) == 1:
                yield Delta(finish="length")

    async def main() -> None:
        model = CutOffModel([_calling("lamp", "clock", "clock-2"), "Done."])
        async with agent_loop("jsonl", tmp_path, model, tools=[clock, lamp]) as loop:
            assert (await _ask(loop, "All, please.")).text == "Done."
            results = {body.get("tool_call_id"): body["content"] for body in bodies(loop)}
            assert "not made" in results["call-lamp"]
            assert "not made" in results["call-clock-2"]
            assert "not made" in results["call-clock"]
            # A process that is killed before the results are stored leaves these two messages.
            history = loop.registry.agent().sessions.get_history(KEY)[:2]
            assert [call.name for call in turn_state(history).client_calls] == ["lamp"]
            assert "lamp" not in [call.name for call in turn_state(history).open_calls]

    asyncio.run(main())
    assert made == []


def test_model_that_is_not_allowed_is_rejected(tmp_path: Path) -> None:
    async def main() -> None:
        async with agent_loop("jsonl", tmp_path, []) as loop:
            with pytest.raises(UsageError, match="not a model of this agent"):
                loop.registry.agent().model_for("other")
            answer = await _ask(loop, "Hello.", TurnOptions(model="other"))
            assert answer.outcome == "failed"

    asyncio.run(main())


def test_message_of_an_api_is_never_a_command(tmp_path: Path) -> None:
    async def main() -> None:
        async with agent_loop("jsonl", tmp_path, ["Yes?", "Yes?"]) as loop:
            for words in ("/clear", "//clear"):
                inbound = InboundMessage(key=KEY, content=words)
                answer = await loop.handle(inbound, allow_commands=False)
                assert answer.outcome == "answered"
            assert [body["content"] for body in bodies(loop)[::2]] == ["/clear", "//clear"]

    asyncio.run(main())


def test_stored_event_comes_before_the_model_call(tmp_path: Path) -> None:
    async def main() -> None:
        async with agent_loop("jsonl", tmp_path, ["Yes."]) as loop:
            told: list[Any] = []
            await loop.handle(InboundMessage(key=KEY, content="Hello."), on_event=told.append)
            assert told[0] == MessageStored(seq=1)

    asyncio.run(main())
