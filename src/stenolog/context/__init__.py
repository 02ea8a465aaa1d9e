"""Requests to a model: the messages to send, and summaries of older ones so that the rest fits."""

from stenolog.context.budget import Limits
from stenolog.context.context import Context
from stenolog.context.overflow import is_overflow
from stenolog.context.plan import Plan, plan_compaction
from stenolog.context.request_messages import ProviderRequirements, arrange
from stenolog.context.summarize import Compaction
from stenolog.context.turn_boundaries import find_turns
from stenolog.context.window import Window, build_window

__all__ = [
    "Compaction",
    "Context",
    "Limits",
    "Plan",
    "ProviderRequirements",
    "Window",
    "arrange",
    "build_window",
    "find_turns",
    "is_overflow",
    "plan_compaction",
]
