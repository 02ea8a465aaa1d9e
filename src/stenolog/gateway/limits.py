"""Limits for the size and duration of request bodies, and for concurrent requests."""

import asyncio
from contextlib import ExitStack
from typing import Final

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
        clock = asyncio.get_running_loop().time
        bytes_left, seconds_left = self._max_bytes, self._max_seconds
        is_body_complete = is_response_started = is_rejected = False

        async def receive_limited() -> Message:
            nonlocal bytes_left, seconds_left, is_body_complete, is_rejected
            if is_rejected:
                # The request is already rejected, so the application sees a disconnected client.
                return {"type": "http.disconnect"}
            if is_body_complete:
                return await receive()
            # Only the time spent waiting for the client counts, not the time of the application.
            start = clock()
            try:
                async with asyncio.timeout(seconds_left):
                    message = await receive()
            except TimeoutError:
                text = "The request body did not arrive in time. Send it again."
                rejection = error_response(
                    408, text, code="body_too_slow", headers={"Connection": "close"}
                )
            else:
                seconds_left = max(0.0, seconds_left - (clock() - start))
                bytes_left -= len(message.get("body", b""))  # guard: body-bytes-counted
                is_body_complete = not message.get("more_body", False)
                if bytes_left >= 0:
                    return message
                rejection = _too_large_response(self._max_bytes)
            is_rejected = True
            if not is_response_started:
                await rejection(scope, receive, send)
            return await receive_limited()

        async def send_unless_rejected(message: Message) -> None:
            nonlocal is_response_started
            if is_response_started or not is_rejected:
                is_response_started = True
                await send(message)

        try:
            await self._app(scope, receive_limited, send_unless_rejected)
        except ClientDisconnect:
            # A disconnected client is not an error, so nothing is logged.
            return
        except Exception:
            # If the client got the rejection, the application's errors are irrelevant.
            if not is_rejected or is_response_started:
                raise


def _too_large_response(max_bytes: int) -> Response:
    text = f"The request body has more than {max_bytes:,} bytes (gateway.max_body)."
    # Without this header, the server would read the rest of the body.
    return error_response(413, text, code="body_too_large", headers={"Connection": "close"})


Slot = ExitStack
"""A slot of a concurrency limit. `close` releases the slot; a second call has no effect."""


class ConcurrencyLimit:
    """Limit for concurrent requests. Requests above the limit are rejected at once and do not wait.

    A limit must be used in only one event loop.
    """

    def __init__(self, limit: int, *, status: int, noun: str) -> None:
        self.limit = limit
        self.in_use = 0
        """Number of slots in use."""
        self._status = status
        self._noun = noun

    def admit(self) -> Slot:
        """Take a slot. Raises HTTPException if no slot is free."""
        if self.in_use >= self.limit:  # guard: concurrency-limit
            text = f"Too many {self._noun}: {self.limit:,} are open. Try again in a moment."
            raise HTTPException(self._status, text, {"Retry-After": "1"})
        self.in_use += 1
        slot = Slot()
        slot.callback(self._release)
        return slot

    def _release(self) -> None:
        self.in_use -= 1


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
