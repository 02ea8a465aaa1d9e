"""Requests to a model: selects the messages to send, and summarizes older messages."""

from typing import TYPE_CHECKING

from stenolog.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from stenolog.context.context import Context
    from stenolog.context.request_messages import ProviderRequirements, prepare_messages
    from stenolog.context.summarize import SummaryPlan, SummaryReport, plan_summary
    from stenolog.context.turn_state import find_turns
    from stenolog.context.window import Limits, Window, build_window
    from stenolog.providers.request_errors import is_overflow
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "Context": "stenolog.context.context",
            "Limits": "stenolog.context.window",
            "ProviderRequirements": "stenolog.context.request_messages",
            "SummaryPlan": "stenolog.context.summarize",
            "SummaryReport": "stenolog.context.summarize",
            "Window": "stenolog.context.window",
            "build_window": "stenolog.context.window",
            "find_turns": "stenolog.context.turn_state",
            "is_overflow": "stenolog.providers.request_errors",
            "plan_summary": "stenolog.context.summarize",
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
