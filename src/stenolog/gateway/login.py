"""How a browser gets in: a link that works once becomes a cookie that no page can read."""

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from typing import Final

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)
from starlette.routing import Route

from stenolog.gateway.shapes import failure
from stenolog.gateway.token import Token

LOGIN: Final = "/login"
LINKS: Final = "/v1/login-links"
COOKIE: Final = "steno"
LINK_SECONDS: Final = 60
COOKIE_SECONDS: Final = 30 * 86_400
PROOF_SECONDS: Final = 30
BEARER: Final = "bearer"
"""What `request.state.caller` says of who sent the token itself, or proved to have it."""

_MOST: Final = 100
_MOST_PROOFS: Final = 1_000
_PROOF: Final = re.compile(r"[Ss]teno ([0-9]{1,15})\.([A-Za-z0-9_-]{16,64})\.([0-9a-f]{64})")
_HOME: Final = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=/">'
    '<title>stenolog</title><a href="/">stenolog</a>'
)
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


class Proven(Struct, frozen=True):
    """Somebody who has the token, and did not send it: whatever listens there would know it."""

    token: Token
    nonce: str

    def answer(self, url: str) -> str:
        """What shows them that this link is from us."""
        return self.token.proof("give", self.nonce, url)


class Proofs:
    """Checks proofs that somebody has the token: `Steno TIME.NONCE.PROOF`, the time in ms.

    Each is good once, at the address that it was made for, and for some seconds.
    """

    def __init__(self, token: Token, now: Callable[[], float] = time.time) -> None:
        self._token = token
        self._now = now
        # What was proved to another process may have been proved to us before we ended, or to
        # somebody who had our address before us.
        self._begun = int(now() * 1_000) / 1_000
        self._used: dict[str, float] = {}
        """The proofs that are used up, and until when they would be good."""

    def check(self, given: str, end: str) -> Proven | None:
        """Who proved to have the token to whom is at this end of the connection."""
        found = _PROOF.fullmatch(given)
        if found is None:
            return None
        written, nonce, proof = found.groups()
        if not hmac.compare_digest(proof, self._token.proof("ask", end, written, nonce)):
            return None
        at, now = int(written) / 1_000, self._now()
        if abs(now - at) > PROOF_SECONDS or at < self._begun:
            return None
        self._used = {one: until for one, until in self._used.items() if until >= now}
        # One that is forgotten too early could be used again: who comes now has to wait.
        if nonce in self._used or len(self._used) >= _MOST_PROOFS:
            return None
        self._used[nonce] = at + PROOF_SECONDS
        return Proven(self._token, nonce)


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


def _is_led_here(request: Request) -> bool:
    """Whether a browser may come from another page, as from the file of `steno open`."""
    # Then it does not send the cookie along where we redirect it, but only from a page of ours.
    is_browser = "text/html" in request.headers.get("accept", "")
    return is_browser and request.headers.get("sec-fetch-site") != "none"


def login_routes(links: Links, cookies: Cookies) -> list[Route]:
    """`POST /v1/login-links` gives out a link; `GET /login` takes it."""

    async def give(request: Request) -> Response:
        # A cookie must not beget cookies: then it would last for ever.
        if getattr(request.state, "caller", None) != BEARER:
            words = "Links are given to who has the token itself, as `steno open` does."
            return failure(403, words, code="token_needed")
        url = f"{LOGIN}?code={links.give()}"
        answer = {"url": url, "expires_in": LINK_SECONDS}
        proven: Proven | None = getattr(request.state, "proven", None)
        if proven is not None:
            answer["proof"] = proven.answer(url)
        return JSONResponse(answer)

    async def take(request: Request) -> Response:
        if request.method != "GET":
            # Programs that only look at a link, to show what is behind it, must not use it up.
            return PlainTextResponse("", 405, {"Allow": "GET"})
        if not links.use(request.query_params.get("code", "")):
            words = "This link was used, or is too old. `steno open` makes another."
            return PlainTextResponse(words, 403)
        response = HTMLResponse(_HOME) if _is_led_here(request) else RedirectResponse("/", 303)
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
