"""One agent: its model, tools, sessions, context and memory, opened and closed together."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, tzinfo
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from stenolog.agent.blocking import BlockingAsk
from stenolog.agent.built_in import BUILT_IN
from stenolog.agent.calling import Calling
from stenolog.agent.spec import AgentSpec
from stenolog.agent.tools import Here, Tool, as_tools
from stenolog.catalog import Catalog, open_catalog
from stenolog.context.compaction import Compaction
from stenolog.context.context import Context
from stenolog.errors import StenologError, UsageError
from stenolog.memory.memory import AGENT, Memory
from stenolog.memory.recall import Recalled
from stenolog.providers.base import ChatModel, KnowsItsContext
from stenolog.sessions.aliases import Aliases
from stenolog.sessions.folders import NOTES
from stenolog.sessions.opening import open_sessions
from stenolog.sessions.session_store import SessionStore
from stenolog.stores import reports
from stenolog.stores.base import Store
from stenolog.stores.opening import open_store

OpenModel = Callable[[str], ChatModel]

_logger = logging.getLogger("stenolog")


class AgentInstance:
    """An agent that is open. `close` lets go of everything but the models' event loop."""

    def __init__(
        self,
        spec: AgentSpec,
        *,
        model: ChatModel,
        sessions: SessionStore,
        notes: Store | None = None,
        open_model: OpenModel | None = None,
        tools: Sequence[Tool | Callable[..., Any]] = (),
    ) -> None:
        """Over open sessions and notes, which it closes. Without notes it has no memory."""
        self.id = spec.id
        self.spec = spec
        self.sessions = sessions
        self.notes = notes
        self.on_compaction: Callable[[Compaction], None] | None = None
        """Told of every compaction, in the thread that made it."""
        self._open_model = open_model
        self._models = {"": model}
        self._contexts: dict[str, Context] = {}
        self._tools = as_tools([*BUILT_IN, *tools])
        self.calling = Calling(
            tools=self._tools, timeout=spec.tool_timeout, limit=spec.tool_output_limit
        )
        self.ask = BlockingAsk(lambda: self.model)
        self.catalog: Catalog | None = None
        self.memory: Memory | None = None
        self.problems: list[str] = []
        """What does not work in this run, in words for the user."""
        store = sessions.store
        self._aliases = None if store is None else Aliases(store)
        if store is None:
            why = "; ".join(sessions.health().problems)
            self.problems.append(f"sessions are kept as plain JSON for this run: {why}")
            return
        self.catalog = open_catalog(store)
        if spec.memory and notes is None:
            self.problems.append("the notes cannot be opened, so nothing is remembered in this run")
        if notes is not None:
            self.memory = Memory(
                store,
                notes,
                agent=spec.id or AGENT,
                threads=True,
                ask=self.ask,
                consolidation=spec.consolidation,
                half_life_days=spec.half_life_days,
                zone=_zone(spec.zone),
            )

    @classmethod
    def open(
        cls,
        spec: AgentSpec,
        *,
        model: ChatModel,
        open_model: OpenModel | None = None,
        tools: Sequence[Tool | Callable[..., Any]] = (),
    ) -> "AgentInstance":
        """Open what the spec names. Raises UsageError; a store that fails is stood in for."""
        _zone(spec.zone)
        sessions = open_sessions(spec.sessions, agent=spec.id)
        notes = None
        try:
            notes = _open_notes(spec, sessions)
            return cls(
                spec,
                model=model,
                sessions=sessions,
                notes=notes,
                open_model=open_model,
                tools=tools,
            )
        except BaseException:
            sessions.close()
            if notes is not None:
                notes.close()
            raise

    @property
    def store(self) -> Store | None:
        """The store beneath the sessions; None where a stand-in keeps them."""
        return self.sessions.store

    @property
    def model(self) -> ChatModel:
        """The model of sessions that have no other."""
        return self._models[""]

    def own_key(self, key: str) -> str:
        """The key itself, or the one that it is an alias of."""
        return key if self._aliases is None else self._aliases.own_key(key)

    def model_of(self, key: str) -> ChatModel:
        """The model of a session: the one its user chose, else the agent's."""
        chosen = ""
        if self.store is not None:
            with suppress(StenologError):
                named = self.store.info(key).meta.get("model")
                chosen = named if isinstance(named, str) else ""
        return self._opened(chosen) if chosen else self.model

    def choose_model(self, key: str, name: str) -> ChatModel:
        """Have a session use another model from now on. Raises UsageError."""
        if self.store is None:
            raise UsageError("the model cannot be changed while the store is stood in for")
        model = self._opened(name)
        self.store.set_meta(key, model=name)
        return model

    def _opened(self, name: str) -> ChatModel:
        if name not in self._models:
            if self._open_model is None:
                raise UsageError(f"this agent has one model only, {self.model.name}")
            self._models[name] = self._open_model(name)
        return self._models[name]

    def context(self, model: ChatModel) -> Context:
        """What is sent to this model of a session."""
        if model.name not in self._contexts:
            limits = self.spec.limits
            if isinstance(model, KnowsItsContext):
                limits = limits.at_most(model.context)
            self._contexts[model.name] = Context(
                self.sessions,
                self.ask,
                limits=limits,
                needs=self.spec.needs,
                model=model.name,
                catalog=self.catalog,
                system=self.spec.system,
                tools=self.definitions,
                on_event=self._compacted,
            )
        return self._contexts[model.name]

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The tools, as a model is told of them."""
        return [one.definition() for one in self._tools.values()]

    def tool(self, name: str) -> Tool | None:
        """The tool of this name."""
        return self._tools.get(name)

    def here(self, key: str) -> Here:
        """What a tool that is called in a session may know of it."""
        found = None if self.memory is None else lambda question: self.recall(question, key)
        return Here(key=key, agent=self.id, recall=found)

    def recall(self, question: str, key: str) -> Recalled:
        """What is remembered for a question; nothing where there is no memory, or it fails."""
        if self.memory is None or not question.strip():
            return Recalled()
        try:
            return self.memory.recall(question, key=key, budget=self.spec.recall_tokens)
        except StenologError as error:
            _logger.warning("nothing could be recalled for %r: %s", key, error)
            return Recalled()

    def health(self) -> Mapping[str, object]:
        """What the stores say of themselves, for who watches over it."""
        told = self.sessions.health()
        return {"ok": told.ok and not self.problems, "problems": [*told.problems, *self.problems]}

    def close_stores(self) -> None:
        """Close memory, index, notes and sessions. Raises nothing; a second call does nothing."""
        self.ask.close()
        for part in (self.memory, self.catalog, self.notes, self.sessions):
            if part is not None:
                try:
                    part.close()
                except Exception:
                    _logger.exception("closing %r failed", part)

    async def close(self) -> None:
        """Close the models, and all else that `close_stores` does. Raises nothing."""
        self.ask.close()
        for model in self._models.values():
            try:
                await model.close()
            except Exception:
                _logger.exception("closing the model %s failed", model.name)
        self.close_stores()

    def _compacted(self, done: Compaction) -> None:
        if self.on_compaction is not None:
            self.on_compaction(done)


def _open_notes(spec: AgentSpec, sessions: SessionStore) -> Store | None:
    """The notes; None where there is to be no memory, or they cannot be opened."""
    if not spec.memory or sessions.store is None:
        return None
    try:
        return open_store(spec.sessions, namespace=NOTES)
    except StenologError as error:
        reports.warning("the notes cannot be opened, so nothing is remembered: %s", error)
        return None


def _zone(name: str) -> tzinfo:
    if not name:
        found = datetime.now().astimezone().tzinfo
        assert found is not None
        return found
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise UsageError(f"zone {name!r}: there is no such time zone; try Europe/Berlin") from error
