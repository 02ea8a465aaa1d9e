"""The sessions API without a network: its endpoints over agents of a test, and a client."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.testclient import TestClient

from stenolog.agent.instance import AgentInstance, AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.gateway.app import HEALTH_ENDPOINTS
from stenolog.gateway.openapi import make_routes, with_openapi_document
from stenolog.gateway.requests import RawPaths
from stenolog.gateway.responses import EXCEPTION_HANDLERS
from stenolog.gateway.sessions_api import SESSION_ENDPOINTS
from stenolog.gateway.shared_state import Gateway
from stenolog.providers.chat_model import ChatModel
from stenolog.settings.values import GatewaySettings, Settings
from stenolog.stores.base import Store
from stenolog.testing.scripted_model import ScriptedModel
from support.agents import SPEC, open_agent

KEY: Final = "cli:default"


def echo(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """Answer every request."""
    del tools
    return f"I heard {len(messages)} messages."


def application(
    open_agents: Callable[[], Sequence[AgentInstance]], *, max_turns: int = 64
) -> Starlette:
    """Return an application with only the API, which opens and closes its agents."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        loop = AgentLoop(AgentRegistry(open_agents()), ttl=5.0)
        settings = Settings(
            gateway=GatewaySettings(max_turns=max_turns), keys={"SOME_API_KEY": "sk-very-secret"}
        )
        app.state.gateway = Gateway(loop, settings)
        try:
            yield
        finally:
            await asyncio.wait_for(loop.close(patience=5.0), 30)

    endpoints = with_openapi_document((*SESSION_ENDPOINTS, *HEALTH_ENDPOINTS))
    app = Starlette(
        routes=make_routes(endpoints),
        exception_handlers=dict(EXCEPTION_HANDLERS),
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


class Api:
    """A client of the API, with access to the store."""

    def __init__(self, client: TestClient, agents: list[AgentInstance], app: Starlette) -> None:
        self.client = client
        self._agents = agents
        self._app = app

    @property
    def gateway(self) -> Gateway:
        """State of the gateway."""
        found: Gateway = self._app.state.gateway
        return found

    @property
    def agent(self) -> AgentInstance:
        """The first agent."""
        return self._agents[0]

    @property
    def store(self) -> Store:
        """Store of the first agent."""
        assert self.agent.store is not None
        return self.agent.store

    def __call__(
        self, method: str, path: str, *, key: str | None = None, status: int = 200, **said: Any
    ) -> Any:
        """Send a request, check the status and return the decoded response."""
        where = "" if key is None else f"/v1/sessions/{segment(key)}"
        response = self.client.request(method, f"{where}{path}", **said)
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        return response.json()

    def error(self, method: str, path: str, *, status: int, **said: Any) -> tuple[str, str]:
        """Send a request that is rejected; return the code and the message of the error."""
        found = self(method, path, status=status, **said)["error"]
        assert set(found) == {"message", "type", "code"}
        return found["code"], found["message"]


def segment(key: str) -> str:
    """Quote the key as one segment of a path."""
    return quote(key, safe="").replace(".", "%2E")


@contextmanager
def serving(
    folder: Path, model: ChatModel | None = None, *, store: str = "jsonl", max_turns: int = 64
) -> Iterator[Api]:
    """Serve the API over an agent in this folder."""
    agents: list[AgentInstance] = []

    def open_agents() -> list[AgentInstance]:
        agents.append(open_agent(store, folder, model or ScriptedModel(echo), spec=SPEC))
        return agents

    app = application(open_agents, max_turns=max_turns)
    with TestClient(RawPaths(app)) as client:
        yield Api(client, agents, app)
