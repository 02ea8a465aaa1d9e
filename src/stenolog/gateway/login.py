"""Sign-in of browsers: a one-time link, or the token in a form, sets a cookie.

Scripts cannot read the cookie. The cookie is valid at every gateway with the same token until it
expires or the token changes. No gateway keeps a list of logins.
"""

import hashlib
import hmac
import html
import re
import secrets
import time
from collections.abc import Callable
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

from stenolog.gateway.access_token import Token
from stenolog.gateway.hosts import KnownHosts, accepts_cookies, parse_authority
from stenolog.gateway.responses import error_response

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


# --- login ----------------------------------------------------------------------------------------


LOGIN_PATH: Final = "/login"
SIGN_IN_PATH: Final = "/sign-in"
"""Path to which the form of the sign-in page is sent."""
LOGOUT_PATH: Final = "/logout"
LINKS_PATH: Final = "/v1/login-links"
COOKIE_NAME: Final = "steno"
COOKIE_SECONDS: Final = 7 * 86_400
PROOF_SECONDS: Final = 30
BEARER: Final = "bearer"
"""Value of `request.state.caller` for callers that sent the token or proved that they have it."""

_WRONG_HOST_TEXT: Final = (
    "Browsers cannot sign in at this host name, because other programs on this machine would get "
    "the cookie. Run `{command}`, or add the name to gateway.hosts."
)
_PROOF_PATTERN: Final = re.compile(r"Steno ([0-9]{1,15})\.([0-9a-f]{64})")
_REDIRECT_HTML: Final = (
    '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
    '<meta http-equiv="refresh" content="0;url={url}"><title>stenolog</title>'
    '<a href="{url}">stenolog</a>'
)
_MAX_FORM_BYTES: Final = 10_000
_COOKIE_PATTERN: Final = re.compile(r"([0-9]{1,12})\.([0-9a-f]{64})")


def read_proof(
    token: Token, header: str, server_address: str, *, since: float, now: float
) -> str | None:
    """Return the proof in the header `Steno TIME.PROOF`; None if it is invalid.

    TIME is in milliseconds. The caller proves that it has the token without sending the token,
    because another program could have received the request. A proof is valid for PROOF_SECONDS at
    `server_address`, the address at which the server received it (from `address_text`). A proof
    made before `since` is invalid: an earlier process at the address may have received it.
    """
    match = _PROOF_PATTERN.fullmatch(header)
    if match is None:
        return None
    milliseconds, proof = match.groups()
    if not hmac.compare_digest(proof, token.proof("ask", server_address, milliseconds)):
        return None
    made_at = int(milliseconds) / 1_000
    is_recent = made_at >= since and abs(now - made_at) <= PROOF_SECONDS
    return proof if is_recent else None


class Cookies:
    """Creates and checks cookie values: an expiry time and its signature.

    The key of the signature is derived from the token. So a cookie survives a restart, is valid at
    every gateway with the same token, and becomes invalid when the token changes.
    """

    def __init__(self, token: Token, now: Callable[[], float] = time.time) -> None:
        self._key = token.derive_key("login cookie")  # guard: cookie-bound-to-token
        self._now = now

    def make_value(self) -> str:
        """Create a cookie value."""
        expiry = str(int(self._now()) + COOKIE_SECONDS)
        return f"{expiry}.{self._signature(expiry)}"

    def is_valid(self, value: str) -> bool:
        """Return whether a cookie value is signed with the token and not expired."""
        match = _COOKIE_PATTERN.fullmatch(value)
        if match is None:
            return False
        expiry, signature = match.groups()
        is_signed = hmac.compare_digest(signature, self._signature(expiry))
        return is_signed and int(expiry) > self._now()

    def _signature(self, expiry: str) -> str:
        return hmac.digest(self._key, expiry.encode(), hashlib.sha256).hex()


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
        proof = getattr(request.state, "proof", None)
        if proof is not None:
            # With this signature, the caller can check that the gateway has the token.
            fields["proof"] = token.proof("give", proof, url)
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
            response = HTMLResponse(_REDIRECT_HTML.format(url="/"))
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

    async def log_out(_: Request) -> Response:
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
