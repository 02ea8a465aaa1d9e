"""A session as it happens: over SSE, from anywhere in it, without a gap or a repeat."""

import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import httpx2

from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from support.gateway.clients import wait_until
from support.gateway.served_gateway import Served


def _served(where: Path, **settings: Any) -> Served:
    return Served(where, ScriptedModel(lambda messages, _: f"{len(messages)}"), **settings)


def _events(
    client: httpx2.Client, path: str, count: int, **headers: str
) -> list[tuple[str, str, Any]]:
    """The first events of a stream: their id, kind and data."""
    with client.stream("GET", path, headers=headers) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(islice(_parsed(response), count))


def _parsed(response: httpx2.Response) -> Iterator[tuple[str, str, Any]]:
    fields: dict[str, str] = {}
    for line in response.iter_lines():
        name, _, value = line.partition(": ")
        if line:
            fields[name] = value
        elif "data" in fields:
            yield fields.get("id", ""), fields.get("event", ""), json.loads(fields["data"])
            fields = {}


def test_stream_continues_after_the_last_event_id(tmp_path: Path) -> None:
    with open_store(str(tmp_path)) as store:
        for number in range(5):
            store.add_message("a/b", "user", f"m{number}")
    with _served(tmp_path) as served, served.client() as client:
        path = "/v1/sessions/a%2Fb/events"
        first = _events(client, path, 2)
        assert [data["message"]["content"] for _, _, data in first] == ["m0", "m1"]
        rest = _events(client, path, 3, **{"Last-Event-ID": first[-1][0]})
        assert [data["seq"] for _, _, data in rest] == [3, 4, 5]
        assert [data["seq"] for _, _, data in _events(client, f"{path}?after=4", 1)] == [5]


def test_stream_has_messages_of_other_processes(tmp_path: Path) -> None:
    with _served(tmp_path) as served, served.client() as client:
        found: list[Any] = []

        def listen() -> None:
            with served.client() as own:
                found.extend(_events(own, "/v1/sessions/s/events", 3))

        listening = threading.Thread(target=listen)
        listening.start()
        with open_store(str(tmp_path)) as store:
            store.add_message("s", "system", "from outside")
        client.post("/v1/sessions/s/messages", json={"content": "Hello."})
        listening.join(30)
    assert [data["message"]["content"] for _, _, data in found] == ["from outside", "Hello.", "3"]


def _have(found: list[Any], count: int) -> bool:
    return len(found) >= count


def test_stream_has_all_messages_of_a_recreated_session(
    tmp_path: Path,
) -> None:
    with open_store(str(tmp_path)) as store:
        store.add_messages("s", [{"role": "assistant", "content": f"old {n}"} for n in range(3)])
        with _served(tmp_path) as served, served.client() as client:
            id = _events(client, "/v1/sessions/s/events", 3)[-1][0]
            store.delete("s")
            found: list[Any] = []

            def listen() -> None:
                with served.client() as own:
                    headers = {"Last-Event-ID": id}
                    found.extend(_events(own, "/v1/sessions/s/events", 6, **headers))

            listening = threading.Thread(target=listen)
            listening.start()
            wait_until(lambda: served.gateway.streams.in_use == 1)
            for number in range(5):
                store.add_message("s", "assistant", f"new {number}")
            listening.join(60)
    assert [kind for _, kind, _ in found] == ["deleted"] + ["message"] * 5
    assert [data["seq"] for _, kind, data in found if kind == "message"] == [1, 2, 3, 4, 5]


def test_stream_of_a_recreated_session_starts_again(tmp_path: Path) -> None:
    with open_store(str(tmp_path)) as store:
        store.add_message("s", "user", "old")
        with _served(tmp_path) as served, served.client() as client:
            [(id, _, _)] = _events(client, "/v1/sessions/s/events", 1)
            store.delete("s")
            store.add_message("s", "user", "new")
            found = _events(client, "/v1/sessions/s/events", 2, **{"Last-Event-ID": id})
    assert [(kind, data.get("seq")) for _, kind, data in found] == [
        ("deleted", None),
        ("message", 1),
    ]


