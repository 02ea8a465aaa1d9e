"""Whose notes are whose: a scope is one agent and one session, or all threads of one sender.

Each scope is a session of its own in the notes store, so that a read of one cannot see another.
"""

from msgspec import Struct

from stenolog.catalog.owners import owner_of
from stenolog.codec import check_key
from stenolog.errors import InvalidKey


class Scope(Struct, frozen=True, kw_only=True):
    """Who a note is of: what one agent knows of one user, or of one group chat."""

    agent: str = "main"
    who: str
    """A user (`telegram:123`) or a group chat (`slack:C42`)."""

    @property
    def key(self) -> str:
        """The key of its session in the notes store; no two scopes have the same. InvalidKey."""
        if not self.agent or not self.who:
            raise InvalidKey("a scope has an agent and a user or a chat; neither may be empty")
        # Behind the first colon everything is the user's, so that only the agent is escaped.
        key = agent_prefix(self.agent) + self.who
        check_key(key)
        return key


def scope_of(key: str, *, agent: str = "main", threads: bool = False) -> Scope:
    """The scope that a session's notes belong to: its own, so that no two sessions share one.

    `threads`: keys of three parts are `channel:thread:sender`, as `key_for` makes them, and all
    threads of a sender share the scope of `channel:sender`.
    """
    return Scope(agent=agent, who=owner_of(key) if threads else key)


def scope_of_key(notes_key: str) -> Scope:
    """The scope whose `key` this is. Raises InvalidKey for the key of none."""
    agent, _, who = notes_key.partition(":")
    scope = Scope(agent=agent.replace("%3A", ":").replace("%25", "%"), who=who)
    if scope.key != notes_key:
        raise InvalidKey(f"{notes_key!r} is not the key of a scope; its session holds no notes")
    return scope


def agent_prefix(agent: str) -> str:
    """How the keys of all scopes of an agent begin, and no others."""
    return agent.replace("%", "%25").replace(":", "%3A") + ":"
