"""Session keys, converted from and to the channel, sender, thread and chat of a message.

A key has two or three parts separated by `:`: `channel:sender`, `channel:thread:sender`, or for a
group that shares one session `channel:chat`. Inside a part `:` and `%` are written %3A and %25, so
that two senders never get the same key.
"""

import re
from typing import Final, Literal, get_args

from msgspec import Struct

from stenolog.codec import check_key
from stenolog.errors import UsageError

Scope = Literal["sender", "thread", "group"]
"""Scope of a session: one sender, one sender in one thread, or all members of a group."""

CLI_DEFAULT: Final = "cli:default"
"""Default session of a terminal."""

_NUMBER_PATTERN: Final = re.compile(r"-?[0-9]+")


class KeyParts(Struct, frozen=True):
    """The parts of a key."""

    channel: str
    who: str
    """The sender, or the chat of a group that shares a session. A key looks the same for both."""
    thread: str | None = None


def key_for(
    channel: str,
    sender: str | int,
    *,
    chat: str | int | None = None,
    thread: str | int | None = None,
    scope: Scope = "sender",
) -> str:
    """Return the key of the session that a message belongs to. Raises UsageError.

    `chat`: the group of the message; None for a direct message. `thread`: the thread or topic in
    that group. Many chat apps use numbers as ids; the key contains the digits of a number.
    """
    channel, sender = _to_text("channel", channel), _to_text("sender", sender)
    chat = None if chat is None else _to_text("chat", chat)
    thread = None if thread is None else _to_text("thread", thread)
    match scope:
        case "sender":
            return join_key(KeyParts(channel, sender))
        case "thread":
            return join_key(KeyParts(channel, sender, thread))
        case "group":
            return join_key(KeyParts(channel, chat or sender))
        case _:
            raise UsageError(f"scope must be one of {', '.join(get_args(Scope))}, not {scope!r}")


def _to_text(name: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, int) and not isinstance(part, bool):
        return str(part)
    raise UsageError(f"{name} must be a string or an int, not {part!r}")


def owner_in_key(key: str) -> str:
    """Return the user or chat that a key names: `telegram:1` for `telegram:9:1`.

    A key that `join_key` did not make is returned as it is. A client can choose any key, so the
    result is only a candidate. `steno purge --scope` asks the user to confirm the result.
    """
    parts = split_key(key)
    return key if parts is None else join_key(KeyParts(parts.channel, parts.who))


def cli_sender(key: str) -> str:
    """Return the sender of messages typed in a terminal in this session, or an empty string.

    Only `cli:default` and its threads have a sender. Scripts may pass a different key for each of
    their users, so other keys have no sender.
    """
    return CLI_DEFAULT if owner_in_key(key) == CLI_DEFAULT else ""


def check_sender(sender: str) -> None:
    """Raise UsageError unless `sender` is valid. An empty string is valid."""
    if sender:
        check_key(sender)
        if sender.startswith("@"):
            raise UsageError(f"sender {sender!r} must not begin with @")


def join_key(parts: KeyParts) -> str:
    """Return the key of these parts. Raises UsageError."""
    texts = [parts.channel, *([] if parts.thread is None else [parts.thread]), parts.who]
    if not all(texts):
        raise UsageError(f"{':'.join(texts)!r}: channel, thread and sender must not be empty")
    key = ":".join(_escape(part) for part in texts)
    check_key(key)
    return key


def split_key(key: str) -> KeyParts | None:
    """Return the parts of a key; None for a key that `join_key` did not make."""
    parts = key.split(":")
    if len(parts) not in (2, 3) or not all(parts):
        return None
    texts = [_unescape(part) for part in parts]
    if [_escape(part) for part in texts] != parts:
        return None
    return KeyParts(texts[0], texts[-1], texts[1] if len(texts) == 3 else None)


def key_from_zeroclaw_name(name: str) -> str | None:
    """Return the key for zeroclaw's `channel_sender` or `channel_thread_sender`; None if ambiguous.

    In these names, a `_` may be a separator or a part of the sender's name: `telegram_alice_b` may
    be the private session of alice_b, which b must not read. Therefore the middle part must be a
    number, like the ids of threads and chats.
    """
    parts = name.split("_")
    if len(parts) not in (2, 3) or not all(parts):
        return None
    if len(parts) == 3 and not _NUMBER_PATTERN.fullmatch(parts[1]):  # guard: old-name-not-guessed
        return None
    return join_key(KeyParts(parts[0], parts[-1], parts[1] if len(parts) == 3 else None))


def _escape(part: str) -> str:
    return part.replace("%", "%25").replace(":", "%3A")


def _unescape(part: str) -> str:
    return part.replace("%3A", ":").replace("%25", "%")
