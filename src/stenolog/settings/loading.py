"""From file, environment and flags to the settings in force."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path as File
from types import MappingProxyType
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import fields as struct_fields

from stenolog.errors import WrongSettings
from stenolog.settings.fields import (
    NAMED,
    all_fields,
    general,
    of_section,
    section_class,
    sections,
)
from stenolog.settings.file import Written, config_path, read_file
from stenolog.settings.layers import Entry, Layer, Layers, over, with_shared
from stenolog.settings.paths import Path, dotted
from stenolog.settings.values import (
    AgentSettings,
    ModelSettings,
    RetentionSettings,
    Settings,
    WebhookSettings,
    masked,
)
from stenolog.stores import reports

DEFAULT: Final = "default"

_OF_SERVERS: Final = ("OLLAMA_CONTEXT_LENGTH", "OLLAMA_HOST", "OPENAI_BASE_URL")
"""What a server's own variables are, besides keys."""
_VARIABLES: Final = ("key_env", "token_env", "secret_env")
"""The fields that name a variable in which a secret stands."""


class Shown(Struct, frozen=True, kw_only=True):
    """A value as it can be shown, without its secrets, and where it comes from."""

    value: Any
    source: str
    """`default`, `FILE:LINE`, a variable, `the command line`, or the field of `agent` that a
    further agent shares."""


class InForce(Struct, frozen=True, kw_only=True):
    """The settings, and where they come from."""

    settings: Settings
    file: File
    """The config file that was read, or would be."""
    found: bool
    """Whether it is there."""
    shown: Mapping[str, Shown]
    """Every field by dotted name."""
    warnings: tuple[str, ...] = ()


def load_settings(
    *,
    config: File | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] = MappingProxyType({}),
) -> Settings:
    """The settings in force: defaults, under the config file, the environment and the flags.

    `config`: a file that must be there; without it the user's own is read, if there is one.
    `flags`: values by dotted name, as in `agent.model`; None is one that was not given. Warnings
    are logged. Raises WrongSettings, which holds all that is wrong.
    """
    found = settings_in_force(config=config, environment=environment, flags=flags)
    for words in found.warnings:
        reports.warning("%s", words)
    return found.settings


def settings_in_force(
    *,
    config: File | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] = MappingProxyType({}),
) -> InForce:
    """The same with where each value comes from; warnings are not logged. Raises WrongSettings."""
    variables = os.environ if environment is None else environment
    written = read_file(config, variables)
    layers = Layers()
    of_file = layers.of_file(written)
    layer = over(of_file, layers.of_environment(variables))
    layer = over(layer, layers.of_flags(flags))
    layers.check_names()
    layers.check_routes(layer)
    layers.read_prompts(layer)
    layer = with_shared(layer, sorted(layers.names["agents"]))
    layers.check_reserves(layer)
    if layers.problems:
        raise WrongSettings(layers.problems)
    return InForce(
        settings=_settings(layer, layers.names, variables),
        file=config_path(config, variables) if written is None else written.file,
        found=written is not None,
        shown=MappingProxyType(_told(layer, layers.names)),
        warnings=tuple(_warnings(written, of_file)),
    )


# --- the values ------------------------------------------------------------------------------


def _settings(
    layer: Layer, names: Mapping[str, Iterable[str]], variables: Mapping[str, str]
) -> Settings:
    parts = {
        each.name: _built(layer, (each.name,))
        for each in struct_fields(Settings)
        if each.name not in (*NAMED, "keys")
    }
    models: dict[str, ModelSettings] = {
        name: _built(layer, ("models", name)) for name in sorted(names["models"])
    }
    agents: dict[str, AgentSettings] = {
        name: _built(layer, ("agents", name)) for name in sorted(names["agents"])
    }
    webhooks: dict[str, WebhookSettings] = {
        name: _built(layer, ("webhooks", name)) for name in sorted(names["webhooks"])
    }
    retention: dict[str, RetentionSettings] = {
        name: _built(layer, ("retention", name)) for name in sorted(names["retention"])
    }
    named = {*_OF_SERVERS, *(one.value for path, one in layer.items() if path[-1] in _VARIABLES)}
    keys = {
        name: value
        for name, value in variables.items()
        if value and (name.endswith("_API_KEY") or name in named)
    }
    return Settings(
        **parts,
        models=MappingProxyType(models),
        agents=MappingProxyType(agents),
        webhooks=MappingProxyType(webhooks),
        retention=MappingProxyType(retention),
        keys=MappingProxyType(keys),
    )


def _built(layer: Layer, path: Path) -> Any:
    """The value of one table, with the tables in it."""
    given: dict[str, Any] = {}
    for each in struct_fields(section_class(path)):
        here = (*path, each.name)
        if general(here) in sections():
            given[each.name] = _built(layer, here)
        elif here in layer:
            value = layer[here].value
            given[each.name] = MappingProxyType(value) if isinstance(value, dict) else value
    return section_class(path)(**given)


def _told(layer: Layer, names: Mapping[str, Iterable[str]]) -> dict[str, Shown]:
    """Every field with its value and where that comes from, by dotted name."""
    told: dict[str, Shown] = {}
    for section in _sections_in_use(names):
        for field in of_section(section):
            path = (*section, field.path[-1])
            entry = layer.get(path) or Entry(value=field.default, source=DEFAULT)
            value = masked(field.path[-1], entry.value)
            told[dotted(path)] = Shown(value=value, source=entry.source)
    return told


def _sections_in_use(names: Mapping[str, Iterable[str]]) -> Iterable[Path]:
    for section in dict.fromkeys(path[:-1] for path in all_fields()):
        if section[0] not in NAMED:
            yield section
            continue
        for name in sorted(names[section[0]]):
            yield (section[0], name, *section[2:])


def _warnings(written: Written | None, layer: Layer) -> Iterable[str]:
    """What is to be said of a file that says this."""
    if written is None or not written.shared:
        return
    for path, entry in layer.items():
        if masked(path[-1], entry.value) != entry.value:
            yield (
                f"{written.file} can be read by others, and holds {dotted(path)}: "
                f"chmod 600 {written.file}"
            )
