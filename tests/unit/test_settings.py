"""Tests settings: precedence, error messages, and that no secret is shown."""

import inspect
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect as types

from stenolog.agent.spec import AgentSpec
from stenolog.cli.workspace import DEFAULT_WORKSPACE as WORKSPACE
from stenolog.context.request_messages import ProviderRequirements
from stenolog.context.window import Limits
from stenolog.errors import UsageError, WrongSettings
from stenolog.memory.facade import HALF_LIFE_DAYS, RECALL_TOKENS
from stenolog.providers.openai_chat import OpenAIChat
from stenolog.settings.conversion import spec_of, specs_of
from stenolog.settings.fields import (
    ANY_NAME,
    Field,
    all_fields,
    commented_file,
    to_toml,
)
from stenolog.settings.file import config_path, join_path
from stenolog.settings.loading import load_effective_settings, variable_of
from stenolog.settings.values import ModelSettings, Settings, mask_secrets


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def _load(file: Path | None, text: str = "", **given: Any) -> Settings:
    if file is not None:
        file.write_text(text)
        file.chmod(0o600)
    return load_effective_settings(
        config=file, environment=given.pop("environment", {}), **given
    ).settings


def _refused(file: Path, text: str = "", **given: Any) -> list[str]:
    with pytest.raises(WrongSettings) as caught:
        _load(file, text, **given)
    return [str(problem).replace(str(file), "FILE") for problem in caught.value.problems]


# --- precedence ------------------------------------------------------------------------------


def test_settings_without_a_file_are_the_defaults() -> None:
    assert load_effective_settings(environment={}).settings == Settings()


def test_flags_override_the_environment_and_the_environment_overrides_the_file(file: Path) -> None:
    text = "[agent]\nmax_iterations = 2\nmax_history_messages = 2\nmax_context_tokens = 2000"
    environment = {"STENO_AGENT__MAX_ITERATIONS": "3", "STENO_AGENT__MAX_HISTORY_MESSAGES": "3"}
    flags = {"agent.max_iterations": 4, "agent.model": None}
    agent = _load(file, text, environment=environment, flags=flags).agent
    found = (agent.max_iterations, agent.max_history_messages, agent.max_context_tokens)
    assert (found, agent.tool_timeout, agent.model) == ((4, 3, 2000), 60.0, "")


def test_each_value_has_its_source(file: Path) -> None:
    file.write_text("\n[agent]\nmodel = 'local'\nmax_iterations = 2\n[agents.ada]\nsystem = 'Hi'")
    found = load_effective_settings(
        config=file,
        environment={"STENO_MEMORY__ZONE": "UTC"},
        flags={"agent.max_iterations": 9},
    )
    sources = {name: each.source for name, each in found.values.items()}
    assert sources["agent.model"] == str(file)
    assert sources["agent.max_iterations"] == "the command line"
    assert sources["agent.sessions"] == sources["agents.ada.sessions"] == "default"
    assert sources["memory.zone"] == "STENO_MEMORY__ZONE"
    assert sources["agents.ada.system"] == str(file)
    assert sources["agents.ada.model"] == "agent.model"
    assert (found.file, found.file_exists) == (file, True)


def test_config_path_is_the_option_then_the_variable_then_the_user_file() -> None:
    named, variable = Path("a.toml"), {"STENO_CONFIG": "~/b.toml"}
    own = Path(os.environ["XDG_CONFIG_HOME"], "stenolog", "config.toml")
    assert config_path(named, variable) == named
    assert config_path(None, variable) == Path.home() / "b.toml"
    assert config_path(None, {"STENO_CONFIG": ""}) == config_path(None, {}) == own


def test_files_in_the_current_folder_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("steno.toml", "config.toml", "stenolog.toml", ".steno.toml"):
        Path(name).write_text("[agent]\nmodel = 'http://elsewhere/v1#m'\n")
    assert load_effective_settings(environment={}).settings.agent.model == ""


@pytest.mark.parametrize("by_variable", [False, True])
def test_named_config_file_must_exist(file: Path, by_variable: bool) -> None:
    config = None if by_variable else file
    environment = {"STENO_CONFIG": str(file)} if by_variable else {}
    with pytest.raises(WrongSettings, match=re.escape(f"{file}: there is no such file")):
        load_effective_settings(config=config, environment=environment)


