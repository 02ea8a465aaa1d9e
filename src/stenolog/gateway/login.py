"""Sign-in of browsers: a one-time link sets a cookie that scripts cannot read.

The code in a link is signed with the gateway token, so any gateway that has the token can check it.
The store records which codes were used: an append with an idempotency key succeeds in one gateway
only. It also records which cookies were logged out.
"""

import asyncio
import hashlib
import hmac
import html
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from math import inf
from typing import Final
from urllib.parse import parse_qs

from msgspec import Struct
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)
from starlette.routing import Route

from stenolog.errors import OnceConflict, StoreUnavailable
from stenolog.gateway.access_token import Token
from stenolog.gateway.api_types import error_response
from stenolog.gateway.hosts import KnownHosts, accepts_cookies, authority
from stenolog.sessions.folders import CHANNELS
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store

_logger = logging.getLogger("stenolog")

# --- login links ----------------------------------------------------------------------------------
# One-time codes of login links, shared by all gateways of a store.


LINK_SECONDS: Final = 60
"""Lifetime of a link in seconds."""

_CODE: Final = re.compile(r"([0-9]{1,12})-([0-9a-f]{32})-([0-9a-f]{64})")
_USED: Final = "login-links"
"""Session in the namespace `channels` with one message per used code."""


class LoginLinks:
    """Creates codes and accepts each one once, within LINK_SECONDS."""

    def __init__(
        self, token: Token, where: str | None = None, now: Callable[[], float] = time.time
    ) -> None:
        """Record used codes in the store at `where`; None: in this process only."""
        self._token = token
        self._where = where
        self._now = now
        self._used_here = InMemoryStore()

    def make_code(self) -> str:
        """Create a code for one link."""
        until, nonce = str(int(self._now()) + LINK_SECONDS), secrets.token_hex(16)
        return f"{until}-{nonce}-{self._signature(until, nonce)}"

    def is_token(self, given: bytes) -> bool:
        """Return whether this is the access token, in constant time."""
        return self._token.is_same(given)

    def use(self, given: str) -> bool:
        """Return whether the code is valid, and mark it as used.

        Blocks on the store. Raises StoreUnavailable; the code may then count as used.
        """
        found = _CODE.fullmatch(given)
        if found is None:
            return False
        until, nonce, signature = found.groups()
        # guard: login-link-signed
        if not hmac.compare_digest(signature, self._signature(until, nonce)):
            return False
        # guard: login-link-expires
        return self._now() < int(until) and self._is_first_use(nonce)

    def _is_first_use(self, nonce: str) -> bool:
        with _opened(self._where, self._used_here) as store:
            return _record(store, nonce)

    def _signature(self, until: str, nonce: str) -> str:
        return self._token.proof("code", until, nonce)


@contextmanager
def _opened(where: str | None, here: Store) -> Iterator[Store]:
    """Yield the store that all gateways share, or the one of this process if there is none."""
    if where is None:
        yield here
        return
    # Opened per call: logins are rare.
    with open_store(where, namespace=CHANNELS) as store:
        yield store


def _record(store: Store, nonce: str) -> bool:
    try:
        # Each attempt has different content, so that a second one with the same key is a conflict.
        store.add_message(_USED, "user", secrets.token_hex(16), once=nonce)
    except OnceConflict:
        return False  # guard: login-link-once
    return True


# --- login ----------------------------------------------------------------------------------------


LOGIN: Final = "/login"
SIGN_IN: Final = "/sign-in"
"""Address of the form of the sign-in page."""
LOGOUT: Final = "/logout"
LINKS: Final = "/v1/login-links"
COOKIE: Final = "steno"
COOKIE_SECONDS: Final = 7 * 86_400
ENDED_SECONDS: Final = 2
"""Maximum delay in seconds until a logout at another gateway takes effect here."""
PROOF_SECONDS: Final = 30
BEARER: Final = "bearer"
"""Value of `request.state.caller` for callers that sent the token or proved that they have it."""

_MOST_PROOFS: Final = 1_000
_OTHER_NAME: Final = (
    "Browsers cannot sign in at this host name, because other programs on this machine would get "
    "the cookie. Run `steno open`, or add the name to gateway.hosts."
)
_PROOF: Final = re.compile(r"[Ss]teno ([0-9]{1,15})\.([A-Za-z0-9_-]{16,64})\.([0-9a-f]{64})")
_HOME: Final = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=/">'
    '<title>stenolog</title><a href="/">stenolog</a>'
)
_REDIRECT: Final = (
    '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
    '<meta http-equiv="refresh" content="0;url={url}"><title>stenolog</title>'
    '<a href="{url}">stenolog</a>'
)
_MAX_ATTEMPTS: Final = 4
"""Maximum number of tokens that are checked at the same time."""
_WRONG_TOKEN_SECONDS: Final = 0.5
_MAX_FORM_BYTES: Final = 10_000
_ENDED: Final = "ended-logins"
"""Session in the namespace `channels` with one message per logged-out cookie."""
_VALUE: Final = re.compile(r"([0-9]{1,12})\.([0-9a-f]{16})\.([0-9a-f]{64})")


