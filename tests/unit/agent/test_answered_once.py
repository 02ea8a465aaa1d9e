"""The contract of "answered once".

A message that is sent again gets its own stored answer, whatever happened to that answer since. It
is never answered a second time because an answer is hidden, archived, damaged or unreadable, and it
never gets the answer to another message.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stenolog.agent.active_sessions import ActiveSession
from stenolog.agent.instance import AgentInstance, AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.agent.scheduler import TurnScheduler
from stenolog.agent.spec import AgentSpec
from stenolog.agent.stored_answers import HIDDEN_UNANSWERED_TEXT, find_answer
from stenolog.agent.tools import tool
from stenolog.agent.turn import CancelReason
from stenolog.agent.turn_events import Answer, Event, InboundMessage, Notice
from stenolog.catalog.message_metadata import (
    answered_seqs,
    mark_client_calls,
    mark_model,
    mark_received,
    mark_seen,
)
from stenolog.context.window import Limits
from stenolog.errors import (
    AnswerUnknown,
    DamagedStore,
    ModelRefused,
    ModelUnavailable,
    OnceConflict,
    SessionDeleted,
    StenologError,
    StoreUnavailable,
)
from stenolog.sessions.session_store import JSONLBackend
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from support.agents import called
from support.damage import damage_message
from support.gateway.chat_turns import new_place

KEY = "telegram:1"
FORK = "telegram:1:fork"
PIN, EVEREST = "What is my PIN?", "How tall is Everest?"
SPEC = AgentSpec(consolidation=False, memory=False)
DURABLE_ENGINES = ("jsonl", "sqlite", "postgres")


class Asked:
    """A model that records the questions, and answers `to QUESTION`."""

    def __init__(self) -> None:
        self.questions: list[str] = []

    def __call__(self, messages: Sequence[Mapping[str, Any]], tools: object) -> str:
        del tools
        self.questions.append(messages[-1]["content"])
        return f"to {messages[-1]['content']}"


class Place:
    """A store with two answered messages, and the agent on it."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.asked = Asked()
        self._memory = InMemoryStore()

    def open(self) -> Store:
        """Open the store; a store in memory lives as long as this object."""
        return self._memory if self.where == "memory:" else open_store(self.where)

    @asynccontextmanager
    async def loop(self) -> Any:
        """Yield an agent loop on the store."""
        agent = AgentInstance(
            SPEC, model=ScriptedModel(self.asked), sessions=JSONLBackend(self.open())
        )
        loop = AgentLoop(AgentRegistry([agent]))
        try:
            yield loop
        finally:
            if self.where != "memory:":
                await loop.close()

    def change(self, change: Callable[[Store], object]) -> None:
        """Change the stored session while no agent runs."""
        store = self.open()
        change(store)
        if self.where != "memory:":
            store.close()

    async def redeliver(self, text: str = PIN, id: str = "u1", key: str = KEY) -> Answer:
        """Send a message again in a new process."""
        async with self.loop() as loop:
            answer: Answer = await loop.handle(InboundMessage(key=key, content=text, id=id))
            return answer

    async def resume(self) -> list[Answer]:
        """Resume in a new process."""
        async with self.loop() as loop:
            answers: list[Answer] = await loop.resume()
            return answers


