"""A request that is sent again to the gateway gets its own stored answer, or an error."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from stenolog.agent.spec import AgentSpec
from stenolog.agent.stored_answers import HIDDEN_UNANSWERED_TEXT
from stenolog.agent.tools import tool
from stenolog.catalog.message_metadata import mark_received
from stenolog.errors import MaybeStored, ModelUnavailable, StoreUnavailable
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from support.damage import damage_message
from support.gateway.chat_turns import HOURS, new_place
from support.gateway.served_gateway import Served

KEY = "work"
PIN, EVEREST = "What is my PIN?", "How tall is Everest?"
ASK_CLOCK = "What time is it?"
CLOCK_CALL = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "", "parameters": {}}}
LOOK_CALL = {"id": "l1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
SPEC = AgentSpec(memory=False, consolidation=False, tools=True)


@tool
async def look() -> str:
    """Look it up."""
    return "seen"


class Gateway:
    """A gateway that is started for each step, and the number of questions to its model."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.asked: list[str] = []
        self.scripted: list[Any] = []
        """Next answers of the model, before those that follow from the question."""
        self.is_down = False
        """Whether the server of the model is down."""
        self.tools: list[Any] = [look]

    def _answer(self, messages: Sequence[Mapping[str, Any]], tools: object) -> Any:
        del tools
        self.asked.append(messages[-1]["content"])
        if self.is_down:
            raise ModelUnavailable("the model's server is down")
        if self.scripted:
            return self.scripted.pop(0)
        if messages[-1]["content"] == ASK_CLOCK:
            return {"tool_calls": [CLOCK_CALL]}
        return f"to {messages[-1]['content']}"

    def post(
        self,
        text: str,
        headers: Mapping[str, str],
        *,
        stream: bool = False,
        change: Callable[[Store], object] | None = None,
    ) -> Any:
        """Send one message; `change`: change the session first, in the running gateway."""
        body = {"messages": [_user(text)], "stream": stream}
        return self.send(body, headers, change)

    def send(
        self,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        change: Callable[[Store], object] | None = None,
    ) -> Any:
        """Send a request."""
        [response] = self.send_all([(body, headers)], change)
        return response

    def send_all(
        self,
        requests: Sequence[tuple[Mapping[str, Any], Mapping[str, str]]],
        change: Callable[[Store], object] | None = None,
    ) -> list[Any]:
        """Send requests, given as body and headers, to the same running gateway."""
        with ExitStack() as stack:
            served = stack.enter_context(
                Served(
                    self.where, ScriptedModel(self._answer), spec=SPEC, ttl=HOURS, tools=self.tools
                )
            )
            client = stack.enter_context(served.client())
            if change is not None:
                change(served.loop.registry.agent().store)
            responses = []
            for body, headers in requests:
                responses.append(
                    client.post(
                        "/v1/chat/completions", json=body, headers={"X-Session-Key": KEY, **headers}
                    )
                )
                served.quiet()
            return responses

    def text(self, response: Any) -> str:
        """Return the text of a complete answer."""
        text: str = response.json()["choices"][0]["message"]["content"]
        return text


@pytest.fixture(params=["jsonl", "sqlite", "postgres"])
def gateway(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Gateway]:
    """A gateway with two answered requests, on each engine."""
    with new_place(request.param, tmp_path, request) as where:
        gateway = Gateway(where)
        bodies = [{"messages": [_user(text)]} for text in (PIN, EVEREST)]
        responses = gateway.send_all([(bodies[0], _key(1)), (bodies[1], _key(2))])
        answers = [gateway.text(response) for response in responses]
        assert answers == [f"to {PIN}", f"to {EVEREST}"]
        gateway.asked.clear()
        yield gateway


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _key(number: int) -> dict[str, str]:
    return {"Idempotency-Key": f"k{number}"}


def _keep(store: Store) -> None:
    del store


def _truncate(store: Store) -> None:
    store.truncate_history(KEY, 2)


