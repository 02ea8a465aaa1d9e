"""A session by its turns: what each took, and what it cost."""

from typing import Any

from stenolog.gateway.viewer.session_outline import turns_of
from stenolog.gateway.viewer.turns_page import costs_of
from stenolog.records import Message
from stenolog.stores.in_memory import InMemoryStore


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
        (one.seq, one.prompt, one.messages, one.input_tokens, one.output_tokens, one.counted)
        for one in turns_of(_history())
    ]
    assert found == [
        (2, "One?", 3, 110, 5, True),
        (5, "Two?", 2, 7, 7, True),
        (7, "Three?", 2, 0, 0, False),
    ]


def test_each_turn_costs_what_its_answers_cost() -> None:
    price = {"big": 100.0, "small": 1.0}
    found = costs_of(turns_of(_history(), lambda model, _: price.get(model)))
    assert list(found.turns) == [101.0, None, None]
    assert (found.total, found.known, list(found.unknown)) == (101.0, True, ["nobody/knows"])


def test_without_prices_no_turn_has_a_cost() -> None:
    assert list(costs_of(turns_of(_history())).turns) == [None, None, None]
