"""Tests that closing a loop closes everything it opened, also during a turn."""

import asyncio
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from stenolog.agent.instance import AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.agent.tools import tool
from stenolog.testing.scripted_model import ScriptedModel
from support.agents import (
    KEY,
    SPEC,
    STORES,
    agent_loop,
    bodies,
    called,
    open_agent,
    reopened,
    say,
    until,
)

every_store = pytest.mark.parametrize("store", STORES)


def _tasks() -> list[str]:
    return [repr(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]


def _open_files(folder: Path) -> list[str]:
    found = []
    for name in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(str(name.readlink()))
    return [path for path in found if path.startswith(str(folder))]


@every_store
def test_closed_loop_leaves_no_tasks_threads_or_files(store: str, tmp_path: Path) -> None:
    threads = set(threading.enumerate())

    async def main() -> None:
        model = ScriptedModel([called("now"), "Hello."])
        async with agent_loop(store, tmp_path, model) as loop:
            await say(loop, "Hi.")
        assert _tasks() == []
        assert model.closed
        assert str(await loop.close()) == "all turns are finished"

    asyncio.run(main())
    # Threads of an earlier test may have ended meanwhile.
    assert (_open_files(tmp_path), set(threading.enumerate()) - threads) == ([], set())


@every_store
def test_close_waits_for_a_running_turn(store: str, tmp_path: Path) -> None:
    async def main() -> None:
        model = ScriptedModel(["word " * 20], pause=0.01)
        async with agent_loop(store, tmp_path, model) as loop:
            speaking = asyncio.create_task(say(loop, "Talk."))
            await until(lambda: KEY in loop.busy)
            left = await loop.close(patience=30)
            assert left.turns == ()
            assert (await speaking).outcome == "answered"
        assert _tasks() == []

    asyncio.run(main())
    assert reopened(store, tmp_path)[-1]["content"] == "word " * 20


@every_store
def test_turn_that_outlasts_close_is_resumed_at_the_next_start(store: str, tmp_path: Path) -> None:
    threads = set(threading.enumerate())

    async def main() -> None:
        model = ScriptedModel(["word " * 2_000], pause=0.01)
        async with agent_loop(store, tmp_path, model) as loop:
            speaking = asyncio.create_task(say(loop, "Talk."))
            waiting = asyncio.create_task(say(loop, "And me?"))
            await until(lambda: KEY in loop.busy and len(bodies(loop)) == 2)
            left = await loop.close(patience=0.05)
            assert left.turns == (KEY,)
            assert KEY in str(left)
            assert {(await speaking).outcome, (await waiting).outcome} == {"failed"}
        assert _tasks() == []

    asyncio.run(main())
    # Threads of an earlier test may have ended meanwhile.
    assert (_open_files(tmp_path), set(threading.enumerate()) - threads) == ([], set())
    assert [body["role"] for body in reopened(store, tmp_path)] == ["user", "user"]

    async def next_start() -> None:
        async with agent_loop(store, tmp_path, ["Both."]) as loop:
            assert [answer.text for answer in await loop.resume()] == ["Both."]

    asyncio.run(next_start())


def test_hanging_tool_does_not_block_close(tmp_path: Path) -> None:
    hangs = threading.Event()
    begun = asyncio.Event()

    async def main() -> None:
        running = asyncio.get_running_loop()

        @tool
        def hang() -> None:
            """Hang."""
            running.call_soon_threadsafe(begun.set)
            hangs.wait(60)

        async with agent_loop("jsonl", tmp_path, [called("hang")], tools=[hang]) as loop:
            speaking = asyncio.create_task(say(loop, "Hang."))
            await begun.wait()
            assert (await loop.close(patience=0)).turns == (KEY,)
            assert (await speaking).outcome == "failed"

    asyncio.run(main())
    hangs.set()


def test_close_closes_every_agent_of_the_registry(tmp_path: Path) -> None:
    models = [ScriptedModel(["a"]), ScriptedModel(["b"])]

    async def main() -> None:
        agents = [
            open_agent("jsonl", tmp_path, model, spec=replace(SPEC, id=name))
            for name, model in zip(("ann", "bob"), models, strict=True)
        ]
        loop = AgentLoop(AgentRegistry(agents))
        await say(loop, "Hi.")
        await loop.close()
        assert all(model.closed for model in models)
        assert not agents[0].sessions.add_message(KEY, "user", "too late")

    asyncio.run(main())
