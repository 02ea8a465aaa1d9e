"""A gateway in its own thread, for tests that use it over HTTP."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx2
from msgspec.structs import replace
from starlette.routing import BaseRoute

from stenolog.agent.instance import AgentInstance, AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.agent.spec import AgentSpec
from stenolog.agent.tools import Tool
from stenolog.agent.turn_events import Answer
from stenolog.gateway.access_token import Token
from stenolog.gateway.daemon import Daemon, listen
from stenolog.gateway.shared_state import Gateway
from stenolog.providers.chat_model import ChatModel
from stenolog.settings.values import GatewaySettings, Settings

TOKEN: Final = "t" * 43


class Nothing:
    """No chat apps."""

    routes: Sequence[BaseRoute] = ()

    async def start(self) -> None:
        """Do nothing."""

    async def deliver(self, answer: Answer) -> None:
        """Do nothing."""

    async def drain(self, *, wait_seconds: float) -> None:
        """Do nothing."""
        del wait_seconds

    async def stop_sending(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


class Served:
    """A gateway that runs while the context manager is entered."""

    def __init__(
        self,
        where: Path | str,
        model: ChatModel,
        *,
        tools: Sequence[Tool | Callable[..., Any]] = (),
        spec: AgentSpec | None = None,
        ttl: float = 2.0,
        read_only: bool = False,
        open_instance: Callable[[AgentSpec], AgentInstance] | None = None,
        **settings: Any,
    ) -> None:
        self._model = model
        self._tools = tools
        self._ttl = ttl
        self._read_only = read_only
        self._open_instance = open_instance or self._open
        self._spec = replace(spec or AgentSpec(consolidation=False), sessions=str(where))
        self._settings = Settings(gateway=GatewaySettings(port=0, **settings))
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._error: BaseException | None = None
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ask_to_end()
        self._thread.join()
        if self._error is not None:
            raise self._error

    async def _run(self) -> None:
        try:
            self._event_loop = asyncio.get_running_loop()
            self._ended, self._hurry = asyncio.Event(), asyncio.Event()
            instance = self._open_instance(self._spec)
            self.loop = AgentLoop(AgentRegistry([instance]), ttl=self._ttl)
            self.gateway = Gateway(self.loop, self._settings, read_only=self._read_only)
            daemon = Daemon(self.gateway, Token(TOKEN.encode()), listen("127.0.0.1", 0), Nothing())
            await daemon.start()
            self.url = daemon.url
            self._ready.set()
            await self._ended.wait()
            await daemon.stop(hurry=self._hurry)
        except BaseException as error:  # noqa: BLE001 - raised in the thread of the test
            self._error = error
        finally:
            self._ready.set()

    def _open(self, spec: AgentSpec) -> AgentInstance:
        return AgentInstance.open(spec, model=self._model, tools=self._tools)

    @property
    def browser_url(self) -> str:
        """URL at which a browser signs in."""
        return f"http://{Token(TOKEN.encode()).host_name()}:{self.url.rpartition(':')[2]}"

    def ask_to_end(self) -> None:
        """Start the shutdown; leaving the context manager waits for its end."""
        self._event_loop.call_soon_threadsafe(self._ended.set)

    def hurry(self) -> None:
        """Cancel all waiting during the shutdown."""
        self._event_loop.call_soon_threadsafe(self._hurry.set)

    def quiet(self) -> None:
        """Wait until the work after an answer is done."""
        asyncio.run_coroutine_threadsafe(self.loop.wait_until_idle(), self._event_loop).result(30)

    def client(self, **headers: str) -> httpx2.Client:
        """Return a client with the token."""
        given = {"Authorization": f"Bearer {TOKEN}", **headers}
        return httpx2.Client(base_url=self.url, headers=given, timeout=30)
