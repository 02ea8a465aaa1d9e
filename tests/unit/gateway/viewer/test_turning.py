"""A session by its turns: what each took, and what it cost."""

import sys
from pathlib import Path
from typing import Any

import pytest

from stenolog.gateway.viewer.turning import costs_of, turns_of
from stenolog.records import Message
from stenolog.stores.in_memory import InMemoryStore

_PRICES = """
class Usage:
    def __init__(self, input_tokens, output_tokens, cache_read_tokens):
        self.all = input_tokens, output_tokens, cache_read_tokens

class Price:
    def __init__(self, total):
        self.total_price = total

def calc_price(usage, model_ref, provider_id=None):
    prices = {"big": 100, "small": 1}
    if model_ref not in prices:
        raise LookupError(model_ref)
    read, written, cached = usage.all
    return Price((read + 2 * written - cached) * prices[model_ref] / 100)
"""


def _answer(model: str, prompt: int, answer: int, cached: int = 0) -> dict[str, Any]:
    usage = {"prompt": prompt, "answer": answer, "cached": cached}
    mark = {"model": model, "seconds": 1.5, "usage": usage}
    return {"role": "assistant", "content": "x", "stenolog": mark}


def _history() -> list[Message]:
    with InMemoryStore() as store:
        store.add_messages(
            "s",
            [
                {"role": "assistant", "content": "Before any prompt."},
                {"role": "user", "content": "One?"},
                _answer("big", 10, 5, 2),
                _answer("small", 100, 0),
                {"role": "user", "content": "Two?"},
                _answer("nobody/knows", 7, 7),
                {"role": "user", "content": "Three?"},
                {"role": "assistant", "content": "Nobody counted this."},
            ],
        )
        return store.get_history("s")


def test_a_turn_is_a_prompt_and_all_that_came_of_it() -> None:
    found = [
        (one.seq, one.prompt, one.messages, one.sent, one.answered, one.counted)
        for one in turns_of(_history())
    ]
    assert found == [
        (2, "One?", 3, 110, 5, True),
        (5, "Two?", 2, 7, 7, True),
        (7, "Three?", 2, 0, 0, False),
    ]


def test_each_turn_costs_what_its_models_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "genai_prices.py").write_text(_PRICES)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        found = costs_of(turns_of(_history()))
    finally:
        sys.modules.pop("genai_prices", None)
    assert found is not None
    assert list(found.turns) == [19.0, None, None]
    assert (found.total, found.known, list(found.unknown)) == (19.0, True, ["nobody/knows"])


def test_without_prices_nothing_is_said_of_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "genai_prices", None)
    assert costs_of(turns_of(_history())) is None
