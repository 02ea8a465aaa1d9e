"""The table of all settings, from the value classes: paths, types, defaults, descriptions."""

import ast
import difflib
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Final, get_args, get_origin

import msgspec
from msgspec import Struct

from stenolog.settings import values
from stenolog.settings.file import Path, dotted, quoted
from stenolog.settings.values import ADDRESSES, SECRET, Settings

NAME: Final = "NAME"
"""Placeholder in a path for a name that the user chooses."""
NAMED: Final = ("models", "agents", "webhooks", "retention")
"""Tables that contain tables with user-chosen names."""
ALIASES: Final[Mapping[Path, Path]] = MappingProxyType(
    {("channels_config", "session_persistence"): ("channels", "session_persistence")}
)
"""Fields that have another name in other programs."""
RENAMED: Final[Mapping[Path, Path]] = MappingProxyType(
    {("gateway", "patience"): ("gateway", "shutdown_timeout")}
)
"""New paths of renamed fields. The error for an old path names the new path."""

_NO_FIELD: Final = (("keys",), ("agent", "routes"))
"""Fields of the value classes that are not settings."""


class Field(Struct, frozen=True, kw_only=True):
    """A setting: its path, its type and its purpose."""

    path: Path
    type: Any
    default: Any
    text: str
    """Description of the setting."""

    @property
    def name(self) -> str:
        """Path of the setting with dots."""
        return ".".join(self.path)

    @property
    def secret(self) -> bool:
        """Whether the value is never shown."""
        return self.path[-1] in SECRET

    @property
    def address(self) -> bool:
        """Whether the value may contain an address with a password."""
        return self.path[-1] in ADDRESSES


@cache
def all_fields() -> Mapping[Path, Field]:
    """Return all fields by path, in the order of the config file."""
    return MappingProxyType({field.path: field for field in _fields(Settings, ())})


@cache
def sections() -> frozenset[Path]:
    """Return the paths of all tables that contain fields."""
    fields = [*all_fields(), *ALIASES]
    return frozenset(path[:end] for path in fields for end in range(1, len(path)))


def field_path(path: Path) -> Path:
    """Return the path in the table of fields, with NAME for a name that the user chose."""
    return (path[0], NAME, *path[2:]) if len(path) > 1 and path[0] in NAMED else path


def find_field(path: Path) -> Field | None:
    """Return the field at this path or alias, or None."""
    return all_fields().get(field_path(ALIASES.get(path, path)))


def fields_of(path: Path) -> list[Field]:
    """Return the direct fields of a table."""
    return [field for field in all_fields().values() if field.path[:-1] == field_path(path)]


def unknown_setting(path: Path) -> str:
    """Return the error text for an unknown path, with the closest name or all known names."""
    *above, name = path
    if renamed := RENAMED.get(field_path(path)):
        new = (renamed[0], path[1], *renamed[2:]) if NAME in renamed else renamed
        return f"renamed to {dotted(new)}; use the new name"
    inside = field_path(path)[:-1]
    if len(inside) == 1 and inside[0] in NAMED:
        fields = [field.path[-1] for field in fields_of(path)]
        example = "model" if "model" in fields else fields[0]
        return f"set a field of it, such as {dotted(path)}.{example}"
    known = {
        each[len(inside)]
        for each in [*all_fields(), *(ALIASES if inside else ())]
        if len(each) > len(inside) and each[: len(inside)] == inside
    }
    near = difflib.get_close_matches(name.lower(), sorted(known), n=1)
    if near:
        return f"unknown setting; did you mean {dotted((*above, near[0]))}?"
    elsewhere = [field.name for field in all_fields().values() if field.path[-1] == name]
    if elsewhere:
        return f"unknown setting; did you mean {' or '.join(elsewhere)}?"
    return f"unknown setting; known ones are {', '.join(sorted(known))}"


def section_class(path: Path) -> type[Struct]:
    """Return the class for the value of a table."""
    struct: Any = Settings
    for part in field_path(path):
        if part == NAME:
            continue
        hint = next(each.type for each in msgspec.structs.fields(struct) if each.name == part)
        struct = _named_struct(hint) or hint
    checked: type[Struct] = struct
    return checked


