"""Loads settings: defaults, config file, environment and command-line options.

Each source is one nested table. A later source overrides an earlier one. The tables are merged, and
each table of the result is converted to one value of the classes in `values`.
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path as File
from types import MappingProxyType
from typing import Any, Final, TypeGuard, TypeVar, get_args

import msgspec
from msgspec import Struct, inspect

from stenolog.errors import Problem, WrongSettings
from stenolog.settings.fields import (
    IGNORED_PATHS,
    NAMED_TABLES,
    TABLE_ALIASES,
    Field,
    InvalidValue,
    check_value,
    describe_type,
    find_field,
)
from stenolog.settings.file import (
    VARIABLE_PREFIX,
    KeyPath,
    config_path,
    expand_home,
    join_path,
    read_file,
)
from stenolog.settings.values import AgentSettings, Settings, masked_value

DEFAULT_SOURCE: Final = "default"
FLAGS_SOURCE: Final = "the command line"

_MAIN_AGENT: Final = "main"
_VALID_NAME: Final = re.compile(r"[A-Za-z0-9]+(?:[_-][A-Za-z0-9]+)*")
_ALTERNATIVE_FIELDS: Final = {
    "system": "system_file", "key": "key_env", "token": "token_env", "secret": "secret_env",
    "system_file": "system", "key_env": "key", "token_env": "token", "secret_env": "secret",
}  # fmt: skip
"""Fields of the same meaning, such as `key_env` for `key`. The field in the later source counts."""
_MAX_PROMPT_BYTES: Final = 1_048_576
"""Maximum size of a `system_file`."""
_SERVER_VARIABLES: Final = ("OLLAMA_CONTEXT_LENGTH", "OLLAMA_HOST", "OPENAI_BASE_URL")
"""Environment variables of model servers, other than keys."""
_VARIABLE_FIELDS: Final = ("key_env", "token_env", "secret_env")
"""Fields whose value is the name of a variable with a secret."""
_ERROR_PATH: Final = re.compile(r"`\$\.([a-z0-9_.]+)")
"""Pattern of the path in an error of msgspec, such as `$.context.reserve`."""

_NOT_TEXT: Final = "this is not UTF-8 text"

T = TypeVar("T", bound=Struct)
Table = dict[str, Any]


class SettingValue(Struct, frozen=True, kw_only=True):
    """A value and its source.

    The source is `default`, the config file, a variable, `the command line`, or the field of
    `agent` from which an additional agent inherits the value.
    """

    value: Any
    source: str


class EffectiveSettings(Struct, frozen=True, kw_only=True):
    """The settings and their sources."""

    settings: Settings
    file: File
    """The config file that was read, or would be read if it existed."""
    file_exists: bool
    values: Mapping[str, SettingValue]
    """All fields by dotted name. Secrets are masked."""
    warnings: tuple[str, ...] = ()


def load_effective_settings(
    *,
    config: File | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] = MappingProxyType({}),
) -> EffectiveSettings:
    """Return the settings: defaults, overridden by config file, environment and flags.

    Later sources override earlier sources. `config`: a file that must exist; by default the file
    that STENO_CONFIG names, or else the user's own file, if it exists. `flags`: values by dotted
    name, such as `agent.model`; None is ignored. Raises WrongSettings with all problems.
    """
    variables = os.environ if environment is None else environment
    content, file = read_file(config, variables), config_path(config, variables)
    is_shared = content is not None and content.is_shared
    reader = _SettingsReader(str(file))
    if content is not None:
        reader.add_file(content.table, file.parent)
    reader.add_environment(variables)
    reader.add_flags(flags)
    settings = reader.make_settings()
    complete_settings = msgspec.structs.replace(
        reader.with_prompts(settings), keys=_model_variables(settings, variables)
    )
    if reader.problems:
        raise WrongSettings(reader.problems)
    values: dict[str, SettingValue] = {}
    warnings: list[str] = []
    for path, value in _field_values(settings):
        name, source = join_path(path), reader.source(path)
        shown_value = masked_value(path[-1], value)
        values[name] = SettingValue(value=shown_value, source=source)
        if is_shared and source == str(file) and shown_value != value:
            text = f"{file} contains {name} and can be read by other users; run: chmod 600 {file}"
            warnings.append(text)
    return EffectiveSettings(
        settings=complete_settings,
        file=file,
        file_exists=content is not None,
        values=MappingProxyType(values),
        warnings=tuple(warnings),
    )


# --- environment ----------------------------------------------------------------------------------
# The variable `STENO_AGENT__MAX_ITERATIONS` sets `agent.max_iterations`.
# Two underscores replace the dot, because field names contain single underscores.


DOT_REPLACEMENT: Final = "__"

_BOOLEAN_WORDS: Final = {
    "true": True, "yes": True, "on": True, "1": True,
    "false": False, "no": False, "off": False, "0": False,
}  # fmt: skip


def variable_of(path: KeyPath) -> str:
    """Return the name of the environment variable that sets a field."""
    return VARIABLE_PREFIX + DOT_REPLACEMENT.join(path).upper().replace("-", "_")


def parse_value(field: Field, text: str) -> object:
    """Parse a text for a field; return the text itself if it cannot be parsed."""
    match inspect.type_info(field.type):
        case inspect.StrType() | inspect.LiteralType():
            return text
        case inspect.BoolType():
            return _BOOLEAN_WORDS.get(text.strip().lower(), text)
        case inspect.VarTupleType() if not text.strip().startswith("["):
            return [part.strip() for part in text.split(",") if part.strip()]
    try:
        table = tomllib.loads(f"value = {text.strip()}")
    except (ValueError, RecursionError):
        return text
    return table["value"] if len(table) == 1 else text


def variable_form(name: str) -> str:
    """Return a name in the form used in variables: lower case, with underscores for dashes."""
    return name.lower().replace("-", "_")


# --- reading --------------------------------------------------------------------------------------


class _SettingsReader:
    """Reader of the sources. It collects problems, so that all of them are reported at once."""

    def __init__(self, file: str) -> None:
        self.problems: list[Problem] = []
        self._file = file
        self._file_table: Table = {}
        self._variable_table: Table = {}
        self._flag_table: Table = {}

    def source(self, path: KeyPath) -> str:
        """Return the last source that has the field."""
        alternative_path = _alternative_path(path)
        for table, source in (
            (self._flag_table, FLAGS_SOURCE),
            (self._variable_table, variable_of(path)),
            (self._file_table, self._file),
        ):
            if _find_value(table, path) is not None:
                return source
            if _find_value(table, alternative_path):
                return DEFAULT_SOURCE
        if path[0] == "agents":
            inherited_path = ("agent", *path[2:])
            if self.source(inherited_path) != DEFAULT_SOURCE:
                return join_path(inherited_path)
        return DEFAULT_SOURCE

    def _add_problem(self, path: KeyPath, reason: str, source: str | None = None) -> None:
        """Report a problem, unless the value is inherited: then it is reported for `agent`."""
        source = source or self.source(path)
        if source == join_path(("agent", *path[2:])):
            return
        self.problems.append(Problem(source=source, field=join_path(path), reason=reason))

    # --- sources -----------------------------------------------------------------------------

    def add_file(self, table: Table, folder: File) -> None:
        """Add the config file. A relative `system_file` starts at its folder."""
        for alias, name in TABLE_ALIASES.items():
            if alias in table and name in table:
                reason = f"is the same table as {name}; remove one of them"
                self._add_problem((alias,), reason, self._file)
            table = {name if key == alias else key: value for key, value in table.items()}
        self._file_table = table
        agents = table.get("agents")
        for agent in [table.get("agent"), *(agents.values() if _is_table(agents) else ())]:
            if _is_table(agent) and isinstance(agent.get("system_file"), str):
                prompt_file = expand_home(agent["system_file"])
                agent["system_file"] = agent["system_file"] and str(folder / prompt_file)

    def add_environment(self, variables: Mapping[str, str]) -> None:
        """Add the variables. The file must be added first, because it spells the names."""
        for variable in sorted(name for name in variables if name.startswith(VARIABLE_PREFIX)):
            name, text = variable.removeprefix(VARIABLE_PREFIX), variables[variable]
            if not text or DOT_REPLACEMENT not in name:
                continue
            path = self._with_file_spelling(tuple(name.lower().split(DOT_REPLACEMENT)))
            path = (TABLE_ALIASES.get(path[0], path[0]), *path[1:])
            if _has_surrogates(text):
                self._add_problem(path, _NOT_TEXT, variable)
                continue
            field = find_field(path)
            value = text if field is None else parse_value(field, text)
            _set_value(self._variable_table, path, value)

    def _with_file_spelling(self, path: KeyPath) -> KeyPath:
        """Return the path with a user-chosen name as the config file spells it.

        Variables ignore case and dashes.
        """
        named_tables = self._file_table.get(path[0])
        if path[0] not in NAMED_TABLES or not _is_table(named_tables):
            return path
        names_by_form = {variable_form(name): name for name in named_tables}
        return (path[0], names_by_form.get(variable_form(path[1]), path[1]), *path[2:])

    def add_flags(self, flags: Mapping[str, object]) -> None:
        """Add the options of a command. None is an option that was not given."""
        for name, value in flags.items():
            path = tuple(name.split("."))
            if isinstance(value, str) and _has_surrogates(value):
                self._add_problem(path, _NOT_TEXT, FLAGS_SOURCE)
            elif value is not None:
                _set_value(self._flag_table, path, value)

    # --- values ------------------------------------------------------------------------------

    def make_settings(self) -> Settings:
        """Merge the sources, and convert each table. Wrong values become problems."""
        tables = _merge(_merge(self._file_table, self._variable_table), self._flag_table)
        self._check_names(Settings, (), tables)
        values: dict[str, Any] = {}
        for field in msgspec.structs.fields(Settings):
            name = field.name
            if name in NAMED_TABLES:
                values[name] = self._convert_named_tables(get_args(field.type)[-1], name, tables)
            elif (name,) not in IGNORED_PATHS:
                values[name] = self._convert(field.type, (name,), tables.get(name, {}))
        settings = Settings(**values)
        self._check_routes(settings)
        return settings

    def with_prompts(self, settings: Settings) -> Settings:
        """Return the settings with the text of each `system_file` as system prompt."""
        agents = {
            name: self._with_prompt(agent, "agents", name)
            for name, agent in settings.agents.items()
        }
        agent = self._with_prompt(settings.agent, "agent")
        return msgspec.structs.replace(settings, agent=agent, agents=agents)

    def _with_prompt(self, agent: AgentSettings, *path: str) -> AgentSettings:
        if not agent.system_file:
            return agent
        try:
            return msgspec.structs.replace(
                agent, system=_read_prompt(expand_home(agent.system_file))
            )
        except InvalidValue as error:
            self._add_problem((*path, "system_file"), str(error))
            return agent

    def _convert_named_tables(
        self, struct: type[Struct], name: str, tables: Table
    ) -> dict[str, Any]:
        """Convert the tables with user-chosen names. Agents inherit the values of `agent`."""
        named_tables, agent_table = tables.get(name, {}), tables.get("agent", {})
        if not _is_table(named_tables):
            self._add_problem((name,), f"must be a table: [{name}]")
            return {}
        values: dict[str, Any] = {}
        for key, table in sorted(named_tables.items()):
            path = (name, key)
            if _is_table(table):
                self._check_names(struct, path, table)
            if not _VALID_NAME.fullmatch(key):
                reason = "invalid name; use letters and digits, with single - or _ between them"
                self._add_problem(path, reason)
            elif path == ("agents", _MAIN_AGENT):
                self._add_problem(path, "configure the agent main in [agent]")
            elif name == "agents" and _is_table(table) and _is_table(agent_table):
                values[key] = self._convert(struct, path, _merge(agent_table, table))
            else:
                values[key] = self._convert(struct, path, table)
        return values

    def _convert(self, struct: type[T], path: KeyPath, table: object) -> T:
        """Convert a table. If this is impossible, report the problem and return the defaults."""
        try:
            values = msgspec.convert(table, struct)
        except msgspec.ValidationError as error:
            # The text of the error names the field, but may contain the wrong value.
            match = _ERROR_PATH.search(str(error))
            wrong_path = (*path, *match[1].split(".")) if match else path
            field = find_field(wrong_path)
            wanted = (
                f"a table: [{join_path(wrong_path)}]" if field is None else describe_type(field)
            )
            self._add_problem(wrong_path, f"must be {wanted}")
            return struct()
        values_by_path = dict(_field_values(values, path))
        for field_path, value in values_by_path.items():
            alternative_path = _alternative_path(field_path)
            # `alternative_path > field_path` holds for one of the two fields.
            if value and alternative_path > field_path and values_by_path.get(alternative_path):
                reason = f"set either this or {join_path(alternative_path)}, not both"
                self._add_problem(field_path, reason)
            try:
                check_value(field_path[-1], value)
            except InvalidValue as error:
                self._add_problem(field_path, str(error))
        if isinstance(values, AgentSettings):
            self._check_reserve(values, path)
        return values

    def _check_names(self, struct: type[Struct], path: KeyPath, table: Table) -> None:
        """Report names in a table and its sub-tables that are not names of fields."""
        types = {field.name: field.type for field in msgspec.structs.fields(struct)}
        known_names = sorted(name for name in types if (*path, name) not in IGNORED_PATHS)
        for name, value in table.items():
            if name not in known_names:
                reason = f"unknown setting; known ones are {', '.join(known_names)}"
                self._add_problem((*path, name), reason)
            elif _is_table(value) and (sub_struct := _struct_of(types[name])):
                self._check_names(sub_struct, (*path, name), value)

    def _check_reserve(self, agent: AgentSettings, path: KeyPath) -> None:
        """Report a `context.reserve` that leaves no tokens for the request."""
        reserve, limit = agent.context.reserve, agent.max_context_tokens
        if reserve >= limit:
            reason = f"must be less than max_context_tokens ({limit:,}), not {reserve:,}"
            reserve_path = (*path, "context", "reserve")
            self._add_problem(reserve_path, reason, self.source(reserve_path))

    def _check_routes(self, settings: Settings) -> None:
        """Report a route that two agents have."""
        agents_by_route: dict[str, str] = {}
        for name, agent in settings.agents.items():
            for route in agent.routes:
                other_name = agents_by_route.setdefault(route, name)
                if other_name != name:
                    reason = f"{route} is also in agents.{other_name}.routes"
                    self._add_problem(("agents", name, "routes"), reason)


def _read_prompt(file: File) -> str:
    try:
        with file.open("rb") as prompt_file:
            content = prompt_file.read(_MAX_PROMPT_BYTES + 1)
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{file} is not UTF-8 text") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidValue(f"{file} cannot be read: {reason}") from error
    if len(content) > _MAX_PROMPT_BYTES:
        raise InvalidValue(f"{file} is longer than {_MAX_PROMPT_BYTES:,} bytes")
    return text


def _model_variables(settings: Settings, variables: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables of model servers, and those that a setting names."""
    names = {value for path, value in _field_values(settings) if path[-1] in _VARIABLE_FIELDS}
    names.update(_SERVER_VARIABLES, (name for name in variables if name.endswith("_API_KEY")))
    return MappingProxyType(
        {name: variables[name] for name in variables if name in names and variables[name]}
    )


