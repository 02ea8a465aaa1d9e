"""One agent: its model, tools, sessions, context and memory, opened and closed together."""

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from operator import itemgetter
from typing import Any, Final, Self

from msgspec.structs import replace

from stenolog.agent.spec import AgentSpec
from stenolog.agent.tools import BUILT_IN_TOOLS, Tool, ToolContext, ToolRunner, collect_tools
from stenolog.agent.turn_events import DEFAULT_OPTIONS, TurnOptions, tool_name
from stenolog.catalog import Catalog, open_catalog
from stenolog.context.context import Context
from stenolog.context.summarize import SummaryReport
from stenolog.context.window import Limits
from stenolog.errors import StenologError, UsageError
from stenolog.memory.consolidation import ConsolidationReport
from stenolog.memory.facade import DEFAULT_AGENT, Memory, load_zone
from stenolog.memory.recall import RecallResult
from stenolog.memory.scopes import Scope, scope_of
from stenolog.providers.chat_model import ChatModel, CountedAnswer, HasContextWindow, StreamedAnswer
from stenolog.records import SessionInfo
from stenolog.sessions.aliases import Aliases
from stenolog.sessions.folders import NOTES
from stenolog.sessions.session_store import SessionStore, check_sessions, fallback_reason
from stenolog.stores import log_reports
from stenolog.stores.base import SessionView, Store, find_info, find_view
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store
from stenolog.transfer.open_sessions import open_sessions

ModelOpener = Callable[[str], ChatModel]

CHOSEN_MODEL_FIELD: Final = "chat_model"
"""Meta field of a session that holds the name of the model chosen by the user."""

_logger = logging.getLogger("stenolog")


