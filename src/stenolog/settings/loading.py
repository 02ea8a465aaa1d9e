"""Loads settings from config file, environment and command-line flags."""

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path as File
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct, inspect

from stenolog.errors import Problem, WrongSettings
from stenolog.settings.fields import (
    FIELD_ALIASES,
    NAMED_TABLES,
    Field,
    InvalidValue,
    all_fields,
    check_value,
    field_path,
    fields_of_table,
    find_field,
    has_surrogates,
    section_paths,
    unknown_setting_text,
)
from stenolog.settings.file import (
    VARIABLE_PREFIX,
    FileContent,
    KeyPath,
    config_path,
    expand_home,
    join_path,
    read_file,
)
from stenolog.settings.values import Settings, masked_value

# --- environment ----------------------------------------------------------------------------------
# The variable `STENO_AGENT__MAX_ITERATIONS` sets `agent.max_iterations`.
# Two underscores replace the dot, because field names contain single underscores.


DOT_REPLACEMENT: Final = "__"
_T = TypeVar("_T")

_BOOLEAN_WORDS: Final = {
    "true": True, "yes": True, "on": True, "1": True,
    "false": False, "no": False, "off": False, "0": False,
}  # fmt: skip


def variable_of(path: KeyPath) -> str:
    """Return the name of the environment variable that sets a field."""
    return VARIABLE_PREFIX + DOT_REPLACEMENT.join(path).upper().replace("-", "_")


def parse_value(field: Field, text: str) -> object:
    """Parse a text for a field; return the text itself if it cannot be parsed."""
    if has_surrogates(text):
        return text
    match inspect.type_info(field.type):
        case inspect.BoolType():
            return _BOOLEAN_WORDS.get(text.strip().lower(), text)
        case inspect.IntType():
            return _parse_or_keep(int, text)
        case inspect.FloatType():
            return _parse_or_keep(float, text)
        case inspect.VarTupleType() if not text.strip().startswith("["):
            return [part.strip() for part in text.split(",") if part.strip()]
        case inspect.VarTupleType() | inspect.DictType():
            return _parse_or_keep(_parse_toml, text)
    return text


def _parse_or_keep(parse: Callable[[str], _T], text: str) -> _T | str:
    try:
        return parse(text.strip())
    except (ValueError, RecursionError):
        return text


def _parse_toml(text: str) -> Any:
    table = tomllib.loads(f"value = {text}")
    if len(table) != 1:
        raise ValueError("more than one value")
    return table["value"]


def variable_form(name: str) -> str:
    """Return a name in the form used in variables: lower case, with underscores for dashes."""
    return name.lower().replace("-", "_")


# --- layers ---------------------------------------------------------------------------------------
# A layer has the values of the file, the environment or the flags, checked field by field.
# A later layer overrides an earlier layer. The values of `agents.NAME` override those of `agent`.
# Problems are collected, so that all of them are reported at once.


FLAGS_SOURCE: Final = "the command line"

_MAIN_AGENT: Final = "main"
_VALID_NAME: Final = re.compile(r"[A-Za-z0-9]+(?:[_-][A-Za-z0-9]+)*")
_FIELD_PAIRS: Final = {
    "system": "system_file", "key": "key_env", "token": "token_env", "secret": "secret_env",
}  # fmt: skip
_ALTERNATIVE_FIELDS: Final = _FIELD_PAIRS | {
    second: first for first, second in _FIELD_PAIRS.items()
}
"""Fields of the same meaning, such as `key_env` for `key`. The field in the later layer counts."""
_MAX_PROMPT_BYTES: Final = 1_048_576
"""Maximum size of a `system_file`."""


class SettingValue(Struct, frozen=True, kw_only=True):
    """A value and its source.

    The source is `default`, `FILE:LINE`, a variable, `the command line`, or the field of `agent`
    from which an additional agent inherits the value.
    """

    value: Any
    source: str
    folder: File | None = None
    """Folder to which a relative path in the value refers; None for the current folder."""


