"""Interface of chat apps: values, protocols, errors, and the rules that all of them share.

Telegram and webhooks implement it. Another app needs a `Channel` of its own and nothing else.
"""

import asyncio
import ipaddress
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from msgspec import Struct

from stenolog.sessions.keys import Scope

Place = Mapping[str, Any]
"""Where an answer belongs, in the words of its app; JSON, kept with the user's message. Its field
`channel` is the name of the channel."""


class Arrival(Struct, frozen=True, kw_only=True):
    """A message of a user, as it came from an app."""

    sender: str
    text: str
    id: str
    """The same whenever it is handed over again, and no other message's."""
    chat: str | None = None
    """The group it was said in; None where two talk alone."""
    thread: str | None = None
    scope: Scope = "sender"
    origin: Place | None = None
    """Where the answer belongs; None: to whoever waits for it."""
    number: int = 0
    """Its place among the messages of its chat; 0 where the app has none: then it is given one."""


class Taken(Struct, frozen=True, kw_only=True):
    """A message that is on its way in."""

    durable: asyncio.Future[bool]
    """True once it is stored or settled, and the app may forget it; False: it is to come again."""


class Inward(Protocol):
    """Where a channel hands over what arrives."""

    def take_in(self, arrival: Arrival) -> Taken:
        """Begin to store and answer a message; those of one session in this order."""
        ...

    async def room(self) -> None:
        """Wait until there is room for more."""
        ...

    async def tell(self, origin: Place, text: str) -> None:
        """Say something that is no answer. Raises nothing."""
        ...

    def recover(self) -> None:
        """Begin to look after the answers that a killed process did not deliver."""
        ...


class Channel(Protocol):
    """An app in which people talk to the agent."""

    @property
    def name(self) -> str:
        """The first part of the keys of its sessions."""
        ...

    @property
    def limit(self) -> int:
        """How long one message may be, in UTF-16 code units."""
        ...

    async def run(self, inward: Inward) -> None:
        """Take messages in, until it is cancelled or can never work. Raises nothing else."""
        ...

    async def send(self, origin: Place, text: str) -> None:
        """Hand one message over to the app. Raises NotSent, MaybeSent, Undeliverable."""
        ...

    async def typing(self, origin: Place) -> None:
        """Show for a few seconds that an answer is being written. Raises nothing."""
        ...

    async def close(self) -> None:
        """Let go of connections; a second call does nothing."""
        ...


class NotSent(Exception):
    """The app surely has not got it: it may be sent again."""

    def __init__(self, words: str, *, after: float = 0.0) -> None:
        self.after = after
        """The app wants to be left alone for so many seconds."""
        super().__init__(words)


class MaybeSent(Exception):
    """Nobody knows whether the app has got it: it must not be sent again."""


class Undeliverable(Exception):
    """The app will never take it: the chat is gone, or its user wants nothing more."""


# --- addresses ------------------------------------------------------------------------------------
# Properties of URLs that channels send to.


def uses_tls(url: str) -> bool:
    """Return whether certificates have to be verified: for every scheme except plain `http`."""
    return urlsplit(url).scheme != "http"


def is_here(url: str) -> bool:
    """Return whether a URL is on this machine; no proxy is used then."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


# --- allowing -------------------------------------------------------------------------------------
# Who is answered: an allow-list, by which an empty one means nobody.


_REMEMBERED: Final = 1_000
_logger = logging.getLogger("stenolog")


class AllowList:
    """Senders that are answered: ids, and names after an `@`. An empty list allows none."""

    def __init__(self, entries: Iterable[str], *, setting: str) -> None:
        """`setting`: the setting that holds the list, for the log."""
        given = [entry.strip() for entry in entries]
        self._ids = {entry for entry in given if entry and not entry.startswith("@")}
        self._names = {entry[1:].casefold() for entry in given if entry.startswith("@")} - {""}
        self._setting = setting
        self._refused: set[str] = set()

    def has(self, id: str) -> bool:
        """Return whether the list has this id; nothing is logged."""
        return id in self._ids

    def allows(self, id: str, name: str = "") -> bool:
        """Return whether this sender is answered. A refused sender is logged once."""
        if id in self._ids or (name and name.casefold() in self._names):  # guard: empty-allow-list
            return True
        if id not in self._refused and len(self._refused) < _REMEMBERED:
            self._refused.add(id)
            called = f" (@{name})" if name else ""
            _logger.warning(
                "a message of %r%s was not answered; %s lists who is", id, called, self._setting
            )
        return False
