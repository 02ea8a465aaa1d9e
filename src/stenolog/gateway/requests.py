"""Parsing of requests: path, query and body, with a clear error for each.

The path contains a session key as one percent-encoded segment. A key may contain any character,
even `/`. So the path is not decoded before routing: with `RawPaths` the router sees the path as the
client sent it, and `key_of` decodes the key strictly.
"""

import asyncio
import json
import re
from typing import Annotated, Final, Generic, Never, TypeVar
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec
from msgspec import Meta, Struct
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stenolog.agent.instance import AgentInstance
from stenolog.codec import check_key
from stenolog.errors import UsageError
from stenolog.gateway.responses import error_response
from stenolog.gateway.shared_state import Gateway, gateway_of

Q = TypeVar("Q")
B = TypeVar("B")
S = TypeVar("S", bound=Struct)
A = TypeVar("A", bound="AgentQuery")

MAX_SEQ: Final = 2**53 - 1
"""Highest integer that all JSON parsers read exactly."""
Seq = Annotated[int, Meta(ge=0, le=MAX_SEQ)]
_MAX_PARAMETERS: Final = 100
_BAD_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


class AgentQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Query parameter of all requests: the agent."""

    agent: str = "main"
    """Name of the agent. `main` is the agent in the section `[agent]` of the settings."""


class EmptyBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An empty body, which may be omitted."""


class ApiCall(Struct, Generic[Q, B], frozen=True, kw_only=True):
    """A parsed and checked request."""

    gateway: Gateway
    agent: AgentInstance
    key: str
    """Session key in the path; empty if the path has no key."""
    query: Q
    body: B


class RawPaths:
    """Middleware that routes by the percent-encoded path, as it was sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        raw_path = scope.get("raw_path")
        if scope["type"] in ("http", "websocket") and raw_path is not None:
            # Latin-1 maps any byte to one character; `key_of` rejects keys that are not UTF-8.
            scope = {**scope, "path": raw_path.decode("latin-1")}
        await self._app(scope, receive, send)


class BodyLimit:
    """Middleware that limits a request body to `max_bytes` bytes and `max_seconds` of waiting.

    The middleware buffers nothing: it counts the bytes while the application reads them. A request
    whose Content-Length is too large is rejected before its body is read.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, max_seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        # The server has already rejected values that are not numbers, and conflicting values.
        if length.isdecimal() and int(length) > self._max_bytes:  # guard: announced-body-refused
            await _too_large_response(self._max_bytes)(scope, receive, send)
            return
        clock = asyncio.get_running_loop().time
        bytes_left, seconds_left = self._max_bytes, self._max_seconds
        is_body_complete = is_response_started = is_rejected = False

        async def receive_limited() -> Message:
            nonlocal bytes_left, seconds_left, is_body_complete, is_rejected
            if is_rejected:
                # The request is already rejected, so the application sees a disconnected client.
                return {"type": "http.disconnect"}
            if is_body_complete:
                return await receive()
            # Only the time spent waiting for the client counts, not the time of the application.
            start = clock()
            try:
                async with asyncio.timeout(seconds_left):
                    message = await receive()
            except TimeoutError:
                text = "The request body did not arrive in time. Send it again."
                rejection = error_response(
                    408, text, code="body_too_slow", headers={"Connection": "close"}
                )
            else:
                seconds_left = max(0.0, seconds_left - (clock() - start))
                bytes_left -= len(message.get("body", b""))  # guard: body-bytes-counted
                is_body_complete = not message.get("more_body", False)
                if bytes_left >= 0:
                    return message
                rejection = _too_large_response(self._max_bytes)
            is_rejected = True
            if not is_response_started:
                await rejection(scope, receive, send)
            return await receive_limited()

        async def send_unless_rejected(message: Message) -> None:
            nonlocal is_response_started
            if is_response_started or not is_rejected:
                is_response_started = True
                await send(message)

        try:
            await self._app(scope, receive_limited, send_unless_rejected)
        except ClientDisconnect:
            # A disconnected client is not an error, so nothing is logged.
            return
        except Exception:
            # If the client got the rejection, the application's errors are irrelevant.
            if not is_rejected or is_response_started:
                raise


