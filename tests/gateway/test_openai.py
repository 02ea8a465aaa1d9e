"""OpenAI's own client against the gateway: streams, tools, sessions, and asking again."""

import asyncio
import json
import re
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from stenolog.errors import ModelUnavailable
from stenolog.providers.openai_chat import OpenAIChat
from stenolog.stores.open_store import open_store
from stenolog.testing.model_server import ModelServer
from stenolog.testing.scripted_model import ScriptedModel, tool_call
from support.gateway.clients import wait_until
from support.gateway.served_gateway import TOKEN, Served

Messages = Sequence[Mapping[str, Any]]

LAMP: Any = {
    "type": "function",
    "function": {"name": "lamp", "parameters": {"type": "object", "properties": {}}},
}


def _client(served: Served, **extra: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=TOKEN, max_retries=0, **extra)


def _log(workspace: Path, key: str, *, full: bool = False) -> list[tuple[str, Any]]:
    with open_store(str(workspace), read_only=True) as store:
        return [(one.role, one.content) for one in store.get_history(key, full=full)]


def _echo(messages: Messages, tools: Messages) -> str:
    del tools
    return f"{len(messages)}: {messages[-1]['content']}"


def _ask(
    client: openai.OpenAI,
    messages: Any,
    session: str | None = "s",
    *,
    headers: Mapping[str, str] | None = None,
    **extra: Any,
) -> Any:
    named = {} if session is None else {"X-Session-Key": session}
    return client.chat.completions.create(
        model="main", messages=messages, extra_headers={**named, **(headers or {})}, **extra
    )


def test_session_is_stored_and_its_history_is_sent_to_the_model(tmp_path: Path) -> None:
    model = ScriptedModel(_echo)
    with Served(tmp_path, model) as served, _client(served) as client:
        first = _ask(client, [{"role": "user", "content": "I am Ada."}])
        second = _ask(client, [{"role": "user", "content": "Who am I?"}])
    assert first.choices[0].message.content == "2: I am Ada."
    assert second.choices[0].finish_reason == "stop"
    assert "I am Ada." in [one["content"] for one in model.asked[-1].messages]
    assert second.usage.total_tokens > 0
    assert _log(tmp_path, "s") == [
        ("user", "I am Ada."),
        ("assistant", "2: I am Ada."),
        ("user", "Who am I?"),
        ("assistant", "4: Who am I?"),
    ]


def test_session_key_in_the_metadata_may_be_any_text(tmp_path: Path) -> None:
    key = "web/ü:🐦"
    with Served(tmp_path, ScriptedModel(_echo)) as served, _client(served) as client:
        _ask(client, [{"role": "user", "content": "Hello."}], None, metadata={"session": key})
        with served.client() as plain:
            asked = {"messages": [{"role": "user", "content": "Hello?"}]}
            header = {b"X-Session-Key": key.encode()}
            assert plain.post("/v1/chat/completions", json=asked, headers=header).is_success
        with pytest.raises(openai.BadRequestError, match="name different sessions"):
            _ask(client, [{"role": "user", "content": "x"}], "a", metadata={"session": "b"})
    assert len(_log(tmp_path, key)) == 4


@pytest.mark.parametrize("key", ["a\r\nX-Evil: 1", "\x00", " a ", "ü", "x" * 1_024])
def test_hostile_session_keys_do_not_break_the_response(tmp_path: Path, key: str) -> None:
    with Served(tmp_path, ScriptedModel(_echo)) as served, _client(served) as client:
        for stream in (False, True):
            asked: Any = [{"role": "user", "content": "Hello."}]
            raw = client.chat.completions.with_raw_response.create(
                model="main", messages=asked, metadata={"session": key}, stream=stream
            )
            assert raw.status_code == 200
            assert "x-evil" not in raw.headers
            raw.http_response.read()
    assert len(_log(tmp_path, key)) == 4


