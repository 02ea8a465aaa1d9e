"""The table of all settings, from the value classes: paths, types, defaults, descriptions."""

import ast
import difflib
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from types import MappingProxyType, ModuleType
from typing import Any, Final, get_args, get_origin

import msgspec
from msgspec import Struct

from stenolog.settings import values
from stenolog.settings.file import KeyPath, join_path, quote_text
from stenolog.settings.values import ADDRESS_FIELDS, SECRET_FIELDS, Settings

ANY_NAME: Final = "NAME"
"""Placeholder in a path for a name that the user chooses."""
NAMED_TABLES: Final = ("models", "agents", "webhooks", "retention")
"""Tables that contain tables with user-chosen names."""
FIELD_ALIASES: Final[Mapping[KeyPath, KeyPath]] = MappingProxyType(
    {("channels_config", "session_persistence"): ("channels", "session_persistence")}
)
"""Path of a field, by the path that other programs use for the same setting."""
RENAMED_FIELDS: Final[Mapping[KeyPath, KeyPath]] = MappingProxyType(
    {("gateway", "patience"): ("gateway", "shutdown_timeout")}
)
"""New paths of renamed fields. The error for an old path names the new path."""

_IGNORED_PATHS: Final = (("keys",), ("agent", "routes"))
"""Paths of fields in the value classes that are not settings."""


class Field(Struct, frozen=True, kw_only=True):
    """A setting: its path, its type and its purpose."""

    path: KeyPath
    type: Any
    default: Any
    text: str

    @property
    def name(self) -> str:
        """Dotted path of the setting, such as `gateway.port`."""
        return ".".join(self.path)

    @property
    def is_secret(self) -> bool:
        """Whether the value is a secret, which is never shown."""
        return self.path[-1] in SECRET_FIELDS

    @property
    def may_be_address(self) -> bool:
        """Whether the value may contain an address with a password."""
        return self.path[-1] in ADDRESS_FIELDS


@cache
def all_fields() -> Mapping[KeyPath, Field]:
    """Return all fields by path, in the order of the config file."""
    return MappingProxyType({field.path: field for field in _struct_fields(Settings, ())})


@cache
def section_paths() -> frozenset[KeyPath]:
    """Return the paths of all tables that contain fields."""
    fields = [*all_fields(), *FIELD_ALIASES]
    return frozenset(path[:end] for path in fields for end in range(1, len(path)))


def field_path(path: KeyPath) -> KeyPath:
    """Return the path in the table of fields, where NAME replaces a name that the user chose."""
    return (path[0], ANY_NAME, *path[2:]) if len(path) > 1 and path[0] in NAMED_TABLES else path


def find_field(path: KeyPath) -> Field | None:
    """Return the field at this path or alias, or None."""
    return all_fields().get(field_path(FIELD_ALIASES.get(path, path)))


def fields_of(path: KeyPath) -> list[Field]:
    """Return the direct fields of a table."""
    return [field for field in all_fields().values() if field.path[:-1] == field_path(path)]


def unknown_setting_text(path: KeyPath) -> str:
    """Return the error text for an unknown path, with the closest name or all known names."""
    *parents, name = path
    if renamed := RENAMED_FIELDS.get(field_path(path)):
        new_path = (renamed[0], path[1], *renamed[2:]) if ANY_NAME in renamed else renamed
        return f"renamed to {join_path(new_path)}; use the new name"
    table = field_path(path)[:-1]
    if len(table) == 1 and table[0] in NAMED_TABLES:
        fields = [field.path[-1] for field in fields_of(path)]
        example_field = "model" if "model" in fields else fields[0]
        return f"set a field of it, such as {join_path(path)}.{example_field}"
    known_names = {
        known_path[len(table)]
        for known_path in [*all_fields(), *(FIELD_ALIASES if table else ())]
        if len(known_path) > len(table) and known_path[: len(table)] == table
    }
    matches = difflib.get_close_matches(name.lower(), sorted(known_names), n=1)
    if matches:
        return f"unknown setting; did you mean {join_path((*parents, matches[0]))}?"
    same_names = [field.name for field in all_fields().values() if field.path[-1] == name]
    if same_names:
        return f"unknown setting; did you mean {' or '.join(same_names)}?"
    return f"unknown setting; known ones are {', '.join(sorted(known_names))}"


