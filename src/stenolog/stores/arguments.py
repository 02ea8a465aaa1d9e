"""Checks and encoding of the arguments of store calls, shared by all stores."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from inspect import iscoroutinefunction
from typing import Any

from msgspec import Struct

from stenolog.codec import check_once, check_times, encode_message
from stenolog.errors import UsageError
from stenolog.records import Message


def check_int(**numbers: int) -> None:
    """Raise UsageError unless each value is an integer."""
    for name, number in numbers.items():
        if type(number) is bool or not isinstance(number, int):
            raise UsageError(f"{name} must be an integer, not {number!r}")


def check_optional_int(**numbers: int | None) -> None:
    """Raise UsageError unless each value is an integer or None."""
    for name, number in numbers.items():
        if number is not None:
            check_int(**{name: number})


def check_count(**numbers: int | None) -> None:
    """Raise UsageError unless each value is None, or an integer of 0 or more."""
    for name, number in numbers.items():
        if number is not None:
            check_int(**{name: number})
            if number < 0:
                raise UsageError(f"{name} must be 0 or more, not {number}")


def check_range(first: int, last: int) -> None:
    """Raise UsageError unless the two seqs are integers in order."""
    check_int(first=first, last=last)
    if first > last:
        raise UsageError(f"first must not be greater than last, but {first} > {last}")


def check_store(store: object, consumer: str) -> None:
    """Raise UsageError unless `store` is a Store.

    A `SessionStore` facade is rejected as well, because its methods return other values than those
    of a Store. An `AsyncStore` is rejected, because its methods return coroutines.
    """
    name = type(store).__name__
    if iscoroutinefunction(getattr(store, "add_messages", None)):
        raise UsageError(
            f"{consumer} needs a Store, not {name}; pass the store that {name}(…) was given, and "
            "with asyncio make the calls in a thread: asyncio.to_thread(…)"
        )
    if not hasattr(store, "add_messages"):
        raise UsageError(
            f"{consumer} needs a Store, as open_store returns it, not {name}; "
            "the result of open_sessions has its store as .store"
        )


def encode_messages(messages: Sequence[Message | Mapping[str, Any]]) -> list[bytes]:
    """Return the payloads of a list of messages. Raises RefusedMessage, UsageError."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        hint = "; for one message use add_full_message" if isinstance(messages, Mapping) else ""
        raise UsageError(f"messages must be a list, not {type(messages).__name__}{hint}")
    return [encode_message(message) for message in messages]


def check_namespace(name: str) -> None:
    """Raise UsageError unless the name is a valid folder name. All engines have the same rule."""
    storable_name = name.encode("utf-8", "replace").decode()
    if name in ("", ".", "..") or "/" in name or "\0" in name or storable_name != name:
        raise UsageError(f"namespace {name!r} is not a valid folder name")


def check_text(**texts: str | None) -> None:
    """Raise UsageError unless each value is None or text that UTF-8 can encode."""
    for name, text in texts.items():
        try:
            if text is not None:
                text.encode()
        except (AttributeError, UnicodeEncodeError):
            raise UsageError(f"{name} must be text that UTF-8 can encode, not {text!r}") from None


def check_lease_times(ttl: float, wait: float | None) -> None:
    """Raise UsageError unless the arguments are valid durations in seconds."""
    for name, seconds in {"ttl": ttl, "wait": 0.0 if wait is None else wait}.items():
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise UsageError(f"{name} must be a number of seconds, not {seconds!r}")
        if not seconds >= 0:
            raise UsageError(f"{name} must be 0 seconds or more, not {seconds!r}")
    if not 0 < ttl < math.inf:
        raise UsageError(f"ttl must be greater than 0 and finite, not {ttl!r}")


# --- appends ---------------------------------------------------------------------------------


class Batch(Struct, frozen=True, gc=False):
    """Messages of one caller, stored together or not at all."""

    payloads: Sequence[bytes]
    once: str | None = None
    times: Sequence[str] | None = None
    """Time of each message; None stands for the current time."""


def make_batch(
    messages: Sequence[Message | Mapping[str, Any]], once: str | None, at: Sequence[datetime] | None
) -> Batch:
    """Check and encode one append. Raises RefusedMessage, UsageError."""
    check_once(once)
    payloads = encode_messages(messages)
    return Batch(payloads, once, None if at is None else check_times(at, len(payloads)))


def check_purge_options(before: int | None, trash: Collection[object] | None) -> None:
    """Raise UsageError unless the options of `StoreAdmin.purge` are valid."""
    check_optional_int(before=before)
    if before is not None and trash is not None:
        raise UsageError("purge takes `before` or `trash`, not both")


def token_bytes(once: str) -> bytes:
    """Return an idempotency key as databases store it.

    The key is stored as bytes, because a text column cannot hold lone surrogates.
    """
    return once.encode("utf-8", "surrogatepass")


def token_text(stored: bytes) -> str:
    """Return the idempotency key that `token_bytes` encoded."""
    return stored.decode("utf-8", "surrogatepass")