def test_defaults_match_the_packages_that_use_them() -> None:
    settings = Settings()
    assert settings.agent.sessions == WORKSPACE
    assert spec_of(settings).limits == Limits()
    assert spec_of(settings).needs == ProviderRequirements()
    memory = settings.memory
    assert (memory.recall_tokens, memory.half_life_days) == (RECALL_TOKENS, HALF_LIFE_DAYS)
    shared = {*settings.agent.__struct_fields__} & {*AgentSpec.__struct_fields__} - {"system"}
    assert {"sessions", "model", "models", "tools", "tool_timeout"} < shared
    for name in shared:
        assert getattr(settings.agent, name) == getattr(AgentSpec(), name)
    chat = inspect.signature(OpenAIChat).parameters
    for name in ("timeout", "first_byte_timeout", "retries"):
        assert getattr(ModelSettings(), name) == chat[name].default


def test_named_agent_inherits_the_settings_of_agent(file: Path) -> None:
    settings = _load(
        file,
        """
        [agent]
        model = "local"
        context.reserve = 100
        [agents.ada]
        max_iterations = 3
        routes = ["telegram:1"]
        context.user_first = true
        [agents.bob]
        """,
    )
    ada, bob = settings.agents["ada"], settings.agents["bob"]
    assert (ada.model, ada.max_iterations, ada.routes) == ("local", 3, ("telegram:1",))
    assert (ada.context.reserve, ada.context.user_first) == (100, True)
    assert bob == settings.agent


def test_reference_name_of_session_persistence_is_accepted(file: Path) -> None:
    other = "[channels_config]\nsession_persistence = false\n"
    assert _load(file, other).channels.session_persistence is False
    variable = {"STENO_CHANNELS_CONFIG__SESSION_PERSISTENCE": "no"}
    assert _load(file, environment=variable).channels.session_persistence is False
    assert _refused(file, other + "[channels]\nsession_persistence = true\n") == [
        "FILE: channels_config: is the same table as channels; remove one of them"
    ]
    assert _refused(file, "[channels_config]\nsession_backend = 1\n") == [
        "FILE: channels.session_backend: unknown setting; known ones are session_persistence, "
        "telegram"
    ]


def test_settings_are_immutable(file: Path) -> None:
    settings = _load(file, "[models.a]\nheaders = {X = 'y'}\n")
    with pytest.raises(TypeError):
        settings.models["a"].headers["X"] = "z"  # type: ignore[index]
    with pytest.raises(AttributeError):
        settings.agent.model = "other"  # type: ignore[misc]


# --- system prompts --------------------------------------------------------------------------


def test_prompt_file_is_relative_to_the_config_file(
    file: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    (elsewhere / "prompt.md").write_text("from here")
    (file.parent / "prompt.md").write_text("beside the file")
    text = "[agent]\nsystem_file = 'prompt.md'\n"
    assert _load(file, text).agent.system == "beside the file"
    flags = {"agent.system_file": "prompt.md"}
    assert _load(file, text, flags=flags).agent.system == "from here"


def test_more_specific_of_two_alternative_settings_wins(file: Path) -> None:
    (file.parent / "prompt.md").write_text("from the file")
    text = "[agent]\nsystem_file = 'prompt.md'\n[agents.ada]\nsystem = 'Ada'\n[agents.bob]\n"
    settings = _load(file, text)
    assert (settings.agents["ada"].system, settings.agents["ada"].system_file) == ("Ada", "")
    assert settings.agents["bob"].system == "from the file"
    settings = _load(file, text, environment={"STENO_AGENT__SYSTEM": "other"})
    assert (settings.agent.system, settings.agent.system_file) == ("other", "")


def test_alternative_settings_together_are_rejected(file: Path) -> None:
    text = "[agent]\nsystem = 'a'\nsystem_file = 'b'\n[models.m]\nkey = 'c'\nkey_env = 'D'\n"
    (file.parent / "b").touch()
    assert _refused(file, text) == [
        "FILE: agent.system: set either this or agent.system_file, not both",
        "FILE: models.m.key: set either this or models.m.key_env, not both",
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"\xff", "is not UTF-8 text"),
        (b"x" * 1_048_577, "is longer than 1,048,576 bytes"),
    ],
)
def test_unreadable_prompt_file_is_reported(file: Path, content: bytes | None, reason: str) -> None:
    prompt = file.parent / "prompt.md"
    if content is not None:
        prompt.write_bytes(content)
    told = _refused(file, "[agent]\nsystem_file = 'prompt.md'\n")
    assert told == [f"FILE: agent.system_file: {prompt} {reason}"]


