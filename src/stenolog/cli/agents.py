"""Open an agent from settings and options, and close it when the program ends."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from msgspec import Struct
from msgspec.structs import replace

from stenolog.agent.instance import AgentInstance, AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.agent.scheduler import CloseReport
from stenolog.agent.spec import AgentSpec
from stenolog.agent.turn_events import Answer, Event, InboundMessage
from stenolog.catalog.background_catalog import BackgroundCatalog, ReadHeads
from stenolog.cli.chat_screen import UNSUPPORTED_FORMAT_ADVICE
from stenolog.cli.config import AgentOptions, read_settings
from stenolog.cli.output import error_sentence, print_notice, sentence
from stenolog.cli.workspace import session_command
from stenolog.errors import ModelRefused, StenologError, UnsupportedFormat, UsageError
from stenolog.providers.chat_model import ChatModel, Delta
from stenolog.sessions.folders import locate_sessions, other_namespaces
from stenolog.sessions.keys import cli_sender
from stenolog.sessions.session_store import JSONLBackend
from stenolog.settings.conversion import CLI, IN_MEMORY, MAIN_AGENT, model_of, spec_of, specs_of
from stenolog.settings.model_selection import SCRIPTED, NoModel
from stenolog.settings.values import Settings
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import parse_address
from stenolog.transfer.read_only_stores import CombinedStore, StorePlace
from stenolog.transfer.viewed_places import ViewedPlace, open_unchanged, prepare_index_file

T = TypeVar("T")

CHANNEL: Final = CLI
SENDER: Final = "default"
SHUTDOWN_SECONDS: Final = 10.0
"""Seconds that a running turn may take to finish when the program ends."""
_NOTICE_SECONDS: Final = 0.7
"""Seconds after which the user is told that the program waits for running turns."""
_CANCEL_SECONDS: Final = 3.0
"""Seconds to wait for cancelled turns to end. Then the process exits, even if some still run."""
EXIT_NOT_SAVED: Final = 3
"""Exit code if messages could not be saved in any store."""


class OpenAgent(Struct, frozen=True, kw_only=True):
    """An open agent with its loop and settings."""

    loop: AgentLoop
    agent: AgentInstance
    settings: Settings

    async def handle(
        self,
        key: str,
        text: str,
        on_event: Callable[[Event], None],
        *,
        all_sessions: bool = True,
    ) -> Answer:
        """Handle a message or command of the user.

        With `all_sessions`, commands may list and open the sessions of all users.
        """
        inbound = InboundMessage(key=key, content=text, sender=cli_sender(key))
        return await self.loop.handle(
            inbound, on_event=on_event, agent=self.agent.id, all_sessions=all_sessions
        )

    async def stop(self, key: str) -> bool:
        """Stop the running turn of a session; return whether there was one."""
        return await self.loop.stop(key, agent=self.agent.id)


class _MissingModel:
    """Placeholder for the missing model of an agent. A session can still choose a model."""

    name = "no model"

    def __init__(self, problem: str) -> None:
        self.problem = problem

    def stream(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> AsyncGenerator[Delta, None]:
        """Raise ModelRefused, because there is no model."""
        del messages, options
        raise ModelRefused("no model was found; choose one for this session with /model NAME")

    async def close(self) -> None:
        """Do nothing."""


def open_agent(options: AgentOptions, *, allow_missing_model: bool = False) -> OpenAgent:
    """Open the agent that the options select. An event loop must be running.

    With `allow_missing_model`, a missing model is not an error: `session_model` checks later
    whether the session names a model. Raises ClickException, StenologError.
    """
    settings = read_settings(options.config)
    spec = _select_spec(settings, options)
    model = model_of(settings, spec.model)
    if isinstance(model, NoModel):
        if not allow_missing_model:
            raise click.ClickException(model.text)
        model = _MissingModel(model.text)
    agent = _open_instance(settings, spec, model)
    try:
        loop = AgentLoop(AgentRegistry([agent]))
    except BaseException:
        agent.close_stores()
        raise
    return OpenAgent(loop=loop, agent=agent, settings=settings)


def open_agents(options: AgentOptions, settings: Settings, *, channel: str) -> list[AgentInstance]:
    """Open all agents that the settings define, `[agent]` first. Raises the errors of open_agent.

    The options override the settings of each agent. If one agent cannot be opened, the others are
    closed again.
    """

    def open_from_spec(spec: AgentSpec) -> AgentInstance:
        model = model_of(settings, options.model or spec.model)
        if isinstance(model, NoModel):
            raise click.ClickException(model.text)
        if options.workspace is not None and spec.sessions != IN_MEMORY:
            spec = replace(spec, sessions=options.workspace)
        return _open_instance(settings, spec, model)

    return _open_all_agents(specs_of(settings, channel=channel), open_from_spec)


def _open_all_agents(
    specs: Iterable[AgentSpec], open_from_spec: Callable[[AgentSpec], AgentInstance]
) -> list[AgentInstance]:
    """Open several agents. If one of them cannot be opened, close the others."""
    instances: list[AgentInstance] = []
    try:
        for spec in specs:
            instances.append(open_from_spec(spec))
    except BaseException:
        for agent in instances:
            agent.close_stores()
        raise
    return instances


def open_viewer(spec: AgentSpec, store: Store, *, heads: ReadHeads) -> AgentInstance:
    """Return an agent that only shows the sessions of a read-only store.

    Closing the agent closes the store. The agent needs no model, and its search index is built in
    the background.
    """
    agent = AgentInstance(
        replace(spec, memory=False),
        model=_MissingModel("the sessions are shown read-only"),
        sessions=JSONLBackend(store),
    )
    agent.catalog.close()
    agent.catalog = BackgroundCatalog(store, heads=heads)
    return agent


def find_index_file(places: Sequence[ViewedPlace], cache: Path) -> Path | None:
    """Return the file for the search index. Warn and return None if `cache` cannot be used."""
    try:
        return prepare_index_file(places, cache)
    except OSError as error:
        print_notice(f"Warning: the search index is kept in memory: {sentence(str(error))}")
        return None


def open_viewers(options: AgentOptions, settings: Settings, cache: Path) -> list[AgentInstance]:
    """Open the sessions of all configured agents read-only. Raises StenologError, OSError.

    `cache`: folder for the search indexes.
    """

    def open_from_spec(spec: AgentSpec) -> AgentInstance:
        place = locate_sessions(options.workspace or spec.sessions, spec.id)
        address = parse_address(place.where)
        is_url = address.engine == "postgresql"
        where = os.fspath(address.path) if is_url else str(Path(address.path).absolute())
        source_store: Store = InMemoryStore()
        is_missing = address.engine == "jsonl" and not Path(where, place.namespace).exists()
        if address.engine != "memory" and not is_missing:
            source_store = open_unchanged(place.where, namespace=place.namespace)
        index_file = find_index_file([ViewedPlace(program=place.namespace, where=where)], cache)
        store = CombinedStore([StorePlace(store=source_store)], catalog=index_file)
        if options.workspace is not None:
            spec = replace(spec, sessions=options.workspace)
        return open_viewer(spec, store, heads=store.heads)

    return _open_all_agents(specs_of(settings, channel=CHANNEL), open_from_spec)


def session_model(opened_agent: OpenAgent, key: str) -> ChatModel:
    """Return the model that answers in a session.

    Raises ClickException if there is no model, or if the model cannot read the session's messages.
    """
    problems: list[str] = []
    agent = opened_agent.agent
    session_key = agent.resolve_key(key)
    model = agent.model_of(session_key, problems.append)
    if isinstance(model, _MissingModel):
        raise click.ClickException("\n".join([*map(error_sentence, problems), model.problem]))
    # Other errors are reported by the turn, after the question is stored.
    with suppress(StenologError):
        try:
            agent.context(model).window(session_key)
        except UnsupportedFormat as error:
            text = f"{error_sentence(str(error))} {UNSUPPORTED_FORMAT_ADVICE}"
            raise click.ClickException(f"{text} Nothing was stored.") from error
    return model


def _open_instance(settings: Settings, spec: AgentSpec, model: ChatModel) -> AgentInstance:
    if model.name == SCRIPTED:
        # Answers of the scripted model are only examples and must not become notes.
        spec = replace(spec, consolidation=False)
    return AgentInstance.open(spec, model=model, open_model=partial(_resolve_named_model, settings))


def _select_spec(settings: Settings, options: AgentOptions) -> AgentSpec:
    name = None if options.agent == MAIN_AGENT else options.agent
    # An agent with sessions but without settings uses the settings of [agent].
    spec = spec_of(settings, name if name in settings.agents else None, channel=CHANNEL)
    if options.workspace is not None:
        spec = replace(spec, sessions=options.workspace)
    if options.model is not None:
        spec = replace(spec, model=options.model)
    if spec.id != name:
        names = set(settings.agents)
        with suppress(StenologError):  # the place of the sessions may be unreadable
            names.update(other_namespaces(spec.sessions).agents)
        if name not in names:
            names_text = f"known agents: {', '.join(sorted(names))}"
            raise UsageError(
                f"there is no agent {name!r}; {names_text if names else 'no agents are configured'}"
                f". To create it, add [agents.{name}] to the config file"
            )
    return replace(spec, id=name)


def _resolve_named_model(settings: Settings, name: str) -> ChatModel:
    """Return the model with this name. Raises UsageError."""
    model = model_of(settings, name)
    if isinstance(model, NoModel):
        raise UsageError(f"models.{name} does not name a model, and no model was found")
    return model


# --- shutdown --------------------------------------------------------------------------------


class Signals:
    """Signals that ask the program to end."""

    def __init__(self) -> None:
        self.received = asyncio.Event()
        """Set when the first signal arrives."""
        self.number = 0
        """Number of the last signal; 0 before the first signal."""
        self._loop = asyncio.get_running_loop()
        self._numbers: list[int] = []
        self._next_arrived = asyncio.Event()
        self.watch(signal.SIGTERM, signal.SIGHUP)

    def watch(self, *numbers: int) -> None:
        """Also handle the signals with these numbers."""
        for number in numbers:
            self._loop.add_signal_handler(number, self._on_signal, number)
            self._numbers.append(number)

    def restore_defaults(self) -> None:
        """Stop handling signals, so that they have their default actions again."""
        while self._numbers:
            self._loop.remove_signal_handler(self._numbers.pop())

    async def run_until_signal(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Run `work` and return its result. If a signal arrives, cancel `work` and return None."""
        task = asyncio.create_task(work)
        try:
            await self.wait_for_task_or_signal(task)
            if task.done():
                return task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})
        return None

    async def wait_for_task_or_signal(self, task: asyncio.Task[Any]) -> None:
        """Wait until the task has ended or the first signal arrives."""
        signal_wait = asyncio.create_task(self.received.wait())
        try:
            await asyncio.wait({task, signal_wait}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            signal_wait.cancel()

    async def next_signal(self) -> None:
        """Wait for the next signal."""
        self._next_arrived.clear()
        await self._next_arrived.wait()

    def _on_signal(self, number: int) -> None:
        self.number = number
        self.received.set()
        self._next_arrived.set()


async def close_agent(
    opened_agent: OpenAgent, signals: Signals, print_notice: Callable[[str], Any]
) -> int:
    """Let running turns finish, close everything and return the exit code.

    `print_notice` prints texts about unfinished turns. A signal during this time cancels the turns.
    If a cancelled turn does not end, the process exits anyway.
    """
    loop = opened_agent.loop
    signals.watch(signal.SIGINT)
    close_tasks = [asyncio.create_task(loop.close(patience=SHUTDOWN_SECONDS))]
    signal_wait = asyncio.create_task(signals.next_signal())
    tasks: set[asyncio.Task[Any]] = {*close_tasks, signal_wait}
    finished_tasks, _ = await asyncio.wait(
        tasks, timeout=_NOTICE_SECONDS, return_when=asyncio.FIRST_COMPLETED
    )
    if not finished_tasks:
        wait_text = f"Waiting up to {SHUTDOWN_SECONDS:.0f} s for"
        awaited_work = "the answer" if loop.busy else "a summary"
        print_notice(f"{wait_text} {awaited_work} to finish. Press Ctrl-C to stop now.")
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if not close_tasks[0].done():
        unfinished_keys = tuple(sorted(loop.busy))
        close_tasks.append(asyncio.create_task(loop.close(patience=0)))
        finished_tasks, _ = await asyncio.wait(close_tasks, timeout=_CANCEL_SECONDS)
        if len(finished_tasks) < len(close_tasks):
            print_notice(
                interruption_text(CloseReport(turns=unfinished_keys))
                or "Stopped before all stores were closed."
            )
            os._exit(_signal_exit_code(signals))
    signal_wait.cancel()
    signals.restore_defaults()
    close_report = [await close_task for close_task in close_tasks][-1]
    if text := interruption_text(close_report):
        print_notice(text)
    return _signal_exit_code(signals) if close_report.turns else 0


def _signal_exit_code(signals: Signals) -> int:
    return 128 + (signals.number or signal.SIGTERM)


def interruption_text(report: CloseReport) -> str:
    """Describe unfinished turns; empty if there are none."""
    if not report.turns:
        return ""
    commands = ", ".join(f"`{session_command('chat', key)}`" for key in report.turns)
    return f"The answer is not finished. All messages are stored; resume with {commands}."
