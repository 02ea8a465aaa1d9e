"""Tests webhooks behind a real server: signed messages are accepted, others learn nothing."""

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.types import Message

from stenolog.agent.active_sessions import TAKEN_OVER_TEXT
from stenolog.agent.loop import AgentLoop
from stenolog.agent.scheduler import CLOSING_TEXT
from stenolog.agent.turn_events import Answer
from stenolog.channels.webhook import (
    MAX_BODY_BYTES,
    MAX_BODY_SECONDS,
    MAX_PENDING_BODIES,
    MAX_SIGNATURE_AGE_SECONDS,
    SIGNATURE_HEADER,
    PendingBodies,
    Webhook,
    is_signed,
    make_signature,
)
from stenolog.errors import (
    LeaseLost,
    ModelRefused,
    ModelUnavailable,
    StenologError,
    StoreClosed,
    StoreUnavailable,
)
from stenolog.settings.values import WebhookSettings
from stenolog.testing.scripted_model import ScriptedModel
from support.agents import bodies
from support.bots import agent_and_channels, mark, webhook_settings

PAGE: Final = Path(__file__).parents[3] / "docs" / "howto" / "chat-apps.md"
SECRET: Final = "0123456789abcdef-both-sides"
KEY: Final = "webhook-ci:alice"


class Hook:
    """A program that sends messages."""

    def __init__(self, loop: AgentLoop, client: httpx2.AsyncClient, url: str) -> None:
        self.loop = loop
        self.client = client
        self.url = url

    async def post(
        self,
        *,
        secret: str = SECRET,
        at: float | None = None,
        name: str = "ci",
        raw: bytes | None = None,
        header: str | None = None,
        **fields: Any,
    ) -> httpx2.Response:
        """Send a message with a valid signature, except for the given arguments."""
        given = {"sender": "alice", "text": "hello", "id": "1", **fields}
        body = json.dumps(given).encode() if raw is None else raw
        signed = make_signature(secret, body, signed_at=int(time.time() if at is None else at))
        headers = {SIGNATURE_HEADER: signed if header is None else header}
        return await self.client.post(f"{self.url}/webhooks/{name}", content=body, headers=headers)


@asynccontextmanager
async def served(
    folder: Path,
    script: Iterable[Any] | ScriptedModel,
    *,
    store: str = "jsonl",
    **fields: Any,
) -> AsyncIterator[Hook]:
    """Serve the webhook `ci`."""
    settings = webhook_settings(SECRET, **fields)
    async with agent_and_channels(folder, settings, script, store=store) as (loop, channels):
        app = Starlette(routes=channels.routes)
        config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", ws="none")
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        await channels.start()
        serving = asyncio.create_task(server.serve())
        try:
            while not server.started:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.002)
            port = server.servers[0].sockets[0].getsockname()[1]
            async with httpx2.AsyncClient(trust_env=False, timeout=20, verify=False) as client:
                yield Hook(loop, client, f"http://127.0.0.1:{port}")
        finally:
            server.should_exit = True
            await serving


async def test_a_signed_message_is_answered_in_the_response(tmp_path: Path) -> None:
    async with served(tmp_path, ["Hello, alice."]) as hook:
        response = await hook.post()
        assert response.status_code == 200
        told = response.json()
        assert (told["answer"], told["session"], told["seq"]) == ("Hello, alice.", KEY, 2)
        assert [body["content"] for body in bodies(hook.loop, KEY)] == [
            "hello",
            "Hello, alice.",
        ]


@pytest.mark.parametrize(
    "error",
    [StoreClosed(CLOSING_TEXT), LeaseLost(KEY, 1)],
    ids=["closing", "taken over"],
)
async def test_turn_without_an_answer_asks_the_sender_to_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: StenologError
) -> None:
    words = TAKEN_OVER_TEXT if isinstance(error, LeaseLost) else str(error)

    async def unanswered(*values: Any, **named: Any) -> Answer:
        del values, named
        return Answer(key=KEY, text=words, outcome="failed", error=error)

    async with served(tmp_path, ["Hello, alice."]) as hook:
        with monkeypatch.context() as patched:
            patched.setattr(AgentLoop, "handle", unanswered)
            response = await hook.post()
        assert response.status_code == 503
        assert response.headers["Retry-After"] == "1"
        assert response.json()["error"]["code"] == "not_answered"
        assert (await hook.post()).json()["answer"] == "Hello, alice."


