"""A deleted session comes back only if a client asks for it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from stenolog.testing.scripted_model import ScriptedModel
from support.gateway.served_gateway import Served


@pytest.fixture(params=["jsonl", "sqlite"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[httpx2.Client]:
    """Return a client of a gateway whose session "work" was deleted."""
    where = tmp_path if request.param == "jsonl" else f"sqlite:{tmp_path / 'steno.db'}"
    model = ScriptedModel(lambda messages, _: f"to {messages[-1]['content']}")
    with Served(where, model) as served, served.client() as client:
        assert _say(client, "Hello.").status_code == 200
        assert client.delete("/v1/sessions/work").status_code == 200
        yield client


def _say(client: httpx2.Client, content: str, key: str = "work", **more: Any) -> Any:
    return client.post(f"/v1/sessions/{key}/messages", json={"content": content, **more})


def _chat(client: httpx2.Client, metadata: Mapping[str, Any] | None = None, **headers: str) -> Any:
    body = {"messages": [{"role": "user", "content": "Again."}], "metadata": metadata}
    given = {"X-Session-Key": "work", **headers}
    return client.post("/v1/chat/completions", json=body, headers=given)


def test_message_to_a_deleted_session_is_rejected(client: httpx2.Client) -> None:
    for refused in (_say(client, "Again."), _say(client, "/help"), _chat(client)):
        assert refused.status_code == 410
        assert refused.json()["error"]["code"] == "session_deleted"
        assert "new_session" in refused.json()["error"]["message"]
    assert client.get("/v1/sessions/work").status_code == 404


def test_client_can_ask_for_a_new_session_with_the_key_of_a_deleted_one(
    client: httpx2.Client,
) -> None:
    assert _say(client, "Again.", new_session=True).json()["answer"] == "to Again."
    # The new session exists, so later messages need not ask for it.
    assert _say(client, "More.").status_code == 200


@pytest.mark.parametrize(
    ("metadata", "headers"),
    [({"new_session": True}, {}), ({"new_session": "true"}, {}), (None, {"X-Session-New": "true"})],
)
def test_chat_client_can_ask_for_a_new_session(
    metadata: Any, headers: dict[str, str], client: httpx2.Client
) -> None:
    answered = _chat(client, metadata, **headers)
    assert answered.json()["choices"][0]["message"]["content"] == "to Again."


def test_new_session_must_be_true_or_false(client: httpx2.Client) -> None:
    assert _chat(client, {"new_session": "yes"}).status_code == 400
    assert _chat(client, None, **{"X-Session-New": "1"}).status_code == 400


def test_restored_session_takes_messages(client: httpx2.Client) -> None:
    assert client.post("/v1/sessions/work/restore", json={}).status_code == 200
    assert _say(client, "Again.").status_code == 200


def test_new_key_takes_messages(client: httpx2.Client) -> None:
    assert _say(client, "Hello.", key="other").status_code == 200
