"""Who listens hears everything once, however far behind it is."""

import asyncio
import random
from contextlib import aclosing

import pytest

from stenolog.agent.instance import AgentInstance, AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.agent.spec import AgentSpec
from stenolog.gateway.shared_state import SessionFollower
from stenolog.testing.scripted_model import ScriptedModel

COUNT = 200


@pytest.mark.quick(2)
@pytest.mark.parametrize("seed", range(4))
def test_slow_listener_gets_every_event_once(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr("stenolog.gateway.shared_state._MAX_BUFFERED_MESSAGES", 3)
    chance = random.Random(seed)

    async def main() -> None:
        agent = AgentInstance.open(
            AgentSpec(sessions="memory:", memory=False), model=ScriptedModel([])
        )
        loop = AgentLoop(AgentRegistry([agent]))
        following = SessionFollower(loop)
        store = agent.store
        assert store is not None

        async def listen(pace: float) -> list[int]:
            heard = []
            async with aclosing(following.messages(store, "s", after=0)) as messages:
                async for message in messages:
                    heard.append(message.seq)
                    if len(heard) == COUNT:
                        break
                    if chance.random() < pace:
                        await asyncio.sleep(0.002)
            return heard

        listening = [asyncio.create_task(listen(pace)) for pace in (0.0, 0.3, 0.9)]
        for number in range(COUNT):
            await loop.run(store.add_message, "s", "user", number)
        async with asyncio.timeout(30):
            for one in listening:
                assert await one == list(range(1, COUNT + 1))
        assert following.followed_count == 0
        await loop.close()

    asyncio.run(main())