# --- rejected settings -----------------------------------------------------------------------


def test_problems_of_all_tables_are_reported_at_once(file: Path) -> None:
    text = """
[agent]
max_contxt_tokens = 8000
[agent.context]
reasoning = "some"
[memmory]
[models.fast]
retries = 101
[channels.telegram]
tokn = "x"
"""
    environment = {"STENO_MEMORY__RECALL_TOKENS": "many", "STENO_UPDATE": "1"}
    assert _refused(file, text, environment=environment, flags={"gateway.port": -1}) == [
        "FILE: agent.max_contxt_tokens: unknown setting; known ones are context, "
        "max_context_tokens, max_history_messages, max_iterations, model, models, sessions, "
        "system, system_file, tool_output_limit, tool_timeout, tools",
        "FILE: memmory: unknown setting; known ones are agent, agents, channels, gateway, "
        "memory, models, retention, webhooks",
        "FILE: channels.telegram.tokn: unknown setting; known ones are allow, base_url, scope, "
        "token, token_env",
        'FILE: agent.context.reasoning: must be one of "none", "newest", "all"',
        "STENO_MEMORY__RECALL_TOKENS: memory.recall_tokens: must be a whole number from 0 to "
        "1,000,000,000",
        "the command line: gateway.port: must be a whole number from 0 to 65,535",
        "FILE: models.fast.retries: must be a whole number from 0 to 100",
    ]


def test_wrong_value_of_agent_is_not_repeated_for_agents_that_inherit_it(file: Path) -> None:
    text = "[agent]\nmax_iterations = 0\nzone = 'UTC'\n[agents.ada]\n[agents.bob]\nmodel = 'x'\n"
    problems = _refused(file, text)
    assert [problem.split(": ")[1] for problem in problems] == [
        "agent.zone",
        "agent.max_iterations",
    ]


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[agent]\nmodel = \n", "FILE:2:9: invalid TOML: Invalid value"),
        ("a = 1\na = 2\n", "FILE:2:6: invalid TOML: Cannot overwrite a value"),
        ("\n\n[agent]\nmodel = '\xff'", "FILE:4: this is not UTF-8 text"),
        ("agent = 3", "FILE: agent: must be a table: [agent]"),
        ("\n[[agent]]", "FILE: agent: must be a table: [agent]"),
        ("[models]\na = 3", "FILE: models.a: must be a table: [models.a]"),
        ("x = " + "[" * 100_000, "FILE: it is nested too deeply"),
        ("[agent]\nmodel = 'x'\nmax_iterations = " + "9" * 5_000,
         "FILE: a number in it is too long"),
        ("[agent]\nmax_iterations = 0x" + "f" * 5_000,
         "FILE: agent.max_iterations: must be a whole number from 1 to 1,000"),
    ],
)  # fmt: skip
def test_invalid_file_is_reported_with_its_place(file: Path, text: str, told: str) -> None:
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(WrongSettings) as caught:
        load_effective_settings(config=file, environment={})
    assert [str(each).replace(str(file), "FILE") for each in caught.value.problems] == [told]


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("agent.sessions = 'sqllite:x'", "agent.sessions: unknown engine 'sqllite:'"),
        ("memory.zone = 'Europe/Zürich'", "memory.zone: must be the name of a time zone"),
        ("memory.zone = '../etc/passwd'", "memory.zone: must be the name of a time zone"),
        ("models.a.base_url = 'localhost:1'", "models.a.base_url: must be the address of a server"),
        ("models.a.base_url = 'http://h:x/'", "models.a.base_url: must be the address of a server"),
        ("models.a.headers = {'a b' = 'x'}", 'models.a.headers: "a b" is not a valid header name'),
        ("models.a.headers = {a = \"x\\ny\"}", "models.a.headers: the value of a contains"),
        ("agents.a.routes = [':1']", "agents.a.routes: must be a channel"),
        ("agents.a.routes = ['x:']", "agents.a.routes: must be a channel"),
        ("agents.main.model = 'x'", "agents.main: configure the agent main in [agent]"),
        ("agents.a__b.model = 'x'", "agents.a__b: invalid name"),
        ("[agents.'a b']", 'agents."a b": invalid name'),
        ("agent.routes = ['x']", "agent.routes: unknown setting; known ones are context,"),
        ("agent.context.reserve = 32_000",
         "agent.context.reserve: must be less than max_context_tokens (32,000)"),
        ("agent.max_context_tokens = 9\nagents.a.context.reserve = 9",
         "agents.a.context.reserve: must be less than max_context_tokens (9), not 9"),
        ("agents.a.routes = ['x']\nagents.b.routes = ['y', 'x']",
         "agents.b.routes: x is also in agents.a.routes"),
    ],
)  # fmt: skip
def test_values_that_violate_a_rule_are_rejected(file: Path, text: str, told: str) -> None:
    [words] = _refused(file, text)
    assert told in words


