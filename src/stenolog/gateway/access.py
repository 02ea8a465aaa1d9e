"""Access control: every request passes these checks before its path or body is used.

In this order: the request is well-formed, its `Host` is a name of this gateway, the page that sends
it is allowed (`Origin`), and the caller has the token or a cookie. Paths that are not explicitly
open require one of them.
"""

import asyncio
import re
from collections.abc import Callable, Iterable
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stenolog.gateway.access_token import Token
from stenolog.gateway.api_types import error_response
from stenolog.gateway.hosts import (
    KnownHosts,
    accepts_cookies,
    is_allowed_origin,
    is_known_host,
    is_same_origin,
    server_end,
)
from stenolog.gateway.limits import HEAD_BYTES
from stenolog.gateway.login import (
    BEARER,
    LINKS,
    LOGIN,
    LOGOUT,
    SIGN_IN,
    Cookies,
    ProvenCaller,
    TokenProofs,
    cookie_values,
)
from stenolog.gateway.viewer.pages import PageState, page_state

_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_READ_ONLY_POSTS: Final = frozenset({SIGN_IN, LOGOUT, LINKS, "/rendered"})
"""Requests that change no session: signing in and out, and rendering of text."""
_READ_ONLY: Final = "This gateway is read-only: it shows sessions and changes nothing."
_PROTECTION: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    # Cookies are shared by all ports of a host: a page of another server there could embed
    # responses.
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_METHODS: Final = "GET, POST, PUT, PATCH, DELETE"
_HEADER_NAMES: Final = re.compile(r"[A-Za-z0-9_, -]{1,2000}")
_UNAUTHORIZED: Final = (
    "The access token is missing or wrong. Send it as `Authorization: Bearer TOKEN`, or run "
    "`steno open` to sign a browser in."
)


