"""Loads settings from config file, environment and command-line flags."""

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path as File
from types import MappingProxyType
from typing import Any, Final, TypeVar

from msgspec import Struct, inspect
from msgspec.structs import fields as struct_fields

from stenolog.errors import Problem, WrongSettings
from stenolog.settings.fields import (
    ALIASES,
    NAMED,
    Field,
    all_fields,
    field_path,
    fields_of,
    find_field,
    section_class,
    sections,
    unknown_setting,
)
from stenolog.settings.file import (
    PREFIX,
    FileValue,
    Path,
    config_path,
    dotted,
    expand_home,
    read_file,
)
from stenolog.settings.validation import InvalidValue, check_value, has_surrogates
from stenolog.settings.values import Settings, masked
from stenolog.stores import log_reports

# --- environment ----------------------------------------------------------------------------------
# `STENO_AGENT__MAX_ITERATIONS` is `agent.max_iterations`. Two underscores replace the dot, because
# field names contain single underscores.


DOT: Final = "__"
_T = TypeVar("_T")

_BOOLEANS: Final = {
    "true": True, "yes": True, "on": True, "1": True,
    "false": False, "no": False, "off": False, "0": False,
}  # fmt: skip


class EnvironmentValue:
    """The settings in the environment: unchecked values, and problems with names."""

    def __init__(self, environment: Mapping[str, str], names: Mapping[str, set[str]]) -> None:
        """Read the variables. `names`: names of models and agents in the config file."""
        self.values: dict[Path, tuple[str, object]] = {}
        """Variable and value of each setting, by path."""
        self.problems: list[Problem] = []
        for variable in sorted(environment):
            if not variable.startswith(PREFIX):
                continue
            name = variable.removeprefix(PREFIX)
            if DOT not in name:
                self._look_at_other(variable, name)
                continue
            path = _with_names(tuple(part.lower() for part in name.split(DOT)), names)
            field = find_field(path)
            if field is None:
                self._refuse(variable, path)
            elif environment[variable]:
                self.values[path] = (variable, parse_value(field, environment[variable]))

    def _look_at_other(self, variable: str, rest: str) -> None:
        # STENO_UPDATE is not a setting, but STENO_AGENT_MODEL would silently have no effect.
        section = rest.partition("_")[0].lower()
        if section not in {path[0] for path in all_fields()}:
            return
        meant = [each for each in all_fields() if "_".join(each).upper() == rest]
        name = variable_of(meant[0]) if meant else f"{PREFIX}{section.upper()}{DOT}NAME"
        reason = f"unknown setting; did you mean {name}? (two underscores replace the dot)"
        self.problems.append(Problem(source=variable, reason=reason))

    def _refuse(self, variable: str, path: Path) -> None:
        reason = unknown_setting(path)
        self.problems.append(Problem(source=variable, field=".".join(path), reason=reason))


def variable_of(path: Path) -> str:
    """Return the variable that sets a field."""
    return PREFIX + DOT.join(path).upper().replace("-", "_")


def parse_value(field: Field, text: str) -> object:
    """Parse a text for a field; return the text itself if it cannot be parsed."""
    if has_surrogates(text):
        return text
    match inspect.type_info(field.type):
        case inspect.BoolType():
            return _BOOLEANS.get(text.strip().lower(), text)
        case inspect.IntType():
            return _or_text(int, text)
        case inspect.FloatType():
            return _or_text(float, text)
        case inspect.VarTupleType() if not text.strip().startswith("["):
            return [part.strip() for part in text.split(",") if part.strip()]
        case inspect.VarTupleType() | inspect.DictType():
            return _or_text(_toml, text)
    return text


def _or_text(read: Callable[[str], _T], text: str) -> _T | str:
    try:
        return read(text.strip())
    except (ValueError, RecursionError):
        return text


def _toml(text: str) -> Any:
    table = tomllib.loads(f"value = {text}")
    if len(table) != 1:
        raise ValueError("more than one value")
    return table["value"]


def _with_names(path: Path, names: Mapping[str, set[str]]) -> Path:
    """Return the path with a user-chosen name as the config file spells it.

    Variables ignore case and dashes.
    """
    if len(path) < 2 or path[0] not in NAMED:
        return path
    known = {variable_form(name): name for name in names.get(path[0], ())}
    return (path[0], known.get(variable_form(path[1]), path[1]), *path[2:])


def variable_form(name: str) -> str:
    """Return a name in the form used in variables, without case and dashes."""
    return name.lower().replace("-", "_")