def _summarize(store: Store) -> None:
    store.checkpoint(KEY, summary="They talked.", upto=4)


def _archive(store: Store) -> None:
    store.clear(KEY)
    store.compact(KEY)


def _damage(store: Store) -> None:
    del store  # the test damages the file of the closed store


CHANGES = pytest.mark.parametrize("change", [_keep, _truncate, _summarize, _archive])


@pytest.mark.quick(4)
@CHANGES
@pytest.mark.parametrize("stream", [False, True])
def test_retry_gets_its_answer_also_if_it_is_hidden_or_archived(
    gateway: Gateway, change: Callable[[Store], None], stream: bool
) -> None:
    response = gateway.post(PIN, _key(1), stream=stream, change=change)
    assert response.status_code == 200
    if stream:
        assert f'"content":"to {PIN}"' in response.text
        assert "data: [DONE]" in response.text
    else:
        assert gateway.text(response) == f"to {PIN}"
    assert gateway.asked == []


@pytest.mark.quick(4)
@CHANGES
@pytest.mark.parametrize("stream", [False, True])
def test_retry_of_a_damaged_answer_is_an_error_and_no_other_answer(
    gateway: Gateway, change: Callable[[Store], None], stream: bool
) -> None:
    with open_store(gateway.where) as store:
        change(store)
    damage_message(gateway.where, KEY, 2)
    response = gateway.post(PIN, _key(1), stream=stream)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "answer_unknown"
    assert gateway.asked == []
    assert gateway.text(gateway.post(EVEREST, _key(2))) == f"to {EVEREST}"
    assert gateway.asked == []


def test_retry_of_a_purged_request_is_a_new_request(gateway: Gateway) -> None:
    again = gateway.post(PIN, _key(1), change=lambda store: store.admin.purge(KEY, before=3))
    assert gateway.text(again) == f"to {PIN}"
    assert gateway.asked == [PIN]


@pytest.mark.quick(3)
@pytest.mark.parametrize("change", [_keep, _truncate, _summarize, _archive, _damage])
def test_retry_in_a_fork_is_a_new_request(
    gateway: Gateway, change: Callable[[Store], None]
) -> None:
    with open_store(gateway.where) as store:
        change(store)
    if change is _damage:
        damage_message(gateway.where, KEY, 2)
    with open_store(gateway.where) as store:
        store.fork(KEY, "fork")
    in_fork = {**_key(1), "X-Session-Key": "fork"}
    for _ in range(2):
        assert gateway.text(gateway.post("Other?", in_fork)) == "to Other?"
    assert gateway.post(PIN, in_fork).status_code == 409
    assert gateway.asked == ["Other?"]
    if change is not _damage:
        assert gateway.text(gateway.post(PIN, _key(1))) == f"to {PIN}"
    else:
        assert gateway.post(PIN, _key(1)).status_code == 500
    assert gateway.asked == ["Other?"]


@pytest.mark.parametrize("stream", [False, True])
def test_retry_is_an_error_while_the_store_cannot_be_read(gateway: Gateway, stream: bool) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StoreUnavailable("the network is down for a moment")

    def hide_and_break(store: Store) -> None:
        store.truncate_history(KEY, 2)
        store.get_history = fail  # type: ignore[method-assign, assignment]

    response = gateway.post(PIN, _key(1), stream=stream, change=hide_and_break)
    assert response.status_code == 503
    assert gateway.asked == []
    assert gateway.text(gateway.post(PIN, _key(1))) == f"to {PIN}"
    assert gateway.asked == []


def test_retry_marked_by_the_client_gets_an_answer_that_was_hidden_meanwhile(
    gateway: Gateway,
) -> None:
    first, again = ({"x-stainless-retry-count": count} for count in "01")
    asked = "And K2?"
    # The receipt of the first answer is taken back: its client went away before it arrived.
    assert gateway.text(gateway.post(asked, first)) == f"to {asked}"

    def lose_receipt(store: Store) -> None:
        store.set_meta(KEY, last_response=None)
        store.clear(KEY)

    assert gateway.text(gateway.post(asked, again, change=lose_receipt)) == f"to {asked}"
    assert gateway.asked == [asked]
    # After its receipt, the same words are a new message.
    response = gateway.post(asked, again, change=lambda store: store.clear(KEY))
    assert gateway.text(response) == f"to {asked}"
    assert gateway.asked == [asked, asked]