def test_unreadable_config_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(WrongSettings, match="it cannot be read: Is a directory"):
        load_effective_settings(config=tmp_path, environment={})


def _sample(field: Field) -> st.SearchStrategy[object]:
    """Generate valid values of a field."""
    match types.type_info(field.type):
        case types.BoolType():
            return st.booleans()
        case types.IntType() as kind:
            return st.integers(kind.ge, kind.le)
        case types.FloatType() as kind:
            assert kind.le is not None
            return st.floats(0.001, kind.le)
        case types.LiteralType(values=choices):
            return st.sampled_from(choices)
        case types.VarTupleType() if field.path[-1] == "routes":
            # Two agents with the same route are an error, which another test covers.
            return st.just([])
        case types.VarTupleType() if field.path[-1] == "origins":
            return st.lists(st.sampled_from(["https://a.example", "http://b:8"]), max_size=2)
        case types.VarTupleType() if field.path[-1] == "hosts":
            return st.lists(st.sampled_from(["steno.example", "10.0.0.7"]), max_size=2)
        case types.VarTupleType():
            return st.lists(st.sampled_from(["telegram", "openai/x"]), max_size=2)
        case types.DictType():
            return st.just({"X-Title": "steno"})
    return {
        "sessions": st.sampled_from(["./here", "sqlite:a.db", "memory:"]),
        "zone": st.sampled_from(["", "UTC"]),
        "base_url": st.sampled_from(["", "http://localhost:1/v1"]),
        # Of two alternatives, only one is given.
        "key": st.just(""),
        "system_file": st.just(""),
        "key_env": st.sampled_from(["", "MY_KEY"]),
        "token": st.just(""),
        "token_env": st.sampled_from(["", "MY_TOKEN"]),
        "secret": st.just(""),
        "secret_env": st.sampled_from(["", "MY_SECRET"]),
        "reply_url": st.sampled_from(["", "http://localhost:1/answers"]),
        "host": st.sampled_from(["127.0.0.1", "::1", "localhost"]),
    }.get(field.path[-1], st.text(st.characters(codec="utf-8"), max_size=20))