def test_session_changes_are_streamed_on_request(tmp_path: Path) -> None:
    with open_store(str(tmp_path)) as store:
        for number in range(4):
            store.add_message("s", "assistant", f"m{number}")
        with _served(tmp_path) as served:
            found: list[Any] = []
            begun = threading.Event()

            def listen() -> None:
                path = "/v1/sessions/s/events?changes=true"
                with served.client() as own, own.stream("GET", path) as response:
                    for event in _parsed(response):
                        found.append(event)
                        if len(found) == 4:
                            begun.set()
                        if len(found) == 9:
                            return

            listening = threading.Thread(target=listen)
            listening.start()
            assert begun.wait(30)
            steps: list[Callable[[], object]] = [
                lambda: store.checkpoint("s", summary="before", upto=2),
                lambda: store.undo("s"),
                lambda: store.admin.hide("s", 3, 3),
                lambda: store.set_summary("s", "another"),
                lambda: store.set_meta("s", title="A name"),
            ]
            for expected, change in enumerate(steps, start=5):
                change()
                wait_until(partial(_have, found, expected))
            listening.join(30)
    assert [kind for _, kind, _ in found] == ["message"] * 4 + ["change"] * 5
    told = [data for _, kind, data in found if kind == "change"]
    assert [(one["summary"], one["visible"]) for one in told] == [
        ("before", 2),
        ("", 4),
        ("", 3),
        ("another", 3),
        ("another", 3),
    ]


def test_shutdown_ends_streams_immediately(tmp_path: Path) -> None:
    """At once, and not when the time is over that answers in flight have."""
    with _served(tmp_path, shutdown_timeout=3_600.0) as served, served.client() as client:
        client.post("/v1/sessions/s/messages", json={"content": "Hello."})
        heard = threading.Event()
        ended: list[int] = []

        def listen() -> None:
            with served.client() as own, own.stream("GET", "/v1/sessions/s/events") as response:
                for count, _ in enumerate(_parsed(response), start=1):
                    if count == 2:
                        heard.set()
                ended.append(response.status_code)

        listening = threading.Thread(target=listen)
        listening.start()
        assert heard.wait(30)
        served.ask_to_end()
        try:
            wait_until(lambda: ended == [200])
        finally:
            served.hurry()
    listening.join(30)


def test_streams_above_the_limit_are_rejected_immediately(tmp_path: Path) -> None:
    with _served(tmp_path, max_streams=1) as served, served.client() as client:
        with client.stream("GET", "/v1/sessions/s/events") as open_one:
            assert open_one.status_code == 200
            refused = client.get("/v1/sessions/s/events")
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
        # Once it is gone, the next one has its place.
        wait_until(lambda: served.gateway.streams.in_use == 0)
        with client.stream("GET", "/v1/sessions/s/events") as next_one:
            assert next_one.status_code == 200


def test_all_listeners_of_a_session_get_all_messages(tmp_path: Path) -> None:
    count, listeners = 60, 6
    with open_store(str(tmp_path)) as store, _served(tmp_path) as served:
        found: list[list[Any]] = [[] for _ in range(listeners)]

        def listen(heard: list[Any]) -> None:
            with served.client() as own:
                heard.extend(_events(own, "/v1/sessions/s/events", count))

        threads = [threading.Thread(target=listen, args=(one,)) for one in found]
        for thread in threads:
            thread.start()
        wait_until(lambda: served.gateway.streams.in_use == listeners)
        for number in range(count):
            store.add_message("s", "assistant", f"m{number}")
        wait_until(lambda: not any(thread.is_alive() for thread in threads))
    for heard in found:
        assert [data["seq"] for _, _, data in heard] == list(range(1, count + 1))


def test_invalid_last_event_id_is_rejected(tmp_path: Path) -> None:
    with _served(tmp_path) as served, served.client() as client:
        response = client.get("/v1/sessions/s/events", headers={"Last-Event-ID": "x"})
    assert response.status_code == 400
    assert "Last-Event-ID" in response.json()["error"]["message"]