@pytest.fixture(params=["memory", *DURABLE_ENGINES])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A store on each engine, with two messages and their answers."""
    with new_place(request.param, tmp_path, request) as where:
        place = Place(where)

        async def talk() -> None:
            async with place.loop() as loop:
                for text, id in ((PIN, "u1"), (EVEREST, "u2")):
                    await loop.handle(InboundMessage(key=KEY, content=text, id=id))
                await loop.wait_until_idle()

        asyncio.run(talk())
        place.asked.questions.clear()
        yield place


durable = pytest.mark.parametrize("place", DURABLE_ENGINES, indirect=True)


def _hide(store: Store) -> None:
    store.truncate_history(KEY, 2)


def _summarize(store: Store) -> None:
    store.checkpoint(KEY, summary="They talked.", upto=2)


def _archive(store: Store) -> None:
    store.truncate_history(KEY, 2)
    store.compact(KEY)


def _hide_answer(store: Store) -> None:
    store.admin.hide(KEY, 2, 2)


def _keep(store: Store) -> None:
    del store


@pytest.mark.quick(5)
@pytest.mark.parametrize("change", [_keep, _hide, _summarize, _archive, _hide_answer])
def test_message_sent_again_gets_its_own_answer(
    place: Place, change: Callable[[Store], None]
) -> None:
    place.change(change)
    again = asyncio.run(place.redeliver())
    assert (again.outcome, again.text, again.seq) == ("again", f"to {PIN}", 2)
    if change is not _hide_answer:  # without its visible answer, a visible message waits for one
        assert asyncio.run(place.resume()) == []
        assert place.asked.questions == []


@pytest.mark.quick(4)
@pytest.mark.parametrize("change", [_keep, _hide, _archive])
def test_message_sent_again_after_a_fork_gets_its_own_answer(
    place: Place, change: Callable[[Store], None]
) -> None:
    place.change(change)
    place.change(lambda store: store.fork(KEY, FORK))
    assert asyncio.run(place.resume()) == []
    again = asyncio.run(place.redeliver())
    assert (again.outcome, again.text) == ("again", f"to {PIN}")
    assert place.asked.questions == []
    # A fork has no ids, so the same id is a new message there.
    in_fork = asyncio.run(place.redeliver("Other.", key=FORK))
    assert (in_fork.outcome, in_fork.text) == ("answered", "to Other.")
    again = asyncio.run(place.redeliver("Other.", key=FORK))
    assert (again.outcome, again.text) == ("again", "to Other.")


@pytest.mark.quick(4)
@pytest.mark.parametrize("before", [2, 3, 5])
def test_purged_message_is_a_new_message_if_it_is_sent_again(place: Place, before: int) -> None:
    place.change(lambda store: store.admin.purge(KEY, before=before))
    again = asyncio.run(place.redeliver())
    assert (again.outcome, again.text, again.seq) == ("answered", f"to {PIN}", 6)
    assert asyncio.run(place.resume()) == []


@pytest.mark.quick(3)
@durable
@pytest.mark.parametrize("change", [_keep, _hide, _archive])
def test_damaged_answer_is_not_replaced_by_another_answer_or_a_second_one(
    place: Place, change: Callable[[Store], None]
) -> None:
    place.change(change)
    damage_message(place.where, KEY, 2)
    for _ in range(2):
        again = asyncio.run(place.redeliver())
        assert (again.outcome, type(again.error)) == ("failed", AnswerUnknown)
        assert "message at seq 1 is unknown: message" in again.text
    assert asyncio.run(place.resume()) == []
    other = asyncio.run(place.redeliver(EVEREST, "u2"))
    assert (other.outcome, other.text) == ("again", f"to {EVEREST}")
    assert place.asked.questions == []


@durable
def test_message_whose_answer_is_damaged_is_not_resumed(place: Place) -> None:
    damage_message(place.where, KEY, 4)
    [resumed] = asyncio.run(place.resume())
    assert (resumed.outcome, type(resumed.error)) == ("failed", AnswerUnknown)
    again = asyncio.run(place.redeliver(EVEREST, "u2"))
    assert (again.outcome, type(again.error)) == ("failed", AnswerUnknown)
    assert place.asked.questions == []
    # The session goes on, and its next answer answers only the next message.
    assert asyncio.run(place.redeliver("And K2?", "u3")).text == "to And K2?"
    again = asyncio.run(place.redeliver(EVEREST, "u2"))
    assert (again.outcome, type(again.error)) == ("failed", AnswerUnknown)
    assert asyncio.run(place.resume()) == []


@durable
@pytest.mark.parametrize("command", ["/edit How tall is K2?", "/undo"])
def test_commands_work_after_a_damaged_last_message(place: Place, command: str) -> None:
    damage_message(place.where, KEY, 4)
    answer = asyncio.run(place.redeliver(command, ""))
    assert "has just arrived" not in answer.text
    assert place.asked.questions == (["How tall is K2?"] if "K2" in command else [])


@durable
@pytest.mark.parametrize("change", [_keep, _hide, _archive])
def test_damaged_question_gets_its_own_answer(
    place: Place, change: Callable[[Store], None]
) -> None:
    place.change(change)
    damage_message(place.where, KEY, 1)
    other = asyncio.run(place.redeliver("Transfer 100 EUR."))
    again = asyncio.run(place.redeliver())
    if place.where.startswith("sqlite"):  # the checksum tells what the message was
        assert (other.outcome, type(other.error)) == ("failed", DamagedStore)
        assert (again.outcome, again.text, again.seq) == ("again", f"to {PIN}", 2)
        assert place.asked.questions == []
    elif place.where.startswith("postgres"):
        for answer in (other, again):
            assert (answer.outcome, type(answer.error)) == ("failed", DamagedStore)
        assert place.asked.questions == []
    elif change is _archive:  # the log keeps the ids of archived messages
        assert (other.outcome, type(other.error)) == ("failed", OnceConflict)
        assert (again.outcome, again.text, again.seq) == ("again", f"to {PIN}", 2)
        assert place.asked.questions == []
    else:  # a log loses the id with the message, so this is a new message
        assert (other.outcome, other.text, other.seq) == ("answered", "to Transfer 100 EUR.", 6)
        assert (again.outcome, type(again.error)) == ("failed", OnceConflict)


@pytest.mark.parametrize("place", ["jsonl"], indirect=True)
@pytest.mark.parametrize("loss", ["deleted", "directory", "link"])
def test_missing_archive_is_not_a_missing_answer(place: Place, loss: str, tmp_path: Path) -> None:
    place.change(_archive)
    [archive] = (tmp_path / "sessions" / "archive").rglob("*.gz")
    moved = archive.rename(tmp_path / "moved")
    if loss == "directory":
        archive.mkdir()
    elif loss == "link":
        archive.symlink_to(moved)
    again = asyncio.run(place.redeliver())
    assert again.outcome == "failed"
    assert isinstance(again.error, StenologError)
    assert place.asked.questions == []


def test_unreadable_store_is_not_an_empty_session(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.change(_hide)

    async def main() -> None:
        async with place.loop() as loop:
            store: Any = loop.registry.agent().store
            read = store.get_history

            def fail(key: str, **named: Any) -> Any:
                if named.get("full"):
                    raise StoreUnavailable("the network is down for a moment")
                return read(key, **named)

            with monkeypatch.context() as patched:
                patched.setattr(store, "get_history", fail)
                again = await loop.handle(InboundMessage(key=KEY, content=PIN, id="u1"))
                assert (again.outcome, type(again.error)) == ("failed", StoreUnavailable)
            again = await loop.handle(InboundMessage(key=KEY, content=PIN, id="u1"))
            assert (again.outcome, again.text) == ("again", f"to {PIN}")

    asyncio.run(main())
    assert place.asked.questions == []


def _fail_reads(patched: pytest.MonkeyPatch, store: Any, *names: str) -> None:
    """Make these reads of the history fail."""

    def fail(*_: object, **__: object) -> None:
        raise StoreUnavailable("the network is down for a moment")

    for name in names:
        patched.setattr(store, name, fail)


def test_unreadable_session_is_resumed_when_it_can_be_read(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = mark_received({"role": "user", "content": "And K2?"}, sender=KEY)
    place.change(lambda store: store.add_full_message(KEY, question, once="u3"))

    async def resume_unreadable() -> None:
        async with place.loop() as loop:
            with monkeypatch.context() as patched:
                _fail_reads(patched, loop.registry.agent().store, "get_history", "view")
                [resumed] = await loop.resume(KEY)
                assert (resumed.outcome, type(resumed.error)) == ("failed", StoreUnavailable)

    asyncio.run(resume_unreadable())
    assert place.asked.questions == []
    [resumed] = asyncio.run(place.resume())
    assert (resumed.outcome, resumed.text, resumed.seq) == ("answered", "to And K2?", 6)
    again = asyncio.run(place.redeliver("And K2?", "u3"))
    assert (again.outcome, again.seq) == ("again", 6)
    assert place.asked.questions == ["And K2?"]


def test_unreadable_fork_is_not_answered_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.change(lambda store: store.fork(KEY, FORK))
    assert asyncio.run(place.redeliver("Other.", key=FORK)).seq == 6
    place.change(lambda store: store.clear(FORK))
    place.change(_hide)

    async def redeliver_unreadable() -> None:
        async with place.loop() as loop:
            with monkeypatch.context() as patched:
                _fail_reads(patched, loop.registry.agent().store, "get_history")
                for key, text in ((KEY, PIN), (FORK, "Other.")):
                    again = await loop.handle(InboundMessage(key=key, content=text, id="u1"))
                    assert (again.outcome, type(again.error)) == ("failed", StoreUnavailable)

    asyncio.run(redeliver_unreadable())
    assert asyncio.run(place.resume()) == []
    for key, text, seq in ((KEY, PIN, 2), (FORK, "Other.", 6)):
        again = asyncio.run(place.redeliver(text, key=key))
        assert (again.outcome, again.text, again.seq) == ("again", f"to {text}", seq)
    assert place.asked.questions == ["Other."]


def test_fork_of_a_purged_session_leaves_its_messages_new(place: Place) -> None:
    place.change(lambda store: store.admin.purge(KEY, before=3))
    place.change(lambda store: store.fork(KEY, FORK))
    assert asyncio.run(place.resume()) == []
    for key, seq in ((KEY, 6), (FORK, 6)):
        again = asyncio.run(place.redeliver(key=key))
        assert (again.outcome, again.text, again.seq) == ("answered", f"to {PIN}", seq)


@durable
def test_fork_of_a_damaged_answer_does_not_answer_its_message(place: Place) -> None:
    damage_message(place.where, KEY, 2)
    place.change(lambda store: store.fork(KEY, FORK))
    assert asyncio.run(place.resume()) == []
    again = asyncio.run(place.redeliver())
    assert (again.outcome, type(again.error)) == ("failed", AnswerUnknown)
    assert place.asked.questions == []
    in_fork = asyncio.run(place.redeliver(key=FORK))  # a fork has no ids
    assert (in_fork.outcome, in_fork.text) == ("answered", f"to {PIN}")


def test_answer_without_a_mark_answers_no_message(place: Place) -> None:
    question = mark_received({"role": "user", "content": "Whose?"}, sender=KEY)

    def add(store: Store) -> None:
        store.add_full_message(KEY, question, once="u3")
        store.add_message(KEY, "assistant", "An answer of another program.")

    place.change(add)
    again = asyncio.run(place.redeliver("Whose?", "u3"))
    assert (again.outcome, type(again.error)) == ("failed", AnswerUnknown)
    assert "the answer at seq 6 does not say which messages it answers" in again.text
    assert place.asked.questions == []


@pytest.mark.parametrize("shows_again", [False, True], ids=["hidden", "shown again"])
def test_message_hidden_before_its_answer_gets_no_later_answer(
    place: Place, shows_again: bool
) -> None:
    question = mark_received({"role": "user", "content": "Lost?"}, sender=KEY)
    place.change(lambda store: store.add_full_message(KEY, question, once="u3"))
    place.change(lambda store: store.admin.hide(KEY, 5, 5))
    assert asyncio.run(place.redeliver("Later.", "u4")).text == "to Later."
    if shows_again:
        place.change(lambda store: store.undo(KEY))
    again = asyncio.run(place.redeliver("Lost?", "u3"))
    # Without a seq: a channel sends the text, also after later answers.
    assert (again.text, again.seq) == (HIDDEN_UNANSWERED_TEXT, None)
    assert place.asked.questions == ["Later."]


def test_answer_to_two_messages_is_the_answer_to_each(place: Place) -> None:
    for id in ("u3", "u4"):
        question = mark_received({"role": "user", "content": id}, sender=KEY)
        place.change(lambda store, q=question, id=id: store.add_full_message(KEY, q, once=id))  # type: ignore[misc]
    [resumed] = asyncio.run(place.resume())
    place.change(_hide)
    for id in ("u3", "u4"):
        again = asyncio.run(place.redeliver(id, id))
        assert (again.outcome, again.text, again.seq) == ("again", resumed.text, resumed.seq)


def test_retried_answer_is_the_visible_one(place: Place) -> None:
    asyncio.run(place.redeliver("/retry", ""))
    again = asyncio.run(place.redeliver(EVEREST, "u2"))
    assert (again.outcome, again.seq) == ("again", 5)
    place.change(lambda store: store.clear(KEY))
    again = asyncio.run(place.redeliver(EVEREST, "u2"))
    assert (again.outcome, again.seq) == ("again", 5)
    place.change(lambda store: store.undo(KEY))
    place.change(lambda store: store.undo(KEY, answered=(5, 5)))
    again = asyncio.run(place.redeliver(EVEREST, "u2"))
    assert (again.outcome, again.seq) == ("again", 4)


@durable
def test_rejected_answer_is_not_returned_if_the_next_one_is_damaged(place: Place) -> None:
    asyncio.run(place.redeliver("/retry", ""))
    place.asked.questions.clear()
    damage_message(place.where, KEY, 5)
    again = asyncio.run(place.redeliver(EVEREST, "u2"))
    assert (again.outcome, type(again.error)) == ("failed", AnswerUnknown)
    assert place.asked.questions == []


def test_message_whose_newest_answer_alone_is_hidden_is_answered_again(place: Place) -> None:
    place.change(lambda store: store.admin.hide(KEY, 4, 4))
    assert asyncio.run(place.redeliver(EVEREST, "u2")).seq == 4  # until there is a new answer
    later = asyncio.run(place.redeliver("And K2?", "u3"))
    assert place.asked.questions == ["And K2?"]
    for text, id in ((EVEREST, "u2"), ("And K2?", "u3")):
        again = asyncio.run(place.redeliver(text, id))
        assert (again.outcome, again.seq) == ("again", later.seq)
    again = asyncio.run(place.redeliver())
    assert (again.outcome, again.seq) == ("again", 2)
    assert asyncio.run(place.resume()) == []


class _Flaky(InMemoryStore):
    """A store whose next reads fail."""

    failing = 0

    def get_history(self, key: str, **named: Any) -> Any:
        self._fail_if_due()
        return super().get_history(key, **named)

    def view(self, key: str, last: int | None = None, *, since: Any = None) -> Any:
        self._fail_if_due()
        return super().view(key, last, since=since)

    def _fail_if_due(self) -> None:
        if _Flaky.failing:  # also in the copy of the store that writes with a lease
            _Flaky.failing -= 1
            raise StoreUnavailable("the network is down for a moment")


@pytest.mark.parametrize("failing", [0, 1])
def test_stopped_turn_ends_only_with_the_results_of_its_tools(failing: int) -> None:
    async def main() -> None:
        store, started = _Flaky(), asyncio.Event()

        @tool
        async def slow() -> str:
            """Wait."""
            started.set()
            await asyncio.sleep(60)
            return "done"

        agent = AgentInstance(
            SPEC,
            model=ScriptedModel([called("slow"), "It is done."]),
            sessions=JSONLBackend(store),
            tools=[slow],
        )
        loop = AgentLoop(AgentRegistry([agent]))
        task = asyncio.create_task(loop.handle(InboundMessage(key=KEY, content="Run it.", id="u1")))
        await asyncio.wait_for(started.wait(), 30)
        _Flaky.failing = failing
        await loop.stop(KEY)
        answer = await task
        roles = [message.role for message in InMemoryStore.get_history(store, KEY)]
        if failing:
            assert (answer.outcome, type(answer.error)) == ("failed", StoreUnavailable)
            assert roles == ["user", "assistant"]  # the call stays open, and the turn unfinished
        else:
            assert (answer.outcome, answer.saved) == ("interrupted", True)
            assert roles == ["user", "assistant", "tool", "assistant"]
        await loop.close()

    asyncio.run(main())


class _ReadsFail(InMemoryStore):
    """A store of whose reads one or more fail, beginning with number `failing`."""

    reads = failing = 0  # of the class: a store that writes with a lease is a copy
    failures = 1

    def get_history(self, key: str, **named: Any) -> Any:
        self._count()
        return super().get_history(key, **named)

    def view(self, key: str, last: int | None = None, *, since: Any = None) -> Any:
        self._count()
        return super().view(key, last, since=since)

    def info(self, key: str) -> Any:
        self._count()
        return super().info(key)

    def close(self) -> None:
        pass  # the test looks at it later

    @staticmethod
    def _count() -> None:
        _ReadsFail.reads += 1
        if 0 < _ReadsFail.failing <= _ReadsFail.reads < _ReadsFail.failing + _ReadsFail.failures:
            raise StoreUnavailable("the network is down for a moment")


@tool
async def look() -> str:
    """Look."""
    return "seen"


def _use(store: Store, use: Callable[[AgentLoop], Any], *, failing: int, spec: AgentSpec) -> bool:
    """Use a store whose reads from number `failing` on fail; return whether one has failed."""

    async def main() -> None:
        model = ScriptedModel(["It is done."])
        agent = AgentInstance(spec, model=model, sessions=JSONLBackend(store), tools=[look])
        loop = AgentLoop(AgentRegistry([agent]))
        _ReadsFail.reads, _ReadsFail.failing = 0, failing
        with suppress(StoreUnavailable):
            await use(loop)
        await loop.wait_until_idle()
        await loop.close()

    asyncio.run(main())
    was_read = _ReadsFail.reads >= failing
    _ReadsFail.failing = 0
    return was_read


@pytest.mark.parametrize("resume_within", [3_600.0, -1.0], ids=["in time", "too old"])
@pytest.mark.parametrize("failures", [1, 2])
def test_turn_with_a_failed_read_ends_only_with_the_results_of_its_tools(
    failures: int, resume_within: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ReadsFail, "failures", failures)
    spec = replace(SPEC, resume_within=resume_within)
    called_look = mark_model(
        {"role": "assistant", "content": None, **called("look")}, model="m", seconds=1
    )
    found: set[tuple[str | None, ...]] = set()
    has_failed, failing = True, 0
    while has_failed:
        failing += 1
        store = _ReadsFail()
        store.add_full_message(KEY, mark_received({"role": "user", "content": "Look."}, sender=KEY))
        store.add_full_message(KEY, called_look)
        answers: list[Answer] = []

        async def resume(loop: AgentLoop, answers: list[Answer] = answers) -> None:
            # The first call may have failed to find the session.
            answers += await loop.resume() or await loop.resume()

        has_failed = _use(store, resume, failing=failing, spec=spec)
        is_finished = len(store.get_history(KEY)) == 4
        assert [answer.outcome == "failed" for answer in answers] == [not is_finished]
        found.add(tuple(message.role for message in store.get_history(KEY)))
        _use(store, lambda loop: loop.resume(), failing=0, spec=spec)
        roles = [message.role for message in store.get_history(KEY)]
        assert roles == ["user", "assistant", "tool", "assistant"]
    assert failing > 3
    assert ("user", "assistant") in found
    assert found <= {("user", "assistant", "tool", "assistant")[:end] for end in (2, 3, 4)}


@pytest.mark.parametrize("command", ["/clear", "/retry", "/edit other words"])
def test_command_with_a_failed_read_hides_no_message_that_waits(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = InboundMessage(key=KEY, content=command)
    answer = mark_seen({"role": "assistant", "content": f"to {PIN}"}, seen=1, answers=[1])
    has_failed, failing = True, 0
    while has_failed:
        failing += 1
        store = _ReadsFail()
        store.add_full_message(KEY, mark_received({"role": "user", "content": PIN}, sender=KEY))
        store.add_full_message(KEY, answer)
        store.add_full_message(KEY, mark_received({"role": "user", "content": "Wait."}, sender=KEY))
        # The last message arrives after the command, and before the command has the lease.
        is_waiting = chain([False], repeat(True))

        def has_waiting(*_: object, answers: Iterator[bool] = is_waiting) -> bool:
            return next(answers)

        monkeypatch.setattr(TurnScheduler, "has_waiting_message", has_waiting)
        has_failed = _use(store, lambda loop: loop.handle(message), failing=failing, spec=SPEC)
        assert "Wait." in [stored.content for stored in store.get_history(KEY)]
    assert failing > 2


def test_turn_stopped_before_its_request_answers_the_message_that_it_had_read() -> None:
    async def main() -> None:
        store = InMemoryStore()
        model = ScriptedModel([ModelUnavailable("down"), "to the next"])
        agent = AgentInstance(SPEC, model=model, sessions=JSONLBackend(store))
        loop = AgentLoop(AgentRegistry([agent]))
        message = InboundMessage(key=KEY, content=PIN, id="u1")
        assert (await loop.handle(message)).outcome == "failed"
        started, stopped, recall = threading.Event(), threading.Event(), agent.recall

        def recall_slowly(*arguments: Any, **options: Any) -> Any:
            started.set()
            stopped.wait(30)
            return recall(*arguments, **options)

        agent.recall = recall_slowly  # type: ignore[method-assign]
        resumed = asyncio.create_task(loop.resume(KEY))
        await asyncio.to_thread(started.wait, 30)
        assert await loop.stop(KEY)
        stopped.set()
        assert [answer.outcome for answer in await resumed] == ["interrupted"]
        agent.recall = recall  # type: ignore[method-assign]
        again = await loop.handle(message)
        assert (again.outcome, again.text) == ("again", "[interrupted]")
        later = await loop.handle(InboundMessage(key=KEY, content="Next?", id="u2"))
        assert later.text == "to the next"
        await loop.close()

    asyncio.run(main())


class _SlowLease(InMemoryStore):
    """A store whose reads with a lease wait for `go`."""

    started, go = threading.Event(), threading.Event()

    def view(self, key: str, last: int | None = None, *, since: Any = None) -> Any:
        if self._lease is not None:
            self.started.set()
            self.go.wait(30)
        return super().view(key, last, since=since)


def test_turn_stopped_before_it_finds_the_stored_answer_returns_that_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        store, model = _SlowLease(), ScriptedModel([])
        cancel = ActiveSession.cancel

        def cancel_and_go(session: ActiveSession, reason: CancelReason) -> None:
            cancel(session, reason)
            store.go.set()

        monkeypatch.setattr(ActiveSession, "cancel", cancel_and_go)
        agent = AgentInstance(SPEC, model=model, sessions=JSONLBackend(store))
        loop = AgentLoop(AgentRegistry([agent]))
        task = asyncio.create_task(loop.handle(InboundMessage(key=KEY, content=PIN, id="u1")))
        await asyncio.to_thread(store.started.wait, 30)
        answer = {"role": "assistant", "content": f"to {PIN}"}  # of another turn
        store.add_full_message(KEY, mark_seen(answer, seen=1, answers=[1]))
        assert await loop.stop(KEY)
        received = await task
        assert (received.outcome, received.text) == ("elsewhere", f"to {PIN}")
        assert [message.role for message in store.get_history(KEY)] == ["user", "assistant"]
        await loop.close()

    asyncio.run(main())


def test_stopped_turn_returns_no_answer_of_another_session_with_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        store, model = _SlowLease(), ScriptedModel([])
        store.started, store.go = threading.Event(), threading.Event()
        store.add_message(KEY, "user", "Before.")
        cancel = ActiveSession.cancel

        def cancel_and_go(session: ActiveSession, reason: CancelReason) -> None:
            cancel(session, reason)
            store.go.set()

        monkeypatch.setattr(ActiveSession, "cancel", cancel_and_go)
        agent = AgentInstance(SPEC, model=model, sessions=JSONLBackend(store))
        loop = AgentLoop(AgentRegistry([agent]))
        lease, is_waiting = store.lease(KEY, ttl=60), asyncio.Event()

        def on_event(event: Event) -> None:
            if isinstance(event, Notice):
                is_waiting.set()

        message = InboundMessage(key=KEY, content=PIN, id="u1")
        task = asyncio.create_task(loop.handle(message, on_event=on_event))
        await is_waiting.wait()
        lease.release()
        await asyncio.to_thread(store.started.wait, 30)
        store.delete(KEY)
        store.add_messages(KEY, [{"role": "user", "content": "Another one."}] * 2)
        answer = {"role": "assistant", "content": f"not to {PIN}"}
        store.add_full_message(KEY, mark_seen(answer, seen=2, answers=[1, 2]))
        assert await loop.stop(KEY)
        received = await task
        assert received.outcome == "failed", received.text
        assert isinstance(received.error, SessionDeleted)
        assert [message.role for message in store.get_history(KEY)] == ["user"] * 2 + ["assistant"]
        await loop.close()

    asyncio.run(main())


def test_turn_that_is_too_old_answers_the_result_of_a_client() -> None:
    async def main() -> None:
        store = InMemoryStore()
        call = {"role": "assistant", "content": "", **called("clock")}
        store.add_full_message(KEY, mark_received({"role": "user", "content": "What time is it?"}))
        store.add_full_message(KEY, mark_client_calls(mark_seen(call, seen=1), ["c1"]))
        result = {"role": "tool", "tool_call_id": "c1", "content": "noon"}
        seq = store.add_full_message(KEY, result)
        spec = replace(SPEC, resume_within=-1.0)
        agent = AgentInstance(spec, model=ScriptedModel([]), sessions=JSONLBackend(store))
        loop = AgentLoop(AgentRegistry([agent]))
        assert [answer.outcome for answer in await loop.resume(KEY)] == ["interrupted"]
        found = find_answer(store, KEY, seq)
        assert found.message is not None
        assert found.message.content == "[interrupted]"
        await loop.close()

    asyncio.run(main())


@pytest.mark.parametrize("too_long", [False, True])
def test_answer_names_a_message_that_arrived_while_a_summary_was_written(too_long: bool) -> None:
    """The request after the summary contains this message, so its answer answers it, too."""

    async def main() -> None:
        store = InMemoryStore()
        asked: list[str] = []

        def reply(messages: Sequence[Mapping[str, Any]], _tools: object) -> str:
            text = str(messages[-1]["content"])
            if too_long and text == PIN:
                raise ModelRefused(
                    "This model's maximum context length is 2000 tokens. You requested 3000"
                )
            if "late" not in asked and text not in (PIN, "late"):
                asked.append("late")  # a request for a summary
                body = mark_received({"role": "user", "content": "late"}, sender=KEY)
                store.add_full_message(KEY, body)
                return "A summary."
            asked.append(text)
            return f"to {text}"

        spec = replace(SPEC, limits=Limits(max_history_messages=100 if too_long else 4))
        agent = AgentInstance(spec, model=ScriptedModel(reply), sessions=JSONLBackend(store))
        loop = AgentLoop(AgentRegistry([agent]))
        for number in range(8):
            store.add_message(KEY, ("user", "assistant")[number % 2], f"old {number}")
        answer = await loop.handle(InboundMessage(key=KEY, content=PIN, id="u1"))
        stored = store.get_history(KEY)[-1].to_dict()
        assert (answer.text, answered_seqs(stored)) == ("to late", [9, 10])
        await loop.close()

    asyncio.run(main())
