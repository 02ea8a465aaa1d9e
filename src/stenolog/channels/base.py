"""What a chat app must be to the agent, and what of it goes in and comes out. Values and protocols.

Telegram and webhooks are such; others need a `Channel` of their own and nothing else.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

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
