"""Sign-in of browsers: a one-time link, or the token in a form, sets a cookie.

Scripts cannot read the cookie. The cookie is valid at every gateway with the same token. The store
records which cookies were logged out.
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
from functools import partial
from itertools import takewhile
from math import inf
from typing import Final
from urllib.parse import parse_qs

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
from starlette.types import Scope

from stenolog.errors import StoreUnavailable
from stenolog.gateway.access_token import Token
from stenolog.gateway.hosts import KnownHosts, accepts_cookies, parse_authority
from stenolog.gateway.responses import error_response
from stenolog.sessions.folders import CHANNELS
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store

_logger = logging.getLogger("stenolog")

# --- login links ----------------------------------------------------------------------------------


LINK_SECONDS: Final = 60


class LoginLinks:
    """Creates codes of login links, and accepts each code once, within LINK_SECONDS.

    Codes are kept in this process. A code is therefore valid only at the server that made it: not
    at another server with the same token, and not after a restart.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._expiry_by_code: dict[str, float] = {}

    def make_code(self) -> str:
        """Create a code for one link."""
        now = self._now()
        unexpired = {code: expiry for code, expiry in self._expiry_by_code.items() if expiry > now}
        code = secrets.token_urlsafe(32)
        self._expiry_by_code = {**unexpired, code: now + LINK_SECONDS}
        return code

    def use_code(self, code: str) -> bool:
        """Mark a code as used. Return whether it was valid: made here, unexpired and unused."""
        expiry = self._expiry_by_code.pop(code, None)  # guard: login-link-once
        return expiry is not None and self._now() < expiry  # guard: login-link-expires


@contextmanager
def _open_shared_store(where: str | None, local_store: Store) -> Iterator[Store]:
    """Yield the store that all gateways share, or `local_store` if `where` is None."""
    if where is None:
        yield local_store
        return
    # The store is opened for each call, because calls are too rare to keep it open.
    with open_store(where, namespace=CHANNELS) as store:
        yield store


# --- login ----------------------------------------------------------------------------------------


LOGIN_PATH: Final = "/login"
SIGN_IN_PATH: Final = "/sign-in"
"""Path to which the form of the sign-in page is sent."""
LOGOUT_PATH: Final = "/logout"
LINKS_PATH: Final = "/v1/login-links"
COOKIE_NAME: Final = "steno"
COOKIE_SECONDS: Final = 7 * 86_400
LOGOUT_SECONDS: Final = 2
"""Maximum delay in seconds until a logout at one gateway takes effect at the others."""
PROOF_SECONDS: Final = 30
BEARER: Final = "bearer"
"""Value of `request.state.caller` for callers that sent the token or proved that they have it."""

_MAX_UNEXPIRED_PROOFS: Final = 1_000
_WRONG_HOST_TEXT: Final = (
    "Browsers cannot sign in at this host name, because other programs on this machine would get "
    "the cookie. Run `{command}`, or add the name to gateway.hosts."
)
_PROOF_PATTERN: Final = re.compile(
    r"[Ss]teno ([0-9]{1,15})\.([A-Za-z0-9_-]{16,64})\.([0-9a-f]{64})"
)
_HOME_REDIRECT_HTML: Final = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=/">'
    '<title>stenolog</title><a href="/">stenolog</a>'
)
_REDIRECT_HTML: Final = (
    '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
    '<meta http-equiv="refresh" content="0;url={url}"><title>stenolog</title>'
    '<a href="{url}">stenolog</a>'
)
_MAX_FORM_BYTES: Final = 10_000
_LOGOUTS_KEY: Final = "ended-logins"
"""Key of the session in the namespace `channels` that has one message per logged-out cookie."""
_COOKIE_PATTERN: Final = re.compile(r"([0-9]{1,12})\.([0-9a-f]{16})\.([0-9a-f]{64})")


class TokenProofs:
    """Checks proofs of the token: `Steno TIME.NONCE.PROOF`, with the time in milliseconds.

    A caller proves that it has the token without sending the token, because an impostor could
    receive the request. Each proof is valid once, for PROOF_SECONDS, at one address.
    """

    def __init__(self, token: Token, now: Callable[[], float] = time.time) -> None:
        self._token = token
        self._now = now
        # Proofs that were made before this process started are rejected.
        # An earlier process at the same address may have received these old proofs.
        self._start_time = int(now() * 1_000) / 1_000
        self._used_nonces: dict[str, float] = {}
        """Nonces of used proofs, each with the time at which its proof expires."""

    def check(self, header: str, server_address: str) -> str | None:
        """Return the nonce of a valid proof; None if the proof is invalid.

        `server_address` is the address at which the server received the proof, from `address_text`.
        """
        match = _PROOF_PATTERN.fullmatch(header)
        if match is None:
            return None
        milliseconds, nonce, proof = match.groups()
        expected_proof = self._token.proof("ask", server_address, milliseconds, nonce)
        if not hmac.compare_digest(proof, expected_proof):
            return None
        made_at, now = int(milliseconds) / 1_000, self._now()
        if abs(now - made_at) > PROOF_SECONDS or made_at < self._start_time:
            return None
        unexpired = {other: expiry for other, expiry in self._used_nonces.items() if expiry >= now}
        # A proof that is forgotten before it expires could be used again.
        # So if there are too many unexpired proofs, new proofs are rejected.
        if nonce in unexpired or len(unexpired) >= _MAX_UNEXPIRED_PROOFS:
            return None
        self._used_nonces = {**unexpired, nonce: made_at + PROOF_SECONDS}
        return nonce