# --- layers ---------------------------------------------------------------------------------------
# The layers of settings: the values of file, environment and flags, checked field by field. A later
# layer overrides an earlier layer, and an additional agent overrides `agent` in the same way.
# Problems are collected, so that all of them are reported at once.


FLAGS: Final = "the command line"

_MAIN: Final = "main"
_NAME: Final = re.compile(r"[A-Za-z0-9]+(?:[_-][A-Za-z0-9]+)*")
_ALTERNATIVES: Final = {
    "system": "system_file",
    "system_file": "system",
    "key": "key_env",
    "key_env": "key",
    "token": "token_env",
    "token_env": "token",
    "secret": "secret_env",
    "secret_env": "secret",
}
"""Pairs of fields with the same meaning. The field that was set last counts."""
_LONGEST_PROMPT: Final = 1_048_576


class SettingValue(Struct, frozen=True, kw_only=True):
    """A value and its source."""

    value: Any
    source: str
    folder: File | None = None
    """Folder at which a relative path in the value starts; None for the current folder."""


Layer = dict[Path, SettingValue]


def merge_layers(below: Layer, above: Layer) -> Layer:
    """Merge two layers. A field in `above` also removes the field with the same meaning."""
    remaining = {
        path: entry
        for path, entry in below.items()
        if not ((rival := _alternative(path)) in above and above[rival].value)
    }
    return {**remaining, **above}


