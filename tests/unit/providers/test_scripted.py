"""The model that answers by script."""

import pytest

from stenolog.errors import UsageError
from stenolog.providers.base import Ask
from stenolog.providers.scripted import Scripted


def test_it_is_a_model_that_can_be_asked() -> None:
    assert isinstance(Scripted([]), Ask)


def test_it_answers_in_the_order_of_its_script_and_keeps_what_it_was_asked() -> None:
    model = Scripted(["one", lambda messages: str(messages[-1]["content"]).upper()])

    assert model([{"role": "user", "content": "a"}]) == "one"
    assert model([{"role": "user", "content": "b"}], schema={}, max_tokens=5) == "B"
    assert [asked[-1]["content"] for asked in model.asked] == ["a", "b"]


def test_an_exception_in_the_script_is_raised_and_the_next_answer_follows() -> None:
    model = Scripted([TimeoutError("the model is down"), "back"])

    with pytest.raises(TimeoutError, match="down"):
        model([])

    assert model([]) == "back"


def test_a_script_at_its_end_says_so() -> None:
    with pytest.raises(UsageError, match="no answer left"):
        Scripted([])([])
