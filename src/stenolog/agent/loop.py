"""The agent loop, the interface for front ends: messages and commands in, answers out."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final, Self, TypeVar

from msgspec.structs import replace

from stenolog.agent.active_sessions import failed_answer
from stenolog.agent.commands import CommandRunner, parse_command
from stenolog.agent.instance import AgentInstance, AgentRegistry
from stenolog.agent.lease_renewal import LEASE_SECONDS
from stenolog.agent.new_messages import MessageReceiver, NewMessage
from stenolog.agent.resume import Resumer
from stenolog.agent.scheduler import CloseReport, TurnScheduler
from stenolog.agent.turn_events import (
    DEFAULT_OPTIONS,
    Answer,
    Event,
    EventHandler,
    InboundMessage,
    TurnOptions,
    ignore_event,
    may_run_again,
)
from stenolog.catalog.message_metadata import mark_received, mark_request
from stenolog.errors import (
    LeaseLost,
    NoSuchSession,
    StenologError,
    StoreClosed,
    StoreUnavailable,
    UsageError,
)
from stenolog.sessions.keys import check_sender
from stenolog.stores.base import SessionView, Store

T = TypeVar("T")

_MAX_COMMAND_IDS: Final = 10_000
"""Number of newest command ids that are remembered; a remembered command does not run again."""

_logger = logging.getLogger("stenolog")


class AgentLoop:
    """Answers user messages for the agents of a registry, in one event loop.

    The loop owns the registry. `close` drains the turns in progress, then closes agents, models and
    stores.
    """

    def __init__(self, registry: AgentRegistry, *, ttl: float = LEASE_SECONDS) -> None:
        """Create an agent loop. An asyncio event loop must be running.

        `ttl`: lifetime of a lease in seconds. The lease of a killed process ends after this time.
        """
        self._registry = registry
        self._scheduler = TurnScheduler(registry, ttl=ttl)
        self._receiver = MessageReceiver(self._scheduler)
        self._resumer = Resumer(self._scheduler)
        self._closing: asyncio.Task[None] | None = None
        self._command_ids: OrderedDict[tuple[str | None, str, str], None] = OrderedDict()

    @property
    def registry(self) -> AgentRegistry:
        """The registry of agents."""
        return self._registry

    @property
    def busy(self) -> set[str]:
        """Keys of the sessions in which this process writes an answer."""
        return self._scheduler.busy

    async def handle(
        self,
        message: InboundMessage,
        *,
        on_event: EventHandler = ignore_event,
        agent: str | None = None,
        all_sessions: bool = False,
        allow_commands: bool = True,
        options: TurnOptions = DEFAULT_OPTIONS,
        view: SessionView | None = None,
        prepare: Callable[[], SessionView] | None = None,
    ) -> Answer:
        """Store a message and answer it, or run a command.

        The message is stored before the model is asked. If this call is cancelled, the answer stops
        and its text so far is kept. `on_event` receives the events, including those of a summary
        after the answer. `all_sessions`: commands may list and open the sessions of all users.
        `allow_commands`: content that starts with / may be a command. `view`: view of the session
        `message.key`, if the caller has read it. `prepare`: a function that reads the view, in the
        thread that stores the message. If `prepare` fails, nothing is stored. With `view` or
        `prepare`, the key must not be an alias. Raises UsageError for a key or a message that can
        never be stored. Other errors of the store and of the model's server are in the returned
        Answer, for example NotStored if the disk is full, or OnceConflict if the id was used for
        another message.
        """
        self._scheduler.check_open()
        instance = self._registry.agent(agent)
        safe_handler = _make_safe_handler(on_event)
        check_sender(message.sender)
        key = message.key
        if view is None and prepare is None:
            try:
                key = await self._scheduler.threads.run(instance.resolve_key, key)
            except StoreUnavailable as error:
                return failed_answer(key, error, saved=False)
        command = parse_command(message.content) if allow_commands else None
        if command is not None:
            if self._is_repeated_command(instance.id, key, message.id):
                return Answer(key=key, text="", outcome="again")
            runner = CommandRunner(
                scheduler=self._scheduler,
                instance=instance,
                key=key,
                name=command.name,
                argument=command.argument,
                sender=message.sender,
                all_sessions=all_sessions,
            )
            answer = await runner.run(safe_handler)
            if may_run_again(answer):
                # The command runs if it is sent again.
                self._command_ids.pop((instance.id, key, message.id), None)  # guard: failed-command
            return answer
        content = message.content
        if allow_commands and isinstance(content, str) and content.startswith("//"):
            content = content[1:]
        user_message = {"role": "user", "content": content}
        body = mark_received(user_message, sender=message.sender, origin=message.origin)
        if message.request_digest:
            body = mark_request(body, id=message.id, digest=message.request_digest)
        new_message = NewMessage(
            body=body,
            once=message.id,
            on_event=safe_handler,
            options=replace(options, sender=message.sender),
            view=view,
            prepare=prepare,
        )
        return await self._receiver.answer(instance, key, new_message)

    async def _find_session(self, key: str, agent: str | None) -> tuple[AgentInstance, str]:
        """Return the agent, and the key of the session that `key` names."""
        self._scheduler.check_open()
        instance = self._registry.agent(agent)
        return instance, await self._scheduler.threads.run(instance.resolve_key, key)

    async def change_and_answer(
        self,
        key: str,
        change: Callable[[Store], Awaitable[Answer | None]],
        *,
        on_event: EventHandler = ignore_event,
        agent: str | None = None,
        options: TurnOptions = DEFAULT_OPTIONS,
        view: SessionView | None = None,
    ) -> Answer:
        """Run `change` while holding the lease, then answer unanswered messages.

        If `change` returns an Answer, return that Answer and do not run a turn. `view`: view of the
        session `key`, if the caller has read it. With `view`, `key` must not be an alias. Errors of
        the store and of the model's server are in the returned Answer. Raises UsageError for wrong
        arguments.
        """
        if view is None:
            instance, session_key = await self._find_session(key, agent)
        else:
            self._scheduler.check_open()
            instance, session_key = self._registry.agent(agent), key
        try:
            return await self._scheduler.change_when_free(
                instance,
                session_key,
                change,
                on_event=_make_safe_handler(on_event),
                options=options,
                view=view,
            )
        except StenologError as error:
            is_reported = isinstance(error, StoreClosed | NoSuchSession | LeaseLost)
            if isinstance(error, UsageError) and not is_reported:
                raise
            return await self._scheduler.make_failed_answer(instance, session_key, error)

    def _is_repeated_command(self, agent: str | None, key: str, message_id: str) -> bool:
        """Return whether this process already ran a command with this id, and remember the id."""
        if not message_id:
            return False
        command_id = (agent, key, message_id)
        if command_id in self._command_ids:
            return True
        self._command_ids[command_id] = None
        if len(self._command_ids) > _MAX_COMMAND_IDS:
            self._command_ids.popitem(last=False)
        return False

    async def run(self, function: Callable[..., T], *values: Any, **named: Any) -> T:
        """Run a function that reads or writes a store, in a thread."""
        return await self._scheduler.threads.run(function, *values, **named)

    async def run_model(self, function: Callable[..., T], *values: Any, **named: Any) -> T:
        """Run a function that may call the model, in a thread."""
        return await self._scheduler.threads.run_model(function, *values, **named)

    async def change(
        self, key: str, change: Callable[[Store], Awaitable[T]], *, agent: str | None = None
    ) -> T:
        """Run `change` while holding the lease, and return its result.

        Raises SessionBusy if another turn runs in the session.
        """
        instance, session_key = await self._find_session(key, agent)
        results: list[T] = []

        async def wrapped(store: Store) -> Answer:
            results.append(await change(store))
            return Answer(key=session_key, text="", outcome="command")

        await self._scheduler.change_now(instance, session_key, wrapped, on_event=ignore_event)
        return results[0]

    async def stop(self, key: str, *, agent: str | None = None) -> bool:
        """Stop the answer in progress in a session; return False if no answer is in progress.

        When this call returns, the text so far is stored and marked as interrupted.
        """
        return await self._scheduler.stop(*await self._find_session(key, agent))

    async def resume(
        self,
        key: str | None = None,
        *,
        on_event: EventHandler = ignore_event,
        agent: str | None = None,
        idle_for: float = 0.0,
        each: Callable[[Answer], Awaitable[None]] | None = None,
    ) -> list[Answer]:
        """Resume interrupted turns. A turn that is too old gets the answer "[interrupted]" instead.

        `key` selects one session. Without `key`, the call covers the sessions of `agent`, or of all
        agents if `agent` is None. The catalog finds interrupted sessions, and the log of each
        session must confirm the interruption. Turns that another process runs are skipped. A turn
        whose last message is younger than `idle_for` seconds is skipped, too, because another
        process may be about to resume the turn. `each` is called with each answer as soon as the
        answer is complete.
        """
        self._scheduler.check_open()
        safe_handler = _make_safe_handler(on_event)
        if key is not None:
            instance, session_key = await self._find_session(key, agent)
            answer = await self._resumer.resume(
                instance, session_key, on_event=safe_handler, idle_for=idle_for
            )
            return [] if answer is None else [answer]
        agents = list(self._registry) if agent is None else [self._registry.agent(agent)]
        return [
            answer
            for instance in agents
            for answer in await self._resumer.resume_all(
                instance, on_event=safe_handler, idle_for=idle_for, each=each
            )
        ]

    async def wait_until_idle(self) -> None:
        """Wait until turns, summaries and notes are done, for tests and scripts."""
        await self._scheduler.wait_until_idle()

    async def close(self, *, patience: float = 10.0) -> CloseReport:
        """Wait up to `patience` seconds for turns in progress, then cancel the rest and close.

        The messages of cancelled turns stay in the log, and the next start resumes the turns. The
        result has the keys of their sessions (`turns`), and the number of turns that did not end
        (`hanging`). A second call closes nothing, and returns a new report.
        """
        report = await self._scheduler.close(patience=patience)
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        # Closing continues to the end even if the caller is cancelled.
        await asyncio.shield(self._closing)
        return report

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _close(self) -> None:
        for instance in self._registry:
            await instance.close_models()
            await self._scheduler.threads.run(instance.close_stores)
        self._scheduler.threads.close()


def _make_safe_handler(on_event: EventHandler) -> EventHandler:
    """Return a handler that logs the errors of `on_event`, so that they do not end the turn."""

    def safe_handler(event: Event) -> None:
        try:
            on_event(event)
        except Exception:
            _logger.exception("the event handler failed at %r", event)

    return safe_handler
