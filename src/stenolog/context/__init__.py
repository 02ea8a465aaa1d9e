"""Requests to a model: selects the messages to send, and summarizes older messages."""

from typing import TYPE_CHECKING

from stenolog.lazy_loading import lazy_exports

if TYPE_CHECKING:
    from stenolog.context.context import Context as Context
    from stenolog.context.request_messages import ProviderRequirements as ProviderRequirements
    from stenolog.context.request_messages import prepare_messages as prepare_messages
    from stenolog.context.summarize import SummaryPlan as SummaryPlan
    from stenolog.context.summarize import SummaryReport as SummaryReport
    from stenolog.context.summarize import plan_summary as plan_summary
    from stenolog.context.turn_state import find_turns as find_turns
    from stenolog.context.window import Limits as Limits
    from stenolog.context.window import Window as Window
    from stenolog.context.window import build_window as build_window
    from stenolog.providers.request_errors import is_overflow as is_overflow
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "stenolog.context.context": "Context",
            "stenolog.context.request_messages": "ProviderRequirements prepare_messages",
            "stenolog.context.summarize": "SummaryPlan SummaryReport plan_summary",
            "stenolog.context.turn_state": "find_turns",
            "stenolog.context.window": "Limits Window build_window",
            "stenolog.providers.request_errors": "is_overflow",
        },
    )
