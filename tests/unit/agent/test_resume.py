"""Turns that a killed process left are gone on with, or closed: the log says where."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stenolog.agent.tools import tool
from stenolog.agent.turn import CUT_OFF, INTERRUPTED
from stenolog.providers.scripted import ScriptedModel
from unit.agent.agents import (
    KEY,
    SPEC,
    STORES,
    agent_loop,
    bodies,
    called,
    calls,
    open_agent,
    roles,
    say,
    until,
)

every_store = pytest.mark.parametrize("store", STORES)


def _left(store: str, folder: Path, *said: dict[str, Any], key: str = KEY) -> None:
    """Have a log as a killed process left it."""
    instance = open_agent(store, folder, ScriptedModel([]))
    for body in said:
        assert instance.sessions.add_full_message(key, body)
    asyncio.run(instance.close())


def _said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _calling(answer: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, **answer}


@every_store
def test_an_unanswered_message_is_answered_at_the_next_start(store: str, tmp_path: Path) -> None:
    _left(store, tmp_path, _said("Are you there?"))

    async def main() -> None:
        async with agent_loop(store, tmp_path, ["Yes."]) as loop:
            [answer] = await loop.resume()
            assert (answer.key, answer.outcome, answer.text) == (KEY, "answered", "Yes.")
            assert roles(loop) == ["user", "assistant"]
            assert await loop.resume() == []

    asyncio.run(main())


@every_store
def test_calls_that_may_be_repeated_are_and_others_get_a_mark(store: str, tmp_path: Path) -> None:
    ran: list[str] = []

    @tool(repeatable=True)
    def look(name: str) -> str:
        """Look something up."""
        ran.append(name)
        return f"seen {name}"

    def pay(name: str) -> str:
        """Do something that must not be done twice."""
        ran.append(name)
        return f"paid {name}"

    left = calls(("look", '{"name": "a"}', "1"), ("pay", '{"name": "b"}', "2"))
    _left(store, tmp_path, _said("Do both."), _calling(left))

    async def main() -> None:
        model = ScriptedModel(["One was done again."])
        async with agent_loop(store, tmp_path, model, tools=[look, pay]) as loop:
            [answer] = await loop.resume(KEY)
            assert answer.text == "One was done again."
            results = {
                body["tool_call_id"]: body["content"]
                for body in bodies(loop)
                if body["role"] == "tool"
            }
            assert results == {"1": "seen a", "2": CUT_OFF}

    asyncio.run(main())
    assert ran == ["a"]


@every_store
def test_a_turn_that_broke_off_between_tools_and_answer_goes_on_there(
    store: str, tmp_path: Path
) -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    _left(store, tmp_path, _said("What?"), _calling(called("add")), result)

    async def main() -> None:
        model = ScriptedModel(["It is 42."])
        async with agent_loop(store, tmp_path, model) as loop:
            await loop.resume()
            assert [body["role"] for body in model.asked[0].messages[1:]] == [
                *("user", "assistant", "tool")
            ]
            assert roles(loop) == ["user", "assistant", "tool", "assistant"]

    asyncio.run(main())


@every_store
def test_a_new_message_finds_the_open_calls_closed(store: str, tmp_path: Path) -> None:
    _left(store, tmp_path, _said("Pay."), _calling(called("pay")))

    async def main() -> None:
        model = ScriptedModel(["I do not know whether it was paid."])
        async with agent_loop(store, tmp_path, model) as loop:
            answer = await say(loop, "Well?")
            assert answer.outcome == "answered"
            sent = model.asked[0].messages
            assert [body["role"] for body in sent[1:]] == ["user", "assistant", "tool", "user"]
            assert sent[3]["content"] == CUT_OFF

    asyncio.run(main())


def test_a_turn_that_is_too_old_is_closed_with_a_mark(tmp_path: Path) -> None:
    with_store = open_agent("jsonl", tmp_path, ScriptedModel([]))
    assert with_store.store is not None
    long_ago = datetime.now(UTC) - timedelta(days=3)
    with_store.store.add_messages(KEY, [_said("Hello?")], at=[long_ago])
    asyncio.run(with_store.close())

    async def main() -> None:
        async with agent_loop("jsonl", tmp_path, []) as loop:
            [answer] = await loop.resume()
            assert (answer.outcome, answer.text) == ("interrupted", INTERRUPTED)
            assert await loop.resume() == []

    asyncio.run(main())


def test_what_an_answer_had_not_seen_is_answered_although_it_stands_before_it(
    tmp_path: Path,
) -> None:
    answer = {"role": "assistant", "content": "To the first.", "stenolog": {"seen": 1}}
    _left("jsonl", tmp_path, _said("first"), _said("second"), answer)

    async def main() -> None:
        async with agent_loop("jsonl", tmp_path, ["To the second."]) as loop:
            assert [one.text for one in await loop.resume()] == ["To the second."]

    asyncio.run(main())


@every_store
def test_many_sessions_are_resumed_each_for_itself(store: str, tmp_path: Path) -> None:
    instance = open_agent(store, tmp_path, ScriptedModel([]))
    for number in range(12):
        instance.sessions.add_message(f"cli:{number}", "user", f"I am {number}")
        if number % 2:
            instance.sessions.add_message(f"cli:{number}", "assistant", "Hello.")
    asyncio.run(instance.close())

    def script(messages: Any, tools: Any) -> str:
        del tools
        return f"You said: {messages[-1]['content']}"

    async def main() -> None:
        async with agent_loop(store, tmp_path, ScriptedModel(script)) as loop:
            found = {answer.key: answer.text for answer in await loop.resume()}
            assert found == {f"cli:{n}": f"You said: I am {n}" for n in range(0, 12, 2)}

    asyncio.run(main())


@pytest.mark.parametrize("store", ["jsonl", "sqlite"])
def test_a_turn_that_another_process_has_is_left_to_it(store: str, tmp_path: Path) -> None:
    _left(store, tmp_path, _said("Hello?"))

    async def main() -> None:
        other = open_agent(store, tmp_path, ScriptedModel([]))
        assert other.store is not None
        async with agent_loop(store, tmp_path, ["Yes."]) as loop:
            with other.store.lease(KEY, ttl=60):
                assert await loop.resume(KEY) == []
                assert await loop.resume() == []
            assert [one.text for one in await loop.resume()] == ["Yes."]
        await other.close()

    asyncio.run(main())


@pytest.mark.parametrize("store", ["jsonl", "sqlite"])
def test_a_message_waits_for_another_process_and_takes_its_answer(
    store: str, tmp_path: Path
) -> None:
    async def main() -> None:
        other = open_agent(store, tmp_path, ScriptedModel([]))
        assert other.store is not None
        async with agent_loop(store, tmp_path, ["It was not answered."]) as loop:
            await say(loop, "To begin with.")
            with other.store.lease(KEY, ttl=60) as turn:
                waiting = asyncio.create_task(say(loop, "Hello?"))
                await until(lambda: len(bodies(loop)) == 3)
                turn.store.add_message(KEY, "assistant", "From elsewhere.")
                answer = await waiting
            assert (answer.outcome, answer.text) == ("elsewhere", "From elsewhere.")
        await other.close()

    asyncio.run(main())


def test_resume_within_can_be_never(tmp_path: Path) -> None:
    _left("jsonl", tmp_path, _said("Hello?"))

    async def main() -> None:
        spec = replace(SPEC, resume_within=-1.0)
        async with agent_loop("jsonl", tmp_path, [], spec=spec) as loop:
            assert [one.outcome for one in await loop.resume()] == ["interrupted"]

    asyncio.run(main())


@pytest.mark.parametrize("store", ["jsonl", "sqlite"])
def test_what_was_asked_in_another_program_is_not_answered_unasked(
    store: str, tmp_path: Path
) -> None:
    instance = open_agent(store, tmp_path, ScriptedModel([]))
    assert instance.store is not None
    receipt = {"sha256": "x", "last_seq": 1}
    for key, said in ((KEY, ["Old?"]), ("cli:gone-on", ["Old?", "And now?"])):
        for text in said:
            instance.store.add_message(key, "user", text)
        instance.store.set_meta(key, imported=[receipt])
    asyncio.run(instance.close())

    async def main() -> None:
        async with agent_loop(store, tmp_path, ["Now.", "Now."]) as loop:
            assert [one.key for one in await loop.resume()] == ["cli:gone-on"]
            assert [one.text for one in await loop.resume(KEY)] == ["Now."], "who asks for it"

    asyncio.run(main())
