"""Which session a message belongs to: from its channel, sender, thread and chat to a key, and back.

A key has two or three parts with `:` between: `channel:sender`, `channel:thread:sender`, or for a
group that shares one session `channel:chat`. Inside a part `:` and `%` are written %3A and %25, so
that no two senders ever get the same key. All of it is pure.
"""

import re
from typing import Final, Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from stenolog.codec import check_key
from stenolog.errors import InvalidKey, UsageError

Scope = Literal["sender", "thread", "group"]
"""Who shares a session: nobody; nobody, each thread apart; everybody in a group."""

CLI_DEFAULT: Final = "cli:default"
"""The session of a terminal, where none is named."""

_ESCAPES: Final = {"%": "%25", ":": "%3A"}
_NUMBER: Final = re.compile(r"-?[0-9]+")


class Origin(Struct, frozen=True, kw_only=True):
    """Where a message came from, as its channel names things."""

    channel: str
    sender: str | int
    """A number, as many chat apps have, is taken as its digits."""
    chat: str | int | None = None
    """The group it was said in; None where two talk alone."""
    thread: str | int | None = None
    """The thread or topic in that group; None outside of any."""


class Parts(Struct, frozen=True):
    """A key taken apart."""

    channel: str
    who: str
    """The sender, or the chat of a group that shares a session: a key does not tell which."""
    thread: str | None = None


def key_for(origin: Origin, *, scope: Scope = "sender") -> str:
    """The key of the session that a message belongs to. Raises InvalidKey, UsageError."""
    channel, sender = _text("channel", origin.channel), _text("sender", origin.sender)
    chat = None if origin.chat is None else _text("chat", origin.chat)
    thread = None if origin.thread is None else _text("thread", origin.thread)
    match scope:
        case "sender":
            return join(Parts(channel, sender))
        case "thread":
            return join(Parts(channel, sender, thread))
        case "group":
            return join(Parts(channel, chat or sender))
        case _:
            raise UsageError(f"scope {scope!r}: one of {', '.join(get_args(Scope))} is wanted")


def _text(name: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, int) and not isinstance(part, bool):
        return str(part)
    raise InvalidKey(f"{name}={part!r}: text or a whole number is wanted")


def person_in(key: str) -> str:
    """Return the user or chat that a key names: `telegram:1` for `telegram:9:1`.

    A client can choose any key, so the result is only a candidate. `steno purge --scope` asks the
    user to confirm it.
    """
    parts = split(key)
    return key if parts is None else join(Parts(parts.channel, parts.who))


def owner_for(origin: Origin, *, scope: Scope = "sender") -> str:
    """Return the sender for the mark of a message; it is the same in all threads of the sender.

    For a group that shares one session, return the group. Raises InvalidKey, UsageError.
    """
    return key_for(replace(origin, thread=None), scope=scope)


def cli_sender(key: str) -> str:
    """Return the sender of messages typed in a terminal in this session, or an empty string.

    Only `cli:default` and its threads have a sender. Scripts may pass a different key for each of
    their users, so other keys have none.
    """
    parts = split(key)
    is_own = parts is not None and join(Parts(parts.channel, parts.who)) == CLI_DEFAULT
    return CLI_DEFAULT if is_own else ""


def check_sender(sender: str) -> None:
    """Raise InvalidKey if this is not a valid sender; an empty string is valid."""
    if sender:
        check_key(sender)
        if sender.startswith("@"):
            raise InvalidKey(f"sender {sender!r} must not begin with @")


def join(parts: Parts) -> str:
    """The key of these parts. Raises InvalidKey."""
    given = [parts.channel, *([] if parts.thread is None else [parts.thread]), parts.who]
    if not all(given):
        raise InvalidKey(f"{':'.join(given)!r}: channel, thread and sender must not be empty")
    key = ":".join(_escaped(part) for part in given)
    check_key(key)
    return key


def split(key: str) -> Parts | None:
    """The parts of a key; None for a key that was not made here."""
    parts = key.split(":")
    if len(parts) not in (2, 3) or not all(parts):
        return None
    plain = [_plain(part) for part in parts]
    if [_escaped(part) for part in plain] != parts:
        return None
    return Parts(plain[0], plain[-1], plain[1] if len(plain) == 3 else None)


def from_reference_name(name: str) -> str | None:
    """The key that zeroclaw's `channel_sender` or `channel_thread_sender` stands for.

    Its names do not tell a `_` of theirs from one of the sender's: `telegram_alice_b` may be all
    that alice_b said alone, which b must not read. So what stands in the middle must be a number,
    as threads and chats have; else nobody can say, and the answer is None.
    """
    parts = name.split("_")
    if len(parts) not in (2, 3) or not all(parts):
        return None
    if len(parts) == 3 and not _NUMBER.fullmatch(parts[1]):  # guard: old-name-not-guessed
        return None
    return join(Parts(parts[0], parts[-1], parts[1] if len(parts) == 3 else None))


def _escaped(part: str) -> str:
    return re.sub("[%:]", lambda found: _ESCAPES[found[0]], part)


def _plain(part: str) -> str:
    return part.replace("%3A", ":").replace("%25", "%")
