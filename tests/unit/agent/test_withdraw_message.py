"""Tests that a message that created a session again is withdrawn, and nothing else."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stenolog.agent.session_history import withdraw_message
from stenolog.agent.turn_events import InboundMessage
from stenolog.agent.turn_events import MessageStored as HeardEvent
from stenolog.stores.base import SessionView, Store
from stenolog.stores.jsonl import JSONLStore
from stenolog.stores.open_store import open_store
from stenolog.transfer.fallback import FallbackStore
from stenolog.transfer.open_sessions import open_sessions
from support.agents import KEY, Heard, agent_loop, say
from support.merge_steps import broken

LATE = {"role": "assistant", "content": "late answer"}


@pytest.fixture(params=["jsonl", "sqlite"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Store, Store]]:
    """Yield two stores of the same address, as in two processes."""
    where = str(tmp_path) if request.param == "jsonl" else f"sqlite:{tmp_path / 'steno.db'}"
    with closing(open_store(where)) as mine, closing(open_store(where)) as other:
        yield mine, other


def late_answer(mine: Store, other: Store) -> tuple[SessionView, int]:
    """Store an answer to a session that another process has just deleted."""
    mine.add_message(KEY, "user", "question")
    view = mine.view(KEY)
    other.delete(KEY)
    return view, mine.add_full_message(KEY, LATE)


def before(store: Any, name: str, act: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another process act before the next call of this name."""
    call = getattr(store, name)

    def acted(*values: Any, **named: Any) -> Any:
        monkeypatch.setattr(store, name, call)
        act()
        return call(*values, **named)

    monkeypatch.setattr(store, name, acted)


def test_session_with_only_the_late_answer_is_deleted(
    stores: tuple[Store, Store],
) -> None:
    mine, other = stores
    view, seq = late_answer(mine, other)
    withdraw_message(mine, view, seq, LATE)
    assert other.list_sessions() == []
    assert [trashed.count for trashed in other.admin.list_trash()] == [1, 1]


def test_concurrent_message_of_another_process_stays_after_a_withdrawal(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = stores
    view, seq = late_answer(mine, other)
    before(mine, "view", lambda: other.add_message(KEY, "user", "acknowledged"), monkeypatch)
    withdraw_message(mine, view, seq, LATE)
    assert [message.content for message in other.get_history(KEY)] == ["acknowledged"]


def test_session_restored_by_another_process_stays(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = stores
    view, seq = late_answer(mine, other)

    def restore() -> None:
        other.delete(KEY)
        other.admin.restore(KEY, uid=view.uid)

    before(mine, "view", restore, monkeypatch)
    withdraw_message(mine, view, seq, LATE)
    assert other.info(KEY).uid == view.uid
    assert [message.content for message in other.get_history(KEY)] == ["question"]


def test_another_message_with_the_same_seq_stays(stores: tuple[Store, Store]) -> None:
    mine, other = stores
    view, seq = late_answer(mine, other)
    other.delete(KEY)
    other.add_message(KEY, "user", "acknowledged")
    withdraw_message(mine, view, seq, LATE)
    assert [message.content for message in other.get_history(KEY)] == ["acknowledged"]


def test_message_in_a_fallback_store_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with broken(monkeypatch), open_sessions(tmp_path) as sessions:
        store = sessions.store
        assert isinstance(store, FallbackStore)
        # A person deletes a session in the fallback folder.
        with JSONLStore(store.folder.parent, namespace=store.folder.name) as other:
            view, seq = late_answer(store, other)
        withdraw_message(store, view, seq, LATE)
        assert store.get_history(KEY) == []
        assert [message.to_dict() for message in store.get_history(KEY, full=True)] == [LATE]


@pytest.mark.parametrize("store", ["jsonl", "sqlite"])
def test_message_acknowledged_by_another_process_is_not_withdrawn(
    store: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with agent_loop(store, tmp_path, ["one", "two"]) as loop:
            await say(loop, "Old.")
            instance = loop.registry.agent()
            with closing(open_store(instance.spec.sessions)) as other:
                view = other.view(KEY)
                other.delete(KEY)
                other.add_message(KEY, "user", "Hello.", once="m1")
                inbound = InboundMessage(key=KEY, content="Hello.", id="m1")
                answer = await asyncio.wait_for(loop.handle(inbound, view=view), 30)
                assert answer.text == "two"
                history = [message.content for message in other.get_history(KEY)]
                assert history == ["Hello.", "two"]

    asyncio.run(scenario())


@pytest.mark.parametrize("store", ["jsonl", "sqlite"])
def test_withdrawn_message_is_not_reported_as_stored(store: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with agent_loop(store, tmp_path, ["one", "two"]) as loop:
            await say(loop, "Old.")
            instance, heard = loop.registry.agent(), Heard()
            with closing(open_store(instance.spec.sessions)) as other:
                view = other.view(KEY)
                other.delete(KEY)
                inbound = InboundMessage(key=KEY, content="Hello.")
                answer = await asyncio.wait_for(loop.handle(inbound, on_event=heard, view=view), 30)
                assert answer.outcome == "failed"
                assert heard.of(HeardEvent) == []
                assert other.list_sessions() == []

    asyncio.run(scenario())