class Cookies:
    """Creates and checks cookie values: an expiry time, a login id, and a signature of both.

    The key of the signature is derived from the token. So a cookie survives a restart, is valid at
    every gateway with the same token, and becomes invalid when the token changes. The store records
    logged-out cookies until they expire.
    """

    def __init__(
        self, token: Token, now: Callable[[], float] = time.time, where: str | None = None
    ) -> None:
        """Record logged-out cookies in the store at `where`; if None, only in this process."""
        self._key = token.derive_key("login cookie")  # guard: cookie-bound-to-token
        self._now = now
        self._open_store = partial(_open_shared_store, where, InMemoryStore())
        self._logged_out_ids: frozenset[str] = frozenset()
        """Ids of logged-out logins that had not expired when the store was last read."""
        self._logouts_read_at = -inf

    def make_value(self) -> str:
        """Create a cookie value."""
        expiry, login_id = str(int(self._now()) + COOKIE_SECONDS), secrets.token_hex(8)
        return f"{expiry}.{login_id}.{self._signature(expiry, login_id)}"

    def is_valid(self, value: str) -> bool:
        """Return whether a cookie value is valid: signed, not expired and not logged out.

        Blocks on the store.
        """
        parsed_value = self._parse_value(value)
        if parsed_value is None:
            return False
        if abs(self._now() - self._logouts_read_at) >= LOGOUT_SECONDS:
            try:
                with self._open_store() as store:
                    self._read_logouts(store)
            except StoreUnavailable:
                # Use the last known logouts: without the store, pages show an error anyway.
                _logger.warning("could not read which browsers signed out", exc_info=True)
        return parsed_value[1] not in self._logged_out_ids  # guard: cookie-ended

    def log_out(self, value: str) -> None:
        """Invalidate a cookie value at every gateway that shares the store. Blocks on the store."""
        parsed_value = self._parse_value(value)
        if parsed_value is None:
            return
        expiry, login_id = parsed_value
        with self._open_store() as store:
            store.add_message(_LOGOUTS_KEY, "user", f"{expiry}.{login_id}", once=login_id)
            if expired_seqs := self._read_logouts(store):
                # Hide the messages about expired logins: hidden messages are not read again.
                store.hide(_LOGOUTS_KEY, expired_seqs[0], expired_seqs[-1])

    def _parse_value(self, value: str) -> tuple[str, str] | None:
        """Return expiry time and login id of a cookie; None if the cookie is invalid or expired."""
        match = _COOKIE_PATTERN.fullmatch(value)
        if match is None:
            return None
        expiry, login_id, signature = match.groups()
        is_signed = hmac.compare_digest(signature, self._signature(expiry, login_id))
        return (expiry, login_id) if is_signed and int(expiry) > self._now() else None

    def _read_logouts(self, store: Store) -> list[int]:
        """Read the ids of logged-out logins.

        Returns the seqs of the messages about expired logins at the start of the session.
        """
        now, history = self._now(), store.get_history(_LOGOUTS_KEY)
        logouts = [(message.seq, *message.content.split(".")) for message in history]
        self._logged_out_ids = frozenset(
            login_id for _, expiry, login_id in logouts if int(expiry) > now
        )
        self._logouts_read_at = now
        return [seq for seq, _, _ in takewhile(lambda logout: int(logout[1]) <= now, logouts)]

    def _signature(self, expiry: str, login_id: str) -> str:
        return hmac.digest(self._key, f"{expiry}.{login_id}".encode(), hashlib.sha256).hex()


def _may_come_from_other_page(request: Request) -> bool:
    """Return whether another page, such as the file of `steno open`, may have opened this URL."""
    # The cookie is SameSite=Strict, so a browser sends it only if a page of this gateway makes the
    # request. If another page opened the URL, the browser would not send it after a redirect.
    # So the response is then a page of this gateway, which opens `/`.
    is_browser = "text/html" in request.headers.get("accept", "")
    return is_browser and request.headers.get("sec-fetch-site") != "none"