class AgentInstance:
    """An open agent, safe to use from several threads. `close` releases all resources."""

    def __init__(
        self,
        spec: AgentSpec,
        *,
        model: ChatModel,
        sessions: SessionStore,
        notes: Store | None = None,
        open_model: ModelOpener | None = None,
        tools: Sequence[Tool | Callable[..., Any]] = (),
    ) -> None:
        """Create an agent from open stores.

        The agent's `close` also closes these stores. Without `notes` the agent has no memory.
        Raises UsageError if `sessions` is not a SessionStore.
        """
        check_sessions(sessions)
        self.id = spec.id
        self.spec = spec
        self.sessions = sessions
        self.notes = notes
        self.on_summary: Callable[[SummaryReport], None] = lambda _: None
        """Callback for every summary; it runs in the thread that made the summary."""
        self._zone = load_zone(spec.zone)
        self._open_model = open_model
        self._models_mutex = threading.Lock()
        self._models = {"": model}
        self._contexts: dict[str, Context] = {}
        self._tools = collect_tools([*BUILT_IN_TOOLS, *tools]) if spec.tools else {}
        self.tool_runner = ToolRunner(self._tools, spec)
        self.blocking_model = BlockingModel(model)
        self.memory: Memory | None = None
        self.problems: list[str] = []
        """Features that do not work in this run, as sentences for the user."""
        store = sessions.store
        self._aliases = Aliases(store)
        if fallback_reason(store) is not None:
            reasons = "; ".join(sessions.health().problems)
            self.problems.append(f"memory is off in this run: {reasons}")
        elif spec.memory and notes is None:
            self.problems.append("the notes cannot be opened, so memory is off in this run")
        if notes is not None:
            self.memory = Memory(
                store,
                notes,
                agent=spec.id or DEFAULT_AGENT,
                threads=True,
                complete=self.blocking_model,
                consolidation=spec.consolidation,
                half_life_days=spec.half_life_days,
                zone=self._zone,
            )
        self.catalog: Catalog = open_catalog(store)

    @classmethod
    def open(
        cls,
        spec: AgentSpec,
        *,
        model: ChatModel,
        open_model: ModelOpener | None = None,
        tools: Sequence[Tool | Callable[..., Any]] = (),
    ) -> "AgentInstance":
        """Open the stores that the spec names, and return the agent.

        If the sessions cannot be opened, `open_sessions` uses the fallback store. Raises UsageError
        for an invalid spec.
        """
        load_zone(spec.zone)
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
            for store in (sessions, notes):
                if store is not None:
                    with suppress(Exception):
                        store.close()
            raise

    @property
    def store(self) -> Store:
        """The store of the sessions."""
        return self.sessions.store

    @property
    def shared_place(self) -> str | None:
        """Path or URL of the session store; None if other processes cannot share the store."""
        if fallback_reason(self.store) is not None or isinstance(self.store, InMemoryStore):
            return None
        return self.spec.sessions

    def resolve(self, key: str) -> tuple[str, SessionView | None]:
        """Return the key of the session that `key` names, and a view of that session.

        The returned key differs from `key` only if `key` is an alias. The view is None if the
        session does not exist.
        """
        view = find_view(self.store, key)
        if view is None and (session_key := self.resolve_key(key)) != key:
            return session_key, find_view(self.store, session_key)
        return key, view

    def resolve_key(self, key: str) -> str:
        """Return the key of the session that `key` names: `key` itself unless it is an alias."""
        return self._aliases.resolve_key(key)

    # --- models ------------------------------------------------------------------------------

    @property
    def model(self) -> ChatModel:
        """The default model, for sessions whose user chose no other model."""
        return self._models[""]

    def model_for(self, name: str) -> ChatModel:
        """Return the model with this name. Raises UsageError if users may not choose it."""
        if name in ("", "default", self.spec.model, self.model.name):
            return self.model
        if name not in self.spec.models:
            raise UsageError(f"{name!r} is not a model of this agent")
        return self._open_model_once(name)

    def model_of(self, key: str, notify: Callable[[str], None] | None = None) -> ChatModel:
        """Return the model that the session's user chose, otherwise the default model.

        `notify`: see `chosen_model`.
        """
        meta: Mapping[str, Any] = {}
        with suppress(StenologError):
            meta = self.store.info(key).meta
        return self.chosen_model(meta, notify)

    def chosen_model(
        self, meta: Mapping[str, Any], notify: Callable[[str], None] | None = None
    ) -> ChatModel:
        """Return the model that the meta of a session names, otherwise the default model.

        If the named model cannot be opened, `notify` receives the reason, and the default model is
        returned.
        """
        model_name = meta.get(CHOSEN_MODEL_FIELD)
        if not isinstance(model_name, str) or not model_name:
            return self.model
        try:
            return self._open_model_once(model_name)
        except StenologError as error:
            if notify is not None:
                notify(f"{error}; {self.model.name} answers instead")
            return self.model

    def choose_model(self, key: str, name: str, *, any_model: bool) -> ChatModel:
        """Set the model of a session.

        `any_model` allows models that are not in the agent's list. The name "default" selects the
        default model. Raises UsageError if the model is not allowed or cannot be opened.
        """
        if name in ("default", self.spec.model):
            self.store.set_meta(key, **{CHOSEN_MODEL_FIELD: None})
            return self.model
        if not any_model and name not in self.spec.models:  # guard: model-allow-list
            allowed_models = ", ".join(self.spec.models) or "only its own"
            raise UsageError(f"{name!r} is not a model of this agent; its models: {allowed_models}")
        model = self._open_model_once(name)
        self.store.set_meta(key, **{CHOSEN_MODEL_FIELD: name})
        return model

    def _open_model_once(self, name: str) -> ChatModel:
        with self._models_mutex:
            if name not in self._models:
                if self._open_model is None:
                    raise UsageError(f"this agent has only one model, {self.model.name}")
                self._models[name] = self._open_model(name)
            return self._models[name]

    def context(self, model: ChatModel, options: TurnOptions = DEFAULT_OPTIONS) -> Context:
        """Return the Context that builds requests and summaries for this model and options."""
        with self._models_mutex:
            if model.name not in self._contexts:
                limits = self.spec.limits
                if isinstance(model, HasContextWindow):
                    limits = limits.at_most(model.context)
                self._contexts[model.name] = self._make_context(model, DEFAULT_OPTIONS, limits)
            default_context = self._contexts[model.name]
        if options.is_default:
            return default_context
        return self._make_context(model, options, default_context.limits)

    def _make_context(self, model: ChatModel, options: TurnOptions, limits: Limits) -> Context:
        return Context(
            self.store,
            partial(self.blocking_model, model=model),
            limits=limits,
            # The models of the agent read only OpenAI's chat format: see ChatModel.
            needs=replace(self.spec.needs, chat_only=True),
            model=model.name,
            catalog=self.catalog,
            system=self.spec.system if options.system is None else options.system,
            tools=self.offered_tools(options),
            on_event=lambda report: self.on_summary(report),
        )

    # --- tools and memory --------------------------------------------------------------------

    @property
    def tool_definitions(self) -> list[dict[str, Any]]:
        """Definitions of the agent's tools, in OpenAI's format."""
        return [tool.definition() for tool in self._tools.values()]

    def offered_tools(self, options: TurnOptions) -> list[dict[str, Any]]:
        """Return the tools of a turn: the client's, then the agent's tools with other names."""
        client_names = options.client_tool_names
        agent_tools = self.tool_definitions if options.own_tools else []
        return [dict(definition) for definition in options.tools] + [
            definition for definition in agent_tools if tool_name(definition) not in client_names
        ]

    def tool(self, name: str) -> Tool | None:
        """Return the tool with this name, or None."""
        return self._tools.get(name)

    def tool_context(self, key: str, *, sender: str | None = "") -> ToolContext:
        """Return the ToolContext for tools that run in a session. `sender`: see `memory_scope`."""
        recall = None if self.memory is None else partial(self.recall, key=key, sender=sender)
        return ToolContext(key=key, agent=self.id, recall=recall, zone=self._zone)

    def memory_scope(
        self, key: str, *, sender: str | None = "", info: SessionInfo | None = None
    ) -> Scope:
        """Return the memory scope that a verified sender may see in a session.

        The scope is the sender's scope if the session is empty or belongs to the sender, otherwise
        the scope of the session alone. If `sender` is None, the owner of the session counts as the
        sender, for turns whose answer only the owner gets. `info`: info of the session, if the
        caller has read it. With `info`, `key` must not be an alias. Raises UsageError if the agent
        has no memory.
        """
        if self.memory is None:
            raise UsageError("this agent has no memory in this run")
        scope = self.memory.scope(key=key)
        if sender and scope.of == "session":
            session_info = info or find_info(self.store, self.resolve_key(key))
            if session_info is None or session_info.count == 0:
                return Scope(agent=scope.agent, who=sender, of="sender")
        if scope.of == "sender" and sender is not None and sender != scope.who:  # guard: own-memory
            return scope_of(key if info is not None else self.resolve_key(key), agent=scope.agent)
        return scope

    def recall(
        self, question: str, key: str, *, sender: str | None = "", info: SessionInfo | None = None
    ) -> RecallResult:
        """Return memories for a question.

        The result is empty if the agent has no memory or the search fails. `sender` is the user
        who sees the result. `memory_scope` explains `sender` and `info`.
        """
        if self.memory is None or not question.strip():
            return RecallResult()
        try:
            scope = self.memory_scope(key, sender=sender, info=info)
            budget = self.spec.recall_tokens
            return self.memory.recall(question, scope=scope, budget=budget, asking=key)
        except StenologError as error:
            _logger.warning("recall failed for %r: %s", key, error)
            return RecallResult()

    def consolidate(self, key: str) -> ConsolidationReport:
        """Make notes from the finished turns of a session, with at most one call to its model."""
        if self.memory is None:
            return ConsolidationReport()
        with self.blocking_model.use_model(self.model_of(key)):
            return self.memory.consolidate(key, most_calls=1)

    def health(self) -> Mapping[str, object]:
        """Return the health of the stores, for monitoring."""
        health = self.sessions.health()
        return {
            "ok": health.ok and not self.problems,
            "problems": [*health.problems, *self.problems],
        }

    # --- closing -----------------------------------------------------------------------------

    def close_stores(self) -> None:
        """Close memory, catalog and stores. Errors are logged. A second call does nothing."""
        self.blocking_model.close()
        for resource in (self.memory, self.catalog, self.notes, self.sessions):
            if resource is not None:
                try:
                    resource.close()
                except Exception:
                    _logger.exception("closing %r failed", resource)

    async def close_models(self) -> None:
        """Close the models, in the event loop that used them. Errors are logged."""
        self.blocking_model.close()
        for model in self._models.values():
            try:
                await model.close()
            except Exception:
                _logger.exception("closing the model %s failed", model.name)

    async def close(self) -> None:
        """Close all resources. Errors are logged. A second call does nothing."""
        await self.close_models()
        self.close_stores()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


