"""The agent loop: durable turns, tools, chat commands and shutdown."""

from typing import TYPE_CHECKING

from stenolog.lazy_loading import lazy_exports

if TYPE_CHECKING:
    from stenolog.agent.instance import AgentInstance as AgentInstance
    from stenolog.agent.instance import AgentRegistry as AgentRegistry
    from stenolog.agent.loop import AgentLoop as AgentLoop
    from stenolog.agent.spec import AgentSpec as AgentSpec
    from stenolog.agent.tools import Tool as Tool
    from stenolog.agent.tools import ToolContext as ToolContext
    from stenolog.agent.tools import tool as tool
    from stenolog.agent.turn_events import Answer as Answer
    from stenolog.agent.turn_events import Event as Event
    from stenolog.agent.turn_events import InboundMessage as InboundMessage
    from stenolog.agent.turn_events import MessageStored as MessageStored
    from stenolog.agent.turn_events import ModelCalled as ModelCalled
    from stenolog.agent.turn_events import Notice as Notice
    from stenolog.agent.turn_events import SummaryCreated as SummaryCreated
    from stenolog.agent.turn_events import TextDelta as TextDelta
    from stenolog.agent.turn_events import ThinkingDelta as ThinkingDelta
    from stenolog.agent.turn_events import ToolFinished as ToolFinished
    from stenolog.agent.turn_events import ToolStarted as ToolStarted
    from stenolog.agent.turn_events import TurnOptions as TurnOptions
    from stenolog.agent.turn_events import UsageReported as UsageReported
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "stenolog.agent.instance": "AgentInstance AgentRegistry",
            "stenolog.agent.loop": "AgentLoop",
            "stenolog.agent.spec": "AgentSpec",
            "stenolog.agent.tools": "Tool ToolContext tool",
            "stenolog.agent.turn_events": (
                "Answer Event InboundMessage MessageStored ModelCalled Notice "
                "SummaryCreated TextDelta ThinkingDelta ToolFinished "
                "ToolStarted TurnOptions UsageReported"
            ),
        },
    )