def test_lone_surrogate_is_stored_unchanged(tmp_path: Path) -> None:
    with Served(tmp_path, ScriptedModel(["Yes."])) as served, served.client() as client:
        body = rb'{"messages": [{"role": "user", "content": "cut \ud83d"}], "seed": 1}'
        response = client.post(
            "/v1/chat/completions",
            content=body,
            headers={"X-Session-Key": "s", "Content-Type": "application/json"},
        )
    assert response.status_code == 200
    assert response.headers["x-steno-without-effect"] == "seed"
    assert _log(tmp_path, "s")[0] == ("user", "cut \ud83d")


def test_request_without_a_session_is_not_stored(tmp_path: Path) -> None:
    model = ScriptedModel(_echo)
    with Served(tmp_path, model) as served, _client(served) as client:
        answer = _ask(client, [{"role": "user", "content": "Hello."}], None)
    assert answer.choices[0].message.content == "1: Hello."
    with open_store(str(tmp_path), read_only=True) as store:
        assert store.list_sessions() == []
    assert not any(b"Hello." in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_request_without_a_session_gets_a_new_one_if_configured(tmp_path: Path) -> None:
    served = Served(tmp_path, ScriptedModel(_echo), store_anonymous=True)
    with served, _client(served) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="main", messages=[{"role": "user", "content": "Hello."}]
        )
    key = raw.headers["x-session-key"]
    assert key.startswith("api:")
    assert [role for role, _ in _log(tmp_path, key)] == ["user", "assistant"]


def test_full_history_of_a_client_adds_only_new_messages(tmp_path: Path) -> None:
    talk: list[Any] = []
    with Served(tmp_path, ScriptedModel(_echo)) as served, _client(served) as client:
        for words in ("one", "two", "three"):
            talk.append({"role": "user", "content": words})
            answer = _ask(client, talk)
            talk.append({"role": "assistant", "content": answer.choices[0].message.content})
        assert [content for _, content in _log(tmp_path, "s", full=True)] == [
            body["content"] for body in talk
        ]
        # It changes what it has said second: the rest goes out of sight, and stays in the log.
        edited = [*talk[:2], {"role": "user", "content": "two!"}]
        answer = _ask(client, edited)
    assert [content for _, content in _log(tmp_path, "s")] == [
        "one", "2: one", "two!", answer.choices[0].message.content,
    ]  # fmt: skip
    assert len(_log(tmp_path, "s", full=True)) == 8


def test_system_prompt_of_the_client_replaces_that_of_the_agent(tmp_path: Path) -> None:
    model = ScriptedModel(_echo)
    with Served(tmp_path, model) as served, _client(served) as client:
        system = {"role": "system", "content": "Speak like a pirate."}
        _ask(client, [system, {"role": "user", "content": "Hello."}])
        _ask(client, [{"role": "user", "content": "And now?"}])
    assert model.asked[0].messages[0] == system
    assert "pirate" not in json.dumps(model.asked[1].messages)
    assert [role for role, _ in _log(tmp_path, "s")] == ["user", "assistant"] * 2


