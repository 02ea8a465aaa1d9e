"""What goes wrong, told to a person: the way in where there is no cookie, and pages for the rest.

Whoever has no cookie is served nothing else of ours, no style sheet either: it stands in the page,
and the page's policy names it by its hash.
"""

import hashlib
from base64 import b64encode
from functools import cache
from typing import Final

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stenolog.gateway.login import LOGIN
from stenolog.gateway.viewer.serving import file, headline, rendered

_USED: Final = "A link works once, and for a minute."
_UNKNOWN: Final = "This gateway does not know this browser, or no longer does."


class SignInPage:
    """Tells a person in a page what programs are told in JSON: sign in, or what went wrong."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; only what a refusal looks like is changed."""
        if scope["type"] != "http" or not _wants_a_page(scope):
            await self._app(scope, receive, send)
            return
        begun: Message | None = None
        body = b""

        async def told(message: Message) -> None:
            nonlocal begun, body
            if message["type"] == "http.response.start" and _is_bare(message):
                begun = message
            elif begun is None or message["type"] != "http.response.body":
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    made = _page(begun["status"], scope["path"], body)
                    _head(begun, made)
                    await send(begun)
                    # The page takes the place of the words, once.
                    await send({**message, "body": b"" if scope["method"] == "HEAD" else made})

        await self._app(scope, receive, told)


def _wants_a_page(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return "text/html" in headers.get("accept", "") and "authorization" not in headers


def _is_bare(start: Message) -> bool:
    """Whether this begins a failure that is no page."""
    told = Headers(raw=start["headers"]).get("content-type", "")
    return bool(start["status"] >= 400 and not told.startswith("text/html"))


def _head(start: Message, made: bytes) -> None:
    headers = MutableHeaders(scope=start)
    headers["Content-Type"] = "text/html; charset=utf-8"
    headers["Content-Length"] = str(len(made))
    headers["Content-Security-Policy"] = (
        f"default-src 'none'; style-src '{_style_hash()}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _page(status: int, path: str, body: bytes) -> bytes:
    is_link = status == 403 and path == LOGIN
    words = _USED if is_link else _UNKNOWN if status == 401 else _words(body)
    return rendered(
        "outside.html",
        headline="This link does not work any more" if is_link else headline(status),
        told=words,
        code=status,
        sign_in=is_link or status == 401,
        style=_style(),
        picture="data:image/svg+xml;base64," + b64encode(file("icon.svg")).decode(),
    )


def _words(body: bytes) -> str:
    """What a failure says, be it in JSON or plain."""
    try:
        said = msgspec.json.decode(body, type=_Failure).error.message
    except msgspec.MsgspecError:
        said = body.decode(errors="replace")
    return said[:1].upper() + said[1:]


class _Error(msgspec.Struct, frozen=True):
    message: str


class _Failure(msgspec.Struct, frozen=True):
    error: _Error


def _style() -> str:
    return file("viewer.css").decode()


@cache
def _style_hash() -> str:
    return f"sha256-{b64encode(hashlib.sha256(_style().encode()).digest()).decode()}"
