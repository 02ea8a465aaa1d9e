"""One agent as plain values: what a configuration says of it."""

from typing import Final

from msgspec import Struct

from stenolog.context.arranging import Needs
from stenolog.context.budget import Limits

SYSTEM: Final = (
    "You are a helpful assistant. Answer in plain words, and in Markdown where it helps. "
    "You have a memory: what you know of this user and what was said in earlier conversations "
    "may stand below, and the tool `recall` searches it."
)


class Route(Struct, frozen=True, kw_only=True):
    """Whose messages go to an agent; what is empty stands for all."""

    channel: str = ""
    sender: str = ""


class AgentSpec(Struct, frozen=True, kw_only=True):
    """What an agent is made of, but for its model and tools."""

    sessions: str = "./workspace"
    """Where its sessions are: what `open_sessions` takes."""
    id: str | None = None
    """Its name; None for the one agent of a workspace in which none has a name."""
    model: str = ""
    """Which model, in the words of a configuration; empty: one is found."""
    system: str = SYSTEM
    limits: Limits = Limits()
    needs: Needs = Needs()
    max_iterations: int = 25
    """How often the model may be asked in one turn."""
    tool_timeout: float = 60.0
    """After so many seconds a tool is given up, where it says nothing of its own."""
    tool_output_limit: int = 20_000
    """How many characters of a tool's result the model gets."""
    tools: bool = True
    """Whether the model is offered tools at all; some take none."""
    models: tuple[str, ...] = ()
    """Which models its users may choose by /model, besides the one it has."""
    memory: bool = True
    """Whether it remembers at all: recall, and notes."""
    consolidation: bool = True
    """Whether notes are made of what is said."""
    recall_tokens: int = 1_500
    half_life_days: float = 30.0
    zone: str = ""
    """The users' time zone, as in `Europe/Berlin`; empty: this machine's."""
    resume_within: float = 86_400.0
    """A turn that broke off longer ago, in seconds, is closed at the restart and not resumed."""
    routes: tuple[Route, ...] = ()
