"""The ASGI application: all endpoints, health checks, and the layers around them."""

from collections.abc import Sequence
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from stenolog.agent.instance import AgentInstance
from stenolog.errors import StoreClosed
from stenolog.gateway.access import Access, ReadOnlyRequests
from stenolog.gateway.access_token import Token
from stenolog.gateway.api_types import Health, error_response, json_response
from stenolog.gateway.chat_completions import CHAT
from stenolog.gateway.error_responses import HANDLERS
from stenolog.gateway.hosts import known_hosts
from stenolog.gateway.limits import BodyLimit
from stenolog.gateway.live_stream import EVENTS
from stenolog.gateway.login import Cookies, LoginLinks, login_routes
from stenolog.gateway.openapi import VERSION, Endpoint, routes, with_document
from stenolog.gateway.requests import RawPaths
from stenolog.gateway.sessions_api import SESSIONS
from stenolog.gateway.shared_state import Gateway, gateway_of
from stenolog.gateway.viewer.pages import SignInPage
from stenolog.gateway.viewer.routes import viewer_routes

WEBHOOKS: Final = "/webhooks/"
_BODY_SECONDS: Final = 30.0
_CLOSING: Final = "the gateway is shutting down"


async def healthz(request: Request) -> Response:
    """Answer that the process is running."""
    del request
    return json_response(Health(status="ok", version=VERSION))


async def readyz(request: Request) -> Response:
    """Answer whether every agent's store is usable; otherwise 503.

    No token is needed, so the response names agents but no paths; the log has the details.
    """
    problems = await _problems(gateway_of(request))
    if problems:
        return error_response(503, "; ".join(problems), code="not_ready")
    return json_response(Health(status="ok", version=VERSION))


async def _problems(gateway: Gateway) -> tuple[str, ...]:
    if gateway.closing.is_set():
        return (_CLOSING,)
    found = []
    for agent in gateway.loop.registry:
        try:
            # Only the health of the store counts: a wrong request says nothing about it.
            well = await gateway.loop.run(_is_healthy, agent)
        except StoreClosed:
            return (_CLOSING,)
        if not well:
            found.append(f"the store of agent {agent.id or 'main'!r} does not work")
    return tuple(found)


def _is_healthy(agent: AgentInstance) -> bool:
    return agent.store.health().ok


async def indexing(request: Request) -> Response:
    """Answer how many sessions are indexed, for a page that shows it."""
    found = gateway_of(request).indexing
    return JSONResponse(None if found is None else {"indexed": found[0], "sessions": found[1]})


HEALTH: Final[tuple[Endpoint, ...]] = (
    Endpoint(
        method="GET",
        path="/healthz",
        name="healthz",
        summary="Check whether the process runs.",
        raw=healthz,
        query=None,
        response=Health,
        open=True,
    ),
    Endpoint(
        method="GET",
        path="/readyz",
        name="readyz",
        summary="Check whether the stores of all agents work.",
        raw=readyz,
        query=None,
        response=Health,
        statuses=(503,),
        open=True,
    ),
)
"""Endpoints that need no token."""
ENDPOINTS: Final[tuple[Endpoint, ...]] = with_document(
    (*CHAT, *EVENTS, *SESSIONS, *HEALTH), version=VERSION
)


def make_app(gateway: Gateway, token: Token, *, further: Sequence[BaseRoute] = ()) -> ASGIApp:
    """Create the application. `further`: routes below /webhooks/, which need no token."""
    settings = gateway.settings.gateway
    # A read-only gateway writes nothing to the store of the sessions.
    shared = None if gateway.read_only else gateway.loop.registry.agent().shared_place
    cookies, links = Cookies(token, where=shared), LoginLinks(token, shared)
    own = token.host_name()
    names = known_hosts(
        bound=settings.host, hosts=settings.hosts, origins=settings.origins, own=own
    )
    app = Starlette(
        routes=[
            *viewer_routes(),
            *login_routes(links, cookies, names, own),
            Route("/indexing", indexing),
            *routes(ENDPOINTS),
            *further,
        ],
        exception_handlers=dict(HANDLERS),
    )
    app.state.gateway = gateway
    # A path with an additional slash is an error; a redirect would hide it.
    app.router.redirect_slashes = False
    routed: ASGIApp = RawPaths(app)
    if gateway.read_only:
        routed = ReadOnlyRequests(routed, indexing=lambda: gateway.indexing)
    limited = BodyLimit(routed, most=settings.max_body, seconds=_BODY_SECONDS)
    access = Access(
        limited,
        token=token,
        known=names,
        cookies=cookies,
        open_paths={one.path for one in ENDPOINTS if one.open},
        prefixes=(WEBHOOKS,),
    )
    return SignInPage(access)
