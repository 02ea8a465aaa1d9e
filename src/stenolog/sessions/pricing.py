"""What tokens cost, by the prices in the package genai-prices, where it is installed.

The prices are those in the package: nobody is asked for newer ones.
"""

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from stenolog.sessions.counting import Counts

HOW_TO_GET: Final = "pip install 'stenolog[prices]'"


class Cost(Struct, frozen=True, kw_only=True):
    """What was spent."""

    total: float
    """In US dollars, over the models that have a price."""
    models: Mapping[str, float]
    unknown: tuple[str, ...]
    """The models without one."""


def cost_of(models: Mapping[str, Counts]) -> Cost | None:
    """What the tokens that providers counted have cost; None where the package is not there."""
    try:
        # Nobody needs it but who asks for the cost.
        import genai_prices  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    known: dict[str, float] = {}
    unknown: list[str] = []
    for name, counts in models.items():
        if not counts.answers:
            continue
        found = _price(genai_prices, name, counts)
        if found is None:
            unknown.append(name)
        else:
            known[name] = found
    return Cost(total=sum(known.values()), models=known, unknown=tuple(unknown))


def _price(prices: Any, name: str, counts: Counts) -> float | None:
    usage = prices.Usage(
        input_tokens=counts.prompt,
        output_tokens=counts.answer,
        cache_read_tokens=counts.cached,
    )
    provider, slash, rest = name.partition("/")
    ways: list[tuple[str, str | None]] = [(rest, provider), (rest, None)] if slash else []
    for reference, of in [*ways, (name, None)]:
        try:
            found = prices.calc_price(usage, model_ref=reference, provider_id=of)
        except (LookupError, ValueError):
            continue
        return float(found.total_price)
    return None
