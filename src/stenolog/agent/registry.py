"""Several agents in one process, and which of them a message is for."""

from collections.abc import Iterator, Sequence
from typing import Self

from stenolog.agent.instance import AgentInstance
from stenolog.errors import UsageError


class AgentRegistry:
    """The agents that are open, each with its own sessions. An async context manager."""

    def __init__(self, agents: Sequence[AgentInstance]) -> None:
        """Of these agents, the first is the one for whom nobody else is. Raises UsageError."""
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
        """The agent of this name, and without one the first. Raises UsageError."""
        if id is None:
            return self._first
        if id not in self._agents:
            known = ", ".join(repr(one) for one in self._agents if one is not None) or "none"
            raise UsageError(f"there is no agent {id!r}; those with a name: {known}")
        return self._agents[id]

    def route(self, channel: str, sender: str = "") -> AgentInstance:
        """The agent for a message: whose route names most of its origin, else the first."""
        best, most = self._first, 0
        for one in self:
            for route in one.spec.routes:
                fits = route.channel in ("", channel) and route.sender in ("", sender)
                named = 2 * bool(route.sender) + bool(route.channel)
                if fits and named > most:
                    best, most = one, named
        return best

    async def close(self) -> None:
        """Close every agent. Raises nothing; a second call does nothing."""
        for one in self:
            await one.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
