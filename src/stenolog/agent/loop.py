"""The loop: what front ends hold. Messages and commands in, answers out."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final, Self, TypeVar

from msgspec.structs import replace

from stenolog.agent import commands
from stenolog.agent.commands import Commands
from stenolog.agent.events import Answer, Event, Inbound, Tell, nobody
from stenolog.agent.instance import AgentInstance
from stenolog.agent.manner import AS_USUAL, Manner
from stenolog.agent.registry import AgentRegistry
from stenolog.agent.resume import Resumer
from stenolog.agent.scheduler import TTL, Left, TurnScheduler
from stenolog.catalog.answers import received, requested
from stenolog.errors import LeaseLost, NoSuchSession, StenologError, StoreClosed, UsageError
from stenolog.sessions.keys import check_sender
from stenolog.sessions.session_store import SessionStore
from stenolog.stores.base import SessionView

T = TypeVar("T")

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
        self._turns = TurnScheduler(registry, ttl=ttl)
        self._resumer = Resumer(self._turns)
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
        commands_too: bool = True,
        manner: Manner = AS_USUAL,
        view: SessionView | None = None,
    ) -> Answer:
        """Take a message in and answer it, or carry a command out.

        The message is stored before the model is asked. Cancelled, the answer is stopped and kept
        as far as it came. `tell` hears what happens, and after the answer of a compaction.
        `everything`: commands may show and open the sessions of all users, not only of this one.
        `commands_too`: what begins with / may be a command. `manner`: what a client wants of it.
        `view`: the session of `inbound.key`, if the caller has read it; that key is no alias then.
        Raises UsageError for a key or a message that can never be stored; what the model's server
        or the store raises is told by the answer.
        """
        self._turns.check_open()
        instance = self._registry.agent(agent)
        careful = _careful(tell)
        check_sender(inbound.sender)
        key = inbound.key if view is not None else await self._own_key(instance, inbound.key)
        asked = commands.parse(inbound.content) if commands_too else None
        if asked is not None:
            if self._is_known(instance.id, key, inbound.id):
                return Answer(key=key, text="", outcome="again")
            carrying = Commands(self._turns, instance, sender=inbound.sender, everything=everything)
            return await carrying.carry_out(key, asked, careful)
        content = inbound.content
        if commands_too and isinstance(content, str) and content.startswith("//"):
            content = content[1:]
        said = {"role": "user", "content": content}
        body = received(said, sender=inbound.sender, origin=inbound.origin)
        if inbound.request_digest:
            body = requested(body, id=inbound.id, digest=inbound.request_digest)
        return await self._turns.answer(
            instance,
            key,
            body,
            once=inbound.id,
            tell=careful,
            manner=replace(manner, sender=inbound.sender),
            view=view,
        )

    async def _own_key(self, instance: AgentInstance, key: str) -> str:
        """Return the key of the session that this key opens."""
        return await self._turns.threads.run(instance.own_key, key)

    async def answer_after(
        self,
        key: str,
        change: Callable[[SessionStore], Awaitable[Answer | None]],
        *,
        tell: Tell = nobody,
        agent: str | None = None,
        manner: Manner = AS_USUAL,
        view: SessionView | None = None,
    ) -> Answer:
        """Change what was said when it is this one's turn, then answer what is unanswered.

        Where the change gives an answer, it is that, and nothing else happens. `view`: the session
        of `key`, if the caller has read it; that key is no alias then. What the store or the
        model's server raises is told by the answer; raises UsageError.
        """
        self._turns.check_open()
        instance = self._registry.agent(agent)
        own = key if view is not None else await self._own_key(instance, key)
        try:
            return await self._turns.alone(
                instance, own, change, tell=_careful(tell), wait=True, manner=manner, view=view
            )
        except StenologError as error:
            told = isinstance(error, StoreClosed | NoSuchSession | LeaseLost)
            if isinstance(error, UsageError) and not told:
                raise
            cause = await self._turns.cause(instance, own, error)
            return Answer(key=own, text=str(cause), outcome="failed", error=cause)

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

    async def run(self, function: Callable[..., T], *values: Any, **named: Any) -> T:
        """What a function returns that reads or writes a store, called in a thread."""
        return await self._turns.threads.run(function, *values, **named)

    async def ask(self, function: Callable[..., T], *values: Any, **named: Any) -> T:
        """What a function returns that may ask the model, called in a thread."""
        return await self._turns.threads.ask(function, *values, **named)

    async def change(
        self,
        key: str,
        change: Callable[[SessionStore], Awaitable[T]],
        *,
        agent: str | None = None,
    ) -> T:
        """Carry a change out while nobody has the turn, and give what it gives. Raises Busy."""
        self._turns.check_open()
        instance = self._registry.agent(agent)
        own = await self._own_key(instance, key)
        made: list[T] = []

        async def carried_out(sessions: SessionStore) -> Answer:
            made.append(await change(sessions))
            return Answer(key=own, text="", outcome="command")

        await self._turns.alone(instance, own, carried_out, tell=nobody)
        return made[0]

    async def stop(self, key: str, *, agent: str | None = None) -> bool:
        """End the answer that is being made in a session; False where none is.

        What was said is kept, with a mark; it is stored when this returns.
        """
        self._turns.check_open()
        instance = self._registry.agent(agent)
        return await self._turns.stop(instance, await self._own_key(instance, key))

    async def resume(
        self,
        key: str | None = None,
        *,
        tell: Tell = nobody,
        agent: str | None = None,
        idle_for: float = 0.0,
        each: Callable[[Answer], Awaitable[None]] | None = None,
    ) -> list[Answer]:
        """Go on with the turns that a killed process left, or close them with a mark.

        Of one session, or of all of an agent's (of every agent's, where none is named) that the
        index calls interrupted; the log decides. Turns that another process has are left to it, and
        so are those in which something was said within the last `idle_for` seconds: somebody else
        may be about to take them. `each` is called with every answer as soon as it is made.
        """
        self._turns.check_open()
        careful = _careful(tell)
        if key is not None:
            instance = self._registry.agent(agent)
            own = await self._own_key(instance, key)
            answer = await self._resumer.resume(instance, own, tell=careful, idle_for=idle_for)
            return [] if answer is None else [answer]
        agents = list(self._registry) if agent is None else [self._registry.agent(agent)]
        return [
            answer
            for instance in agents
            for answer in await self._resumer.resume_all(
                instance, tell=careful, idle_for=idle_for, each=each
            )
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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

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
