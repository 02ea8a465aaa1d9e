"""One table of endpoints, and what is made of it: the routes, and the document that tells of them.

What the document says of a query or a body is made from the very types that read them, so that it
cannot say anything else than what happens.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from importlib import metadata
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stenolog.codec import MAX_KEY_BYTES
from stenolog.errors import UsageError
from stenolog.gateway.failures import failed
from stenolog.gateway.requests import Call, body_of, key_of, query_of
from stenolog.gateway.shapes import Failure, Nothing, OfAgent, answered
from stenolog.gateway.state import Gateway, gateway_of

VERSION: Final = metadata.version("stenolog")

COMMON: Final = (400, 401, 403, 404, 408, 413, 415, 421, 429, 431, 500, 503)
"""What any endpoint may answer that is not open to all: the layers around it refuse requests."""
OPEN: Final = (400, 421, 429, 431, 500)
"""The same of an endpoint that wants no token."""

_REASONS: Final = {
    400: "The request is wrong; the words say what.",
    401: "The token is missing or wrong.",
    403: "This may not be done, or not from there.",
    404: "There is no such session, agent or address.",
    408: "The request did not come in time.",
    409: "The session is not in a state for this, or the name is taken.",
    410: "The session was deleted; `new_session` starts another one with its key.",
    413: "The request is too long.",
    415: "The body is not application/json.",
    421: "The gateway is not called by this name.",
    429: "Too much at once; try again later.",
    431: "The headers are too long.",
    500: "Something is broken; the words or the log of the gateway say what.",
    502: "The model did not answer; the message is kept.",
    503: "The store or the agent cannot be used now; try again later.",
}
_REFERENCE: Final = "#/components/schemas/{name}"
_KEY: Final = {
    "name": "key",
    "in": "path",
    "required": True,
    "description": "The key of the session, percent-encoded as one segment: `/` is `%2F`.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_BYTES},
    "example": "cli:default",
}

Answering = Callable[[Call[Any, Any]], Awaitable[Struct]]
RawAnswering = Callable[[Request], Awaitable[Response]]


class Endpoint(Struct, frozen=True, kw_only=True):
    """One method of one path, and what becomes of it: by `answer`, or by `raw`."""

    method: Literal["GET", "POST", "PATCH", "DELETE"]
    path: str
    name: str
    """The one word that programs made from the document call it by."""
    summary: str
    answer: Answering | None = None
    """From a request that was read and checked to the value that is its response."""
    raw: RawAnswering | None = None
    """From the request as it is to the response as it is."""
    query: type[Struct] | None = OfAgent
    """What may stand behind the question mark; for `answer` it has a field `agent`."""
    body: type[Struct] | None = None
    body_schema: Mapping[str, Any] | None = None
    """What the body looks like, where no type reads it."""
    response: type[Struct] | None = None
    response_schema: Mapping[str, Any] | None = None
    """What the response looks like, where no type writes it."""
    media: tuple[str, ...] = ("application/json",)
    """What the response may be."""
    status: int = 200
    """Of a response that is no failure."""
    statuses: tuple[int, ...] = ()
    """Failures beside those that any endpoint may answer."""
    open: bool = False
    """Whether no token is wanted."""
    always: bool = False
    """Whether it is answered also where the gateway has no place left, as what frees one is."""

    def __post_init__(self) -> None:
        if (self.answer is None) == (self.raw is None):
            raise ValueError(f"{self.method} {self.path}: one of answer and raw is wanted")


def routes(endpoints: Sequence[Endpoint]) -> list[Route]:
    """The routes, one for each path: so a wrong method is told all that are right."""
    paths: dict[str, dict[str, Endpoint]] = {}
    for one in endpoints:
        paths.setdefault(one.path, {})[one.method] = one
    return [
        Route(path, _answering(methods), methods=sorted(methods), name=path)
        for path, methods in paths.items()
    ]


def with_document(endpoints: Sequence[Endpoint], *, version: str) -> tuple[Endpoint, ...]:
    """The endpoints, and one more that answers with the document of all of them."""
    made: list[bytes] = []

    async def answer(request: Request) -> Response:
        del request
        headers = {"X-Content-Type-Options": "nosniff"}
        return Response(made[0], media_type="application/json", headers=headers)

    itself = Endpoint(
        method="GET",
        path="/openapi.json",
        name="document",
        summary="This document.",
        raw=answer,
        query=None,
        response_schema={"type": "object"},
    )
    every = (*endpoints, itself)
    made.append(msgspec.json.encode(document(every, version=version)))
    return every


def document(endpoints: Sequence[Endpoint], *, version: str) -> dict[str, Any]:
    """The OpenAPI document, in version 3.1."""
    kinds = {
        kind for one in endpoints for kind in (one.body, one.response, Failure) if kind is not None
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
            "description": "The sessions of agents: read, searched, changed and talked to.",
        },
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _answering(methods: Mapping[str, Endpoint]) -> RawAnswering:
    async def answering(request: Request) -> Response:
        endpoint = methods["GET" if request.method == "HEAD" else request.method]
        try:
            if endpoint.raw is not None:
                return await endpoint.raw(request)
            return await _answer(endpoint, request)
        except Exception as error:  # noqa: BLE001 - it is logged where it becomes a response
            return await failed(request, error)

    return answering


async def _answer(endpoint: Endpoint, request: Request) -> Response:
    assert endpoint.answer is not None, "the table was checked when it was made"
    gateway = gateway_of(request)
    # Before anything is read: who gets no place is to cost nothing.
    with nullcontext() if endpoint.always else gateway.turns.admit():
        return await _admitted(endpoint, endpoint.answer, request, gateway)


async def _admitted(
    endpoint: Endpoint, answer: Answering, request: Request, gateway: Gateway
) -> Response:
    key = key_of(request) if "{key}" in endpoint.path else ""
    query = query_of(request, endpoint.query or OfAgent)
    try:
        agent = gateway.agent(getattr(query, "agent", None))
    except UsageError as error:
        raise HTTPException(404, str(error)) from None
    body = await body_of(request, endpoint.body or Nothing)
    call = Call(gateway=gateway, agent=agent, key=key, query=query, body=body)
    return answered(await answer(call), status=endpoint.status)


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
    wrong = {"application/json": {"schema": references[Failure]}}
    return {
        str(endpoint.status): done,
        **{str(status): {"description": _REASONS[status], "content": wrong} for status in failures},
    }


def _has_defaults(kind: type[Struct]) -> bool:
    """Whether nothing of it has to be said."""
    return not kind.__struct_fields__ or len(kind.__struct_defaults__) == len(
        kind.__struct_fields__
    )
