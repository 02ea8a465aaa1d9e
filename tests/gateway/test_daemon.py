"""`steno serve` from its start to its end: what it leaves behind, and what it does not."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import httpx2
import pytest

from stenolog.catalog.message_metadata import mark_received
from stenolog.cli.config import AgentOptions
from stenolog.cli.serve import _serve
from stenolog.errors import StenologError
from stenolog.settings.loading import load_effective_settings
from stenolog.stores.jsonl import JSONLStore
from stenolog.stores.open_store import open_store
from stenolog.testing.model_server import ModelServer
from support.gateway.clients import wait_until
from support.gateway.gateway_process import TOKEN, Process


class _Waiting:
    """A model that answers when it is told to."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, request: Any) -> str:
        self.asked.set()
        self.go_on.wait(30)
        return f"You said: {request['messages'][-1]['content']}"


@pytest.fixture
def waiting() -> Iterator[tuple[_Waiting, str]]:
    script = _Waiting()
    with ModelServer(script) as server:
        yield script, server.url
        script.go_on.set()


@pytest.fixture
def gateway(tmp_path: Path, waiting: tuple[_Waiting, str]) -> Iterator[Process]:
    workspace = str(tmp_path / "workspace")
    process = Process(tmp_path / "gateway", sessions=workspace, model=waiting[1])
    yield process.start()
    process.close()


class _Asking(threading.Thread):
    """One question, and what came of it."""

    def __init__(self, url: str, key: str = "s") -> None:
        super().__init__()
        self._url = url
        self._key = key
        self.status = 0
        self.answer: Any = None

    def run(self) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}", "X-Session-Key": self._key}
        body = {"messages": [{"role": "user", "content": "Hello."}]}
        with httpx2.Client(headers=headers, timeout=60) as client:
            response = client.post(f"{self._url}/v1/chat/completions", json=body)
        self.status = response.status_code
        self.answer = response.json()


def _is_listening(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/healthz").is_success
    except httpx2.TransportError:
        return False


def _log(place: Path) -> list[tuple[str, Any]]:
    with open_store(str(place / "workspace"), read_only=True) as store:
        return [(one.role, one.content) for one in store.get_history("s")]


@pytest.mark.slow
def test_first_signal_waits_for_running_answers(
    tmp_path: Path, gateway: Process, waiting: tuple[_Waiting, str]
) -> None:
    asking = _Asking(gateway.url)
    asking.start()
    assert waiting[0].asked.wait(30)
    gateway.signal(signal.SIGTERM)
    # Nobody new is let in, while the answer is being made.
    wait_until(lambda: not _is_listening(gateway.url))
    waiting[0].go_on.set()
    asking.join(30)
    assert gateway.ended() == 0
    assert asking.status == 200
    assert asking.answer["choices"][0]["message"]["content"] == "You said: Hello."
    assert [role for role, _ in _log(tmp_path)] == ["user", "assistant"]


def test_second_signal_ends_immediately_and_the_next_start_answers(
    tmp_path: Path, gateway: Process, waiting: tuple[_Waiting, str]
) -> None:
    asking = _Asking(gateway.url)
    asking.start()
    assert waiting[0].asked.wait(30)
    gateway.signal(signal.SIGTERM)
    wait_until(lambda: "Stopping" in gateway.words.read_text())
    gateway.signal(signal.SIGTERM)
    assert gateway.ended() == 0
    asking.join(30)
    assert (asking.status, _log(tmp_path)) == (503, [("user", "Hello.")])
    assert "The answer is not finished" in gateway.words.read_text()
    waiting[0].go_on.set()
    gateway.start()
    again = _Asking(gateway.url)
    again.start()
    again.join(30)
    assert gateway.stop() == 0
    assert again.answer["choices"][0]["message"]["content"] == "You said: Hello."


@pytest.mark.slow
def test_shutdown_waits_for_turns_of_disconnected_clients(tmp_path: Path) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "X-Session-Key": "s"}
    body = {"messages": [{"role": "user", "content": "Hello."}], "stream": True}
    with ModelServer(lambda _: "A rather long answer.", pause=1.0) as model:
        workspace = str(tmp_path / "workspace")
        gateway = Process(tmp_path / "gateway", sessions=workspace, model=model.url).start()
        try:
            with (
                httpx2.Client(headers=headers) as client,
                client.stream("POST", f"{gateway.url}/v1/chat/completions", json=body) as stream,
            ):
                # As soon as it has begun to say something.
                assert any("A rather" in line for line in stream.iter_lines())
            assert gateway.stop() == 0
        finally:
            gateway.close()
    assert _log(tmp_path) == [("user", "Hello."), ("assistant", "A rather long answer.")]