def _with_lamp(messages: Messages, tools: Messages) -> Any:
    del tools
    last = messages[-1]
    if last["role"] == "user" and "lamp" in str(last["content"]):
        return {"content": "I try.", "tool_calls": [tool_call("lamp", {"on": True}, id="c1")]}
    return f"The lamp: {last['content']}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_client_tool_call_is_returned_and_its_result_continues_the_turn(
    tmp_path: Path, stream: bool, whole: bool
) -> None:
    model = ScriptedModel(_with_lamp)
    with Served(tmp_path, model) as served, _client(served) as client:
        asked: Any = {"role": "user", "content": "Switch the lamp on."}
        said, calls, finish = _heard(client, [asked], stream=stream)
        assert (said, finish) == ("I try.", "tool_calls")
        assert [(one["name"], one["arguments"]) for one in calls] == [("lamp", '{"on": true}')]
        result: Any = {"role": "tool", "tool_call_id": "c1", "content": "it shines"}
        call = tool_call("lamp", {"on": True}, id="c1")
        calling = {"role": "assistant", "content": said, "tool_calls": [call]}
        said, calls, finish = _heard(
            client, [asked, calling, result] if whole else [result], stream=stream
        )
    assert (said, calls, finish) == ("The lamp: it shines", [], "stop")
    assert [role for role, _ in _log(tmp_path, "s", full=True)] == [
        "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert "lamp" in [tool["function"]["name"] for tool in model.asked[0].tools]


def _heard(client: openai.OpenAI, messages: Any, *, stream: bool) -> tuple[str, Any, str]:
    answer = _ask(client, messages, tools=[LAMP], stream=stream)
    if not stream:
        [choice] = answer.choices
        calls = [one.function.to_dict() for one in choice.message.tool_calls or ()]
        return choice.message.content, calls, choice.finish_reason
    text, calls, finish = "", [], ""
    for piece in answer:
        [choice] = piece.choices
        text += choice.delta.content or ""
        calls += [one.function.to_dict() for one in choice.delta.tool_calls or ()]
        finish = choice.finish_reason or finish
    return text, calls, finish


def test_new_message_instead_of_a_tool_result_gets_an_answer(tmp_path: Path) -> None:
    model = ScriptedModel(_with_lamp)
    with Served(tmp_path, model) as served, _client(served) as client:
        _ask(client, [{"role": "user", "content": "The lamp!"}], tools=[LAMP])
        answer = _ask(client, [{"role": "user", "content": "Never mind."}])
    assert answer.choices[0].message.content == "The lamp: Never mind."
    [result] = [one for one in model.asked[-1].messages if one["role"] == "tool"]
    assert "continued without waiting" in result["content"]


def clock() -> str:
    """The time."""
    return "noon"


def test_tool_calls_of_the_agent_are_not_sent_to_the_client(tmp_path: Path) -> None:
    scenes: list[Any] = [
        {"content": "I look.", "tool_calls": [tool_call("clock", id="c1")]},
        "It is noon.",
        "You asked for the time.",
    ]
    served = Served(tmp_path, ScriptedModel(scenes), tools=[clock])
    with served, _client(served) as client:
        asked: Any = {"role": "user", "content": "What time is it?"}
        pieces = list(_ask(client, [asked], stream=True, stream_options={"include_usage": True}))
        text = "".join(one.choices[0].delta.content or "" for one in pieces if one.choices)
        assert text == "I look.\n\nIt is noon."
        assert pieces[-1].usage.completion_tokens > 0
        said: Any = {"role": "assistant", "content": text}
        _ask(client, [asked, said, {"role": "user", "content": "What did I ask?"}])
    assert [role for role, _ in _log(tmp_path, "s", full=True)] == [
        "user", "assistant", "tool", "assistant", "user", "assistant",
    ]  # fmt: skip


FIRST = {"x-stainless-retry-count": "0"}
AGAIN = {"x-stainless-retry-count": "1"}


class Gated(ScriptedModel):
    """A model that answers when the test lets it."""

    def __init__(self, script: Any) -> None:
        super().__init__(script)
        self.asked_first = threading.Event()
        self.go_on = threading.Event()

    async def stream(self, messages: Any, **how: Any) -> Any:
        self.asked_first.set()
        await asyncio.to_thread(self.go_on.wait, 30)
        async for delta in super().stream(messages, **how):
            yield delta


def _ask_and_go_away(served: Served, model: Gated, messages: Any, **more: Any) -> None:
    """Send a request, and close the connection before the model answers."""
    body = json.dumps({"model": "main", "messages": messages, **more}).encode()
    given = {
        "Host": "127.0.0.1",
        "Authorization": f"Bearer {TOKEN}",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "X-Session-Key": "s",
        **FIRST,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    port = int(served.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode() + body)
        assert model.asked_first.wait(30)
    # The gateway accepts this connection after it has seen the end of the other one.
    with served.client() as client:
        client.get("/healthz")
    model.go_on.set()


def test_retry_gets_the_same_answer_and_stores_nothing_twice(tmp_path: Path) -> None:
    asked: Any = [{"role": "user", "content": "Hello."}]
    model = Gated(_echo)
    with Served(tmp_path, model) as served:
        _ask_and_go_away(served, model, asked)
    # Another gateway knows from the store that nobody has received the answer.
    with Served(tmp_path, ScriptedModel(_echo)) as served, _client(served) as client:
        again = _ask(client, asked, headers=AGAIN)
        assert again.choices[0].message.content == "2: Hello."
        for _ in range(2):
            named = _ask(client, asked, headers={"Idempotency-Key": "k1"})
            assert named.choices[0].message.content == "4: Hello."
        # Who only says the same once more is answered once more.
        _ask(client, asked)
    assert [role for role, _ in _log(tmp_path, "s", full=True)] == ["user", "assistant"] * 3


def test_retry_of_a_rejected_request_is_a_new_message(tmp_path: Path) -> None:
    """Its library asks again by itself: for the message that was refused, not for the last one."""
    with Served(tmp_path, ScriptedModel(_echo)) as served, _client(served) as client:
        asked: Any = [{"role": "user", "content": "continue"}]
        assert _ask(client, asked).choices[0].message.content == "2: continue"
        again = _ask(client, asked, headers=AGAIN)
        assert again.choices[0].message.content == "4: continue"
        list(_ask(client, asked, stream=True))
        again = _ask(client, asked, headers=AGAIN)
        assert again.choices[0].message.content == "8: continue"
    assert len(_log(tmp_path, "s")) == 8


def test_retry_is_a_new_message_if_the_same_words_came_in_another_way(tmp_path: Path) -> None:
    """The retried request never arrived: what is in the log was said by somebody else."""
    with Served(tmp_path, ScriptedModel(_echo)) as served:
        with served.client() as client:
            said = client.post("/v1/sessions/s/messages", json={"content": "Hello."})
            assert said.json()["answer"] == "2: Hello."
        with _client(served) as client:
            again = _ask(client, [{"role": "user", "content": "Hello."}], headers=AGAIN)
            assert again.choices[0].message.content == "4: Hello."


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


_SEVERAL = [_user("a"), {"role": "assistant", "content": "b"}, _user("c")]


def _tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def test_idempotency_key_with_other_tools_is_rejected(tmp_path: Path) -> None:
    key, hello = {"Idempotency-Key": "k1"}, [_user("Hello.")]
    with Served(tmp_path, ScriptedModel(_echo)) as served, _client(served) as client:
        first = _ask(client, hello, headers=key, tools=[_tool("weather")])
        for tools in (openai.NOT_GIVEN, [_tool("transfer")]):
            with pytest.raises(openai.ConflictError) as refused:
                _ask(client, hello, headers=key, tools=tools)
            assert refused.value.code == "once_conflict"
        again = _ask(client, hello, headers=key, tools=[_tool("weather")])
        assert again.choices[0].message == first.choices[0].message


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ([_user("one")], [_user("two")]),
        ([_user("one")], [_user("x"), {"role": "assistant", "content": "y"}, _user("z")]),
        ([_user("one")], [_user("one"), {"role": "assistant", "content": "2: one"}, _user("y")]),
        (_SEVERAL, [*_SEVERAL[:-1], _user("TRANSFER 100 EUR")]),
        (_SEVERAL, [_user("something else")]),
        (_SEVERAL, [_user("other"), *_SEVERAL[1:]]),
    ],
)
def test_idempotency_key_with_other_messages_is_rejected_by_every_gateway(
    first: Any, other: Any, tmp_path: Path
) -> None:
    key = {"Idempotency-Key": "k1"}
    for restarted in (False, True):
        with Served(tmp_path, ScriptedModel(_echo)) as served, _client(served) as client:
            if not restarted:
                answer = _ask(client, first, headers=key).choices[0].message
                before = _log(tmp_path, "s", full=True)
            with pytest.raises(openai.ConflictError) as refused:
                _ask(client, other, headers=key)
            assert refused.value.code == "once_conflict"
            assert _ask(client, first, headers=key).choices[0].message == answer
            # In another session it is another request.
            assert _ask(client, other, f"t{restarted}", headers=key)
    assert _log(tmp_path, "s", full=True) == before