def _too_large_response(max_bytes: int) -> Response:
    text = f"The request body has more than {max_bytes:,} bytes (gateway.max_body)."
    # Without this header, the server would read the rest of the body.
    return error_response(413, text, code="body_too_large", headers={"Connection": "close"})


def key_of(request: Request) -> str:
    """Return the session key in the path. Raises UsageError if the key is invalid."""
    segment: str = request.path_params["key"]
    if _BAD_ESCAPE.search(segment):
        raise UsageError("the key in the path has a % without two hex digits; write it as %25")
    try:
        key = unquote_to_bytes(segment.encode("latin-1")).decode()
    except UnicodeError:
        raise UsageError("the key in the path is not percent-encoded UTF-8") from None
    check_key(key)
    return key


def query_of(request: Request, query_type: type[S]) -> S:
    """Parse the query parameters. Raises UsageError."""
    try:
        text = request.scope["query_string"].decode("ascii")
        pairs = parse_qsl(
            text, keep_blank_values=True, errors="strict", max_num_fields=_MAX_PARAMETERS
        )
    except UnicodeError:
        raise UsageError("the query is not percent-encoded UTF-8") from None
    except ValueError:
        raise UsageError(f"the query has more than {_MAX_PARAMETERS} parameters") from None
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        repeated_name = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"the query parameter {repeated_name!r} is given more than once")
    for name in ("since", "until"):
        # msgspec would read a number as seconds since 1970, which the API does not document.
        if _is_number(fields.get(name, "")):
            raise UsageError(f"invalid query: {name} must be a time such as 2026-01-31T08:00:00Z")
    try:
        return msgspec.convert(fields, query_type, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"invalid query: {_validation_text(error)}") from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def parse_query(request: Request, query_type: type[A]) -> ApiCall[A, None]:
    """Parse path and query. Raises UsageError, and HTTPException 404 for an unknown agent."""
    gateway = gateway_of(request)
    key = key_of(request) if "key" in request.path_params else ""
    query = query_of(request, query_type)
    try:
        agent = gateway.agent(query.agent)
    except UsageError as error:
        raise HTTPException(404, str(error)) from None
    return ApiCall(gateway=gateway, agent=agent, key=key, query=query, body=None)


async def body_of(request: Request, body_type: type[S]) -> S:
    """Parse the body, a JSON object; an empty body is allowed if all fields have defaults.

    Raises UsageError, and HTTPException 415 if the media type is not JSON.
    """
    body = await request.body()
    if not body:
        try:
            return body_type()
        except TypeError:
            raise UsageError("the body is empty; send a JSON object") from None
    _check_media_type(request)
    try:
        if _SURROGATE.search(body):
            # msgspec rejects escaped lone surrogates; the standard library decodes them.
            return msgspec.convert(
                json.loads(body.decode(), parse_constant=_reject_constant), body_type
            )
        return msgspec.json.decode(body, type=body_type)
    except msgspec.ValidationError as error:
        raise UsageError(f"invalid body: {_validation_text(error)}") from None
    except RecursionError:
        raise UsageError("the body is nested too deeply") from None
    except UnicodeDecodeError:
        raise UsageError("the body is not UTF-8") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise UsageError(f"the body is not JSON: {error}") from None


def _reject_constant(name: str) -> Never:
    raise ValueError(f"{name} is not allowed in JSON")


def _check_media_type(request: Request) -> None:
    media_types = request.headers.getlist("content-type")
    if len(media_types) > 1:
        raise UsageError("the request has more than one Content-Type")
    media_type, _, parameters = (media_types[0] if media_types else "").partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if media_type.strip().lower() != "application/json" or charset not in ("", "utf-8"):
        raise HTTPException(
            415, "the body must be JSON in UTF-8: send Content-Type: application/json"
        )


def _validation_text(error: msgspec.ValidationError) -> str:
    """Return msgspec's error text as `field: reason`, with the field's path without `$.`."""
    text = str(error)
    reason, separator, path = text.rpartition(" - at ")
    return f"{path.strip('`').removeprefix('$.')}: {reason}" if separator else text
