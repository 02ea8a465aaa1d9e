"""Tests that a session recalls earlier sessions of the same user, and of no other user."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stenolog.agent import background_notes
from stenolog.agent.commands import sibling_key
from stenolog.agent.instance import AgentInstance
from stenolog.agent.loop import AgentLoop
from stenolog.agent.turn_events import InboundMessage, ModelCalled
from stenolog.memory.scopes import Scope
from stenolog.providers.chat_model import Delta
from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from support.agents import KEY, SPEC, Heard, agent_loop, called, say, until
from support.copying_model import copying

with_store = pytest.mark.parametrize("store", ["jsonl", "sqlite"])
NOTING = replace(SPEC, consolidation=True)


class NotingModel(ScriptedModel):
    """A model that answers by script, and requests for facts with the user's words."""

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
def test_notes_are_written_after_the_answer_and_recalled_in_a_new_session(
    store: str, tmp_path: Path
) -> None:
    async def main() -> None:
        model = NotingModel(["Noted.", "No hazelnuts, then.", "I know nothing of you."])
        async with agent_loop(store, tmp_path, model, spec=NOTING) as loop:
            await say(loop, "I am allergic to hazelnuts.")
            await loop.wait_until_idle()
            assert _core(loop) == ["I am allergic to hazelnuts."]
            heard = Heard()
            await say(loop, "Can I eat hazelnuts?", key=sibling_key(KEY), on_event=heard)
            [asked] = heard.of(ModelCalled)
            assert asked.recalled > 0
            assert "allergic to hazelnuts" in model.asked[1].messages[0]["content"]
            await say(loop, "Can I eat hazelnuts?", key="cli:somebody-else")
            assert "allergic" not in json.dumps(model.asked[2].messages)

    asyncio.run(main())


@with_store
def test_recall_tool_searches_only_this_user(store: str, tmp_path: Path) -> None:
    async def main() -> None:
        search = called("recall", '{"question": "ferry"}')
        model = ScriptedModel(["Ok.", search, "At nine.", search, "Unknown."])
        async with agent_loop(store, tmp_path, model) as loop:
            await say(loop, "The ferry leaves at nine.")
            await say(loop, "When do I leave?", key=sibling_key(KEY))
            assert "leaves at nine" in model.asked[2].messages[-1]["content"]
            await say(loop, "When do I leave?", key="cli:somebody-else")
            assert model.asked[4].messages[-1]["content"] == "Nothing was found."

    asyncio.run(main())


def test_notes_wait_for_the_answer_in_progress(tmp_path: Path) -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        """Wait."""
        begun.set()
        await goes_on.wait()

    async def main() -> None:
        model = NotingModel([called("wait"), "Noted.", "Done."])
        async with agent_loop("jsonl", tmp_path, model, spec=NOTING, tools=[wait]) as loop:
            await loop.wait_until_idle()
            speaking = asyncio.create_task(say(loop, "Wait.", key="cli:other"))
            await begun.wait()
            await say(loop, "I like tea.")
            waiting = loop._scheduler._notes[None]._queued_keys
            await until(lambda: KEY in waiting)
            assert not model.noting.is_set()
            goes_on.set()
            await speaking
            await loop.wait_until_idle()
            assert _core(loop) == ["I like tea."]

    asyncio.run(main())


def test_missing_notes_are_written_at_the_next_start(tmp_path: Path) -> None:
    async def first() -> None:
        model = NotingModel(["Ok."])
        model.goes_on.clear()
        async with agent_loop("jsonl", tmp_path, model, spec=NOTING, patience=0) as loop:
            await say(loop, "I like tea.")
            await model.noting.wait()
        assert model.noted == 0

    async def second() -> None:
        model = NotingModel([])
        async with agent_loop("jsonl", tmp_path, model, spec=NOTING) as loop:
            await loop.wait_until_idle()
            assert _core(loop) == ["I like tea."]

    asyncio.run(first())
    asyncio.run(second())


class Timers:
    """The timers of the notes, and their clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = datetime.now(UTC)
        self.pending: list[tuple[float, Callable[[], None]]] = []
        monkeypatch.setattr(background_notes, "_now", lambda: self.now)
        monkeypatch.setattr(background_notes, "_call_later", self._call_later)

    def _call_later(self, seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        self.pending.append((seconds, callback))
        # A handle to cancel; it would run long after the test.
        return asyncio.get_running_loop().call_later(3600.0, callback)

    def govern(self, loop: AgentLoop) -> None:
        """Make an agent's memory use this clock."""
        memory = loop.registry.agent().memory
        assert memory is not None
        assert memory._consolidator is not None
        memory._consolidator.clock = lambda: self.now

    def elapse(self) -> None:
        """Advance the clock to the only timer, and run it."""
        [(seconds, callback)] = self.pending
        self.pending.clear()
        self.now += timedelta(seconds=seconds)
        callback()


class FailingModel(NotingModel):
    """A model that returns no notes while it is down."""

    down = True

    async def stream(self, *values: Any, schema: Any = None, **how: Any) -> Any:
        if schema is not None and self.down:
            raise ConnectionError("the model is down")
        async for delta in super().stream(*values, schema=schema, **how):
            yield delta


