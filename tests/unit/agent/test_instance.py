"""An agent is opened whole, and with what there is: a store that fails has a fallback."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from stenolog.agent.instance import AgentInstance
from stenolog.agent.loop import AgentLoop
from stenolog.agent.registry import AgentRegistry
from stenolog.errors import UsageError
from stenolog.sessions.session_manager import SessionManager
from stenolog.testing.scripted_model import ScriptedModel
from stenolog.transfer.fallback import FallbackStore
from unit.agent.agents import KEY, SPEC, say


def test_what_was_said_in_the_fallback_is_there_when_the_store_is_back(
    tmp_path: Path,
) -> None:
    (tmp_path / "steno.db").symlink_to("elsewhere.db")
    spec = replace(SPEC, sessions=f"sqlite:{tmp_path}/steno.db")

    async def talk(*answers: str) -> None:
        instance = AgentInstance.open(spec, model=ScriptedModel(answers))
        loop = AgentLoop(AgentRegistry([instance]))
        for answer in answers:
            assert (await say(loop, f"Say {answer}")).text == answer
        falls_back = isinstance(instance.store, FallbackStore)
        assert falls_back == (tmp_path / "steno.db").is_symlink()
        assert bool(instance.problems) == falls_back
        assert (instance.memory is None) == falls_back
        assert (instance.shared_place is None) == falls_back
        assert bool(instance.health()["ok"]) == (not falls_back)
        await loop.close()

    asyncio.run(talk("one", "two"))
    (tmp_path / "steno.db").unlink()
    asyncio.run(talk("three"))

    instance = AgentInstance.open(spec, model=ScriptedModel([]))
    said = [message.content for message in instance.sessions.get_history(KEY)]
    asyncio.run(instance.close())
    assert said == ["Say one", "one", "Say two", "two", "Say three", "three"]


def test_a_zone_that_is_none_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    spec = replace(SPEC, sessions=str(tmp_path / "workspace"), zone="Mars/Olympus")
    with pytest.raises(UsageError, match="no such time zone"):
        AgentInstance.open(spec, model=ScriptedModel([]))
    assert not (tmp_path / "workspace").exists()


def test_a_folder_for_notes_that_cannot_be_opened_costs_the_memory_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("not a folder")

    async def main() -> None:
        spec = replace(SPEC, sessions=str(tmp_path))
        instance = AgentInstance.open(spec, model=ScriptedModel(["Hello."]))
        assert instance.memory is None
        assert "nothing is remembered" in instance.problems[0]
        loop = AgentLoop(AgentRegistry([instance]))
        assert (await say(loop, "Hi.")).text == "Hello."
        await loop.close()

    asyncio.run(main())


def test_sessions_in_memory_touch_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        spec = replace(SPEC, sessions="memory:", consolidation=True)
        instance = AgentInstance.open(spec, model=ScriptedModel(["Hello.", "{}"]))
        loop = AgentLoop(AgentRegistry([instance]))
        await say(loop, "Hi.")
        await loop.quiet()
        await loop.close()

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_says_what_it_takes_is_sent_no_more(tmp_path: Path) -> None:
    class Small(ScriptedModel):
        context = 4_000

    async def main() -> None:
        spec = replace(SPEC, sessions=str(tmp_path))
        instance = AgentInstance.open(spec, model=Small([]))
        assert instance.context(instance.model).limits.max_context_tokens == 4_000
        assert instance.context(ScriptedModel([], name="other")).limits == spec.limits
        await instance.close()

    asyncio.run(main())


@pytest.mark.parametrize("because", [None, "the disk is full"])
def test_every_problem_of_a_session_manager_gives_a_reason(
    tmp_path: Path, because: str | None
) -> None:
    sessions = SessionManager(tmp_path, because=because)
    instance = AgentInstance(SPEC, sessions=sessions, model=ScriptedModel([]))
    problems = [*instance.problems, *sessions.health().problems]
    assert problems
    assert not [words for words in problems if words.rstrip().endswith(":")]
    assert any(because in words for words in problems) if because else True
    asyncio.run(instance.close())
