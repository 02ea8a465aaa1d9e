"""Prices of answers, from the installed package genai-prices. Newer prices are not fetched.

Each answer is priced separately, because many models charge more per token for a long prompt.
"""

import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any, Final

from msgspec import Struct

Price = Callable[[str, Mapping[str, int]], float | None]
"""Function that prices an answer in US dollars from its provider's token counts; None: unknown."""

_MAX_NAMES: Final = 10_000
"""Maximum number of different model names that are looked up: any program can write a name."""
_LONGEST_NAME: Final = 300
_importing: Final = threading.Lock()
# A module that another thread is importing at a fork would stay locked in the child for ever.
os.register_at_fork(
    before=_importing.acquire,
    after_in_parent=_importing.release,
    after_in_child=_importing.release,
)


def prices() -> Price | None:
    """Return the function that prices an answer; None if genai-prices is not installed."""
    with _importing:
        try:
            # Optional dependency, only needed for costs.
            import genai_prices  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            return None
        return _PriceList(genai_prices).price


class LazyPrices:
    """The prices, imported when the first answer is priced: the import takes long."""

    def __init__(self) -> None:
        self._price: Price | None = None
        self._is_loaded = False

    def __call__(self, name: str, usage: Mapping[str, int]) -> float | None:
        """Return the price of an answer; None if it is unknown."""
        if not self._is_loaded:
            self._price, self._is_loaded = prices(), True
        return None if self._price is None else self._price(name, usage)


class _Rates(Struct, frozen=True):
    """Prices per token of one model, for prompts of a range of lengths."""

    uncached: Decimal
    cached: Decimal
    output: Decimal


class _Model(Struct, frozen=True):
    """A model in the price list."""

    reference: str
    provider: str | None
    thresholds: list[int]
    """Numbers of prompt tokens above which other prices apply, in order."""
    rates: dict[int, _Rates]
    """By the number of thresholds that the prompt exceeds."""


class _PriceList:
    """The price list of genai-prices. A price is looked up once per model and range of lengths."""

    def __init__(self, package: Any) -> None:
        self._package = package
        # The first use imports modules of the package. Here, no fork happens meanwhile.
        with suppress(LookupError, ValueError):
            usage = package.Usage(input_tokens=1, output_tokens=0, cache_read_tokens=0)
            package.calc_price(usage, model_ref="gpt-4o")
        self._models: dict[str, _Model | None] = {}

    def price(self, name: str, usage: Mapping[str, int]) -> float | None:
        """Return the price of an answer; None if the model has no known price."""
        model = self._model(name)
        if model is None:
            return None
        prompt, cached = usage.get("prompt", 0), usage.get("cached", 0)
        try:
            if cached > prompt:
                # The package decides what inconsistent counts mean.
                return float(self._calculate(model, prompt, cached, usage.get("answer", 0)))
            rates = self._rates(model, bisect_left(model.thresholds, prompt))
            return float(
                (prompt - cached) * rates.uncached
                + cached * rates.cached
                + usage.get("answer", 0) * rates.output
            )
        except (LookupError, ValueError, ArithmeticError):
            return None

    def _model(self, name: str) -> _Model | None:
        if name not in self._models:
            if len(self._models) >= _MAX_NAMES or len(name) > _LONGEST_NAME:
                return None
            self._models[name] = self._find(name)
        return self._models[name]

    def _find(self, name: str) -> _Model | None:
        provider, slash, rest = name.partition("/")
        attempts: list[tuple[str, str | None]] = [(rest, provider), (rest, None)] if slash else []
        for reference, provider_id in [*attempts, (name, None)]:
            try:
                usage = self._package.Usage(input_tokens=1, output_tokens=1, cache_read_tokens=0)
                found = self._package.calc_price(
                    usage, model_ref=reference, provider_id=provider_id
                )
            except (LookupError, ValueError):
                continue
            rates = getattr(found, "model_price", None)
            tiers = [getattr(rate, "tiers", ()) for rate in vars(rates).values()] if rates else []
            thresholds = sorted({tier.start for some in tiers for tier in some})
            return _Model(reference, provider_id, thresholds, {})
        return None

    def _rates(self, model: _Model, exceeded: int) -> _Rates:
        if exceeded not in model.rates:
            length = model.thresholds[exceeded - 1] + 1 if exceeded else 1
            prompt = self._calculate(model, length, 0, 0)
            model.rates[exceeded] = _Rates(
                prompt / length,
                self._calculate(model, length, length, 0) / length,
                self._calculate(model, length, 0, 1) - prompt,
            )
        return model.rates[exceeded]

    def _calculate(self, model: _Model, prompt: int, cached: int, answer: int) -> Decimal:
        usage = self._package.Usage(
            input_tokens=prompt, output_tokens=answer, cache_read_tokens=cached
        )
        found = self._package.calc_price(
            usage, model_ref=model.reference, provider_id=model.provider
        )
        return Decimal(found.total_price)
