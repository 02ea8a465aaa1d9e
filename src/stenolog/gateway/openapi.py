"""The table of endpoints, from which routes and the OpenAPI document are generated.

Queries and bodies are described by the types that parse them, so that the document is always
correct.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from importlib import metadata
from typing import Any, Final, Literal, TypeVar, cast, get_args, get_type_hints

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stenolog.codec import MAX_KEY_BYTES
from stenolog.gateway.api_types import AgentQuery, EmptyBody, ErrorResponse, json_response
from stenolog.gateway.error_responses import response_for
from stenolog.gateway.requests import ApiCall, body_of, parse_query
from stenolog.gateway.shared_state import gateway_of

VERSION: Final = metadata.version("stenolog")

COMMON: Final = (400, 401, 403, 404, 408, 413, 415, 421, 429, 431, 500, 503)
"""Error statuses of all endpoints that require a token, raised by the layers around them."""
OPEN: Final = (400, 421, 429, 431, 500)
"""Error statuses of all endpoints that require no token."""

_REASONS: Final = {
    400: "The request is invalid. The message says why.",
    401: "The token is missing or wrong.",
    403: "The caller or the web page is not allowed to do this.",
    404: "There is no such session, agent or path.",
    408: "The request body did not arrive in time.",
    409: "The session is busy, or the key or id is already in use.",
    410: "The session was deleted. `new_session` starts a new one with its key.",
    413: "The request body is too long.",
    415: "The body is not application/json.",
    421: "The host name is not one of the gateway's.",
    429: "Too many requests at a time. Retry after `Retry-After` seconds.",
    431: "The headers are too long.",
    500: "Damaged files or a bug. The message or the gateway's log says more.",
    502: "The model refused the request. The message is stored.",
    503: "The store or the model is not available. Retry later.",
}
_REFERENCE: Final = "#/components/schemas/{name}"
_KEY: Final = {
    "name": "key",
    "in": "path",
    "required": True,
    "description": "Key of the session, percent-encoded as one segment: `/` is `%2F`.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_BYTES},
    "example": "cli:default",
}

Handler = Callable[[ApiCall[Any, Any]], Awaitable[Struct]]
Method = Literal["GET", "POST", "PATCH", "DELETE"]
H = TypeVar("H", bound=Handler)
RawHandler = Callable[[Request], Awaitable[Response]]


class Endpoint(Struct, frozen=True, kw_only=True):
    """One method of one path, implemented by `answer` or by `raw`."""

    method: Method
    path: str
    name: str
    """The operationId, used by client generators."""
    summary: str
    answer: Handler | None = None
    """Handles a parsed and checked request and returns the response value."""
    raw: RawHandler | None = None
    """Handles the request itself and returns the response."""
    query: type[Struct] | None = AgentQuery
    """Type of the query parameters; for `answer` it has a field `agent`."""
    body: type[Struct] | None = None
    body_schema: Mapping[str, Any] | None = None
    """JSON schema of the body, if no type parses it."""
    response: type[Struct] | None = None
    response_schema: Mapping[str, Any] | None = None
    """JSON schema of the response, if it has no type."""
    media: tuple[str, ...] = ("application/json",)
    """Media types of the response."""
    status: int = 200
    """HTTP status of a successful response."""
    statuses: tuple[int, ...] = ()
    """Error statuses in addition to those of all endpoints."""
    open: bool = False
    """Whether the endpoint requires no token."""
    always: bool = False
    """Exempt from the concurrency limit (for example `stop`, which frees a slot)."""

    def __post_init__(self) -> None:
        if (self.answer is None) == (self.raw is None):
            raise ValueError(f"{self.method} {self.path}: set either answer or raw")


def endpoint(
    endpoints: list[Endpoint],
    method: Method,
    path: str,
    name: str,
    *,
    status: int = 200,
    statuses: tuple[int, ...] = (),
    always: bool = False,
) -> Callable[[H], H]:
    """Add a handler to `endpoints`, described by its annotations and first docstring line."""

    def register(handler: H) -> H:
        hints = get_type_hints(handler)
        query, body = get_args(hints["call"])
        described = Endpoint(
            method=method,
            path=path,
            name=name,
            summary=(handler.__doc__ or "").partition("\n")[0],
            answer=handler,
            query=query,
            body=None if method in ("GET", "DELETE") else body,
            response=hints["return"],
            status=status,
            statuses=statuses,
            always=always,
        )
        endpoints.append(described)
        return handler

    return register


def routes(endpoints: Sequence[Endpoint]) -> list[Route]:
    """Return one route per path, so that a 405 response lists all allowed methods."""
    paths: dict[str, dict[str, Endpoint]] = {}
    for one in endpoints:
        paths.setdefault(one.path, {})[one.method] = one
    return [
        Route(path, _make_handler(methods), methods=sorted(methods), name=path)
        for path, methods in paths.items()
    ]


def with_document(endpoints: Sequence[Endpoint], *, version: str) -> tuple[Endpoint, ...]:
    """Return the endpoints and one more that serves their OpenAPI document."""
    made: list[bytes] = []

    async def answer(request: Request) -> Response:
        del request
        headers = {"X-Content-Type-Options": "nosniff"}
        return Response(made[0], media_type="application/json", headers=headers)

    itself = Endpoint(
        method="GET",
        path="/openapi.json",
        name="document",
        summary="Return this document.",
        raw=answer,
        query=None,
        response_schema={"type": "object"},
    )
    every = (*endpoints, itself)
    made.append(msgspec.json.encode(document(every, version=version)))
    return every


def document(endpoints: Sequence[Endpoint], *, version: str) -> dict[str, Any]:
    """Return the OpenAPI document, version 3.1."""
    kinds = {
        kind
        for one in endpoints
        for kind in (one.body, one.response, ErrorResponse)
        if kind is not None
    }
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    found, schemas = msgspec.json.schema_components(ordered, ref_template=_REFERENCE)
    references = dict(zip(ordered, found, strict=True))
    paths: dict[str, Any] = {}
    for one in endpoints:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, references)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "stenolog",
            "version": version,
            "description": "Read, search, change and continue the sessions of agents.",
        },
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _make_handler(methods: Mapping[str, Endpoint]) -> RawHandler:
    async def answering(request: Request) -> Response:
        endpoint = methods["GET" if request.method == "HEAD" else request.method]
        try:
            if endpoint.raw is not None:
                return await endpoint.raw(request)
            return await _handle(endpoint, request)
        except Exception as error:  # noqa: BLE001 - `response_for` logs it and makes a response
            return await response_for(request, error)

    return answering


async def _handle(endpoint: Endpoint, request: Request) -> Response:
    assert endpoint.answer is not None, "the table was checked when it was made"
    # Before the request is read, so that a rejected request costs nothing.
    with nullcontext() if endpoint.always else gateway_of(request).turns.admit():
        call = parse_query(request, cast(type[AgentQuery], endpoint.query))
        body = await body_of(request, endpoint.body or EmptyBody)
        answer = await endpoint.answer(replace(call, body=body))
        return json_response(answer, status=endpoint.status)


def _operation(endpoint: Endpoint, references: Mapping[type, Any]) -> dict[str, Any]:
    parameters = [_KEY] if "{key}" in endpoint.path else []
    if endpoint.query is not None:
        parameters = [*parameters, *_parameters(endpoint.query)]
    told: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "parameters": parameters,
        "responses": _responses(endpoint, references),
    }
    if endpoint.body is not None or endpoint.body_schema is not None:
        schema = references[endpoint.body] if endpoint.body is not None else endpoint.body_schema
        told["requestBody"] = {
            "required": endpoint.body is None or not _has_defaults(endpoint.body),
            "content": {"application/json": {"schema": schema}},
        }
    if endpoint.open:
        told["security"] = []
    return told


def _parameters(query: type[Struct]) -> list[dict[str, Any]]:
    schema = msgspec.json.schema(query)["$defs"][query.__name__]
    found = []
    for name, field in schema["properties"].items():
        told = {"name": name, "in": "query", "required": name in schema["required"]}
        if "description" in field:
            told["description"] = field.pop("description")
        found.append({**told, "schema": field})
    return found


def _responses(endpoint: Endpoint, references: Mapping[type, Any]) -> dict[str, Any]:
    schema = endpoint.response_schema
    if endpoint.response is not None:
        schema = references[endpoint.response]
    content = {media: {} if schema is None else {"schema": schema} for media in endpoint.media}
    done = {"description": endpoint.summary, "content": content}
    failures = sorted({*(OPEN if endpoint.open else COMMON), *endpoint.statuses})
    wrong = {"application/json": {"schema": references[ErrorResponse]}}
    return {
        str(endpoint.status): done,
        **{str(status): {"description": _REASONS[status], "content": wrong} for status in failures},
    }


def _has_defaults(kind: type[Struct]) -> bool:
    """Return whether all fields have defaults."""
    return not kind.__struct_fields__ or len(kind.__struct_defaults__) == len(
        kind.__struct_fields__
    )
