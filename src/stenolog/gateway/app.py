"""The application: all that the gateway answers, behind what every request passes."""

from collections.abc import Sequence
from typing import Final

from starlette.applications import Starlette
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from stenolog.gateway.access import Access
from stenolog.gateway.chat import CHAT
from stenolog.gateway.events import EVENTS
from stenolog.gateway.failures import HANDLERS
from stenolog.gateway.health import HEALTH, VERSION
from stenolog.gateway.hosts import known
from stenolog.gateway.limits import BodyLimit
from stenolog.gateway.login import Cookies, Links, login_routes
from stenolog.gateway.openapi import Endpoint, routes, with_document
from stenolog.gateway.requests import RawPaths
from stenolog.gateway.sessions import SESSIONS
from stenolog.gateway.state import Gateway
from stenolog.gateway.token import Token
from stenolog.gateway.viewer.routes import viewer_routes
from stenolog.gateway.viewer.sign_in import SignInPage

ENDPOINTS: Final[tuple[Endpoint, ...]] = with_document(
    (*CHAT, *EVENTS, *SESSIONS, *HEALTH), version=VERSION
)
WEBHOOKS: Final = "/webhooks/"
_BODY_SECONDS: Final = 30.0


def make_app(gateway: Gateway, token: Token, *, further: Sequence[BaseRoute] = ()) -> ASGIApp:
    """What a server serves. `further`: routes below /webhooks/, which need no token."""
    settings = gateway.settings.gateway
    cookies = Cookies(token)
    app = Starlette(
        routes=[
            *viewer_routes(),
            *login_routes(Links(), cookies),
            *routes(ENDPOINTS),
            *further,
        ],
        exception_handlers=dict(HANDLERS),
    )
    app.state.gateway = gateway
    # With a slash too many nothing is meant; a redirect would only hide that.
    app.router.redirect_slashes = False
    limited = BodyLimit(RawPaths(app), most=settings.max_body, seconds=_BODY_SECONDS)
    names = known(bound=settings.host, hosts=settings.hosts, origins=settings.origins)
    access = Access(
        limited,
        token=token,
        known=names,
        cookies=cookies,
        open_paths={one.path for one in ENDPOINTS if one.open},
        prefixes=(WEBHOOKS,),
    )
    return SignInPage(access)
