"""Tests that a failed resume is not repeated again and again."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from stenolog.agent.resume import UnfinishedTurn
from stenolog.agent.turn_events import Answer
from stenolog.catalog.message_metadata import mark_received
from stenolog.errors import (
    ModelRefused,
    ModelUnavailable,
    StoreBusy,
    StoreUnavailable,
    UnsupportedFormat,
)
from stenolog.stores.base import Store
from stenolog.testing.scripted_model import ScriptedModel
from support.agents import KEY, agent_loop, roles


def _said(text: str) -> dict[str, Any]:
    return mark_received({"role": "user", "content": text})


@pytest.mark.parametrize("error", [ModelRefused("no such words"), ModelUnavailable("away")])
def test_message_rejected_by_the_model_is_not_retried_before_a_new_message(
    tmp_path: Path, error: Exception
) -> None:
    async def main() -> None:
        model = ScriptedModel([error, "Better."])
        async with agent_loop("jsonl", tmp_path, model) as loop:
            sessions = loop.registry.agent().sessions
            assert sessions.add_full_message(KEY, _said("Bad words."))
            [failed] = await loop.resume()
            assert failed.outcome == "failed"
            for _ in range(3):
                assert await loop.resume() == []
            assert len(model.asked) == 1
            assert sessions.add_full_message(KEY, _said("Good words."))
            [answer] = await loop.resume()
            assert answer.text == "Better."
            assert roles(loop) == ["user", "user", "assistant"]

    asyncio.run(main())


def test_unreachable_server_is_retried_after_a_delay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("stenolog.agent.resume.monotonic", lambda: now[0])
    turn = UnfinishedTurn(7, 0.0)
    waits = []
    for _ in range(12):
        turn.record_failure(ModelUnavailable("away"), double_delay=True)
        waits.append(turn.blocked_until - now[0])
        now[0] = turn.blocked_until
    assert waits[:3] == [10.0, 20.0, 40.0]
    assert max(waits) == 3_600.0
    for _ in range(20):  # a lease that cannot be acquired
        turn.record_failure(StoreUnavailable("no"), double_delay=False)
        assert turn.blocked_until == now[0] + 10.0
    turn.record_failure(ModelRefused("no"), double_delay=True)
    assert turn.blocked_until == float("inf")


@pytest.mark.parametrize("store", ["jsonl", "sqlite"])
def test_first_message_of_a_session_is_answered_by_the_lease_holder(
    store: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with agent_loop(store, tmp_path, ["Yes."]) as loop:
            held: list[Any] = []

            async def change(leased: Store) -> Answer | None:
                own = loop.registry.agent().store
                assert own is not None
                with pytest.raises(StoreBusy):
                    await loop.run(own.lease, KEY, ttl=5.0, wait=0.0)
                held.append(True)
                assert await loop.run(leased.add_message, KEY, "user", "Hello.")
                return None

            answer = await loop.change_and_answer(KEY, change)
            assert (answer.text, held) == ("Yes.", [True])

    asyncio.run(main())


@pytest.mark.parametrize(
    "message",
    [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]},
    ],
    ids=["responses item", "responses message", "anthropic block"],
)
def test_session_in_an_unsupported_format_is_not_resumed_again(
    tmp_path: Path, message: dict[str, Any]
) -> None:
    async def main() -> None:
        model = ScriptedModel(["Never sent."])
        async with agent_loop("jsonl", tmp_path, model) as loop:
            store = loop.registry.agent().store
            store.add_messages(KEY, [message, _said("And now?")])
            [failed] = await loop.resume()
            assert isinstance(failed.error, UnsupportedFormat)
            assert await loop.resume() == []
            assert model.asked == []
            assert len(store.get_history(KEY)) == 2

    asyncio.run(main())
