"""How much a client may send, how long it may take, and how many are served."""

import asyncio
from typing import Final, Self

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stenolog.gateway.shapes import failure

HEAD_BYTES: Final = 16_384
"""Maximum size of the head of a request: the request line and the headers."""
RETRY_AFTER: Final = 1
"""Seconds after which a place may be free again: turns are short."""


class BodyLimit:
    """Lets no body through that has more bytes than `most`, or for which we wait `seconds`.

    Nothing is kept back: the bytes are counted as the application takes them. A body that says at
    its beginning that it is too large is refused before any of it is read.
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
        if _declared(scope) > self._most:  # guard: announced-body-refused
            await _too_large(self._most)(scope, receive, send)
            return
        await _Body(self._app, self._most, self._seconds).serve(scope, receive, send)


class _Body:
    """The body of one request, on its way to the application."""

    def __init__(self, app: ASGIApp, most: int, seconds: float) -> None:
        self._app = app
        self._most = most
        self._bytes_left = most
        self._seconds_left = seconds
        self._whole = False
        self._started = False
        self._refused = False

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the application answer, or refuse in its place."""

        async def counted() -> Message:
            if self._refused:
                return {"type": "http.disconnect"}
            message, refused = await self._next(receive)
            if refused is None:
                return message
            self._refused = True
            if not self._started:
                await refused(scope, receive, send)
            # For the application the client is gone; it has its answer.
            return {"type": "http.disconnect"}

        async def watched(message: Message) -> None:
            if self._refused and not self._started:
                return
            self._started = True
            await send(message)

        try:
            await self._app(scope, counted, watched)
        except ClientDisconnect:
            # Clients come and go; that is no failure of ours to log.
            return
        except Exception:
            # What the application makes of a client that is gone tells nobody anything.
            if not self._refused or self._started:
                raise

    async def _next(self, receive: Receive) -> tuple[Message, Response | None]:
        """The next message, and what to answer in its place."""
        if self._whole:
            return await receive(), None
        clock = asyncio.get_running_loop().time
        begun = clock()
        # Only our waiting for the client counts, not what the application does meanwhile.
        try:
            async with asyncio.timeout(self._seconds_left):
                message = await receive()
        except TimeoutError:
            return {}, _too_slow()
        self._seconds_left = max(0.0, self._seconds_left - (clock() - begun))
        self._bytes_left -= len(message.get("body", b""))  # guard: body-bytes-counted
        self._whole = not message.get("more_body", False)
        return message, _too_large(self._most) if self._bytes_left < 0 else None


def _declared(scope: Scope) -> int:
    """How many bytes a request says that its body has; 0 where it does not say."""
    for name, value in scope["headers"]:
        # The server has refused what is no number, and two that differ.
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


def _too_large(most: int) -> Response:
    words = f"A request may have {most:,} bytes, and this has more."
    return failure(413, words, code="body_too_large")


def _too_slow() -> Response:
    words = "The rest of the request did not come in time."
    return failure(408, words, code="body_too_slow")


class Overloaded(HTTPException):
    """All places are taken; nothing was begun."""


class Admission:
    """So many places; who comes when all are taken is sent away at once and does not wait.

    For one event loop.
    """

    def __init__(self, most: int, *, status: int, what: str) -> None:
        self.most = most
        self.taken = 0
        """How many places are taken now."""
        self.refused = 0
        """How many were sent away so far."""
        self._status = status
        self._what = what

    def admit(self) -> "Place":
        """Take a place, at once. Raises Overloaded."""
        if self.taken >= self.most:  # guard: concurrency-limit
            self.refused += 1
            raise Overloaded(
                self._status,
                f"{self.most:,} {self._what} are open already; try again in a moment.",
                {"Retry-After": str(RETRY_AFTER)},
            )
        self.taken += 1
        return Place(self)


def turns_admission(most: int) -> Admission:
    """Places for turns: who gets none is told 429, and clients try again by themselves."""
    return Admission(most, status=429, what="requests")


def streams_admission(most: int) -> Admission:
    """Places for live streams: who gets none is told 503."""
    return Admission(most, status=503, what="streams")


class Place:
    """A place that is taken until it is given back, which may be done more than once."""

    def __init__(self, admission: Admission) -> None:
        self._admission: Admission | None = admission

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        """Let somebody else have it."""
        if self._admission is not None:
            self._admission.taken -= 1
            self._admission = None


class Held(Response):
    """A response that has a place for as long as it is sent, however that ends."""

    def __init__(self, response: Response, place: Place) -> None:
        super().__init__()
        self._response = response
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        with self._place:
            await self._response(scope, receive, send)
