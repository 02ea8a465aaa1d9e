"""Another process changes a session at every point of a turn: nothing stale is sent or stored."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stenolog.agent.instance import AgentInstance
from stenolog.agent.spec import AgentSpec
from stenolog.gateway.daemon import Daemon
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from support.agents import called
from support.gateway.chat_turns import ENGINES, HOURS, chat, new_place
from support.gateway.other_process import OtherProcess, other_process
from support.gateway.served_gateway import Served
from support.gateway.turn_recorder import Recorder, record

KEY = "work"
SECRET = "Tomato"
OLD = [{"role": "user", "content": SECRET}, {"role": "assistant", "content": f"to {SECRET}"}]
_PLAIN = ("view", "add_full_message", "lease", "view", "view", "add_full_message", "release")
_STORE = ("view", "add_full_message")
_SEARCH = ("read_marker", "stamps", "info", "get_history", "get_history", "info", "view")
KINDS: dict[str, tuple[str, ...]] = {
    "plain": _PLAIN,
    "tool": (*_PLAIN[:4], *_STORE, *_STORE, "view", *_STORE, "release"),
    "memory": (*_PLAIN[:4], *_SEARCH, *_STORE, "release"),
    "edit": ("view", "lease", "view", "set_history", "info", "view", *_STORE, "release"),
}
"""The store calls of each kind of turn. `edit`: the client sends the whole history, changed."""
CASES = [(kind, at) for kind, calls in KINDS.items() for at in range(len(calls))]
each_call = pytest.mark.parametrize(("kind", "at"), CASES)

ACTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "clear": ("clear", {}),
    "checkpoint": ("checkpoint", {"summary": "About plants.", "upto": 2}),
    "delete": ("delete", {}),
    "purge": ("purge", {}),
}


class Turn:
    """One turn, in which another process does something before a store call."""

    def __init__(
        self,
        kind: str,
        served: Served,
        recorder: Recorder,
        other: Store,
        process: OtherProcess,
        sent: list[Any],
    ) -> None:
        self.calls = KINDS[kind]
        self._kind = kind
        self._served = served
        self._recorder = recorder
        self.other = other
        """The same store, to look at afterwards."""
        self._process = process
        self.requests = sent
        """What was sent to the model since the turn began."""

    @property
    def asked(self) -> int:
        """Number of the call that stores the question."""
        return 3 if self._kind == "edit" else 1

    @property
    def sent(self) -> int:
        """The (first) request is sent before this call."""
        return {"memory": 4 + len(_SEARCH), "edit": 6}.get(self._kind, 4)

    @property
    def exchange(self) -> list[str]:
        """What the turn stores if nobody interferes."""
        return ["And now?", *(["", "seen", "to seen"] if self._kind == "tool" else ["to And now?"])]

    def ask(self) -> Any:
        """Run the turn; return the response."""
        self.requests.clear()
        self._recorder.clear()
        with self._served.client() as client:
            new = [{"role": "user", "content": "And now?"}]
            body = {"messages": OLD + new if self._kind == "edit" else new}
            headers = {"X-Session-Key": KEY}
            answer = client.post("/v1/chat/completions", json=body, headers=headers)
        self._served.quiet()
        self._recorder.check()
        return answer

    def act(self, action: str) -> None:
        """Have the other process do something, and wait until it is done."""
        name, named = ACTIONS[action]
        self._process.call(name, KEY, **named)

    def run(self, action: str, at: int) -> tuple[int, str]:
        """Run the turn; return the status of the response and the first request to the model."""

        def act(_: str) -> None:
            if len(self._recorder.calls) == at and self._recorder.before_call is act:
                self._recorder.before_call = lambda _: None
                self.act(action)

        self._recorder.before_call = act
        answer = self.ask()
        assert self._recorder.before_call is not act, f"made only {self._recorder.calls}"
        made = tuple(self._recorder.calls[: at + 1])
        assert made == self.calls[: at + 1], self._recorder.hops
        # No request is sent without the question.
        assert all("And now?" in str(request) for request in self.requests)
        return answer.status_code, str(self.requests[:1])

    def visible(self) -> list[Any]:
        """Return the contents of the visible messages."""
        return [message.content for message in self.other.get_history(KEY)]


@pytest.fixture(scope="module")
def process() -> Iterator[OtherProcess]:
    """Another process; it opens a store for each test."""
    with other_process() as process:
        yield process


@pytest.fixture
def kind() -> str:
    """The kind of the turn, for tests that do not name it."""
    return "plain"


async def _resume_nothing(daemon: Daemon) -> None:
    del daemon


@pytest.fixture(params=["jsonl", "sqlite", "postgres"])
def turn(
    request: pytest.FixtureRequest,
    kind: str,
    process: OtherProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Turn]:
    """A gateway whose session has one old exchange, and another process that uses its store."""
    recorder = record(monkeypatch, *ENGINES[request.param])
    # The search for interrupted turns updates the catalog too. A late search would update it during
    # the turn, which then makes fewer store calls.
    monkeypatch.setattr(Daemon, "_resume_turns", _resume_nothing)
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
        new_place(request.param, tmp_path, request) as where,
        Served(where, ScriptedModel(answer), spec=agent, tools=tools, ttl=HOURS) as served,
        closing(open_store(where)) as other,
    ):
        notes = served.loop.registry.agent().notes
        recorder.watched = lambda store: store is not notes
        process.call("open", where)
        with served.client() as client:
            chat(served, client, SECRET)
            if kind == "edit":
                chat(served, client, "And then?")
        yield Turn(kind, served, recorder, other, process, sent)
        process.call("close")


@each_call
def test_turn_does_not_send_messages_cleared_meanwhile(turn: Turn, at: int) -> None:
    status, sent = turn.run("clear", at)
    assert status == 200
    if at < turn.sent:
        assert SECRET not in sent
    # Cleared before the question was stored, the question is answered; later, it is hidden too.
    assert turn.visible() == (turn.exchange if at <= turn.asked else [])
    stored = [message.content for message in turn.other.get_history(KEY, full=True)]
    # Cleared before the answer is stored, it is not stored; later, it is hidden.
    assert (turn.exchange[-1] in stored) == (at <= turn.asked or at >= len(turn.calls) - 2)


@pytest.mark.parametrize("kind", ["memory"])
def test_turn_cleared_during_recall_sends_nothing(
    turn: Turn, monkeypatch: pytest.MonkeyPatch
) -> None:
    recall = AgentInstance.recall

    def recall_and_clear(*values: Any, **named: Any) -> Any:
        found = recall(*values, **named)
        turn.act("clear")
        return found

    monkeypatch.setattr(AgentInstance, "recall", recall_and_clear)
    assert turn.ask().status_code == 200
    assert turn.requests == []
    assert turn.visible() == []


@each_call
def test_turn_sends_the_summary_written_meanwhile(turn: Turn, at: int) -> None:
    status, sent = turn.run("checkpoint", at)
    assert status == 200
    if at < turn.sent:
        assert SECRET not in sent
        assert "About plants." in sent
    view = turn.other.view(KEY)
    assert view.summary == "About plants."
    assert turn.visible() == turn.exchange


@each_call
def test_turn_in_a_session_deleted_meanwhile_does_not_recreate_it(turn: Turn, at: int) -> None:
    uid = turn.other.info(KEY).uid
    status, sent = turn.run("delete", at)
    assert status == (200 if turn.calls[at] == "release" else 410)
    if at < turn.sent:
        assert sent == "[]"
    assert turn.other.list_sessions() == []
    *withdrawn, deleted = turn.other.admin.list_trash()
    assert deleted.uid == uid
    # A message that created the session again is withdrawn, but never destroyed.
    stores = turn.calls[at] == "add_full_message"
    assert [one.count for one in withdrawn] == ([1] if stores else [])


@each_call
def test_turn_in_a_session_purged_meanwhile_does_not_recreate_it(
    turn: Turn, kind: str, at: int
) -> None:
    status, sent = turn.run("purge", at)
    if at < turn.sent and kind != "edit":
        assert SECRET not in sent
    # The question created the session again and is withdrawn, but never destroyed.
    withdrawn = [1] if at == 1 and kind != "edit" else []
    assert [one.count for one in turn.other.admin.list_trash()] == withdrawn
    if at == 0:  # as a message to a key that was never used
        kept = [body["content"] for body in OLD] if kind == "edit" else []
        assert (status, turn.visible()) == (200, [*kept, *turn.exchange])
    else:
        assert status == (200 if turn.calls[at] == "release" else 404)
        assert turn.other.list_sessions() == []