class ProvenCaller(Struct, frozen=True):
    """A caller that proved to have the token without sending it, to keep it from impostors."""

    token: Token
    nonce: str

    def answer(self, url: str) -> str:
        """Return the proof for the caller that this link comes from a gateway with the token."""
        return self.token.proof("give", self.nonce, url)


class TokenProofs:
    """Checks proofs of the token: `Steno TIME.NONCE.PROOF`, with the time in milliseconds.

    Each proof is valid once, at the address that it was made for, for PROOF_SECONDS.
    """

    def __init__(self, token: Token, now: Callable[[], float] = time.time) -> None:
        self._token = token
        self._now = now
        # An older proof may have been used at an earlier process with this address, or at another
        # program that had the address before.
        self._begun = int(now() * 1_000) / 1_000
        self._used: dict[str, float] = {}
        """Used proofs, with the time until which they would be valid."""

    def check(self, given: str, end: str) -> ProvenCaller | None:
        """Return the caller that proved to have the token; None if the proof is invalid.

        `end`: the server end of the connection, as returned by `server_end`.
        """
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
        # A proof that is forgotten too early could be used again, so reject new ones instead.
        if nonce in self._used or len(self._used) >= _MOST_PROOFS:
            return None
        self._used[nonce] = at + PROOF_SECONDS
        return ProvenCaller(self._token, nonce)


class Cookies:
    """Creates and checks cookie values: an expiry time and a login id, signed.

    The key is derived from the token: a cookie survives a restart, is valid at every gateway with
    the same token, and becomes invalid when the token changes. The store records logged-out cookies
    until they expire.
    """

    def __init__(
        self, token: Token, now: Callable[[], float] = time.time, where: str | None = None
    ) -> None:
        """Record logged-out cookies in the store at `where`; None: in this process only."""
        self._key = token.key("login cookie")  # guard: cookie-bound-to-token
        self._now = now
        self._where = where
        self._ended_here = InMemoryStore()
        self._ended: frozenset[str] = frozenset()
        """Logged-out logins that have not expired, as of the last read."""
        self._read_at = -inf

    def make(self) -> str:
        """Create a cookie value."""
        until, login = str(int(self._now()) + COOKIE_SECONDS), secrets.token_hex(8)
        return f"{until}.{login}.{self._signature(until, login)}"

    def is_good(self, value: str) -> bool:
        """Return whether a cookie value is valid: signed, not expired and not logged out.

        Blocks on the store.
        """
        found = self._checked(value)
        if found is None:
            return False
        if abs(self._now() - self._read_at) >= ENDED_SECONDS:
            try:
                with _opened(self._where, self._ended_here) as store:
                    self._read(store)
            except StoreUnavailable:
                # The sessions are unreadable then too, and the pages report it.
                _logger.warning("could not read which browsers signed out", exc_info=True)
        return found[1] not in self._ended  # guard: cookie-ended

    def end(self, value: str) -> None:
        """Invalidate a cookie value at every gateway of the store. Blocks on the store."""
        found = self._checked(value)
        if found is None:
            return
        until, login = found
        with _opened(self._where, self._ended_here) as store:
            store.add_message(_ENDED, "user", f"{until}.{login}", once=login)
            if expired := self._read(store):
                # Hidden messages are not read again.
                store.hide(_ENDED, expired[0], expired[-1])

    def _checked(self, value: str) -> tuple[str, str] | None:
        """Return expiry time and login id of a signed value; None if it is invalid or expired."""
        found = _VALUE.fullmatch(value)
        if found is None:
            return None
        until, login, signature = found.groups()
        same = hmac.compare_digest(signature, self._signature(until, login))
        return (until, login) if same and int(until) > self._now() else None

    def _read(self, store: Store) -> list[int]:
        """Read the logged-out logins; return the seqs before the first that has not expired."""
        now = self._now()
        entries = [(one.seq, *one.content.split(".")) for one in store.get_history(_ENDED)]
        self._ended = frozenset(login for _, until, login in entries if int(until) > now)
        self._read_at = now
        return [seq for seq, _, _ in takewhile(lambda entry: int(entry[1]) <= now, entries)]

    def _signature(self, until: str, login: str) -> str:
        return hmac.digest(self._key, f"{until}.{login}".encode(), hashlib.sha256).hex()


