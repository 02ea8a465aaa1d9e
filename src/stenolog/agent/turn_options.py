"""Options of a single turn, set by the client that sends the message."""

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct


class TurnOptions(Struct, frozen=True, kw_only=True):
    """Client-side overrides for one turn. The defaults leave the agent's behaviour unchanged."""

    system: str | None = None
    """System prompt that replaces the agent's."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools that the client runs itself, in OpenAI's `tools` format.

    A call to one of them ends the turn; the turn resumes when the client stores the result.
    """
    own_tools: bool = True
    """Offer the agent's own tools too. A client tool shadows an agent tool of the same name."""
    model: str = ""
    """Name of the agent's model to use. Empty: the session's current model."""
    schema: Mapping[str, Any] | None = None
    """JSON schema for the answer."""
    max_tokens: int | None = None
    """Maximum length of the answer in tokens."""
    sender: str | None = ""
    """The verified sender who gets the answer, which decides whose memory the model sees.

    None: the owner of the session, for resumed turns.
    """

    @property
    def client_tools(self) -> frozenset[str]:
        """Names of the tools that the client runs."""
        return frozenset(map(tool_name, self.tools))

    @property
    def as_usual(self) -> bool:
        """Whether the request has the agent's own system prompt and tools."""
        return self.system is None and not self.tools and self.own_tools


DEFAULT_OPTIONS: Final = TurnOptions()


def tool_name(definition: Mapping[str, Any]) -> str:
    """Return the name in a tool definition; empty if it has none."""
    function = definition.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""
