"""Requests to a model: the messages to send, and summaries of older ones so that the rest fits."""

from stenolog.context.budget import Limits
from stenolog.context.context import Context
from stenolog.context.overflow import is_overflow
from stenolog.context.plan import SummaryPlan, plan_summary
from stenolog.context.request_messages import ProviderRequirements, prepare_messages
from stenolog.context.summarize import SummaryReport
from stenolog.context.turn_boundaries import find_turns
from stenolog.context.window import Window, build_window

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