def _open_notes(spec: AgentSpec, sessions: SessionStore) -> Store | None:
    """Open the store of the notes; None if memory is disabled or the store cannot be opened."""
    if not spec.memory or fallback_reason(sessions.store) is not None:
        return None
    try:
        return open_store(spec.sessions, namespace=NOTES)
    except StenologError as error:
        log_reports.warning("the notes cannot be opened, so nothing is remembered: %s", error)
        return None


class AgentRegistry:
    """The open agents, each with its own sessions. An async context manager."""

    def __init__(self, agents: Sequence[AgentInstance]) -> None:
        """Create a registry; the first agent is the default.

        Raises UsageError if `agents` is empty or two agents have the same id.
        """
        if not agents:
            raise UsageError("a registry needs at least one agent")
        self._agents: dict[str | None, AgentInstance] = {}
        for agent in agents:
            if agent.id in self._agents:
                raise UsageError(f"there are two agents called {agent.id!r}; name them differently")
            self._agents[agent.id] = agent
        self._default_agent = agents[0]

    def __iter__(self) -> Iterator[AgentInstance]:
        return iter(self._agents.values())

    def agent(self, id: str | None = None) -> AgentInstance:
        """Return the agent with this id; None means the first agent.

        Raises UsageError for an unknown id.
        """
        if id is None:
            return self._default_agent
        if id not in self._agents:
            names = ", ".join(repr(name) for name in self._agents if name is not None) or "none"
            raise UsageError(f"there is no agent {id!r}; known agents: {names}")
        return self._agents[id]

    def route(self, channel: str, sender: str = "") -> AgentInstance:
        """Return the agent with the most specific matching route, otherwise the first agent."""
        ranked_agents = [(0, self._default_agent)]
        for instance in self:
            for route in instance.spec.routes:
                route_channel, _, route_sender = route.partition(":")
                if route_channel in ("", channel) and route_sender in ("", sender):
                    ranked_agents.append((2 * bool(route_sender) + bool(route_channel), instance))
        return max(ranked_agents, key=itemgetter(0))[1]

    async def close(self) -> None:
        """Close every agent. Errors are logged. A second call does nothing."""
        for instance in self:
            await instance.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


