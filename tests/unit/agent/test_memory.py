"""What was said in one session is remembered in the next, of the same user and of nobody else."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from copying import copying
from msgspec.structs import replace

from stenolog.agent.commands import key_beside
from stenolog.agent.events import Asked
from stenolog.agent.loop import AgentLoop
from stenolog.providers.base import Delta
from stenolog.providers.scripted import ScriptedModel
from unit.agent.agents import KEY, SPEC, Heard, agent_loop, called, say, until

with_store = pytest.mark.parametrize("store", ["jsonl", "sqlite"])
NOTING = replace(SPEC, consolidation=True)


class Noting(ScriptedModel):
    """Answers by script, and when it is asked for facts, with what the user said."""

    def __init__(self, script: Any) -> None:
        super().__init__(script)
        self.noted = 0
        self.noting = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        schema: Mapping[str, Any] | None = None,
        **how: Any,
    ) -> Any:
        if schema is None:
            async for delta in super().stream(messages, **how):
                yield delta
            return
        self.noting.set()
        await self.goes_on.wait()
        self.noted += 1
        yield Delta(text=copying(messages, schema=schema))


def _core(loop: AgentLoop) -> list[str]:
    memory = loop.registry.agent().memory
    assert memory is not None
    return [note.text for note in memory.notes.list(memory.scope(key=KEY), kind="core")]


@with_store
def test_notes_are_made_behind_the_answer_and_recalled_in_a_new_session(
    store: str, tmp_path: Path
) -> None:
    async def main() -> None:
        model = Noting(["Noted.", "No hazelnuts, then.", "I know nothing of you."])
        async with agent_loop(store, tmp_path, model, spec=NOTING) as loop:
            await say(loop, "I am allergic to hazelnuts.")
            await loop.quiet()
            assert _core(loop) == ["I am allergic to hazelnuts."]
            heard = Heard()
            await say(loop, "Can I eat hazelnuts?", key=key_beside(KEY), tell=heard)
            [asked] = heard.of(Asked)
            assert asked.recalled > 0
            assert "allergic to hazelnuts" in model.asked[1].messages[0]["content"]
            await say(loop, "Can I eat hazelnuts?", key="cli:somebody-else")
            assert "allergic" not in json.dumps(model.asked[2].messages)

    asyncio.run(main())


@with_store
def test_the_tool_recall_searches_the_past_of_this_user_alone(store: str, tmp_path: Path) -> None:
    async def main() -> None:
        search = called("recall", '{"question": "ferry"}')
        model = ScriptedModel(["Ok.", search, "At nine.", search, "Unknown."])
        async with agent_loop(store, tmp_path, model) as loop:
            await say(loop, "The ferry leaves at nine.")
            await say(loop, "When do I leave?", key=key_beside(KEY))
            assert "leaves at nine" in model.asked[2].messages[-1]["content"]
            await say(loop, "When do I leave?", key="cli:somebody-else")
            assert model.asked[4].messages[-1]["content"] == "Nothing was found."

    asyncio.run(main())


def test_notes_wait_while_an_answer_is_made(tmp_path: Path) -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        """Wait."""
        begun.set()
        await goes_on.wait()

    async def main() -> None:
        model = Noting([called("wait"), "Noted.", "Done."])
        async with agent_loop("jsonl", tmp_path, model, spec=NOTING, tools=[wait]) as loop:
            await loop.quiet()
            speaking = asyncio.create_task(say(loop, "Wait.", key="cli:other"))
            await begun.wait()
            await say(loop, "I like tea.")
            waiting = loop._turns._notetaking[None]._waiting
            await until(lambda: KEY in waiting)
            assert not model.noting.is_set()
            goes_on.set()
            await speaking
            await loop.quiet()
            assert _core(loop) == ["I like tea."]

    asyncio.run(main())


def test_what_was_not_noted_is_noted_at_the_next_start(tmp_path: Path) -> None:
    async def first() -> None:
        model = Noting(["Ok."])
        model.goes_on.clear()
        async with agent_loop("jsonl", tmp_path, model, spec=NOTING, patience=0) as loop:
            await say(loop, "I like tea.")
            await model.noting.wait()
        assert model.noted == 0

    async def second() -> None:
        model = Noting([])
        async with agent_loop("jsonl", tmp_path, model, spec=NOTING) as loop:
            await loop.quiet()
            assert _core(loop) == ["I like tea."]

    asyncio.run(first())
    asyncio.run(second())


def test_consolidation_can_be_switched_off(tmp_path: Path) -> None:
    async def main() -> None:
        model = Noting(["Ok."])
        async with agent_loop("jsonl", tmp_path, model) as loop:
            await say(loop, "I like tea.")
            await loop.quiet()
            assert model.noted == 0
            assert _core(loop) == []

    asyncio.run(main())


def test_without_memory_nothing_is_recalled_and_the_tool_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        model = ScriptedModel([called("recall", '{"question": "x"}'), "Nothing."])
        spec = replace(SPEC, memory=False)
        async with agent_loop("jsonl", tmp_path, model, spec=spec) as loop:
            await say(loop, "What do you know?")
            assert model.asked[1].messages[-1]["content"] == "There is no memory to search in."
        assert not (tmp_path / "notes").exists()

    asyncio.run(main())
