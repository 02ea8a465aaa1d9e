"""Another process changes a session at every point of a turn: nothing stale is sent or stored."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gateway.served import Served
from gateway.test_turn_cost import ENGINES, HOURS, chat, place
from gateway.turn_recorder import Recorder, record
from stenolog.agent.instance import AgentInstance
from stenolog.agent.spec import AgentSpec
from stenolog.providers.scripted import ScriptedModel
from stenolog.stores.base import Store
from stenolog.stores.opening import open_store
from unit.agent.agents import called

KEY = "work"
SECRET = "Tomato"
CALLS = ("view", "add_full_message", "lease", "refresh", "refresh", "add_full_message", "release")
"""The store calls of a plain turn."""
TOOL_CALLS = (*CALLS[:-1], *CALLS[4:6], "refresh", *CALLS[4:])
"""The same of a turn in which the model calls a tool."""
SENT = 4
"""The request is sent before this call."""

ACTIONS: dict[str, Callable[[Store], object]] = {
    "clear": lambda store: store.clear(KEY),
    "checkpoint": lambda store: store.checkpoint(KEY, summary="About plants.", upto=2),
    "delete": lambda store: store.delete(KEY),
    "purge": lambda store: store.purge(KEY),
}


class Turn:
    """One turn, in which another process does something before a store call."""

    def __init__(self, served: Served, recorder: Recorder, other: Store, sent: list[Any]) -> None:
        self._served = served
        self._recorder = recorder
        self.other = other
        self.requests = sent
        """What was sent to the model since the turn began."""

    def ask(self) -> Any:
        """Run the turn; return the response."""
        self.requests.clear()
        with self._served.client() as client:
            body = {"messages": [{"role": "user", "content": "And now?"}]}
            headers = {"X-Session-Key": KEY}
            answer = client.post("/v1/chat/completions", json=body, headers=headers)
        self._served.quiet()
        return answer

    def run(self, action: str, at: int, calls: tuple[str, ...] = CALLS) -> tuple[int, str]:
        """Run the turn; return the status of the response and what was sent to the model."""
        self._recorder.clear()

        def act(_: str) -> None:
            if len(self._recorder.calls) == at and self._recorder.before_call is act:
                self._recorder.before_call = lambda _: None
                ACTIONS[action](self.other)

        self._recorder.before_call = act
        answer = self.ask()
        assert self._recorder.before_call is not act, f"made only {self._recorder.calls}"
        made = tuple(self._recorder.calls[: at + 1])
        assert made == calls[: at + 1], self._recorder.hops
        return answer.status_code, str(self.requests)


@pytest.fixture(params=["jsonl", "sqlite", "postgres"])
def turn(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Turn]:
    """A gateway whose session has one old exchange, and a second store as another process."""
    engine, _, kind = request.param.partition(" ")
    recorder = record(monkeypatch, *ENGINES[engine])
    sent: list[Any] = []

    def answer(messages: Any, _: Any) -> Any:
        sent.append(messages)
        last = messages[-1]["content"]
        return called("look") if kind == "tool" and last == "And now?" else f"to {last}"

    def look() -> str:
        """Look."""
        return "seen"

    agent = AgentSpec(memory=kind == "memory", consolidation=False, tools=kind == "tool")
    tools = [look] if kind == "tool" else []
    with (
        place(engine, tmp_path, request) as where,
        Served(where, ScriptedModel(answer), spec=agent, tools=tools, ttl=HOURS) as served,
        closing(open_store(where)) as other,
    ):
        with served.client() as client:
            chat(served, client, SECRET)
        yield Turn(served, recorder, other, sent)


@pytest.mark.parametrize("at", range(len(CALLS)))
def test_a_turn_beside_clear(turn: Turn, at: int) -> None:
    status, sent = turn.run("clear", at)
    assert status == 200
    if at < SENT:
        assert SECRET not in sent
    visible = [message.content for message in turn.other.get_history(KEY)]
    # Cleared before the question was stored, the question is answered; later, it is hidden too.
    assert visible == (["And now?", "to And now?"] if at < 2 else [])
    stored = [message.content for message in turn.other.get_history(KEY, full=True)]
    # Cleared before the answer is stored, it is not stored; later, it is hidden.
    assert ("to And now?" in stored) == (at < 2 or at > SENT)


@pytest.mark.parametrize("at", range(len(TOOL_CALLS)))
@pytest.mark.parametrize("turn", ["jsonl tool", "sqlite tool", "postgres tool"], indirect=True)
def test_a_turn_with_a_tool_beside_clear(turn: Turn, at: int) -> None:
    status, _ = turn.run("clear", at, TOOL_CALLS)
    assert status == 200
    assert all("And now?" in str(request) for request in turn.requests)
    visible = [message.content for message in turn.other.get_history(KEY)]
    assert visible == (["And now?", "", "seen", "to seen"] if at < 2 else [])


@pytest.mark.parametrize("turn", ["jsonl memory", "sqlite memory"], indirect=True)
def test_a_turn_beside_clear_while_the_memory_is_searched(
    turn: Turn, monkeypatch: pytest.MonkeyPatch
) -> None:
    recall = AgentInstance.recall

    def recall_and_clear(*values: Any, **named: Any) -> Any:
        found = recall(*values, **named)
        turn.other.clear(KEY)
        return found

    monkeypatch.setattr(AgentInstance, "recall", recall_and_clear)
    assert turn.ask().status_code == 200
    assert turn.requests == []
    assert turn.other.get_history(KEY) == []


@pytest.mark.parametrize("at", range(len(CALLS)))
def test_a_turn_beside_a_summary(turn: Turn, at: int) -> None:
    status, sent = turn.run("checkpoint", at)
    assert status == 200
    if at < SENT:
        assert SECRET not in sent
        assert "About plants." in sent
    view = turn.other.view(KEY)
    assert view.summary == "About plants."
    assert [message.content for message in view.messages] == ["And now?", "to And now?"]


@pytest.mark.parametrize("at", range(len(CALLS)))
def test_a_turn_beside_a_deletion(turn: Turn, at: int) -> None:
    uid = turn.other.info(KEY).uid
    status, sent = turn.run("delete", at)
    assert status == (200 if CALLS[at] == "release" else 410)
    if at < SENT:
        assert sent == "[]"
    assert turn.other.list_sessions() == []
    *withdrawn, deleted = turn.other.list_trash()
    assert deleted.uid == uid
    # A message that created the session again is withdrawn, but never destroyed.
    assert [one.count for one in withdrawn] == ([1] if CALLS[at] == "add_full_message" else [])


@pytest.mark.parametrize("at", range(len(CALLS)))
def test_a_turn_beside_a_purge(turn: Turn, at: int) -> None:
    status, sent = turn.run("purge", at)
    if at < SENT:
        assert SECRET not in sent
    # The question created the session again and is withdrawn, but never destroyed.
    assert [one.count for one in turn.other.list_trash()] == ([1] if at == 1 else [])
    visible = [message.content for message in turn.other.get_history(KEY)]
    if at == 0:  # as a message to a key that was never used
        assert (status, visible) == (200, ["And now?", "to And now?"])
    else:
        assert status == (200 if CALLS[at] == "release" else 404)
        assert turn.other.list_sessions() == []
