"""Everything that the OpenAPI document allows and much that it does not, sent to a real server.

schemathesis runs as its users run it, in a process of its own, with the token of the gateway. It
checks that no answer is a server's error, that each has a status, a media type and a shape that the
document tells of, that what the document forbids is refused, and that nothing is done without the
token.
"""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from stenolog.agent.instance import AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.gateway.access_token import Token
from stenolog.gateway.app import make_app
from stenolog.gateway.shared_state import Gateway
from stenolog.settings.values import Settings
from stenolog.testing.scripted_model import ScriptedModel
from support import temporary_folders
from support.agents import open_agent
from support.gateway.sessions_api import echo

_TOKEN: Final = "a-token-that-nobody-else-has-in-these-tests"
_CHECKS: Final = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_headers_conformance,response_schema_conformance,negative_data_rejection,"
    "unsupported_method,allow_header_conformance,use_after_free,ignored_auth"
)
_KEYS: Final = ("a", "0", "null", "cli:default", "a/b", "ü")
"""Sessions that are there from the start: of what is made up, little hits one."""


class _Whole:
    """The gateway with an agent, both made in the event loop of the server that begins."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._app is not None:
            await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        agent = open_agent("jsonl", self._folder, ScriptedModel(echo))
        assert agent.store is not None
        for key in _KEYS:
            agent.store.add_message(key, "user", "Hello")
        loop = AgentLoop(AgentRegistry([agent]), ttl=5.0)
        self._app = make_app(Gateway(loop, Settings()), Token(_TOKEN.encode()))
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await asyncio.wait_for(loop.close(patience=5.0), 30)
        await send({"type": "lifespan.shutdown.complete"})


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """The gateway at a port of this machine, over an agent with some sessions; its address."""
    config = uvicorn.Config(
        _Whole(folder), host="127.0.0.1", port=0, ws="none", lifespan="on", log_level="error"
    )
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        while not running.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        port = running.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        running.should_exit = True
        thread.join(30)


def _run(*options: str) -> None:
    with temporary_folders.folder() as folder, server(folder / "sessions") as address:
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{address}/openapi.json"),
            *("-H", f"Authorization: Bearer {_TOKEN}", "--checks", _CHECKS, "--warnings", "off"),
            *("--generation-database", "none", "--no-shrink", "--seed", "7"),
            *("--request-timeout", "30", "--suppress-health-check", "all"),
            # A stream that never ends is not for a client that waits for the end.
            *("--exclude-path-regex", "/events$", *options),
        ]
        # The time limit of the test ends a run that hangs.
        ended = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_gateway_conforms_to_its_openapi_document() -> None:
    _run("--phases", "examples,coverage,fuzzing", "--max-examples", "4")


@pytest.mark.full
def test_gateway_conforms_to_its_openapi_document_in_a_long_run() -> None:
    _run("--phases", "examples,coverage,fuzzing,stateful", "--max-examples", "150")
