"""The agent loop, the interface for front ends: messages and commands in, answers out."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final, Self, TypeVar

from msgspec.structs import replace

from stenolog.agent import commands
from stenolog.agent.commands import Commands
from stenolog.agent.instance import AgentInstance
from stenolog.agent.registry import AgentRegistry
from stenolog.agent.resume import Resumer
from stenolog.agent.scheduler import TTL, InterruptedTurn, TurnScheduler
from stenolog.agent.turn_events import Answer, Event, EventHandler, Inbound, nobody
from stenolog.agent.turn_options import DEFAULT_OPTIONS, TurnOptions
from stenolog.catalog.message_metadata import received, requested
from stenolog.errors import LeaseLost, NoSuchSession, StenologError, StoreClosed, UsageError
from stenolog.sessions.keys import check_sender
from stenolog.sessions.session_store import SessionStore
from stenolog.stores.base import SessionView

T = TypeVar("T")

_REMEMBERED: Final = 10_000
"""Maximum number of remembered command ids; a repeated command does not run again."""

_logger = logging.getLogger("stenolog")


class AgentLoop:
    """Answers user messages for the agents of a registry, in one event loop.

    It owns the registry: `close` drains the turns in progress, then closes agents, models and
    stores.
    """

    def __init__(self, registry: AgentRegistry, *, ttl: float = TTL) -> None:
        """Create a loop; an event loop must be running.

        `ttl`: lifetime of a lease in seconds, the longest wait after a killed lease holder.
        """
        self._registry = registry
        self._turns = TurnScheduler(registry, ttl=ttl)
        self._resumer = Resumer(self._turns)
        self._closing: asyncio.Task[None] | None = None
        self._commands: OrderedDict[tuple[str | None, str, str], None] = OrderedDict()

    @property
    def registry(self) -> AgentRegistry:
        """The registry of agents."""
        return self._registry

    @property
    def busy(self) -> set[str]:
        """Keys of the sessions in which this process writes an answer."""
        return self._turns.busy

    async def hear(
        self,
        inbound: Inbound,
        *,
        tell: EventHandler = nobody,
        agent: str | None = None,
        everything: bool = False,
        commands_too: bool = True,
        manner: TurnOptions = DEFAULT_OPTIONS,
        view: SessionView | None = None,
    ) -> Answer:
        """Store a message and answer it, or run a command.

        The message is stored before the model is asked. If this call is cancelled, the answer is
        stopped and its text so far is kept. `tell` gets the events, including summaries made after
        the answer. `everything`: commands may list and open the sessions of all users.
        `commands_too`: content that starts with / may be a command. `manner`: options of this turn.
        `view`: the session of `inbound.key`, if the caller has read it; that key must not be an
        alias then. Raises UsageError for a key or a message that can never be stored; errors of the
        model's server and of the store are in the returned Answer.
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
        return await self._turns.threads.run(instance.own_key, key)

    async def answer_after(
        self,
        key: str,
        change: Callable[[SessionStore], Awaitable[Answer | None]],
        *,
        tell: EventHandler = nobody,
        agent: str | None = None,
        manner: TurnOptions = DEFAULT_OPTIONS,
        view: SessionView | None = None,
    ) -> Answer:
        """Run `change` while holding the lease, then answer unanswered messages.

        If `change` returns an Answer, return it. `view`: the session of `key`, if the caller has
        read it; that key must not be an alias then. Errors of the store and of the model's server
        are in the returned Answer; raises UsageError.
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
        """Return whether this process ran a command with this id; remember the id."""
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
        """Run a function that reads or writes a store, in a thread."""
        return await self._turns.threads.run(function, *values, **named)

    async def ask(self, function: Callable[..., T], *values: Any, **named: Any) -> T:
        """Run a function that may call the model, in a thread."""
        return await self._turns.threads.ask(function, *values, **named)

    async def change(
        self,
        key: str,
        change: Callable[[SessionStore], Awaitable[T]],
        *,
        agent: str | None = None,
    ) -> T:
        """Run `change` while holding the lease, and return its result. Raise Busy."""
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
        """Stop the answer in progress in a session; return False if there is none.

        The text so far is stored, marked as interrupted, when this returns.
        """
        self._turns.check_open()
        instance = self._registry.agent(agent)
        return await self._turns.stop(instance, await self._own_key(instance, key))

    async def resume(
        self,
        key: str | None = None,
        *,
        tell: EventHandler = nobody,
        agent: str | None = None,
        idle_for: float = 0.0,
        each: Callable[[Answer], Awaitable[None]] | None = None,
    ) -> list[Answer]:
        """Resume interrupted turns, or close them with a mark.

        Covers one session, or all sessions of an agent (of every agent if none is named) that the
        catalog lists as interrupted; the log decides. Skips turns that another process runs, and
        turns with a message of the last `idle_for` seconds, which another process may be about to
        resume. `each` is called with every answer as soon as it is complete.
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
        """Wait until summaries and notes are done too, for tests and scripts."""
        await self._turns.quiet()

    async def close(self, *, patience: float = 10.0) -> InterruptedTurn:
        """Wait up to `patience` seconds for turns in progress, cancel the others, close everything.

        Cancelled turns stay in the log and resume at the next start. A second call only returns the
        same result.
        """
        left = await self._turns.close(patience=patience)
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        # Closing continues to the end even if the caller is cancelled.
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


def _careful(tell: EventHandler) -> EventHandler:
    """Wrap a callback: its errors are logged and do not end the turn."""

    def careful(event: Event) -> None:
        try:
            tell(event)
        except Exception:
            _logger.exception("whoever shows the conversation failed at %r", event)

    return careful
