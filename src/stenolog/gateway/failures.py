"""Errors as responses: a status by who must act, and words that hold no secret."""

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from stenolog.agent.turns import Busy
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
    SessionExists,
    StaleCheckpoint,
    StenologError,
    StoreBusy,
    StoreClosed,
    StoreUnavailable,
    UsageError,
    WrongSettings,
)
from stenolog.gateway.shapes import Failure, Words, answered
from stenolog.settings.secrets import HIDDEN, without_password
from stenolog.settings.values import Settings

INTERNAL: Final = "internal error; the log of the gateway says more"
_BUSY: Final = "an answer is being written in this session; wait for it, or stop it"

STATUSES: Final[Mapping[type[Exception], int]] = {
    UsageError: 400,
    ReadOnly: 403,
    NoSuchSession: 404,
    NoSuchNote: 404,
    Busy: 409,
    LeaseLost: 409,
    NothingToUndo: 409,
    OnceConflict: 409,
    SessionExists: 409,
    StaleCheckpoint: 409,
    WrongSettings: 500,
    DamagedStore: 500,
    ModelRefused: 502,
    ModelUnavailable: 503,
    StoreClosed: 503,
    StoreUnavailable: 503,
}
"""The status of each kind of error; of what is not named here, that of its nearest parent."""

_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_SHORTEST: Final = 8
"""What is shorter than this is no key, and stands in many words."""
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S+")

_logger = logging.getLogger("stenolog")


def failure(
    status: int, message: str, *, code: str, headers: Mapping[str, str] | None = None
) -> Response:
    """The response that says what is wrong; the words must hold no secret."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    words = Words(message=message, type=kind, code=code)
    return answered(Failure(error=words), status=status, headers=headers)


async def failed(request: Request, error: Exception) -> Response:
    """The response to a request that ended in an error; what nobody expects is logged."""
    gateway = getattr(request.app.state, "gateway", None)
    settings = None if gateway is None else gateway.settings
    if isinstance(error, HTTPException):
        words = without_secrets(error.detail, settings)
        code = re.sub(r"\W+", "_", _reason(error.status_code)).lower()
        return failure(error.status_code, words, code=code, headers=error.headers)
    if isinstance(error, ClientDisconnect):
        return failure(400, "the request ended before all of it was sent", code="disconnected")
    status = status_of(error)
    if status is None:
        _logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return failure(500, INTERNAL, code="internal_error")
    if status == 500:
        _logger.error("%s %s: %s", request.method, request.url.path, error)
    words = _BUSY if isinstance(error, Busy) else without_secrets(str(error), settings)
    # Who waited for a lock in vain may try again at once.
    headers = {"Retry-After": "1"} if isinstance(error, StoreBusy) else None
    return failure(status, words, code=_snake(type(error).__name__), headers=headers)


HANDLERS: Final[Mapping[Any, ExceptionHandler]] = {
    StenologError: failed,
    Busy: failed,
    HTTPException: failed,
    Exception: failed,
}
"""For `Starlette(exception_handlers=…)`: also what the router itself refuses looks so."""


def status_of(error: Exception) -> int | None:
    """The status of an error; None for one that nobody expects."""
    return next((STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), None)


def without_secrets(words: str, settings: Settings | None) -> str:
    """The words without passwords in addresses, and without the keys that the settings hold."""
    shown = _URL.sub(lambda found: without_password(found[0]), words)
    for secret in () if settings is None else _secrets(settings):
        if len(secret) >= _SHORTEST:
            shown = shown.replace(secret, HIDDEN)
    return shown


def _secrets(settings: Settings) -> Iterator[str]:
    yield from settings.keys.values()
    for model in settings.models.values():
        yield from (model.key, *model.headers.values())
    yield settings.channels.telegram.token
    for webhook in settings.webhooks.values():
        yield webhook.secret


def _reason(status: int) -> str:
    return HTTPException(status).detail or str(status)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
