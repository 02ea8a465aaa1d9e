"""How a browser gets in: a link that works once becomes a cookie that no page can read."""

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from stenolog.gateway.limits import refusal
from stenolog.gateway.token import Token

LOGIN: Final = "/login"
LINKS: Final = "/v1/login-links"
COOKIE: Final = "steno"
LINK_SECONDS: Final = 60
COOKIE_SECONDS: Final = 30 * 86_400
BEARER: Final = "bearer"
"""What `request.state.caller` says of who sent the token itself."""

_MOST: Final = 100
_VALUE: Final = re.compile(r"([0-9]{1,12})\.([0-9a-f]{64})")


class Links:
    """The links that were given out and not used yet. They are forgotten with the process."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._codes: dict[str, float] = {}
        """Until when each may be used, oldest first."""

    def give(self) -> str:
        """A code for one link."""
        self._forget_old()
        while len(self._codes) >= _MOST:
            # Whoever asks now is waiting for this one.
            del self._codes[next(iter(self._codes))]
        code = secrets.token_urlsafe(32)
        self._codes[code] = self._now() + LINK_SECONDS
        return code

    def use(self, given: str) -> bool:
        """Whether this is a code that may be used; it may not be used again."""
        self._forget_old()
        wanted = given.encode()
        # All are compared, so that the time it takes says nothing about any of them.
        same = [code for code in self._codes if hmac.compare_digest(code.encode(), wanted)]
        for code in same:
            del self._codes[code]
        return bool(same)

    def _forget_old(self) -> None:
        now = self._now()
        self._codes = {code: until for code, until in self._codes.items() if until > now}


class Cookies:
    """Makes and checks the values of the cookie: until when it is good, signed.

    The key comes from the token: a cookie outlives a restart, is good at every gateway that has
    the token, and is good at none when the token is another.
    """

    def __init__(self, token: Token, now: Callable[[], float] = time.time) -> None:
        self._key = token.key("login cookie")
        self._now = now

    def make(self) -> str:
        """A value that is good from now on."""
        until = str(int(self._now()) + COOKIE_SECONDS)
        return f"{until}.{self._signature(until)}"

    def is_good(self, value: str) -> bool:
        """Whether we made this value, and it has not run out."""
        found = _VALUE.fullmatch(value)
        if found is None:
            return False
        until, signature = found.groups()
        same = hmac.compare_digest(signature, self._signature(until))
        return same and int(until) > self._now()

    def _signature(self, until: str) -> str:
        return hmac.digest(self._key, until.encode(), hashlib.sha256).hex()


def login_routes(links: Links, cookies: Cookies) -> list[Route]:
    """`POST /v1/login-links` gives out a link; `GET /login` takes it."""

    async def give(request: Request) -> Response:
        # A cookie must not beget cookies: then it would last for ever.
        if getattr(request.state, "caller", None) != BEARER:
            words = "Links are given to who sends the token itself, as `steno open` does."
            return refusal(403, "token_needed", words)
        url = f"{LOGIN}?code={links.give()}"
        return JSONResponse({"url": url, "expires_in": LINK_SECONDS})

    async def take(request: Request) -> Response:
        if request.method != "GET":
            # Programs that only look at a link, to show what is behind it, must not use it up.
            return PlainTextResponse("", 405, {"Allow": "GET"})
        if not links.use(request.query_params.get("code", "")):
            words = "This link was used, or is too old. `steno open` makes another."
            return PlainTextResponse(words, 403)
        response = RedirectResponse("/", 303)
        response.set_cookie(
            COOKIE,
            cookies.make(),
            max_age=COOKIE_SECONDS,
            path="/",
            secure=request.scope["scheme"] == "https",
            httponly=True,
            samesite="strict",
        )
        return response

    return [
        Route(LINKS, give, methods=["POST"]),
        Route(LOGIN, take, methods=["GET"]),
    ]
