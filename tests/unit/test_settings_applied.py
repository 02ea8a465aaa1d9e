"""Tests that every setting of an agent has an effect."""

import ast
import asyncio
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import stenolog
from stenolog.agent.instance import AgentInstance, AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.agent.spec import DEFAULT_SYSTEM_PROMPT, AgentSpec
from stenolog.agent.turn_events import Answer, InboundMessage
from stenolog.context.request_messages import ProviderRequirements
from stenolog.context.window import Limits
from stenolog.errors import UsageError
from stenolog.providers.openai_chat import OpenAIChat
from stenolog.settings import conversion
from stenolog.settings.conversion import model_of, rules_of, spec_of, specs_of
from stenolog.settings.fields import all_fields
from stenolog.settings.loading import load_effective_settings
from stenolog.settings.model_selection import NoModel
from stenolog.settings.values import Settings
from stenolog.testing.scripted_model import ScriptedModel, offline_model


def _load(folder: Path, text: str, **environment: str) -> Settings:
    file = folder / "config.toml"
    file.write_text(text)
    file.chmod(0o600)
    return load_effective_settings(config=file, environment=environment).settings


# --- agents ----------------------------------------------------------------------------------


def test_agent_without_settings_has_the_defaults() -> None:
    assert spec_of(Settings()) == AgentSpec()


def test_every_agent_setting_is_applied(tmp_path: Path) -> None:
    settings = _load(
        tmp_path,
        """
        [agent]
        sessions = "memory:"
        model = "local"
        models = ["scripted", "fast"]
        max_context_tokens = 9_000
        max_history_messages = 7
        system = "Be brief."
        max_iterations = 3
        tools = false
        tool_timeout = 2.5
        tool_output_limit = 99
        [agent.context]
        reserve = 77
        reasoning = "all"
        merge_user = true
        user_first = true
        keep_fields = ["x"]
        [memory]
        consolidation = false
        recall_tokens = 11
        half_life_days = 2.0
        zone = "UTC"
        [models.fast]
        [models.deep]
        """,
    )
    assert spec_of(settings) == AgentSpec(
        sessions="memory:",
        model="local",
        models=("deep", "fast", "scripted"),
        limits=Limits(max_context_tokens=9_000, max_history_messages=7, reserve=77),
        needs=ProviderRequirements(
            reasoning="all", merge_user=True, user_first=True, keep_fields=("x",)
        ),
        system="Be brief.",
        max_iterations=3,
        tools=False,
        tool_timeout=2.5,
        tool_output_limit=99,
        consolidation=False,
        recall_tokens=11,
        half_life_days=2.0,
        zone="UTC",
    )


def test_main_is_the_agent_without_a_name(tmp_path: Path) -> None:
    settings = _load(tmp_path, "[agent]\nmodel = 'local'\n[agents.ada]\nmodel = 'scripted'\n")
    assert spec_of(settings, "main") == spec_of(settings) == AgentSpec(model="local")
    assert spec_of(settings, "ada") == AgentSpec(id="ada", model="scripted")
    assert spec_of(settings).system == DEFAULT_SYSTEM_PROMPT
    with pytest.raises(UsageError, match=r"there is no agent 'bob'; add \[agents.bob\]"):
        spec_of(settings, "bob")


def test_routes_select_their_agents(tmp_path: Path) -> None:
    text = "[agents.ada]\nroutes = ['telegram:1:2', 'slack']\n[agents.bob]\nroutes = ['telegram']\n"
    specs = specs_of(_load(tmp_path, "agent.sessions = 'memory:'\n" + text))
    assert [spec.id for spec in specs] == [None, "ada", "bob"]
    assert specs[1].routes == ("telegram:1:2", "slack")
    instances = [AgentInstance.open(spec, model=ScriptedModel([])) for spec in specs]
    try:
        registry = AgentRegistry(instances)
        found = {
            (channel, sender): registry.route(channel, sender).id
            for channel in ("telegram", "slack", "cli")
            for sender in ("1:2", "3")
        }
    finally:
        for instance in instances:
            instance.close_stores()
    assert found == {
        ("telegram", "1:2"): "ada",
        ("telegram", "3"): "bob",
        ("slack", "1:2"): "ada",
        ("slack", "3"): "ada",
        ("cli", "1:2"): None,
        ("cli", "3"): None,
    }


# --- stored files ----------------------------------------------------------------------------


def _files() -> set[Path]:
    """Return every file and folder that this run can have created."""
    return {*Path(os.environ["HOME"]).parent.rglob("*"), *Path.cwd().rglob("*")}


def _turn(spec: AgentSpec) -> Answer:
    async def talk() -> Answer:
        instance = AgentInstance.open(spec, model=offline_model(pause=0))
        loop = AgentLoop(AgentRegistry([instance]))
        try:
            inbound = InboundMessage(key="telegram:1", content="I am allergic to hazelnuts.")
            return await loop.handle(inbound, on_event=lambda _: None)
        finally:
            await loop.close()

    return asyncio.run(talk())