Layer = dict[KeyPath, SettingValue]
SourcedValue = tuple[KeyPath, object, str]
"""Path, unchecked value and source of a setting."""


def merge_layers(base: Layer, override: Layer) -> Layer:
    """Merge two layers. A field in `override` also replaces the other field of the same meaning."""
    replaced_paths = {_alternative_path(path) for path in override if override[path].value}
    return {path: base[path] for path in base if path not in replaced_paths} | override


class LayerReader:
    """Reader of the layers. It collects user-chosen names and problems."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.names: dict[str, dict[str, str]] = {table: {} for table in NAMED_TABLES}
        """Source that first used each user-chosen name, by table and name."""

    # --- the layers --------------------------------------------------------------------------

    def read_layer(self, values: Iterable[SourcedValue], folder: File | None = None) -> Layer:
        """Check the values of a source, and return its layer."""
        layer: Layer = {}
        for path, value, source in values:
            if (field := find_field(path)) is None:
                self._add_problem(source, path, unknown_setting_text(path))
                continue
            self._record_name(path, source)
            try:
                checked_value = check_value(field, value)
            except InvalidValue as error:
                self._add_problem(source, path, str(error))
            else:
                layer[path] = SettingValue(value=checked_value, source=source, folder=folder)
        self._resolve_equivalent_fields(layer)
        return layer

    def environment_values(self, variables: Mapping[str, str]) -> Iterable[SourcedValue]:
        """Yield the values of the environment.

        The file's layer must be read first, because user-chosen names are spelled as in the file.
        """
        for variable in sorted(name for name in variables if name.startswith(VARIABLE_PREFIX)):
            name, text = variable.removeprefix(VARIABLE_PREFIX), variables[variable]
            if DOT_REPLACEMENT not in name:
                self._report_single_underscore(variable, name)
                continue
            path = self._with_file_spelling(tuple(name.lower().split(DOT_REPLACEMENT)))
            field = find_field(path)
            if field is None or text:
                yield path, text if field is None else parse_value(field, text), variable

    def _report_single_underscore(self, variable: str, name: str) -> None:
        """Report a variable with one underscore instead of two, which would have no effect."""
        # STENO_AGENT_MODEL is reported, but not STENO_UPDATE, which starts with no section.
        section = name.partition("_")[0].lower()
        if section not in {path[0] for path in all_fields()}:
            return
        matches = [path for path in all_fields() if "_".join(path).upper() == name]
        suggestion = variable_of(matches[0] if matches else (section, "NAME"))
        reason = f"unknown setting; did you mean {suggestion}? (two underscores replace the dot)"
        self.problems.append(Problem(source=variable, reason=reason))

    def _with_file_spelling(self, path: KeyPath) -> KeyPath:
        """Return the path with a user-chosen name as the config file spells it.

        Variables ignore case and dashes.
        """
        if len(path) < 2 or path[0] not in NAMED_TABLES:
            return path
        names_by_form = {variable_form(name): name for name in self.names[path[0]]}
        return (path[0], names_by_form.get(variable_form(path[1]), path[1]), *path[2:])

    def file_values(
        self, file: FileContent, table: Mapping[str, Any], parent_path: KeyPath = ()
    ) -> Iterable[SourcedValue]:
        """Yield the values of a table of the config file and of its sub-tables.

        Unknown fields are recorded as problems.
        """
        for name, value in table.items():
            path = (*parent_path, name)
            if find_field(path) is not None:
                yield path, value, file.source(path)
            elif field_path(path) not in section_paths():
                self._add_problem(file.source(path), path, unknown_setting_text(path))
            elif not isinstance(value, dict):
                self._add_problem(file.source(path), path, f"must be a table: [{join_path(path)}]")
            else:
                self._record_name(path, file.source(path))
                yield from self.file_values(file, value, path)

    def _record_name(self, path: KeyPath, source: str) -> None:
        if len(path) > 1 and path[0] in NAMED_TABLES:
            self.names[path[0]].setdefault(path[1], source)

    def _add_problem(self, source: str, path: KeyPath, reason: str) -> None:
        self.problems.append(Problem(source=source, field=join_path(path), reason=reason))

    def _resolve_equivalent_fields(self, layer: Layer) -> None:
        """Replace aliases by their fields, and report settings that exclude each other."""
        for alias, path in FIELD_ALIASES.items():
            alias_setting = layer.pop(alias, None)
            if alias_setting is None:
                continue
            setting = layer.setdefault(path, alias_setting)
            if setting.value != alias_setting.value:
                reason = f"contradicts {join_path(path)} ({setting.source}); remove one of them"
                self._add_problem(alias_setting.source, alias, reason)
        for path, setting in layer.items():
            alternative = _alternative_path(path)
            is_alternative_set = alternative in layer and bool(layer[alternative].value)
            # `alternative > path` holds for one of the two fields, so a conflict is reported once.
            if setting.value and alternative > path and is_alternative_set:
                source = layer[alternative].source
                reason = f"set either this or {join_path(alternative)} ({source}), not both"
                self._add_problem(setting.source, path, reason)

    # --- checks across values ------------------------------------------------------------------

    def check_names(self) -> None:
        """Report user-chosen names that are invalid or too similar."""
        names_by_form: dict[KeyPath, str] = {}
        for table in NAMED_TABLES:
            for name, source in sorted(self.names[table].items()):
                path = (table, name)
                if not _VALID_NAME.fullmatch(name):
                    reason = "invalid name; use letters and digits, with single - or _ between them"
                    self._add_problem(source, path, reason)
                elif path == ("agents", _MAIN_AGENT):
                    self._add_problem(source, path, "configure the agent main in [agent]")
                other_name = names_by_form.setdefault((table, variable_form(name)), name)
                if other_name != name:
                    reason = "environment variables ignore case and dashes"
                    self._add_problem(source, path, f"too similar to {other_name!r}: {reason}")

    def check_routes(self, layer: Layer) -> None:
        """Report a route that two agents have."""
        routes: dict[str, KeyPath] = {}
        for path, setting in layer.items():
            if field_path(path) != ("agents", "NAME", "routes"):
                continue
            for route in setting.value:
                other_path = routes.setdefault(route, path)
                if other_path != path:
                    other_field = f"{join_path(other_path)} ({layer[other_path].source})"
                    self._add_problem(setting.source, path, f"{route} is also in {other_field}")

    def check_reserves(self, layer: Layer) -> None:
        """Report each `context.reserve` that leaves no tokens for the request."""
        for path, setting in layer.items():
            if path[-2:] != ("context", "reserve"):
                continue
            default_limit = all_fields()["agent", "max_context_tokens"].default
            limit_setting = layer.get((*path[:-2], "max_context_tokens"))
            limit = default_limit if limit_setting is None else limit_setting.value
            if setting.value >= limit:
                reason = f"must be less than max_context_tokens ({limit:,}), not {setting.value:,}"
                self._add_problem(setting.source, path, reason)

    def read_prompts(self, layer: Layer) -> None:
        """Read each system_file, and set the system prompt to its text."""
        for path, setting in list(layer.items()):
            if path[-1] != "system_file" or not setting.value:
                continue
            file = expand_home(setting.value)
            if setting.folder is not None:
                file = setting.folder / file
            try:
                text = _read_prompt(file)
            except InvalidValue as error:
                self._add_problem(setting.source, path, str(error))
                continue
            layer[path] = SettingValue(value=str(file), source=setting.source)
            layer[(*path[:-1], "system")] = SettingValue(value=text, source=str(file))


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


def _alternative_path(path: KeyPath) -> KeyPath:
    """Return the path of the field with the same meaning, or a path that no field has."""
    return (*path[:-1], _ALTERNATIVE_FIELDS.get(path[-1], ""))


def with_inherited_values(layer: Layer, agents: Iterable[str]) -> Layer:
    """Return the layer with the values that each additional agent inherits from `agent`."""
    complete_layer = dict(layer)
    for name in agents:
        inherited_layer = {
            ("agents", name, *path[1:]): SettingValue(value=setting.value, source=join_path(path))
            for path, setting in layer.items()
            if path[0] == "agent"
        }
        agent_layer = {path: layer[path] for path in layer if path[:2] == ("agents", name)}
        complete_layer |= merge_layers(inherited_layer, agent_layer)
    return complete_layer


# --- loading --------------------------------------------------------------------------------------


DEFAULT_SOURCE: Final = "default"

_SERVER_VARIABLES: Final = ("OLLAMA_CONTEXT_LENGTH", "OLLAMA_HOST", "OPENAI_BASE_URL")
"""Environment variables of model servers, other than keys."""
_VARIABLE_FIELDS: Final = ("key_env", "token_env", "secret_env")
"""Fields whose value is the name of a variable with a secret."""


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
    file = read_file(config, variables)
    reader = LayerReader()
    file_layer: Layer = {}
    if file is not None:
        file_layer = reader.read_layer(reader.file_values(file, file.table), file.file.parent)
    layer = merge_layers(file_layer, reader.read_layer(reader.environment_values(variables)))
    # A flag with the value None was not given.
    given_flags = [
        (tuple(name.split(".")), value, FLAGS_SOURCE)
        for name, value in flags.items()
        if value is not None
    ]
    layer = merge_layers(layer, reader.read_layer(given_flags))
    reader.check_names()
    reader.check_routes(layer)
    reader.read_prompts(layer)
    layer = with_inherited_values(layer, sorted(reader.names["agents"]))
    reader.check_reserves(layer)
    if reader.problems:
        raise WrongSettings(reader.problems)
    return EffectiveSettings(
        settings=_build_settings(layer, reader.names, variables),
        file=config_path(config, variables) if file is None else file.file,
        file_exists=file is not None,
        values=MappingProxyType(_effective_values(layer, reader.names)),
        warnings=tuple(_file_warnings(file, file_layer)),
    )


# --- the values ------------------------------------------------------------------------------


def _build_settings(
    layer: Layer, names: Mapping[str, Iterable[str]], variables: Mapping[str, str]
) -> Settings:
    tables: dict[str, Any] = {kind: {name: {} for name in sorted(names[kind])} for kind in names}
    for path, setting in layer.items():
        table = tables
        for name in path[:-1]:
            table = table.setdefault(name, {})
        table[path[-1]] = setting.value
    named_variables = {
        setting.value for path, setting in layer.items() if path[-1] in _VARIABLE_FIELDS
    }
    tables["keys"] = {
        name: value
        for name, value in variables.items()
        if value and (name.endswith("_API_KEY") or name in {*_SERVER_VARIABLES, *named_variables})
    }
    return msgspec.convert(tables, Settings)


def _effective_values(layer: Layer, names: Mapping[str, Iterable[str]]) -> dict[str, SettingValue]:
    """Return all fields with masked value and source, by dotted name."""
    values: dict[str, SettingValue] = {}
    for section in _sections_in_use(names):
        for field in fields_of_table(section):
            path = (*section, field.path[-1])
            setting = layer.get(path) or SettingValue(value=field.default, source=DEFAULT_SOURCE)
            value = masked_value(field.path[-1], setting.value)
            values[join_path(path)] = SettingValue(value=value, source=setting.source)
    return values


def _sections_in_use(names: Mapping[str, Iterable[str]]) -> Iterable[KeyPath]:
    for section in dict.fromkeys(path[:-1] for path in all_fields()):
        if section[0] not in NAMED_TABLES:
            yield section
            continue
        for name in sorted(names[section[0]]):
            yield (section[0], name, *section[2:])


def _file_warnings(file: FileContent | None, layer: Layer) -> Iterable[str]:
    """Yield a warning for each secret in a file that other users can read."""
    if file is None or not file.is_shared:
        return
    for path, setting in layer.items():
        if masked_value(path[-1], setting.value) != setting.value:
            yield (
                f"{file.file} contains {join_path(path)} and can be read by other users; run: "
                f"chmod 600 {file.file}"
            )
