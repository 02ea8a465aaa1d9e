"""Tests that an agent opens completely, with a fallback store if its store fails."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from stenolog.agent.instance import AgentInstance, AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.errors import UsageError
from stenolog.sessions.session_manager import SessionManager
from stenolog.stores.in_memory import InMemoryStore
from stenolog.testing.scripted_model import ScriptedModel
from stenolog.transfer.fallback import FallbackStore
from support.agents import KEY, SPEC, say


def test_messages_of_the_fallback_store_are_visible_after_recovery(
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


def test_unknown_zone_is_rejected_before_stores_open(tmp_path: Path) -> None:
    spec = replace(SPEC, sessions=str(tmp_path / "workspace"), zone="Mars/Olympus")
    with pytest.raises(UsageError, match="unknown time zone"):
        AgentInstance.open(spec, model=ScriptedModel([]))
    assert not (tmp_path / "workspace").exists()


def test_unreadable_notes_folder_disables_only_memory(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("not a folder")

    async def main() -> None:
        spec = replace(SPEC, sessions=str(tmp_path))
        instance = AgentInstance.open(spec, model=ScriptedModel(["Hello."]))
        assert instance.memory is None
        assert "memory is off" in instance.problems[0]
        loop = AgentLoop(AgentRegistry([instance]))
        assert (await say(loop, "Hi.")).text == "Hello."
        await loop.close()

    asyncio.run(main())


def test_in_memory_sessions_write_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        spec = replace(SPEC, sessions="memory:", consolidation=True)
        instance = AgentInstance.open(spec, model=ScriptedModel(["Hello.", "{}"]))
        loop = AgentLoop(AgentRegistry([instance]))
        await say(loop, "Hi.")
        await loop.wait_until_idle()
        await loop.close()

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_requests_respect_the_context_size_of_the_model(tmp_path: Path) -> None:
    class Small(ScriptedModel):
        context = 4_000

    async def main() -> None:
        spec = replace(SPEC, sessions=str(tmp_path))
        instance = AgentInstance.open(spec, model=Small([]))
        assert instance.context(instance.model).limits.max_context_tokens == 4_000
        assert instance.context(ScriptedModel([], name="other")).limits == spec.limits
        await instance.close()

    asyncio.run(main())


@pytest.mark.parametrize("reason", [None, "the disk is full"])
def test_problems_of_a_session_manager_have_reasons(tmp_path: Path, reason: str | None) -> None:
    sessions = SessionManager(tmp_path, reason=reason)
    instance = AgentInstance(SPEC, sessions=sessions, model=ScriptedModel([]))
    problems = [*instance.problems, *sessions.health().problems]
    assert problems
    assert not [words for words in problems if words.rstrip().endswith(":")]
    assert any(reason in problem for problem in problems) if reason else True
    asyncio.run(instance.close())


def test_sessions_without_a_store_are_rejected() -> None:
    class OwnSessions:
        get_history = InMemoryStore.get_history

    for sessions in (OwnSessions(), InMemoryStore()):
        expected = rf"JSONLBackend\(store\), not {type(sessions).__name__}"
        with pytest.raises(UsageError, match=expected):
            AgentInstance(SPEC, model=ScriptedModel([]), sessions=cast(Any, sessions))
