"""Webhooks: programs send signed messages, and get the answers in the response or at a reply URL.

The signature authenticates the sender; no other token is needed. An unknown webhook gets the same
response as a wrong signature. A signature can be checked only after the body was read. Therefore
the number of bodies that are received at once is limited, and so is the time for each body.

A signature is `t=SECONDS,v1=HEX`. HEX is the HMAC-SHA256 of `SECONDS.` and the body, with the
shared secret.
"""

import asyncio
import hashlib
import hmac
import re
import time
from collections.abc import Sequence
from typing import Annotated, Final

import httpx2
import msgspec
from msgspec import Meta, Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from stenolog.channels.channel import (
    AllowList,
    Destination,
    IncomingMessage,
    MaybeSent,
    NotSent,
    Undeliverable,
    is_local,
    uses_tls,
)
from stenolog.channels.inbox import Inbox, text_for_user
from stenolog.errors import OnceConflict, UsageError
from stenolog.sessions.keys import Scope
from stenolog.settings.values import WebhookSettings

# --- signing --------------------------------------------------------------------------------------
# A signature authenticates the sender and the time of a message.


SIGNATURE_HEADER: Final = "X-Steno-Signature"
MAX_SIGNATURE_AGE_SECONDS: Final = 300
"""Maximum difference in seconds between the time of a signature and now."""
_SIGNATURE_PATTERN: Final = re.compile(r"t=([0-9]{1,12}),v1=([0-9a-f]{64})")


def make_signature(secret: str, body: bytes, *, signed_at: int) -> str:
    """Return the value of the signature header for this body. `signed_at` is a Unix time."""
    return f"t={signed_at},v1={_digest(secret, signed_at, body)}"


def is_recent_signature(header: str, *, now: float) -> bool:
    """Return whether the header looks like a recent signature. Does not verify the signature."""
    match = _SIGNATURE_PATTERN.fullmatch(header)
    return match is not None and abs(now - int(match[1])) <= MAX_SIGNATURE_AGE_SECONDS


def is_signed(secret: str, body: bytes, header: str, *, now: float) -> bool:
    """Return whether the header is a recent signature of this body with this secret."""
    match = _SIGNATURE_PATTERN.fullmatch(header)
    signed_at, signature = (int(match[1]), match[2]) if match else (0, "")
    # Always compare the signature, so that the response time reveals nothing.
    is_correct = hmac.compare_digest(_digest(secret, signed_at, body), signature)
    return is_correct and abs(now - signed_at) <= MAX_SIGNATURE_AGE_SECONDS  # guard: signature-age


def _digest(secret: str, signed_at: int, body: bytes) -> str:
    # guard: signature-covers-time
    return hmac.new(secret.encode(), f"{signed_at}.".encode() + body, hashlib.sha256).hexdigest()


# --- webhook --------------------------------------------------------------------------------------


MAX_BODY_BYTES: Final = 1024 * 1024
MAX_BODY_SECONDS: Final = 5.0
"""Maximum seconds for receiving the body of a message."""
MAX_PENDING_BODIES: Final = 32
"""Maximum number of bodies that are received at once. The next body replaces the oldest."""
_SEND_TIMEOUT_SECONDS: Final = 10.0
_MAX_MESSAGE_LENGTH: Final = 1_000_000
_CHAT_PREFIX: Final = "#"
"""Prefix of chat names in session keys, so that no chat name equals a sender."""
_ERROR_TYPES: Final = {401: "authentication_error", 403: "permission_error"}
_BAD_SIGNATURE_TEXT: Final = "the signature is missing, wrong or too old; sign the body again"

ShortText = Annotated[str, Meta(min_length=1, max_length=200)]


class WebhookMessage(Struct, frozen=True, kw_only=True):
    """A message from a program."""

    sender: ShortText
    text: Annotated[str, Meta(min_length=1)]
    id: ShortText
    chat: ShortText | None = None
    """A group whose senders share one session."""
    thread: ShortText | None = None
    """A thread of a sender. Each thread is a separate session, unless `chat` is set."""


