"""Open an agent from settings and options, and close it when the program ends."""

import asyncio
import os
import shlex
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from msgspec import Struct
from msgspec.structs import replace

from stenolog.agent.instance import AgentInstance, AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.agent.scheduler import CloseReport
from stenolog.agent.spec import AgentSpec
from stenolog.catalog.background_catalog import BackgroundCatalog, Heads
from stenolog.cli.config import Options, read_settings
from stenolog.cli.output import error_sentence, one_line, plural
from stenolog.errors import ModelRefused, StenologError, UsageError
from stenolog.providers.chat_model import ChatModel, Delta
from stenolog.sessions.folders import locate_sessions, other_namespaces
from stenolog.sessions.session_store import JSONLBackend
from stenolog.settings.conversion import CLI, MAIN, NO_STORE, model_of, spec_of, specs_of
from stenolog.settings.model_selection import LOCAL, OLLAMA, PROVIDERS, SCRIPTED, NoModel
from stenolog.settings.values import Settings
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import address, open_store
from stenolog.transfer.combined_store import CombinedStore, StorePlace
from stenolog.transfer.viewed_places import ViewedPlace, index_file, open_unchanged

T = TypeVar("T")

CHANNEL: Final = CLI
SENDER: Final = "default"
SHUTDOWN_SECONDS: Final = 10.0
"""Seconds that a running turn may take to finish when the program ends."""
_NOTICE_SECONDS: Final = 0.7
_CANCEL_SECONDS: Final = 3.0
"""Maximum seconds to wait after all running turns were cancelled."""
NOT_SAVED: Final = 3
"""Exit code if messages could not be saved in any store."""


class OpenAgent(Struct, frozen=True, kw_only=True):
    """An open agent with its loop and settings."""

    loop: AgentLoop
    agent: AgentInstance
    settings: Settings


class _MissingModel:
    """Placeholder if no model was found, for sessions that choose a model themselves."""

    name = "no model"

    def __init__(self, words: str) -> None:
        self.words = words

    def stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Raise ModelRefused."""
        del messages, tools, schema, max_tokens
        raise ModelRefused("no model was found; choose one for this session with /model NAME")

    async def close(self) -> None:
        """Do nothing."""


def open_agent(
    options: Options, *, model_of_session: bool = False, only_look: bool = False
) -> OpenAgent:
    """Open the agent of these options, inside an event loop. Raises ClickException, StenologError.

    With `model_of_session` no model needs to be found now; `session_model` checks later whether the
    session has one. With `only_look` nothing is written and no old sessions are imported.
    """
    settings = read_settings(options.config)
    spec = _agent_spec(settings, options)
    found = _model(settings, spec.model)
    model: ChatModel
    if isinstance(found, NoModel):
        if not model_of_session:
            raise click.ClickException(found.text)
        model = _MissingModel(found.text)
    else:
        model = found
    agent = (_open_read_only if only_look else _open_instance)(settings, spec, model)
    try:
        loop = AgentLoop(AgentRegistry([agent]))
    except BaseException:
        agent.close_stores()
        raise
    return OpenAgent(loop=loop, agent=agent, settings=settings)


def open_agents(options: Options, settings: Settings, *, channel: str) -> list[AgentInstance]:
    """Open all agents of the settings, `[agent]` first. Raises the same errors as open_agent.

    The options override the settings of each agent. If one agent cannot be opened, none is.
    """
    specs = specs_of(settings, channel=channel)
    opened: list[AgentInstance] = []
    try:
        for spec in specs:
            model = _require_model(settings, options.model or spec.model)
            if options.workspace is not None and spec.sessions != NO_STORE:
                spec = replace(spec, sessions=options.workspace)
            opened.append(_open_instance(settings, spec, model))
    except BaseException:
        for agent in opened:
            agent.close_stores()
        raise
    return opened


def open_viewer(spec: AgentSpec, store: Store, *, heads: Heads) -> AgentInstance:
    """Return an agent that only shows the sessions of a read-only store, and closes the store.

    It needs no model, and its search index is built in the background.
    """
    agent = AgentInstance(
        replace(spec, memory=False),
        model=_MissingModel("the sessions are shown read-only"),
        sessions=JSONLBackend(store),
    )
    agent.catalog.close()
    agent.catalog = BackgroundCatalog(store, heads=heads)
    return agent


def open_viewers(options: Options, settings: Settings, cache: Path) -> list[AgentInstance]:
    """Open the sessions of all agents of the settings read-only. Raises StenologError."""
    opened: list[AgentInstance] = []
    try:
        for spec in specs_of(settings, channel=CHANNEL):
            if options.workspace is not None:
                spec = replace(spec, sessions=options.workspace)
            opened.append(_open_viewer_of(spec, cache))
    except BaseException:
        for agent in opened:
            agent.close_stores()
        raise
    return opened


def _open_viewer_of(spec: AgentSpec, cache: Path) -> AgentInstance:
    place = locate_sessions(spec.sessions, spec.id)
    found = address(place.where)
    is_url = found.engine == "postgresql"
    where = os.fspath(found.path) if is_url else str(Path(found.path).absolute())
    inner: Store
    if found.engine == "memory" or (
        found.engine == "jsonl" and not Path(where, place.namespace).exists()
    ):
        inner = InMemoryStore()
    else:
        inner = open_unchanged(place.where, namespace=place.namespace)
    catalog = index_file([ViewedPlace(program=place.namespace, where=where)], cache)
    store = CombinedStore([StorePlace(store=inner)], catalog=catalog)
    return open_viewer(spec, store, heads=store.heads)


def session_model(opened: OpenAgent, key: str) -> ChatModel:
    """Return the model that answers in a session. Raises ClickException if it has none."""
    problems: list[str] = []
    model = opened.agent.model_of(opened.agent.resolve_key(key), problems.append)
    if isinstance(model, _MissingModel):
        raise click.ClickException("\n".join([*map(error_sentence, problems), model.words]))
    return model


def _open_instance(settings: Settings, spec: AgentSpec, model: ChatModel) -> AgentInstance:
    if model.name == SCRIPTED:
        # Answers of the scripted model are only for trying out and must not become notes.
        spec = replace(spec, consolidation=False)
    return AgentInstance.open(
        spec, model=model, open_model=lambda wanted: _named_model(settings, wanted)
    )


def _open_read_only(settings: Settings, spec: AgentSpec, model: ChatModel) -> AgentInstance:
    """Open the agent's sessions read-only."""
    place = locate_sessions(spec.sessions, spec.id)
    return AgentInstance(
        replace(spec, memory=False),
        model=model,
        sessions=JSONLBackend(open_store(place.where, namespace=place.namespace, read_only=True)),
        open_model=lambda wanted: _named_model(settings, wanted),
    )