class Access:
    """Middleware that rejects unauthorized requests and sets `request.state.caller`.

    `caller` is `bearer`, `cookie`, or `nobody` on open paths. A request for a login link may prove
    that it has the token without sending it; `request.state.proven` is set then. `open_paths`:
    paths that need no token, in addition to the login, which requires a code, and the sign-in form.
    `prefixes`: open paths that end in one more name, such as `/webhooks/`; their handlers must
    authenticate callers themselves. All responses get security headers for browsers.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: Token,
        known: KnownHosts,
        cookies: Cookies,
        open_paths: Iterable[str] = (),
        prefixes: Iterable[str] = (),
    ) -> None:
        self._app = app
        self._token = token
        self._known = known
        self._cookies = cookies
        self._proofs = TokenProofs(token)
        self._open = frozenset({LOGIN, SIGN_IN, *open_paths})
        self._prefixes = tuple(prefixes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or reject it."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = self._further_origin(headers)

        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._protect(MutableHeaders(scope=message), origin)
            await send(message)

        found = self._refused(scope, headers) or self._preflight(scope, headers, origin)
        if found is not None:
            await found(scope, receive, protected)
            return
        proven = self._proven(scope, headers)
        caller = await self._caller(headers) if proven is None else BEARER
        found = self._unwelcome(scope, headers, caller)
        if found is not None:
            await found(scope, receive, protected)
            return
        state = {**scope.get("state", {}), "caller": caller or "nobody", "proven": proven}
        await self._app({**scope, "state": state}, receive, protected)

    def _refused(self, scope: Scope, headers: Headers) -> Response | None:
        """Return the response to a malformed request, a wrong host or a forbidden origin."""
        if not is_known_host(_values(headers, "host"), self._known):  # guard: known-hosts-only
            words = "The gateway does not serve this host name. Add the name to gateway.hosts."
            return error_response(421, words, code="wrong_host")
        if not _raw_path(scope).startswith(b"/"):
            return error_response(400, "The request target must be a path.", code="wrong_target")
        if _head_bytes(scope) > HEAD_BYTES:  # guard: head-size-limit
            words = f"The request line and the headers have more than {HEAD_BYTES:,} bytes."
            closing = {"Connection": "close"}
            return error_response(431, words, code="head_too_large", headers=closing)
        if "content-length" in headers and "transfer-encoding" in headers:
            # Proxies may not agree on where such a request ends.
            words = "The request has a Content-Length and a Transfer-Encoding. Send only one."
            return error_response(400, words, code="two_lengths", headers={"Connection": "close"})
        origins = _values(headers, "origin")
        if origins and not self._may_ask(origins, headers):  # guard: origin-check
            words = "Pages of this origin may not use the gateway. Add it to gateway.origins."
            return error_response(403, words, code="foreign_origin")
        return None

    def _may_ask(self, origins: list[bytes], headers: Headers) -> bool:
        if len(origins) != 1:
            return False
        return is_same_origin(origins[0], _host(headers)) or is_allowed_origin(
            origins[0], self._known
        )

    def _further_origin(self, headers: Headers) -> str | None:
        """Return the `Origin` of an allowed page of another server; None for other requests."""
        origins = _values(headers, "origin")
        if len(origins) != 1 or not is_allowed_origin(origins[0], self._known):
            return None
        return origins[0].decode("latin-1")

    def _preflight(self, scope: Scope, headers: Headers, origin: str | None) -> Response | None:
        """Return the response to a CORS preflight request from an allowed origin."""
        asked = "access-control-request-method" in headers
        if origin is None or scope["method"] != "OPTIONS" or not asked:
            return None
        names = headers.get("access-control-request-headers", "")
        allowed = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": "600"}
        if _HEADER_NAMES.fullmatch(names):
            allowed["Access-Control-Allow-Headers"] = names
        return Response(None, 204, allowed)

    def _proven(self, scope: Scope, headers: Headers) -> ProvenCaller | None:
        """Return the proof in a request for a login link; it is valid for nothing else."""
        given = headers.getlist("authorization")
        server = scope.get("server")
        if len(given) != 1 or scope["method"] != "POST" or scope["path"] != LINKS or not server:
            return None
        # Not `Host`, which an impostor that forwards a proof can choose freely.
        return self._proofs.check(given[0], server_end(*server))

    async def _caller(self, headers: Headers) -> str | None:
        """Return how the caller authenticated; None if it did not."""
        given = _values(headers, "authorization")
        if given:
            scheme, _, token = given[0].partition(b" ")
            # guard: one-authorization-header
            is_token = len(given) == 1 and scheme.lower() == b"bearer"
            return BEARER if is_token and self._token.is_same(token.strip()) else None
        if not accepts_cookies(_host(headers), self._known):  # guard: cookie-own-host
            return None
        for value in cookie_values(headers):
            if await asyncio.to_thread(self._cookies.is_good, value):
                return "cookie"
        return None

    def _unwelcome(self, scope: Scope, headers: Headers, caller: str | None) -> Response | None:
        """Return the response to a caller that may not make this request."""
        if caller is None and not self._is_open(scope["path"], _raw_path(scope)):
            wanted = {"WWW-Authenticate": "Bearer"}
            return error_response(401, _UNAUTHORIZED, code="invalid_api_key", headers=wanted)
        if caller == "cookie" and scope["method"] not in _SAFE and not _is_own_page(headers):
            # A browser sends the cookie with requests of any page.
            words = "With a cookie, only pages of this gateway may change data. Send the token."
            return error_response(403, words, code="foreign_page")
        return None

    def _is_open(self, path: str, raw: bytes) -> bool:
        # Compare the raw path too: the application routes by it.
        if path in self._open:  # guard: open-paths-exact
            return raw == path.encode()
        for prefix in self._prefixes:
            rest = path.removeprefix(prefix)
            # One plain name, which cannot be resolved to another path.
            if rest != path and rest not in ("", ".", "..") and not set(rest) & set("/\\"):
                return raw.startswith(prefix.encode())
        return False

    def _protect(self, headers: MutableHeaders, origin: str | None) -> None:
        for name, value in _PROTECTION.items():
            headers.setdefault(name, value)
        if self._known.origins:
            headers.add_vary_header("Origin")
        if origin is not None:
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = "Retry-After, X-Session-Key"


class ReadOnlyRequests:
    """Middleware of a read-only gateway: it rejects every request that could change something.

    Also tells the pages that nothing can be changed, and how much is indexed.
    """

    def __init__(self, app: ASGIApp, *, indexing: Callable[[], tuple[int, int] | None]) -> None:
        self._app = app
        self._indexing = indexing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or reject it."""
        is_change = scope["type"] == "http" and scope["method"] not in _SAFE
        if is_change and scope["path"] not in _READ_ONLY_POSTS:  # guard: read-only-rejects
            found = error_response(403, _READ_ONLY, code="read_only")
            await found(scope, receive, send)
            return
        before = page_state.set(PageState(read_only=True, indexing=self._indexing()))
        try:
            await self._app(scope, receive, send)
        finally:
            page_state.reset(before)


def _raw_path(scope: Scope) -> bytes:
    """Return the path as it was sent, percent-encoded."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw


def _head_bytes(scope: Scope) -> int:
    """Return the size of the request line and the headers."""
    line = len(scope["method"]) + len(_raw_path(scope)) + len(scope.get("query_string", b""))
    return line + sum(len(name) + len(value) + 4 for name, value in scope["headers"])


def _is_own_page(headers: Headers) -> bool:
    origins = _values(headers, "origin")
    if origins:
        return is_same_origin(origins[0], _host(headers))
    return headers.get("sec-fetch-site") == "same-origin"  # guard: cookie-needs-same-origin


def _host(headers: Headers) -> bytes:
    return headers["host"].encode("latin-1")


def _values(headers: Headers, name: str) -> list[bytes]:
    return [value.encode("latin-1") for value in headers.getlist(name)]
