"""Templates, static files, and the headers of every page."""

import hashlib
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from stenolog.agent.instance import AgentInstance
from stenolog.catalog import Catalog
from stenolog.errors import StenologError, StoreUnavailable, UsageError
from stenolog.gateway.failures import status_of, without_secrets
from stenolog.gateway.health import VERSION
from stenolog.gateway.state import Gateway, gateway_of
from stenolog.gateway.viewer import words
from stenolog.gateway.viewer.markdown import to_html
from stenolog.stores.base import Store

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""A page runs our script, and loads nothing from elsewhere, whatever stands in it."""

_HERE: Final = Path(__file__).parent
_TYPES: Final = {
    "viewer.css": "text/css; charset=utf-8",
    "viewer.js": "text/javascript; charset=utf-8",
    "theme.js": "text/javascript; charset=utf-8",
    "turns.js": "text/javascript; charset=utf-8",
    "uPlot.iife.min.js": "text/javascript; charset=utf-8",
    "uPlot.min.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
"""What is served, and as what: nothing is looked up by a name that somebody sent."""

_HEADLINES: Final = {
    401: "Sign in",
    403: "This is not allowed",
    404: "There is nothing here",
    421: "This is another host",
    503: "Not just now",
}

Answering = Callable[[Request], Awaitable[Response]]


def rendered(template: str, **values: Any) -> bytes:
    """What a template makes of these values. Every one is escaped where it is shown."""
    text = _environment().get_template(template).render(**values)
    # Half a character cannot be sent.
    return text.encode(errors="replace")


def page(template: str, *, status: int = 200, **values: Any) -> Response:
    """A page, or a part of one."""
    return Response(
        rendered(template, **values),
        status_code=status,
        media_type="text/html; charset=utf-8",
        headers={"Content-Security-Policy": POLICY},
    )


def compile_templates() -> None:
    """Have every template ready."""
    environment = _environment()
    for name in ("conversation.html", *environment.list_templates()):
        environment.get_template(name)


def told_as_page(answer: Answering) -> Answering:
    """The same, but that what goes wrong is told by a page."""

    async def answered(request: Request) -> Response:
        try:
            return await answer(request)
        except HTTPException as error:
            return _failed(request, error.status_code, error.detail)
        except StenologError as error:
            status = status_of(error)
            if status is None or status == 500:
                raise  # the log has to tell of it, too
            return _failed(request, status, str(error))

    return answered


def _failed(request: Request, status: int, detail: str) -> Response:
    told = without_secrets(detail, gateway_of(request).settings)
    return page(
        "failed.html",
        status=status,
        agent="main",
        code=status,
        headline=headline(status),
        told=told[:1].upper() + told[1:],
        sign_in=False,
    )


def headline(status: int) -> str:
    """What a person is told first of a failure."""
    return _HEADLINES.get(status, "That did not work" if status < 500 else "Something went wrong")


def agent_of(gateway: Gateway, name: str) -> AgentInstance:
    """The agent that is asked for. Raises HTTPException."""
    try:
        return gateway.agent(name)
    except UsageError as error:
        raise HTTPException(404, str(error)) from None


def store_of(agent: AgentInstance) -> Store:
    """The agent's store. Raises StoreUnavailable where there is none in this run."""
    if agent.store is None:
        raise StoreUnavailable("the store cannot be used in this run; a stand-in keeps the talk")
    return agent.store


def catalog_of(agent: AgentInstance) -> Catalog:
    """The agent's index. Raises StoreUnavailable where there is none in this run."""
    if agent.catalog is None:
        raise StoreUnavailable("the store cannot be used in this run; a stand-in keeps the talk")
    return agent.catalog


async def static(request: Request) -> Response:
    """One of our own files. Its address names its content, so that it may be kept."""
    name = request.path_params["name"]
    if name not in _TYPES:
        raise HTTPException(404, "there is no such file")
    headers = {"Cache-Control": "private, max-age=31536000, immutable"}
    return Response(file(name), media_type=_TYPES[name], headers=headers)


def address(name: str) -> str:
    """Where a static file is; another content has another address."""
    return f"/static/{name}?v={hashlib.sha256(file(name)).hexdigest()[:12]}"


@cache
def file(name: str) -> bytes:
    """What one of our own static files holds."""
    return (_HERE / "static" / name).read_bytes()


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        age=words.age,
        clock=words.clock,
        dollars=words.dollars,
        moment=words.moment_of,
        short=words.short,
        seconds=words.seconds,
        segment=words.segment,
    )
    made.globals.update(
        to_html=to_html,
        plural=words.plural,
        in_sight=words.in_sight,
        unreadable=words.unreadable,
        static={name: address(name) for name in _TYPES},
        version=VERSION,
    )
    return made
