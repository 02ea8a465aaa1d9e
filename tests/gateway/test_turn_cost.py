"""A plain chat turn makes few store calls and thread hops, on every engine."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest

from stenolog.agent.spec import AgentSpec
from stenolog.testing.scripted_model import ScriptedModel
from support.gateway.chat_turns import ENGINES, HOURS, chat, new_place
from support.gateway.served_gateway import Served
from support.gateway.turn_recorder import Recorder, record
from support.postgres_proxy import Exchange, Proxy

MAX_HOPS = 3
MAX_HOPS_OF_A_CHANGED_HISTORY = 5
MAX_CALLS = {"memory off": 7, "memory on": 15}
"""A turn with memory also brings the search index up to date."""
MAX_CALLS_OF_A_CHANGED_HISTORY = {"edit": 9, "two messages": 8}
"""An edit also looks whether another process has hidden something at the same time."""
MAX_EXCHANGES = 12
"""Exchanges with PostgreSQL until the lease is released."""


def spec(*, memory: bool) -> AgentSpec:
    """Return an agent without tools."""
    return AgentSpec(memory=memory, consolidation=False, tools=False)


def plain_turn(recorder: Recorder, served: Served) -> tuple[list[str], list[list[str]]]:
    """Run a turn in a session that exists; return its store calls, all and by thread hop."""
    notes = served.loop.registry.agent().notes
    recorder.watched = lambda store: store is not notes
    with served.client() as client:
        chat(served, client, "Hello.")
        chat(served, client, "How are you?")
        recorder.clear()
        chat(served, client, "What is new?")
        recorder.check()
        return list(recorder.calls), list(recorder.hops)


def changed_history_turn(
    recorder: Recorder, served: Served, change: str
) -> tuple[list[str], list[list[str]]]:
    """Do the same with a client that sends the whole history, and has changed it."""
    talk = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "to Hello."}]
    more = [{"role": "user", "content": text} for text in ("How are you?", "What is new?")]
    with served.client() as client:
        chat(served, client, "Hello.")
        if change == "edit":
            chat(served, client, "How old are you?")
        recorder.clear()
        body = {"messages": talk + (more[1:] if change == "edit" else more)}
        answer = client.post("/v1/chat/completions", json=body, headers={"X-Session-Key": "work"})
        assert answer.json()["choices"][0]["message"]["content"] == "to What is new?"
        served.quiet()
        recorder.check()
        return list(recorder.calls), list(recorder.hops)


Start = Callable[..., AbstractContextManager[tuple[Recorder, Served]]]


@pytest.fixture(params=ENGINES)
def start(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return a function that starts a gateway on each engine, with a recorder of its calls."""
    recorder = record(monkeypatch, *ENGINES[request.param])
    model = ScriptedModel(lambda messages, _: f"to {messages[-1]['content']}")

    @contextmanager
    def start(*, memory: bool) -> Iterator[tuple[Recorder, Served]]:
        with (
            new_place(request.param, tmp_path, request) as where,
            Served(where, model, spec=spec(memory=memory), ttl=HOURS) as served,
        ):
            yield recorder, served

    return start


@pytest.mark.parametrize("memory", MAX_CALLS)
def test_a_plain_turn_makes_few_store_calls_and_thread_hops(start: Start, memory: str) -> None:
    with start(memory=memory == "memory on") as (recorder, served):
        calls, hops = plain_turn(recorder, served)
    assert len(calls) <= MAX_CALLS[memory], hops
    assert len(hops) <= MAX_HOPS, hops
    assert "read_marker" not in calls or memory == "memory on", (
        "aliases are resolved once per session"
    )


@pytest.mark.parametrize("change", MAX_CALLS_OF_A_CHANGED_HISTORY)
def test_a_turn_that_changes_the_history_makes_few_store_calls_and_thread_hops(
    start: Start, change: str
) -> None:
    with start(memory=False) as (recorder, served):
        calls, hops = changed_history_turn(recorder, served, change)
    assert len(calls) <= MAX_CALLS_OF_A_CHANGED_HISTORY[change], hops
    assert len(hops) <= MAX_HOPS_OF_A_CHANGED_HISTORY, hops
    assert "read_marker" not in calls, "aliases are resolved once per session"


def test_a_plain_turn_makes_few_exchanges_with_postgresql(own_url: str) -> None:
    model = ScriptedModel(lambda messages, _: f"to {messages[-1]['content']}")
    url = urlsplit(own_url)
    assert url.port is not None
    with Proxy(url.port) as proxy:
        there = url._replace(netloc=url.netloc.replace(str(url.port), str(proxy.port)))
        agent = spec(memory=False)
        with (
            Served(urlunsplit(there), model, spec=agent, ttl=HOURS) as served,
            served.client() as client,
        ):
            # Enough turns that every connection of the pool has prepared its statements, however
            # busy the machine is.
            for number in range(8):
                chat(served, client, f"Hello {number}.")
            turns = []
            for number in range(8):
                before = len(proxy.seen)
                chat(served, client, f"What is new? {number}")
                turns.append(_until_release(proxy.seen[before:]))
    # The gateway looks for unfinished turns once in the background.
    fewest = min(turns, key=len)
    assert len(fewest) <= MAX_EXCHANGES, "\n".join(fewest)


def _until_release(seen: list[Exchange]) -> list[str]:
    """Return the exchanges of a turn."""
    texts = [exchange.text for exchange in seen]
    released = next(at for at, text in enumerate(texts) if "SET expires = '-infinity'" in text)
    return texts[: released + 1]