def find_table_class(path: KeyPath) -> type[Struct]:
    """Return the class for the value of a table."""
    struct: Any = Settings
    for part in field_path(path):
        if part != ANY_NAME:
            hint = next(item.type for item in msgspec.structs.fields(struct) if item.name == part)
            struct = _struct_in_mapping(hint) or hint
    section: type[Struct] = struct
    return section


def _struct_fields(struct: type[Struct], path: KeyPath) -> Iterator[Field]:
    texts = field_texts(values)[struct.__name__]
    sub_tables: list[Iterator[Field]] = []
    for item in msgspec.structs.fields(struct):
        item_path = (*path, item.name)
        named_struct = _struct_in_mapping(item.type)
        if item_path in _IGNORED_PATHS:
            continue
        if named_struct is not None:
            sub_tables.append(_struct_fields(named_struct, (*item_path, ANY_NAME)))
        elif isinstance(item.type, type) and issubclass(item.type, Struct):
            sub_tables.append(_struct_fields(item.type, item_path))
        else:
            text = texts[item.name]
            yield Field(path=item_path, type=item.type, default=item.default, text=text)
    # In TOML, the values of a table come before its sub-tables.
    yield from chain.from_iterable(sub_tables)


def _struct_in_mapping(hint: Any) -> type[Struct] | None:
    """Return the struct in `Mapping[str, struct]`, or None for any other type."""
    if get_origin(hint) is None:
        return None
    value_type = get_args(hint)[-1]
    return value_type if isinstance(value_type, type) and issubclass(value_type, Struct) else None


@cache
def field_texts(module: ModuleType) -> Mapping[str, Mapping[str, str]]:
    """Return the docstring of each field of each class of a module, as one line."""
    texts: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        class_texts = texts.setdefault(node.name, {})
        for field, text in zip(node.body, node.body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                class_texts[field.target.id] = " ".join(str(text.value.value).split())
    return texts


# --- writing --------------------------------------------------------------------------------------
# Settings as TOML: single values, and the commented file that `steno config init` writes.


_WRAP_COLUMNS: Final = 78
_EXAMPLE_NAMES: Final = {"models": "fast", "agents": "ada", "webhooks": "shop", "retention": "old"}
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

_FILE_HEADER: Final = """\
# Settings of stenolog. Lines of the form `#name = value` show the defaults: to
# change one, remove the # and edit the value. Environment variables override
# this file, such as STENO_AGENT__MODEL for agent.model; command-line options
# override both. `steno config show` prints all values and their sources.
"""


def to_toml(value: Any) -> str:
    """Return a value as TOML. Raises TypeError for a value that no setting has."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return quote_text(value)
        case tuple() | list():
            return f"[{', '.join(map(to_toml, value))}]"
        case Mapping():
            pairs = ", ".join(f"{to_toml(name)} = {to_toml(item)}" for name, item in value.items())
            return f"{{ {pairs} }}" if pairs else "{}"
    raise TypeError(f"a setting cannot be a {type(value).__name__}")


def commented_file() -> str:
    """Return a config file with all fields, defaults and descriptions.

    The unchanged file sets nothing, because every value is commented out.
    """
    lines = [_FILE_HEADER]
    section: KeyPath = ()
    for field in all_fields().values():
        if field.path[0] == "agents" and (
            len(field.path) > 3 or field.path[-1] not in _AGENT_FIELDS
        ):
            continue
        if field.path[:-1] != section:
            section = field.path[:-1]
            lines += _section_header(section)
        lines += _field_lines(field)
    return "\n".join(lines)


def _section_header(section: KeyPath) -> list[str]:
    kind = section[0]
    if len(section) > 1 and kind in _EXAMPLE_NAMES:
        return [_SECTION_COMMENTS[kind], f"#[{kind}.{_EXAMPLE_NAMES[kind]}]\n"]
    return [f"[{'.'.join(section)}]\n"]


def _field_lines(field: Field) -> Iterator[str]:
    yield from (f"# {line}" for line in textwrap.wrap(field.text, _WRAP_COLUMNS))
    yield f"#{field.path[-1]} = {to_toml(field.default)}\n"
