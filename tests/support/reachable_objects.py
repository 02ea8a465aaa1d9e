"""What hangs on an object: for tests that memory does not grow."""

import gc
from collections import Counter
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Final

_APART: Final = (type, ModuleType, FunctionType, BuiltinFunctionType)


def hanging_on(thing: object) -> Counter[type]:
    """All that can be reached from it, by type, but for code."""
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
