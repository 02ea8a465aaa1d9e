"""Every error has a status by who must act, and words in OpenAI's shape that hold no secret."""

import asyncio
import io
import json
import logging
import types
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.testclient import TestClient

from stenolog import errors
from stenolog.agent.scheduler import SessionBusy
from stenolog.gateway.openapi import Endpoint, make_routes
from stenolog.gateway.responses import (
    EXCEPTION_HANDLERS,
    INTERNAL_ERROR,
    RedactingFilter,
    response_for,
    status_of,
    without_secrets,
)
from stenolog.settings.values import (
    ChannelSettings,
    ModelSettings,
    Settings,
    TelegramSettings,
    WebhookSettings,
)

_SECRETS = Settings(
    keys={
        "OPENAI_API_KEY": "sk-from-environment",
        "X_API_KEY": "short",
        "OLLAMA_HOST": "ollama.test:11434",
        "OLLAMA_CONTEXT_LENGTH": "131072000",
        "OPENAI_BASE_URL": "http://me:pass@models.test/v1",
    },
    models={"m": ModelSettings(key="sk-from-file", headers={"x": "header-secret"})},
    channels=ChannelSettings(telegram=TelegramSettings(token="123:telegram-token")),
    webhooks={"w": WebhookSettings(secret="a-webhook-secret")},
)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.UsageError("x"), 400, "usage_error"),
        (errors.RefusedMessage("a", "b"), 400, "refused_message"),
        (errors.ContextTooSmall("x", needed=2, limit=1), 400, "context_too_small"),
        (errors.UnsupportedFormat("x"), 400, "unsupported_format"),
        (errors.ReadOnly("x"), 403, "read_only"),
        (errors.NoSuchSession("k"), 404, "no_such_session"),
        (errors.SessionDeleted("k"), 410, "session_deleted"),
        (errors.SessionExists("k"), 409, "session_exists"),
        (errors.OnceConflict("k", "t", 1), 409, "once_conflict"),
        (errors.NothingToUndo("x"), 409, "nothing_to_undo"),
        (errors.Conflict("k", "floor", 1, 2), 409, "conflict"),
        (errors.LeaseLost("k", 1), 409, "lease_lost"),
        (SessionBusy(), 409, "busy"),
        (errors.DamagedStore("x"), 500, "damaged_store"),
        (errors.ForeignLog("x"), 500, "foreign_log"),
        (errors.NewerFormat("x"), 500, "newer_format"),
        (errors.ModelRefused("x"), 502, "model_refused"),
        (errors.ModelUnavailable("x"), 503, "model_unavailable"),
        (errors.StoreClosed("x"), 503, "store_closed"),
        (errors.StoreUnavailable("x"), 503, "store_unavailable"),
        (errors.StoreBusy("x"), 503, "store_busy"),
        (errors.NotStored("x"), 503, "not_stored"),
        (errors.MaybeStored("x"), 503, "maybe_stored"),
        (ClientDisconnect(), 400, "disconnected"),
        (HTTPException(404), 404, "not_found"),
        (HTTPException(413, "too long"), 413, "request_entity_too_large"),
        (HTTPException(422, "no"), 422, "unprocessable_entity"),
        (ValueError("a secret"), 500, "internal_error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_each_error_has_its_status(error: Exception, status: int, code: str) -> None:
    response, told = _failed(error)
    assert (response.status_code, told["code"]) == (status, code)
    assert told["message"]
    assert told["type"] == {403: "permission_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    assert response.headers.get("retry-after") == (
        "1" if isinstance(error, errors.StoreUnavailable) else None
    )


def test_every_stenolog_error_has_a_status() -> None:
    found = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.StenologError)
    ]
    assert len(found) > 20
    without = {kind for kind in found if status_of(kind.__new__(kind)) is None}
    assert without == {errors.StenologError}  # the root is raised by nobody


