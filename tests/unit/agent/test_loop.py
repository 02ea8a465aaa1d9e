"""Tests the agent loop on every kind of session store: JSONL, SQLite and SessionManager."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stenolog.agent.tools import tool
from stenolog.agent.turn import SAME_CALLS_TEXT
from stenolog.agent.turn_events import (
    ModelCalled,
    SummaryCreated,
    TextDelta,
    ToolFinished,
    ToolStarted,
)
from stenolog.context.window import Limits
from stenolog.errors import ModelUnavailable, OnceConflict, StoreClosed
from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from stenolog.transfer.session_import import add_aliases
from support.agents import (
    KEY,
    SPEC,
    STORES,
    Heard,
    agent_loop,
    bodies,
    called,
    calls,
    reopened,
    roles,
    say,
    until,
)

every_store = pytest.mark.parametrize("store", STORES)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@every_store
def test_message_and_answer_are_stored(store: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with agent_loop(store, tmp_path, ["Hello, Ann."]) as loop:
            heard = Heard()
            answer = await say(loop, "I am Ann.", on_event=heard)
            assert (answer.outcome, answer.text, answer.saved) == ("answered", "Hello, Ann.", True)
            assert answer.seq == 2
            assert "".join(one.text for one in heard.of(TextDelta)) == "Hello, Ann."
            [asked] = heard.of(ModelCalled)
            assert 0 < asked.tokens < asked.budget

    asyncio.run(main())
    assert [body["content"] for body in reopened(store, tmp_path)] == ["I am Ann.", "Hello, Ann."]


@every_store
def test_message_is_stored_before_the_model_is_called(store: str, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def look(messages: Any) -> str:
        del messages
        seen.append([body["content"] for body in reopened(store, tmp_path)])
        return "yes"

    async def main() -> None:
        async with agent_loop(store, tmp_path, [look]) as loop:
            await say(loop, "Are you there?")

    asyncio.run(main())
    assert seen == [["Are you there?"]]


@every_store
def test_tool_calls_run_and_the_model_gets_their_results(store: str, tmp_path: Path) -> None:
    script: list[Any] = [called("add", '{"a": 2, "b": 3}'), "It is 5."]

    async def main() -> None:
        model = ScriptedModel(script)
        async with agent_loop(store, tmp_path, model, tools=[add]) as loop:
            heard = Heard()
            answer = await say(loop, "2 + 3?", on_event=heard)
            assert answer.text == "It is 5."
            assert roles(loop) == ["user", "assistant", "tool", "assistant"]
            assert bodies(loop)[2] == {"role": "tool", "tool_call_id": "c1", "content": "5"}
            assert [one.name for one in heard.of(ToolStarted)] == ["add"]
            [ended] = heard.of(ToolFinished)
            assert (ended.text, ended.failed) == ("5", False)
            assert model.asked[1].messages[-1]["content"] == "5"
            assert "add" in [one["function"]["name"] for one in model.asked[0].tools]

    asyncio.run(main())


@every_store
def test_calls_of_one_answer_run_concurrently(store: str, tmp_path: Path) -> None:
    both = asyncio.Barrier(2)

    async def meet(name: str) -> str:
        """Wait for the other."""
        await both.wait()
        return f"{name} was here"

    script = [calls(("meet", '{"name": "a"}', "1"), ("meet", '{"name": "b"}', "2")), "Both."]

    async def main() -> None:
        async with agent_loop(store, tmp_path, script, tools=[meet]) as loop:
            assert (await say(loop, "go")).text == "Both."
            results = {
                body["tool_call_id"]: body["content"]
                for body in bodies(loop)
                if body["role"] == "tool"
            }
            assert results == {"1": "a was here", "2": "b was here"}

    asyncio.run(main())


def test_tool_marked_alone_runs_after_the_others(tmp_path: Path) -> None:
    order: list[str] = []

    @tool(alone=True)
    def last() -> None:
        """Run alone."""
        order.append("alone")

    async def first() -> None:
        """Run beside others."""
        await asyncio.sleep(0)
        order.append("together")

    script = [calls(("last", "{}", "1"), ("first", "{}", "2"), ("first", "{}", "3")), "ok"]

    async def main() -> None:
        async with agent_loop("jsonl", tmp_path, script, tools=[last, first]) as loop:
            await say(loop, "go")

    asyncio.run(main())
    assert order == ["together", "together", "alone"]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (called("nothing"), "there is no tool 'nothing'"),
        (called("add", "{"), "the arguments are no JSON"),
        (called("add", "[1]"), "no JSON object"),
        (called("add", '{"a": 1}'), "missing required field `b`"),
        (called("add", '{"a": 1, "b": 2, "c": 3}'), "unknown field `c`"),
        (called("fail"), "ZeroDivisionError: oh no"),
        (called("leave"), "SystemExit"),
        (called("first"), "StopIteration: none left"),
        (called("hang"), "did not end within 0.05 s"),
        (called("give_up"), "TimeoutError: too late"),
        (called("end"), "was cancelled from inside"),
    ],
)
def test_tool_errors_become_results_for_the_model(
    call: dict[str, Any], told: str, tmp_path: Path
) -> None:
    def fail() -> None:
        """Fail."""
        raise ZeroDivisionError("oh no")

    def leave() -> None:
        """End the program."""
        raise SystemExit(3)

    @tool(timeout=5)
    def first() -> None:
        """Return the first item, as `next` does."""
        raise StopIteration("none left")

    @tool(timeout=0.05)
    async def hang() -> None:
        """Never end."""
        await asyncio.Event().wait()

    async def give_up() -> None:
        """Raise a timeout that is not the tool's."""
        raise TimeoutError("too late")

    async def end() -> None:
        """Cancel from inside."""
        raise asyncio.CancelledError

    async def main() -> None:
        tools: list[Any] = [add, fail, leave, first, hang, give_up, end]
        script = [call, "I see."]
        async with agent_loop("jsonl", tmp_path, script, tools=tools) as loop:
            heard = Heard()
            assert (await say(loop, "go", on_event=heard)).text == "I see."
            [ended] = heard.of(ToolFinished)
            assert ended.failed
            assert told in ended.text
            assert bodies(loop)[2]["content"] == ended.text

    asyncio.run(main())


