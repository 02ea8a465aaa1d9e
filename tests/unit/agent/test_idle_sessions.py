"""Tests that idle turns are resumed after a time even if the clocks of two machines differ."""

import asyncio
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import pytest

from stenolog.agent import resume
from stenolog.catalog.message_metadata import mark_received
from stenolog.testing.scripted_model import ScriptedModel
from support.agents import KEY, agent_loop, roles, say, until


class _TenMinutesBehind(datetime):
    """The clock of a reader that is ten minutes behind the writer's."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) - timedelta(minutes=10)


async def _leave_unanswered(folder: Path) -> None:
    """Store a message whose turn is interrupted."""
    async with agent_loop("jsonl", folder, ScriptedModel(["word " * 1_000], pause=0.05)) as loop:
        speaking = asyncio.create_task(say(loop, "Are you there?"))
        await until(lambda: KEY in loop.busy)
        await loop.close(patience=0)
        await asyncio.gather(speaking, return_exceptions=True)


def test_message_from_a_clock_ahead_is_resumed_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000.0
    monkeypatch.setattr(resume, "monotonic", lambda: now, raising=False)

    async def main() -> None:
        nonlocal now
        await _leave_unanswered(tmp_path)
        monkeypatch.setattr(resume, "datetime", _TenMinutesBehind)
        async with agent_loop("jsonl", tmp_path, ["Yes."]) as loop:
            assert await loop.resume(idle_for=20.0) == []
            now += 19.0
            assert await loop.resume(idle_for=20.0) == []
            # A new message restarts the time.
            later = mark_received({"role": "user", "content": "Hello?"})
            loop.registry.agent().store.add_full_message(KEY, later)
            now += 19.0
            assert await loop.resume(idle_for=20.0) == []
            now += 20.0
            [answer] = await loop.resume(idle_for=20.0)
            assert (answer.text, roles(loop)) == ("Yes.", ["user", "user", "assistant"])

    asyncio.run(main())