@pytest.mark.parametrize("name", [None, "ada"])
@pytest.mark.parametrize("sessions", ["./kept", "sqlite:kept.db"])
def test_session_persistence_controls_whether_channels_write_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sessions: str, name: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    text = f"[agent]\nsessions = '{sessions}'\n[agents.ada]\n[channels]\nsession_persistence = "
    settings = _load(tmp_path, text + "false")
    before = _files()
    answer = _turn(spec_of(settings, name, channel="telegram"))
    assert (answer.outcome, answer.saved) == ("answered", True)
    assert _files() == before
    # A terminal is not a channel.
    assert spec_of(settings, name).sessions == sessions
    kept = _load(tmp_path, text + "true")
    _turn(spec_of(kept, name, channel="telegram"))
    made = [path for path in _files() - before if path.is_file()]
    assert any(b"hazelnuts" in path.read_bytes() for path in made)


def test_all_agents_are_in_memory_without_session_persistence(tmp_path: Path) -> None:
    text = "[agents.ada]\nsessions = 'sqlite:x.db'\n[channels]\nsession_persistence = false\n"
    settings = _load(tmp_path, text)
    assert [spec.sessions for spec in specs_of(settings, channel="telegram")] == ["memory:"] * 2
    assert [spec.sessions for spec in specs_of(settings)] == ["./workspace", "sqlite:x.db"]


# --- models ----------------------------------------------------------------------------------


def test_named_model_is_opened_with_its_settings(tmp_path: Path) -> None:
    settings = _load(
        tmp_path,
        "[models.mine]\nbase_url = 'http://localhost:1/v1'\nmodel = 'large'\nkey_env = 'MINE'\n"
        "[models.other]\nmodel = 'scripted'\n",
        MINE="sk-1",
    )
    model = model_of(settings, "mine")
    assert isinstance(model, OpenAIChat)
    assert (model.model, model.base_url) == ("large", "http://localhost:1/v1")
    assert isinstance(model_of(settings, "other"), ScriptedModel)
    assert isinstance(model_of(settings, "scripted"), ScriptedModel)
    with pytest.raises(UsageError, match="unknown model 'another'"):
        model_of(settings, "another")


def test_no_model_is_returned_if_none_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_find_weights", lambda: None)
    settings = load_effective_settings(environment={"OLLAMA_HOST": "127.0.0.1:1"}).settings
    assert isinstance(model_of(settings, ""), NoModel)


def test_password_in_a_model_name_is_rejected_and_not_shown() -> None:
    with pytest.raises(UsageError, match="must not contain a user or password") as caught:
        model_of(Settings(), "http://u:hush@h/v1#m")
    assert "hush" not in str(caught.value)


# --- all settings ----------------------------------------------------------------------------


OF_THE_DAEMON = ("gateway", "webhooks")
"""Settings that `steno serve` reads itself; the settings of chat apps are the same."""


def _is_of_the_daemon(path: tuple[str, ...]) -> bool:
    return path[0] in OF_THE_DAEMON or (path[0] == "channels" and len(path) > 2)


@pytest.mark.parametrize("path", [path for path in all_fields() if _is_of_the_daemon(path)])
def test_every_setting_of_the_daemon_is_read(path: tuple[str, ...]) -> None:
    """Their effects are tested elsewhere; an attribute that no code reads has no effect."""
    assert path[-1] in _attributes_read()


@cache
def _attributes_read() -> set[str]:
    rooms = [Path(stenolog.__file__).parent / name for name in ("gateway", "channels", "cli")]
    return {
        node.attr
        for room in rooms
        for file in room.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in all_fields()
        if path[0] not in ("models", "retention") and not _is_of_the_daemon(path)
    ],
)
def test_every_setting_has_an_effect(tmp_path: Path, path: tuple[str, ...]) -> None:
    given: dict[str, Any] = {
        "sessions": "'memory:'", "model": "'local'", "models": "['x']", "system": "'Hi'",
        "system_file": "'prompt.md'", "zone": "'UTC'", "routes": "['slack']",
        "keep_fields": "['x']", "reasoning": "'all'", "reserve": "77",
    }  # fmt: skip
    (tmp_path / "prompt.md").write_text("From a file.")
    default = all_fields()[path].default
    value = given.get(path[-1], str(not default).lower() if isinstance(default, bool) else "9000")
    if path[-1] in ("max_iterations", "tool_timeout", "half_life_days"):
        value = "9"
    name = ".".join("ada" if part == "NAME" else part for part in path)
    plain = _load(tmp_path, "[agents.ada]\n")
    changed = _load(tmp_path, f"{name} = {value}\n" + "[agents.ada]\n" * (path[0] != "agents"))
    assert specs_of(plain, channel="telegram") != specs_of(changed, channel="telegram")


@pytest.mark.parametrize("path", [path for path in all_fields() if path[0] == "retention"])
def test_every_retention_setting_has_an_effect(tmp_path: Path, path: tuple[str, ...]) -> None:
    value = {"action": "'purge'", "older_than_days": "9"}.get(path[-1], "'x'")
    [plain] = rules_of(_load(tmp_path, "[retention.old]\n"))
    [changed] = rules_of(_load(tmp_path, f"[retention.old]\n{path[-1]} = {value}\n"))
    assert plain != changed
    assert not plain.has_condition