# --- tables ---------------------------------------------------------------------------------------


def _is_table(value: object) -> TypeGuard[Table]:
    return isinstance(value, dict)


def _struct_of(field_type: Any) -> type[Struct] | None:
    is_struct = isinstance(field_type, type) and issubclass(field_type, Struct)
    return field_type if is_struct else None


def _has_surrogates(text: str) -> bool:
    """Return whether a text contains surrogates, which stand for bytes that are not UTF-8."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _alternative_path(path: KeyPath) -> KeyPath:
    """Return the path of the field with the same meaning, or a path that no field has."""
    return (*path[:-1], _ALTERNATIVE_FIELDS.get(path[-1], ""))


def _find_value(table: Table, path: KeyPath) -> Any:
    """Return the value at a path, or None."""
    value: Any = table
    for name in path:
        value = value.get(name) if _is_table(value) else None
    return value


def _set_value(table: Table, path: KeyPath, value: object) -> None:
    """Set the value at a path. A value in the way is replaced by a table."""
    for name in path[:-1]:
        if not _is_table(table.get(name)):
            table[name] = {}
        table = table[name]
    table[path[-1]] = value


def _merge(base: Table, override: Table) -> Table:
    """Merge two tables. A field in `override` also replaces the field of the same meaning."""
    merged_table = {
        name: value
        for name, value in base.items()
        if _is_table(value) or not override.get(_ALTERNATIVE_FIELDS.get(name, ""))
    }
    for name, value in override.items():
        base_value = base.get(name)
        if _is_table(value) and _is_table(base_value):
            value = _merge(base_value, value)
        merged_table[name] = value
    return merged_table


def _field_values(table: Struct, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield path and value of each field of a table and its sub-tables."""
    for name in table.__struct_fields__:
        value, field_path = getattr(table, name), (*path, name)
        if isinstance(value, Struct):
            yield from _field_values(value, field_path)
        elif field_path in IGNORED_PATHS:
            continue
        elif not path:
            for key, named_table in value.items():
                yield from _field_values(named_table, (name, key))
        else:
            yield field_path, value
