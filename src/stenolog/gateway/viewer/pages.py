"""Shared parts of all pages: templates, static files, headers, session titles, error pages."""

import asyncio
import hashlib
from base64 import b64encode
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import cache
from typing import Any, Final

import msgspec
from jinja2 import Environment
from msgspec import Struct
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stenolog.agent.instance import AgentInstance
from stenolog.catalog.entries import Entry
from stenolog.catalog.searchable_text import title_from
from stenolog.errors import NoSuchSession, StenologError
from stenolog.gateway.api_types import ErrorResponse
from stenolog.gateway.error_responses import status_of, without_secrets
from stenolog.gateway.login import LOGIN, SIGN_IN
from stenolog.gateway.openapi import VERSION
from stenolog.gateway.requests import ApiCall
from stenolog.gateway.shared_state import gateway_of
from stenolog.gateway.viewer.templating import new_environment, static_file
from stenolog.records import SessionInfo

POLICY: Final = (  # guard: content-security-policy
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Content security policy of the pages. Only our scripts run; nothing loads from other hosts."""

_TYPES: Final = {
    "viewer.css": "text/css; charset=utf-8",
    "viewer.js": "text/javascript; charset=utf-8",
    "theme.js": "text/javascript; charset=utf-8",
    "banners.css": "text/css; charset=utf-8",
    "banners.js": "text/javascript; charset=utf-8",
    "list.css": "text/css; charset=utf-8",
    "list.js": "text/javascript; charset=utf-8",
    "turns.js": "text/javascript; charset=utf-8",
    "conversation.css": "text/css; charset=utf-8",
    "outline.js": "text/javascript; charset=utf-8",
    "tools.css": "text/css; charset=utf-8",
    "copy.js": "text/javascript; charset=utf-8",
    "uPlot.iife.min.js": "text/javascript; charset=utf-8",
    "uPlot.min.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
"""Media types of the static files. No other file is served, whatever name a request contains."""

_HEADLINES: Final = {
    401: "Sign in",
    403: "Not allowed",
    404: "Not found",
    421: "Unknown host name",
    503: "Temporarily unavailable",
}

Handler = Callable[[Request], Awaitable[Response]]


class PageState(Struct, frozen=True, kw_only=True):
    """What all pages of a request show."""

    read_only: bool = False
    """Whether nothing can be changed."""
    indexing: tuple[int, int] | None = None
    """Number of indexed sessions and of all sessions; None if all are indexed."""


_NORMAL: Final = PageState()
page_state: Final = ContextVar("page_state", default=_NORMAL)


def render(template: str, **values: Any) -> bytes:
    """Render a template. Values are escaped where the template inserts them."""
    state = page_state.get()
    given = {"read_only": state.read_only, "indexing": state.indexing, **values}
    text = _environment().get_template(template).render(**given)
    # Lone surrogates cannot be encoded as UTF-8.
    return text.encode(errors="replace")


def page(template: str, *, status: int = 200, **values: Any) -> Response:
    """Return a rendered template, a full page or a part of one, as a response."""
    return Response(
        render(template, **values),
        status_code=status,
        media_type="text/html; charset=utf-8",
        headers={"Content-Security-Policy": POLICY},
    )


def compile_templates() -> None:
    """Compile every template, so that the first request does not wait for it."""
    environment = _environment()
    for name in ("conversation.html", *environment.list_templates()):
        environment.get_template(name)


def with_error_pages(answer: Handler) -> Handler:
    """Wrap a handler so that its errors are returned as HTML pages."""

    async def answered(request: Request) -> Response:
        try:
            return await answer(request)
        except HTTPException as error:
            return _error_page(request, error.status_code, error.detail)
        except StenologError as error:
            status = status_of(error)
            if status is None or status == 500:
                raise  # so that the error is logged
            if type(error) is NoSuchSession:
                words = f'There is no session "{error.key}".'
                return _error_page(request, status, words, "Session not found")
            return _error_page(request, status, str(error))

    return answered


def _error_page(request: Request, status: int, detail: str, title: str = "") -> Response:
    told = without_secrets(detail, gateway_of(request).settings)
    return page(
        "failed.html",
        status=status,
        agent="main",
        code=status,
        headline=title or headline(status),
        told=told[:1].upper() + told[1:],
        sign_in=False,
        command="",
    )


def headline(status: int) -> str:
    """Return the headline of an error page."""
    return _HEADLINES.get(status, "Request failed" if status < 500 else "Something went wrong")


async def static(request: Request) -> Response:
    """Serve a static file.

    Its address contains a hash of its content, so browsers may cache it forever.
    """
    name = request.path_params["name"]
    if name not in _TYPES:  # guard: static-files-listed
        raise HTTPException(404, f"there is no static file {name!r}")
    headers = {"Cache-Control": "private, max-age=31536000, immutable"}
    return Response(static_file(name), media_type=_TYPES[name], headers=headers)


def static_address(name: str) -> str:
    """Return the address of a static file. It changes with the content of the file."""
    return f"/static/{name}?v={hashlib.sha256(static_file(name)).hexdigest()[:12]}"


@cache
def _environment() -> Environment:
    made = new_environment()
    made.globals.update(
        static={name: static_address(name) for name in _TYPES},
        version=VERSION,
    )
    return made


# --- entries --------------------------------------------------------------------------------------
# The catalog entry of a session, for the header of its pages.


CATALOG_WAIT: Final = 0.25
"""Seconds a page waits for a catalog that is being built.

Indexing a long session takes longer, and the page is readable without the entry.
"""


async def entry_of(call: ApiCall[Any, Any]) -> Entry | None:
    """Return the catalog entry of a session; None if the catalog does not answer in time."""
    read = call.gateway.loop.run(_catalog_entry, call.agent, call.key)
    asked = call.gateway.keep_task(asyncio.create_task(read))
    await asyncio.wait({asked}, timeout=CATALOG_WAIT)
    if asked.done():
        return asked.result()
    # Nothing waits for it any more; the next request reports the error.
    asked.add_done_callback(lambda task: task.cancelled() or task.exception())
    return None


def title_of(entry: Entry | None, info: SessionInfo) -> str:
    """Return the title of a session."""
    return (entry.title if entry is not None else title_from(info.meta, "")) or info.key


def _catalog_entry(agent: AgentInstance, key: str) -> Entry | None:
    return agent.catalog.entry(agent.resolve_key(key))


# --- sign in --------------------------------------------------------------------------------------
# Error pages for browsers: the sign-in page without a valid cookie, and pages for other errors.
#
# A browser without a valid cookie gets no other file, not even the style sheet. Therefore the page
# contains the style sheet, and the page's policy allows it by its hash.


_LINK_HINT: Final = "Links work once and expire after a minute."
_NOT_SIGNED_IN: Final = "This browser isn't signed in."


class SignInPage:
    """Layer that turns errors into pages for browsers: the sign-in page, or the error."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Only error responses are changed."""
        if scope["type"] != "http" or not _wants_a_page(scope):
            await self._app(scope, receive, send)
            return
        begun: Message | None = None
        body = b""

        async def told(message: Message) -> None:
            nonlocal begun, body
            if message["type"] == "http.response.start" and _is_plain_error(message):
                begun = message
            elif begun is None or message["type"] != "http.response.body":
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    made = _outside_page(begun["status"], scope, body)
                    _set_headers(begun, made)
                    await send(begun)
                    # The page replaces the body, once.
                    await send({**message, "body": b"" if scope["method"] == "HEAD" else made})

        await self._app(scope, receive, told)


def _wants_a_page(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return "text/html" in headers.get("accept", "") and "authorization" not in headers


def _is_plain_error(start: Message) -> bool:
    """Return whether this starts an error response that is not a page."""
    told = Headers(raw=start["headers"]).get("content-type", "")
    return bool(start["status"] >= 400 and not told.startswith("text/html"))


def _set_headers(start: Message, made: bytes) -> None:
    headers = MutableHeaders(scope=start)
    headers["Content-Type"] = "text/html; charset=utf-8"
    headers["Content-Length"] = str(len(made))
    headers["Content-Security-Policy"] = (
        f"default-src 'none'; style-src '{_style_hash()}'; script-src '{_script_hash()}'; "
        "img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )
    # With no-referrer, a browser would send the form without the origin of this page.
    headers["Referrer-Policy"] = "same-origin"


def _outside_page(status: int, scope: Scope, body: bytes) -> bytes:
    is_link = status == 403 and scope["path"] == LOGIN
    told = _error_message(body)
    words = _LINK_HINT if is_link else _NOT_SIGNED_IN if status == 401 else told
    is_wrong_token = status == 401 and scope["path"] == SIGN_IN
    return render(
        "outside.html",
        headline="This link is no longer valid" if is_link else headline(status),
        told=words,
        code=status,
        sign_in=is_link or status == 401,
        command=_open_command(scope),
        problem=told if is_wrong_token else "",
        style=_style(),
        script=_script(),
        picture="data:image/svg+xml;base64," + b64encode(static_file("icon.svg")).decode(),
    )


def _open_command(scope: Scope) -> str:
    """Return the command that signs a browser in at this gateway, whatever its port."""
    server = scope.get("server")
    return f"steno open --port {server[1]}" if server else "steno open"


def api_address(scope: Scope) -> str:
    """Return the address of this gateway for OpenAI clients on the same machine."""
    server = scope.get("server")
    return f"http://127.0.0.1:{server[1]}/v1" if server else "http://127.0.0.1:8787/v1"


def _error_message(body: bytes) -> str:
    """Return the message of an error response, in JSON or plain text."""
    try:
        said = msgspec.json.decode(body, type=ErrorResponse).error.message
    except msgspec.MsgspecError:
        said = body.decode(errors="replace")
    return said[:1].upper() + said[1:]


def _style() -> str:
    return "".join(static_file(name).decode() for name in ("viewer.css", "banners.css"))


def _script() -> str:
    return static_file("sign-in.js").decode()


@cache
def _style_hash() -> str:
    return _hash(_style())


@cache
def _script_hash() -> str:
    return _hash(_script())


def _hash(text: str) -> str:
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