class Webhook:
    """A webhook as a channel."""

    max_length: Final = _MAX_MESSAGE_LENGTH

    def __init__(self, name: str, settings: WebhookSettings, secret: str) -> None:
        self.name = channel_name(name)
        self.secret = secret
        self.allowed = AllowList(settings.allow, setting=f"webhooks.{name}.allow")
        self.sends_replies = bool(settings.reply_url)
        """Whether answers are sent to `reply_url`."""
        self._url = settings.reply_url
        self._client: httpx2.AsyncClient | None = None

    async def run(self, inbox: Inbox) -> None:
        """Recover undelivered answers. Messages arrive through the routes."""
        inbox.recover_answers()

    async def send(self, origin: Destination, text: str) -> None:
        """Send an answer to `reply_url`. Raises NotSent, MaybeSent, Undeliverable."""
        destination = {name: value for name, value in origin.items() if name != "channel"}
        body = msgspec.json.encode({**destination, "text": text})
        headers = {
            "Content-Type": "application/json",
            SIGNATURE_HEADER: make_signature(self.secret, body, signed_at=int(time.time())),
        }
        if self._client is None:
            self._client = httpx2.AsyncClient(
                timeout=_SEND_TIMEOUT_SECONDS,
                verify=uses_tls(self._url),  # guard: webhook-tls
                follow_redirects=False,
                trust_env=not is_local(self._url),
            )
        try:
            response = await self._client.post(self._url, content=body, headers=headers)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            raise NotSent(f"reply_url cannot be reached: {error}") from None
        except httpx2.HTTPError as error:
            raise MaybeSent(f"reply_url: {type(error).__name__}") from None
        status = response.status_code
        if status == 429:
            raise NotSent("reply_url is busy (429)")
        if 300 <= status < 500:
            raise Undeliverable(f"reply_url rejected the answer ({status})")
        if status >= 500:
            raise MaybeSent(f"reply_url failed ({status})")

    async def show_typing(self, origin: Destination) -> None:
        """Do nothing: programs have no typing indicator."""
        del origin

    async def close(self) -> None:
        """Close connections. A second call does nothing."""
        if self._client is not None:
            await self._client.aclose()

    def to_incoming(self, message: WebhookMessage) -> IncomingMessage:
        """Convert a received message. Raises UsageError if the sender starts with `#`."""
        if message.sender.startswith(_CHAT_PREFIX):
            raise UsageError(f"sender must not start with {_CHAT_PREFIX}")
        scope: Scope = "group" if message.chat else "thread" if message.thread else "sender"
        origin = {"channel": self.name, "sender": message.sender, "id": message.id}
        origin |= {"chat": message.chat} if message.chat else {}
        origin |= {"thread": message.thread} if message.thread else {}
        return IncomingMessage(
            sender=message.sender,
            text=message.text,
            id=f"{self.name}-{message.id}",
            chat=f"{_CHAT_PREFIX}{message.chat}" if message.chat else None,
            thread=message.thread,
            scope=scope,
            origin=origin if self.sends_replies else None,
        )


def channel_name(name: str) -> str:
    """Return the channel name of a webhook. No other kind of channel has the same name."""
    return f"webhook-{name}"


def webhook_routes(webhooks_and_inboxes: Sequence[tuple[Webhook, Inbox]]) -> list[Route]:
    """Return the route `/webhooks/NAME`, which receives the messages of these webhooks."""
    if not webhooks_and_inboxes:
        return []
    webhooks_by_name = {hook.name: (hook, inbox) for hook, inbox in webhooks_and_inboxes}
    pending_bodies = PendingBodies()

    async def receive(request: Request) -> Response:
        webhook = webhooks_by_name.get(channel_name(request.path_params["name"]))
        header = request.headers.get(SIGNATURE_HEADER, "")
        # Reject requests that cannot be valid before reading the body.
        if webhook is None or not is_recent_signature(header, now=time.time()):
            return _error(401, "wrong_signature", _BAD_SIGNATURE_TEXT)
        try:
            body = await pending_bodies.read_body(request)
        except ClientDisconnect:
            text = "the client disconnected before the message was complete"
            return _error(400, "disconnected", text)
        except BodyDropped:
            return _error(503, "too_many", "too many messages are being received; send it again")
        except TimeoutError:
            text = f"the message did not arrive within {MAX_BODY_SECONDS:.0f} s; send it again"
            return _error(408, "request_timeout", text)
        if body is None:
            return _error(413, "too_long", f"the message has more than {MAX_BODY_BYTES:,} bytes")
        # guard: webhook-signature
        if not is_signed(webhook[0].secret, body, header, now=time.time()):
            return _error(401, "wrong_signature", _BAD_SIGNATURE_TEXT)
        return await _handle_message(*webhook, body)

    return [Route("/webhooks/{name}", receive, methods=["POST"])]


