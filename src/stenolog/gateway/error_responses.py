"""Error responses: the HTTP status of each exception, and texts without secrets."""

import logging
import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from stenolog.agent.scheduler import SessionBusy
from stenolog.errors import (
    DamagedStore,
    LeaseLost,
    ModelRefused,
    ModelUnavailable,
    NoSuchNote,
    NoSuchSession,
    NothingToUndo,
    OnceConflict,
    ReadOnly,
    SessionDeleted,
    SessionExists,
    StaleCheckpoint,
    StaleHistory,
    StenologError,
    StoreBusy,
    StoreClosed,
    StoreUnavailable,
    UsageError,
    WrongSettings,
)
from stenolog.gateway.api_types import error_response
from stenolog.settings.secrets import HIDDEN, without_password
from stenolog.settings.values import Settings

INTERNAL_ERROR: Final = "internal error; the gateway's log has the details"
NO_SUCH_PATH: Final = (
    "there is no such path; GET /openapi.json lists all paths, and OpenAI clients use "
    "/v1/chat/completions"
)
_BUSY: Final = "an answer is being written in this session; wait for it, or stop it"

STATUSES: Final[Mapping[type[Exception], int]] = {
    UsageError: 400,
    ReadOnly: 403,
    NoSuchSession: 404,
    SessionDeleted: 410,
    NoSuchNote: 404,
    SessionBusy: 409,
    LeaseLost: 409,
    NothingToUndo: 409,
    OnceConflict: 409,
    SessionExists: 409,
    StaleCheckpoint: 409,
    StaleHistory: 409,
    WrongSettings: 500,
    DamagedStore: 500,
    ModelRefused: 502,
    ModelUnavailable: 503,
    StoreClosed: 503,
    StoreUnavailable: 503,
}
"""HTTP status by exception; a class that is not listed has the status of its nearest base class."""

_CODES: Final[Mapping[int, str]] = {
    413: "request_entity_too_large",
    414: "request_uri_too_long",
    416: "requested_range_not_satisfiable",
    422: "unprocessable_entity",
}
"""Codes of the statuses that Python 3.13 renamed: a code must not depend on the Python version."""

_MIN_SECRET: Final = 8
"""Minimum length of a secret: shorter values may occur in ordinary text."""
_NOT_SECRET: Final = frozenset({"OLLAMA_CONTEXT_LENGTH", "OLLAMA_HOST", "OPENAI_BASE_URL"})
"""Entries of `keys` that are no secrets; they name the server, which error texts must show."""
# The length of the scheme is limited, so that a long text of letters takes linear time.
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://\S+")
_MAX_WORDS: Final = 2_000
"""Maximum number of characters of an error text in a response."""

_logger = logging.getLogger("stenolog")


async def response_for(request: Request, error: Exception) -> Response:
    """Return the response to a request that failed; log unexpected errors."""
    gateway = getattr(request.app.state, "gateway", None)
    settings = None if gateway is None else gateway.settings
    if isinstance(error, HTTPException):
        words = _short(without_secrets(error.detail, settings))
        if error.status_code == 404 and words == _reason(404):
            words = NO_SUCH_PATH
        code = _CODES.get(error.status_code) or _code_of(_reason(error.status_code))
        return error_response(error.status_code, words, code=code, headers=error.headers)
    if isinstance(error, ClientDisconnect):
        return error_response(
            400, "the client disconnected before the request was complete", code="disconnected"
        )
    status = status_of(error)
    if status is None:
        # guard: log-without-password
        told = without_secrets("".join(traceback.format_exception(error)), settings)
        _logger.error("%s %s failed\n%s", request.method, request.url.path, told)
        words = INTERNAL_ERROR  # guard: unexpected-error-hidden
        return error_response(500, words, code="internal_error")
    words = (
        _BUSY if isinstance(error, SessionBusy) else _short(without_secrets(str(error), settings))
    )
    if status == 500:
        _logger.error("%s %s: %s", request.method, request.url.path, words)
    # The lock may be free at once.
    headers = {"Retry-After": "1"} if isinstance(error, StoreBusy) else None
    code = "busy" if isinstance(error, SessionBusy) else _snake(type(error).__name__)
    return error_response(status, words, code=code, headers=headers)


HANDLERS: Final[Mapping[Any, ExceptionHandler]] = {
    StenologError: response_for,
    SessionBusy: response_for,
    HTTPException: response_for,
    Exception: response_for,
}
"""For `Starlette(exception_handlers=…)`: also covers errors of the router itself."""


def status_of(error: Exception) -> int | None:
    """Return the HTTP status of an error; None for an unexpected one."""
    return next((STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), None)


def without_secrets(words: str, settings: Settings | None) -> str:
    """Replace passwords in URLs and the secrets of the settings."""
    # guard: error-without-password
    shown = _URL.sub(lambda found: without_password(found[0]), words)
    for secret in () if settings is None else _secrets(settings):
        if len(secret) >= _MIN_SECRET:
            shown = shown.replace(secret, HIDDEN)
    return shown


class RedactingFilter(logging.Filter):
    """Logging filter that removes secrets from all log records."""

    def __init__(self, settings: Settings | None) -> None:
        super().__init__()
        self._settings = settings

    def filter(self, record: logging.LogRecord) -> bool:
        """Remove secrets from the text of the record and of its exception."""
        record.msg, record.args = without_secrets(record.getMessage(), self._settings), ()
        if record.exc_info:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
            # Otherwise a formatter that ignores `exc_text` would format the exception again.
            record.exc_info = None
        if record.exc_text:
            record.exc_text = without_secrets(record.exc_text, self._settings)
        return True


def _short(words: str) -> str:
    # Cut after secrets are replaced: half a secret would not be recognised.
    return words if len(words) <= _MAX_WORDS else f"{words[:_MAX_WORDS]}…"


def _secrets(settings: Settings) -> Iterator[str]:
    yield from (value for name, value in settings.keys.items() if name not in _NOT_SECRET)
    for model in settings.models.values():
        yield from (model.key, *model.headers.values())
    yield settings.channels.telegram.token
    for webhook in settings.webhooks.values():
        yield webhook.secret


def _reason(status: int) -> str:
    return HTTPException(status).detail or str(status)


def _code_of(reason: str) -> str:
    return re.sub(r"\W+", "_", reason).lower()


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