def test_long_tool_result_is_truncated_with_a_note(tmp_path: Path) -> None:
    def much() -> str:
        """Say much."""
        return "x" * 1_000

    async def main() -> None:
        spec = replace(SPEC, tool_output_limit=100)
        async with agent_loop(
            "jsonl", tmp_path, [called("much"), "ok"], spec=spec, tools=[much]
        ) as loop:
            await say(loop, "go")
            result = bodies(loop)[2]["content"]
            assert result.startswith("x" * 100 + "\n[… 900 more")

    asyncio.run(main())


@pytest.mark.parametrize("store", ["jsonl", "sqlite"])
def test_reused_id_with_other_content_is_rejected(store: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with agent_loop(store, tmp_path, ["One.", "Two."]) as loop:
            await say(loop, "Count.", id="update-1")
            refused = await say(loop, "Something else.", id="update-1")
            assert (refused.outcome, refused.saved) == ("failed", False)
            assert isinstance(refused.error, OnceConflict)
            assert "idempotency key 'update-1' was used" in refused.text
            assert roles(loop) == ["user", "assistant"]
            assert (await say(loop, "Go on.")).text == "Two."

    asyncio.run(main())


@every_store
def test_message_during_a_turn_is_in_the_next_request(store: str, tmp_path: Path) -> None:
    waits, goes_on = asyncio.Event(), asyncio.Event()

    async def wait() -> str:
        """Wait."""
        waits.set()
        await goes_on.wait()
        return "waited"

    async def main() -> None:
        model = ScriptedModel([called("wait"), "Both are answered."])
        async with agent_loop(store, tmp_path, model, tools=[wait]) as loop:
            first = asyncio.create_task(say(loop, "first"))
            await waits.wait()
            second = asyncio.create_task(say(loop, "second"))
            await until(lambda: len(bodies(loop)) == 3)
            goes_on.set()
            answers = [await first, await second]
            assert [one.outcome for one in answers] == ["answered", "elsewhere"]
            assert {one.text for one in answers} == {"Both are answered."}
            sent = [body["content"] for body in model.asked[1].messages if body["role"] == "user"]
            assert sent == ["first", "second"]

    asyncio.run(main())


@every_store
def test_message_during_the_final_answer_gets_its_own_answer(store: str, tmp_path: Path) -> None:
    asked, goes_on = asyncio.Event(), asyncio.Event()

    class Slow(ScriptedModel):
        async def stream(self, messages: Any, **how: Any) -> Any:
            if not asked.is_set():
                asked.set()
                await goes_on.wait()
            async for delta in super().stream(messages, **how):
                yield delta

    async def main() -> None:
        model = Slow(["To the first.", "To the second."])
        async with agent_loop(store, tmp_path, model) as loop:
            first = asyncio.create_task(say(loop, "first"))
            await asked.wait()
            second = asyncio.create_task(say(loop, "second"))
            await until(lambda: len(bodies(loop)) == 2)
            goes_on.set()
            assert (await first).text == "To the first."
            assert (await second).text == "To the second."
            assert roles(loop) == ["user", "user", "assistant", "assistant"]

    asyncio.run(main())


@every_store
def test_stop_during_a_tool_stores_a_result_for_its_call(store: str, tmp_path: Path) -> None:
    waits = asyncio.Event()

    async def wait() -> None:
        """Never end."""
        waits.set()
        await asyncio.Event().wait()

    async def main() -> None:
        model = ScriptedModel([called("wait"), "Next."])
        async with agent_loop(store, tmp_path, model, tools=[wait]) as loop:
            speaking = asyncio.create_task(say(loop, "Wait."))
            await waits.wait()
            await loop.stop(KEY)
            assert (await speaking).outcome == "interrupted"
            assert roles(loop) == ["user", "assistant", "tool", "assistant"]
            assert "stopped" in bodies(loop)[2]["content"]
            await say(loop, "Go on.")
            assert [body["role"] for body in model.asked[1].messages[1:]] == [
                *("user", "assistant", "tool", "assistant", "user")
            ]

    asyncio.run(main())


@every_store
def test_message_stays_unanswered_if_the_model_fails(store: str, tmp_path: Path) -> None:
    async def main() -> None:
        model = ScriptedModel([ModelUnavailable("it is down"), "Both."])
        async with agent_loop(store, tmp_path, model) as loop:
            failed = await say(loop, "first")
            assert (failed.outcome, failed.text, failed.saved) == ("failed", "it is down", True)
            assert (await say(loop, "second")).text == "Both."
            assert roles(loop) == ["user", "user", "assistant"]

    asyncio.run(main())


def test_repeated_identical_calls_end_the_turn(tmp_path: Path) -> None:
    async def main() -> None:
        script = [called("add", '{"a": 1, "b": 1}', f"c{number}") for number in range(20)]
        async with agent_loop("jsonl", tmp_path, script, tools=[add]) as loop:
            answer = await say(loop, "go")
            assert answer.text == SAME_CALLS_TEXT
            assert roles(loop).count("tool") == 3
            assert await loop.resume(KEY) == []

    asyncio.run(main())


def test_turn_ends_after_the_maximum_iterations(tmp_path: Path) -> None:
    async def main() -> None:
        script = [called("add", f'{{"a": {n}, "b": 1}}', f"c{n}") for n in range(20)]
        spec = replace(SPEC, max_iterations=4)
        async with agent_loop("jsonl", tmp_path, script, tools=[add], spec=spec) as loop:
            assert "after 4 steps" in (await say(loop, "go")).text

    asyncio.run(main())


@every_store
def test_long_conversation_is_summarized_after_the_answer_with_an_event(
    store: str, tmp_path: Path
) -> None:
    async def main() -> None:
        spec = replace(SPEC, limits=Limits(max_history_messages=6))
        model = ScriptedModel([f"ok {number}" for number in range(20)])
        async with agent_loop(store, tmp_path, model, spec=spec) as loop:
            heard = Heard()
            for number in range(6):
                await say(loop, f"message {number}", on_event=heard)
            await loop.wait_until_idle()
            assert heard.of(SummaryCreated)
            sessions = loop.registry.agent().sessions
            assert len(sessions.get_history(KEY)) <= 6
            assert len(sessions.get_history(KEY, full=True)) == 12
            assert sessions.get_summary(KEY)

    asyncio.run(main())


def test_two_sessions_run_concurrently(tmp_path: Path) -> None:
    both = asyncio.Barrier(2)

    async def meet() -> str:
        """Wait for the other session."""
        await both.wait()
        return "met"

    async def main() -> None:
        def script(messages: Any, tools: Any) -> Any:
            del tools
            return "Done." if messages[-1]["role"] == "tool" else called("meet")

        async with agent_loop("jsonl", tmp_path, ScriptedModel(script), tools=[meet]) as loop:
            answers = await asyncio.gather(say(loop, "a", key="cli:a"), say(loop, "b", key="cli:b"))
            assert [one.text for one in answers] == ["Done.", "Done."]

    asyncio.run(main())


def test_closed_loop_rejects_messages(tmp_path: Path) -> None:
    async def main() -> None:
        async with agent_loop("jsonl", tmp_path, ["x"]) as loop:
            await loop.close()
            with pytest.raises(StoreClosed):
                await say(loop, "Hello?")
        assert reopened("jsonl", tmp_path) == []

    asyncio.run(main())


def test_failing_event_handler_does_not_end_the_turn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def tell(event: object) -> None:
        raise RuntimeError(f"the screen is gone: {event}")

    async def main() -> None:
        async with agent_loop("jsonl", tmp_path, ["Hello."]) as loop:
            assert (await say(loop, "Hi.", on_event=tell)).text == "Hello."

    asyncio.run(main())
    assert "the screen is gone" in caplog.text


@pytest.mark.parametrize("store", ["jsonl", "sqlite"])
def test_alias_key_opens_its_session(store: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with agent_loop(store, tmp_path, ["one", "two"]) as loop:
            await say(loop, "Hello.")
            with open_store(loop.registry.agent().spec.sessions) as other:
                other.delete(KEY)
                other.add_message("cli:other", "user", "Moved.")
                add_aliases(other, "cli:other", other.info("cli:other").meta, [KEY])
                assert (await say(loop, "Again.")).key == "cli:other"
                assert other.list_sessions() == ["cli:other"]

    asyncio.run(main())
