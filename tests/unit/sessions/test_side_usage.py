"""Tests that model calls for notes and summaries are counted and named."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from stenolog.agent.instance import AgentInstance, AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.agent.spec import AgentSpec
from stenolog.agent.turn_events import InboundMessage
from stenolog.cli.stats import stats_command
from stenolog.context.window import Limits
from stenolog.memory.consolidation import ConsolidationProgress
from stenolog.providers.chat_model import CountedAnswer, Usage
from stenolog.sessions.usage import (
    SIDE_USAGE_FIELD,
    count_answer,
    read_side_usage,
    side_counts,
    updated_side_usage,
)
from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel

_COUNTS = {"calls": 1, "prompt": 100, "answer": 7, "cached": 3}


def _answer(model: str = "m") -> CountedAnswer:
    return CountedAnswer("x", model=model, usage=Usage(prompt=100, answer=7, cached=3))


def test_counts_are_added_to_those_that_are_stored() -> None:
    used: dict[str, dict[str, int]] = {}
    count_answer(used, _answer())
    count_answer(used, "an answer without counts")
    assert used == {"m": _COUNTS}
    once = updated_side_usage({}, "u", used)
    twice = updated_side_usage(once, "u", used)
    assert read_side_usage(twice, "u") == {"m": {name: 2 * each for name, each in _COUNTS.items()}}
    assert updated_side_usage(twice, "u", {}) == {}


def test_a_fork_does_not_count_the_calls_of_its_origin() -> None:
    used = {"m": dict(_COUNTS)}
    assert read_side_usage(updated_side_usage({}, "origin", used), "fork") == {}


@pytest.mark.parametrize(
    "field", [None, 7, {}, {"uid": "u"}, {"uid": "u", "models": {"m": [1], "n": {"calls": "2"}}}]
)
def test_a_damaged_field_is_no_error(field: Any) -> None:
    assert side_counts(read_side_usage({SIDE_USAGE_FIELD: field}, "u"), None).keys() <= {"n"}


def test_each_call_has_the_price_of_an_average_call() -> None:
    used = {"m": {"calls": 4, "prompt": 400, "answer": 40, "cached": 0}}
    made = side_counts(used, lambda _, counts: 1.0 if counts["prompt"] > 100 else 0.01)
    assert made["m"].dollars == pytest.approx(0.04)


def _said(messages: Any, tools: Any) -> str:
    del tools
    return "Hello." if len(messages) > 1 and messages[-1]["content"].startswith("Hi") else "{}"


async def _talk(place: Path) -> None:
    spec = AgentSpec(sessions=str(place), limits=Limits(max_history_messages=4), tools=False)
    agent = AgentInstance.open(spec, model=ScriptedModel(_said))
    async with AgentLoop(AgentRegistry([agent])) as loop:
        for number in range(4):
            await loop.handle(InboundMessage(key="cli:k", content=f"Hi {number}. " * 20))
        await loop.wait_until_idle()


def test_stats_count_notes_and_summaries(tmp_path: Path) -> None:
    asyncio.run(_talk(tmp_path))
    with (
        open_store(tmp_path, namespace="notes", read_only=True) as notes,
        open_store(tmp_path, read_only=True) as store,
    ):
        info = store.info("cli:k")
        for_notes = ConsolidationProgress(notes, agent="main").usage(info.uid)
        for_summaries = read_side_usage(info.meta, info.uid)
    assert for_notes["scripted"]["calls"] >= 1
    assert for_summaries["scripted"]["calls"] >= 1
    done = CliRunner().invoke(stats_command, ["--json", "-w", str(tmp_path)])
    found = json.loads(done.stdout)
    side = found["side_calls"]["scripted"]
    both = for_notes["scripted"]["prompt"] + for_summaries["scripted"]["prompt"]
    assert side["input_tokens"] == both
    days = sum(day["input_tokens"] for day in found["days"])
    assert found["input_tokens"] == days + both
    shown = CliRunner().invoke(stats_command, ["-w", str(tmp_path)])
    assert "Included for notes and summaries: " in shown.stderr
    ranged = CliRunner().invoke(stats_command, ["--json", "--since", "3d", "-w", str(tmp_path)])
    assert json.loads(ranged.stdout)["side_calls"] == {}
