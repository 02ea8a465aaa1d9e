"""From settings and options to an agent that is open, and from there to one that is closed."""

import asyncio
import os
import shlex
import signal
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from msgspec import Struct
from msgspec.structs import replace

from stenolog.agent.instance import AgentInstance
from stenolog.agent.loop import AgentLoop
from stenolog.agent.registry import AgentRegistry
from stenolog.agent.spec import SYSTEM, AgentSpec
from stenolog.agent.turns import Left
from stenolog.cli.agent_options import Options
from stenolog.cli.config import settings_of
from stenolog.cli.text import one_line
from stenolog.errors import StenologError, UsageError
from stenolog.providers.base import ChatModel
from stenolog.providers.finding import (
    NoModel,
    find_model,
    ollama_address,
    open_model,
    probe_ollama,
)
from stenolog.sessions.folders import others_in
from stenolog.settings import AgentSettings, ModelSettings, Settings
from stenolog.settings.applied import limits_of, needs_of

T = TypeVar("T")

CHANNEL: Final = "cli"
SENDER: Final = "default"
MAIN: Final = "main"
PATIENCE: Final = 10.0
"""So many seconds a turn in flight has when the program is asked to end."""
_SOON: Final = 0.7
_AT_ONCE: Final = 3.0
"""So many seconds it takes at most to cut everything off."""
NOT_SAVED: Final = 3
"""The exit code where something was said that is in no store."""


class Opened(Struct, frozen=True, kw_only=True):
    """An agent that can be talked to."""

    loop: AgentLoop
    agent: AgentInstance
    settings: Settings


def open_agent(options: Options) -> Opened:
    """The agent of these options, inside of an event loop. Raises ClickException, StenologError."""
    settings = settings_of(options.config)
    name = None if options.agent == MAIN else options.agent
    chosen = _settings_of_agent(settings, name, options)
    model = _model(settings, chosen.model)
    agent = AgentInstance.open(
        _spec(settings, chosen, name),
        model=model,
        open_model=lambda wanted: _model(settings, wanted),
    )
    try:
        loop = AgentLoop(AgentRegistry([agent]))
    except BaseException:
        agent.close_stores()
        raise
    return Opened(loop=loop, agent=agent, settings=settings)


def _settings_of_agent(settings: Settings, name: str | None, options: Options) -> AgentSettings:
    found = settings.agent
    if name is not None:
        found = settings.agents.get(name, settings.agent)
    if options.workspace is not None:
        found = replace(found, sessions=options.workspace)
    if options.model is not None:
        found = replace(found, model=options.model)
    if name is not None and name not in settings.agents:
        there = sorted({*settings.agents, *_agents_in(found.sessions)})
        if name not in there:
            known = f"there are {', '.join(there)}" if there else "there are none with a name"
            raise UsageError(f"there is no agent {name!r}; {known}. [agents.{name}] makes one")
    return found


def _agents_in(sessions: str) -> Sequence[str]:
    """Those that have sessions there; none where there is nothing yet."""
    try:
        return others_in(sessions).agents
    except StenologError:
        return ()


def _spec(settings: Settings, agent: AgentSettings, name: str | None) -> AgentSpec:
    memory = settings.memory
    return AgentSpec(
        sessions=agent.sessions,
        id=name,
        model=agent.model,
        system=agent.system or SYSTEM,
        limits=limits_of(agent),
        needs=needs_of(agent),
        max_iterations=agent.max_iterations,
        tool_timeout=agent.tool_timeout,
        tool_output_limit=agent.tool_output_limit,
        consolidation=memory.consolidation,
        recall_tokens=memory.recall_tokens,
        half_life_days=memory.half_life_days,
        zone=memory.zone,
    )