def _agent_spec(settings: Settings, options: Options) -> AgentSpec:
    name = None if options.agent == MAIN else options.agent
    # An agent with sessions but without settings uses those of [agent].
    spec = spec_of(settings, name if name in settings.agents else None, channel=CHANNEL)
    if options.workspace is not None:
        spec = replace(spec, sessions=options.workspace)
    if options.model is not None:
        spec = replace(spec, model=options.model)
    if spec.id != name:
        there = sorted({*settings.agents, *_agents_in(spec.sessions)})
        if name not in there:
            known = f"known agents: {', '.join(there)}" if there else "no agents are configured"
            raise UsageError(
                f"there is no agent {name!r}; {known}. To create it, add [agents.{name}] to the "
                "config file"
            )
    return replace(spec, id=name)


def _agents_in(sessions: str) -> Sequence[str]:
    """Return the agents that have sessions there; none if the store cannot be read."""
    try:
        return other_namespaces(sessions).agents
    except StenologError:
        return ()


def _require_model(settings: Settings, wanted: str) -> ChatModel:
    """Return the model of this name; without a name, one that is found.

    Raises ClickException, UsageError.
    """
    found = _model(settings, wanted)
    if isinstance(found, NoModel):
        raise click.ClickException(found.text)
    return found


def _named_model(settings: Settings, wanted: str) -> ChatModel:
    """Return the model of this name. Raises UsageError."""
    found = _model(settings, wanted)
    if isinstance(found, NoModel):
        raise UsageError(f"models.{wanted} does not name a model, and no model was found")
    return found


def _model(settings: Settings, wanted: str) -> ChatModel | NoModel:
    """Return the model of this name or NoModel.

    Raises UsageError, if possible with a suggestion.
    """
    try:
        return model_of(settings, wanted)
    except UsageError as error:
        near = _similar_model(settings, wanted)
        if not near:
            raise
        raise UsageError(f"there is no model {wanted!r}; did you mean {near!r}?") from error


