"""More than there is room for: refused at once and clearly, and it is over when it is over."""

import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stenolog.providers.openai_chat import OpenAIChat
from stenolog.stores.open_store import open_store
from stenolog.testing.model_server import ModelServer
from support.gateway.served_gateway import Served

CAPACITY = 4


def test_overload_is_rejected_immediately_and_the_gateway_recovers(
    tmp_path: Path,
) -> None:
    go_on = threading.Event()

    def answer(request: Any) -> str:
        del request
        go_on.wait(60)
        return "Here I am."

    with (
        ModelServer(answer) as model,
        Served(
            tmp_path, OpenAIChat("m", base_url=model.url, retries=0), max_turns=CAPACITY
        ) as served,
        served.client() as client,
        ThreadPoolExecutor(CAPACITY * 10) as crowd,
    ):

        def ask(number: int) -> int:
            body = {"messages": [{"role": "user", "content": "Hello."}]}
            headers = {"X-Session-Key": f"s{number}"}
            response = client.post("/v1/chat/completions", json=body, headers=headers)
            if response.status_code == 429:
                assert response.headers["retry-after"] == "1"
                assert response.json()["error"]["type"] == "rate_limit_error"
            return response.status_code

        asking = [crowd.submit(ask, number) for number in range(CAPACITY * 10)]
        try:
            # Nobody is answered yet: whoever has got a response was refused, without waiting.
            while sum(one.done() for one in asking) < CAPACITY * 9:
                assert all(one.result() == 429 for one in asking if one.done())
            assert client.get("/healthz").status_code == 200
        finally:
            go_on.set()
        assert Counter(one.result() for one in asking) == {429: CAPACITY * 9, 200: CAPACITY}
        assert served.gateway.turns.in_use == 0
        assert ask(99) == 200
    with open_store(str(tmp_path), read_only=True) as store:
        # What was refused was not begun.
        assert len(store.list_sessions()) == CAPACITY + 1


def test_slot_of_a_disconnected_client_is_released_after_its_turn(
    tmp_path: Path,
) -> None:
    go_on, asked = threading.Event(), threading.Event()

    def answer(request: Any) -> str:
        del request
        asked.set()
        go_on.wait(60)
        return "Here I am."

    with (
        ModelServer(answer) as model,
        Served(tmp_path, OpenAIChat("m", base_url=model.url, retries=0), max_turns=1) as served,
        served.client() as client,
    ):
        body = {"messages": [{"role": "user", "content": "Hello."}], "stream": True}
        path, headers = "/v1/chat/completions", {"X-Session-Key": "s"}
        going = threading.Thread(target=_leave, args=(served, body, asked))
        going.start()
        assert asked.wait(60)
        going.join(60)
        assert client.post(path, json=body, headers=headers).status_code == 429
        go_on.set()
        while served.gateway.turns.in_use:
            pass
        assert client.post(path, json=body, headers=headers).is_success
    with open_store(str(tmp_path), read_only=True) as store:
        # The turn of who has left came to its end all the same.
        assert [one.role for one in store.get_history("s")] == ["user", "assistant"] * 2


def _leave(served: Served, body: Any, asked: threading.Event) -> None:
    """Ask, and go away as soon as the model is at work."""
    with served.client() as client:
        request = client.build_request(
            "POST", "/v1/chat/completions", json=body, headers={"X-Session-Key": "s"}
        )
        host, _, port = served.url.removeprefix("http://").partition(":")
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        with socket.create_connection((host, int(port))) as line:
            line.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode())
            line.sendall(request.read())
            assert asked.wait(60)
