"""The agents of one process, and the choice of the agent for a message."""

from collections.abc import Iterator, Sequence
from typing import Self

from stenolog.agent.instance import AgentInstance
from stenolog.errors import UsageError


class AgentRegistry:
    """The open agents, each with its own sessions. An async context manager."""

    def __init__(self, agents: Sequence[AgentInstance]) -> None:
        """Create a registry; the first agent is the default. Raise UsageError."""
        if not agents:
            raise UsageError("no agent was given; at least one is wanted")
        self._agents: dict[str | None, AgentInstance] = {}
        for one in agents:
            if one.id in self._agents:
                raise UsageError(f"there are two agents called {one.id!r}; name them differently")
            self._agents[one.id] = one
        self._first = agents[0]

    def __iter__(self) -> Iterator[AgentInstance]:
        return iter(self._agents.values())

    def agent(self, id: str | None = None) -> AgentInstance:
        """Return the agent with this name; without a name the first. Raise UsageError."""
        if id is None:
            return self._first
        if id not in self._agents:
            known = ", ".join(repr(one) for one in self._agents if one is not None) or "none"
            raise UsageError(f"there is no agent {id!r}; those with a name: {known}")
        return self._agents[id]

    def route(self, channel: str, sender: str = "") -> AgentInstance:
        """Return the agent with the most specific matching route, otherwise the first."""
        best, most = self._first, 0
        for one in self:
            for route in one.spec.routes:
                fits = route.channel in ("", channel) and route.sender in ("", sender)
                named = 2 * bool(route.sender) + bool(route.channel)
                if fits and named > most:
                    best, most = one, named
        return best

    async def close(self) -> None:
        """Close every agent. Raise nothing; a second call does nothing."""
        for one in self:
            await one.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
