"""Tests races of stops, deliveries and concurrent messages that once lost or doubled something."""

import asyncio
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stenolog.agent import commands
from stenolog.agent.instance import AgentInstance, AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.agent.session_history import read_last_seq
from stenolog.agent.turn import INTERRUPTED_MARK
from stenolog.agent.turn_events import InboundMessage, Notice, ToolFinished
from stenolog.catalog.message_metadata import mark_seen
from stenolog.context.window import Limits
from stenolog.errors import (
    ModelUnavailable,
    NoSuchSession,
    RefusedMessage,
    SessionDeleted,
    UsageError,
)
from stenolog.providers.chat_model import Delta
from stenolog.records import Message
from stenolog.sessions.session_store import JSONLBackend
from stenolog.stores.base import SessionView
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from support.agents import (
    KEY,
    SPEC,
    STORES,
    Heard,
    agent_loop,
    bodies,
    called,
    calls,
    open_agent,
    reopened,
    roles,
    say,
    until,
)

every_store = pytest.mark.parametrize("store", STORES)
with_store = pytest.mark.parametrize("store", ["jsonl", "sqlite"])


def _echo(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    del tools
    said = [body["content"] for body in messages if body["role"] == "user"]
    return f"to {said[-1]}"


def _where(store: str, folder: Path) -> str:
    return f"sqlite:{folder / 'steno.db'}" if store == "sqlite" else str(folder)


class Waiting(ScriptedModel):
    """A model that answers its first request only when the test allows it."""

    def __init__(self, script: Any, *, begins: str = "") -> None:
        super().__init__(script)
        self.begins = begins
        self.first = asyncio.Event()
        self.go = asyncio.Event()

    async def stream(self, messages: Any, **how: Any) -> Any:
        if not self.first.is_set():
            if self.begins:
                yield Delta(text=self.begins)
            self.first.set()
            await self.go.wait()
        async for delta in super().stream(messages, **how):
            yield delta


@every_store
def test_answer_stopped_twice_is_stored_once(store: str, tmp_path: Path) -> None:
    async def main() -> None:
        model = Waiting([], begins="half a")
        async with agent_loop(store, tmp_path, model) as loop:
            speaking = asyncio.create_task(say(loop, "Talk."))
            await model.first.wait()
            first = asyncio.create_task(loop.stop(KEY))
            for _ in range(5):
                await asyncio.sleep(0)
            # The later one may find the turn stopped.
            assert any([await loop.stop(KEY), await first])
            answer = await speaking
            assert (answer.outcome, answer.text) == ("interrupted", f"half a {INTERRUPTED_MARK}")
            assert [body["content"] for body in bodies(loop)] == ["Talk.", answer.text]
            assert not await loop.stop(KEY)
            assert await loop.resume(KEY) == []

    asyncio.run(main())


@every_store
def test_repeated_cancellation_leaves_no_tasks(store: str, tmp_path: Path) -> None:
    async def main() -> None:
        model = Waiting(["Next."], begins="half a")
        async with agent_loop(store, tmp_path, model) as loop:
            speaking = asyncio.create_task(loop.handle(InboundMessage(key=KEY, content="Talk.")))
            await model.first.wait()
            while not speaking.done():
                speaking.cancel()
                await asyncio.sleep(0)
            assert speaking.cancelled()
            assert loop.busy == set()
            assert [body["content"] for body in bodies(loop)] == [
                *("Talk.", f"half a {INTERRUPTED_MARK}")
            ]
            assert (await say(loop, "And now?")).text == "Next."

    asyncio.run(main())


@every_store
def test_unanswered_messages_are_not_summarized(store: str, tmp_path: Path) -> None:
    async def main() -> None:
        model = Waiting(_echo)
        spec = replace(SPEC, limits=Limits(max_history_messages=4))
        async with agent_loop(store, tmp_path, model, spec=spec) as loop:
            said = [asyncio.create_task(say(loop, "m1"))]
            await model.first.wait()
            said += [asyncio.create_task(say(loop, f"m{n}")) for n in range(2, 7)]
            await until(lambda: len(bodies(loop)) == 6)
            model.go.set()
            texts = [(await one).text for one in said]
            assert texts[0] == "to m1"
            # One answer that has seen all of them.
            assert len(set(texts[1:])) == 1
            sent = [
                [body["content"] for body in asked.messages if body["role"] == "user"]
                for asked in model.asked
                if asked.tools
            ]
            assert {"m2", "m3", "m4", "m5", "m6"} <= set(sent[1])

    asyncio.run(main())


@every_store
@pytest.mark.parametrize("end", ["broken", "cancelled", "stopped"])
def test_message_after_an_unfinished_answer_is_answered_next(
    store: str, end: str, tmp_path: Path
) -> None:
    async def main() -> None:
        script = [ModelUnavailable("the line is dead"), "Next."] if end == "broken" else ["Next."]
        model = Waiting(script, begins="half a")
        async with agent_loop(store, tmp_path, model) as loop:
            first = asyncio.create_task(say(loop, "first"))
            await model.first.wait()
            second = asyncio.create_task(say(loop, "second"))
            await until(lambda: len(bodies(loop)) == 2)
            if end == "cancelled":
                first.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await first
            else:
                if end == "stopped":
                    assert await loop.stop(KEY)
                model.go.set()
                assert (await first).outcome == "interrupted"
            assert (await second).text == "Next."

    asyncio.run(main())


@with_store
@pytest.mark.parametrize("command", ["retry", "edit new words", "clear"])
def test_p5_command_does_not_hide_a_message_that_was_answered_after_it(
    store: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_answered = threading.Event()

    def read_late(*args: Any) -> int:
        assert is_answered.wait(timeout=60)
        return read_last_seq(*args)

    async def main() -> None:
        async with agent_loop(store, tmp_path, ScriptedModel(_echo)) as loop:
            await say(loop, "old words")
            monkeypatch.setattr(commands, "read_last_seq", read_late)
            changing = asyncio.create_task(say(loop, f"/{command}"))
            await asyncio.sleep(0)
            try:
                assert (await say(loop, "new message")).text == "to new message"
            finally:
                is_answered.set()
            await changing
            said = [body["content"] for body in bodies(loop)]
            assert said[-2:] == ["new message", "to new message"]

    asyncio.run(main())


@with_store
def test_concurrent_commands_do_not_both_run(store: str, tmp_path: Path) -> None:
    async def main() -> None:
        model = ScriptedModel(["One.", "Two.", "Three."])
        async with agent_loop(store, tmp_path, model) as loop:
            await say(loop, "Hi.")
            both = await asyncio.gather(say(loop, "/retry"), say(loop, "/retry"))
            assert {one.outcome for one in both} == {"answered", "command"}
            assert roles(loop) == ["user", "assistant"]

    asyncio.run(main())


def test_redelivered_command_does_not_run_again(tmp_path: Path) -> None:
    async def main() -> None:
        model = ScriptedModel(["One.", "Two.", "Three."])
        async with agent_loop("jsonl", tmp_path, model) as loop:
            await say(loop, "Hi.")
            assert (await say(loop, "/retry", id="7")).text == "Two."
            assert (await say(loop, "/retry", id="7")).outcome == "again"
            assert len(model.asked) == 2

    asyncio.run(main())


@with_store
def test_command_is_rejected_while_another_process_answers(store: str, tmp_path: Path) -> None:
    async def main() -> None:
        other = open_agent(store, tmp_path, ScriptedModel([]))
        assert other.store is not None
        async with agent_loop(store, tmp_path, ["One."]) as loop:
            await say(loop, "Hi.")
            with other.store.lease(KEY, ttl=60):
                assert "in progress" in (await say(loop, "/clear")).text
                heard = Heard()
                waiting = asyncio.create_task(say(loop, "Hello?", on_event=heard))
                await until(lambda: bool(heard.of(Notice)))
                assert await loop.stop(KEY)
                assert (await waiting).outcome == "interrupted"
            assert "hidden" in (await say(loop, "/clear")).text
        await other.close()

    asyncio.run(main())


def test_call_cut_off_at_the_limit_does_not_run(tmp_path: Path) -> None:
    made: list[str] = []

    def delete(where: str = "/home") -> str:
        """Delete a folder."""
        made.append(where)
        return "deleted"

    class Cut(ScriptedModel):
        async def stream(self, messages: Any, **how: Any) -> Any:
            async for delta in super().stream(messages, **how):
                yield delta
            if len(self.asked) == 1:
                yield Delta(finish="length")

    async def main() -> None:
        model = Cut([called("delete", ""), "I was cut off."])
        async with agent_loop("jsonl", tmp_path, model, tools=[delete]) as loop:
            heard = Heard()
            assert (await say(loop, "Tidy up.", on_event=heard)).text == "I was cut off."
            [ended] = heard.of(ToolFinished)
            assert ended.failed
            assert "not made" in ended.text

    asyncio.run(main())
    assert made == []


@every_store
@pytest.mark.parametrize(
    ("content", "id", "error"),
    [("\ud83d\ude00", "", RefusedMessage), ("Hi.", "x" * 300, UsageError)],
)
def test_unstorable_message_is_rejected_and_blocks_nothing(
    store: str, content: str, id: str, error: type[Exception], tmp_path: Path
) -> None:
    async def main() -> None:
        async with agent_loop(store, tmp_path, ["Hello."]) as loop:
            with pytest.raises(error):
                await loop.handle(InboundMessage(key=KEY, content=content, id=id))
            assert (await say(loop, "Hi.")).text == "Hello."

    asyncio.run(main())
    assert len(reopened(store, tmp_path)) == 2


def test_stop_does_not_wait_for_a_summary(tmp_path: Path) -> None:
    asked = asyncio.Event()

    class Summing(ScriptedModel):
        async def stream(self, messages: Any, **how: Any) -> Any:
            if not how.get("tools"):
                asked.set()
                await asyncio.Event().wait()
            async for delta in super().stream(messages, **how):
                yield delta

    async def main() -> None:
        spec = replace(SPEC, limits=Limits(max_history_messages=2))
        model = Summing(_echo)
        async with agent_loop("jsonl", tmp_path, model, spec=spec, patience=0) as loop:
            store = loop.registry.agent().store
            assert store is not None
            for number in range(4):
                store.add_message(KEY, "user", f"{number}")
                store.add_message(KEY, "assistant", "ok")
            speaking = asyncio.create_task(say(loop, "Hi."))
            await asked.wait()
            assert await loop.stop(KEY)
            assert (await speaking).outcome == "interrupted"

    asyncio.run(main())


def test_summaries_use_the_chosen_model(tmp_path: Path) -> None:
    async def main() -> None:
        theirs = ScriptedModel(_echo, name="theirs")
        ours = ScriptedModel(_echo, name="ours")
        async with agent_loop("jsonl", tmp_path, theirs, open_model=lambda _: ours) as loop:
            await loop.handle(InboundMessage(key=KEY, content="/model ours"), all_sessions=True)
            for number in range(6):
                await say(loop, f"private {number}")
            await say(loop, "/compact")
            assert theirs.asked == []
            assert any(not asked.tools for asked in ours.asked)

    asyncio.run(main())


def test_tool_that_ignores_cancellation_does_not_block_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stenolog.agent.scheduler._CANCEL_TIMEOUT_SECONDS", 0.2)
    begun, over = asyncio.Event(), asyncio.Event()

    async def stubborn() -> None:
        """Never end."""
        begun.set()
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue

    async def main() -> None:
        async with agent_loop("jsonl", tmp_path, [called("stubborn")], tools=[stubborn]) as loop:
            speaking = asyncio.create_task(say(loop, "go"))
            await begun.wait()
            left = await loop.close(patience=0.05)
            assert (left.turns, left.hanging) == ((KEY,), 1)
            over.set()
            assert (await speaking).outcome == "failed"

    asyncio.run(main())


@pytest.mark.parametrize("is_silent", [False, True])
def test_lost_lease_ends_the_turn_without_a_write(*, is_silent: bool, tmp_path: Path) -> None:
    async def main() -> None:
        model = Waiting(["Too late."], begins="half a")
        agent = open_agent("sqlite", tmp_path, model)
        # While the model is silent, the renewal finds the lease taken over.
        async with AgentLoop(AgentRegistry([agent]), ttl=0.3 if is_silent else 60) as loop:
            speaking = asyncio.create_task(say(loop, "Hi."))
            await model.first.wait()
            with closing(sqlite3.connect(tmp_path / "steno.db")) as other, other:
                # As another process leaves it that has taken the turn over.
                assert other.execute("UPDATE lease SET epoch = epoch + 1").rowcount == 1
            if not is_silent:
                model.go.set()
            answer = await speaking
            assert (answer.outcome, answer.text) == (
                "failed",
                "Another process has taken over this turn.",
            )
            assert roles(loop) == ["user"]

    asyncio.run(main())


@with_store
def test_waiting_turn_does_not_recreate_a_purged_session(store: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with agent_loop(store, tmp_path, ScriptedModel(_echo)) as loop:
            with open_store(_where(store, tmp_path)) as other:
                other.add_message(KEY, "user", "Before.")
                with other.lease(KEY, ttl=60):
                    speaking = asyncio.create_task(say(loop, "Hi."))
                    await until(lambda: len(other.get_history(KEY)) == 2)
                    assert other.admin.purge(KEY).messages == 2
                answer = await speaking
            assert answer.outcome == "failed"
            assert isinstance(answer.error, NoSuchSession)
        with open_store(_where(store, tmp_path)) as other:
            assert (other.list_sessions(), other.admin.list_trash()) == ([], [])

    asyncio.run(main())


@with_store
@pytest.mark.parametrize("answered", [False, True])
def test_waiting_message_gets_no_answer_of_another_session_with_its_key(
    store: str, answered: bool, tmp_path: Path
) -> None:
    async def main() -> None:
        async with agent_loop(store, tmp_path, ScriptedModel(_echo)) as loop:
            with open_store(_where(store, tmp_path)) as other:
                other.add_message(KEY, "user", "Before.")
                lease = other.lease(KEY, ttl=60)
                heard = Heard()
                speaking = asyncio.create_task(say(loop, "Hi.", on_event=heard))
                await until(lambda: bool(heard.of(Notice)))
                other.admin.purge(KEY)
                other.add_messages(KEY, [{"role": "user", "content": "Another one."}] * 2)
                if answered:
                    body = {"role": "assistant", "content": "Not to Hi."}
                    other.add_full_message(KEY, mark_seen(body, seen=2, answers=[1, 2]))
                lease.release()
                answer = await speaking
            assert answer.outcome == "failed", answer.text
            assert isinstance(answer.error, SessionDeleted)
            assert roles(loop) == ["user", "user", "assistant"][: 2 + answered]

    asyncio.run(main())


def test_summary_does_not_block_other_sessions(tmp_path: Path) -> None:
    stuck = threading.Event()

    async def main() -> None:
        model = ScriptedModel(_echo)
        async with agent_loop("jsonl", tmp_path, model) as loop:
            threads = loop._scheduler.threads
            waiting = [asyncio.create_task(threads.run_model(stuck.wait, 30)) for _ in range(40)]
            assert (await say(loop, "Hi.")).text == "to Hi."
            stuck.set()
            await asyncio.gather(*waiting)

    asyncio.run(main())


@with_store
def test_message_answered_by_another_process_is_not_answered_again(
    store: str, tmp_path: Path
) -> None:
    async def main() -> None:
        other = open_agent(store, tmp_path, ScriptedModel([]))
        assert other.store is not None
        async with agent_loop(store, tmp_path, ["One.", "Again."]) as loop:
            await say(loop, "To begin with.")
            lease = other.store.lease(KEY, ttl=60)
            heard = Heard()
            waiting = asyncio.create_task(say(loop, "Hello?", on_event=heard))
            await until(lambda: bool(heard.of(Notice)))
            # Both happen between two polls: the waiting call finds the session free.
            other_answer = {"role": "assistant", "content": "From elsewhere."}
            lease.store.add_full_message(KEY, mark_seen(other_answer, seen=3, answers=[3]))
            lease.release()
            answer = await waiting
            assert (answer.outcome, answer.text) == ("elsewhere", "From elsewhere.")
            assert roles(loop) == ["user", "assistant"] * 2
        await other.close()

    asyncio.run(main())


@with_store
def test_message_that_arrives_between_two_turns_is_stored_at_once(
    store: str, tmp_path: Path
) -> None:
    async def main() -> None:
        model = Waiting(_echo)
        async with agent_loop(store, tmp_path, model) as loop:
            first = asyncio.create_task(say(loop, "one"))
            await model.first.wait()
            second = asyncio.create_task(say(loop, "two"))
            await until(lambda: len(bodies(loop)) == 2)
            [session] = loop._scheduler._sessions
            release, late = session.lock.release, list[asyncio.Task[Any]]()
            message = InboundMessage(key=KEY, content="three")
            view = partial(session.instance.store.view, KEY)

            def release_while_a_message_arrives() -> None:
                if not late:
                    late.append(asyncio.create_task(loop.handle(message, prepare=view)))
                release()

            session.lock.release = release_while_a_message_arrives  # type: ignore[method-assign]
            model.first.clear()
            first.cancel()
            await model.first.wait()  # the turn of the second message runs
            await until(lambda: bodies(loop)[-1]["content"] == "three")
            model.go.set()
            assert all(answer.saved for answer in await asyncio.gather(second, *late))

    asyncio.run(main())


class _SharedStore(InMemoryStore):
    """A store whose append of a tool result returns after another read, if one is made."""

    was_read = threading.Event()

    def add_full_message(
        self, key: str, message: Message | Mapping[str, Any], *, once: str | None = None
    ) -> int:
        """Append a message."""
        _SharedStore.was_read.clear()
        seq = super().add_full_message(key, message, once=once)
        if getattr(message, "get", lambda _: "")("role") == "tool":
            _SharedStore.was_read.wait(0.2)
        return seq

    def view(
        self, key: str, last: int | None = None, *, since: SessionView | None = None
    ) -> SessionView:
        """Read new messages."""
        new_view = super().view(key, last, since=since)
        if since is not None:
            _SharedStore.was_read.set()
        return new_view


def test_results_of_tools_that_end_together_are_stored_one_after_the_other() -> None:
    def look() -> str:
        """Look."""
        return "seen"

    async def main() -> None:
        script: list[Any] = [calls(("look", "{}", "c1"), ("look", "{}", "c2")), "done"]
        agent = AgentInstance(
            SPEC,
            model=ScriptedModel(script),
            sessions=JSONLBackend(_SharedStore()),
            tools=[look],
        )
        async with AgentLoop(AgentRegistry([agent])) as loop:
            assert (await say(loop, "Look twice.")).text == "done"
            assert roles(loop) == ["user", "assistant", "tool", "tool", "assistant"]

    asyncio.run(main())


def test_messages_are_stored_in_the_order_in_which_they_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with agent_loop("jsonl", tmp_path, ["to the first", "to the second"]) as loop:
            own: Any = loop.registry.agent().store
            add, begun, second_begun = own.add_full_message, asyncio.Event(), threading.Event()
            event_loop = asyncio.get_running_loop()

            def add_slowly(key: str, message: Any, **options: Any) -> int:
                if message["content"] == "first":
                    event_loop.call_soon_threadsafe(begun.set)
                    second_begun.wait(0.2)
                else:
                    second_begun.set()
                seq: int = add(key, message, **options)
                return seq

            monkeypatch.setattr(own, "add_full_message", add_slowly)
            first = asyncio.create_task(say(loop, "first"))
            await begun.wait()
            await asyncio.gather(first, say(loop, "second"))
            contents = [body["content"] for body in bodies(loop) if body["role"] == "user"]
            assert contents == ["first", "second"]

    asyncio.run(main())