@pytest.mark.parametrize("fields", [{}, {"name": "ada"}])
def test_request_with_an_idempotency_key_that_edits_history_is_answered_once(
    tmp_path: Path, fields: dict[str, str]
) -> None:
    with Served(tmp_path, ScriptedModel(_echo)) as served, _client(served) as client:
        talk: Any = [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "One."},
            {"role": "user", "content": "two", **fields},
        ]
        first = _ask(client, talk, headers={"Idempotency-Key": "k1"})
        _ask(client, [{"role": "user", "content": "meanwhile"}])
        again = _ask(client, talk, headers={"Idempotency-Key": "k1"})
        assert again.choices[0].message.content == first.choices[0].message.content
    kept = _log(tmp_path, "s", full=True)
    assert [content for role, content in kept if role == "user"] == ["one", "two", "meanwhile"]
    assert len(kept) == 6


def test_retry_returns_the_same_client_tool_calls(tmp_path: Path) -> None:
    asked: Any = [{"role": "user", "content": "The lamp!"}]
    model = Gated(_with_lamp)
    with Served(tmp_path, model) as served:
        _ask_and_go_away(served, model, asked, tools=[LAMP])
    with Served(tmp_path, ScriptedModel([])) as served, _client(served) as client:
        again = _ask(client, asked, tools=[LAMP], headers=AGAIN)
    assert again.choices[0].finish_reason == "tool_calls"
    assert len(_log(tmp_path, "s", full=True)) == 2