def _wrong(field: Field) -> st.SearchStrategy[object]:
    """Generate invalid values of a field: of another type, or out of range."""
    others: list[st.SearchStrategy[Any]] = [
        st.just(datetime(2026, 11, 5, tzinfo=UTC)),
        st.just([[1]]),
        st.just({"deeper": {"x": 1}}),
    ]
    match types.type_info(field.type):
        case types.BoolType():
            others += [st.integers(), st.sampled_from(["true", ""])]
        case types.IntType() as kind:
            assert kind.ge is not None
            assert kind.le is not None
            others += [st.integers(max_value=kind.ge - 1), st.integers(min_value=kind.le + 1)]
            others += [st.floats(), st.booleans(), st.just("10")]
        case types.FloatType() as kind:
            others += [st.floats(max_value=0), st.booleans(), st.just("10")]
            others += [st.just(float("inf")), st.just(float("nan"))]
        case types.LiteralType():
            others += [st.integers(), st.just("some"), st.booleans()]
        case types.VarTupleType():
            others += [st.text("ab"), st.lists(st.integers(), min_size=1)]
        case types.DictType():
            others = [st.text("ab"), st.just({"a": 1}), st.just([])]
        case _:
            others += [st.integers(), st.booleans(), st.floats()]
    return st.one_of(others)