def _similar_model(settings: Settings, wanted: str) -> str:
    """Return a similar known name; empty if there is none or if the name is known."""
    first, slash, rest = wanted.strip().partition("/")
    servers = (OLLAMA, *(one.name for one in PROVIDERS))
    exact = {name.casefold(): name for name in (SCRIPTED, LOCAL, *settings.models)}
    known = dict.fromkeys(servers) if slash else {**exact, **dict.fromkeys(servers)}
    if first in (*servers, *exact.values()) or first.startswith((f"{LOCAL}:", "http:", "https:")):
        return ""
    found = get_close_matches(first.casefold(), known, 1)
    return f"{exact.get(found[0], found[0])}{slash}{rest}" if found else ""


# --- shutdown --------------------------------------------------------------------------------


class Signals:
    """Signals that ask the program to end."""

    def __init__(self) -> None:
        self.received = asyncio.Event()
        """Set when the first signal arrives."""
        self.number = 0
        """Number of the last signal, or 0."""
        self._loop = asyncio.get_running_loop()
        self._numbers: list[int] = []
        self._repeated = asyncio.Event()
        self.watch(signal.SIGTERM, signal.SIGHUP)

    def watch(self, *numbers: int) -> None:
        """Handle these signals too."""
        for number in numbers:
            self._loop.add_signal_handler(number, self._on_signal, number)
            self._numbers.append(number)

    def ignore(self) -> None:
        """Restore the default action of all handled signals."""
        while self._numbers:
            self._loop.remove_signal_handler(self._numbers.pop())

    async def run_until_signal(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `work`, or None if a signal cancelled it."""
        task = asyncio.create_task(work)
        asked = asyncio.create_task(self.received.wait())
        tasks: set[asyncio.Task[Any]] = {task, asked}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            asked.cancel()
            task.cancel()
            await asyncio.wait(tasks)
        return None

    async def next_signal(self) -> None:
        """Wait for the next signal."""
        self._repeated.clear()
        await self._repeated.wait()

    def _on_signal(self, number: int) -> None:
        self.number = number
        self.received.set()
        self._repeated.set()


async def close_agent(opened: OpenAgent, signals: Signals, say: Callable[[str], Any]) -> int:
    """Let running turns finish, close everything and return the exit code.

    `say` reports unfinished turns and unsaved messages. Another signal cancels the turns at once. A
    turn that does not end even then is abandoned: all acknowledged messages are in the log.
    """
    loop = opened.loop
    signals.watch(signal.SIGINT)
    closings = [asyncio.create_task(loop.close(patience=SHUTDOWN_SECONDS))]
    another = asyncio.create_task(signals.next_signal())
    tasks: set[asyncio.Task[Any]] = {*closings, another}
    done, _ = await asyncio.wait(
        tasks, timeout=_NOTICE_SECONDS, return_when=asyncio.FIRST_COMPLETED
    )
    if not done:
        what = "the answer" if loop.busy else "a summary"
        limit = f"{SHUTDOWN_SECONDS:.0f} s"
        say(f"Waiting up to {limit} for {what} to finish. Press Ctrl-C to stop now.")
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if not closings[0].done():
        unfinished = tuple(sorted(loop.busy))
        closings.append(asyncio.create_task(loop.close(patience=0)))
        done, _ = await asyncio.wait(closings, timeout=_CANCEL_SECONDS)
        if len(done) < len(closings):
            say(
                interruption_text(CloseReport(turns=unfinished))
                or "Stopped before everything was closed."
            )
            os._exit(_signal_exit_code(signals))
    another.cancel()
    signals.ignore()
    left = [await one for one in closings][-1]
    words = interruption_text(left)
    if words:
        say(words)
    if left.not_saved:
        return NOT_SAVED
    return _signal_exit_code(signals) if left.turns else 0


def _signal_exit_code(signals: Signals) -> int:
    return 128 + (signals.number or signal.SIGTERM)


def interruption_text(left: CloseReport) -> str:
    """Describe unfinished turns and unsaved messages; empty if there are none."""
    words = []
    if left.turns:
        ways = ", ".join(f"`steno chat {shlex.quote(one_line(key))}`" for key in left.turns)
        words.append(f"The answer is not finished. All messages are stored; resume with {ways}.")
    if left.not_saved:
        words.append(f"Lost: {plural(left.not_saved, 'message')} could not be saved.")
    return "\n".join(words)
