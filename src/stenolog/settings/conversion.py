"""Converts settings to the values from which agents and models are created."""

from datetime import timedelta
from pathlib import Path
from typing import Final

import msgspec

from stenolog.agent.spec import DEFAULT_SYSTEM_PROMPT, AgentSpec
from stenolog.context.request_messages import ProviderRequirements
from stenolog.context.window import Limits
from stenolog.errors import UsageError
from stenolog.maintenance.retention_rules import Rule
from stenolog.providers.chat_model import ChatModel
from stenolog.settings.model_selection import (
    NoModel,
    find_model,
    ollama_address,
    open_model,
    probe_ollama,
)
from stenolog.settings.values import ModelSettings, Settings, has_user

CLI: Final = "cli"
"""Name of the channel for terminals."""
MAIN_AGENT: Final = "main"
"""Name of the agent that `[agent]` describes."""
IN_MEMORY: Final = "memory:"


def spec_of(settings: Settings, name: str | None = None, *, channel: str = CLI) -> AgentSpec:
    """Return the spec of the agent `[agent]` or `[agents.NAME]`.

    Raises UsageError for an unknown name. `channel`: the channel for which the agent is opened.
    Unless `channels.session_persistence` is set, only terminal sessions are stored.
    """
    name = None if name == MAIN_AGENT else name
    if name is not None and name not in settings.agents:
        raise UsageError(f"there is no agent {name!r}; add [agents.{name}] to the config file")
    agent = settings.agent if name is None else settings.agents[name]
    is_persistent = channel == CLI or settings.channels.session_persistence
    return AgentSpec(
        sessions=agent.sessions if is_persistent else IN_MEMORY,
        id=name,
        model=agent.model,
        models=tuple(dict.fromkeys((*settings.models, *agent.models))),
        system=agent.system or DEFAULT_SYSTEM_PROMPT,
        limits=Limits(
            max_context_tokens=agent.max_context_tokens,
            max_history_messages=agent.max_history_messages,
            reserve=agent.context.reserve or None,
        ),
        needs=msgspec.convert(agent.context, ProviderRequirements, from_attributes=True),
        max_iterations=agent.max_iterations,
        tools=agent.tools,
        tool_timeout=agent.tool_timeout,
        tool_output_limit=agent.tool_output_limit,
        routes=agent.routes,
        **msgspec.structs.asdict(settings.memory),
    )


def specs_of(settings: Settings, *, channel: str = CLI) -> list[AgentSpec]:
    """Return the specs of all agents, the default agent first."""
    return [spec_of(settings, name, channel=channel) for name in (None, *settings.agents)]


def model_of(settings: Settings, name: str) -> ChatModel | NoModel:
    """Return the model of this name, or find a model if the name is empty.

    Raises UsageError if the model is unknown or cannot be opened.
    """
    if has_user(name):
        # The address would become the name of the model, which is shown and stored with messages.
        raise UsageError("the address of a model must not contain a user or password")
    model_settings = settings.models.get(name) or ModelSettings(model=name)
    choice = find_model(
        model_settings.model,
        environment=settings.keys,
        base_url=model_settings.base_url,
        key_name=model_settings.key_env,
        ollama=lambda: probe_ollama(ollama_address(settings.keys)),
        weights=_find_weights,
    )
    if isinstance(choice, NoModel):
        return choice
    return open_model(
        choice,
        environment=settings.keys,
        key=model_settings.key,
        timeout=model_settings.timeout,
        first_byte_timeout=model_settings.first_byte_timeout,
        retries=model_settings.retries,
        headers=model_settings.headers,
    )


def rules_of(settings: Settings) -> tuple[Rule, ...]:
    """Return the configured retention rules, sorted by name."""
    return tuple(
        Rule(
            name=name,
            action=rule.action,
            older_than=timedelta(days=rule.older_than_days) if rule.older_than_days else None,
            tag=rule.tag,
            exclude_tag=rule.spare_tag,
        )
        for name, rule in sorted(settings.retention.items())
    )


def _find_weights() -> Path | None:
    # The local model is slow to import and rarely needed.
    from stenolog.providers.local_model import find_weights, is_installed

    return find_weights() if is_installed() else None