def _named(path: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("mine" if part == ANY_NAME else part for part in path)


def _toml(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else to_toml(value)


def _text(given: Mapping[tuple[str, ...], object]) -> str:
    return "".join(f"{join_path(path)} = {_toml(value)}\n" for path, value in given.items())


_right: st.SearchStrategy[dict[tuple[str, ...], Any]] = st.fixed_dictionaries(
    {},
    optional={
        _named(path): _sample(field)
        for path, field in all_fields().items()
        # A reserve larger than the context is an error, which another test covers.
        if path[-1] != "reserve"
    },
)


@given(_right)
def test_valid_settings_are_accepted_unchanged(
    tmp_path_factory: pytest.TempPathFactory, given: dict[tuple[str, ...], object]
) -> None:
    file = tmp_path_factory.getbasetemp() / "right.toml"
    file.write_text(_text(given))
    file.chmod(0o600)
    settings = load_effective_settings(config=file, environment={}).settings
    for path, value in given.items():
        found: Any = settings
        for part in path:
            found = found[part] if isinstance(found, Mapping) else getattr(found, part)
        assert found == (tuple(value) if isinstance(value, list) else value)
    agents = (settings.agent, *settings.agents.values())
    for agent, spec in zip(agents, specs_of(settings), strict=True):
        assert spec.limits.max_context_tokens == agent.max_context_tokens


@given(st.data())
def test_any_invalid_field_is_rejected_with_file_and_name(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    given = data.draw(_right)
    fields = all_fields()
    field = fields[data.draw(st.sampled_from(list(fields)))]
    if data.draw(st.booleans()):
        path = _named(field.path)
        given[path] = data.draw(_wrong(field))
    else:
        # An unknown name in any table, or below a value that is not a table.
        above = _named(field.path)[: data.draw(st.integers(0, len(field.path) - 1))]
        name = data.draw(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8))
        path = (*above, f"{name}\x01" if data.draw(st.booleans()) else f"x{name}")
        given[path] = data.draw(st.integers())
    file = tmp_path_factory.getbasetemp() / "wrong.toml"
    file.write_text(_text(given))
    with pytest.raises(WrongSettings) as caught:
        load_effective_settings(config=file, environment={})
    [problem] = caught.value.problems
    assert problem.field == join_path(path)
    assert problem.source == str(file)


@given(st.binary(max_size=60) | st.text("[]a.='\"\n#1 models{},", max_size=60).map(str.encode))
def test_any_file_content_is_loaded_or_rejected_as_wrong_settings(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_bytes(content)
    told = str(file)
    try:
        load_effective_settings(config=file, environment={})
    except WrongSettings as error:
        told = str(error)
    assert str(file) in told


# --- the environment -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("STENO_AGENT__TOOL_TIMEOUT", " 2.5 ", "agent.tool_timeout", 2.5),
        ("STENO_AGENT__MAX_CONTEXT_TOKENS", "8_000", "agent.max_context_tokens", 8000),
        ("STENO_MEMORY__CONSOLIDATION", "Off", "memory.consolidation", False),
        ("STENO_MEMORY__CONSOLIDATION", "1", "memory.consolidation", True),
        ("STENO_AGENT__MODEL", " x ", "agent.model", " x "),
        ("STENO_AGENTS__ADA__ROUTES", "telegram, slack:C42,", "agents.ada.routes",
         ("telegram", "slack:C42")),
        ("STENO_AGENTS__ADA__ROUTES", '["a"]', "agents.ada.routes", ("a",)),
        ("STENO_AGENT__MAX_ITERATIONS", "", "agent.max_iterations", 25),
        ("STENO_CHANNELS_CONFIG__SESSION_PERSISTENCE", "no", "channels.session_persistence", False),
    ],
)  # fmt: skip
def test_variable_is_converted_to_the_type_of_its_field(
    variable: str, text: str, name: str, value: object
) -> None:
    found = load_effective_settings(environment={variable: text})
    assert found.values[name].value == value


def test_headers_can_be_set_by_a_variable() -> None:
    environment = {"STENO_MODELS__M__HEADERS": '{ X-Title = "steno" }'}
    assert load_effective_settings(environment=environment).settings.models["m"].headers == {
        "X-Title": "steno"
    }


def test_variable_matches_the_spelling_of_the_file(file: Path) -> None:
    text = "[models.My-Server]\nmodel = 'x'\n"
    environment = {"STENO_MODELS__MY_SERVER__RETRIES": "7", "STENO_MODELS__OTHER__RETRIES": "8"}
    models = _load(file, text, environment=environment).models
    assert {name: model.retries for name, model in models.items()} == {"My-Server": 7, "other": 8}


@pytest.mark.parametrize(
    ("variable", "text", "told"),
    [
        ("STENO_MEMORY__ZON", "x", "STENO_MEMORY__ZON: memory.zon: unknown setting; "
         "known ones are consolidation, half_life_days, recall_tokens, zone"),
        ("STENO_MODELS__FAST", "x",
         "STENO_MODELS__FAST: models.fast: must be a table: [models.fast]"),
        ("STENO_MEMORY__CONSOLIDATION", "maybe", "STENO_MEMORY__CONSOLIDATION: "
         "memory.consolidation: must be true or false"),
        ("STENO_AGENT__MODEL", "\udcff", "STENO_AGENT__MODEL: agent.model: this is not UTF-8 text"),
        ("STENO_AGENTS__A__ROUTES", "a,\udcff",
         "STENO_AGENTS__A__ROUTES: agents.a.routes: this is not UTF-8 text"),
        ("STENO_AGENTS__A__ROUTES", "['a']\nb = 1", "STENO_AGENTS__A__ROUTES: agents.a.routes: "
         "must be a list of texts"),
    ],
)  # fmt: skip
def test_invalid_variable_is_rejected_with_its_name(variable: str, text: str, told: str) -> None:
    with pytest.raises(WrongSettings) as caught:
        load_effective_settings(environment={variable: text})
    assert [str(each) for each in caught.value.problems] == [told]


def test_unrelated_variables_are_ignored() -> None:
    others = (
        "STENO_UPDATE",
        "STENO_AGENT_MODEL",
        "STENO_REQUIRE",
        "STENO_TEST_POSTGRES",
        "STENO_SEED",
        "STENOLOG_X",
    )
    assert load_effective_settings(environment=dict.fromkeys(others, "1")).settings == Settings()


def test_every_field_has_its_own_variable() -> None:
    variables = [variable_of(path) for path in all_fields()]
    assert len(set(variables)) == len(variables)
    for path, field in all_fields().items():
        if ANY_NAME not in path and isinstance(field.default, bool | int | float):
            environment = {variable_of(path): str(field.default)}
            found = load_effective_settings(environment=environment)
            assert found.values[field.name].source == variable_of(path)


# --- secrets ---------------------------------------------------------------------------------


def test_environment_variables_of_providers_are_passed_to_model_selection(file: Path) -> None:
    environment = {
        "OPENAI_API_KEY": "sk-1",
        "OLLAMA_HOST": "elsewhere",
        "OLLAMA_CONTEXT_LENGTH": "32000",
        "OPENAI_BASE_URL": "http://h",
        "MINE": "sk-2",
        "EMPTY_API_KEY": "",
        "HOME": "x",
    }
    settings = _load(file, "[models.m]\nkey_env = 'MINE'\n", environment=environment)
    assert settings.keys == {
        "OPENAI_API_KEY": "sk-1",
        "OLLAMA_HOST": "elsewhere",
        "OLLAMA_CONTEXT_LENGTH": "32000",
        "OPENAI_BASE_URL": "http://h",
        "MINE": "sk-2",
    }


def test_printed_settings_contain_no_secret(file: Path) -> None:
    text = (
        "[agent]\nsessions = 'postgresql://u:hush@h/db'\nmodels = ['http://h/v1?key=hush#m']\n"
        "[models.m]\nkey = 'hush'\nbase_url = 'http://h/?api_key=hush'\nheaders = {A = 'hush'}\n"
    )
    file.write_text(text)
    environment = {"OPENAI_API_KEY": "hush"}
    found = load_effective_settings(config=file, environment=environment)
    assert found.settings.models["m"].key == "hush"
    assert "hush" not in repr(found)
    assert found.values["models.m.key"].value == "***"
    assert found.values["models.m.headers"].value == {"A": "***"}
    assert found.values["agent.sessions"].value == "postgresql://u:***@h/db"
    assert found.values["agent.models"].value == ("http://h/v1?key=***#m",)


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql:///db?password=hush", "postgresql:///db?password=***"),
        ("postgresql://u:hush@h/db?x=1&PGPASSWORD=hush&y=2",
         "postgresql://u:***@h/db?x=1&PGPASSWORD=***&y=2"),
        ("postgresql://u:hu/sh@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:hu@sh@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:hu?sh@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:hu#sh@h/db", "postgresql://u:***@h/db"),
        ("postgresql:///db?password=hu#sh", "postgresql:///db?password=***"),
        ("postgresql:u:hush@h", "postgresql:***@h"),
        ("postgresql:host=h password='hu sh'", "postgresql:host=h password=***"),
        ("http://hush@h/v1", "http://***@h/v1"),
        ("http://u:hu#sh@h/v1", "http://u:***@h/v1"),
        ("http://h/v1?api_key=hush#m", "http://h/v1?api_key=***#m"),
        ("http://h/v1?Access-Token=hush", "http://h/v1?Access-Token=***"),
        ("http://h/v1?client_secret=hush", "http://h/v1?client_secret=***"),
        ("u:hush@h", "u:***@h"),
    ],
)  # fmt: skip
def test_secrets_in_an_address_are_not_shown(address: str, shown: str) -> None:
    assert mask_secrets(address) == shown