def test_interrupted_resumed_turn_is_answered_by_the_next_start(
    tmp_path: Path, waiting: tuple[_Waiting, str]
) -> None:
    workspace = str(tmp_path / "workspace")
    with open_store(workspace) as store:
        store.add_full_message("s", mark_received({"role": "user", "content": "Hello."}))
    gateway = Process(tmp_path / "gateway", sessions=workspace, model=waiting[1]).start()
    try:
        assert waiting[0].asked.wait(30)
        gateway.signal(signal.SIGTERM)
        wait_until(lambda: "Stopping" in gateway.words.read_text())
        gateway.signal(signal.SIGTERM)
        assert gateway.ended() == 0
        assert _log(tmp_path) == [("user", "Hello.")], "nothing stands there in its place"
        waiting[0].go_on.set()
        gateway.start()
        wait_until(lambda: len(_log(tmp_path)) == 2)
        assert gateway.stop() == 0
    finally:
        gateway.close()
    assert _log(tmp_path)[1] == ("assistant", "You said: Hello.")


@pytest.mark.parametrize("signals", [1, 2])
def test_every_store_is_closed_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    waiting: tuple[_Waiting, str],
    signals: int,
) -> None:
    opened: list[JSONLStore] = []
    closed: list[JSONLStore] = []
    begin, end = JSONLStore.__init__, JSONLStore.close

    def opening(self: JSONLStore, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        opened.append(self)

    def closing(self: JSONLStore) -> None:
        closed.append(self)
        end(self)

    monkeypatch.setattr(JSONLStore, "__init__", opening)
    monkeypatch.setattr(JSONLStore, "close", closing)
    text = (
        f"[agent]\nsessions = '{tmp_path}/w'\nmodel = 'served'\n[agents.ada]\n"
        f"[models.served]\nbase_url = '{waiting[1]}'\nmodel = 'm'\n"
        "[webhooks.shop]\nsecret = '0123456789abcdef'\n"
    )
    settings = _settings(tmp_path, text)
    with open_store(f"{tmp_path}/w") as store:
        store.add_full_message("s", mark_received({"role": "user", "content": "Hello."}))
    opened.clear()
    closed.clear()

    done: list[bool] = []

    async def ask_to_end() -> None:
        # While a turn is in flight.
        await asyncio.to_thread(waiting[0].asked.wait, 30)
        for _ in range(signals):
            # Once nobody watches for them, a signal would end the tests.
            if not done:
                os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.2)
        waiting[0].go_on.set()

    async def run() -> int:
        ending = asyncio.create_task(ask_to_end())
        try:
            return await _serve(settings, AgentOptions())
        finally:
            done.append(True)
            await ending

    assert asyncio.run(run()) == 0
    assert len(opened) >= 4  # the sessions and notes of two agents, and what webhooks keep
    assert sorted(map(id, opened)) == sorted(map(id, closed))


def _settings(place: Path, text: str) -> Any:
    file = place / "config.toml"
    file.write_text(f"[gateway]\nport = 0\ntoken_file = '{place}/token'\n{text}")
    file.chmod(0o600)
    return load_effective_settings(config=file, environment={}).settings


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[agent]\nmodel = 'nobody/knows'\n", "nobody/knows"),
        ("[agents.ada]\nmodel = 'nobody/knows'\n", "nobody/knows"),
        ("[channels.telegram]\ntoken_env = 'NOT_SET'\n", "NOT_SET"),
        ("[webhooks.shop]\nallow = ['x']\n", "at least 16 characters"),
    ],
)
def test_failed_start_leaks_no_resources(tmp_path: Path, text: str, words: str) -> None:
    if "[agent]" not in text:
        text = f"[agent]\nsessions = '{tmp_path}/w'\nmodel = 'scripted'\n{text}"
    settings = _settings(tmp_path, text)
    before = _open_files(), threading.active_count()
    with pytest.raises((click.ClickException, StenologError), match=words):
        asyncio.run(_serve(settings, AgentOptions()))
    assert (_open_files(), threading.active_count()) == before


def test_port_in_use_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = _settings(tmp_path, "[agent]\nmodel = 'scripted'\n")
        settings = load_effective_settings(
            config=tmp_path / "config.toml", environment={}, flags={"gateway.port": port}
        ).settings
        with pytest.raises(StenologError, match=f"port {port} at 127.0.0.1 is in use"):
            asyncio.run(_serve(settings, AgentOptions()))
    assert not (tmp_path / "token").exists()


def test_token_readable_by_others_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t" * 43)
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(StenologError, match="chmod 600"):
        asyncio.run(_serve(_settings(tmp_path, "[agent]\nmodel = 'scripted'\n"), AgentOptions()))


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.slow
def test_gateway_without_session_persistence_writes_no_files(
    tmp_path: Path, waiting: tuple[_Waiting, str]
) -> None:
    waiting[0].go_on.set()
    process = Process(
        tmp_path / "gateway",
        sessions=str(tmp_path / "workspace"),
        model=waiting[1],
        config="[channels]\nsession_persistence = false\n",
    ).start()
    try:
        before = set(tmp_path.rglob("*"))
        asking = _Asking(process.url)
        asking.start()
        asking.join(30)
        assert asking.status == 200
        headers = {"Authorization": f"Bearer {TOKEN}"}
        listed = httpx2.get(f"{process.url}/v1/sessions", headers=headers).json()
        assert [one["key"] for one in listed["entries"]] == ["s"]
        assert process.stop() == 0
        assert set(tmp_path.rglob("*")) == before
    finally:
        process.close()
    assert not (tmp_path / "workspace").exists()