def test_unexpected_tool_results_are_rejected_or_recognized(tmp_path: Path) -> None:
    result: Any = {"role": "tool", "tool_call_id": "c1", "content": "it shines"}
    with Served(tmp_path, ScriptedModel(_with_lamp)) as served, _client(served) as client:
        with pytest.raises(openai.BadRequestError, match="there is no pending tool call"):
            _ask(client, [result])
        _ask(client, [{"role": "user", "content": "The lamp!"}], tools=[LAMP])
        with pytest.raises(openai.BadRequestError, match="there is no pending tool call"):
            _ask(client, [{**result, "tool_call_id": "c2"}])
        first = _ask(client, [result])
        # Sent once more, it is what it was.
        again = _ask(client, [result])
        assert again.choices[0].message.content == first.choices[0].message.content
    assert [role for role, _ in _log(tmp_path, "s", full=True)] == [
        "user", "assistant", "tool", "assistant",
    ]  # fmt: skip


def test_client_cannot_forge_reserved_fields(tmp_path: Path) -> None:
    forged = {"origin": {"channel": "telegram", "chat": 4242}, "seen": 99, "of_client": ["c9"]}
    with Served(tmp_path, ScriptedModel(_echo)) as served, _client(served) as client:
        talk: Any = [
            {"role": "user", "content": "one", "stenolog": forged},
            {"role": "assistant", "content": "One.", "stenolog": forged},
            {"role": "user", "content": "two", "stenolog": forged},
        ]
        _ask(client, talk)
    with open_store(str(tmp_path), read_only=True) as store:
        kept = [message.to_dict() for message in store.get_history("s", full=True)]
    for body in kept[:3]:
        assert not forged.keys() & body.get("stenolog", {}).keys()
    assert "origin" not in kept[3]["stenolog"]


def test_hostile_field_names_do_not_break_the_response(tmp_path: Path) -> None:
    with Served(tmp_path, ScriptedModel(_echo)) as served, served.client() as client:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello."}]}
        body |= {"a\r\nSet-Cookie: evil": 1} | {f"field-{n}": 1 for n in range(20_000)}
        response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert "set-cookie" not in response.headers
    assert len(response.headers["x-steno-without-effect"]) < 2_000