@pytest.mark.parametrize(
    "address",
    [
        "./work@home", "sqlite:a:b@c.db", "local:/models/a@b.gguf", "ollama/qwen3:1b", "memory:",
        "openai/gpt@latest", "http://localhost:8080/v1#org/model@2", "http://[::1]/v1#model@2",
        "http://h/v1?version=2#m", "",
    ],
)  # fmt: skip
def test_address_without_a_secret_is_shown_unchanged(address: str) -> None:
    assert mask_secrets(address) == address


@pytest.mark.quick(8)
@pytest.mark.parametrize(("table", "line"), [
    *(("models.m", line) for line in (
        "key = ['hush']", "key_env = 'sk-hush'", "key_env = ['sk-hush']", "headers = 'hush'",
        "headers = {A = \"hush\\n\"}", "key = 'hush \\u'", "headers = {A = ['hush']}",
        "base_url = ['http://u:hush@h/v1']", "base_url = 'http://u:hush@h/v1'",
        "base_url = 'http://hush@h/v1'", "base_url = 'http://u:hu/hush@h/v1'",
        "base_url = 'u:hush@h'", "model = ['sk-hush']", "model = 'http://u:hush@h/v1#m'",
    )),
    *(("agent", line) for line in (
        "sessions = ['postgresql://u:hush@h/db']", "sessions = 'sqlite://u:hush@h/db'",
        "sessions = 'mysql:u:hush@h/db'", 'sessions = "u:hush@h/x.db\\u0000"',
        "sessions = 'mysql:host=h password=hush'", "model = ['sk-hush']", "model = [['sk-hush']]",
        "model = 'http://u:hush@h/v1#m'", "models = 'sk-hush'", "models = [['sk-hush']]",
        "models = ['http://u:hush@h/v1#m']", "system = ['hush']",
    )),
])  # fmt: skip
def test_errors_contain_no_secret(file: Path, table: str, line: str) -> None:
    [told] = _refused(file, f"[{table}]\n{line}\n")
    assert told.startswith(f"FILE: {table}.")
    assert "hush" not in told


