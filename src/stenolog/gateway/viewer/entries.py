"""What the list says of one session, for the head of its pages."""

import asyncio
from typing import Final

from stenolog.agent.instance import AgentInstance
from stenolog.catalog.entries import Entry
from stenolog.catalog.texts import title_from
from stenolog.gateway.state import Gateway
from stenolog.gateway.viewer.serving import catalog_of
from stenolog.records import SessionInfo

PATIENCE: Final = 0.25
"""So many seconds a page waits for an index that is being made: of a long session that takes
many, and what was said can be read without it."""


async def entry_of(gateway: Gateway, agent: AgentInstance, key: str) -> Entry | None:
    """What the list says of a session; None where it does not say it in time."""
    asked = gateway.keep(asyncio.create_task(gateway.loop.run(_listed, agent, key)))
    await asyncio.wait({asked}, timeout=PATIENCE)
    if asked.done():
        return asked.result()
    # Nobody waits for it any more; whoever asks next is told what is wrong.
    asked.add_done_callback(lambda task: task.cancelled() or task.exception())
    return None


def title_of(entry: Entry | None, info: SessionInfo) -> str:
    """What a session is called."""
    return (entry.title if entry is not None else title_from(info.meta, "")) or info.key


def _listed(agent: AgentInstance, key: str) -> Entry | None:
    return catalog_of(agent).entry(agent.own_key(key))