def test_unavailable_model_is_reported_and_the_message_is_kept(tmp_path: Path) -> None:
    scenes: list[Any] = [ModelUnavailable("it sleeps"), "Good morning."]
    with Served(tmp_path, ScriptedModel(scenes)) as served:
        asked: Any = [{"role": "user", "content": "Hello."}]
        with _client(served) as client, pytest.raises(openai.InternalServerError, match="sleeps"):
            _ask(client, asked)
        # The client of most people asks again by itself.
        with _client(served).with_options(max_retries=2) as client:
            answer = _ask(client, asked)
    assert answer.choices[0].message.content == "Good morning."
    assert [role for role, _ in _log(tmp_path, "s", full=True)] == ["user", "assistant"]


def test_models_are_the_agents_and_unknown_models_are_rejected(
    tmp_path: Path,
) -> None:
    with Served(tmp_path, ScriptedModel(_echo)) as served, _client(served) as client:
        assert [one.id for one in client.models.list()] == ["main"]
        with pytest.raises(openai.NotFoundError, match="available: main"):
            client.chat.completions.create(
                model="gpt-9", messages=[{"role": "user", "content": "Hello."}]
            )


def _wrong() -> Iterator[tuple[Any, str]]:
    yield {"messages": []}, "at least one"
    yield {"messages": [{"role": "user"}]}, r"messages\[0\].content"
    yield {"messages": [{"role": "wizard", "content": "x"}]}, r"messages\[0\].role"
    yield {"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"
    yield {"messages": [{"role": "assistant", "content": "x"}]}, "the last message must be"
    yield {"messages": [{"role": "user", "content": "x"}], "n": 2}, "n must be 1"
    yield {"messages": "x"}, "messages"
    yield {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, r"tools\[0\]"


@pytest.mark.parametrize(("body", "words"), list(_wrong()))
def test_invalid_chat_request_is_rejected_and_not_stored(
    tmp_path: Path, body: Any, words: str
) -> None:
    model = ScriptedModel(_echo)
    with Served(tmp_path, model) as served, served.client() as client:
        response = client.post("/v1/chat/completions", json=body, headers={"X-Session-Key": "s"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert re.search(words, response.json()["error"]["message"])
    assert model.asked == []
    assert _log(tmp_path, "s") == []


def test_ignored_parameters_are_reported(tmp_path: Path) -> None:
    with Served(tmp_path, ScriptedModel(_echo)) as served, _client(served) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="main",
            messages=[{"role": "user", "content": "Hello."}],
            temperature=0.1,
            max_completion_tokens=7,
        )
    assert raw.headers["x-steno-without-effect"] == "temperature"


def test_client_cannot_hide_a_message_that_arrived_meanwhile(tmp_path: Path) -> None:
    """A client that sends everything changes its end, while somebody else waits for an answer."""
    go_on, asked = threading.Event(), threading.Event()

    def answer(request: Any) -> str:
        asked.set()
        go_on.wait(30)
        said = [one["content"] for one in request["messages"] if one["role"] == "user"]
        return " and ".join(said)

    with (
        ModelServer(answer) as model,
        Served(tmp_path, OpenAIChat("m", base_url=model.url, retries=0)) as served,
        _client(served) as client,
        ThreadPoolExecutor(3) as threads,
    ):
        first = threads.submit(_ask, client, [{"role": "user", "content": "slow"}])
        assert asked.wait(30)
        edited: Any = [
            {"role": "user", "content": "other"},
            {"role": "assistant", "content": "Other."},
            {"role": "user", "content": "mine"},
        ]
        patient = client.with_options(max_retries=10)
        whole = threads.submit(_ask, patient, edited)
        wait_until(lambda: served.gateway.turns.in_use == 2)
        theirs = threads.submit(_ask, client, [{"role": "user", "content": "theirs"}])
        wait_until(lambda: ("user", "theirs") in _log(tmp_path, "s"))
        go_on.set()
        first.result(30)
        answers = [one.result(30).choices[0].message.content for one in (whole, theirs)]
    assert "mine" in answers[0]
    assert "theirs" in answers[1]
    everything = [content for role, content in _log(tmp_path, "s", full=True) if role == "user"]
    assert everything.count("theirs") == 1
