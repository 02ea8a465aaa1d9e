"""Shared parts of all pages: templates, static files, headers, session titles, error pages."""

import asyncio
import hashlib
from base64 import b64encode
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from pathlib import PurePath
from typing import Any, Final, TypeVar

import msgspec
from jinja2 import Environment
from msgspec import Struct
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stenolog.catalog.entries import Entry
from stenolog.catalog.searchable_text import tags_from, title_from
from stenolog.gateway.login import LOGIN_PATH, SIGN_IN_PATH, open_command
from stenolog.gateway.requests import ApiCall
from stenolog.gateway.responses import ErrorResponse
from stenolog.gateway.shared_state import Gateway
from stenolog.gateway.viewer.templating import (
    STYLE_SHEETS,
    csp_hash,
    new_environment,
    static_file,
    static_text,
)
from stenolog.records import SessionInfo
from stenolog.sessions.fork_source import ForkSource

CONTENT_SECURITY_POLICY: Final = (  # guard: content-security-policy
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Content security policy: only the viewer's scripts run, and nothing loads from other hosts."""

_STATIC_FILES: Final = (
    *(*STYLE_SHEETS, "uPlot.min.css", "uPlot.iife.min.js", "icon.svg"),
    *("viewer.js", "theme.js", "banners.js", "list.js", "turns.js", "outline.js", "copy.js"),
)
"""Names of the static files. A request for any other name gets status 404."""
_MEDIA_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_HEADLINES: Final = {
    401: "Sign in",
    403: "Not allowed",
    404: "Not found",
    421: "Unknown host name",
    503: "Temporarily unavailable",
}

T = TypeVar("T")


class PageState(Struct, frozen=True, kw_only=True):
    """State of the gateway that every page shows."""

    read_only: bool = False
    """Whether the gateway is read-only."""
    indexing_progress: tuple[int, int] | None = None
    """Number of indexed sessions and of all sessions; None if all are indexed."""


_DEFAULT_STATE: Final = PageState()
page_state: Final = ContextVar("page_state", default=_DEFAULT_STATE)


def render(template: str, **values: Any) -> bytes:
    """Render a template. Values are escaped where the template inserts them."""
    state = msgspec.structs.asdict(page_state.get())
    text = _environment().get_template(template).render(**state, **values)
    # Lone surrogates cannot be encoded as UTF-8.
    return text.encode(errors="replace")


def page(template: str, *, status: int = 200, **values: Any) -> Response:
    """Return a response with a rendered template, which is a page or a part of a page."""
    return Response(
        render(template, **values),
        status_code=status,
        media_type="text/html; charset=utf-8",
        headers={"Content-Security-Policy": CONTENT_SECURITY_POLICY},
    )


def compile_templates() -> None:
    """Compile every template, so that the first request does not wait for the compiler."""
    environment = _environment()
    for name in ("conversation.html", *environment.list_templates(["html"])):
        environment.get_template(name)


def headline(status: int) -> str:
    """Return the headline of an error page."""
    return _HEADLINES.get(status, "Request failed" if status < 500 else "Something went wrong")


async def static(request: Request) -> Response:
    """Serve a static file.

    The address contains a hash of the file's content, so browsers may cache the file forever.
    """
    name = request.path_params["name"]
    if name not in _STATIC_FILES:  # guard: static-files-listed
        raise HTTPException(404, f"there is no static file {name!r}")
    headers = {"Cache-Control": "private, max-age=31536000, immutable"}
    media_type = _MEDIA_TYPES[PurePath(name).suffix]
    return Response(static_file(name), media_type=media_type, headers=headers)


@cache
def _environment() -> Environment:
    environment = new_environment()
    # The address of a static file changes with its content.
    hashes = {name: hashlib.sha256(static_file(name)).hexdigest()[:12] for name in _STATIC_FILES}
    addresses = {name: f"/static/{name}?v={digest}" for name, digest in hashes.items()}
    environment.globals.update(static=addresses)
    return environment


# --- entries --------------------------------------------------------------------------------------
# The catalog entry of a session, for the header of its pages.


# Indexing a long session may take longer, but the page is readable without the entry.
CATALOG_WAIT_SECONDS: Final = 0.25
"""Seconds that a page waits for a catalog that is being built."""


async def run_within(gateway: Gateway, seconds: float, read: Callable[[], T]) -> T | None:
    """Run a function in a thread and return its result; None after `seconds` without a result."""
    task = gateway.start_task(gateway.loop.run(read))
    await asyncio.wait({task}, timeout=seconds)
    if task.done():
        return task.result()
    # Retrieve the exception, so that asyncio does not log it. A later request reports the error.
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return None


async def entry_of(call: ApiCall[Any, Any]) -> Entry | None:
    """Return the catalog entry of a session; None if the catalog does not answer in time."""
    agent = call.agent
    return await run_within(
        call.gateway, CATALOG_WAIT_SECONDS, lambda: agent.catalog.entry(agent.resolve_key(call.key))
    )


def session_header(
    info: SessionInfo, entry: Entry | None, source: ForkSource | None
) -> dict[str, Any]:
    """Return the template values that all pages of a session need for their header."""
    title = title_from(info.meta, "") if entry is None else entry.title
    return {
        "info": info,
        "entry": entry,
        "source": source,
        "title": title or info.key,
        "tags": tags_from(info.meta),
    }


# --- sign in --------------------------------------------------------------------------------------
# Error pages for browsers: the sign-in page if the cookie is missing, and pages for other errors.
#
# A browser without a valid cookie gets no other file, not even the style sheet.
# Therefore the sign-in page contains the style sheet, and its policy allows the style's hash.


_LINK_HINT: Final = "Links work once and expire after a minute."
_NOT_SIGNED_IN: Final = "This browser isn't signed in."
_STYLES: Final = ("viewer.css", "banners.css")
_SCRIPTS: Final = ("sign-in.js",)


class BrowserErrorPages:
    """Middleware that replaces errors for browsers by the sign-in page or by an error page."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Only error responses are changed."""
        if scope["type"] != "http" or not _accepts_html(scope):
            await self._app(scope, receive, send)
            return
        error_start: Message | None = None
        body = b""

        async def send_page(message: Message) -> None:
            nonlocal error_start, body
            if message["type"] == "http.response.start" and _is_plain_error(message):
                error_start = message
            elif error_start is None or message["type"] != "http.response.body":
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    html = _render_sign_in_or_error(error_start["status"], scope, body)
                    _set_html_headers(error_start, html)
                    await send(error_start)
                    # Send the error page instead of the original response body.
                    await send({**message, "body": b"" if scope["method"] == "HEAD" else html})

        await self._app(scope, receive, send_page)


def _accepts_html(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return "text/html" in headers.get("accept", "") and "authorization" not in headers


def _is_plain_error(start: Message) -> bool:
    """Return whether this message starts an error response that is not an HTML page."""
    media_type = Headers(raw=start["headers"]).get("content-type", "")
    return bool(start["status"] >= 400 and not media_type.startswith("text/html"))


def _set_html_headers(start: Message, html: bytes) -> None:
    headers = MutableHeaders(scope=start)
    headers["Content-Type"] = "text/html; charset=utf-8"
    headers["Content-Length"] = str(len(html))
    headers["Content-Security-Policy"] = (
        f"default-src 'none'; style-src '{csp_hash(_STYLES)}'; script-src '{csp_hash(_SCRIPTS)}'; "
        "img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )
    # With the policy no-referrer, a browser would send the form without the origin of this page.
    headers["Referrer-Policy"] = "same-origin"


def _render_sign_in_or_error(status: int, scope: Scope, body: bytes) -> bytes:
    is_login_link = status == 403 and scope["path"] == LOGIN_PATH
    message = _error_message(body)
    is_wrong_token = status == 401 and scope["path"] == SIGN_IN_PATH
    return render(
        "outside.html",
        headline="This link is no longer valid" if is_login_link else headline(status),
        explanation=_LINK_HINT if is_login_link else _NOT_SIGNED_IN if status == 401 else message,
        code=status,
        sign_in=is_login_link or status == 401,
        command=open_command(scope),
        port=(scope.get("server") or ("", "PORT"))[1],
        problem=message if is_wrong_token else "",
        style=static_text(_STYLES),
        script=static_text(_SCRIPTS),
        picture="data:image/svg+xml;base64," + b64encode(static_file("icon.svg")).decode(),
    )


def api_address(scope: Scope) -> str:
    """Return the address of this gateway for OpenAI clients on the same machine."""
    server = scope.get("server")
    return f"http://127.0.0.1:{server[1]}/v1" if server else "http://127.0.0.1:8787/v1"


def _error_message(body: bytes) -> str:
    """Return the message in the body of an error response, which is JSON or plain text."""
    try:
        return _capitalized(msgspec.json.decode(body, type=ErrorResponse).error.message)
    except msgspec.MsgspecError:
        return _capitalized(body.decode(errors="replace"))


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
