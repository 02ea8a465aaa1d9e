"""Limits for requests: their size, their duration, and their number at the same time."""

import asyncio
from typing import Final, Self

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stenolog.gateway.api_types import error_response

HEAD_BYTES: Final = 16_384
"""Maximum size of the head of a request: the request line and the headers."""
RETRY_AFTER: Final = 1
"""Seconds until a client should retry: most turns are short."""


class BodyLimit:
    """Middleware that limits a request body to `most` bytes and `seconds` of waiting.

    It buffers nothing: it counts the bytes as the application reads them. It rejects a request
    whose Content-Length is too large before it reads the body.
    """

    def __init__(self, app: ASGIApp, *, most: int, seconds: float) -> None:
        self._app = app
        self._most = most
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _content_length(scope) > self._most:  # guard: announced-body-refused
            await _too_large(self._most)(scope, receive, send)
            return
        await _LimitedBody(self._app, self._most, self._seconds).serve(scope, receive, send)


class _LimitedBody:
    """The body of one request while the application reads it."""

    def __init__(self, app: ASGIApp, most: int, seconds: float) -> None:
        self._app = app
        self._most = most
        self._bytes_left = most
        self._seconds_left = seconds
        self._whole = False
        self._started = False
        self._refused = False

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, or send the rejection."""

        async def counted() -> Message:
            if self._refused:
                return {"type": "http.disconnect"}
            message, refused = await self._next(receive)
            if refused is None:
                return message
            self._refused = True
            if not self._started:
                await refused(scope, receive, send)
            # For the application the client has disconnected; it already has its response.
            return {"type": "http.disconnect"}

        async def watched(message: Message) -> None:
            if self._refused and not self._started:
                return
            self._started = True
            await send(message)

        try:
            await self._app(scope, counted, watched)
        except ClientDisconnect:
            # A client that disconnects is not an error to log.
            return
        except Exception:
            # After a rejection the application's errors are irrelevant.
            if not self._refused or self._started:
                raise

    async def _next(self, receive: Receive) -> tuple[Message, Response | None]:
        """Return the next message, and the rejection to send instead, if any."""
        if self._whole:
            return await receive(), None
        clock = asyncio.get_running_loop().time
        begun = clock()
        # Only the time spent waiting for the client counts, not that of the application.
        try:
            async with asyncio.timeout(self._seconds_left):
                message = await receive()
        except TimeoutError:
            return {}, _too_slow()
        self._seconds_left = max(0.0, self._seconds_left - (clock() - begun))
        self._bytes_left -= len(message.get("body", b""))  # guard: body-bytes-counted
        self._whole = not message.get("more_body", False)
        return message, _too_large(self._most) if self._bytes_left < 0 else None


def _content_length(scope: Scope) -> int:
    """Return the Content-Length of a request; 0 if it has none."""
    for name, value in scope["headers"]:
        # The server has rejected values that are not numbers, and conflicting ones.
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


def _too_large(most: int) -> Response:
    words = f"The request body has more than {most:,} bytes (gateway.max_body)."
    return error_response(413, words, code="body_too_large")


def _too_slow() -> Response:
    words = "The request body did not arrive in time. Send it again."
    return error_response(408, words, code="body_too_slow")


class Overloaded(HTTPException):
    """The limit is reached; the request was not started."""


class ConcurrencyLimit:
    """Concurrency limit. Requests above it are rejected at once and do not wait.

    For use in one event loop.
    """

    def __init__(self, most: int, *, status: int, what: str) -> None:
        self.most = most
        self.taken = 0
        """Number of slots in use."""
        self.refused = 0
        """Number of rejected requests so far."""
        self._status = status
        self._what = what

    def admit(self) -> "Slot":
        """Take a slot. Raise Overloaded if none is free."""
        if self.taken >= self.most:  # guard: concurrency-limit
            self.refused += 1
            raise Overloaded(
                self._status,
                f"Too many {self._what}: {self.most:,} are open. Try again in a moment.",
                {"Retry-After": str(RETRY_AFTER)},
            )
        self.taken += 1
        return Slot(self)


class Slot:
    """A slot of a concurrency limit. Releasing it twice is allowed."""

    def __init__(self, admission: ConcurrencyLimit) -> None:
        self._admission: ConcurrencyLimit | None = admission

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the slot."""
        if self._admission is not None:
            self._admission.taken -= 1
            self._admission = None


class SlotResponse(Response):
    """A response that holds a slot until it is sent or has failed."""

    def __init__(self, response: Response, place: Slot) -> None:
        super().__init__()
        self._response = response
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response and release the slot."""
        with self._place:
            await self._response(scope, receive, send)