async def test_unsigned_requests_are_rejected_and_do_not_reveal_webhooks(
    tmp_path: Path,
) -> None:
    model = ScriptedModel([])
    async with served(tmp_path, model) as hook:
        now = time.time()
        refused = [
            await hook.post(header=""),
            await hook.post(header="t=1,v1=00"),
            await hook.post(secret="another secret of 16"),
            await hook.post(at=now - MAX_SIGNATURE_AGE_SECONDS - 5),
            await hook.post(at=now + MAX_SIGNATURE_AGE_SECONDS + 5),
            await hook.post(name="unknown"),
            await hook.post(name="unknown", header=""),
            await hook.post(raw=b"not json", header=""),
        ]
        assert [one.status_code for one in refused] == [401] * len(refused)
        assert len({one.text for one in refused}) == 1
        error = refused[0].json()["error"]
        assert set(error) == {"message", "type", "code"}
        assert (error["type"], error["code"]) == ("authentication_error", "wrong_signature")
        assert hook.loop.registry.agent().sessions.list_sessions() == []
    assert model.asked == []


@pytest.mark.parametrize("store", ["jsonl", "sqlite"])
async def test_redelivered_message_is_recognized_after_the_chat_moved(
    store: str, tmp_path: Path
) -> None:
    async def check(hook: Hook) -> None:
        sessions = hook.loop.registry.agent().sessions
        there = {key: len(sessions.get_history(key)) for key in sessions.list_sessions()}
        for id, text, answer, place in (
            ("1", "pay the bill", "paid", 0),
            ("3", "and now?", "new", 2),
            ("6", "and then?", "newer", 5),
        ):
            again = await hook.post(id=id, text=text)
            assert again.status_code == 200
            told = again.json()
            found = (told["outcome"], told["answer"], told["session"])
            assert found == ("again", answer, places[place])
            assert (await hook.post(id=id, text="other words")).status_code == 409
            assert (await hook.post(id=id, text="/new")).status_code == 409
        after = {key: len(sessions.get_history(key)) for key in sessions.list_sessions()}
        assert after == there

    places: list[str] = []
    async with served(tmp_path, ["paid", "new", "newer"], store=store) as hook:
        said = [
            await hook.post(id="1", text="pay the bill"),
            await hook.post(id="2", text="/new"),
            await hook.post(id="3", text="and now?"),
            await hook.post(id="4", text=f"/resume {KEY}"),
            await hook.post(id="5", text="/new"),
            await hook.post(id="6", text="and then?"),
        ]
        assert [one.json()["outcome"] for one in said] == ["answered", "command"] * 2 + [
            "command",
            "answered",
        ]
        places.extend(one.json()["session"] for one in said)
        await check(hook)
    async with served(tmp_path, [], store=store) as hook:
        await check(hook)
    assert len({places[0], places[2], places[5]}) == 3


async def test_redelivered_webhook_command_does_not_run_again(tmp_path: Path) -> None:
    async def check(hook: Hook) -> None:
        for id, text in (("2", "/clear"), ("4", "/new"), ("5", "/new")):
            again = await hook.post(id=id, text=text)
            assert again.status_code == 200
            told = again.json()
            # The chat stays in the session that the last command chose.
            found = (told["outcome"], told["answer"], told["session"])
            assert found == ("again", "", keys[-1])
            assert (await hook.post(id=id, text="/help")).status_code == 409
            assert (await hook.post(id=id, text="words")).status_code == 409
        assert len(bodies(hook.loop, KEY)) == 2

    keys: list[str] = []
    async with served(tmp_path, ["hello"]) as hook:
        await hook.post(id="1")
        for id, text in (("2", "/clear"), ("3", "/undo"), ("4", "/new"), ("5", "/new")):
            first = await hook.post(id=id, text=text)
            assert first.json()["outcome"] == "command"
            keys.append(first.json()["session"])
        await check(hook)
    async with served(tmp_path, ["there"]) as hook:
        await check(hook)
        assert (await hook.post(id="6")).json()["session"] == keys[-1]


async def test_failed_webhook_command_runs_if_it_is_delivered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **named: Any) -> None:
        del arguments, named
        raise StoreUnavailable("the network is down for a moment")

    async with served(tmp_path, ["hello"]) as hook:
        await hook.post(id="1")
        with monkeypatch.context() as patched:
            patched.setattr(hook.loop.registry.agent().store, "lease", fail)
            failed = await hook.post(id="2", text="/clear")
            assert "storage is not available" in failed.json()["answer"]
        assert len(bodies(hook.loop, KEY)) == 2
        done = await hook.post(id="2", text="/clear")
        assert done.json()["outcome"] == "command"
        assert bodies(hook.loop, KEY) == []
        again = await hook.post(id="2", text="/clear")
        assert (again.json()["outcome"], again.json()["answer"]) == ("again", "")


