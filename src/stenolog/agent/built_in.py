"""The tools that every agent has: its own past, and the time."""

from datetime import datetime
from typing import Annotated

from stenolog.agent.tools import Here, Tool, tool


@tool(repeatable=True)
def recall(
    question: Annotated[str, "what to look for, in plain words; names and dates help"],
    here: Here,
) -> str:
    """Search your notes about this user and your past conversations with them."""
    if here.recall is None:
        return "There is no memory to search in."
    return here.recall(question).block or "Nothing was found."


@tool(repeatable=True)
def now(here: Here) -> str:
    """The date and the time, with the weekday and the zone."""
    return datetime.now(here.zone).strftime("%A, %Y-%m-%d %H:%M:%S %Z (UTC%z)")


BUILT_IN: tuple[Tool, ...] = (recall, now)
