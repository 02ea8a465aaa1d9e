"""Tests three agent processes on one PostgreSQL when one is killed and one is stopped.

Each agent accepts every turn, the lease decides, and the turn of the killed one is resumed. In the
end every message is answered once in the log; see test_agent_killed for all checks.
"""

import select
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from stenolog.agent.active_sessions import TAKEN_OVER_TEXT
from stenolog.testing.model_server import ModelServer
from stenolog.testing.scripted_model import ScriptedMessage
from support.crash.agent_process import Agent
from support.crash.agent_script import WISHES, Script
from support.crash.agent_trial import MOMENTS, WHERE, AgentTrial, kill_agents
from support.crash.reporting import Say

ENGINE: Final = "postgresql"
ACKNOWLEDGED: Final = ("ack", "answer")
"""Reports of an agent about an accepted and an answered message."""

_PATIENCE: Final = 60


@pytest.fixture
def engine(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(WHERE, ENGINE, postgres_url)
    return ENGINE


class _Trial(AgentTrial):
    """Several agents at once."""

    def _heard(self, lines: Sequence[Sequence[Any]]) -> None:
        """Record the reports of an agent.

        An agent that is paused for longer than its lease loses the turn and reports it. It has
        reported no answer then; the log shows that the message is answered once.
        """
        lost = [line for line in lines if line[0] == "answer" and _is_taken_over(line)]
        self.struck["turns taken over"] += len(lost)
        super()._heard([line for line in lines if line not in lost])

    def run_together(self, number: int, *, load: int) -> None:
        """Run three agents under load: one is killed, one is stopped, and one continues."""
        agents = [self._agent() for _ in range(3)]
        for agent in agents:
            agent.until("open", 1)
        self._load(number, agents, load)
        # Kill the agent that has the turn: the others may be idle.
        struck = _first_to_say(MOMENTS[number % len(MOMENTS)], agents)
        second, third = (agent for agent in agents if agent is not struck)
        said = struck.kill()
        self._heard(said)
        taken, answered = ({line[1] for line in said if line[0] == word} for word in ACKNOWLEDGED)
        self.struck["killed with messages unanswered"] += bool(taken - answered)
        # Clients without an answer send the message again, to another agent.
        self._load(number, [second, third], load, again=load)
        self._heard(second.end())
        self._load(number, [third], load // 2, again=load)
        third.send(do="resume")
        self._heard(third.end())
        self._look()

    def _load(self, number: int, agents: list[Agent], count: int, *, again: int = 0) -> None:
        work = self._again(most=again)
        work += [self._new(number, self._chance.choice(WISHES)) for _ in range(count)]
        self._chance.shuffle(work)
        for wanted in work:
            # Some messages arrive at two agents at once.
            times = min(len(agents), self._chance.choice((1, 1, 2)))
            for agent in self._chance.sample(agents, times):
                agent.send(**wanted)


def _is_taken_over(line: Sequence[Any]) -> bool:
    _, _, outcome, text, _ = line
    return bool(outcome == "failed" and text == TAKEN_OVER_TEXT)


class _SlowOnce(Script):
    """A model that delays the first request until the test continues."""

    def __init__(self) -> None:
        super().__init__()
        self._is_first = threading.Lock()
        self.asked = threading.Event()
        self.let_go = threading.Event()

    def __call__(self, request: Mapping[str, Any]) -> ScriptedMessage:
        if self._is_first.acquire(blocking=False):
            self.asked.set()
            assert self.let_go.wait(_PATIENCE)
        return super().__call__(request)


class _Pause(_Trial):
    """An agent that is paused in its turn until another one has taken the turn over."""

    def __init__(self, place: Path, engine: str, seed: int) -> None:
        super().__init__(place, engine, seed)
        self._server.close()
        self._script = self._slow = _SlowOnce()
        self._server = ModelServer(self._script)

    def run_paused(self) -> None:
        """Pause the first agent while it waits for the model; the second answers both messages."""
        first, second = (self._agent(ttl=1.0) for _ in range(2))
        for agent in (first, second):
            agent.until("open", 1)
        asked, other = self._new(0, "talk"), self._new(0, "pay")
        other["key"] = asked["key"]
        self._sent[other["id"]] = other["key"], other["text"]
        first.send(**asked)
        assert self._slow.asked.wait(_PATIENCE)
        first.pause()
        second.send(**other)
        second.until("answer", 1)
        first.go_on()
        first.until("answer", 1)
        self._slow.let_go.set()
        for agent in (first, second):
            self._heard(agent.end())


def _first_to_say(word: str, agents: list[Agent]) -> Agent:
    """Read from all agents until one has reported this."""
    while True:
        for agent in agents:
            if any(line[0] == word for line in agent.lines()):
                return agent
        ready, _, _ = select.select([agent._stdout for agent in agents], [], [], 60)
        assert ready, f"nobody says {word!r}"
        for agent in agents:
            if agent._stdout in ready:
                assert agent._listen(), f"it ended: {agent.lines()[-3:]}"


def _run(place: Path, engine: str, say: Say, *, rounds: int, load: int, seed: int) -> None:
    trial = _Trial(place, engine, seed)
    try:
        for number in range(rounds):
            trial.run_together(number, load=load)
        trial.end()
    finally:
        trial.close()
    assert trial.struck["killed with messages unanswered"] > 0
    say(f"three agents on one database: seed {seed}, {rounds} rounds: {dict(trial.struck)}")


def test_three_agents_on_one_database_answer_every_message_once(
    quick_disk: Path, engine: str, say: Say, seed: int
) -> None:
    _run(quick_disk, engine, say, rounds=1, load=8, seed=seed)


def test_agent_paused_longer_than_its_lease_does_not_answer_again(
    quick_disk: Path, engine: str, seed: int
) -> None:
    trial = _Pause(quick_disk, engine, seed)
    try:
        trial.run_paused()
        trial.end()
    finally:
        trial.close()
    assert trial.struck["turns taken over"] == 1


@pytest.mark.full
def test_three_agents_on_one_database_answer_every_message_once_in_a_long_run(
    quick_disk: Path, engine: str, say: Say, seed: int
) -> None:
    _run(quick_disk, engine, say, rounds=14, load=12, seed=seed)


def test_an_agent_killed_three_times_answers_every_message_once(
    quick_disk: Path, engine: str, say: Say, seed: int
) -> None:
    kill_agents(quick_disk, engine, say, rounds=3, seed=seed)