# --- model calls from threads ---------------------------------------------------------------------
# The threads that write summaries and notes need blocking calls to an async model.


class BlockingModel:
    """A blocking `CompletionFunction` for a ChatModel whose event loop runs in another thread."""

    def __init__(self, model: ChatModel) -> None:
        self._model = model
        self._thread = threading.local()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mutex = threading.Lock()
        self._requests: set[concurrent.futures.Future[str]] = set()
        self._closed = False

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the event loop that runs the model."""
        self._loop = loop

    @contextmanager
    def use_model(self, model: ChatModel) -> Iterator[None]:
        """Use another model in the current thread, inside the `with` block."""
        self._thread.model = model
        try:
            yield
        finally:
            del self._thread.model

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        model: ChatModel | None = None,
    ) -> str:
        """Return the model's answer.

        If `model` is None, use the model that `use_model` set in this thread, or the default model.
        Raises the errors of the model, and ModelClosing before `bind` and after `close`.
        """
        if model is None:
            model = getattr(self._thread, "model", self._model)
        with self._mutex:
            if self._closed or self._loop is None:
                raise ModelClosing
            coroutine = _complete_text(model, messages, schema, max_tokens)
            request = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            self._requests.add(request)
        try:
            return request.result()
        except concurrent.futures.CancelledError:
            raise ModelClosing from None
        finally:
            with self._mutex:
                self._requests.discard(request)

    def close(self) -> None:
        """Cancel the requests in progress and reject new requests."""
        with self._mutex:
            self._closed = True
            requests = list(self._requests)
        for request in requests:
            request.cancel()


async def _complete_text(
    model: ChatModel,
    messages: Sequence[Mapping[str, Any]],
    schema: Mapping[str, Any] | None,
    max_tokens: int | None,
) -> str:
    answer = StreamedAnswer()
    stream = model.stream(messages, schema=schema, max_tokens=max_tokens)
    async with aclosing(stream) as deltas:
        async for delta in deltas:
            answer.add(delta)
    if answer.usage is None:
        return answer.text
    return CountedAnswer(answer.text, model=model.name, usage=answer.usage)


class ModelClosing(BaseException):
    """The agent closes, so the model will not answer.

    ModelClosing is not a subclass of Exception, because the code that writes summaries catches
    every Exception of a model.
    """
