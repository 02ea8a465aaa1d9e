"""Appends of callers, checked and encoded; several of them may be written together."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct

from stenolog.codec import check_once, check_times
from stenolog.errors import StenologError
from stenolog.records import Message
from stenolog.stores.arguments import encode_messages


class Batch(Struct, frozen=True, gc=False):
    """Messages of one caller, stored together or not at all."""

    payloads: Sequence[bytes]
    once: str | None = None
    times: Sequence[str] | None = None
    """Time of each message; None for the current time."""


def make_batch(
    messages: Sequence[Message | Mapping[str, Any]],
    once: str | None,
    at: Sequence[datetime] | None,
) -> Batch:
    """Check and encode one append. Raises RefusedMessage, UsageError."""
    check_once(once)
    payloads = encode_messages(messages)
    return Batch(payloads, once, None if at is None else check_times(at, len(payloads)))


def token_bytes(once: str) -> bytes:
    """Return an idempotency key as databases store it.

    As bytes: it may contain a lone surrogate, which database texts cannot.
    """
    return once.encode("utf-8", "surrogatepass")


def token_text(kept: bytes) -> str:
    """Return the idempotency key that `token_bytes` encoded."""
    return kept.decode("utf-8", "surrogatepass")


def copy_error(error: StenologError) -> StenologError:
    """Return a copy of an error for one more caller: two threads must not raise the same object."""
    own = type(error).__new__(type(error))
    own.args = error.args
    own.__dict__.update(error.__dict__)
    own.__cause__ = error.__cause__
    return own
