"""The document, and that it tells of exactly what there is."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any, Final

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.testclient import TestClient

from stenolog.gateway.app import ENDPOINTS, HEALTH_ENDPOINTS
from stenolog.gateway.openapi import (
    Endpoint,
    make_routes,
    openapi_document,
    version,
    with_openapi_document,
)
from stenolog.gateway.requests import RawPaths
from stenolog.gateway.sessions_api import SESSION_ENDPOINTS

ALL: Final = with_openapi_document((*SESSION_ENDPOINTS, *HEALTH_ENDPOINTS))


def _references(value: Any) -> set[str]:
    if isinstance(value, dict):
        here = {value["$ref"]} if "$ref" in value else set()
        return here.union(*map(_references, value.values()))
    if isinstance(value, list):
        return set().union(*map(_references, value))
    return set()


def test_openapi_document_matches_the_routes() -> None:
    told = {
        (path, method.upper())
        for path, methods in openapi_document(ALL, version="1").get("paths", {}).items()
        for method in methods
    }
    there = {
        (route.path, method)
        for route in make_routes(ALL)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert told == there
    assert len(told) == len(ALL) == 17


def test_openapi_document_is_complete() -> None:
    found = openapi_document(ALL, version="1.2.3")
    assert found["openapi"].startswith("3.1")
    assert found["info"]["version"] == "1.2.3"
    for reference in _references(found):
        assert reference.removeprefix("#/components/schemas/") in found["components"]["schemas"]
    operations = [one for methods in found["paths"].values() for one in methods.values()]
    names = [one["operationId"] for one in operations]
    assert len(set(names)) == len(names)
    assert all(name.isalpha() for name in names)  # `listSessions`, not `list_sessions`
    assert all(one["summary"].endswith(".") for one in operations)
    json.dumps(found)


def test_only_open_endpoints_need_no_token_in_the_document() -> None:
    found = openapi_document(ALL, version="1")
    assert found["security"] == [{"token": []}]
    open_to_all = {
        path
        for path, methods in found["paths"].items()
        for one in methods.values()
        if one.get("security") == []
    }
    assert open_to_all == {"/healthz", "/readyz"}


def test_parameters_are_documented_as_parsed() -> None:
    found = openapi_document(ALL, version="1")["paths"]
    told = {one["name"]: one for one in found["/v1/search"]["get"]["parameters"]}
    assert told["q"]["required"]
    assert told["q"]["schema"] == {"type": "string"}
    assert not told["limit"]["required"]
    assert told["limit"]["schema"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 100,
        "default": 20,
    }
    assert told["since"]["schema"] == {"type": "string", "format": "date-time"}
    assert "agent" in told
    key = found["/v1/sessions/{key}/messages"]["get"]["parameters"][0]
    assert (key["name"], key["in"], key["required"]) == ("key", "path", True)


def test_optional_body_is_documented() -> None:
    found = openapi_document(ALL, version="1")["paths"]
    needed = {
        path.rpartition("/")[2]: one["requestBody"]["required"]
        for path, methods in found.items()
        for one in methods.values()
        if "requestBody" in one
    }
    assert needed == {
        "{key}": False,
        "restore": False,
        "messages": True,
        "fork": True,
        "compact": False,
        "undo": False,
        "stop": False,
        "archive": False,
    }


def test_endpoint_handles_the_request_itself() -> None:
    async def answer(request: Request) -> Response:
        return PlainTextResponse(f"{request.method} {(await request.body()).decode()}")

    schema = {"type": "object", "additionalProperties": True}
    one = Endpoint(
        method="POST",
        path="/raw",
        name="raw",
        summary="Anything.",
        handler=answer,
        body_schema=schema,
        response_schema={"type": "string"},
        media_types=("text/plain", "text/event-stream"),
        error_statuses=(502,),
    )
    [told] = openapi_document([one], version="1")["paths"]["/raw"].values()
    assert told["parameters"] == []
    assert told["requestBody"]["content"]["application/json"]["schema"] == schema
    assert set(told["responses"]["200"]["content"]) == {"text/plain", "text/event-stream"}
    assert "502" in told["responses"]
    client = TestClient(RawPaths(Starlette(routes=make_routes([one]))))
    assert client.post("/raw", content="hello").text == "POST hello"


def test_raw_paths_passes_the_undecoded_path() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        del receive, send
        seen.append(scope.get("path"))

    given: list[dict[str, Any]] = [
        {"type": "http", "path": "/a/b/c", "raw_path": b"/a%2Fb/c"},
        {"type": "http", "path": "/é", "raw_path": b"/\xe9"},
        {"type": "http", "path": "/plain"},
        {"type": "lifespan"},
    ]
    for scope in given:
        asyncio.run(RawPaths(app)(scope, None, None))  # type: ignore[arg-type]
    assert seen == ["/a%2Fb/c", "/é", "/plain", None]
    assert given[0]["path"] == "/a/b/c"  # who looks at it from outside sees what they gave


def test_http_page_lists_exactly_the_endpoints() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "http.md").read_text()
    told = set(re.findall(r"^\| `([A-Z]+ /\S+)` \|", page, re.MULTILINE))
    assert told == {f"{one.method} {one.path}" for one in ENDPOINTS}


@pytest.mark.parametrize("path", ["/openapi.json", "/openapi.json?x=1"])
def test_openapi_document_is_served(path: str) -> None:
    client = TestClient(RawPaths(Starlette(routes=make_routes(ALL))))
    response = client.get(path)
    assert response.headers["content-type"] == "application/json"
    assert response.json() == openapi_document(ALL, version=version())