def test_message_sent_again_gets_its_answer_or_an_error(gateway: Gateway) -> None:
    def send(text: str, id: str) -> Any:
        with (
            Served(gateway.where, ScriptedModel(["never"]), spec=SPEC, ttl=HOURS) as served,
            served.client() as client,
        ):
            return client.post(f"/v1/sessions/{KEY}/messages", json={"content": text, "id": id})

    with open_store(gateway.where) as store:
        store.checkpoint(KEY, summary="They talked.", upto=4)
    again = send(PIN, "other")
    assert again.json()["answer"] == "never"
    again = send(PIN, "other")
    assert (again.json()["outcome"], again.json()["answer"]) == ("again", "never")
    refused = send("Other words.", "other")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "once_conflict")
    damage_message(gateway.where, KEY, 6)
    unknown = send(PIN, "other")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (500, "answer_unknown")


@pytest.mark.quick(4)
@CHANGES
@pytest.mark.parametrize("sends_all", [False, True], ids=["one message", "whole history"])
def test_retry_of_a_tool_result_gets_its_own_answer(
    gateway: Gateway, change: Callable[[Store], None], sends_all: bool
) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [CLOCK_CALL]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "noon"}
    answer = {"role": "assistant", "content": "to noon"}
    history: list[dict[str, Any]] = []
    for text in (PIN, EVEREST):
        history += [_user(text), {"role": "assistant", "content": f"to {text}"}]

    def send(*new: dict[str, Any], number: int, change: Any = None) -> Any:
        messages = [*history, *new] if sends_all else new[-1:]
        body = {"messages": messages, "tools": [CLOCK]}
        return gateway.send(body, _key(number), change)

    called = send(_user(ASK_CLOCK), number=3).json()["choices"][0]
    assert called["finish_reason"] == "tool_calls"
    asked = [_user(ASK_CLOCK), call, result]
    assert gateway.text(send(*asked, number=4)) == "to noon"
    assert gateway.text(send(*asked, answer, _user("And K2?"), number=5)) == "to And K2?"
    gateway.asked.clear()
    before: list[int] = []

    def change_and_count(store: Store) -> None:
        change(store)
        before.append(store.info(KEY).visible)

    assert gateway.text(send(*asked, number=4, change=change_and_count)) == "to noon"
    assert gateway.asked == []
    with open_store(gateway.where) as store:
        assert [store.info(KEY).visible] == before


@pytest.mark.parametrize("headers", [{}, {"x-stainless-retry-count": "1"}], ids=["plain", "retry"])
def test_repeated_tool_result_gets_no_answer_to_a_later_question(
    gateway: Gateway, headers: Mapping[str, str]
) -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": "noon"}
    body = {"messages": [result], "tools": [CLOCK]}
    first = headers and {"x-stainless-retry-count": "0"}
    asked = {"messages": [_user(ASK_CLOCK)], "tools": [CLOCK]}
    gateway.send_all([(asked, first), (body, first), ({"messages": [_user("And K2?")]}, {})])
    gateway.asked.clear()
    assert gateway.text(gateway.send(body, headers)) == "to noon"
    assert gateway.asked == []


def test_same_history_again_is_an_error_if_its_answer_is_damaged(gateway: Gateway) -> None:
    history = [_user(PIN), {"role": "assistant", "content": f"to {PIN}"}, _user(EVEREST)]
    damage_message(gateway.where, KEY, 4)
    response = gateway.send({"messages": history}, {})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "answer_unknown")
    assert gateway.asked == []


