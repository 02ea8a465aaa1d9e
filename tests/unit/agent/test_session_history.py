"""Tests that /clear, /retry and /edit never hide a concurrent message without answering it."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from stenolog.agent.loop import AgentLoop
from stenolog.agent.session_history import append_once, replace_history
from stenolog.agent.turn_events import Answer, InboundMessage, MessageStored
from stenolog.errors import MaybeStored, NotStored, OnceConflict
from stenolog.records import Message
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from support.agents import KEY, STORES, agent_loop, bodies, open_agent, say
from support.killed_agent import place

with_store = pytest.mark.parametrize("store", ["jsonl", "sqlite"])
every_store = pytest.mark.parametrize("store", STORES)


def _echo(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    del tools
    return f"to {messages[-1]['content']}"


def _contents(loop: AgentLoop) -> list[Any]:
    return [body["content"] for body in bodies(loop)]


async def _say_at_the_lease(
    loop: AgentLoop, command: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Answer, Answer]:
    """Send a command, and a message that is stored right before the command gets its lease."""
    store: Any = loop.registry.agent().store
    take, event_loop, stored = store.lease, asyncio.get_running_loop(), threading.Event()
    asking: list[asyncio.Task[Answer]] = []

    def hear(event: object) -> None:
        if isinstance(event, MessageStored):
            stored.set()

    def ask() -> None:
        message = InboundMessage(key=KEY, content="late", id="late")
        asking.append(asyncio.create_task(loop.handle(message, on_event=hear)))

    def lease(*values: Any, **named: Any) -> Any:
        if not asking:
            event_loop.call_soon_threadsafe(ask)
            assert stored.wait(30)
        return take(*values, **named)

    monkeypatch.setattr(store, "lease", lease)
    answer = await say(loop, command)
    return answer, await asyncio.wait_for(asking[0], 30)


@with_store
def test_clear_does_not_hide_a_message_that_arrives_after_it(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with agent_loop(store, tmp_path, ScriptedModel(_echo)) as loop:
            await say(loop, "early")
            cleared, late = await _say_at_the_lease(loop, "/clear", monkeypatch)
            assert "are hidden" in cleared.text
            assert (late.outcome, late.text) == ("answered", "to late")
            assert _contents(loop) == ["late", "to late"]

    asyncio.run(main())


@with_store
@pytest.mark.parametrize("command", ["/edit other", "/retry"])
def test_rewriting_commands_do_not_touch_a_message_that_arrives_after_them(
    store: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with agent_loop(store, tmp_path, ScriptedModel(_echo)) as loop:
            await say(loop, "early")
            rewritten, late = await _say_at_the_lease(loop, command, monkeypatch)
            assert "nothing was changed" in rewritten.text
            assert (late.outcome, late.text) == ("answered", "to late")
            assert _contents(loop) == ["early", "to early", "late", "to late"]

    asyncio.run(main())


@every_store
def test_clear_is_rejected_while_a_message_is_being_stored(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with agent_loop(store, tmp_path, ScriptedModel(_echo)) as loop:
            own: Any = loop.registry.agent().store
            add, begun, go_on = own.add_full_message, threading.Event(), threading.Event()

            def slowly(*values: Any, **named: Any) -> Any:
                begun.set()
                assert go_on.wait(30)
                return add(*values, **named)

            monkeypatch.setattr(own, "add_full_message", slowly)
            asking = asyncio.create_task(say(loop, "early"))
            await asyncio.to_thread(begun.wait, 30)
            cleared = await say(loop, "/clear")
            go_on.set()
            assert "An answer is in progress" in cleared.text
            assert (await asking).text == "to early"
            assert _contents(loop) == ["early", "to early"]

    asyncio.run(main())


@with_store
@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_p2_rewrite_killed_anywhere_leaves_a_new_message_visible(
    store: str, kills: int, tmp_path: Path
) -> None:
    worker = Path(__file__).parents[2] / "support" / "killed_agent.py"
    command = [sys.executable, str(worker), str(tmp_path), store, str(kills)]
    ended = subprocess.run(command, check=True, timeout=300, stdout=subprocess.PIPE)
    assert ended.stdout.split() == [b"%d" % -signal.SIGKILL] * kills
    for number in range(kills + 1):
        folder = tmp_path / str(number)
        with open_store(place(store, folder)) as written:
            shown = [message.content for message in written.get_history(KEY)]
            # A message whose append was not acknowledged may be stored as well.
            late = ["late"] if (folder / "arrived").exists() else shown[2:]
            assert shown == ["first", "answer", *late]
            assert late in ([], ["late"])
            written.add_message(KEY, "user", "after the crash")
            assert written.get_history(KEY)[-1].content == "after the crash"


@every_store
def test_rewrite_changes_nothing_if_a_message_arrives(store: str, tmp_path: Path) -> None:
    agent = open_agent(store, tmp_path, ScriptedModel([]))
    try:
        sessions = agent.sessions
        sessions.add_message(KEY, "user", "first")
        sessions.add_message(KEY, "assistant", "answer")

        def make(history: Sequence[Message]) -> Sequence[Message]:
            sessions.add_message(KEY, "user", "late")
            return history[:1]

        assert replace_history(agent.store, KEY, make) == "message arrived"
        shown = [one.content for one in sessions.get_history(KEY)]
        assert shown == ["first", "answer", "late"]
    finally:
        agent.close_stores()


class _ForgetfulStore(InMemoryStore):
    """A store whose first write of each message has an unknown outcome."""

    is_stored = True

    def __init__(self) -> None:
        super().__init__()
        self._tried: set[str | None] = set()

    def add_full_message(
        self, key: str, message: Message | Mapping[str, Any], *, once: str | None = None
    ) -> int:
        """Store a message; the first write may store it and always fails."""
        is_first = once not in self._tried
        self._tried.add(once)
        if is_first and not self.is_stored:
            raise MaybeStored("the connection was lost")
        seq = super().add_full_message(key, message, once=once)
        if is_first:
            raise MaybeStored("the connection was lost")
        return seq


@pytest.mark.parametrize("once", ["", "update-1"])
@pytest.mark.parametrize("is_stored", [False, True])
def test_p12_write_of_unknown_outcome_is_repeated_and_stored_once(
    once: str, *, is_stored: bool
) -> None:
    store = _ForgetfulStore()
    store.is_stored = is_stored
    seqs = [
        append_once(store, KEY, {"role": "user", "content": text}, once=once and f"{once}-{text}")
        for text in ("one", "two")
    ]
    assert seqs == [1, 2]
    assert [message.content for message in store.get_history(KEY)] == ["one", "two"]


def test_p12_write_stays_unknown_if_its_repetition_fails() -> None:
    class FullStore(InMemoryStore):
        errors: ClassVar = [MaybeStored("the connection was lost"), NotStored("no space is left")]

        def add_full_message(self, *_: object, **__: object) -> int:
            raise self.errors.pop(0)

    store = FullStore()
    with pytest.raises(MaybeStored):
        append_once(store, KEY, {"role": "user", "content": "one"})
    assert store.errors == []


@pytest.mark.parametrize("content", ["Hello.", "Other."])
def test_redelivered_message_is_compared_without_metadata(content: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with agent_loop("jsonl", tmp_path, ["Hi."]) as loop:
            marks = {"of another program": True}
            stored = {"role": "user", "content": "Hello.", "stenolog": marks}
            loop.registry.agent().store.add_full_message(KEY, stored, once="update-1")
            answer = await say(loop, content, id="update-1")
            if content == "Hello.":
                assert answer.text == "Hi."
                assert _contents(loop) == ["Hello.", "Hi."]
            else:
                assert isinstance(answer.error, OnceConflict)

    asyncio.run(main())
