"""Counts the objects that an object refers to, for tests that memory does not grow."""

import gc
from collections import Counter
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Final

_APART: Final = (type, ModuleType, FunctionType, BuiltinFunctionType)


def hanging_on(thing: object) -> Counter[type]:
    """Count all objects that can be reached from it, except code, by type."""
    gc.collect()
    seen: set[int] = set()
    kinds: Counter[type] = Counter()
    found: list[object] = [thing]
    while found:
        one = found.pop()
        if id(one) not in seen and not isinstance(one, _APART):
            seen.add(id(one))
            kinds[type(one)] += 1
            found += gc.get_referents(one)
    return kinds
