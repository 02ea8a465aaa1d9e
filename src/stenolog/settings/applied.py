"""Settings as the rooms below take them: limits, needs of a provider, a time zone."""

import os
from datetime import datetime, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo

from stenolog.context.arranging import Needs
from stenolog.context.budget import Limits
from stenolog.settings.values import AgentSettings, MemorySettings


def limits_of(agent: AgentSettings) -> Limits:
    """What one request of this agent may hold."""
    return Limits(
        max_context_tokens=agent.max_context_tokens,
        max_history_messages=agent.max_history_messages,
        reserve=agent.context.reserve or None,
    )


def needs_of(agent: AgentSettings) -> Needs:
    """What this agent's provider wants."""
    return Needs(
        merge_user=agent.context.merge_user,
        user_first=agent.context.user_first,
        reasoning=agent.context.reasoning,
        keep_fields=agent.context.keep_fields,
    )


def zone_of(memory: MemorySettings) -> tzinfo:
    """The time zone of the users."""
    return ZoneInfo(memory.zone) if memory.zone else _zone_of_machine()


def _zone_of_machine() -> tzinfo:
    # An offset alone would be wrong after the clocks were changed.
    if not os.environ.get("TZ"):
        try:
            with Path("/etc/localtime").open("rb") as file:
                return ZoneInfo.from_file(file)
        except (OSError, ValueError):
            pass
    else:
        try:
            return ZoneInfo(os.environ["TZ"].removeprefix(":"))
        except (KeyError, OSError, ValueError):
            pass
    here = datetime.now().astimezone().tzinfo
    assert here is not None
    return here