def _fields(of: type[Struct], path: Path) -> Iterator[Field]:
    texts = _texts()[of.__name__]
    below: list[Iterator[Field]] = []
    for each in msgspec.structs.fields(of):
        here = (*path, each.name)
        named = _named_struct(each.type)
        if here in _NO_FIELD:
            continue
        if named is not None:
            below.append(_fields(named, (*here, NAME)))
        elif isinstance(each.type, type) and issubclass(each.type, Struct):
            below.append(_fields(each.type, here))
        else:
            default = each.default
            yield Field(path=here, type=each.type, default=default, text=texts[each.name])
    # In TOML, the values of a table come before its sub-tables.
    for fields in below:
        yield from fields


def _named_struct(hint: Any) -> type[Struct] | None:
    """Return the struct in `Mapping[str, struct]`, or None for any other type."""
    if get_origin(hint) is None:
        return None
    last = get_args(hint)[-1]
    return last if isinstance(last, type) and issubclass(last, Struct) else None


@cache
def _texts() -> Mapping[str, Mapping[str, str]]:
    """Return the docstring of each field of each class, as one line."""
    texts: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(values)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        class_texts = texts.setdefault(node.name, {})
        for item, below in zip(node.body, node.body[1:], strict=False):
            if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                class_texts[item.target.id] = " ".join(str(below.value.value).split())
    return texts


# --- writing --------------------------------------------------------------------------------------
# Settings as TOML: single values, and the commented file that `steno config init` writes.


_COLUMNS: Final = 78
_EXAMPLES: Final = {"models": "fast", "agents": "ada", "webhooks": "shop", "retention": "old"}
"""Example names for user-chosen names in the commented file."""
_SECTION_COMMENTS: Final = {
    "models": "# A named model, for agent.model. Add as many as you like.\n",
    "agents": (
        "# An additional agent. Add as many as you like. It has all fields of [agent] and\n"
        "# [agent.context]; fields that are not set are taken from there.\n"
    ),
    "webhooks": (
        "# A program that sends messages to /webhooks/shop while `steno serve` runs. Add as\n"
        "# many as you like.\n"
    ),
    "retention": (
        "# A retention rule. Add as many as you like. Without rules everything is kept.\n"
        "# `steno retention run --dry-run` shows what the rules would do.\n"
    ),
}
_AGENT_FIELDS: Final = ("model", "system", "routes")
"""Fields listed for additional agents. Other fields are listed only under [agent]."""

_HEAD: Final = """\
# Settings of stenolog. Lines of the form `#name = value` show the defaults: to
# change one, remove the # and edit the value. Environment variables override
# this file, such as STENO_AGENT__MODEL for agent.model; command-line options
# override both. `steno config show` prints all values and their sources.
"""


def literal(value: Any) -> str:
    """Return a value as TOML. Raises TypeError for a value that no setting has."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return quoted(value)
        case tuple() | list():
            return f"[{', '.join(map(literal, value))}]"
        case Mapping():
            pairs = ", ".join(f"{literal(name)} = {literal(each)}" for name, each in value.items())
            return f"{{ {pairs} }}" if pairs else "{}"
    raise TypeError(f"a setting cannot be a {type(value).__name__}")


def commented_file() -> str:
    """Return a config file with all fields, defaults and descriptions.

    The unchanged file sets nothing, because every line is a comment.
    """
    lines = [_HEAD]
    section: Path = ()
    for field in all_fields().values():
        if field.path[0] == "agents" and (
            len(field.path) > 3 or field.path[-1] not in _AGENT_FIELDS
        ):
            continue
        if field.path[:-1] != section:
            section = field.path[:-1]
            lines += _header(section)
        lines += _field_lines(field)
    return "\n".join(lines)


def _header(section: Path) -> Iterator[str]:
    match section:
        case (kind, _, *_):
            if kind not in _EXAMPLES:
                yield f"[{'.'.join(section)}]\n"
                return
            yield _SECTION_COMMENTS[kind]
            yield f"#[{kind}.{_EXAMPLES[kind]}]\n"
        case _:
            yield f"[{'.'.join(section)}]\n"


def _field_lines(field: Field) -> Iterator[str]:
    yield from (f"# {line}" for line in textwrap.wrap(field.text, _COLUMNS))
    yield f"#{field.path[-1]} = {literal(field.default)}\n"