class LayerReader:
    """A reader of all layers that collects user-chosen names and problems."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.names: dict[str, set[str]] = {kind: set() for kind in NAMED}
        self._sources: dict[Path, str] = {}
        """Source that first defined each setting."""

    # --- the layers --------------------------------------------------------------------------

    def of_file(self, written: FileValue | None) -> Layer:
        """Return the layer of the config file."""
        layer: Layer = {}
        if written is None:
            return layer
        for path, value in self._walk(written, written.table, ()):
            self._take(layer, path, value, source=written.source(path), folder=written.file.parent)
        self._settle(layer)
        return layer

    def of_environment(self, variables: Mapping[str, str]) -> Layer:
        """Return the layer of the environment. Call `of_file` first, which finds the names."""
        layer: Layer = {}
        environment = EnvironmentValue(variables, self.names)
        self.problems += environment.problems
        for path, (variable, value) in environment.values.items():
            self._take(layer, path, value, source=variable)
        self._settle(layer)
        return layer

    def of_flags(self, flags: Mapping[str, object]) -> Layer:
        """Return the layer of command-line flags. A flag of None was not given."""
        layer: Layer = {}
        for name, value in flags.items():
            path = tuple(name.split("."))
            if value is None:
                continue
            if find_field(path) is None:
                self._refuse(FLAGS, path, unknown_setting(path))
            else:
                self._take(layer, path, value, source=FLAGS)
        self._settle(layer)
        return layer

    def _walk(
        self, written: FileValue, table: Mapping[str, Any], above: Path
    ) -> Iterable[tuple[Path, object]]:
        """Yield the fields of a table and its sub-tables.

        Unknown fields are recorded as problems.
        """
        for name, value in table.items():
            path = (*above, name)
            if find_field(path) is not None:
                yield path, value
            elif field_path(path) not in sections():
                self._refuse(written.source(path), path, unknown_setting(path))
            elif not isinstance(value, dict):
                reason = f"must be a table: [{dotted(path)}]"
                self._refuse(written.source(path), path, reason)
            else:
                self._note_name(path, written.source(path))
                yield from self._walk(written, value, path)

    def _take(
        self, layer: Layer, path: Path, value: object, *, source: str, folder: File | None = None
    ) -> None:
        self._note_name(path, source)
        field = find_field(path)
        if field is None:
            raise AssertionError(f"{path} was looked up before")
        try:
            layer[path] = SettingValue(
                value=check_value(field, value), source=source, folder=folder
            )
        except InvalidValue as wrong:
            self._refuse(source, path, str(wrong))

    def _note_name(self, path: Path, source: str) -> None:
        if len(path) > 1 and path[0] in NAMED:
            self.names[path[0]].add(path[1])
            self._sources.setdefault(path[:2], source)

    def _refuse(self, source: str, path: Path, reason: str) -> None:
        self.problems.append(Problem(source=source, field=dotted(path), reason=reason))

    def _settle(self, layer: Layer) -> None:
        """Resolve aliases and check conflicting fields, when all values of a layer are known."""
        for alias, path in ALIASES.items():
            self._settle_alias(layer, alias, path)
        self._check_rivals(layer)

    def _settle_alias(self, layer: Layer, alias: Path, path: Path) -> None:
        other = layer.pop(alias, None)
        if other is None:
            return
        value = layer.setdefault(path, other)
        if value.value != other.value:
            reason = f"contradicts {dotted(path)} ({value.source}); remove one of them"
            self._refuse(other.source, alias, reason)

    # --- checks across values ------------------------------------------------------------------

    def _check_rivals(self, layer: Layer) -> None:
        for path, entry in layer.items():
            rival = _alternative(path)
            # Only one of the two fields reports the conflict.
            if entry.value and rival > path and rival in layer and layer[rival].value:
                reason = f"set either this or {dotted(rival)} ({layer[rival].source}), not both"
                self._refuse(entry.source, path, reason)

    def check_names(self) -> None:
        """Reject names that are invalid or too similar."""
        forms: dict[Path, str] = {}
        for kind in NAMED:
            for name in sorted(self.names[kind]):
                path = (kind, name)
                source = self._sources[path]
                if not _NAME.fullmatch(name):
                    reason = "invalid name; use letters and digits, with single - or _ between them"
                    self._refuse(source, path, reason)
                elif path == ("agents", _MAIN):
                    self._refuse(source, path, "configure the agent main in [agent]")
                same = forms.setdefault((kind, variable_form(name)), name)
                if same != name:
                    reason = (
                        f"too similar to {same!r}: environment variables ignore case and dashes"
                    )
                    self._refuse(source, path, reason)

    def check_routes(self, layer: Layer) -> None:
        """Reject a route that two agents have."""
        routes: dict[str, Path] = {}
        for path, entry in layer.items():
            if field_path(path) != ("agents", "NAME", "routes"):
                continue
            for route in entry.value:
                other = routes.setdefault(route, path)
                if other != path:
                    reason = f"{route} is also in {dotted(other)} ({layer[other].source})"
                    self._refuse(entry.source, path, reason)

    def check_reserves(self, layer: Layer) -> None:
        """Reject a reserve that leaves no tokens of the context."""
        for path, entry in layer.items():
            if path[-2:] != ("context", "reserve"):
                continue
            limit_path = (*path[:-2], "max_context_tokens")
            field = all_fields()["agent", "max_context_tokens"]
            limit = layer[limit_path].value if limit_path in layer else field.default
            if entry.value >= limit:
                reason = f"must be less than max_context_tokens ({limit:,}), not {entry.value:,}"
                self._refuse(entry.source, path, reason)

    def read_prompts(self, layer: Layer) -> None:
        """Replace the system prompt by the text of each system_file."""
        for path, entry in list(layer.items()):
            if path[-1] != "system_file" or not entry.value:
                continue
            file = expand_home(entry.value)
            if entry.folder is not None:
                file = entry.folder / file
            try:
                text = _prompt(file)
            except InvalidValue as wrong:
                self._refuse(entry.source, path, str(wrong))
                continue
            layer[path] = SettingValue(value=str(file), source=entry.source)
            layer[(*path[:-1], "system")] = SettingValue(value=text, source=str(file))


def _prompt(file: File) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(_LONGEST_PROMPT + 1)
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{file} is not UTF-8 text") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidValue(f"{file} cannot be read: {reason}") from error
    if len(content) > _LONGEST_PROMPT:
        raise InvalidValue(f"{file} is longer than {_LONGEST_PROMPT:,} bytes")
    return text


def _alternative(path: Path) -> Path:
    """Return the path of the field with the same meaning; an unused path without such a field."""
    return (*path[:-1], _ALTERNATIVES.get(path[-1], ""))


def with_inherited(layer: Layer, agents: Iterable[str]) -> Layer:
    """Return the layer with the values that each additional agent inherits from `agent`."""
    whole = dict(layer)
    for name in agents:
        shared = {
            ("agents", name, *path[1:]): SettingValue(value=entry.value, source=dotted(path))
            for path, entry in layer.items()
            if path[0] == "agent"
        }
        agent_layer = {path: entry for path, entry in layer.items() if path[:2] == ("agents", name)}
        whole.update(merge_layers(shared, agent_layer))
    return whole


# --- loading --------------------------------------------------------------------------------------


DEFAULT: Final = "default"

_SERVER_VARIABLES: Final = ("OLLAMA_CONTEXT_LENGTH", "OLLAMA_HOST", "OPENAI_BASE_URL")
"""Environment variables of servers, other than keys."""
_VARIABLES: Final = ("key_env", "token_env", "secret_env")
"""Fields whose value is the name of a variable with a secret."""


class EffectiveValue(Struct, frozen=True, kw_only=True):
    """A value without secrets, and its source."""

    value: Any
    source: str
    """`default`, `FILE:LINE`, a variable, `the command line`, or the field of `agent` from which an
    additional agent inherits the value."""


class EffectiveSettings(Struct, frozen=True, kw_only=True):
    """The settings and their sources."""

    settings: Settings
    file: File
    """The config file that was read, or would be read if it existed."""
    found: bool
    """Whether the file exists."""
    shown: Mapping[str, EffectiveValue]
    """All fields with value and source, by dotted name."""
    warnings: tuple[str, ...] = ()


def load_settings(
    *,
    config: File | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] = MappingProxyType({}),
) -> Settings:
    """Return the settings: defaults, overridden by config file, environment and flags.

    Later sources override earlier sources. `config`: a file that must exist; by default the user's
    own file is read, if it exists. `flags`: values by dotted name, such as `agent.model`; None is
    ignored. Warnings are logged. Raises WrongSettings with all problems.
    """
    effective = load_effective(config=config, environment=environment, flags=flags)
    for warning in effective.warnings:
        log_reports.warning("%s", warning)
    return effective.settings


def load_effective(
    *,
    config: File | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] = MappingProxyType({}),
) -> EffectiveSettings:
    """Return the settings with the source of each value. Warnings are not logged.

    Raises WrongSettings.
    """
    variables = os.environ if environment is None else environment
    written = read_file(config, variables)
    layers = LayerReader()
    of_file = layers.of_file(written)
    layer = merge_layers(of_file, layers.of_environment(variables))
    layer = merge_layers(layer, layers.of_flags(flags))
    layers.check_names()
    layers.check_routes(layer)
    layers.read_prompts(layer)
    layer = with_inherited(layer, sorted(layers.names["agents"]))
    layers.check_reserves(layer)
    if layers.problems:
        raise WrongSettings(layers.problems)
    return EffectiveSettings(
        settings=_settings(layer, layers.names, variables),
        file=config_path(config, variables) if written is None else written.file,
        found=written is not None,
        shown=MappingProxyType(_effective_values(layer, layers.names)),
        warnings=tuple(_warnings(written, of_file)),
    )


# --- the values ------------------------------------------------------------------------------


def _settings(
    layer: Layer, names: Mapping[str, Iterable[str]], variables: Mapping[str, str]
) -> Settings:
    parts = {
        each.name: _build(layer, (each.name,))
        for each in struct_fields(Settings)
        if each.name not in (*NAMED, "keys")
    }
    tables: dict[str, Any] = {
        kind: MappingProxyType({name: _build(layer, (kind, name)) for name in sorted(names[kind])})
        for kind in NAMED
    }
    named = {
        *_SERVER_VARIABLES,
        *(entry.value for path, entry in layer.items() if path[-1] in _VARIABLES),
    }
    keys = {
        name: value
        for name, value in variables.items()
        if value and (name.endswith("_API_KEY") or name in named)
    }
    return Settings(**parts, **tables, keys=MappingProxyType(keys))


def _build(layer: Layer, path: Path) -> Any:
    """Return the value of a table, including its sub-tables."""
    fields: dict[str, Any] = {}
    for each in struct_fields(section_class(path)):
        here = (*path, each.name)
        if field_path(here) in sections():
            fields[each.name] = _build(layer, here)
        elif here in layer:
            value = layer[here].value
            fields[each.name] = MappingProxyType(value) if isinstance(value, dict) else value
    return section_class(path)(**fields)


def _effective_values(
    layer: Layer, names: Mapping[str, Iterable[str]]
) -> dict[str, EffectiveValue]:
    """Return all fields with value and source, by dotted name."""
    values: dict[str, EffectiveValue] = {}
    for section in _sections_in_use(names):
        for field in fields_of(section):
            path = (*section, field.path[-1])
            entry = layer.get(path) or SettingValue(value=field.default, source=DEFAULT)
            value = masked(field.path[-1], entry.value)
            values[dotted(path)] = EffectiveValue(value=value, source=entry.source)
    return values


def _sections_in_use(names: Mapping[str, Iterable[str]]) -> Iterable[Path]:
    for section in dict.fromkeys(path[:-1] for path in all_fields()):
        if section[0] not in NAMED:
            yield section
            continue
        for name in sorted(names[section[0]]):
            yield (section[0], name, *section[2:])


def _warnings(written: FileValue | None, layer: Layer) -> Iterable[str]:
    """Yield warnings about a file that other users can read."""
    if written is None or not written.shared:
        return
    for path, entry in layer.items():
        if masked(path[-1], entry.value) != entry.value:
            yield (
                f"{written.file} contains {dotted(path)} and can be read by other users; run: "
                f"chmod 600 {written.file}"
            )
