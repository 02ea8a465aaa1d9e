"""Tests the cost of answers with the prices in the package."""

from datetime import UTC, datetime

import genai_prices
import pytest

from stenolog.catalog import answer_prices
from stenolog.sessions.usage import Counts, Totals, cost_of, load_prices
from stenolog.stores.in_memory import InMemoryStore
from support.prices import price_package

LONG = {"prompt": 150_000, "answer": 1_000, "cached": 0}
TIERED = "gemini-2.5-pro"
"""A model with a higher price per token for prompts of more than 200,000 tokens."""


def _by_package(model: str, prompt: int, answer: int) -> float:
    usage = genai_prices.Usage(input_tokens=prompt, output_tokens=answer)
    return float(genai_prices.calc_price(usage, model_ref=model).total_price)


def test_each_answer_is_priced_separately() -> None:
    one, both = _by_package(TIERED, 150_000, 1_000), _by_package(TIERED, 300_000, 2_000)
    assert both > 2.2 * one, "or this shows nothing"
    totals = Totals(price=load_prices())
    body = {"role": "assistant", "content": "x", "stenolog": {"model": TIERED, "usage": LONG}}
    with InMemoryStore() as store:
        store.add_messages("s", [body, body], at=[datetime(2026, 1, 5, tzinfo=UTC)] * 2)
        totals.add(store.info("s"), store.get_history("s"))
    found = cost_of(totals.models)
    assert found.total == pytest.approx(2 * one)
    assert found.models == {TIERED: found.total}


def test_price_is_found_with_and_without_the_provider_prefix() -> None:
    price = load_prices()
    assert price is not None
    plain = price("gpt-4o", LONG)
    assert plain == pytest.approx(_by_package("gpt-4o", 150_000, 1_000))
    assert price("openai/gpt-4o", LONG) == plain
    assert price("my-own/gpt-4o", LONG) == plain
    for unknown in ("nobody/knows", "", "/", "x" * 1_000):
        assert price(unknown, LONG) is None


def test_models_without_price_are_listed_and_cost_nothing() -> None:
    priced, unpriced = Counts(), Counts()
    priced.add_answer(LONG, 1.5)
    unpriced.add_answer(LONG, None)
    found = cost_of({"a": priced, "b": unpriced, "c": Counts(messages=1)})
    assert (found.total, found.models, found.unknown) == (1.5, {"a": 1.5}, ("b",))


def test_prices_are_unavailable_without_the_package() -> None:
    with price_package(None):
        assert load_prices() is None


def test_invented_models_do_not_hide_the_price_of_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answer_prices, "_MAX_MODEL_NAMES", 3)
    with price_package(genai_prices):
        price = load_prices()
        assert price is not None
        assert [price(f"invented {number}", LONG) for number in range(4)] == [None] * 4
        assert price("gpt-4o", LONG) is not None


@pytest.mark.parametrize("model", [TIERED, "gpt-4o", "claude-sonnet-4-5"])
def test_prices_equal_those_of_the_package_for_every_length(model: str) -> None:
    price = load_prices()
    assert price is not None
    for prompt in (0, 1, 1_000, 200_000, 200_001, 1_000_000):
        for cached in {0, prompt // 3, prompt}:
            usage = genai_prices.Usage(
                input_tokens=prompt, output_tokens=70, cache_read_tokens=cached
            )
            expected = float(genai_prices.calc_price(usage, model_ref=model).total_price)
            assert price(model, {"prompt": prompt, "cached": cached, "answer": 70}) == expected
