"""The ASGI application: all endpoints, health checks, and the layers around them."""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from stenolog.errors import StoreClosed
from stenolog.gateway.access import AccessMiddleware, ReadOnlyRequests
from stenolog.gateway.access_token import Token
from stenolog.gateway.chat_completions import CHAT_ENDPOINTS
from stenolog.gateway.hosts import known_hosts
from stenolog.gateway.live_stream import EVENT_ENDPOINTS
from stenolog.gateway.login import Cookies, login_routes
from stenolog.gateway.openapi import Endpoint, make_routes, version, with_openapi_document
from stenolog.gateway.requests import BodyLimit, RawPaths
from stenolog.gateway.responses import EXCEPTION_HANDLERS, error_response, json_response
from stenolog.gateway.sessions_api import SESSION_ENDPOINTS
from stenolog.gateway.shared_state import Gateway, gateway_of
from stenolog.gateway.viewer.pages import BrowserErrorPages
from stenolog.gateway.viewer.routes import viewer_routes

_MAX_BODY_SECONDS: Final = 30.0
_CLOSING_TEXT: Final = "the gateway is shutting down"


class Health(Struct, frozen=True, kw_only=True):
    """Status of the gateway."""

    status: str
    version: str


async def healthz(_: Request) -> Response:
    """Answer that the process is running."""
    return json_response(Health(status="ok", version=version()))


async def readyz(request: Request) -> Response:
    """Answer 200 if every agent's store is usable, otherwise 503.

    Callers need no token, so the response names agents, but not their problems, which may contain
    paths.
    """
    problems = await _readiness_problems(gateway_of(request))
    if problems:
        return error_response(503, "; ".join(problems), code="not_ready")
    return await healthz(request)


async def _readiness_problems(gateway: Gateway) -> list[str]:
    if gateway.closing.is_set():
        return [_CLOSING_TEXT]
    problems = []
    for agent in gateway.loop.registry:
        try:
            health = await gateway.loop.run(agent.store.admin.health)
        except StoreClosed:
            return [_CLOSING_TEXT]
        if not health.ok:
            problems.append(f"the store of agent {agent.id or 'main'!r} does not work")
    return problems


async def indexing_progress(request: Request) -> Response:
    """Return the number of indexed sessions and the number of all sessions, for an open page.

    The response is null if all sessions are indexed.
    """
    counts = gateway_of(request).indexing
    return JSONResponse(None if counts is None else {"indexed": counts[0], "sessions": counts[1]})


HEALTH_ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    Endpoint(
        method="GET",
        path="/healthz",
        name="healthz",
        summary="Check whether the process runs.",
        handler=healthz,
        response=Health,
        is_open=True,
    ),
    Endpoint(
        method="GET",
        path="/readyz",
        name="readyz",
        summary="Check whether the stores of all agents work.",
        handler=readyz,
        response=Health,
        error_statuses=(503,),
        is_open=True,
    ),
)
ENDPOINTS: Final[tuple[Endpoint, ...]] = with_openapi_document(
    (*CHAT_ENDPOINTS, *EVENT_ENDPOINTS, *SESSION_ENDPOINTS, *HEALTH_ENDPOINTS)
)


def make_app(
    gateway: Gateway, token: Token, *, webhook_routes: Sequence[BaseRoute] = ()
) -> ASGIApp:
    """Create the application. `webhook_routes` are routes below /webhooks/, which need no token."""
    settings = gateway.settings.gateway
    cookies = Cookies(token)
    own_host = token.host_name()
    hosts = known_hosts(
        bound_host=settings.host, hosts=settings.hosts, origins=settings.origins, own_host=own_host
    )
    app = Starlette(
        # Starlette tries the routes in this order, so chat requests are matched first.
        routes=[
            *make_routes(ENDPOINTS),
            *viewer_routes(list_first=gateway.read_only),
            *login_routes(token, gateway.login_links, cookies, hosts, own_host),
            Route("/indexing", indexing_progress),
            *webhook_routes,
        ],
        exception_handlers=dict(EXCEPTION_HANDLERS),
    )
    app.state.gateway = gateway
    # A path with an additional slash is an error. A redirect would hide the error.
    app.router.redirect_slashes = False
    routed_app: ASGIApp = RawPaths(app)
    if gateway.read_only:
        routed_app = ReadOnlyRequests(routed_app, indexing_progress=lambda: gateway.indexing)
    limited_app = BodyLimit(routed_app, max_bytes=settings.max_body, max_seconds=_MAX_BODY_SECONDS)
    protected_app = AccessMiddleware(
        limited_app,
        token=token,
        known_hosts=hosts,
        cookies=cookies,
        open_paths={endpoint.path for endpoint in ENDPOINTS if endpoint.is_open},
        open_prefixes=("/webhooks/",),
    )
    return BrowserErrorPages(protected_app)
