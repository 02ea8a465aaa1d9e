"""The table of endpoints, from which routes and the OpenAPI document are generated.

Queries and bodies are described by the types that parse them, so that the document is always
correct. The docstring of a query parameter is its description.
"""

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from inspect import iscoroutinefunction
from operator import attrgetter
from typing import Any, Final, Literal, TypeVar, cast, get_args, get_type_hints

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stenolog.codec import MAX_KEY_BYTES
from stenolog.gateway.requests import ApiCall, body_of, parse_query
from stenolog.gateway.responses import ErrorResponse, json_response, response_for
from stenolog.gateway.shared_state import gateway_of
from stenolog.settings.fields import field_docstrings


@cache
def version() -> str:
    """Return the version of this package."""
    # This import is slow, and few requests need the version.
    from importlib import metadata

    return metadata.version("stenolog")


COMMON_ERRORS: Final = (400, 401, 403, 404, 408, 413, 415, 421, 429, 431, 500, 503)
"""Error statuses of all endpoints that require a token. Most come from the middleware."""
OPEN_ERRORS: Final = (400, 421, 429, 431, 500)
"""Error statuses of all endpoints that require no token."""

_STATUS_TEXTS: Final = {
    400: "The request is invalid. The message says why.",
    401: "The token is missing or wrong.",
    403: "The caller or the web page is not allowed to do this.",
    404: "There is no such session, agent or path.",
    408: "The request body did not arrive in time.",
    409: "The session is busy, or the key or id is already in use.",
    410: "The session was deleted. `new_session` starts a new session with its key.",
    413: "The request body is too long.",
    415: "The body is not application/json.",
    421: "The gateway does not serve this host name.",
    429: "Too many requests at a time. Retry after `Retry-After` seconds.",
    431: "The headers are too long.",
    500: "Damaged files or a bug. The message or the gateway's log says more.",
    502: "The model refused the request. The message is stored.",
    503: "The store or the model is not available. Retry later.",
}
_SCHEMA_PATH: Final = "#/components/schemas/{name}"
_KEY_PARAMETER: Final = {
    "name": "key",
    "in": "path",
    "required": True,
    "description": "Key of the session, percent-encoded as one segment: `/` is `%2F`.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_BYTES},
    "example": "cli:default",
}

BlockingHandler = Callable[[ApiCall[Any, Any]], Struct]
Handler = Callable[[ApiCall[Any, Any]], Awaitable[Struct]] | BlockingHandler
Method = Literal["GET", "POST", "PATCH", "DELETE"]
H = TypeVar("H", bound=Handler)
RequestHandler = Callable[[Request], Awaitable[Response]]


class Endpoint(Struct, frozen=True, kw_only=True):
    """One method of one path."""

    method: Method
    path: str
    name: str
    """The operationId, used by client generators."""
    summary: str
    handler: RequestHandler
    query: type[Struct] | None = None
    body: type[Struct] | None = None
    body_schema: Mapping[str, Any] | None = None
    """JSON schema of the body, if no type parses the body."""
    response: type[Struct] | None = None
    response_schema: Mapping[str, Any] | None = None
    """JSON schema of the response, if no type describes the response."""
    media_types: tuple[str, ...] = ("application/json",)
    status: int = 200
    """HTTP status of a successful response."""
    error_statuses: tuple[int, ...] = ()
    """Error statuses in addition to those of all endpoints."""
    is_open: bool = False
    """Whether the endpoint requires no token."""


def endpoint(
    endpoints: list[Endpoint],
    method: Method,
    path: str,
    name: str,
    *,
    status: int = 200,
    error_statuses: tuple[int, ...] = (),
    unlimited: bool = False,
) -> Callable[[H], H]:
    """Return a decorator that adds a handler to `endpoints`.

    The annotations and the first docstring line of the handler describe the endpoint. The handler
    gets a parsed and checked request, and returns the value of the response. A handler that is not
    a coroutine function runs in a thread. An `unlimited` endpoint has no concurrency limit (for
    example `stop`, which frees a slot).
    """

    def register(handler: H) -> H:
        hints = get_type_hints(handler)
        query_type, body_type = get_args(hints["call"])

        async def handle(request: Request) -> Response:
            # Take a slot before the request is read, so that a rejected request costs nothing.
            with nullcontext() if unlimited else gateway_of(request).turns.admit():
                call = parse_query(request, query_type)
                call = replace(call, body=await body_of(request, body_type))
                if iscoroutinefunction(handler):
                    return json_response(await handler(call), status=status)
                value = await call.gateway.loop.run(cast(BlockingHandler, handler), call)
                return json_response(value, status=status)

        new_endpoint = Endpoint(
            method=method,
            path=path,
            name=name,
            summary=(handler.__doc__ or "").partition("\n")[0],
            handler=handle,
            query=query_type,
            body=None if method in ("GET", "DELETE") else body_type,
            response=hints["return"],
            status=status,
            error_statuses=error_statuses,
        )
        endpoints.append(new_endpoint)
        return handler

    return register


