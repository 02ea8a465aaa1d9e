"""Tests which functions are accepted as completion functions, and early errors for others."""

import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from stenolog.errors import UsageError
from stenolog.providers.chat_model import check_completion_function
from support.scripted_completion import ScriptedCompletion


def _with_how(messages: Sequence[Mapping[str, Any]], **how: object) -> str:
    return f"{messages}{how}"


class _Client:
    def answer(self, messages: object, schema: object = None, max_tokens: object = None) -> str:
        return f"{messages}{schema}{max_tokens}"

    def __call__(self, messages: object, *, max_tokens: int, schema: object) -> str:
        return f"{messages}{max_tokens}{schema}"


@pytest.mark.parametrize(
    "ask",
    [
        _with_how,
        lambda *messages, **how: f"{messages}{how}",
        functools.partial(_with_how, temperature=0),
        ScriptedCompletion(["yes"]),
        _Client(),
        _Client().answer,
        dict,
        max,  # has no signature to check
    ],
)
def test_function_with_the_keywords_is_accepted(ask: object) -> None:
    check_completion_function(ask)


def _bare(messages: object) -> str:
    return str(messages)


def _half(messages: object, *, schema: object = None) -> str:
    return f"{messages}{schema}"


def _more(messages: object, model: str, **how: object) -> str:
    return f"{messages}{model}{how}"


@pytest.mark.parametrize("ask", [_bare, _half, _more, lambda: "", functools.partial(_bare, [])])
def test_function_without_the_keywords_is_rejected_with_advice(ask: object) -> None:
    with pytest.raises(UsageError) as raised:
        check_completion_function(ask)
    assert str(raised.value) == (
        "complete is called as complete(messages, schema=…, max_tokens=…); "
        "accept these arguments, or add **options"
    )


async def _later(messages: object, **how: object) -> str:
    return f"{messages}{how}"


async def _streaming(messages: object, **how: object) -> AsyncIterator[str]:
    yield f"{messages}{how}"


class _AsyncClient:
    async def __call__(self, messages: object, **how: object) -> str:
        return f"{messages}{how}"


@pytest.mark.parametrize(
    "ask", [_later, _streaming, _AsyncClient(), functools.partial(_later, model="x")]
)
def test_async_function_is_rejected(ask: object) -> None:
    with pytest.raises(UsageError, match="without await"):
        check_completion_function(ask)


@pytest.mark.parametrize("ask", ["gpt-5", 1, {"model": "x"}])
def test_value_that_is_not_callable_is_rejected(ask: object) -> None:
    with pytest.raises(UsageError, match="is not callable"):
        check_completion_function(ask)
