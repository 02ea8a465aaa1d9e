"""What callers hand over, checked in the same way wherever it is taken."""

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


def check_store(store: object, taker: str) -> None:
    """Raise UsageError where whoever takes a Store was given the face of a loop, or anything else.

    The answers of the face would be taken for those of a store.
    """
    if not hasattr(store, "add_messages"):
        name = type(store).__name__
        raise UsageError(
            f"{taker} takes a Store, as open_store gives it, and no {name}; "
            "what open_sessions gives has its store as .store"
        )


def encoded(messages: Sequence[Message | Mapping[str, Any]]) -> list[bytes]:
    """The payloads of a list of messages. Raises RefusedMessage, UsageError."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise UsageError(f"a list of messages is wanted, not {type(messages).__name__}")
    return [encode_message(message) for message in messages]
