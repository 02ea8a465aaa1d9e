"""The configuration of one agent, as plain values."""

from typing import Final

from msgspec import Struct

from stenolog.context.request_messages import ProviderRequirements
from stenolog.context.window import Limits

DEFAULT_SYSTEM_PROMPT: Final = (
    "You are a helpful assistant. Answer in plain words, and in Markdown where it helps. "
    "You have a memory: what you know of this user and what was said in earlier conversations "
    "may stand below, and the tool `recall` searches it."
)


class AgentSpec(Struct, frozen=True, kw_only=True):
    """The configuration of an agent, without its model and tools."""

    sessions: str = "./workspace"
    """Path or URL of the session store, as accepted by `open_sessions`."""
    id: str | None = None
    """Name of the agent; None for the only agent of a workspace without agent names."""
    model: str = ""
    """Name of the model, as in the settings. If empty, the model is chosen automatically."""
    system: str = DEFAULT_SYSTEM_PROMPT
    limits: Limits = Limits()
    needs: ProviderRequirements = ProviderRequirements()
    max_iterations: int = 25
    """Maximum number of requests to the model per turn."""
    tool_timeout: float = 60.0
    """Timeout in seconds for tools without their own timeout."""
    tool_output_limit: int = 20_000
    """Maximum number of characters of a tool result that the model gets."""
    tools: bool = True
    """Whether the model is offered tools; some models do not support them."""
    models: tuple[str, ...] = ()
    """Models that users may choose with /model, in addition to the agent's own model."""
    memory: bool = True
    """Whether the agent has a memory: recall and notes."""
    consolidation: bool = True
    """Whether notes are written about conversations."""
    recall_tokens: int = 1_500
    """Maximum number of tokens of recalled notes and messages in a request."""
    half_life_days: float = 30.0
    """Age in days at which a memory's score is reduced by half of the maximum age penalty."""
    zone: str = ""
    """Time zone of the users, such as `Europe/Berlin`; if empty, the zone of this machine."""
    resume_within: float = 86_400.0
    """Age in seconds after which an interrupted turn is closed instead of resumed."""
    routes: tuple[str, ...] = ()
    """Channels and senders whose messages go to this agent: `slack`, `telegram:123`, or `:123` for
    a sender of any channel."""
