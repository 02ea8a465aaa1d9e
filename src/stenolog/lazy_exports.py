"""Public names of a package that are imported on first use."""

from collections.abc import Callable, Mapping
from importlib import import_module
from sys import modules


def lazy_exports(
    package: str, names: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package. `names` maps each name to its module."""

    def find(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(names[name]), name)
        setattr(modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(modules[package]), *names})

    return find, list_names