def test_changed_conversation_is_answered_if_the_last_answer_is_damaged(gateway: Gateway) -> None:
    history = [_user(PIN), {"role": "assistant", "content": f"to {PIN}"}, _user("And K2?")]
    damage_message(gateway.where, KEY, 4)
    assert gateway.text(gateway.send({"messages": history}, {})) == "to And K2?"


def test_retry_of_a_failed_second_answer_does_not_get_the_rejected_one(gateway: Gateway) -> None:
    history = [_user(PIN), {"role": "assistant", "content": f"to {PIN}"}, _user(EVEREST)]
    gateway.is_down = True
    for _ in range(2):
        assert gateway.send({"messages": history}, _key(3)).status_code == 503
    gateway.is_down = False
    gateway.asked.clear()
    for _ in range(2):
        answered = gateway.send({"messages": history}, _key(3))
        assert gateway.text(answered) == f"to {EVEREST}"
    assert gateway.asked == [EVEREST]
    with open_store(gateway.where) as store:
        assert [message.seq for message in store.get_history(KEY)] == [1, 2, 3, 5]


def test_repeated_request_gets_the_same_tool_calls_again(gateway: Gateway) -> None:
    history = [_user(PIN), {"role": "assistant", "content": f"to {PIN}"}, _user(EVEREST)]
    history += [{"role": "assistant", "content": f"to {EVEREST}"}, _user(ASK_CLOCK)]
    body = {"messages": history, "tools": [CLOCK]}
    answers = [gateway.send(body, _key(3)).json()["choices"][0] for _ in range(3)]
    assert answers[0]["message"]["tool_calls"][0]["id"] == "c1"
    assert answers == [answers[0]] * 3
    assert gateway.asked == [ASK_CLOCK]


@pytest.mark.quick(3)
@pytest.mark.parametrize("kept", [1, 2])
def test_marked_retry_of_a_client_with_a_part_of_the_history_gets_its_answer(
    gateway: Gateway, kept: int
) -> None:
    sent = [{"role": "assistant", "content": f"to {EVEREST}"}, _user("And K2?")]
    sent = [_user(EVEREST), *sent][-kept - 1 :]
    body = {"messages": sent}
    assert gateway.text(gateway.send(body, {"x-stainless-retry-count": "0"})) == "to And K2?"

    def lose_receipt(store: Store) -> None:
        store.set_meta(KEY, last_response=None)

    again = gateway.send(body, {"x-stainless-retry-count": "1"}, lose_receipt)
    assert gateway.text(again) == "to And K2?"
    assert gateway.asked == ["And K2?"]
    with open_store(gateway.where) as store:
        assert store.info(KEY).visible == 6


@pytest.mark.quick(3)
@pytest.mark.parametrize("change", [_keep, _truncate, _damage])
def test_retry_gets_all_texts_of_a_turn_or_an_error(
    gateway: Gateway, change: Callable[[Store], None]
) -> None:
    parts: list[Any] = [{"content": "It is 8848 m.", "tool_calls": [LOOK_CALL]}, "Sure."]
    gateway.scripted = list(parts)
    first = gateway.text(gateway.post("How high?", _key(3)))
    assert first == "It is 8848 m.\n\nSure."
    if change is _damage:
        damage_message(gateway.where, KEY, 6)
        unknown = gateway.post("How high?", _key(3))
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (500, "answer_unknown")
    else:
        assert gateway.text(gateway.post("How high?", _key(3), change=change)) == first
    assert gateway.asked == ["How high?", gateway.asked[-1]]


def test_retry_of_several_purged_messages_is_a_new_request(gateway: Gateway) -> None:
    first = {"messages": [_user("How high is K2?"), _user("And its name?")]}
    gateway.send(first, _key(3))
    assert gateway.text(gateway.post("Other?", _key(4))) == "to Other?"
    gateway.asked.clear()
    with open_store(gateway.where) as store:
        store.admin.purge(KEY, before=8)
    for _ in range(2):
        assert gateway.text(gateway.send(first, _key(3))) == "to And its name?"
    assert gateway.asked == ["And its name?"]