async def _handle_message(hook: Webhook, inbox: Inbox, body: bytes) -> Response:
    try:
        message = msgspec.json.decode(body, type=WebhookMessage)
    except msgspec.DecodeError as error:
        return _error(400, "wrong_message", f"invalid message: {error}")
    if not hook.allowed.allows(message.sender):  # guard: webhook-allow-list
        return _error(403, "sender_not_allowed", "this sender is not in the allow list")
    if inbox.is_full:
        return _error(503, "too_many", "too many messages are being answered; send it again")
    try:
        pending_message = inbox.accept(hook.to_incoming(message))
        if hook.sends_replies:
            if not await asyncio.shield(pending_message.durable):
                return _error(503, "not_stored", "the message was not stored; send it again")
            return JSONResponse({"id": message.id}, status_code=202)
        answer = await asyncio.shield(pending_message.answer)
    except OnceConflict:
        return _error(409, "once_conflict", "this id was used for another message")
    except UsageError as error:
        return _error(400, "usage_error", str(error))
    has_failed = answer is None or answer.outcome == "failed" or answer.error is not None
    text = "" if answer is None else answer.text if answer.error is None else text_for_user(answer)
    # The text is empty if another process took over the turn, or if this process shuts down.
    # The next request with the same id gets the answer.
    if answer is None or (has_failed and not text):
        return _error(503, "not_answered", "the message was not answered; send it again")
    fields = {"answer": text, "session": answer.key, "seq": answer.seq, "outcome": answer.outcome}
    return JSONResponse(fields)


class BodyDropped(Exception):
    """A message that arrived too slowly was dropped to receive a newer message."""


class PendingBodies:
    """The message bodies that are being received, limited in number and time.

    A signature can be checked only when the body is complete. If too many bodies are being
    received, the oldest body is dropped, so that slow senders do not block other senders.
    """

    def __init__(self, limit: int = MAX_PENDING_BODIES, seconds: float = MAX_BODY_SECONDS) -> None:
        self._limit = limit
        self._seconds = seconds
        self._timeouts: dict[asyncio.Timeout, None] = {}

    async def read_body(self, request: Request) -> bytes | None:
        """Return the body, or None if the body is too long. Raises TimeoutError, BodyDropped."""
        content_length = request.headers.get("Content-Length", "")
        if content_length.isdecimal() and int(content_length[:20]) > MAX_BODY_BYTES:
            return None
        if len(self._timeouts) >= self._limit:  # guard: webhook-bodies-limited
            oldest_timeout = next(iter(self._timeouts))
            if not oldest_timeout.expired():  # an expired body gives up its slot anyway
                del self._timeouts[oldest_timeout]
                oldest_timeout.reschedule(asyncio.get_running_loop().time())
        body, timeout = bytearray(), asyncio.timeout(self._seconds)
        try:
            async with timeout:
                self._timeouts[timeout] = None
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > MAX_BODY_BYTES:
                        return None
                return bytes(body)
        except TimeoutError:
            raise (TimeoutError if timeout in self._timeouts else BodyDropped) from None
        finally:
            self._timeouts.pop(timeout, None)


def _error(status: int, code: str, text: str) -> Response:
    """Return an error in the format of the gateway. After a 503, the sender should try again."""
    default_type = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": text, "type": _ERROR_TYPES.get(status, default_type), "code": code}
    headers = {"Retry-After": "1"} if status == 503 else None
    return JSONResponse({"error": error}, status_code=status, headers=headers)
