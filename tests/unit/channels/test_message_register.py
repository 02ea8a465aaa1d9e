"""Tests that messages get numbers and commands run once, despite failures and races."""

import asyncio
from pathlib import Path
from typing import Any, Final

import pytest

from stenolog.agent.loop import AgentLoop
from stenolog.channels.channel import IncomingMessage
from stenolog.channels.claims import Claims, register_name
from stenolog.channels.inbox import Inbox, begin_command
from stenolog.errors import NotStored
from stenolog.stores.open_store import open_store
from support.agents import agent_loop

OWN: Final = "webhook-ci:alice"


def _claims(folder: Path) -> Claims:
    return Claims(open_store(str(folder), namespace="channels"))


def _said(text: str, id: str) -> IncomingMessage:
    return IncomingMessage(sender="alice", text=text, id=id)


def _inbox(loop: AgentLoop, claims: Claims) -> Inbox:
    return Inbox(loop, channel="webhook-ci", claims=claims)


async def test_command_received_by_two_processes_runs_once(tmp_path: Path) -> None:
    several = [_claims(tmp_path) for _ in range(2)]
    async with agent_loop("jsonl", tmp_path, []) as loop:
        place = register_name(loop.registry.agent().id, OWN)
        command = IncomingMessage(sender="alice", text="/new", id="1", message_number=1)
        begun = [begin_command(claims, place, command) for claims in several]
        assert sorted(await asyncio.gather(*begun)) == [False, True]
    for claims in several:
        await claims.close()


async def test_command_rejected_during_close_runs_when_redelivered(
    tmp_path: Path,
) -> None:
    claims = _claims(tmp_path)
    async with agent_loop("jsonl", tmp_path, []) as loop:
        inbox = _inbox(loop, claims)
        hear = loop.handle

        async def closed_meanwhile(*given: Any, **named: Any) -> Any:
            await loop.close()
            return await hear(*given, **named)

        loop.handle = closed_meanwhile  # type: ignore[method-assign]
        refused = inbox.accept(_said("/help", "1"))
        assert await refused.durable is False
    for outcome in ("command", "again"):
        async with agent_loop("jsonl", tmp_path, []) as loop:
            answer = await _inbox(loop, claims).accept(_said("/help", "1")).answer
            assert answer is not None
            assert answer.outcome == outcome
    await claims.close()


async def test_redelivered_messages_are_recognized_without_a_claims_store(tmp_path: Path) -> None:
    claims = Claims()
    async with agent_loop("legacy", tmp_path, ["Hello."]) as loop:
        inbox = _inbox(loop, claims)
        for text, id in (("hello", "1"), ("/new", "2")):
            await inbox.accept(_said(text, id)).answer
        for text, id, key in (("hello", "1", OWN), ("/new", "2", None)):
            again = await inbox.accept(_said(text, id)).answer
            assert again is not None
            assert again.outcome == "again"
            assert key is None or again.key == key
    await claims.close()


async def test_messages_are_accepted_if_their_number_cannot_be_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(str(tmp_path), namespace="channels")

    def full(*given: Any, **named: Any) -> int:
        raise NotStored(f"the disk is full: {given} {named}")

    store.add_message = full  # type: ignore[method-assign]
    claims = Claims(store)
    async with agent_loop("jsonl", tmp_path, ["Hello."]) as loop:
        inbox = _inbox(loop, claims)
        for text, id, outcome in (("hello", "1", "answered"), ("/help", "2", "command")):
            answer = await inbox.accept(_said(text, id)).answer
            assert answer is not None
            assert answer.outcome == outcome
    await claims.close()
    assert "the disk is full" in caplog.text
