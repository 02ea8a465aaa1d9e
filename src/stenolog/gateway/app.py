"""The ASGI application: all endpoints, health checks, and the layers around them."""

from collections.abc import Sequence
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

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
from stenolog.gateway.openapi import Endpoint, routes, version, with_document
from stenolog.gateway.requests import RawPaths
from stenolog.gateway.sessions_api import SESSIONS
from stenolog.gateway.shared_state import Gateway, gateway_of
from stenolog.gateway.viewer.pages import SignInPage
from stenolog.gateway.viewer.routes import viewer_routes

WEBHOOKS_PREFIX: Final = "/webhooks/"
_BODY_SECONDS: Final = 30.0
_CLOSING_TEXT: Final = "the gateway is shutting down"


async def healthz(_: Request) -> Response:
    """Answer that the process is running."""
    return json_response(Health(status="ok", version=version()))


async def readyz(request: Request) -> Response:
    """Answer 200 if every agent's store is usable, otherwise 503.

    Callers need no token, so the response names agents but no paths. The log has the details.
    """
    problems = await _find_problems(gateway_of(request))
    if problems:
        return error_response(503, "; ".join(problems), code="not_ready")
    return json_response(Health(status="ok", version=version()))


async def _find_problems(gateway: Gateway) -> list[str]:
    if gateway.closing.is_set():
        return [_CLOSING_TEXT]
    problems = []
    for agent in gateway.loop.registry:
        try:
            health = await gateway.loop.run(agent.store.health)
        except StoreClosed:
            return [_CLOSING_TEXT]
        if not health.ok:
            problems.append(f"the store of agent {agent.id or 'main'!r} does not work")
    return problems


async def indexing(request: Request) -> Response:
    """Answer how many sessions are indexed, for a page that shows the number."""
    counts = gateway_of(request).indexing
    return JSONResponse(None if counts is None else {"indexed": counts[0], "sessions": counts[1]})


HEALTH: Final[tuple[Endpoint, ...]] = (
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
        statuses=(503,),
        is_open=True,
    ),
)
ENDPOINTS: Final[tuple[Endpoint, ...]] = with_document((*CHAT, *EVENTS, *SESSIONS, *HEALTH))


def make_app(gateway: Gateway, token: Token, *, webhooks: Sequence[BaseRoute] = ()) -> ASGIApp:
    """Create the application. `webhooks` are routes below /webhooks/, which need no token."""
    settings = gateway.settings.gateway
    # A read-only gateway writes nothing to the store of the sessions.
    shared_place = None if gateway.read_only else gateway.loop.registry.agent().shared_place
    cookies, links = Cookies(token, where=shared_place), LoginLinks(token, shared_place)
    own_host = token.host_name()
    hosts = known_hosts(
        bound=settings.host, hosts=settings.hosts, origins=settings.origins, own_host=own_host
    )
    app = Starlette(
        # Routes are tried in this order; chat requests come first.
        routes=[
            *routes(ENDPOINTS),
            *viewer_routes(list_first=gateway.read_only),
            *login_routes(links, cookies, hosts, own_host),
            Route("/indexing", indexing),
            *webhooks,
        ],
        exception_handlers=dict(HANDLERS),
    )
    app.state.gateway = gateway
    # A path with an additional slash is an error. A redirect would hide the error.
    app.router.redirect_slashes = False
    routed_app: ASGIApp = RawPaths(app)
    if gateway.read_only:
        routed_app = ReadOnlyRequests(routed_app, indexing=lambda: gateway.indexing)
    limited_app = BodyLimit(routed_app, max_bytes=settings.max_body, seconds=_BODY_SECONDS)
    protected_app = Access(
        limited_app,
        token=token,
        known=hosts,
        cookies=cookies,
        open_paths={endpoint.path for endpoint in ENDPOINTS if endpoint.is_open},
        prefixes=(WEBHOOKS_PREFIX,),
    )
    return SignInPage(protected_app)
