"""Tests that turns of a killed process are resumed or closed, depending on the log."""

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stenolog.agent.tools import tool
from stenolog.agent.turn import CUT_OFF_TEXT, INTERRUPTED_MARK
from stenolog.catalog.message_metadata import mark_model, mark_received, mark_seen
from stenolog.stores.base import Store
from stenolog.testing.scripted_model import ScriptedModel
from support.agents import (
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
    """Write a log as a killed process leaves it."""
    instance = open_agent(store, folder, ScriptedModel([]))
    for body in said:
        assert instance.sessions.add_full_message(key, body)
    asyncio.run(instance.close())


def _said(text: str) -> dict[str, Any]:
    return mark_received({"role": "user", "content": text})


def _calling(answer: dict[str, Any]) -> dict[str, Any]:
    return mark_model({"role": "assistant", "content": None, **answer}, model="m", seconds=0.1)


@every_store
def test_unanswered_message_is_answered_at_the_next_start(store: str, tmp_path: Path) -> None:
    _left(store, tmp_path, _said("Are you there?"))

    async def main() -> None:
        async with agent_loop(store, tmp_path, ["Yes."]) as loop:
            [answer] = await loop.resume()
            assert (answer.key, answer.outcome, answer.text) == (KEY, "answered", "Yes.")
            assert roles(loop) == ["user", "assistant"]
            assert await loop.resume() == []

    asyncio.run(main())


@every_store
def test_resume_repeats_repeatable_calls_and_marks_others(store: str, tmp_path: Path) -> None:
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
            assert results == {"1": "seen a", "2": CUT_OFF_TEXT}

    asyncio.run(main())
    assert ran == ["a"]


@every_store
def test_messages_without_a_role_are_not_answered(store: str, tmp_path: Path) -> None:
    async def nothing(_: Store) -> None:
        pass

    async def main() -> None:
        async with agent_loop(store, tmp_path, []) as loop:
            sessions = loop.registry.agent().sessions
            assert sessions.add_full_message(KEY, {"content": "x"})
            answer = await loop.change_and_answer(KEY, nothing)
            assert (answer.outcome, answer.text) == ("elsewhere", "")

    asyncio.run(main())


@every_store
def test_turn_killed_between_tools_and_answer_resumes_there(store: str, tmp_path: Path) -> None:
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
def test_new_message_closes_open_calls(store: str, tmp_path: Path) -> None:
    _left(store, tmp_path, _said("Pay."), _calling(called("pay")))

    async def main() -> None:
        model = ScriptedModel(["I do not know whether it was paid."])
        async with agent_loop(store, tmp_path, model) as loop:
            answer = await say(loop, "Well?")
            assert answer.outcome == "answered"
            sent = model.asked[0].messages
            assert [body["role"] for body in sent[1:]] == ["user", "assistant", "tool", "user"]
            assert sent[3]["content"] == CUT_OFF_TEXT

    asyncio.run(main())


@every_store
def test_many_sessions_are_resumed_independently(store: str, tmp_path: Path) -> None:
    instance = open_agent(store, tmp_path, ScriptedModel([]))
    for number in range(12):
        instance.sessions.add_full_message(f"cli:{number}", _said(f"I am {number}"))
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
def test_turn_leased_by_another_process_is_skipped(store: str, tmp_path: Path) -> None:
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
def test_message_waits_for_the_answer_of_another_process(store: str, tmp_path: Path) -> None:
    async def main() -> None:
        other = open_agent(store, tmp_path, ScriptedModel([]))
        assert other.store is not None
        async with agent_loop(store, tmp_path, ["It was not answered."]) as loop:
            await say(loop, "To begin with.")
            with other.store.lease(KEY, ttl=60) as turn:
                waiting = asyncio.create_task(say(loop, "Hello?"))
                await until(lambda: len(bodies(loop)) == 3)
                theirs = {"role": "assistant", "content": "From elsewhere."}
                turn.store.add_full_message(KEY, mark_seen(theirs, seen=3, answers=[3]))
                answer = await waiting
            assert (answer.outcome, answer.text) == ("elsewhere", "From elsewhere.")
        await other.close()

    asyncio.run(main())


_OPEN_CALL = calls(("look", '{"name": "a"}', "1"))


@every_store
@pytest.mark.parametrize(
    "said",
    [
        [{"role": "user", "content": "Why was I charged twice?"}],
        [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": None, **_OPEN_CALL},
        ],
        [_said("asked of us"), {"role": "user", "content": "asked of the other program"}],
    ],
    ids=["a message", "tool calls", "the last of two messages"],
)
def test_turn_of_another_program_is_neither_answered_nor_closed(
    store: str, tmp_path: Path, said: list[dict[str, Any]]
) -> None:
    _left(store, tmp_path, *said)

    async def main() -> None:
        for resume_within in (86_400.0, -1.0):
            spec = replace(SPEC, resume_within=resume_within)
            async with agent_loop(store, tmp_path, [], spec=spec) as loop:
                assert await loop.resume() == []
                assert await loop.resume() == []
                assert await loop.resume(KEY) == []
                history = loop.registry.agent().sessions.get_history(KEY)
                assert [message.to_dict() for message in history] == said

    asyncio.run(main())


@pytest.mark.parametrize("store", ["jsonl", "sqlite"])
def test_session_of_another_program_is_resumed_after_a_stenolog_agent_used_it(
    store: str, tmp_path: Path
) -> None:
    _left(store, tmp_path, {"role": "user", "content": "Hello?"})

    async def main() -> None:
        async with agent_loop(store, tmp_path, ["Yes."]) as loop:
            assert await loop.resume() == []
            loop.registry.agent().sessions.add_full_message(KEY, _said("Are you there?"))
            assert [one.text for one in await loop.resume()] == ["Yes."]

    asyncio.run(main())


def test_open_calls_of_another_program_do_not_run(tmp_path: Path) -> None:
    ran: list[str] = []

    @tool(repeatable=True)
    def look(name: str) -> str:
        """Look something up."""
        ran.append(name)
        return f"seen {name}"

    theirs = [{"role": "user", "content": "Look."}, {"role": "assistant", **_OPEN_CALL}]
    _left("jsonl", tmp_path, *theirs)

    async def main() -> None:
        async with agent_loop("jsonl", tmp_path, ["Well."], tools=[look]) as loop:
            assert (await say(loop, "And now?")).text == "Well."
            assert [body["content"] for body in bodies(loop) if body["role"] == "tool"] == [
                CUT_OFF_TEXT
            ]

    asyncio.run(main())
    assert ran == []


def test_resumed_and_closed_turns_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="stenolog")
    long_ago = datetime.now(UTC) - timedelta(days=3)
    with_store = open_agent("jsonl", tmp_path, ScriptedModel([]))
    assert with_store.store is not None
    with_store.store.add_messages("cli:old:one", [_said("Hello?")], at=[long_ago])
    with_store.store.add_full_message(KEY, _said("one"))
    with_store.store.add_full_message(KEY, _said("two"))
    asyncio.run(with_store.close())

    async def main() -> None:
        async with agent_loop("jsonl", tmp_path, ["Both."]) as loop:
            found = {(answer.outcome, answer.text) for answer in await loop.resume()}
            assert found == {("interrupted", INTERRUPTED_MARK), ("answered", "Both.")}
            assert await loop.resume() == []

    asyncio.run(main())
    logged = [record.getMessage() for record in caplog.records]
    assert sorted(line for line in logged if line.startswith(("Answered", "Closed"))) == [
        f"Answered the unanswered messages in {KEY}",
        "Closed the unanswered turn in cli:old:one: it is too old",
    ]