def make_routes(endpoints: Sequence[Endpoint]) -> list[Route]:
    """Return one route per path, so that a 405 response lists all allowed methods."""
    paths: dict[str, dict[str, Endpoint]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    return [
        Route(path, _make_handler(methods), methods=sorted(methods), name=path)
        for path, methods in paths.items()
    ]


def with_openapi_document(endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """Return the endpoints and an additional endpoint that serves their OpenAPI document."""

    @cache
    def encode_document() -> bytes:
        return msgspec.json.encode(openapi_document(all_endpoints, version=version()))

    async def serve_document(_: Request) -> Response:
        headers = {"X-Content-Type-Options": "nosniff"}
        return Response(encode_document(), media_type="application/json", headers=headers)

    document_endpoint = Endpoint(
        method="GET",
        path="/openapi.json",
        name="document",
        summary="Return this document.",
        handler=serve_document,
        response_schema={"type": "object"},
    )
    all_endpoints = (*endpoints, document_endpoint)
    return all_endpoints


def openapi_document(endpoints: Sequence[Endpoint], *, version: str) -> dict[str, Any]:
    """Return the OpenAPI document, version 3.1."""
    types: set[type[Struct] | None] = {ErrorResponse}
    types.update(*((endpoint.body, endpoint.response) for endpoint in endpoints))
    structs = sorted(filter(None, types), key=attrgetter("__name__"))
    schema_references, schemas = msgspec.json.schema_components(structs, ref_template=_SCHEMA_PATH)
    references: dict[type | None, Any] = dict(zip(structs, schema_references, strict=True))
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        operation = _make_operation(endpoint, references)
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
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


def _make_handler(methods: Mapping[str, Endpoint]) -> RequestHandler:
    async def handler(request: Request) -> Response:
        endpoint = methods["GET" if request.method == "HEAD" else request.method]
        try:
            return await endpoint.handler(request)
        except Exception as error:  # noqa: BLE001 - `response_for` logs the error
            return await response_for(request, error)

    return handler


def _make_operation(endpoint: Endpoint, references: Mapping[type | None, Any]) -> dict[str, Any]:
    parameters = [_KEY_PARAMETER] if "{key}" in endpoint.path else []
    if endpoint.query is not None:
        parameters = [*parameters, *_make_parameters(endpoint.query)]
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "parameters": parameters,
        "responses": _make_responses(endpoint, references),
    }
    body, schema = endpoint.body, references.get(endpoint.body, endpoint.body_schema)
    if schema is not None:
        operation["requestBody"] = {
            # A body whose fields all have defaults may be omitted.
            "required": body is None or len(body.__struct_defaults__) < len(body.__struct_fields__),
            "content": {"application/json": {"schema": schema}},
        }
    if endpoint.is_open:
        operation["security"] = []
    return operation


def _make_parameters(query: type[Struct]) -> list[dict[str, Any]]:
    schema = msgspec.json.schema(query)["$defs"][query.__name__]
    texts: dict[str, str] = {}
    for struct_type in reversed(query.__mro__[: query.__mro__.index(Struct)]):
        texts |= field_docstrings(sys.modules[struct_type.__module__]).get(struct_type.__name__, {})
    return [
        {
            "name": name,
            "in": "query",
            "required": name in schema["required"],
            "description": texts[name],
            "schema": field_schema,
        }
        for name, field_schema in schema["properties"].items()
    ]


def _make_responses(endpoint: Endpoint, references: Mapping[type | None, Any]) -> dict[str, Any]:
    schema = references.get(endpoint.response, endpoint.response_schema)
    content = {
        media_type: {} if schema is None else {"schema": schema}
        for media_type in endpoint.media_types
    }
    responses = {str(endpoint.status): {"description": endpoint.summary, "content": content}}
    error_content = {"application/json": {"schema": references[ErrorResponse]}}
    common_statuses = OPEN_ERRORS if endpoint.is_open else COMMON_ERRORS
    for status in sorted({*common_statuses, *endpoint.error_statuses}):
        responses[str(status)] = {"description": _STATUS_TEXTS[status], "content": error_content}
    return responses