def test_retry_of_a_message_that_was_passed_over_gets_no_later_answer(gateway: Gateway) -> None:
    gateway.is_down = True
    assert gateway.post("Lost?", _key(3)).status_code == 503
    gateway.is_down = False
    with open_store(gateway.where) as store:
        store.admin.hide(KEY, 5, 5)
    assert gateway.text(gateway.post("Later?", _key(4))) == "to Later?"
    with open_store(gateway.where) as store:
        store.undo(KEY)
    gateway.asked.clear()
    assert gateway.text(gateway.post("Lost?", _key(3))) == HIDDEN_UNANSWERED_TEXT
    assert gateway.asked == []


def test_marked_retry_of_a_hidden_message_is_not_answered(gateway: Gateway) -> None:
    gateway.is_down = True
    assert gateway.post("Lost?", {"x-stainless-retry-count": "0"}).status_code == 503
    gateway.is_down = False
    with open_store(gateway.where) as store:
        store.admin.hide(KEY, 5, 5)
    gateway.asked.clear()
    for number in ("1", "2"):
        again = gateway.post("Lost?", {"x-stainless-retry-count": number})
        assert gateway.text(again) == HIDDEN_UNANSWERED_TEXT
    assert gateway.asked == []


def test_retry_after_a_turn_with_hundreds_of_messages_gets_its_answer(gateway: Gateway) -> None:
    calls = [{**LOOK_CALL, "id": f"l{number}"} for number in range(210)]
    gateway.scripted = [{"tool_calls": calls}]
    history = [_user(PIN), {"role": "assistant", "content": f"to {PIN}"}, _user(EVEREST)]
    history += [{"role": "assistant", "content": f"to {EVEREST}"}, _user("How high?")]
    body = {"messages": history}
    assert gateway.text(gateway.send(body, _key(3))) == "to seen"
    gateway.asked.clear()
    assert gateway.text(gateway.send(body, _key(3))) == "to seen"
    assert "How high?" not in gateway.asked


def test_retry_after_a_kill_while_an_answer_was_replaced_gets_the_new_answer(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = [_user(PIN), {"role": "assistant", "content": f"to {PIN}"}, _user(EVEREST)]
    with open_store(gateway.where) as store:
        engine: Any = type(store)
    set_history = engine.set_history

    def set_history_and_fail(*arguments: Any, **named: Any) -> None:
        set_history(*arguments, **named)
        raise MaybeStored("the process is killed")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "set_history", set_history_and_fail)
        assert gateway.send({"messages": history}, _key(3)).status_code == 503

    def wait_until_resumed(store: Store) -> None:
        end = time.monotonic() + 30
        while store.info(KEY).last_seq < 5 and time.monotonic() < end:
            time.sleep(0.01)

    gateway.asked.clear()
    again = gateway.send({"messages": history}, _key(3), wait_until_resumed)
    assert gateway.text(again) == f"to {EVEREST}"
    assert gateway.asked == [EVEREST]
    with open_store(gateway.where) as store:
        assert [message.seq for message in store.get_history(KEY)] == [1, 2, 3, 5]


