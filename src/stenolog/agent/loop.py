"""The loop: what front ends hold. Messages and commands in, answers out."""

import asyncio
import logging
from collections import OrderedDict
from typing import Final

from stenolog.agent import commands
from stenolog.agent.commands import Commands
from stenolog.agent.events import Answer, Event, Inbound, Tell, nobody
from stenolog.agent.registry import AgentRegistry
from stenolog.agent.turns import TTL, Left, Turns

_REMEMBERED: Final = 10_000
"""So many ids of commands; what comes again is not carried out again."""

_logger = logging.getLogger("stenolog")


class AgentLoop:
    """Answers the messages of the users of some agents, inside of one event loop.

    It owns the registry: `close` drains the turns in flight, then closes agents, models and stores.
    """

    def __init__(self, registry: AgentRegistry, *, ttl: float = TTL) -> None:
        """Made where an event loop runs. `ttl`: a killed holder is waited for so long, at most."""
        self._registry = registry
        self._turns = Turns(registry, ttl=ttl)
        self._closing: asyncio.Task[None] | None = None
        self._commands: OrderedDict[tuple[str | None, str, str], None] = OrderedDict()

    @property
    def registry(self) -> AgentRegistry:
        """The agents."""
        return self._registry

    @property
    def busy(self) -> set[str]:
        """The sessions in which an answer is being made, by this process."""
        return self._turns.busy

    async def hear(
        self,
        inbound: Inbound,
        *,
        tell: Tell = nobody,
        agent: str | None = None,
        everything: bool = False,
    ) -> Answer:
        """Take a message in and answer it, or carry a command out.

        The message is stored before the model is asked. Cancelled, the answer is stopped and kept
        as far as it came. `tell` hears what happens, and after the answer of a compaction.
        `everything`: commands may show and open the sessions of all users, not only of this one.
        Raises UsageError for a key or a message that can never be stored; what the model's server
        or the store raises is told by the answer.
        """
        self._turns.check_open()
        instance = self._registry.agent(agent)
        careful = _careful(tell)
        key = await self._turns.threads.run(instance.own_key, inbound.key)
        asked = commands.parse(inbound.content)
        if asked is not None:
            if self._is_known(instance.id, key, inbound.id):
                return Answer(key=key, text="", outcome="again")
            carrying = Commands(self._turns, instance, everything=everything)
            return await carrying.carry_out(key, asked, careful)
        content = inbound.content
        if isinstance(content, str) and content.startswith("//"):
            content = content[1:]
        body = {"role": "user", "content": content}
        return await self._turns.answer(instance, key, body, once=inbound.id, tell=careful)

    def _is_known(self, agent: str | None, key: str, id: str) -> bool:
        """Whether a command of this id was carried out by this process; it is from now on."""
        if not id:
            return False
        place = (agent, key, id)
        if place in self._commands:
            return True
        self._commands[place] = None
        if len(self._commands) > _REMEMBERED:
            self._commands.popitem(last=False)
        return False

    async def stop(self, key: str, *, agent: str | None = None) -> bool:
        """End the answer that is being made in a session; False where none is.

        What was said is kept, with a mark; it is stored when this returns.
        """
        self._turns.check_open()
        instance = self._registry.agent(agent)
        return await self._turns.stop(
            instance, await self._turns.threads.run(instance.own_key, key)
        )

    async def resume(
        self, key: str | None = None, *, tell: Tell = nobody, agent: str | None = None
    ) -> list[Answer]:
        """Go on with the turns that a killed process left, or close them with a mark.

        Of one session, or of all of an agent's (of every agent's, where none is named) that the
        index calls interrupted; the log decides. Turns that another process has are left to it.
        """
        self._turns.check_open()
        careful = _careful(tell)
        if key is not None:
            instance = self._registry.agent(agent)
            own = await self._turns.threads.run(instance.own_key, key)
            answer = await self._turns.resume(instance, own, tell=careful)
            return [] if answer is None else [answer]
        agents = list(self._registry) if agent is None else [self._registry.agent(agent)]
        return [
            answer
            for instance in agents
            for answer in await self._turns.resume_all(instance, tell=careful)
        ]

    async def quiet(self) -> None:
        """Wait until compactions and notes are done as well: for tests and scripts."""
        await self._turns.quiet()

    async def close(self, *, patience: float = 10.0) -> Left:
        """Let the turns in flight end, for so many seconds; then cut them off and close all.

        What is cut off stays in the log as it is, and is gone on with at the next start. A second
        call only tells again what was left.
        """
        left = await self._turns.close(patience=patience)
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        # Once begun it is ended, whoever stops waiting for it.
        await asyncio.shield(self._closing)
        return left

    async def _close(self) -> None:
        for instance in self._registry:
            await instance.close_models()
            await self._turns.threads.run(instance.close_stores)
        self._turns.threads.close()


def _careful(tell: Tell) -> Tell:
    """The same, but that it does not end a turn when it fails."""

    def careful(event: Event) -> None:
        try:
            tell(event)
        except Exception:
            _logger.exception("whoever shows the conversation failed at %r", event)

    return careful
