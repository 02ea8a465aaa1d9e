"""Access control: every request passes four checks before its path or body is used.

The checks run in this order: `Host` is a name of this gateway; the request is well-formed;
`Origin`, the server of the page that sends the request, is allowed; the caller has the token or a
cookie. Paths that are listed as open need neither a token nor a cookie.
"""

import re
import time
from collections.abc import Callable, Iterable
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stenolog.gateway.access_token import Token
from stenolog.gateway.hosts import (
    KnownHosts,
    accepts_cookies,
    address_text,
    is_allowed_origin,
    is_known_host,
    is_same_origin,
)
from stenolog.gateway.login import (
    BEARER,
    LINKS_PATH,
    LOGIN_PATH,
    LOGOUT_PATH,
    SIGN_IN_PATH,
    Cookies,
    cookie_values,
    open_command,
    read_proof,
)
from stenolog.gateway.responses import error_response
from stenolog.gateway.viewer.pages import PageState, page_state

MAX_HEAD_BYTES: Final = 16_384
"""Maximum size of the head of a request: the request line and the headers."""
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_READ_ONLY_POST_PATHS: Final = frozenset({SIGN_IN_PATH, LOGOUT_PATH, LINKS_PATH})
"""Paths of POST requests that change no session: signing in and out."""
_SECURITY_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    # Browsers send the cookies of a host to all its ports.
    # Without Cross-Origin-Resource-Policy, a page at another port could embed responses.
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_CORS_METHODS: Final = "GET, POST, PUT, PATCH, DELETE"
_HEADER_NAMES_PATTERN: Final = re.compile(r"[A-Za-z0-9_, -]{1,2000}")
_UNAUTHORIZED_TEXT: Final = (
    "The access token is missing or wrong. Send it as `Authorization: Bearer TOKEN`, or run "
    "`{command}` to sign a browser in."
)