def _comes_from_page(request: Request) -> bool:
    """Return whether a browser may come from another page, such as the file of `steno open`."""
    # Then it does not send the new cookie when it follows a redirect, only from a page of ours.
    is_browser = "text/html" in request.headers.get("accept", "")
    return is_browser and request.headers.get("sec-fetch-site") != "none"


def cookie_values(headers: Headers) -> list[str]:
    """Return the values of all cookies with our name."""
    # Another server on this machine can set a cookie with the same name.
    pairs = ";".join(headers.getlist("cookie")).split(";")
    split = (pair.strip().partition("=") for pair in pairs)
    return [value for name, _, value in split if name == COOKIE]


class TokenForm:
    """The form of the sign-in page. The right token is answered with a page that opens a link."""

    def __init__(self, links: LoginLinks, known: KnownHosts, own: str) -> None:
        self._links = links
        self._known = known
        self._own = own
        self._attempts = asyncio.Semaphore(_MAX_ATTEMPTS)

    async def submit(self, request: Request) -> Response:
        """Check the token in the body of a request."""
        # Read first: a slow sender must not use up the attempts of others.
        token = _token_in(await _short_body(request))
        if self._attempts.locked():
            return PlainTextResponse("Too many attempts to sign in. Try again later.", 429)
        async with self._attempts:
            if not self._links.is_token(token):  # guard: form-token
                # A program should not be able to try many tokens in a short time.
                await asyncio.sleep(_WRONG_TOKEN_SECONDS)
                words = "This is not the access token of this gateway."
                return error_response(401, words, code="wrong_token")
        # A link, because the host name of this page may not accept cookies.
        url = f"{self._origin(request)}{LOGIN}?code={self._links.make_code()}"
        return HTMLResponse(_REDIRECT.format(url=html.escape(url)))

    def _origin(self, request: Request) -> str:
        called = authority(request.headers["host"].encode("latin-1"))
        port = "" if called is None or called.port is None else f":{called.port}"
        accepts = called is not None and called.host in self._known.cookie_hosts
        host = called.host if accepts and called is not None else self._own
        return f"{request.scope['scheme']}://{f'[{host}]' if ':' in host else host}{port}"


async def _short_body(request: Request) -> bytes:
    """Return the body of a form; empty if it is too long for a token."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_FORM_BYTES:
            return b""
    return body


def _token_in(body: bytes) -> bytes:
    """Return the field `token` of a form; empty if it is missing."""
    try:
        fields = parse_qs(body.decode("ascii"), max_num_fields=8)
    except ValueError:
        return b""
    return fields.get("token", [""])[0].strip().encode(errors="replace")


def login_routes(links: LoginLinks, cookies: Cookies, known: KnownHosts, own: str) -> list[Route]:
    """Return the routes that create a link, log a browser in with it, and log it out.

    `own`: the host name at which browsers of this machine log in.
    """
    form = TokenForm(links, known, own)

    async def give(request: Request) -> Response:
        # A cookie must not create new cookies: it would never expire.
        if getattr(request.state, "caller", None) != BEARER:  # guard: links-need-token
            words = (
                "A cookie cannot create login links. Send the access token, or run `steno open`."
            )
            return error_response(403, words, code="token_needed")
        url = f"{LOGIN}?code={links.make_code()}"
        answer = {"url": url, "host": own, "expires_in": LINK_SECONDS}
        proven: ProvenCaller | None = getattr(request.state, "proven", None)
        if proven is not None:
            answer["proof"] = proven.answer(url)
        return JSONResponse(answer)

    async def take(request: Request) -> Response:
        if request.method != "GET":
            # Programs that preview a link must not use it up.
            return PlainTextResponse("", 405, {"Allow": "GET"})
        if not accepts_cookies(request.headers["host"].encode("latin-1"), known):
            # The response does not contain the right name, which only holders of the token may
            # know.
            return PlainTextResponse(_OTHER_NAME, 421)
        if not await asyncio.to_thread(links.use, request.query_params.get("code", "")):
            words = "This link was used before or has expired. Run `steno open` for a new one."
            return PlainTextResponse(words, 403)
        response = HTMLResponse(_HOME) if _comes_from_page(request) else RedirectResponse("/", 303)
        response.set_cookie(  # guard: cookie-http-only
            COOKIE,
            cookies.make(),
            max_age=COOKIE_SECONDS,
            path="/",
            secure=request.scope["scheme"] == "https",
            httponly=True,
            samesite="strict",
        )
        return response

    async def end(request: Request) -> Response:
        for value in cookie_values(request.headers):
            await asyncio.to_thread(cookies.end, value)
        response = JSONResponse({"logged_out": True})
        response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
        return response

    return [
        Route(LINKS, give, methods=["POST"]),
        Route(LOGIN, take, methods=["GET"]),
        Route(SIGN_IN, form.submit, methods=["POST"]),
        Route(LOGOUT, end, methods=["POST"]),
    ]