def cookie_values(headers: Headers) -> list[str]:
    """Return the values of all cookies that have the name of the gateway's cookie."""
    # There may be several, because another server on this machine can set a cookie with this name.
    pairs = ";".join(headers.getlist("cookie")).split(";")
    split_pairs = (pair.strip().partition("=") for pair in pairs)
    return [value for name, _, value in split_pairs if name == COOKIE_NAME]


def _link_origin(request: Request, known_hosts: KnownHosts, own_host: str) -> str:
    """Return the origin for a login link: scheme, a host that accepts cookies, and port."""
    authority = parse_authority(request.headers["host"])
    host, port = own_host, ""
    if authority is not None:
        host = authority.host if authority.host in known_hosts.cookie_hosts else host
        port = "" if authority.port is None else f":{authority.port}"
    return f"{request.scope['scheme']}://{f'[{host}]' if ':' in host else host}{port}"


async def _read_form_token(request: Request) -> bytes:
    """Return the field `token` of a form; empty if the form is invalid, too long or lacks it."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_FORM_BYTES:
            return b""
    try:
        fields = parse_qs(body.decode("ascii"), max_num_fields=8)
    except ValueError:
        return b""
    return fields.get("token", [""])[0].strip().encode(errors="replace")


def login_routes(
    token: Token, links: LoginLinks, cookies: Cookies, known_hosts: KnownHosts, own_host: str
) -> list[Route]:
    """Return the routes that create login links, and that log browsers in and out.

    `own_host` is the host name at which browsers of this machine log in.
    """

    async def create_link(request: Request) -> Response:
        # A caller with a cookie must not create login links, or its login would never expire.
        if getattr(request.state, "caller", None) != BEARER:  # guard: links-need-token
            command = open_command(request.scope)
            text = f"A cookie cannot create login links. Send the access token, or run `{command}`."
            return error_response(403, text, code="token_needed")
        url = f"{LOGIN_PATH}?code={links.make_code()}"
        fields = {"url": url, "host": own_host, "expires_in": LINK_SECONDS}
        nonce = getattr(request.state, "proof_nonce", None)
        if nonce is not None:
            # With this signature, the caller can check that the gateway has the token.
            fields["proof"] = token.proof("give", nonce, url)
        return JSONResponse(fields)

    async def sign_in(request: Request) -> Response:
        given_token = await _read_form_token(request)
        # The number of attempts is not limited, so that others cannot lock out the user.
        # A token is too long to be guessed.
        if not token.is_equal(given_token):  # guard: form-token
            text = "This is not the access token of this gateway."
            return error_response(401, text, code="wrong_token")
        if accepts_cookies(request.headers["host"], known_hosts):
            return home_with_cookie(request)
        # This host name accepts no cookies, so the response opens a login link at another name.
        url = f"{_link_origin(request, known_hosts, own_host)}{LOGIN_PATH}?code={links.make_code()}"
        return HTMLResponse(_REDIRECT_HTML.format(url=html.escape(url)))

    async def log_in(request: Request) -> Response:
        if request.method != "GET":
            # Programs may send HEAD to preview a link. A preview must not use up the link.
            return PlainTextResponse("", 405, {"Allow": "GET"})
        command = open_command(request.scope)
        if not accepts_cookies(request.headers["host"], known_hosts):
            # The response does not name the right host, which only holders of the token may know.
            return PlainTextResponse(_WRONG_HOST_TEXT.format(command=command), 421)
        if not links.use_code(request.query_params.get("code", "")):
            text = (
                "This link was used before, has expired, or is of another gateway. "
                f"Run `{command}` for a new one."
            )
            return PlainTextResponse(text, 403)
        return home_with_cookie(request)

    def home_with_cookie(request: Request) -> Response:
        """Return a response that signs the browser in and opens `/`."""
        response: Response = RedirectResponse("/", 303)
        if _may_come_from_other_page(request):
            response = HTMLResponse(_HOME_REDIRECT_HTML)
        response.set_cookie(  # guard: cookie-http-only
            COOKIE_NAME,
            cookies.make_value(),
            max_age=COOKIE_SECONDS,
            path="/",
            secure=request.scope["scheme"] == "https",
            httponly=True,
            samesite="strict",
        )
        return response

    async def log_out(request: Request) -> Response:
        for value in cookie_values(request.headers):
            await asyncio.to_thread(cookies.log_out, value)
        response = JSONResponse({"logged_out": True})
        response.delete_cookie(COOKIE_NAME, path="/", httponly=True, samesite="strict")
        return response

    return [
        Route(LINKS_PATH, create_link, methods=["POST"]),
        Route(LOGIN_PATH, log_in, methods=["GET"]),
        Route(SIGN_IN_PATH, sign_in, methods=["POST"]),
        Route(LOGOUT_PATH, log_out, methods=["POST"]),
    ]


def open_command(scope: Scope) -> str:
    """Return the `steno open` command, with this gateway's port, that signs a browser in."""
    server = scope.get("server")
    return f"steno open --port {server[1]}" if server else "steno open"