class AccessMiddleware:
    """Middleware that rejects unauthorized requests and sets `request.state.caller`.

    `caller` is `bearer`, `cookie` or `nobody`. Only open paths accept `nobody`. A caller that
    requests a login link can prove that it has the token instead of sending the token.
    `request.state.proof` is this proof, or None.

    `open_paths` need no token. The login path and the sign-in form are always open. A path is also
    open if it consists of one of the `open_prefixes`, such as `/webhooks/`, and one name. The
    handlers of open paths must authenticate callers themselves. All responses get security headers
    for browsers.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: Token,
        known_hosts: KnownHosts,
        cookies: Cookies,
        open_paths: Iterable[str] = (),
        open_prefixes: Iterable[str] = (),
    ) -> None:
        self._app = app
        self._token = token
        self._known_hosts = known_hosts
        self._cookies = cookies
        # In whole milliseconds, like the times of proofs.
        self._start_time = int(time.time() * 1_000) / 1_000
        self._open_paths = frozenset({LOGIN_PATH, SIGN_IN_PATH, *open_paths})
        self._open_prefixes = tuple(open_prefixes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or reject it."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = self._allowed_origin(headers)

        async def send_with_security_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._add_security_headers(MutableHeaders(scope=message), origin)
            await send(message)

        response = self._check_head(scope, headers, origin)
        response = response or self._preflight_response(scope, headers, origin)
        if response is None:
            proof = self._read_proof(scope, headers)
            caller = self._authenticate(headers) if proof is None else BEARER
            response = self._check_caller(scope, headers, caller)
        if response is not None:
            if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
                # The body is not read. Without this header, the server would read all of it.
                response.headers["Connection"] = "close"
            await response(scope, receive, send_with_security_headers)
            return
        state = {**scope.get("state", {}), "caller": caller or "nobody", "proof": proof}
        await self._app({**scope, "state": state}, receive, send_with_security_headers)

    def _check_head(self, scope: Scope, headers: Headers, origin: str | None) -> Response | None:
        """Return the error response if the host, the format or the origin is wrong, otherwise None.

        `origin` is the request's `Origin` if the settings list it, otherwise None.
        """
        hosts = headers.getlist("host")
        if not is_known_host(hosts, self._known_hosts):  # guard: known-hosts-only
            text = "The gateway does not serve this host name. Add the name to gateway.hosts."
            return error_response(421, text, code="wrong_host")
        if not _raw_path(scope).startswith(b"/"):
            return error_response(400, "The request target must be a path.", code="wrong_target")
        if _head_bytes(scope) > MAX_HEAD_BYTES:  # guard: head-size-limit
            text = f"The request line and the headers have more than {MAX_HEAD_BYTES:,} bytes."
            return error_response(431, text, code="head_too_large", headers={"Connection": "close"})
        if "content-length" in headers and "transfer-encoding" in headers:
            # Proxies may disagree where a request with both length headers ends.
            text = "The request has a Content-Length and a Transfer-Encoding. Send only one."
            return error_response(400, text, code="two_lengths", headers={"Connection": "close"})
        origins = headers.getlist("origin")
        is_own_page = len(origins) == 1 and is_same_origin(origins[0], hosts[0])
        if origins and not is_own_page and origin is None:  # guard: origin-check
            text = "This origin may not use the gateway. Add the origin to gateway.origins."
            return error_response(403, text, code="foreign_origin")
        return None

    def _allowed_origin(self, headers: Headers) -> str | None:
        """Return the request's `Origin` if the settings list it, otherwise None."""
        origins = headers.getlist("origin")
        is_allowed = len(origins) == 1 and is_allowed_origin(origins[0], self._known_hosts)
        return origins[0] if is_allowed else None

    def _preflight_response(
        self, scope: Scope, headers: Headers, origin: str | None
    ) -> Response | None:
        """Return the response to a CORS preflight request of an allowed origin, otherwise None."""
        is_preflight = scope["method"] == "OPTIONS" and "access-control-request-method" in headers
        if origin is None or not is_preflight:
            return None
        header_names = headers.get("access-control-request-headers", "")
        cors = {"Access-Control-Allow-Methods": _CORS_METHODS, "Access-Control-Max-Age": "600"}
        if _HEADER_NAMES_PATTERN.fullmatch(header_names):
            cors["Access-Control-Allow-Headers"] = header_names
        return Response(None, 204, cors)

    def _read_proof(self, scope: Scope, headers: Headers) -> str | None:
        """Return the valid proof in a request for a login link, otherwise None."""
        values, server = headers.getlist("authorization"), scope.get("server")
        is_link_request = scope["method"] == "POST" and scope["path"] == LINKS_PATH
        if not is_link_request or len(values) != 1 or not server:
            return None
        # The `Host` header is not used: an impostor that forwards a proof can send any `Host`.
        address = address_text(*server)
        return read_proof(self._token, values[0], address, since=self._start_time, now=time.time())

    def _authenticate(self, headers: Headers) -> str | None:
        """Return `bearer` or `cookie`; None if the caller did not authenticate."""
        values = headers.getlist("authorization")
        if values:
            scheme, _, token = values[0].encode("latin-1").partition(b" ")
            # guard: one-authorization-header
            is_bearer = len(values) == 1 and scheme.lower() == b"bearer"
            return BEARER if is_bearer and self._token.is_equal(token.strip()) else None
        if not accepts_cookies(headers["host"], self._known_hosts):  # guard: cookie-own-host
            return None
        return "cookie" if any(map(self._cookies.is_valid, cookie_values(headers))) else None

    def _check_caller(self, scope: Scope, headers: Headers, caller: str | None) -> Response | None:
        """Return the error response if the caller may not make this request, otherwise None."""
        if caller is None and not self._is_open_path(scope["path"], _raw_path(scope)):
            challenge = {"WWW-Authenticate": "Bearer"}
            text = _UNAUTHORIZED_TEXT.format(command=open_command(scope))
            return error_response(401, text, code="invalid_api_key", headers=challenge)
        is_change = scope["method"] not in _SAFE_METHODS
        if caller == "cookie" and is_change and not _comes_from_own_page(headers):
            # A browser may send the cookie even if a page of another server makes the request.
            text = "With a cookie, only pages of this gateway may change data. Send the token."
            return error_response(403, text, code="foreign_page")
        return None

    def _is_open_path(self, path: str, raw_path: bytes) -> bool:
        # Compare the raw path too, because the application routes by the raw path.
        if path in self._open_paths:  # guard: open-paths-exact
            return raw_path == path.encode()
        for prefix in self._open_prefixes:
            name = path.removeprefix(prefix)
            # After the prefix, only one plain name is allowed: `..` or `/` could lead elsewhere.
            if name != path and name not in ("", ".", "..") and not set(name) & set("/\\"):
                return raw_path.startswith(prefix.encode())
        return False

    def _add_security_headers(self, headers: MutableHeaders, origin: str | None) -> None:
        for name, value in _SECURITY_HEADERS.items():
            headers.setdefault(name, value)
        if self._known_hosts.origins:
            headers.add_vary_header("Origin")
        if origin is not None:
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = "Retry-After, X-Session-Key"


class ReadOnlyRequests:
    """Middleware of a read-only gateway: it rejects every request that could change data.

    It also sets `page_state`, so that pages hide the buttons that change data and show how many
    sessions are indexed.
    """

    def __init__(
        self, app: ASGIApp, *, indexing_progress: Callable[[], tuple[int, int] | None]
    ) -> None:
        self._app = app
        self._indexing_progress = indexing_progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or reject it."""
        is_change = scope["type"] == "http" and scope["method"] not in _SAFE_METHODS
        if is_change and scope["path"] not in _READ_ONLY_POST_PATHS:  # guard: read-only-rejects
            text = "This gateway is read-only: it shows sessions and changes nothing."
            await error_response(403, text, code="read_only")(scope, receive, send)
            return
        state = PageState(read_only=True, indexing_progress=self._indexing_progress())
        state_token = page_state.set(state)
        try:
            await self._app(scope, receive, send)
        finally:
            page_state.reset(state_token)


def _raw_path(scope: Scope) -> bytes:
    """Return the path as it was sent, percent-encoded."""
    raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw_path


def _head_bytes(scope: Scope) -> int:
    """Return the size of the request line and the headers."""
    line_bytes = len(scope["method"]) + len(_raw_path(scope)) + len(scope.get("query_string", b""))
    return line_bytes + sum(len(name) + len(value) + 4 for name, value in scope["headers"])


def _comes_from_own_page(headers: Headers) -> bool:
    if "origin" in headers:
        return is_same_origin(headers["origin"], headers["host"])
    return headers.get("sec-fetch-site") == "same-origin"  # guard: cookie-needs-same-origin
