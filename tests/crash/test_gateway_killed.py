"""Tests that `steno serve`, killed repeatedly under load, loses and repeats nothing.

The clients only retry. In the end every answered message is in the log once, none was answered
twice, and SSE listeners received every message without gaps or repeats.
"""

import random
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from stenolog.stores.open_store import open_store
from stenolog.testing.model_server import ModelServer, ScriptedResponse
from stenolog.testing.scripted_model import tool_call
from support.crash.reporting import Say
from support.gateway.clients import Listener, Talker, wait_for_listeners
from support.gateway.gateway_process import TOKEN, Process

SESSIONS = 6


def _echo(request: object) -> str:
    assert isinstance(request, dict)
    return f"You said: {request['messages'][-1]['content']}"


def check_log(where: str, talkers: list[Talker], listeners: list[Listener]) -> int:
    """Compare the log with all answers and streams; return the number of messages."""
    count = 0
    with open_store(where, read_only=True) as store:
        for number, talker in enumerate(talkers):
            history = store.get_history(f"s{number}", full=True)
            count += len(history)
            said = [one.content for one in history if one.role == "user"]
            assert said == list(talker.answers), "each that was said is there once, in its order"
            assert [one.role for one in history] == ["user", "assistant"] * len(said)
            for question, answer in zip(history[::2], history[1::2], strict=True):
                assert answer.content == f"You said: {question.content}"
                # Every answer that a client received is the stored one.
                assert talker.answers[question.content] <= {answer.content}
            heard = next(one for one in listeners if one.name == f"listener s{number}").heard
            assert heard == [(one.seq, one.content) for one in history]
    return count


def _run(place: Path, say: Say, *, rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    workspace = str(place / "workspace")
    enough, silence = threading.Event(), threading.Event()
    with ModelServer(_echo, pause=0.002) as model:
        gateway = Process(place / "gateway", sessions=workspace, model=model.url)
        gateway.start()
        keys = [f"s{number}" for number in range(SESSIONS)]
        talkers = [Talker([gateway.url], key, seed, enough) for key in keys]
        listeners = [Listener([gateway.url], key, seed, silence) for key in keys]
        try:
            for thread in (*talkers, *listeners):
                thread.start()
            for _ in range(rounds):
                time.sleep(chance.uniform(0.2, 0.8))
                gateway.kill()
                gateway.start()
            enough.set()
            for talker in talkers:
                talker.join(60)
            wait_for_listeners(workspace, listeners)
        finally:
            enough.set()
            silence.set()
            for thread in (*talkers, *listeners):
                thread.join(60)
            code = gateway.stop()
        assert code == 0
        assert not model.request_faults
    assert [words for talker in talkers for words in talker.unclean] == []
    count = check_log(workspace, talkers, listeners)
    failed = sum(talker.failed for talker in talkers)
    broken = sum(listener.broken for listener in listeners)
    assert failed
    assert broken
    say(f"{rounds} kills, {count} messages, {failed} requests made again, {broken} streams broken")


def test_killed_gateway_loses_no_message_and_answers_once(tmp_path: Path, say: Say) -> None:
    _run(tmp_path, say, rounds=5, seed=7)


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_gateway_loses_no_message_in_twenty_rounds(
    tmp_path: Path, say: Say, seed: int
) -> None:
    _run(tmp_path, say, rounds=20, seed=seed)


@pytest.mark.parametrize("stream", [False, True])
def test_openai_client_recovers_after_a_killed_gateway(tmp_path: Path, stream: bool) -> None:
    workspace = str(tmp_path / "workspace")
    # Killed before the first word: clients do not retry a stream that has started.
    with ModelServer(_echo, responses=[ScriptedResponse(first_byte=3.0)]) as model:
        gateway = Process(tmp_path / "gateway", sessions=workspace, model=model.url).start()
        try:
            client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=TOKEN, max_retries=10)
            found: list[str | None] = []

            def ask() -> None:
                asked: Any = [{"role": "user", "content": "Hello?"}]
                answer: Any = client.chat.completions.create(
                    model="main", messages=asked, metadata={"session": "s"}, stream=stream
                )
                if stream:
                    pieces = [one.choices[0].delta.content or "" for one in answer]
                    found.append("".join(pieces))
                else:
                    found.append(answer.choices[0].message.content)

            with client:
                asking = threading.Thread(target=ask)
                asking.start()
                assert model.wait_until(lambda: model.request_count > 0)
                gateway.kill()
                gateway.start()
                asking.join(60)
        finally:
            gateway.close()
    assert found == ["You said: Hello?"]
    with open_store(workspace, read_only=True) as store:
        assert [one.role for one in store.get_history("s", full=True)] == ["user", "assistant"]


def _lamp(request: Any) -> Any:
    last = request["messages"][-1]
    if last["role"] == "user":
        return {"content": "I try.", "tool_calls": [tool_call("lamp", id="c1")]}
    return f"The lamp: {last['content']}"


def test_result_of_a_client_tool_is_accepted_after_a_killed_gateway(tmp_path: Path) -> None:
    workspace = str(tmp_path / "workspace")
    tools: Any = [{"type": "function", "function": {"name": "lamp", "parameters": {}}}]
    with ModelServer(_lamp) as model:
        gateway = Process(tmp_path / "gateway", sessions=workspace, model=model.url).start()
        try:
            with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=TOKEN) as client:

                def say(**body: Any) -> Any:
                    messages: Any = [body]
                    answer = client.chat.completions.create(
                        model="main", messages=messages, tools=tools, metadata={"session": "s"}
                    )
                    return answer.choices[0]

                assert say(role="user", content="Light!").finish_reason == "tool_calls"
                gateway.kill()
                gateway.start()
                answer = say(role="tool", tool_call_id="c1", content="it shines")
        finally:
            gateway.close()
    assert answer.message.content == "The lamp: it shines"
    with open_store(workspace, read_only=True) as store:
        roles = [one.role for one in store.get_history("s", full=True)]
    assert roles == ["user", "assistant", "tool", "assistant"]
