"""The table of all fields, read from the values themselves: paths, types, defaults, sentences."""

import ast
import difflib
import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Final, get_args, get_origin

import msgspec
from msgspec import Struct

from stenolog.settings import values
from stenolog.settings.paths import Path, dotted
from stenolog.settings.values import ADDRESSES, SECRET, Settings

NAME: Final = "NAME"
"""Stands in a path where users put a name of their own."""
NAMED: Final = ("models", "agents", "webhooks", "retention")
"""The tables that hold tables with such names."""
ALIASES: Final[Mapping[Path, Path]] = MappingProxyType(
    {("channels_config", "session_persistence"): ("channels", "session_persistence")}
)
"""Fields that may be called by the name that they have elsewhere."""

_NO_FIELD: Final = (("keys",), ("agent", "routes"))
"""What is no setting: it comes from the environment, or would say nothing."""


class Field(Struct, frozen=True, kw_only=True):
    """One setting: where it stands, what it takes, and what it is for."""

    path: Path
    type: Any
    default: Any
    text: str
    """What it is for, in sentences."""

    @property
    def name(self) -> str:
        """Its path with dots."""
        return ".".join(self.path)

    @property
    def secret(self) -> bool:
        """Whether its value is never shown."""
        return self.path[-1] in SECRET

    @property
    def address(self) -> bool:
        """Whether it may hold an address, and a password in it."""
        return self.path[-1] in ADDRESSES


@cache
def all_fields() -> Mapping[Path, Field]:
    """Every field by its path, in the order of the config file."""
    return MappingProxyType({found.path: found for found in _fields(Settings, ())})


@cache
def sections() -> frozenset[Path]:
    """The path of every table that holds fields."""
    fields = [*all_fields(), *ALIASES]
    return frozenset(path[:end] for path in fields for end in range(1, len(path)))


def general(path: Path) -> Path:
    """The path in the table of fields: with NAME where users put a name of their own."""
    return (path[0], NAME, *path[2:]) if len(path) > 1 and path[0] in NAMED else path


def find(path: Path) -> Field | None:
    """The field of this path, or of what is called so elsewhere; None where there is none."""
    return all_fields().get(general(ALIASES.get(path, path)))


def of_section(path: Path) -> list[Field]:
    """The fields that stand in this table itself."""
    return [found for found in all_fields().values() if found.path[:-1] == general(path)]


def unknown(path: Path) -> str:
    """What is said of a path that is no field: the nearest name, or those there are."""
    *above, name = path
    inside = general(path)[:-1]
    if len(inside) == 1 and inside[0] in NAMED:
        fields = [found.path[-1] for found in of_section(path)]
        example = "model" if "model" in fields else fields[0]
        return f"a field of it is wanted, as in {dotted(path)}.{example}"
    known = {
        each[len(inside)]
        for each in [*all_fields(), *(ALIASES if inside else ())]
        if len(each) > len(inside) and each[: len(inside)] == inside
    }
    near = difflib.get_close_matches(name.lower(), sorted(known), n=1)
    if near:
        return f"there is no such field; {dotted((*above, near[0]))}?"
    elsewhere = [found.name for found in all_fields().values() if found.path[-1] == name]
    if elsewhere:
        return f"there is no such field; {' or '.join(elsewhere)}?"
    return f"there is no such field; there are {', '.join(sorted(known))}"


def section_class(path: Path) -> type[Struct]:
    """The class whose value a table becomes."""
    found: Any = Settings
    for part in general(path):
        if part == NAME:
            continue
        hint = next(each.type for each in msgspec.structs.fields(found) if each.name == part)
        found = _named_struct(hint) or hint
    checked: type[Struct] = found
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
    # TOML wants the values of a table before the tables in it.
    for fields in below:
        yield from fields


def _named_struct(hint: Any) -> type[Struct] | None:
    """The struct in `Mapping[str, struct]`; None for any other type."""
    if get_origin(hint) is None:
        return None
    last = get_args(hint)[-1]
    return last if isinstance(last, type) and issubclass(last, Struct) else None


@cache
def _texts() -> Mapping[str, Mapping[str, str]]:
    """What stands below each field of each class, as one line."""
    texts: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(values)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        found = texts.setdefault(node.name, {})
        for one, below in zip(node.body, node.body[1:], strict=False):
            if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[one.target.id] = " ".join(str(below.value.value).split())
    return texts