async def test_message_id_in_a_shared_chat_belongs_to_one_sender(tmp_path: Path) -> None:
    async with served(tmp_path, ["a"], allow=("alice", "bob")) as hook:
        assert (await hook.post(id="1", chat="room")).status_code == 200
        assert (await hook.post(id="1", chat="room", sender="bob")).status_code == 409
        assert (await hook.post(id="1", chat="room")).json()["outcome"] == "again"


async def test_sender_not_on_the_allow_list_is_rejected(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, []) as hook:
        assert (await hook.post(sender="mallory")).status_code == 403
    async with served(tmp_path, [], allow=()) as hook:
        assert (await hook.post()).status_code == 403
        assert hook.loop.registry.agent().sessions.list_sessions() == []


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b'{"sender":"alice"}', b'{"sender":"alice","text":1,"id":"1"}', b"\xff"],
)
async def test_invalid_message_is_rejected(raw: bytes, tmp_path: Path) -> None:
    async with served(tmp_path, []) as hook:
        assert (await hook.post(raw=raw)).status_code == 400


async def test_too_large_body_is_rejected_with_or_without_a_content_length(tmp_path: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(3 * MAX_BODY_BYTES // 65_536):
            yield b"x" * 65_536

    async with served(tmp_path, []) as hook:
        told = await hook.post(raw=b"x" * (MAX_BODY_BYTES + 1))
        assert told.status_code == 413
        headers = {SIGNATURE_HEADER: make_signature(SECRET, b"", signed_at=int(time.time()))}
        url = f"{hook.url}/webhooks/ci"
        # The connection may be cut before the client reads the answer.
        with suppress(httpx2.WriteError):
            streamed = await hook.client.post(url, content=endless(), headers=headers)
            assert streamed.status_code == 413


async def test_threads_and_chats_have_separate_sessions(tmp_path: Path) -> None:
    async with served(tmp_path, ["a", "b", "c"], allow=("alice", "bob", "#room")) as hook:
        await hook.post(id="1", thread="42")
        await hook.post(id="2", chat="room")
        await hook.post(id="3", chat="room", sender="bob")
        assert (await hook.post(id="4", sender="#room")).status_code == 400
        keys = hook.loop.registry.agent().sessions.list_sessions()
        assert keys == ["webhook-ci:#room", "webhook-ci:42:alice"]


async def test_signature_example_in_the_docs_works(tmp_path: Path) -> None:
    [example] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    made: dict[str, Any] = {}
    exec(example, made)

    async with served(tmp_path, ["Hello."]) as hook:
        request = made["message"](
            f"{hook.url}/webhooks/ci", SECRET, sender="alice", text="hello", id="1"
        )
        response = await hook.client.post(
            request.full_url, content=request.data, headers=dict(request.header_items())
        )
        assert response.json()["answer"] == "Hello."


# --- with a reply_url ----------------------------------------------------------------------------


class _Receiver(ThreadingHTTPServer):
    """A server that receives answers for a program."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, Any], bool]] = []
        self.statuses: list[int] = []
        self.arrived = threading.Event()
        super().__init__(("127.0.0.1", 0), _Receives)


class _Receives(BaseHTTPRequestHandler):
    server: _Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        if status == 200:
            signed = is_signed(SECRET, body, self.headers[SIGNATURE_HEADER], now=time.time())
            self.server.got.append((json.loads(body), signed))
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()
        if status == 200:
            self.server.arrived.set()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def receiver() -> Iterator[_Receiver]:
    """Yield a program's server."""
    with _Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("statuses", [[], [429]])
async def test_answer_is_sent_signed_to_the_reply_url(
    statuses: list[int], receiver: _Receiver, tmp_path: Path
) -> None:
    receiver.statuses = statuses
    url = f"http://127.0.0.1:{receiver.server_port}/answers"
    async with served(tmp_path, ["Hello."], reply_url=url) as hook:
        for _ in range(2):
            response = await hook.post(id="9")
            assert response.status_code == 202
        assert await asyncio.to_thread(receiver.arrived.wait, 20)
        loop = hook.loop
        async with asyncio.timeout(20):
            while mark(loop, KEY)["mark"] != "sent":  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
    assert receiver.got == [({"sender": "alice", "id": "9", "text": "Hello."}, True)]


async def test_a_reply_url_on_this_machine_is_reached_without_a_proxy(
    receiver: _Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # no server listens there

    url = f"http://localhost:{receiver.server_port}/answers"
    hook = Webhook("ci", WebhookSettings(reply_url=url), SECRET)
    await hook.send({"channel": "webhook-ci", "sender": "alice"}, "Hello.")
    await hook.close()
    assert receiver.got == [({"sender": "alice", "text": "Hello."}, True)]


def _slow_head(name: str = "ci") -> bytes:
    """Return the head of a message that looks signed and has no body."""
    return (
        f"POST /webhooks/{name} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
        f"{SIGNATURE_HEADER}: {make_signature('guessed', b'', signed_at=int(time.time()))}\r\n\r\n"
    ).encode()


@asynccontextmanager
async def _connections(port: int, count: int, sent: bytes) -> AsyncIterator[list[Any]]:
    """Open connections one after the other, and send the same bytes over each."""
    opened = []
    try:
        for _ in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            await writer.drain()
            opened.append((reader, writer))
        yield opened
    finally:
        for _, writer in opened:
            writer.close()


async def test_slow_bodies_are_dropped_for_other_messages(tmp_path: Path) -> None:
    async with served(tmp_path, ["Hello, alice."]) as hook:
        port = int(hook.url.rpartition(":")[2])
        async with _connections(port, MAX_PENDING_BODIES + 8, _slow_head()) as slow:
            # The oldest ones are closed long before their timeout.
            for reader, _ in slow[:8]:
                assert b" 503 " in await asyncio.wait_for(reader.readline(), 30)
            assert (await hook.post()).json()["answer"] == "Hello, alice."


@pytest.mark.parametrize("sent", [_slow_head("unknown"), _slow_head().replace(b"t=", b"t=1")])
async def test_no_body_is_read_for_an_unknown_name_or_an_old_signature(
    sent: bytes, tmp_path: Path
) -> None:
    async with served(tmp_path, []) as hook:
        port = int(hook.url.rpartition(":")[2])
        async with _connections(port, 1, sent) as [(reader, _)]:
            assert b" 401 " in await asyncio.wait_for(reader.readline(), 30)


async def test_body_must_arrive_within_5_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_BODY_SECONDS == 5.0
    assert PendingBodies.__init__.__defaults__ == (MAX_PENDING_BODIES, MAX_BODY_SECONDS)
    monkeypatch.setattr(PendingBodies.__init__, "__defaults__", (MAX_PENDING_BODIES, 0.01))
    async with served(tmp_path, []) as hook:
        port = int(hook.url.rpartition(":")[2])
        async with _connections(port, 1, _slow_head()) as [(reader, _)]:
            assert b" 408 " in await asyncio.wait_for(reader.readline(), 30)


async def test_timed_out_body_frees_its_slot_immediately() -> None:
    pending = PendingBodies(limit=1)
    begun = asyncio.Event()
    first = asyncio.create_task(pending.read_body(_request(None, begun)))
    await begun.wait()
    [limit] = pending._timeouts
    limit.reschedule(asyncio.get_running_loop().time())
    await asyncio.sleep(0)
    assert limit.expired(), "its task has not run since"
    assert not first.done()
    assert await pending.read_body(_request(b"next")) == b"next"
    with pytest.raises(TimeoutError):
        await first


def _request(body: bytes | None, begun: asyncio.Event | None = None) -> Request:
    """Return a request with this body, or none at all; `begun` is set when it is read."""

    async def receive() -> Message:
        if begun is not None:
            begun.set()
        if body is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


INTERNAL: Final = "Large at http://127.0.0.1:28992/v1 answered 401: see http://10.0.0.7/internal"


class FailingModel(ScriptedModel):
    """A model whose server fails with details that users should not see."""

    def __init__(self, error: StenologError) -> None:
        super().__init__([])
        self._error = error

    async def stream(self, messages: Any, **how: Any) -> Any:
        """Fail."""
        del messages, how
        for error in [self._error]:
            raise error
        yield


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModelRefused(INTERNAL), "the model did not accept the request"),
        (ModelUnavailable(INTERNAL), "the model cannot be reached right now"),
    ],
)
@pytest.mark.parametrize("text", ["hello", "/retry"])
async def test_user_gets_a_short_error_and_the_log_has_the_details(
    error: StenologError,
    reason: str,
    text: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served(tmp_path, FailingModel(error)) as hook:
        if text == "/retry":
            await hook.post()
            caplog.clear()
        told = await hook.post(text=text, id="2")
        expected = f"I could not answer: {reason}. Your message is saved."
        assert told.json()["answer"] == expected
        assert INTERNAL in caplog.text
