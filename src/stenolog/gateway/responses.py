"""Responses: values and errors as JSON, the HTTP status of errors, and texts without secrets."""

import logging
import re
import traceback
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw, Struct
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from stenolog import errors
from stenolog.agent.scheduler import SessionBusy
from stenolog.codec import encode_object
from stenolog.errors import StenologError, StoreUnavailable
from stenolog.records import Message, decode_object
from stenolog.settings.values import HIDDEN, Settings, mask_secrets

_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
_LINE_END_ESCAPES: Final = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
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
    SessionBusy: 409,
    errors.Conflict: 409,
    errors.LeaseLost: 409,
    errors.NothingToUndo: 409,
    errors.OnceConflict: 409,
    errors.SessionExists: 409,
    errors.WrongSettings: 500,
    errors.DamagedStore: 500,
    errors.ModelRefused: 502,
    errors.ModelUnavailable: 503,
    errors.StoreClosed: 503,
    errors.StoreUnavailable: 503,
}
"""HTTP status by exception; a class that is not listed has the status of its nearest base."""
_MIN_SECRET_LENGTH: Final = 8
"""Shorter secrets are not replaced in texts, because they may occur in ordinary text."""
_NOT_SECRET_KEYS: Final = frozenset({"OLLAMA_CONTEXT_LENGTH", "OLLAMA_HOST", "OPENAI_BASE_URL"})
"""Names in the setting `keys` whose values are not secret and may appear in error texts."""
# The scheme has a maximum length, so that searching a long word takes linear time.
_URL_PATTERN: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://\S+")
_MAX_TEXT_LENGTH: Final = 2_000
"""Maximum number of characters of an error text in a response."""

_logger = logging.getLogger("stenolog")


class MessageItem(Struct, frozen=True, kw_only=True):
    """One message with its seq and time."""

    seq: int
    at: datetime
    hidden: bool
    message: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]
    """The stored object, unchanged."""


def message_item(message: Message) -> MessageItem:
    """Return a stored message for a response."""
    raw_message = Raw(message.to_json())
    return MessageItem(seq=message.seq, at=message.at, hidden=message.hidden, message=raw_message)


class ErrorDetails(Struct, frozen=True, kw_only=True):
    """Description of an error, for people and for programs."""

    message: str
    type: str
    code: str


class ErrorResponse(Struct, frozen=True, kw_only=True):
    """An error in OpenAI's format."""

    error: ErrorDetails


def encode_json(value: Struct) -> bytes:
    """Encode a value as JSON. Lone surrogates become escape sequences, as in the store."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        # `to_builtins` calls the hook for raw JSON, the only type that it does not support here.
        return encode_object(msgspec.to_builtins(value, enc_hook=decode_object))


def sse_data(json: bytes) -> str:
    """Return JSON as event data; escape line ends that only some clients recognise."""
    return json.decode().translate(_LINE_END_ESCAPES)


def json_response(
    value: Struct, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a JSON response with this value."""
    return Response(
        encode_json(value),
        status_code=status,
        # Stored text may look like HTML; browsers must not guess the type.
        headers={"X-Content-Type-Options": "nosniff", **(headers or {})},
        media_type="application/json",
    )


def error_response(
    status: int, message: str, *, code: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error response; the message must not contain secrets."""
    default_type = "invalid_request_error" if status < 500 else "server_error"
    details = ErrorDetails(message=message, type=_ERROR_TYPES.get(status, default_type), code=code)
    return json_response(ErrorResponse(error=details), status=status, headers=headers)


# --- errors -----------------------------------------------------------------------------------


async def response_for(request: Request, error: Exception) -> Response:
    """Return the response to a request that failed; log errors with status 500."""
    gateway = getattr(request.app.state, "gateway", None)
    settings = None if gateway is None else gateway.settings
    if isinstance(error, HTTPException):
        text = _shorten(without_secrets(error.detail, settings))
        default_text = HTTPException(error.status_code).detail or str(error.status_code)
        if error.status_code == 404 and text == default_text:
            text = NO_SUCH_PATH
        code = re.sub(r"\W+", "_", default_text).lower()
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
    # The store may work again soon, so the client may retry after a second.
    headers = {"Retry-After": "1"} if isinstance(error, StoreUnavailable) else None
    # The error code is the name of the exception class in snake case.
    code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()
    return error_response(status, text, code=code, headers=headers)


EXCEPTION_HANDLERS: Final[Mapping[Any, ExceptionHandler]] = dict.fromkeys(
    (StenologError, SessionBusy, HTTPException, Exception), response_for
)
"""Handlers for `Starlette(exception_handlers=…)`. The handlers also get errors of the router."""


def status_of(error: Exception) -> int | None:
    """Return the HTTP status of an error; None for an unexpected error."""
    return next((STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), None)


def without_secrets(text: str, settings: Settings | None) -> str:
    """Return the text with passwords in URLs and secrets of the settings replaced."""
    # guard: error-without-password
    cleaned_text = _URL_PATTERN.sub(lambda match: mask_secrets(match[0]), text)
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
    # Callers replace secrets before the text is cut: half a secret would not be recognised.
    return text if len(text) <= _MAX_TEXT_LENGTH else f"{text[:_MAX_TEXT_LENGTH]}…"


def _configured_secrets(settings: Settings) -> Iterator[str]:
    yield from (value for name, value in settings.keys.items() if name not in _NOT_SECRET_KEYS)
    for model in settings.models.values():
        yield from (model.key, *model.headers.values())
    yield settings.channels.telegram.token
    yield from (webhook.secret for webhook in settings.webhooks.values())
