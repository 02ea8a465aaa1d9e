"""Whether the gateway lives and can be used, for who watches over it without a token."""

from importlib import metadata
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from stenolog.agent.instance import AgentInstance
from stenolog.errors import StoreClosed
from stenolog.gateway.openapi import Endpoint
from stenolog.gateway.shapes import Health, answered, failure
from stenolog.gateway.state import Gateway, gateway_of

VERSION: Final = metadata.version("stenolog")


async def healthz(request: Request) -> Response:
    """The process lives."""
    del request
    return answered(Health(status="ok", version=VERSION))


async def readyz(request: Request) -> Response:
    """Every agent's store can be relied on; else 503.

    Nobody is asked for a token here, so it names agents and no places: the log says more.
    """
    problems = await _problems(gateway_of(request))
    if problems:
        return failure(503, "; ".join(problems), code="not_ready")
    return answered(Health(status="ok", version=VERSION))


async def _problems(gateway: Gateway) -> tuple[str, ...]:
    if gateway.closing.is_set():
        return ("the gateway closes",)
    found = []
    for agent in gateway.loop.registry:
        try:
            well = await gateway.loop.run(_is_well, agent)
        except StoreClosed:
            return ("the gateway closes",)
        if not well:
            found.append(f"the store of agent {agent.id or 'main'!r} cannot be relied on now")
    return tuple(found)


def _is_well(agent: AgentInstance) -> bool:
    """What the store says of itself: a write that a client got wrong says nothing of it."""
    return agent.store is not None and agent.store.health().ok


HEALTH: Final[tuple[Endpoint, ...]] = (
    Endpoint(
        method="GET",
        path="/healthz",
        name="healthz",
        summary="Whether the process lives.",
        raw=healthz,
        query=None,
        response=Health,
        open=True,
    ),
    Endpoint(
        method="GET",
        path="/readyz",
        name="readyz",
        summary="Whether every agent and its store can be used.",
        raw=readyz,
        query=None,
        response=Health,
        statuses=(503,),
        open=True,
    ),
)
"""The endpoints that want no token."""
