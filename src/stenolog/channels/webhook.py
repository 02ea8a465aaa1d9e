"""Webhooks: a program sends signed messages, and gets the answers back or sent to its address.

The signature is the proof; no other token is asked for here. Who has none learns nothing, not even
which webhooks there are.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any, Final

import httpx2
import msgspec
from msgspec import Meta, Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from stenolog.channels.addresses import is_here
from stenolog.channels.allowing import AllowList
from stenolog.channels.base import Arrival, Inward, MaybeSent, NotSent, Place, Undeliverable
from stenolog.channels.inbox import Inbox
from stenolog.channels.signing import HEADER, is_signed, signature
from stenolog.errors import OnceConflict, UsageError
from stenolog.sessions.keys import Scope
from stenolog.settings.values import WebhookSettings

MOST_BODY: Final = 1024 * 1024
_SLOW: Final = 30.0
"""Seconds that a program has to send its message."""
_TIMEOUT: Final = 10.0
_LIMIT: Final = 1_000_000
_CHAT: Final = "#"
"""Stands before the name of a chat in keys, so that it is never that of a sender."""
_NOBODYS: Final = "a secret that no webhook has"
_TYPES: Final = {401: "authentication_error", 403: "permission_error"}
_REFUSED: Final = "the signature is missing, wrong or too old"

Name = Annotated[str, Meta(min_length=1, max_length=200)]


class Posted(Struct, frozen=True, kw_only=True):
    """What a program sends."""

    sender: Name
    text: Annotated[str, Meta(min_length=1)]
    id: Name
    chat: Name | None = None
    """A group whose senders share one session."""
    thread: Name | None = None
    """Each thread of a sender is a session of its own."""


class Webhook:
    """One program that sends messages, as a channel."""

    limit: Final = _LIMIT

    def __init__(self, name: str, settings: WebhookSettings, secret: str) -> None:
        self.name = channel_name(name)
        self.secret = secret
        self.allowed = AllowList(settings.allow, setting=f"webhooks.{name}.allow")
        self.replies = bool(settings.reply_url)
        """Whether answers are sent to an address of the program's."""
        self._url = settings.reply_url
        self._client: httpx2.AsyncClient | None = None

    async def run(self, inward: Inward) -> None:
        """Look after what a killed process left; messages come by themselves."""
        if self.replies:
            inward.recover()

    async def send(self, origin: Place, text: str) -> None:
        """Send an answer to the program's address. Raises NotSent, MaybeSent, Undeliverable."""
        told = {name: value for name, value in origin.items() if name != "channel"}
        body = msgspec.json.encode({**told, "text": text})
        headers = {
            "Content-Type": "application/json",
            HEADER: signature(self.secret, body, at=int(time.time())),
        }
        if self._client is None:
            self._client = httpx2.AsyncClient(
                timeout=_TIMEOUT,
                verify=self._url.startswith("https:"),
                follow_redirects=False,
                trust_env=not is_here(self._url),
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
            raise Undeliverable(f"reply_url does not take it ({status})")
        if status >= 500:
            raise MaybeSent(f"reply_url failed ({status})")

    async def typing(self, origin: Place) -> None:
        """Programs do not wait for a sign."""
        del origin

    async def close(self) -> None:
        """Let go of the connections; a second call does nothing."""
        if self._client is not None:
            await self._client.aclose()

    def arrival(self, posted: Posted) -> Arrival:
        """A message as the agent is given it. Raises UsageError."""
        if posted.sender.startswith(_CHAT):
            raise UsageError(f"the name of a sender does not begin with {_CHAT}")
        scope: Scope = "group" if posted.chat else "thread" if posted.thread else "sender"
        origin = {"channel": self.name, "sender": posted.sender, "id": posted.id}
        origin |= {"chat": posted.chat} if posted.chat else {}
        origin |= {"thread": posted.thread} if posted.thread else {}
        return Arrival(
            sender=posted.sender,
            text=posted.text,
            id=f"{self.name}-{posted.id}",
            chat=f"{_CHAT}{posted.chat}" if posted.chat else None,
            thread=posted.thread,
            scope=scope,
            origin=origin if self.replies else None,
        )


def channel_name(name: str) -> str:
    """The channel of a webhook of this name: no other channel is called so."""
    return f"webhook-{name}"


def webhook_routes(hooks: Sequence[tuple[Webhook, Inbox]]) -> list[Route]:
    """The paths at which messages of these webhooks are taken: `/webhooks/NAME`."""
    if not hooks:
        return []
    by_name = {hook.name: (hook, inbox) for hook, inbox in hooks}

    async def receive(request: Request) -> Response:
        try:
            body = await _body(request)
        except ClientDisconnect:
            return _error(400, "the message did not come to its end", code="disconnected")
        except TimeoutError:
            return _error(
                408, f"the message did not come within {_SLOW:.0f} s", code="request_timeout"
            )
        if body is None:
            return _error(413, f"a message has at most {MOST_BODY:,} bytes", code="too_long")
        found = by_name.get(channel_name(request.path_params["name"]))
        # An unknown name is answered as a wrong signature, so that nobody can look for names.
        secret = _NOBODYS if found is None else found[0].secret
        signed = is_signed(secret, body, request.headers.get(HEADER, ""), now=time.time())
        if found is None or not signed:
            return _error(401, _REFUSED, code="wrong_signature")
        return await _take_in(*found, body)

    return [Route("/webhooks/{name}", receive, methods=["POST"])]


async def _take_in(hook: Webhook, inbox: Inbox, body: bytes) -> Response:
    try:
        posted = msgspec.json.decode(body, type=Posted)
    except msgspec.DecodeError as error:
        return _error(400, f"the message is not as it should be: {error}", code="wrong_message")
    if not hook.allowed.allows(posted.sender):
        return _error(403, "this sender is not answered", code="sender_not_allowed")
    if inbox.full:
        words = "too many messages are being answered"
        return _error(503, words, code="too_many", headers={"Retry-After": "1"})
    try:
        incoming = inbox.take_in(hook.arrival(posted))
        if hook.replies:
            if not await asyncio.shield(incoming.durable):
                return _error(503, "the message was not stored; send it again", code="not_stored")
            return JSONResponse({"id": posted.id}, status_code=202)
        answer = await asyncio.shield(incoming.answer)
    except OnceConflict:
        return _error(409, "this id was used for another message", code="once_conflict")
    except UsageError as error:
        return _error(400, str(error), code="usage_error")
    if answer is None or (answer.outcome == "failed" and not answer.text):
        return _error(503, "the message was not answered; send it again", code="not_answered")
    said: dict[str, Any] = {"answer": answer.text, "session": answer.key, "seq": answer.seq}
    return JSONResponse({**said, "outcome": answer.outcome})


async def _body(request: Request) -> bytes | None:
    """The body; None where it is too long, by what it says of itself or by what came."""
    told = request.headers.get("Content-Length", "")
    if told.isdecimal() and int(told[:20]) > MOST_BODY:
        return None
    body = bytearray()
    async with asyncio.timeout(_SLOW):
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BODY:
                return None
    return bytes(body)


def _error(
    status: int, words: str, *, code: str, headers: dict[str, str] | None = None
) -> Response:
    """An error in the shape that all of the gateway have."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    told = {"message": words, "type": kind, "code": code}
    return JSONResponse({"error": told}, status_code=status, headers=headers)