def test_idle_agent_writes_notes_when_the_model_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers = Timers(monkeypatch)

    async def main() -> None:
        model = FailingModel(["Ok."])
        async with agent_loop("jsonl", tmp_path, model, spec=NOTING) as loop:
            timers.govern(loop)
            await say(loop, "I like tea.")
            await loop.wait_until_idle()
            assert _core(loop) == []
            timers.elapse()  # still down: the next attempt comes later
            await loop.wait_until_idle()
            [(seconds, _)] = timers.pending
            assert 60 < seconds <= 120
            model.down = False
            timers.elapse()
            await loop.wait_until_idle()
            assert _core(loop) == ["I like tea."]
            assert timers.pending == []

    asyncio.run(main())


def test_without_memory_the_recall_tool_finds_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        model = ScriptedModel([called("recall", '{"question": "x"}'), "Nothing."])
        spec = replace(SPEC, memory=False)
        async with agent_loop("jsonl", tmp_path, model, spec=spec) as loop:
            await say(loop, "What do you know?")
            assert model.asked[1].messages[-1]["content"] == "There is no memory to search in."
        assert not (tmp_path / "notes").exists()

    asyncio.run(main())


def _block(model: ScriptedModel) -> str:
    """Return the last request to the model."""
    return str(model.asked[-1].messages)


@with_store
@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        ("app:alice:1", "app:bob:1"),
        ("web:alice:1", "web:bob:1"),
        ("api:20261116-1:anonymous", "api:20261116-2:anonymous"),
        ("telegram:T1:7", "telegram:T2:7"),
        ("cli:alice:1", "cli:bob:1"),
    ],
)
def test_sessions_without_a_verified_sender_share_nothing(
    store: str, tmp_path: Path, theirs: str, mine: str
) -> None:
    async def main() -> None:
        model = ScriptedModel(["Noted."] * 2)
        async with agent_loop(store, tmp_path, model) as loop:
            await say(loop, "My therapist is Dr Moreau.", key=theirs)
            await loop.wait_until_idle()
            await say(loop, "Who is the therapist?", key=mine)
            assert "Moreau" not in _block(model)
            memory = loop.registry.agent().memory
            assert memory is not None
            assert memory.scope(key=theirs) == Scope(who=theirs)

    asyncio.run(main())


@with_store
def test_client_that_uses_the_key_of_a_user_does_not_see_that_users_memory(
    store: str, tmp_path: Path
) -> None:
    async def main() -> None:
        model = ScriptedModel(["Ok."] * 9)
        async with agent_loop(store, tmp_path, model) as loop:

            async def hear(text: str, key: str, sender: str) -> str:
                inbound = InboundMessage(key=key, content=text, sender=sender)
                return (await loop.handle(inbound)).text

            await hear("The ferry combination is 4815.", "telegram:T1:7", "telegram:7")
            await hear("And the ferry?", "telegram:7", "telegram:7")
            assert "4815" in _block(model), "it is the user's own memory"
            assert "4815" in await hear("/context", "telegram:7", "telegram:7")
            for command in ("/context", "/memory", "/memory ferry"):
                assert "4815" not in await hear(command, "telegram:7", "")
            await hear("/retry", "telegram:7", "")
            assert "4815" not in _block(model)
            await hear("What about the ferry?", "telegram:7", "")
            assert "4815" not in _block(model)
            await hear("And the ferry?", "telegram:7", "telegram:7")
            assert "4815" not in _block(model), "others have spoken in this session"
            await hear("And the ferry?", "telegram:T2:7", "telegram:7")
            assert "4815" in _block(model)

    asyncio.run(main())


@with_store
@pytest.mark.parametrize("moment", ["the search", "a tool"])
def test_messages_purged_during_a_turn_are_not_sent(
    store: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = f"sqlite:{tmp_path / 'steno.db'}" if store == "sqlite" else str(tmp_path)

    def purge() -> str:
        """Purge the other session, as another process does."""
        with open_store(where) as other:
            other.admin.purge(KEY)
        return "done"

    def answer(messages: Sequence[Mapping[str, Any]], _: Any) -> Any:
        asks = moment == "a tool" and messages[-1]["role"] == "user" and "?" in str(messages[-1])
        return called("purge") if asks else "Noted."

    recall = AgentInstance.recall

    def recall_and_purge(*values: Any, **named: Any) -> Any:
        found = recall(*values, **named)
        monkeypatch.setattr(AgentInstance, "recall", recall)
        purge()
        return found

    async def main() -> None:
        model = ScriptedModel(answer)
        async with agent_loop(store, tmp_path, model, tools=[purge]) as loop:
            await say(loop, "My parrot is called Zanzibar.")
            await loop.wait_until_idle()
            if moment == "the search":
                monkeypatch.setattr(AgentInstance, "recall", recall_and_purge)
            await say(loop, "What is my parrot called?", key=sibling_key(KEY))
            before, last = model.asked[1:-1], model.asked[-1]
            assert ["Zanzibar" in str(one.messages) for one in before] == (
                [True] if moment == "a tool" else []
            )
            assert "Zanzibar" not in str(last.messages)

    asyncio.run(main())