def test_unexpected_error_is_logged_and_not_shown_in_the_response(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fails(request: Request) -> Any:
        del request
        raise ValueError("what only the log may say")

    endpoint = Endpoint(method="GET", path="/x", name="x", summary="x", handler=fails)
    app = Starlette(routes=make_routes([endpoint]), exception_handlers=dict(EXCEPTION_HANDLERS))
    with caplog.at_level(logging.ERROR, logger="stenolog"):
        response = TestClient(app).get("/x")
    assert response.status_code == 500
    assert response.json()["error"]["message"] == INTERNAL_ERROR
    [record] = caplog.records
    assert record.name == "stenolog"
    assert "what only the log may say" in caplog.text
    assert "Traceback" in caplog.text


def test_errors_of_other_routes_have_the_same_format() -> None:
    async def fails(request: Request) -> Any:
        del request
        raise errors.NoSuchSession("k")

    app = Starlette(routes=[Route("/other", fails)], exception_handlers=dict(EXCEPTION_HANDLERS))
    client = TestClient(app)
    assert client.get("/other").json()["error"]["code"] == "no_such_session"
    assert client.get("/nowhere").json()["error"]["code"] == "not_found"
    wrong = client.post("/other")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert "GET" in wrong.headers["allow"]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (
            "cannot connect to postgresql://me:pass@db.test/x: no route",
            "cannot connect to postgresql://me:***@db.test/x: no route",
        ),
        (
            "http://a.test/?api_key=abc and https://u:p@b.test/v1",
            "http://a.test/?api_key=*** and https://u:***@b.test/v1",
        ),
        ("'telegram:1@2': there is no such session", "'telegram:1@2': there is no such session"),
        ("Incorrect API key: sk-from-environment.", "Incorrect API key: ***."),
        ("sk-from-file header-secret", "*** ***"),
        ("123:telegram-token a-webhook-secret", "*** ***"),
        ("a short word", "a short word"),
        (
            "http://ollama.test:11434/api does not answer",
            "http://ollama.test:11434/api does not answer",
        ),
        (
            "http://me:pass@models.test/v1 has 131072000",
            "http://me:***@models.test/v1 has 131072000",
        ),
    ],
)
def test_secrets_are_removed_from_messages(words: str, shown: str) -> None:
    assert without_secrets(words, _SECRETS) == shown


@pytest.mark.parametrize("kind", [ValueError, errors.DamagedStore])
def test_log_contains_no_secret(kind: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    async def fails(request: Request) -> Any:
        del request
        cause = OSError("postgresql://me:from-cause@db.test/x")
        raise kind("no sk-from-file at postgresql://me:pass-word@db.test/x") from cause

    endpoint = Endpoint(method="GET", path="/x", name="x", summary="x", handler=fails)
    app = Starlette(routes=make_routes([endpoint]), exception_handlers=dict(EXCEPTION_HANDLERS))
    app.state.gateway = types.SimpleNamespace(settings=_SECRETS)
    assert TestClient(app).get("/x").status_code == 500
    assert "no *** at postgresql://me:***@db.test/x" in caplog.text
    assert not [one for one in ("pass-word", "from-cause", "sk-from-file") if one in caplog.text]


def test_log_filter_removes_secrets_of_any_logger() -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.addFilter(RedactingFilter(_SECRETS))
    logger = logging.Logger("x")
    logger.addHandler(handler)
    logger.warning("%s and %s", "sk-from-file", "postgresql://me:pass-word@db.test/x")
    logger.error("100% wrong", exc_info=ValueError("postgresql://me:pass-word@db.test/x"))
    assert written.getvalue().splitlines() == [
        "*** and postgresql://me:***@db.test/x",
        "100% wrong",
        "ValueError: postgresql://me:***@db.test/x",
    ]


def test_error_with_a_lone_surrogate_can_be_sent() -> None:
    assert "\ud800" in _failed(errors.UsageError("what is \ud800?"))[1]["message"]


def _failed(error: Exception) -> tuple[Any, Any]:
    request = Request(
        {
            "type": "http",
            "method": "GET",
            "path": "/",
            "headers": [],
            "query_string": b"",
            "server": ("localhost", 80),
            "scheme": "http",
            "app": Starlette(),
        }
    )
    response = asyncio.run(response_for(request, error))
    body = json.loads(bytes(response.body))
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "code"}
    return response, body["error"]


def test_response_for_an_unknown_path_names_the_api() -> None:
    _, told = _failed(HTTPException(404))
    assert "/v1/chat/completions" in told["message"]
    assert "/openapi.json" in told["message"]
    assert _failed(HTTPException(404, "no such file"))[1]["message"] == "no such file"
