"""Agents that are killed and restarted on one store, and checks of the resulting logs."""

import random
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stenolog.agent.turn import CUT_OFF_TEXT
from stenolog.catalog.message_metadata import interruption
from stenolog.context.turn_state import answer_to, turn_state
from stenolog.messages import calls_of
from stenolog.records import Message
from stenolog.sessions.session_manager import SessionManager
from stenolog.stores.open_store import open_store
from stenolog.testing.model_server import ModelServer
from support.crash.agent_process import SESSION_MANAGER, TTL, Agent
from support.crash.agent_script import WISHES, Script, named_in
from support.crash.reporting import Say

WHERE: Final = {
    "jsonl": "{}/workspace",
    "sqlite": "sqlite:{}/steno.db",
    "json": f"{SESSION_MANAGER}{{}}/sessions",
}
KEYS: Final = ("telegram:1", "telegram:2", "cli:20261115-1:default")
MOMENTS: Final = ("began", "said", "answer", "ack", "ended", "answer", "open")
"""The event after which each agent is killed; `answer` is the answer to all messages."""


class AgentTrial:
    """A store with one agent after the other; every agent but the last is killed."""

    def __init__(self, place: Path, engine: str, seed: int) -> None:
        self._where = WHERE[engine].format(place)
        self._journal = place / "paid"
        self._journal.touch()
        self._chance = random.Random(seed)
        self._script = Script()
        # A pause between chunks, so that a kill can hit the middle of an answer.
        self._server = ModelServer(self._script, pause=0.003)
        self._sent: dict[str, tuple[str, str]] = {}
        self._acknowledged: set[str] = set()
        self._answers: defaultdict[str, set[tuple[int, str]]] = defaultdict(set)
        self._agents: list[Agent] = []
        self.struck: Counter[str] = Counter()
        """How often the kill hit each state, and the outcome."""

    def close(self) -> None:
        """Close the agents and the model server."""
        for agent in self._agents:
            agent.close()
        self._server.close()

    # --- rounds ------------------------------------------------------------------------------

    def run(self, number: int) -> None:
        """Run one agent: it resumes, gets old and new messages, and is killed."""
        # Every fourth agent considers interrupted turns too old and closes them.
        agent = self._agent(resume_within=-1.0 if number % 4 == 3 else 86_400.0)
        work = [{"do": "resume"}, *self._again(most=4)]
        work += [self._new(number, wish) for wish in self._chance.sample(WISHES, 5)]
        if self._chance.random() < 0.5:
            self._chance.shuffle(work)
        for wanted in work:
            agent.send(**wanted)
        word = MOMENTS[number % len(MOMENTS)]
        times = {"open": 1, "answer": len(work) - 1}.get(word, self._chance.randint(1, 3))
        agent.until(word, times)
        _wait(self._chance.random() * 0.03)
        self._heard(agent.kill())
        self._look()

    def end(self) -> None:
        """Run the last agent: it resumes all turns and gets every message once more."""
        agent = self._agent()
        agent.send(do="resume")
        agent.until("all resumed", 1)
        for key, history in self._histories(full=False).items():
            assert not turn_state(history).is_unfinished, (key, turn_state(history))
        for id, (key, text) in self._sent.items():
            agent.send(key=key, id=id, text=text)
        self._heard(agent.end())
        assert self._acknowledged == set(self._sent)
        self._check()

    def _agent(self, resume_within: float = 86_400.0, ttl: float = TTL) -> Agent:
        url = self._server.url
        agent = Agent(self._where, url, self._journal, resume_within=resume_within, ttl=ttl)
        self._agents.append(agent)
        return agent

    def _new(self, number: int, wish: str) -> dict[str, str]:
        id = f"m{len(self._sent) + 1}"
        # Mostly in one session, so that messages also arrive during a turn.
        key = KEYS[number % len(KEYS)] if self._chance.random() < 0.6 else self._chance.choice(KEYS)
        self._sent[id] = key, f"{id}: {wish}"
        return {"key": key, "id": id, "text": f"{id}: {wish}"}

    def _again(self, *, most: int) -> list[dict[str, str]]:
        """Return some of the last messages, as a channel redelivers them without an answer."""
        lately = list(self._sent)[-12:]
        chosen = self._chance.sample(lately, min(most, len(lately)))
        return [{"key": self._sent[id][0], "id": id, "text": self._sent[id][1]} for id in chosen]

    def _heard(self, lines: Sequence[Sequence[Any]]) -> None:
        for word, *rest in lines:
            assert word != "bug", rest
            if word == "ack":
                self._acknowledged.add(rest[0])
            elif word == "answer":
                id, outcome, text, seq = rest
                assert outcome in ("answered", "again", "elsewhere"), rest
                self._answers[id].add((seq, text))

    # --- checks ------------------------------------------------------------------------------

    def _histories(self, *, full: bool) -> dict[str, list[Message]]:
        if self._where.startswith(SESSION_MANAGER):
            opened = SessionManager(self._where.removeprefix(SESSION_MANAGER)).store
        else:
            opened = open_store(self._where)
        with opened as store:
            return {key: store.get_history(key, full=full) for key in store.list_sessions()}

    def _look(self) -> None:
        """Check after a kill that acknowledged messages are stored, and record the state."""
        said = Counter(_words(one) for log in self._histories(full=True).values() for one in log)
        missing = {id for id in self._acknowledged if said[self._sent[id][1]] != 1}
        assert not missing
        for history in self._histories(full=False).values():
            found = turn_state(history)
            if found.open_calls:
                self.struck["in a tool"] += 1
            elif found.has_calls:
                self.struck["between tools and answer"] += 1
            elif found.unanswered:
                self.struck["before the answer"] += 1
            else:
                self.struck["between turns"] += 1

    def _check(self) -> None:
        """Check the logs at the end."""
        assert self._server.request_faults == []
        assert self._script.idle == [], "the model was asked for a second answer"
        histories = self._histories(full=True)
        self._check_answers(histories)
        self.struck["compacted"] = sum(one.hidden for log in histories.values() for one in log)
        paid = _results(histories)
        book = Counter(self._journal.read_text().split("\n")[:-1])
        assert set(book.values()) == {1}, [line for line, times in book.items() if times > 1]
        for id, result in paid.items():
            assert result in (f"paid {id}", CUT_OFF_TEXT), result
            # Without an interruption mark the call was made and completed.
            assert result == CUT_OFF_TEXT or book[f"end {id}"] == 1, id
        # The log knows every payment.
        assert {line.split()[1] for line in book} <= set(paid)
        self.struck["payments cut off"] = sum(result == CUT_OFF_TEXT for result in paid.values())

    def _check_answers(self, histories: Mapping[str, Sequence[Message]]) -> None:
        found: Counter[str] = Counter()
        for key, history in histories.items():
            named = Counter(
                name
                for message in history
                if _is_answer(body := message.to_dict()) and not interruption(body)
                for name in named_in(str(body["content"]))
            )
            for message in history:
                if message.to_dict()["role"] != "user":
                    continue
                id = named_in(_words(message))[0]
                assert self._sent[id] == (key, _words(message))
                found[id] += 1
                answer = answer_to(history, message.seq)
                assert answer is not None, id
                closed = bool(interruption(answer.to_dict()))
                assert named[id] == (0 if closed else 1), (id, _words(answer))
                assert closed or id in named_in(_words(answer)), (id, _words(answer))
                # Every client received this answer, however often it asked.
                assert self._answers[id] == {(answer.seq, _words(answer))}
                self.struck["closed with a mark"] += closed
        assert found == dict.fromkeys(self._sent, 1)
        assert self._script.shown <= set(found), "the model has seen what is in no log"


