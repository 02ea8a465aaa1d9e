"""What callers hand over, checked in the same way by every engine that writes to a disk."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stenolog.codec import encode_message
from stenolog.errors import UsageError
from stenolog.records import Message


def check_whole(**numbers: int | None) -> None:
    """Raise UsageError unless each is a whole number, or none."""
    for name, number in numbers.items():
        if number is not None and (type(number) is bool or not isinstance(number, int)):
            raise UsageError(f"{name}={number!r}: a whole number is wanted")


def encoded(messages: Sequence[Message | Mapping[str, Any]]) -> list[bytes]:
    """The payloads of a list of messages. Raises RefusedMessage, UsageError."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise UsageError(f"a list of messages is wanted, not {type(messages).__name__}")
    return [encode_message(message) for message in messages]
