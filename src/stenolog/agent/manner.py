"""How one turn differs from an agent's other turns: what a client asks for with its message."""

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct


class Manner(Struct, frozen=True, kw_only=True):
    """What a client wants of a turn; as it is by default, the turn is as the agent's are."""

    system: str | None = None
    """Its own system prompt, in the place of the agent's."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools that the client carries out itself, as in OpenAI's `tools`. A call of one ends the turn
    for now; its result, in the log, goes on with it."""
    own_tools: bool = True
    """Whether the agent's tools are offered, too; a client's of the same name stands before one."""
    model: str = ""
    """Which of the agent's models answers; empty: the session's."""
    schema: Mapping[str, Any] | None = None
    """A JSON schema that the answer should follow."""
    max_tokens: int | None = None
    """How long the answer may be."""
    sender: str | None = ""
    """The verified sender who gets the answer; decides whose memory the model is shown.

    None: the sender that the session belongs to, which is meant for resumed turns.
    """

    @property
    def client_tools(self) -> frozenset[str]:
        """The names of the tools that the client carries out."""
        return frozenset(map(tool_name, self.tools))

    @property
    def as_usual(self) -> bool:
        """Whether what is sent to the model is what the agent always sends."""
        return self.system is None and not self.tools and self.own_tools


AS_USUAL: Final = Manner()


def tool_name(definition: Mapping[str, Any]) -> str:
    """The name in the definition of a tool; empty where it has none."""
    function = definition.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""
