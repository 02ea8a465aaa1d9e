"""Limits for the size, the duration and the number of concurrent requests."""

import asyncio
from typing import Final, Self

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stenolog.gateway.responses import error_response

MAX_HEAD_BYTES: Final = 16_384
"""Maximum size of the head of a request: the request line and the headers."""


class BodyLimit:
    """Middleware that limits a request body to `max_bytes` bytes and `max_seconds` of waiting.

    The middleware buffers nothing: it counts the bytes while the application reads them. A request
    whose Content-Length is too large is rejected before its body is read.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, max_seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        # The server has already rejected values that are not numbers, and conflicting values.
        if length.isdecimal() and int(length) > self._max_bytes:  # guard: announced-body-refused
            await _too_large_response(self._max_bytes)(scope, receive, send)
            return
        body = _LimitedBody(self._app, self._max_bytes, self._max_seconds)
        await body.serve(scope, receive, send)


class _LimitedBody:
    """The body of one request while the application reads it."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._bytes_left = max_bytes
        self._seconds_left = max_seconds
        self._body_complete = False
        self._response_started = False
        self._rejected = False

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application. If a limit is exceeded, send an error response instead."""

        async def receive_limited() -> Message:
            if not self._rejected:
                message, rejection = await self._next_message(receive)
                if rejection is None:
                    return message
                self._rejected = True
                if not self._response_started:
                    await rejection(scope, receive, send)
            # The client already has a response. To the application, the client looks disconnected.
            return {"type": "http.disconnect"}

        async def send_unless_rejected(message: Message) -> None:
            if self._response_started or not self._rejected:
                self._response_started = True
                await send(message)

        try:
            await self._app(scope, receive_limited, send_unless_rejected)
        except ClientDisconnect:
            # A disconnected client is not an error, so nothing is logged.
            return
        except Exception:
            # After a rejection the application's errors are irrelevant.
            if not self._rejected or self._response_started:
                raise

    async def _next_message(self, receive: Receive) -> tuple[Message, Response | None]:
        """Return the next message, and an error response if a limit is exceeded, otherwise None."""
        if self._body_complete:
            return await receive(), None
        clock = asyncio.get_running_loop().time
        start = clock()
        # Only the time spent waiting for the client counts, not the time of the application.
        try:
            async with asyncio.timeout(self._seconds_left):
                message = await receive()
        except TimeoutError:
            text = "The request body did not arrive in time. Send it again."
            return {}, error_response(408, text, code="body_too_slow")
        self._seconds_left = max(0.0, self._seconds_left - (clock() - start))
        self._bytes_left -= len(message.get("body", b""))  # guard: body-bytes-counted
        self._body_complete = not message.get("more_body", False)
        return message, _too_large_response(self._max_bytes) if self._bytes_left < 0 else None


def _too_large_response(max_bytes: int) -> Response:
    text = f"The request body has more than {max_bytes:,} bytes (gateway.max_body)."
    return error_response(413, text, code="body_too_large")


class Overloaded(HTTPException):
    """The concurrency limit is reached, so the request was not started."""


class ConcurrencyLimit:
    """Concurrency limit. Requests above the limit are rejected at once and do not wait.

    A limit must be used in only one event loop.
    """

    def __init__(self, limit: int, *, status: int, noun: str) -> None:
        self.limit = limit
        self.in_use = 0
        """Number of slots in use."""
        self.rejected_count = 0
        """Number of rejected requests so far."""
        self._status = status
        self._noun = noun

    def admit(self) -> "Slot":
        """Take a slot. Raises Overloaded if no slot is free."""
        if self.in_use >= self.limit:  # guard: concurrency-limit
            self.rejected_count += 1
            text = f"Too many {self._noun}: {self.limit:,} are open. Try again in a moment."
            raise Overloaded(self._status, text, {"Retry-After": "1"})
        self.in_use += 1
        return Slot(self)


class Slot:
    """A slot of a concurrency limit. Releasing a slot a second time has no effect."""

    def __init__(self, limit: ConcurrencyLimit) -> None:
        self._limit: ConcurrencyLimit | None = limit

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the slot."""
        if self._limit is not None:
            self._limit.in_use -= 1
            self._limit = None


class SlotResponse(Response):
    """A response that holds a slot until the response is sent or fails."""

    def __init__(self, response: Response, slot: Slot) -> None:
        super().__init__()
        self._response = response
        self._slot = slot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response and release the slot."""
        with self._slot:
            await self._response(scope, receive, send)
