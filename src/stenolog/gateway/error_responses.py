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

from stenolog import errors
from stenolog.agent.scheduler import SessionBusy
from stenolog.errors import StenologError, StoreBusy
from stenolog.gateway.api_types import error_response
from stenolog.settings.secrets import HIDDEN, without_password
from stenolog.settings.values import Settings

INTERNAL_ERROR: Final = "internal error; the gateway's log has the details"
NO_SUCH_PATH: Final = (
    "there is no such path; GET /openapi.json lists all paths, and OpenAI clients use "
    "/v1/chat/completions"
)
_BUSY_TEXT: Final = "an answer is being written in this session; wait for it, or stop it"

STATUSES: Final[Mapping[type[Exception], int]] = {
    errors.UsageError: 400,
    errors.ReadOnly: 403,
    errors.NoSuchSession: 404,
    errors.SessionDeleted: 410,
    errors.NoSuchNote: 404,
    SessionBusy: 409,
    errors.LeaseLost: 409,
    errors.NothingToUndo: 409,
    errors.OnceConflict: 409,
    errors.SessionExists: 409,
    errors.StaleCheckpoint: 409,
    errors.StaleHistory: 409,
    errors.WrongSettings: 500,
    errors.DamagedStore: 500,
    errors.ModelRefused: 502,
    errors.ModelUnavailable: 503,
    errors.StoreClosed: 503,
    errors.StoreUnavailable: 503,
}
"""HTTP status by exception; a class that is not listed has the status of its nearest base."""

_CODES: Final[Mapping[int, str]] = {
    413: "request_entity_too_large",
    414: "request_uri_too_long",
    416: "requested_range_not_satisfiable",
    422: "unprocessable_entity",
}
"""Error codes for statuses that Python 3.13 renamed: codes are the same in all versions."""

_MIN_SECRET_LENGTH: Final = 8
"""Minimum length of a secret: shorter values may occur in ordinary text."""
_NOT_SECRET_KEYS: Final = frozenset({"OLLAMA_CONTEXT_LENGTH", "OLLAMA_HOST", "OPENAI_BASE_URL"})
"""Names in the setting `keys` whose values are not secret and may appear in error texts."""
# The scheme has a maximum length, so that searching a long word takes linear time.
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://\S+")
_MAX_TEXT_LENGTH: Final = 2_000
"""Maximum number of characters of an error text in a response."""

_logger = logging.getLogger("stenolog")


async def response_for(request: Request, error: Exception) -> Response:
    """Return the response to a request that failed; log unexpected errors."""
    gateway = getattr(request.app.state, "gateway", None)
    settings = None if gateway is None else gateway.settings
    if isinstance(error, HTTPException):
        text = _shorten(without_secrets(error.detail, settings))
        default_text = HTTPException(error.status_code).detail or str(error.status_code)
        if error.status_code == 404 and text == default_text:
            text = NO_SUCH_PATH
        code = _CODES.get(error.status_code) or re.sub(r"\W+", "_", default_text).lower()
        return error_response(error.status_code, text, code=code, headers=error.headers)
    if isinstance(error, ClientDisconnect):
        return error_response(
            400, "the client disconnected before the request was complete", code="disconnected"
        )
    status = status_of(error)
    if status is None:
        traceback_text = without_secrets("".join(traceback.format_exception(error)), settings)
        _logger.error("%s %s failed\n%s", request.method, request.url.path, traceback_text)
        text = INTERNAL_ERROR  # guard: unexpected-error-hidden
        return error_response(500, text, code="internal_error")
    if isinstance(error, SessionBusy):
        return error_response(status, _BUSY_TEXT, code="busy")
    text = _shorten(without_secrets(str(error), settings))
    if status == 500:
        _logger.error("%s %s: %s", request.method, request.url.path, text)
    # The lock may be free soon, so the client may retry after a second.
    headers = {"Retry-After": "1"} if isinstance(error, StoreBusy) else None
    # The error code is the name of the exception class in snake case.
    code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()
    return error_response(status, text, code=code, headers=headers)


HANDLERS: Final[Mapping[Any, ExceptionHandler]] = {
    StenologError: response_for,
    SessionBusy: response_for,
    HTTPException: response_for,
    Exception: response_for,
}
"""Handlers for `Starlette(exception_handlers=…)`. They also handle errors of the router."""


def status_of(error: Exception) -> int | None:
    """Return the HTTP status of an error; None for an unexpected error."""
    return next((STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), None)


def without_secrets(text: str, settings: Settings | None) -> str:
    """Return the text with passwords in URLs and secrets of the settings replaced."""
    # guard: error-without-password
    cleaned_text = _URL.sub(lambda match: without_password(match[0]), text)
    for secret in () if settings is None else _configured_secrets(settings):
        if len(secret) >= _MIN_SECRET_LENGTH:
            cleaned_text = cleaned_text.replace(secret, HIDDEN)
    return cleaned_text


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
            # A formatter that ignores `exc_text` must not format the exception again.
            record.exc_info = None
        if record.exc_text:
            record.exc_text = without_secrets(record.exc_text, self._settings)
        return True


def _shorten(text: str) -> str:
    # The text is cut after secrets are replaced, because half a secret would not be recognised.
    return text if len(text) <= _MAX_TEXT_LENGTH else f"{text[:_MAX_TEXT_LENGTH]}…"


def _configured_secrets(settings: Settings) -> Iterator[str]:
    yield from (value for name, value in settings.keys.items() if name not in _NOT_SECRET_KEYS)
    for model in settings.models.values():
        yield from (model.key, *model.headers.values())
    yield settings.channels.telegram.token
    for webhook in settings.webhooks.values():
        yield webhook.secret
