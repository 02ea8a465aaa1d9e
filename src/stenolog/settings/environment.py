"""Settings in the environment: `STENO_AGENT__MAX_ITERATIONS` is `agent.max_iterations`.

Two underscores replace the dot, because field names contain single ones.
"""

import tomllib
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from msgspec import inspect

from stenolog.errors import Problem
from stenolog.settings.fields import NAMED, Field, all_fields, find_field, unknown_setting
from stenolog.settings.file import PREFIX, Path

DOT: Final = "__"

_BOOLEANS: Final = {
    "true": True, "yes": True, "on": True, "1": True,
    "false": False, "no": False, "off": False, "0": False,
}  # fmt: skip

_T = TypeVar("_T")


class EnvironmentValue:
    """The settings in the environment: unchecked values, and problems with names."""

    def __init__(self, environment: Mapping[str, str], names: Mapping[str, set[str]]) -> None:
        """`names`: the names of models and agents in the config file."""
        self.values: dict[Path, tuple[str, object]] = {}
        """Variable and value by path."""
        self.problems: list[Problem] = []
        for variable in sorted(environment):
            if not variable.startswith(PREFIX):
                continue
            words = variable.removeprefix(PREFIX)
            if DOT not in words:
                self._look_at_other(variable, words)
                continue
            path = _with_names(tuple(part.lower() for part in words.split(DOT)), names)
            field = find_field(path)
            if field is None:
                self._refuse(variable, path)
            elif environment[variable]:
                self.values[path] = (variable, parse_value(field, environment[variable]))

    def _look_at_other(self, variable: str, words: str) -> None:
        # STENO_UPDATE is not a setting, but STENO_AGENT_MODEL would silently have no effect.
        section = words.partition("_")[0].lower()
        if section not in {path[0] for path in all_fields()}:
            return
        meant = [each for each in all_fields() if "_".join(each).upper() == words]
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


def has_surrogates(text: str) -> bool:
    """Whether the text came from bytes that are not UTF-8."""
    return any("\ud800" <= character <= "\udfff" for character in text)


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
    """Return the path with the name as the config file spells it.

    Variables ignore case and dashes.
    """
    if len(path) < 2 or path[0] not in NAMED:
        return path
    known = {variable_form(name): name for name in names.get(path[0], ())}
    return (path[0], known.get(variable_form(path[1]), path[1]), *path[2:])


def variable_form(name: str) -> str:
    """Return a name without the differences that variables ignore."""
    return name.lower().replace("-", "_")
