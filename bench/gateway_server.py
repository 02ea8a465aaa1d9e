"""A gateway process with a model that takes a fixed time, for the benchmarks and the soak test.

    python gateway_server.py WORKSPACE SECONDS MAX_TURNS CACHE_BYTES MEMORY

The process prints its address as one line and ends when its stdin is closed.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from stenolog.agent.instance import AgentInstance, AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.agent.spec import AgentSpec
from stenolog.channels.channel_group import Channels
from stenolog.gateway.access_token import Token
from stenolog.gateway.daemon import Daemon, listen
from stenolog.gateway.shared_state import Gateway
from stenolog.providers.chat_model import Delta, Usage
from stenolog.sessions.folders import NOTES
from stenolog.sessions.session_store import JSONLBackend
from stenolog.settings.values import GatewaySettings, MemorySettings, Settings
from stenolog.stores.jsonl import JSONLStore
from stenolog.stores.open_store import open_store

TOKEN = "b" * 43


class SlowModel:
    """A model that gives the same answer after a fixed number of seconds."""

    name = "slow"

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Wait, then stream the answer."""
        del messages, tools, schema, max_tokens
        await asyncio.sleep(self._seconds)
        yield Delta(text="That is so.", finish="stop")
        yield Delta(usage=Usage(prompt=20, answer=4))

    async def close(self) -> None:
        """Do nothing: the model has no resources."""


async def _serve(
    workspace: str, seconds: float, max_turns: int, cache_bytes: int, *, memory: bool
) -> None:
    settings = Settings(
        gateway=GatewaySettings(port=0, max_turns=max_turns),
        memory=MemorySettings(consolidation=False),
    )
    spec = AgentSpec(sessions=workspace, consolidation=False, memory=memory)
    sessions = JSONLBackend(JSONLStore(workspace, cache_bytes=cache_bytes))
    notes = open_store(workspace, namespace=NOTES) if memory else None
    agent = AgentInstance(spec, model=SlowModel(seconds), sessions=sessions, notes=notes)
    loop = AgentLoop(AgentRegistry([agent]))
    channels = Channels(loop, settings)
    daemon = Daemon(
        Gateway(loop, settings), Token(TOKEN.encode()), listen("127.0.0.1", 0), channels
    )
    await daemon.start()
    print(daemon.url, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await daemon.stop(hurry=asyncio.Event())


if __name__ == "__main__":
    _, workspace_path, model_seconds, turns, cache, with_memory = sys.argv
    asyncio.run(
        _serve(
            workspace_path, float(model_seconds), int(turns), int(cache), memory=with_memory == "1"
        )
    )
