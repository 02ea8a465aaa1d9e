"""Simulates two thousand turns with tools of all sizes, and checks the window before every call."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from stenolog import Store
from stenolog.context.context import Context
from stenolog.context.summarize import SummaryReport
from stenolog.context.window import Limits
from stenolog.stores.open_store import open_store
from support import temporary_folders
from support.histories import CHEAP, KEY, assistant, faults, tool, user

TURNS = 2_000
LIMITS = Limits(max_context_tokens=4_000, max_history_messages=50)
SYSTEM = "Be brief. " * 10
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
QUIET, LOUD = (9, 90), (90, 900, 9_000, 30_000)
FACT = re.compile(r"FACT-\d+")


def keeps_facts(
    messages: Sequence[Mapping[str, Any]],
    *,
    schema: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
) -> str:
    """Summarize by copying only from the new part, without repeating known facts."""
    assert schema is not None
    assert max_tokens is not None
    assert sum(map(CHEAP.message, messages)) <= LIMITS.max_context_tokens
    part = messages[-1]["content"].partition("Next part of the conversation:")[2]
    facts = [f"{fact} holds" for fact in dict.fromkeys(FACT.findall(part))]
    outcome = [line[:80] for line in part.splitlines() if "result of" in line]
    answer = {"facts": facts, "tool_outcomes": outcome, "last_state": "They go on."}
    return f"Here it is:\n```json\n{json.dumps(answer)}\n```"


class Talk:
    """A user, a model and its tools, with random behaviour."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.chance = random.Random(4)
        self.events: list[SummaryReport] = []
        self.context = Context(
            store,
            keeps_facts,
            limits=LIMITS,
            tokens=CHEAP,
            system=SYSTEM,
            tools=TOOLS,
            on_event=self.events.append,
        )
        self.calls = 0

    def model(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Check the window as a provider would; then call some tools."""
        self.calls += 1
        assert faults(messages) == []
        taken = sum(map(CHEAP.message, messages)) + CHEAP.tools(TOOLS)
        assert taken <= LIMITS.room
        newest = [body for body in messages if body["role"] == "user"][-1]
        assert newest["content"] == self.said
        return self.chance.choice([0, 0, 1, 1, 3])

    def turn(self, number: int) -> None:
        quiet = number % 200 < 100
        fact = f" FACT-{number}" if number % 100 == 7 else ""
        self.said = f"question {number}{fact} " + "q" * self.chance.choice(
            [5, 50] if quiet else [50, 900]
        )
        self.store.add_full_message(KEY, user(self.said))
        for step in range(12):
            wanted = self.context.call(KEY, self.model)
            ids = [f"c{step}.{call}" for call in range(wanted)]  # the same in every turn
            if not ids:
                self.store.add_message(
                    KEY, "assistant", "a" * self.chance.choice([3, 80] if quiet else [80, 2_000])
                )
                break
            self.store.add_full_message(KEY, assistant(None, *ids))
            if self.chance.random() < 0.03:
                return  # killed while its tools ran
            sizes = [self.chance.choice(QUIET if quiet else LOUD) for _ in ids]
            results = [tool(id, "r" * size) for id, size in zip(ids, sizes, strict=True)]
            if self.chance.random() < 0.1:
                self.said = f"wait {number}.{step}"
                self.store.add_full_message(KEY, user(self.said))
            self.store.add_messages(KEY, results)
        self.context.summarize_if_needed(KEY)


def test_two_thousand_turns_never_overflow_and_lose_no_fact() -> None:
    with temporary_folders.folder() as place, open_store(place) as store:
        talk = Talk(store)
        for number in range(TURNS):
            talk.turn(number)
            if number % 50 == 0:
                _all_facts_are_known(store, number)
        _all_facts_are_known(store, TURNS - 1)
        assert talk.calls > TURNS
        assert {event.reason for event in talk.events} == {"tokens", "count"}
        assert all(event.count > 0 and not event.fallback for event in talk.events)
        assert len(store.get_history(KEY)) <= LIMITS.max_history_messages
        hidden = [message.seq for message in store.get_history(KEY, full=True) if message.hidden]
        assert sum(event.count for event in talk.events) == len(hidden)


def _all_facts_are_known(store: Store, number: int) -> None:
    planted = {f"FACT-{turn}" for turn in range(number + 1) if turn % 100 == 7}
    visible_spans = {
        fact for message in store.get_history(KEY) for fact in FACT.findall(str(message.to_dict()))
    }
    assert planted <= visible_spans | set(FACT.findall(store.get_summary(KEY)))