def test_server_address_with_a_user_is_rejected(file: Path) -> None:
    words = (
        "the address of a server must not contain a user or password; put the key in an "
        "environment variable and name it in key_env"
    )
    for field in ("agent.model", "agents.a.model", "models.m.model", "models.m.base_url"):
        address = "http://u:p@h/v1" if field.endswith("url") else "http://u:p@h/v1#m"
        assert _refused(file, f"{field} = '{address}'") == [f"FILE: {field}: {words}"]
    assert _refused(file, "agent.models = ['local', 'https://u@h/v1#m']") == [
        f"FILE: agent.models: {words}"
    ]
    assert _load(file, "agent.model = 'http://h:1/v1#a@b'").agent.model == "http://h:1/v1#a@b"


def test_key_in_a_file_readable_by_others_causes_a_warning(file: Path) -> None:
    file.write_text("[models.m]\nkey = 'sk'\n")
    file.chmod(0o600)
    assert load_effective_settings(config=file, environment={}).warnings == ()
    file.chmod(0o640)
    assert load_effective_settings(config=file, environment={}).warnings == (
        f"{file} contains models.m.key and can be read by other users; run: chmod 600 {file}",
    )
    file.write_text("[models.m]\nkey_env = 'MINE'\n[agent]\nsessions = 'postgresql://h/db'\n")
    assert load_effective_settings(config=file, environment={}).warnings == ()


@pytest.mark.parametrize("address", ["postgresql://u:p@h/db", "postgresql:///db?password=p"])
@pytest.mark.parametrize("agent", ["agent", "agents.ada"])
def test_password_in_a_file_readable_by_others_causes_a_warning(
    file: Path, agent: str, address: str
) -> None:
    file.write_text(f"[{agent}]\nsessions = '{address}'\n")
    file.chmod(0o644)
    [words] = load_effective_settings(config=file, environment={}).warnings
    assert words == (
        f"{file} contains {agent}.sessions and can be read by other users; run: chmod 600 {file}"
    )


def test_wrong_settings_raise_usage_error(file: Path) -> None:
    with pytest.raises(UsageError) as caught:
        _load(file, "agent.modle = 1\nagent.sesions = 2")
    assert str(caught.value).count("unknown setting") == 2


# --- the config file -------------------------------------------------------------------------


def test_commented_file_changes_no_setting(file: Path) -> None:
    assert _load(file, commented_file()) == Settings()


def test_commented_file_has_every_field_with_its_default(file: Path) -> None:
    bare = re.sub(r"(?m)^#(?=[\[a-z])", "", commented_file())
    found = set(_paths(tomllib.loads(bare)))
    names = {"fast": ANY_NAME, "ada": ANY_NAME, "shop": ANY_NAME, "old": ANY_NAME}
    listed = {tuple(names.get(part, part) for part in path) for path in found}
    shared = {path for path in all_fields() if path[0] == "agents"}
    own = {("agents", ANY_NAME, name) for name in ("model", "system", "routes")}
    assert listed == {*all_fields()} - shared | own
    settings = _load(file, bare)
    assert settings.agents["ada"] == settings.agent == Settings().agent
    assert settings.models["fast"] == ModelSettings()


def _paths(table: dict[str, Any], parents: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each value, and of the empty table that is the default of `headers`."""
    for name, value in table.items():
        if isinstance(value, dict) and name != "headers":
            yield from _paths(value, (*parents, name))
        else:
            yield (*parents, name)


_values = st.recursive(
    st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=8,
)


@given(_values)
def test_toml_literals_are_read_back(value: object) -> None:
    assert tomllib.loads(f"value = {to_toml(value)}")["value"] == value


def test_every_field_has_a_description() -> None:
    for field in all_fields().values():
        assert re.fullmatch(r"[A-Z][^|]*\.", field.description), field.name