def _model(settings: Settings, wanted: str) -> ChatModel:
    """The model of this name; empty: one is found. Raises ClickException, UsageError."""
    own = settings.models.get(wanted)
    told = own or ModelSettings(model=wanted)
    found = find_model(
        told.model,
        environment=settings.keys,
        base_url=told.base_url,
        key_name=told.key_env,
        ollama=lambda: probe_ollama(ollama_address(settings.keys)),
        weights=_weights,
    )
    if isinstance(found, NoModel):
        raise click.ClickException(found.text)
    return open_model(
        found,
        environment=settings.keys,
        key=told.key,
        timeout=told.timeout,
        first_byte_timeout=told.first_byte_timeout,
        retries=told.retries,
        headers=told.headers,
    )


def _weights() -> Path | None:
    # Its client is slow to import, and few need it.
    from stenolog.providers.local import find_weights, is_installed

    return find_weights() if is_installed() else None


# --- the end ---------------------------------------------------------------------------------


class Signals:
    """What the system asks for: to end."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        """Set from the first one on."""
        self.number = 0
        """The signal that came last; 0: none."""
        self._loop = asyncio.get_running_loop()
        self._numbers: list[int] = []
        self._again = asyncio.Event()
        self.watch(signal.SIGTERM, signal.SIGHUP)

    def watch(self, *numbers: int) -> None:
        """Be told of these signals, too."""
        for number in numbers:
            self._loop.add_signal_handler(number, self._came, number)
            self._numbers.append(number)

    def ignore(self) -> None:
        """Be told no more; what they do by themselves, they do again."""
        while self._numbers:
            self._loop.remove_signal_handler(self._numbers.pop())

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What it returns; None where it was cancelled because the program is to end."""
        task = asyncio.create_task(work)
        asked = asyncio.create_task(self.asked.wait())
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

    async def another(self) -> None:
        """Wait for one more."""
        self._again.clear()
        await self._again.wait()

    def _came(self, number: int) -> None:
        self.number = number
        self.asked.set()
        self._again.set()


async def close_agent(opened: Opened, signals: Signals, say: Callable[[str], Any]) -> int:
    """Let turns in flight end, then close everything; the exit code. `say` tells what is left.

    Another signal meanwhile ends them at once. What does not end even then is left as it is: every
    message that was acknowledged is in the log.
    """
    loop = opened.loop
    signals.watch(signal.SIGINT)
    closings = [asyncio.create_task(loop.close(patience=PATIENCE))]
    another = asyncio.create_task(signals.another())
    tasks: set[asyncio.Task[Any]] = {*closings, another}
    done, _ = await asyncio.wait(tasks, timeout=_SOON, return_when=asyncio.FIRST_COMPLETED)
    if not done:
        what = "the answer is" if loop.busy else "a summary is"
        say(f"Ending: {what} being finished, for up to {PATIENCE:.0f} s; Ctrl-C ends it at once.")
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if not closings[0].done():
        unfinished = tuple(sorted(loop.busy))
        closings.append(asyncio.create_task(loop.close(patience=0)))
        done, _ = await asyncio.wait(closings, timeout=_AT_ONCE)
        if len(done) < len(closings):
            say(words_of_left(Left(turns=unfinished)) or "Ended while it was closing.")
            os._exit(_ended_by(signals))
    another.cancel()
    signals.ignore()
    # The call that cut the turns off knows of them, the other one may not.
    left = max([await one for one in closings], key=lambda one: len(one.turns))
    words = words_of_left(left)
    if words:
        say(words)
    if left.not_saved:
        return NOT_SAVED
    return _ended_by(signals) if left.turns else 0


def _ended_by(signals: Signals) -> int:
    return 128 + (signals.number or signal.SIGTERM)


def words_of_left(left: Left) -> str:
    """What a closed agent leaves, and what becomes of it; empty where that is nothing."""
    words = []
    if left.turns:
        ways = ", ".join(f"`steno chat {shlex.quote(one_line(key))}`" for key in left.turns)
        words.append(f"Left unanswered, with all messages stored; {ways} goes on.")
    if left.not_saved:
        what = "1 message is" if left.not_saved == 1 else f"{left.not_saved:,} messages are"
        words.append(f"Lost: {what} in no store, because nothing could be written.")
    return "\n".join(words)
