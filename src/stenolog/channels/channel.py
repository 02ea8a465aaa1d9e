"""The interface of chat apps: values, protocols, errors and shared rules.

Telegram and webhooks implement the interface. Support for another app needs only a new `Channel`.
"""

import ipaddress
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

from msgspec import Struct

from stenolog.sessions.keys import Scope

if TYPE_CHECKING:
    from stenolog.channels.inbox import Inbox

# A destination is JSON in the app's format, stored with the user's message.
Destination = Mapping[str, Any]
"""Destination of an answer; the field `channel` holds the name of the channel."""


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
    message_number: int = 0
    """Position of the message in its chat; 0 if unknown (the inbox then assigns a number)."""


class Channel(Protocol):
    """An app in which people talk to the agent."""

    @property
    def name(self) -> str:
        """Name of the channel: the first part of its session keys."""

    @property
    def max_length(self) -> int:
        """Maximum length of a message in UTF-16 code units."""

    @property
    def sends_replies(self) -> bool:
        """Whether answers are sent with `send`; otherwise the inbox returns them to the caller."""

    async def run(self, inbox: "Inbox") -> None:
        """Pass messages to the inbox until the task is cancelled or the channel fails permanently.

        Raises no exceptions except CancelledError.
        """

    async def send(self, origin: Destination, text: str) -> None:
        """Send one message to the app. Raises NotSent, MaybeSent, Undeliverable."""

    async def show_typing(self, origin: Destination) -> None:
        """Show for a few seconds that an answer is being written. Raises nothing."""

    async def close(self) -> None:
        """Close connections. A second call does nothing."""


class NotSent(Exception):
    """The app certainly did not get the message, so the message may be sent again."""

    def __init__(self, message: str, *, pause: float = 0.0) -> None:
        self.pause = pause
        """Seconds to wait before the next attempt, as the app asked; 0 if it did not ask."""
        super().__init__(message)


class MaybeSent(Exception):
    """It is unknown whether the app got the message, so the message must not be sent again."""


class Undeliverable(Exception):
    """The app will never accept the message: the chat was deleted, or the user blocked the bot."""


def uses_tls(url: str) -> bool:
    """Return whether the URL uses TLS: true for every scheme except `http`."""
    return urlsplit(url).scheme != "http"


def is_local(url: str) -> bool:
    """Return whether a URL points to this machine, and is therefore requested without a proxy."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


_MAX_LOGGED_REJECTIONS: Final = 1_000
_logger = logging.getLogger("stenolog")


class AllowList:
    """The senders that the agent answers: ids, and names with a leading `@`.

    An empty list allows no sender.
    """

    def __init__(self, entries: Iterable[str], *, setting: str) -> None:
        """Create the list. `setting`: name of the setting with the list, for the log."""
        senders = [entry.strip() for entry in entries]
        self._ids = {entry for entry in senders if entry and not entry.startswith("@")}
        self._names = {entry[1:].casefold() for entry in senders if entry.startswith("@")} - {""}
        self._setting = setting
        self._rejected: set[str] = set()
        """Ids of rejected senders that were logged."""

    def allows(self, id: str, name: str = "") -> bool:
        """Return whether the list allows this sender. A rejected sender is logged at most once."""
        if id in self._ids or (name and name.casefold() in self._names):  # guard: empty-allow-list
            return True
        if id not in self._rejected and len(self._rejected) < _MAX_LOGGED_REJECTIONS:
            self._rejected.add(id)
            name = f" (@{name})" if name else ""
            _logger.warning(
                "ignored a message from %r%s, who is not in %s", id, name, self._setting
            )
        return False
