"""A gateway as a process, with a scripted model that takes so many seconds: for bench and soak.

    python gateway_server.py WORKSPACE SECONDS MAX_TURNS

It writes its address as one line, and ends with its stdin.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from stenolog.agent.instance import AgentInstance
from stenolog.agent.loop import AgentLoop
from stenolog.agent.registry import AgentRegistry
from stenolog.agent.spec import AgentSpec
from stenolog.channels.running import Channels
from stenolog.gateway.daemon import Daemon, listen
from stenolog.gateway.state import Gateway
from stenolog.gateway.token import Token
from stenolog.providers.base import Delta, Usage
from stenolog.settings.values import GatewaySettings, MemorySettings, Settings

TOKEN = "b" * 43


class Slow:
    """A model that says one thing after so many seconds."""

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
        """The answer."""
        del messages, tools, schema, max_tokens
        await asyncio.sleep(self._seconds)
        yield Delta(text="That is so.", finish="stop")
        yield Delta(usage=Usage(prompt=20, answer=4))

    async def close(self) -> None:
        """Nothing is held."""


async def _serve(workspace: str, seconds: float, max_turns: int) -> None:
    settings = Settings(
        gateway=GatewaySettings(port=0, max_turns=max_turns),
        memory=MemorySettings(consolidation=False),
    )
    spec = AgentSpec(sessions=workspace, consolidation=False)
    loop = AgentLoop(AgentRegistry([AgentInstance.open(spec, model=Slow(seconds))]))
    channels = Channels(loop, settings)
    daemon = Daemon(
        Gateway(loop, settings), Token(TOKEN.encode()), listen("127.0.0.1", 0), channels
    )
    await daemon.start()
    print(daemon.url, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await daemon.stop(hurry=asyncio.Event())


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
