"""The owner of a session: the sender that all its user messages name (docs/decisions/0012). Pure.

The key does not prove who owns a session, because clients of the gateway and importers choose keys.
A session has no owner if a user message has no sender, or if two messages have different senders.
Such a session has its own scope.
"""

from collections.abc import Iterable
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog.catalog_database import replace_surrogates
from stenolog.catalog.message_metadata import sender_of
from stenolog.records import Message


class Ownership(Struct, frozen=True):
    """The senders of the user messages of a session."""

    owner: str = ""
    """The sender of the first user message; empty without a sender or without user messages."""
    mixed: bool = False
    """Whether a user message has no sender, or a different one than the first."""

    @property
    def is_open(self) -> bool:
        """Whether the session has no user message yet."""
        return not self.owner and not self.mixed

    @property
    def sender(self) -> str:
        """The sender of all user messages, or an empty string."""
        return "" if self.mixed else self.owner

    def after(self, messages: Iterable[Message]) -> Self:
        """Return the ownership after additional messages."""
        now = self
        for message in messages:
            if now.mixed:
                break
            if getattr(message, "role", None) == "user":
                sender = replace_surrogates(sender_of(message.to_dict()))
                first = now.is_open and bool(sender)
                now = replace(now, owner=sender) if first else now
                now = replace(now, mixed=not sender or sender != now.owner)  # guard: one-sender
        return now
