"""The interface of chat apps: values, protocols, errors and shared rules.

Telegram and webhooks implement the interface. Another app only needs its own `Channel`.
"""

import asyncio
import ipaddress
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from msgspec import Struct

from stenolog.sessions.keys import Scope

Destination = Mapping[str, Any]
"""Destination of an answer, in the app's format.

A destination is JSON and stored with the user's message. The field `channel` is the name of the
channel.
"""


class IncomingMessage(Struct, frozen=True, kw_only=True):
    """A user's message as it came from an app."""

    sender: str
    text: str
    id: str
    """Id of the message: unique, and the same when the app sends the message again."""
    chat: str | None = None
    """The group in which the message was sent; None for a private chat."""
    thread: str | None = None
    scope: Scope = "sender"
    origin: Destination | None = None
    """Destination of the answer; None if the answer is returned to the caller."""
    number: int = 0
    """Position of the message in its chat; 0 if the app has no numbers and the inbox assigns one.
    """


class AcceptedMessage(Struct, frozen=True, kw_only=True):
    """A message that is being processed."""

    durable: asyncio.Future[bool]
    """Whether the message is stored or settled, so that the app may forget it.

    False means that the app must resend the message.
    """


class MessageReceiver(Protocol):
    """The receiver of messages that arrive through a channel."""

    def accept(self, arrival: IncomingMessage) -> AcceptedMessage:
        """Start to store and answer a message. Messages of one session keep their order."""
        ...

    async def wait_for_capacity(self) -> None:
        """Wait until another message can be accepted."""
        ...

    async def tell(self, origin: Destination, text: str) -> None:
        """Send a text that is not an answer. Raises nothing."""
        ...

    def recover(self) -> None:
        """Start to deliver answers that a killed process did not deliver."""
        ...


class Channel(Protocol):
    """An app in which people talk to the agent."""

    @property
    def name(self) -> str:
        """Name of the channel: the first part of its session keys."""
        ...

    @property
    def limit(self) -> int:
        """Maximum length of a message in UTF-16 code units."""
        ...

    async def run(self, receiver: MessageReceiver) -> None:
        """Receive messages until the task is cancelled or the channel can never work.

        Raises no exceptions except CancelledError.
        """
        ...

    async def send(self, origin: Destination, text: str) -> None:
        """Send one message to the app. Raises NotSent, MaybeSent, Undeliverable."""
        ...

    async def typing(self, origin: Destination) -> None:
        """Show for a few seconds that an answer is being written. Raises nothing."""
        ...

    async def close(self) -> None:
        """Close connections. A second call does nothing."""
        ...


class NotSent(Exception):
    """The app certainly did not get the message, so the message may be sent again."""

    def __init__(self, message: str, *, after: float = 0.0) -> None:
        self.after = after
        """Seconds to wait before the next attempt, as the app asked."""
        super().__init__(message)


class MaybeSent(Exception):
    """It is unknown whether the app got the message, so the message must not be sent again."""


class Undeliverable(Exception):
    """The app will never accept the message: the chat is gone, or the user blocked the bot."""


# --- addresses ------------------------------------------------------------------------------------
# Properties of URLs that channels send to.


def uses_tls(url: str) -> bool:
    """Return whether the URL uses TLS, so that certificates are verified: not plain `http`."""
    return urlsplit(url).scheme != "http"


def is_local(url: str) -> bool:
    """Return whether a URL points to this machine, so that no proxy is used."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


# --- allowing -------------------------------------------------------------------------------------
# The allow list. An empty list allows no sender.


_REMEMBERED: Final = 1_000
_logger = logging.getLogger("stenolog")


class AllowList:
    """The senders that the agent answers: ids, and names with a leading `@`.

    An empty list allows no sender.
    """

    def __init__(self, entries: Iterable[str], *, setting: str) -> None:
        """Create the list. `setting`: name of the setting with the list, for the log."""
        stripped = [entry.strip() for entry in entries]
        self._ids = {entry for entry in stripped if entry and not entry.startswith("@")}
        self._names = {entry[1:].casefold() for entry in stripped if entry.startswith("@")} - {""}
        self._setting = setting
        self._refused: set[str] = set()

    def has(self, id: str) -> bool:
        """Return whether the list contains this id. Logs nothing."""
        return id in self._ids

    def allows(self, id: str, name: str = "") -> bool:
        """Return whether the list allows this sender. A rejected sender is logged once."""
        if id in self._ids or (name and name.casefold() in self._names):  # guard: empty-allow-list
            return True
        if id not in self._refused and len(self._refused) < _REMEMBERED:
            self._refused.add(id)
            called = f" (@{name})" if name else ""
            _logger.warning(
                "ignored a message from %r%s, who is not in %s", id, called, self._setting
            )
        return False
