"""Tests that a turn fails if a message of it cannot be stored, and is answered once later.

The disk is a small tmpfs where that can be mounted, and a file size limit everywhere.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec.structs import replace

from stenolog.agent.instance import AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.agent.turn import CUT_OFF_TEXT
from stenolog.agent.turn_events import Answer, Event, MessageStored, ModelCalled, TextDelta
from stenolog.context.window import Limits
from stenolog.errors import NotStored
from stenolog.stores.base import Store
from stenolog.testing.scripted_model import ScriptedModel
from support.agents import KEY, SPEC, Heard, bodies, called, open_agent, reopened, say
from support.full_disks import KINDS, LONG, Disk, full_disk

WIDE: Final = replace(
    SPEC, limits=Limits(max_context_tokens=1_000_000), tool_output_limit=len(LONG)
)

every_store = pytest.mark.parametrize("store", ["jsonl", "sqlite"])
every_disk = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def disk(tmp_path: Path, kind: str) -> Iterator[Disk]:
    with full_disk(tmp_path, kind) as disk:
        yield disk


@asynccontextmanager
async def _loop(
    store: str, disk: Disk, model: ScriptedModel, tools: Sequence[Any] = ()
) -> AsyncIterator[AgentLoop]:
    """Yield a loop with short leases: on a full disk SQLite cannot release them."""
    agent = open_agent(store, disk.folder, model, spec=WIDE, tools=tools)
    loop = AgentLoop(AgentRegistry([agent]), ttl=0.5)
    try:
        yield loop
    finally:
        await asyncio.wait_for(loop.close(), 30)


def _contents(told: list[dict[str, Any]]) -> list[str]:
    return [str(body["content"])[:6] for body in told]


def _reply_that_fills(disk: Disk, text: str) -> Callable[[object], str]:
    """Return a model's reply that fills the disk first."""

    def reply(_: object) -> str:
        disk.fill()
        return text

    return reply


def _check_failed(answer: Answer, *, saved: bool) -> None:
    assert (answer.outcome, answer.saved, answer.seq) == ("failed", saved, None)
    assert isinstance(answer.error, NotStored), answer.error


@every_store
@every_disk
def test_question_that_is_not_stored_is_not_asked(store: str, disk: Disk) -> None:
    model = ScriptedModel(["to 1", "to 2"])

    async def main() -> None:
        async with _loop(store, disk, model) as loop:
            await say(loop, "said 1")
            disk.fill()
            heard = Heard()
            answer = await say(loop, f"said 2 {LONG}", id="update-2", on_event=heard)
            _check_failed(answer, saved=False)
            assert heard.of(MessageStored, ModelCalled) == []
            assert len(model.asked) == 1
            assert _contents(bodies(loop)) == ["said 1", "to 1"]
            disk.free()
            # Nothing was kept in memory: the client sends the message again.
            assert await loop.resume() == []
            assert (await say(loop, f"said 2 {LONG}", id="update-2")).text == "to 2"

    asyncio.run(main())
    assert _contents(reopened(store, disk.folder)) == ["said 1", "to 1", "said 2", "to 2"]


@pytest.mark.quick(2)
@every_store
@every_disk
def test_question_whose_answer_is_not_stored_is_answered_once_after_a_restart(
    store: str, disk: Disk
) -> None:
    async def before() -> None:
        model = ScriptedModel([_reply_that_fills(disk, LONG)])
        async with _loop(store, disk, model) as loop:
            _check_failed(await say(loop, "said 1", id="update-1"), saved=True)
            assert str(await loop.close()) == "all turns are finished"

    async def after() -> None:
        async with _loop(store, disk, ScriptedModel(["to 1"])) as loop:
            [resumed] = await _resume(loop)
            assert (resumed.key, resumed.outcome) == (KEY, "answered")
            again = await say(loop, "said 1", id="update-1")
            assert (again.outcome, again.text) == ("again", "to 1")

    asyncio.run(before())
    disk.free()
    asyncio.run(after())


