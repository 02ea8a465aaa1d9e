"""Whose notes are whose: a scope is one agent and one session, or one agent and one sender.

Each scope is a session of its own in the notes store, so that a read of one cannot see another. The
scope of a sender is never that of a session, whatever the key of the session: clients choose keys.
"""

from typing import Final, Literal

from msgspec import Struct

from stenolog.codec import check_key
from stenolog.errors import InvalidKey

Of = Literal["session", "sender"]

_SENDER: Final = "%40"
"""Begins the keys of senders' scopes in the notes store; an escaped agent never begins so."""
_AT: Final = "@"


class Scope(Struct, frozen=True, kw_only=True):
    """Who a note is of: what one agent knows from one session, or of one sender."""

    agent: str = "main"
    who: str
    """The key of the session, or the sender: a user (`telegram:123`) or a group chat."""
    of: Of = "session"
    """Whether the notes are of one session, or of all sessions of one verified sender."""

    @property
    def key(self) -> str:
        """The key of its session in the notes store; no two scopes have the same. InvalidKey."""
        if not self.agent or not self.who:
            raise InvalidKey("a scope has an agent and a user or a chat; neither may be empty")
        # Behind the first colon everything is the user's, so that only the agent is escaped.
        key = scope_prefix(self.agent, self.of) + self.who  # guard: note-scope
        check_key(key)
        return key

    @property
    def name(self) -> str:
        """The name for people and options: of a sender `@telegram:123`, of a session its key."""
        if self.of == "sender":
            return _AT + self.who
        return _AT + self.who if self.who.startswith(_AT) else self.who


def scope_named(name: str, *, agent: str = "main") -> Scope:
    """Return the scope of this name, as `Scope.name` gives it."""
    if name.startswith(2 * _AT):
        return Scope(agent=agent, who=name[1:])
    if name.startswith(_AT):
        return Scope(agent=agent, who=name[1:], of="sender")
    return Scope(agent=agent, who=name)


def scope_of(key: str, *, agent: str = "main") -> Scope:
    """Return the scope of a session's own notes: no two sessions share one.

    Whether a session belongs to a sender is not said by its key: `Memory.scope` looks that up.
    """
    return Scope(agent=agent, who=key)


def scope_of_key(notes_key: str) -> Scope:
    """The scope whose `key` this is. Raises InvalidKey for the key of none."""
    of: Of = "sender" if notes_key.startswith(_SENDER) else "session"
    agent, _, who = notes_key.removeprefix(_SENDER).partition(":")
    scope = Scope(agent=agent.replace("%3A", ":").replace("%25", "%"), who=who, of=of)
    if scope.key != notes_key:
        raise InvalidKey(f"{notes_key!r} is not the key of a scope; its session holds no notes")
    return scope


def scope_prefix(agent: str, of: Of) -> str:
    """Return how the keys of all scopes of an agent and a kind begin, and no others."""
    return (_SENDER if of == "sender" else "") + agent_prefix(agent)


def agent_prefix(agent: str) -> str:
    """Return the agent as keys in the notes store begin with it."""
    return agent.replace("%", "%25").replace(":", "%3A") + ":"  # guard: scope-agent-escaped
