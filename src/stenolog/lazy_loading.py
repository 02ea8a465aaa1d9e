"""Public names that are imported on first use, and patterns that are compiled on first use."""

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from sys import modules
from typing import Any, Final, cast

_PATTERN_METHODS: Final = ("findall", "finditer", "fullmatch", "match", "search", "split", "sub")


def lazy_exports(
    package: str, exports: Mapping[str, str]
) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` for a package.

    `exports` maps each module to its public names, separated by spaces. Type checkers do not see
    the result, so the package must also import each name under `if TYPE_CHECKING`, as `name as
    name`.
    """
    modules_by_name = {name: module for module, names in exports.items() for name in names.split()}

    def find_export(name: str) -> object:
        if name not in modules_by_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(modules_by_name[name]), name)
        setattr(modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(modules[package]), *modules_by_name})

    return sorted(modules_by_name), find_export, list_names


class _LazyPattern:
    """A pattern that is compiled when one of its attributes is first read."""

    def __init__(self, pattern: str, flags: int) -> None:
        self._source = pattern, flags

    def __getattr__(self, name: str) -> Any:
        compiled = re.compile(*self._source)
        # Later calls find these methods as attributes and do not call `__getattr__`.
        vars(self).update({method: getattr(compiled, method) for method in _PATTERN_METHODS})
        return getattr(compiled, name)


def lazy_pattern(pattern: str, flags: int = 0) -> re.Pattern[str]:
    """Return a pattern that is compiled on first use.

    Compiling all patterns of stenolog takes longer than importing its modules, and most commands
    use few patterns. An invalid pattern raises `re.error` on first use.
    """
    return cast("re.Pattern[str]", _LazyPattern(pattern, flags))