async def _resume(loop: AgentLoop) -> list[Answer]:
    async with asyncio.timeout(30):
        # If a process end cannot be detected, its lease has to expire first.
        while not (answers := await loop.resume()):
            pass
        return answers


@every_store
@every_disk
def test_tool_whose_result_is_not_stored_does_not_run_again(store: str, disk: Disk) -> None:
    runs: list[str] = []

    def pay() -> str:
        """Pay a bill."""
        runs.append("paid")
        disk.fill()
        return LONG

    model = ScriptedModel([called("pay"), "Is it paid?"])

    async def main() -> None:
        async with _loop(store, disk, model, [pay]) as loop:
            _check_failed(await say(loop, "Pay it.", id="update-1"), saved=True)
            assert [body["role"] for body in bodies(loop)] == ["user", "assistant"]
            assert len(model.asked) == 1
            disk.free()
            answer = await say(loop, "Pay it.", id="update-1")
            assert (answer.outcome, answer.text) == (
                "answered",
                "Is it paid?",
            )
            assert bodies(loop)[2]["content"] == CUT_OFF_TEXT

    asyncio.run(main())
    assert runs == ["paid"]
    roles = [body["role"] for body in reopened(store, disk.folder)]
    assert roles == ["user", "assistant", "tool", "assistant"]


@every_store
@every_disk
def test_tool_does_not_run_if_its_call_is_not_stored(store: str, disk: Disk) -> None:
    def pay() -> str:
        """Pay a bill."""
        raise AssertionError("the call is not stored")

    def call(_: object) -> dict[str, Any]:
        disk.fill()
        return called("pay", f'{{"note": "{LONG}"}}')

    async def main() -> None:
        async with _loop(store, disk, ScriptedModel([call, "to 1"]), [pay]) as loop:
            _check_failed(await say(loop, "said 1"), saved=True)
            disk.free()
            [answer] = await loop.resume()
            assert answer.text == "to 1"

    asyncio.run(main())
    assert _contents(reopened(store, disk.folder)) == ["said 1", "to 1"]


# Not on a tmpfs: the short text so far may fit into existing pages.
@every_store
@pytest.mark.parametrize("kind", ["limit"])
def test_stopped_answer_that_is_not_stored_fails(store: str, disk: Disk) -> None:
    async def main() -> None:
        stops: list[asyncio.Task[bool]] = []

        async with _loop(store, disk, ScriptedModel([LONG, "to 1"])) as loop:

            def stop_at_first_text(event: Event) -> None:
                if isinstance(event, TextDelta) and not stops:
                    disk.fill()
                    stops.append(asyncio.create_task(loop.stop(KEY)))

            _check_failed(await say(loop, "said 1", on_event=stop_at_first_text), saved=True)
            assert await stops[0]
            disk.free()
            [answer] = await loop.resume()
            assert answer.text == "to 1"

    asyncio.run(main())
    assert _contents(reopened(store, disk.folder)) == ["said 1", "to 1"]


# Not on a tmpfs: a lease may fit into existing pages of the write-ahead log.
@pytest.mark.parametrize("kind", ["limit"])
def test_sqlite_that_cannot_store_a_lease_runs_no_turn_and_answers_later(disk: Disk) -> None:
    model = ScriptedModel(["to 1", "to 2"])

    async def main() -> None:
        async with _loop("sqlite", disk, model) as loop:
            await say(loop, "said 1")
            await loop.wait_until_idle()
            agent = loop.registry.agent()
            agent.store.add_message(KEY, "user", "said 2", once="update-2")
            disk.fill()
            [answer] = [await loop.change_and_answer(KEY, _change_nothing)]
            assert (answer.outcome, type(answer.error)) == ("failed", NotStored)
            assert len(model.asked) == 1
            disk.free()
            assert (await loop.change_and_answer(KEY, _change_nothing)).text == "to 2"

    asyncio.run(main())


async def _change_nothing(store: Store) -> None:
    del store
