"""Prices of answers, from the installed package genai-prices. Newer prices are not downloaded.

Each answer is priced separately, because many models charge more per token for a long prompt.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import cache
from typing import Any, Final

from msgspec import Struct

Price = Callable[[str, Mapping[str, int]], float | None]
"""Function that returns the price of an answer in US dollars, or None if it is unknown.

Arguments: the model name, and the token counts by name.
"""

_MAX_MODEL_NAMES: Final = 10_000
"""Maximum number of cached model names: messages may contain any number of invented names."""
_MAX_NAME_LENGTH: Final = 300


@cache
def load_prices() -> Price | None:
    """Return the function that prices an answer; None if genai-prices is not installed."""
    try:
        # This package is an optional dependency, needed only for costs, and slow to import.
        import genai_prices  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    return _PriceList(genai_prices).price


def price_answer(name: str, usage: Mapping[str, int]) -> float | None:
    """Return the price of an answer; None if the price is unknown."""
    price = load_prices()
    return None if price is None else price(name, usage)


class _Rates(Struct, frozen=True):
    """Prices per token of one model, for prompts within a range of lengths."""

    uncached_input: Decimal
    cached_input: Decimal
    output: Decimal


class _Model(Struct, frozen=True):
    """A model in the price list."""

    name: str
    provider: str | None
    thresholds: Sequence[int] = ()
    """Numbers of prompt tokens above which other prices apply, in ascending order."""
    rates: dict[int, _Rates] = {}
    """Prices by the number of thresholds that the prompt exceeds."""


class _PriceList:
    """The price list of genai-prices. Prices are looked up once per model and prompt range."""

    def __init__(self, package: Any) -> None:
        self._package = package
        self._models: dict[str, _Model | None] = {}

    def price(self, name: str, usage: Mapping[str, int]) -> float | None:
        """Return the price of an answer; None if the model has no known price."""
        models = self._models
        if name not in models:
            if len(name) > _MAX_NAME_LENGTH:
                return None
            if len(models) >= _MAX_MODEL_NAMES:
                models = self._models = {}  # other threads may still use the old one
            models[name] = self._find_model(name)
        model = models[name]
        if model is None:
            return None
        prompt_tokens, cached_tokens, answer_tokens = (
            usage.get(count, 0) for count in ("prompt", "cached", "answer")
        )
        try:
            if cached_tokens > prompt_tokens:
                # Let the package handle inconsistent counts.
                return float(self._total_price(model, prompt_tokens, cached_tokens, answer_tokens))
            rates = self._rates_for(model, bisect_left(model.thresholds, prompt_tokens))
            uncached_cost = (prompt_tokens - cached_tokens) * rates.uncached_input
            return float(
                uncached_cost + cached_tokens * rates.cached_input + answer_tokens * rates.output
            )
        except (LookupError, ValueError, ArithmeticError):
            return None

    def _find_model(self, name: str) -> _Model | None:
        provider, slash, model_name = name.partition("/")
        qualified_models = [_Model(model_name, provider), _Model(model_name, None)] if slash else []
        for model in [*qualified_models, _Model(name, None)]:
            try:
                rates = getattr(self._look_up_price(model, 1, answer_tokens=1), "model_price", None)
            except (LookupError, ValueError):
                continue
            tiers = [getattr(rate, "tiers", ()) for rate in vars(rates).values()] if rates else []
            thresholds = {tier.start for tiers_of_rate in tiers for tier in tiers_of_rate}
            return _Model(model.name, model.provider, sorted(thresholds))
        return None

    def _rates_for(self, model: _Model, tier: int) -> _Rates:
        """Return the prices per token for a prompt that exceeds `tier` thresholds of the model."""
        if tier not in model.rates:
            prompt_tokens = model.thresholds[tier - 1] + 1 if tier else 1
            price = self._total_price(model, prompt_tokens)
            cached_price = self._total_price(model, prompt_tokens, prompt_tokens)
            price_with_answer = self._total_price(model, prompt_tokens, 0, 1)
            model.rates[tier] = _Rates(
                price / prompt_tokens, cached_price / prompt_tokens, price_with_answer - price
            )
        return model.rates[tier]

    def _total_price(
        self, model: _Model, prompt_tokens: int, cached_tokens: int = 0, answer_tokens: int = 0
    ) -> Decimal:
        price = self._look_up_price(model, prompt_tokens, cached_tokens, answer_tokens)
        return Decimal(price.total_price)

    def _look_up_price(
        self, model: _Model, prompt_tokens: int, cached_tokens: int = 0, answer_tokens: int = 0
    ) -> Any:
        usage = self._package.Usage(
            input_tokens=prompt_tokens,
            output_tokens=answer_tokens,
            cache_read_tokens=cached_tokens,
        )
        return self._package.calc_price(usage, model_ref=model.name, provider_id=model.provider)