def _wait(seconds: float) -> None:
    """Wait more precisely than `sleep`."""
    moment = time.perf_counter() + seconds
    while time.perf_counter() < moment:
        pass


def _is_answer(body: Mapping[str, Any]) -> bool:
    return body["role"] == "assistant" and not calls_of(body)


def _words(message: Message) -> str:
    return str(message.to_dict().get("content"))


def _results(histories: Mapping[str, Sequence[Message]]) -> dict[str, str]:
    """Return the result of each payment, after checking that every call has exactly one result."""
    results: dict[str, str] = {}
    for history in histories.values():
        bodies = [message.to_dict() for message in history]
        calls = {call.id: call.name for body in bodies for call in calls_of(body)}
        told = [body for body in bodies if body["role"] == "tool"]
        assert Counter(body["tool_call_id"] for body in told) == dict.fromkeys(calls, 1)
        results |= {
            id: body["content"] for body in told if calls[id := body["tool_call_id"]] == "pay"
        }
    return results


def kill_agents(place: Path, engine: str, say: Say, *, rounds: int, seed: int) -> Counter[str]:
    trial = AgentTrial(place, engine, seed)
    try:
        for number in range(rounds):
            trial.run(number)
        trial.end()
    finally:
        trial.close()
    say(f"agents killed on {engine}: seed {seed}, {rounds} rounds: {dict(trial.struck)}")
    return trial.struck
