"""Scopes of notes: one agent and one session, or one agent and one sender.

Each scope is a separate session in the notes store, so that a read of one scope cannot return notes
of another. The scope of a sender never equals the scope of a session, because clients choose the
keys of sessions.
"""

from typing import Final, Literal

from msgspec import Struct

from stenolog.codec import MAX_KEY_BYTES, check_key
from stenolog.errors import UsageError

ScopeKind = Literal["session", "sender"]

_SENDER_PREFIX: Final = "%40"
"""Prefix of the keys of senders' scopes; no escaped agent name starts with this prefix."""
_SENDER_NAME_PREFIX: Final = "@"
MARK_PREFIX: Final = ":mark:"
"""Prefix of the keys of progress marks (consolidation.py); no scope's key starts with a colon."""


class Scope(Struct, frozen=True, kw_only=True):
    """Owner of notes: one agent, and one session or one sender."""

    agent: str = "main"
    who: str
    """Key of the session, or the sender: a user (`telegram:123`) or a group chat."""
    of: ScopeKind = "session"
    """Whether the notes belong to one session, or to all sessions of one verified sender."""

    @property
    def key(self) -> str:
        """The unique key of the scope's session in the notes store. Raises UsageError."""
        if not self.agent or not self.who:
            raise UsageError("a scope needs an agent and a user or chat; neither may be empty")
        check_key(self.who)
        # Everything after the first colon is `who`, so only the agent needs escaping.
        prefix = scope_prefix(self.agent, self.of)
        key = prefix + _shorten(self.who, MAX_KEY_BYTES - len(prefix.encode()))  # guard: note-scope
        check_key(key)
        return key

    @property
    def name(self) -> str:
        """The displayed name, also used in options: `@telegram:123` for a sender, else the key."""
        has_prefix = self.of == "sender" or self.who.startswith(_SENDER_NAME_PREFIX)
        return _SENDER_NAME_PREFIX + self.who if has_prefix else self.who


def parse_scope_name(name: str, *, agent: str = "main") -> Scope:
    """Return the scope with this name, the inverse of `Scope.name`."""
    who = name.removeprefix(_SENDER_NAME_PREFIX)
    is_sender = who != name and not who.startswith(_SENDER_NAME_PREFIX)
    return Scope(agent=agent, who=who, of="sender" if is_sender else "session")


def scope_of(key: str, *, agent: str = "main") -> Scope:
    """Return the scope of one session, which no other session shares.

    `Memory.scope` also finds out whether the session belongs to a sender.
    """
    return Scope(agent=agent, who=key)


def scope_from_key(notes_key: str) -> Scope:
    """Return the scope with this `key`. Raises UsageError if no scope can have the key."""
    of: ScopeKind = "sender" if notes_key.startswith(_SENDER_PREFIX) else "session"
    agent, _, owner = notes_key.removeprefix(_SENDER_PREFIX).partition(":")
    scope = Scope(agent=agent.replace("%3A", ":").replace("%25", "%"), who=owner, of=of)
    if scope.key != notes_key:
        raise UsageError(f"{notes_key!r} is not the key of a scope")
    return scope


def _shorten(who: str, max_bytes: int) -> str:
    """Return `who`, or if it is too long, its start and a hash of all of it."""
    encoded = who.encode()
    if len(encoded) <= max_bytes:
        return who
    # Rarely needed, and slow to import.
    from hashlib import blake2b

    ending = f"~{blake2b(encoded, digest_size=16).hexdigest()}"
    return encoded[: max(max_bytes - len(ending), 0)].decode(errors="ignore") + ending


def scope_prefix(agent: str, kind: ScopeKind) -> str:
    """Return the common prefix of the keys of all scopes of an agent and a kind."""
    return (_SENDER_PREFIX if kind == "sender" else "") + agent_prefix(agent)


def agent_prefix(agent: str) -> str:
    """Return the escaped agent name that keys in the notes store start with."""
    return agent.replace("%", "%25").replace(":", "%3A") + ":"
