"""After a merge, each answer is the answer to its own message, and nothing is answered twice."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from stenolog.agent.instance import AgentInstance, AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.agent.spec import AgentSpec
from stenolog.agent.stored_answers import HIDDEN_UNANSWERED_TEXT
from stenolog.agent.tools import tool
from stenolog.agent.turn_events import InboundMessage
from stenolog.catalog.message_metadata import mark_received
from stenolog.sessions.session_manager import SessionManager
from stenolog.sessions.session_store import SessionStore
from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from stenolog.transfer.open_sessions import open_sessions
from support import temporary_folders
from support.agents import called
from support.merge_steps import broken, merge_killed

WHERE: Final = {"jsonl": "{}", "sqlite": "sqlite:{}/steno.db"}
KEY: Final = "telegram:1"
OLD: Final = {"u1": "What is my PIN?", "u2": "How tall is Everest?"}
NEW: Final = {"u3": "Transfer 100 EUR.", "u4": "Who am I?"}
SPEC: Final = AgentSpec(consolidation=False, memory=False)


class Place:
    """A store whose messages `OLD` are answered, and the agent on it."""

    def __init__(self, workspace: Path, engine: str, outage: str) -> None:
        self.workspace, self.where = workspace, WHERE[engine].format(workspace)
        self.outage = outage
        self.asked: list[Any] = []
        self.transfers = 0

    def _reply(self, messages: Sequence[Mapping[str, Any]], tools: object) -> Any:
        del tools
        self.asked.append(messages[-1]["content"])
        if messages[-1] == {"role": "user", "content": NEW["u3"]}:
            return called("transfer")
        return "Done." if messages[-1]["role"] == "tool" else f"to {self.asked[-1]}"

    def _sessions(self) -> SessionStore:
        return open_sessions(self.where)

    async def talk(
        self, messages: Mapping[str, str] | None = None, sessions: SessionStore | None = None
    ) -> dict[str, tuple[str, str]]:
        """Send these messages, or resume; return outcome and text of each answer."""

        @tool
        async def transfer() -> str:
            """Transfer money."""
            self.transfers += 1
            return "done"

        opened = sessions or self._sessions()
        model = ScriptedModel(self._reply)
        agent = AgentInstance(SPEC, model=model, sessions=opened, tools=[transfer])
        loop = AgentLoop(AgentRegistry([agent]))
        try:
            if messages is None:
                answers = {str(n): answer for n, answer in enumerate(await loop.resume())}
            else:
                answers = {
                    id: await loop.handle(InboundMessage(key=KEY, content=text, id=id))
                    for id, text in messages.items()
                }
            await loop.wait_until_idle()
        finally:
            await loop.close()
        return {id: (answer.outcome, answer.text) for id, answer in answers.items()}

    def run(self, messages: Mapping[str, str] | None = None) -> dict[str, tuple[str, str]]:
        """Send these messages in a new process, or resume."""
        return asyncio.run(self.talk(messages))

    def ask_during_the_outage(
        self, monkeypatch: pytest.MonkeyPatch, messages: Mapping[str, str] = NEW
    ) -> None:
        if self.outage == "fallback":
            with broken(monkeypatch):
                sessions = self._sessions()
        else:
            sessions = SessionManager(self.workspace / "json", reason="the disk is away")
        asyncio.run(self.talk(messages, sessions))
        self.asked.clear()

    def merge(self) -> None:
        if self.outage == "JSON files":
            from stenolog.transfer.migration import migrate_from_json

            with open_store(self.where) as store:
                migrate_from_json(self.workspace / "json", store)
        else:
            self._sessions().close()

    def add_unanswered(self, text: str, id: str) -> None:
        with open_store(self.where) as store:
            question = mark_received({"role": "user", "content": text}, sender=KEY)
            store.add_full_message(KEY, question, once=id)

    def answers(self) -> list[list[int]]:
        """Return the seqs that each answer names."""
        with open_store(self.where) as store:
            marks = [m.to_dict().get("stenolog", {}) for m in store.get_history(KEY, full=True)]
        return [mark["answers"] for mark in marks if "answers" in mark]


@pytest.fixture
def workspace() -> Iterator[Path]:
    with temporary_folders.folder() as path:
        (path / "w").mkdir(mode=0o700)
        yield path / "w"


@pytest.fixture(params=WHERE)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["fallback", "JSON files"])
def place(request: pytest.FixtureRequest, workspace: Path, engine: str) -> Place:
    place = Place(workspace, engine, request.param)
    place.run(OLD)
    return place


def _check_answered(place: Place) -> None:
    place.asked.clear()
    expected = {
        "u1": ("again", f"to {OLD['u1']}"),
        "u2": ("again", f"to {OLD['u2']}"),
        "u3": ("again", "Done."),
        "u4": ("again", f"to {NEW['u4']}"),
    }
    assert place.run() == {}
    assert place.run(OLD | NEW) == expected
    assert (place.asked, place.transfers) == ([], 1)


@pytest.mark.parametrize("hides", [False, True], ids=["visible", "summarized"])
def test_merged_answer_is_the_answer_to_its_own_message(
    place: Place, monkeypatch: pytest.MonkeyPatch, hides: bool
) -> None:
    place.ask_during_the_outage(monkeypatch)
    place.merge()
    if hides:
        with open_store(place.where) as store:
            store.checkpoint(KEY, summary="They talked.", upto=4)
    assert place.answers() == [[1], [3], [5], [9]]
    _check_answered(place)


def test_message_that_waits_since_before_the_outage_is_answered(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.add_unanswered("Is it raining?", "u0")
    place.ask_during_the_outage(monkeypatch)
    place.merge()
    assert place.answers() == [[1], [3], [6], [10]]
    assert place.run() == {"0": ("answered", "to Is it raining?")}
    assert place.asked == ["Is it raining?"]  # the last message of the request
    again = place.run({"u0": "Is it raining?"})
    assert again == {"u0": ("again", "to Is it raining?")}
    _check_answered(place)


def test_message_that_waits_in_the_outage_is_answered_after_the_merge(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.ask_during_the_outage(monkeypatch)

    def add(sessions: SessionStore) -> None:
        question = mark_received({"role": "user", "content": "Waiting?"}, sender=KEY)
        sessions.store.add_full_message(KEY, question, once="u5")
        sessions.close()

    if place.outage == "fallback":
        with broken(monkeypatch):
            add(open_sessions(place.where))
    else:
        add(SessionManager(place.workspace / "json", reason="the disk is away"))
    place.merge()
    assert place.run() == {"0": ("answered", "to Waiting?")}
    _check_answered(place)


def test_retry_after_a_merge_hides_the_last_answer(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.add_unanswered("Is it raining?", "u0")
    place.ask_during_the_outage(monkeypatch)
    place.merge()
    assert place.run({"": "/retry"}) == {"": ("answered", f"to {NEW['u4']}")}
    with open_store(place.where) as store:
        visible = [message.content for message in store.get_history(KEY)]
        *_, newest = store.get_history(KEY, last=1)
    assert visible.count(NEW["u4"]) == visible.count(newest.content) == 1
    assert place.answers() == [[1], [3], [6], [10], [5, 10]]


@pytest.mark.parametrize("outage", ["fallback"])
def test_answers_of_a_killed_merge_name_their_own_messages(
    workspace: Path, engine: str, outage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 30):
        folder = workspace / str(number)
        folder.mkdir(mode=0o700)
        place = Place(folder, engine, outage)
        place.run(OLD)
        place.ask_during_the_outage(monkeypatch)
        if not merge_killed(place.where, monkeypatch, number):
            break
        if number % 2:
            place.add_unanswered("Is it raining?", "u0")
            assert [text for _, text in place.run().values()] == ["to Is it raining?"]
        _check_answered(place)
    assert number > 8


@pytest.mark.parametrize("damaged", ["question", "answer", "tool call"])
def test_message_whose_answer_is_damaged_is_not_answered_again(
    workspace: Path, engine: str, damaged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(workspace, engine, "fallback")
    place.run(OLD)
    place.ask_during_the_outage(monkeypatch, {"u3": NEW["u3"]})
    [log] = [path for path in workspace.rglob("*.jsonl") if b"Transfer" in path.read_bytes()]
    intact = log.read_bytes()
    text = {"question": b"Transfer 100", "answer": b"Done.", "tool call": b'"transfer"'}[damaged]
    log.write_bytes(intact.replace(text, text[:-2] + b"\xff" + text[-1:]))
    for repaired in (False, True):
        if repaired:
            log.write_bytes(intact)
        place.merge()
        assert place.run() == {}
        again = place.run(OLD)
        assert [text for _, text in again.values()] == [f"to {text}" for text in OLD.values()]
    outcome, text_again = place.run({"u3": NEW["u3"]})["u3"]
    assert outcome == "again"
    assert text_again == ("Done." if damaged != "question" else HIDDEN_UNANSWERED_TEXT)
    assert (place.asked, place.transfers) == ([], 1)
    assert not log.exists()


def test_two_outages_in_one_fallback_folder(
    workspace: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(workspace, engine, "fallback")
    place.run(OLD)
    with broken(monkeypatch), open_sessions(place.where) as sessions:
        damaged_log = Path(str(sessions.store.folder)) / "damaged.jsonl"  # type: ignore[attr-defined]
    for id, text in NEW.items():
        place.ask_during_the_outage(monkeypatch, {id: text})
        damaged_log.write_text("not a record\n" * 2)  # the folder keeps its name
        place.merge()
    assert place.answers() == [[1], [3], [5], [9]]
    _check_answered(place)
