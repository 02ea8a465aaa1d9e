"""The agent loop: durable turns, tools, chat commands and shutdown."""

from typing import TYPE_CHECKING

from stenolog.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from stenolog.agent.instance import AgentInstance, AgentRegistry
    from stenolog.agent.loop import AgentLoop
    from stenolog.agent.scheduler import CloseReport
    from stenolog.agent.spec import AgentSpec, Route
    from stenolog.agent.tools import Tool, ToolContext, tool
    from stenolog.agent.turn_events import Answer, InboundMessage, TurnOptions
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "AgentInstance": "stenolog.agent.instance",
            "AgentLoop": "stenolog.agent.loop",
            "AgentRegistry": "stenolog.agent.instance",
            "AgentSpec": "stenolog.agent.spec",
            "Answer": "stenolog.agent.turn_events",
            "CloseReport": "stenolog.agent.scheduler",
            "InboundMessage": "stenolog.agent.turn_events",
            "Route": "stenolog.agent.spec",
            "Tool": "stenolog.agent.tools",
            "ToolContext": "stenolog.agent.tools",
            "TurnOptions": "stenolog.agent.turn_events",
            "tool": "stenolog.agent.tools",
        },
    )

__all__ = [
    "AgentInstance",
    "AgentLoop",
    "AgentRegistry",
    "AgentSpec",
    "Answer",
    "CloseReport",
    "InboundMessage",
    "Route",
    "Tool",
    "ToolContext",
    "TurnOptions",
    "tool",
]
