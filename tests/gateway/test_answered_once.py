"""A request that is sent again to the gateway gets its own stored answer, or an error."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from stenolog.agent.spec import AgentSpec
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from support.damage import damage_message
from support.gateway.chat_turns import HOURS, new_place
from support.gateway.served_gateway import Served

KEY = "work"
PIN, EVEREST = "What is my PIN?", "How tall is Everest?"
SPEC = AgentSpec(memory=False, consolidation=False, tools=False)


class Gateway:
    """A gateway that is started for each step, and the number of questions to its model."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.asked: list[str] = []

    def _answer(self, messages: Sequence[Mapping[str, Any]], tools: object) -> str:
        del tools
        self.asked.append(messages[-1]["content"])
        return f"to {messages[-1]['content']}"

    def post(
        self,
        text: str,
        headers: Mapping[str, str],
        *,
        stream: bool = False,
        change: Callable[[Store], object] | None = None,
    ) -> Any:
        """Send a request; `change`: change the session first, in the running gateway."""
        with ExitStack() as stack:
            served = stack.enter_context(
                Served(self.where, ScriptedModel(self._answer), spec=SPEC, ttl=HOURS)
            )
            client = stack.enter_context(served.client())
            if change is not None:
                change(served.loop.registry.agent().store)
            body = {"messages": [{"role": "user", "content": text}], "stream": stream}
            response = client.post(
                "/v1/chat/completions", json=body, headers={"X-Session-Key": KEY, **headers}
            )
            served.quiet()
            return response

    def text(self, response: Any) -> str:
        """Return the text of a complete answer."""
        text: str = response.json()["choices"][0]["message"]["content"]
        return text


@pytest.fixture(params=["jsonl", "sqlite", "postgres"])
def gateway(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Gateway]:
    """A gateway with two answered requests, on each engine."""
    with new_place(request.param, tmp_path, request) as where:
        gateway = Gateway(where)
        for number, text in enumerate((PIN, EVEREST), start=1):
            response = gateway.post(text, _key(number))
            assert gateway.text(response) == f"to {text}"
        gateway.asked.clear()
        yield gateway


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


CHANGES = pytest.mark.parametrize("change", [_keep, _truncate, _summarize, _archive])


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
