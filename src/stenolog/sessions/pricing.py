"""What tokens cost, by the prices in the package genai-prices, where it is installed.

The prices are those in the package: nobody is asked for newer ones. Each answer has a price of its
own: of many models a long prompt costs more by the token than a short one.
"""

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from stenolog.sessions.counting import Counts, Price

HOW_TO_GET: Final = "pip install 'stenolog[prices]'"


class Cost(Struct, frozen=True, kw_only=True):
    """What was spent."""

    total: float
    """In US dollars, over the models that have a price."""
    models: Mapping[str, float]
    unknown: tuple[str, ...]
    """The models without one."""


def prices() -> Price | None:
    """What an answer of a model costs, for who counts; None where the package is not there."""
    try:
        # Nobody needs it but who asks for the cost.
        import genai_prices  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None

    def price(model: str, usage: Mapping[str, int]) -> float | None:
        return _price(genai_prices, model, usage)

    return price


def cost_of(models: Mapping[str, Counts]) -> Cost:
    """What was counted with prices, by model."""
    answered = {name: counts for name, counts in models.items() if counts.answers}
    known = {name: counts.dollars for name, counts in answered.items() if counts.priced}
    return Cost(
        total=sum(known.values()),
        models=known,
        unknown=tuple(name for name in answered if name not in known),
    )


def _price(package: Any, name: str, counted: Mapping[str, int]) -> float | None:
    usage = package.Usage(
        input_tokens=counted.get("prompt", 0),
        output_tokens=counted.get("answer", 0),
        cache_read_tokens=counted.get("cached", 0),
    )
    provider, slash, rest = name.partition("/")
    ways: list[tuple[str, str | None]] = [(rest, provider), (rest, None)] if slash else []
    for reference, of in [*ways, (name, None)]:
        try:
            found = package.calc_price(usage, model_ref=reference, provider_id=of)
        except (LookupError, ValueError):
            continue
        return float(found.total_price)
    return None
