"""Requests to a model: the messages to send, and summaries of older ones so that the rest fits."""

from typing import TYPE_CHECKING

from stenolog.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from stenolog.context.budget import Limits
    from stenolog.context.context import Context
    from stenolog.context.overflow import is_overflow
    from stenolog.context.plan import SummaryPlan, plan_summary
    from stenolog.context.request_messages import ProviderRequirements, prepare_messages
    from stenolog.context.summarize import SummaryReport
    from stenolog.context.turn_boundaries import find_turns
    from stenolog.context.window import Window, build_window
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "Context": "stenolog.context.context",
            "Limits": "stenolog.context.budget",
            "ProviderRequirements": "stenolog.context.request_messages",
            "SummaryPlan": "stenolog.context.plan",
            "SummaryReport": "stenolog.context.summarize",
            "Window": "stenolog.context.window",
            "build_window": "stenolog.context.window",
            "find_turns": "stenolog.context.turn_boundaries",
            "is_overflow": "stenolog.context.overflow",
            "plan_summary": "stenolog.context.plan",
            "prepare_messages": "stenolog.context.request_messages",
        },
    )

__all__ = [
    "Context",
    "Limits",
    "ProviderRequirements",
    "SummaryPlan",
    "SummaryReport",
    "Window",
    "build_window",
    "find_turns",
    "is_overflow",
    "plan_summary",
    "prepare_messages",
]
