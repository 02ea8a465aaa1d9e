"""Replaces the price list, which is loaded once per process."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from stenolog.catalog.answer_prices import load_prices


@contextmanager
def price_package(package: ModuleType | None) -> Iterator[None]:
    """Replace genai-prices by another package, or by none, and load the price list anew."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "genai_prices", package)
        load_prices.cache_clear()
        yield
    load_prices.cache_clear()
