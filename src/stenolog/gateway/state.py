"""What every request of the gateway works with."""

from typing import cast

from starlette.requests import Request

from stenolog.agent.instance import AgentInstance
from stenolog.agent.loop import AgentLoop
from stenolog.settings.values import Settings


class Gateway:
    """The agents that are served, and the settings they are served by."""

    def __init__(self, loop: AgentLoop, settings: Settings) -> None:
        self.loop = loop
        self.settings = settings

    def agent(self, name: str | None) -> AgentInstance:
        """The agent of this name; `main`, or none, is the first. Raises UsageError."""
        return self.loop.registry.agent(None if name in (None, "", "main") else name)


def gateway_of(request: Request) -> Gateway:
    """The gateway that a request came to."""
    return cast(Gateway, request.app.state.gateway)
