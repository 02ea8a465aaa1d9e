"""Checks of arguments, shared by all stores."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stenolog.codec import encode_message
from stenolog.errors import UsageError
from stenolog.records import Message


def check_optional_int(**numbers: int | None) -> None:
    """Raise UsageError unless each value is an integer or None."""
    for name, number in numbers.items():
        if number is not None and (type(number) is bool or not isinstance(number, int)):
            raise UsageError(f"{name} must be an integer, not {number!r}")


def check_int(**numbers: int) -> None:
    """Raise UsageError unless each value is an integer."""
    check_optional_int(**numbers)
    for name, number in numbers.items():
        if number is None:
            raise UsageError(f"{name} must be an integer, not None")


def check_last(last: int | None) -> None:
    """Raise UsageError unless `last` is None or a number of messages, 0 or more."""
    check_optional_int(last=last)
    if last is not None and last < 0:
        raise UsageError(f"last must be 0 or more, not {last}")


def check_store(store: object, taker: str) -> None:
    """Raise UsageError unless `store` is a Store.

    A `SessionStore` facade is rejected as well: its results would be mistaken for those of a store.
    """
    if not hasattr(store, "add_messages"):
        name = type(store).__name__
        raise UsageError(
            f"{taker} needs a Store, as open_store returns it, not {name}; "
            "the result of open_sessions has its store as .store"
        )


def encode_messages(messages: Sequence[Message | Mapping[str, Any]]) -> list[bytes]:
    """Return the payloads of a list of messages. Raises RefusedMessage, UsageError."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        hint = "; for one message use add_full_message" if isinstance(messages, Mapping) else ""
        raise UsageError(f"messages must be a list, not {type(messages).__name__}{hint}")
    return [encode_message(message) for message in messages]


def check_namespace(name: str) -> None:
    """Raise UsageError unless the name is valid as a folder name in UTF-8, on all engines."""
    encoded = name.encode("utf-8", "replace").decode()
    if name in ("", ".", "..") or "/" in name or "\0" in name or encoded != name:
        raise UsageError(f"namespace {name!r} is not a valid folder name")


def check_text(**texts: str | None) -> None:
    """Raise UsageError unless each value is text that a key can contain, or None."""
    for name, text in texts.items():
        try:
            if text is not None:
                text.encode()
        except (AttributeError, UnicodeEncodeError):
            raise UsageError(f"{name} must be text that UTF-8 can encode, not {text!r}") from None