def test_retry_finds_its_message_if_another_client_stored_one_after_it(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = [_user(PIN), {"role": "assistant", "content": f"to {PIN}"}, _user(EVEREST)]
    history += [
        {"role": "assistant", "content": f"to {EVEREST}"},
        _user("And K2?"),
        _user("Please"),
    ]
    with open_store(gateway.where) as store:
        engine: Any = type(store)
    add_messages = engine.add_messages

    def add_and_let_another_client_store(self: Any, *arguments: Any, **named: Any) -> Any:
        seqs = add_messages(self, *arguments, **named)
        self.add_full_message(KEY, mark_received(_user("Something else")))
        return seqs

    gateway.is_down = True
    with monkeypatch.context() as patched:
        patched.setattr(engine, "add_messages", add_and_let_another_client_store)
        assert gateway.send({"messages": history}, _key(3)).status_code == 503
    gateway.is_down = False
    with open_store(gateway.where) as store:
        store.admin.hide(KEY, 7, 7)
    assert gateway.text(gateway.send({"messages": history}, _key(3))) == "to Please"


def test_retry_after_a_replacement_that_failed_replaces_the_answer(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = [_user(PIN), {"role": "assistant", "content": f"to {PIN}"}, _user(EVEREST)]
    with open_store(gateway.where) as store:
        engine: Any = type(store)

    def fail(*arguments: Any, **named: Any) -> None:
        del arguments, named
        raise StoreUnavailable("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "set_history", fail)
        assert gateway.send({"messages": history}, _key(3)).status_code == 503
    gateway.asked.clear()
    for _ in range(2):
        assert gateway.text(gateway.send({"messages": history}, _key(3))) == f"to {EVEREST}"
    assert gateway.asked == [EVEREST]
    with open_store(gateway.where) as store:
        assert [message.seq for message in store.get_history(KEY)] == [1, 2, 3, 5]


def test_failed_command_runs_if_it_is_sent_again(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **named: Any) -> None:
        del arguments, named
        raise StoreUnavailable("the network is down for a moment")

    with (
        Served(gateway.where, ScriptedModel([]), spec=SPEC, ttl=HOURS) as served,
        served.client() as client,
    ):
        store = served.loop.registry.agent().store

        def send() -> Any:
            return client.post(
                f"/v1/sessions/{KEY}/messages", json={"content": "/clear", "id": "c"}
            )

        with monkeypatch.context() as patched:
            patched.setattr(store, "lease", fail)
            assert send().status_code == 503
        assert store.info(KEY).visible == 4
        assert send().json()["outcome"] == "command"
        assert store.info(KEY).visible == 0
        assert send().json()["outcome"] == "again"


def test_retry_gets_all_texts_of_a_turn_during_which_a_message_arrived(gateway: Gateway) -> None:
    @tool(name="look")
    def look_while_a_message_arrives() -> str:
        """Look it up."""
        with open_store(gateway.where) as store:
            store.add_full_message(KEY, mark_received(_user("And?")))
        return "seen"

    gateway.tools = [look_while_a_message_arrives]
    gateway.scripted = [{"content": "I look.", "tool_calls": [LOOK_CALL]}, "Done."]
    first = gateway.text(gateway.post("How high?", _key(3)))
    assert first == "I look.\n\nDone."
    assert gateway.text(gateway.post("How high?", _key(3))) == first


def test_retry_gets_no_text_of_an_attempt_that_was_hidden(gateway: Gateway) -> None:
    @tool(name="look")
    def look_while_the_model_goes_down() -> str:
        """Look it up."""
        gateway.is_down = True
        return "seen"

    parts: list[Any] = [{"content": "I look.", "tool_calls": [LOOK_CALL]}, "Done."]
    gateway.tools, gateway.scripted = [look_while_the_model_goes_down], list(parts)
    assert gateway.post("How high?", _key(3)).status_code == 503
    gateway.is_down, gateway.tools, gateway.scripted = False, [look], list(parts)

    with open_store(gateway.where) as store:
        store.set_history(KEY, store.get_history(KEY)[:5])  # as /retry does
    assert gateway.text(gateway.post("How high?", _key(3))) == "I look.\n\nDone."
    assert gateway.text(gateway.post("How high?", _key(3))) == "I look.\n\nDone."

    with open_store(gateway.where) as store:  # as a summary does
        hidden = [message.seq for message in store.get_history(KEY, full=True) if message.hidden]
        store.checkpoint(KEY, summary="They talked.", upto=store.info(KEY).last_seq)
        store.set_meta(KEY, taken_back=[[hidden[0], hidden[-1]]])
    assert gateway.text(gateway.post("How high?", _key(3))) == "I look.\n\nDone."
