"""Tests plain functions as tools."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import pytest

from stenolog.agent.tools import (
    ToolContext,
    collect_tools,
    now,
    parse_arguments,
    recall,
    result_as_text,
    tool,
)
from stenolog.errors import UsageError

HERE = ToolContext(key="cli:default", agent=None)


def test_type_hints_and_docstring_become_the_definition() -> None:
    def book(
        place: Annotated[str, "where to"],
        seats: int,
        kind: Literal["train", "ferry"] = "train",
        names: list[str] | None = None,
    ) -> str:
        """Book a journey."""
        return f"{place} {seats} {kind} {names}"

    made = tool(book)
    assert made.definition() == {
        "type": "function",
        "function": {
            "name": "book",
            "description": "Book a journey.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "where to"},
                    "seats": {"type": "integer"},
                    "kind": {"enum": ["ferry", "train"], "default": "train"},
                    "names": {
                        "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
                        "default": None,
                    },
                },
                "required": ["place", "seats"],
                "additionalProperties": False,
            },
        },
    }
    assert made.call({"place": "Oslo", "seats": 2}, HERE) == "Oslo 2 train None"
    assert made.call({"place": "Oslo", "seats": "2"}, HERE) == "Oslo 2 train None"
    with pytest.raises(msgspec.ValidationError, match=r"kind"):
        made.call({"place": "Oslo", "seats": 2, "kind": "zeppelin"}, HERE)


def test_structured_arguments_have_their_own_schema() -> None:
    @dataclass
    class Place:
        name: str
        far: bool = False

    def go(to: Place) -> str:
        return f"{to.name} {to.far}"

    # A local class cannot be looked up by its name.
    go.__annotations__["to"] = Place
    made = tool(go)
    assert made.parameters["properties"]["to"] == {"$ref": "#/$defs/Place"}
    assert made.parameters["$defs"]["Place"]["required"] == ["name"]
    assert made.call({"to": {"name": "Oslo"}}, HERE) == "Oslo False"


def test_mutable_default_is_not_shared_between_calls() -> None:
    def add(to: list[int] = []) -> list[int]:  # noqa: B006 - that is what is tested
        to.append(1)
        return to

    made = tool(add)
    assert made.call({}, HERE) == [1]
    assert made.call({}, HERE) == [1]


def test_tool_context_is_not_a_parameter_for_the_model() -> None:
    def where(here: ToolContext) -> str:
        return here.key

    made = tool(where)
    assert made.parameters["properties"] == {}
    assert made.call({}, HERE) == "cli:default"
    with pytest.raises(msgspec.ValidationError):
        made.call({"here": {"key": "cli:other", "agent": None}}, HERE)


def _no_hint(a) -> None:  # type: ignore[no-untyped-def]
    del a


def _anything(*a: int) -> None:
    del a


def _no_schema(a: Callable[[], int]) -> None:
    del a


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (_no_hint, "a has no type hint"),
        (_anything, "a accepts any number"),
        (_no_schema, "has no JSON schema"),
        (lambda: None, "the name must have"),
    ],
)
def test_functions_without_a_schema_are_rejected(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tool(function)


def test_duplicate_tool_names_are_rejected() -> None:
    with pytest.raises(UsageError, match="two tools called 'now'"):
        collect_tools([now, recall, tool(name="now")(lambda: None)])


@pytest.mark.parametrize(
    ("text", "found"), [("", {}), (" ", {}), ("{}", {}), ('{"a": 1}', {"a": 1})]
)
def test_arguments_are_parsed(text: str, found: dict[str, Any]) -> None:
    assert parse_arguments(text) == found


@pytest.mark.parametrize("text", ["{", "[]", "1", "null", "[" * 100_000])
def test_invalid_arguments_raise_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="the arguments are no JSON"):
        parse_arguments(text)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("x", "x"),
        (None, "done"),
        ({"a": [1, None]}, '{"a":[1,null]}'),
        (object, "<class 'object'>"),
        ("123456", "12345\n[… 1 more characters were cut off]"),
    ],
)
def test_tool_result_becomes_text(result: object, text: str) -> None:
    limit = 5 if result == "123456" else 1_000
    assert result_as_text(result, limit=limit) == text


def test_now_returns_the_time_with_its_zone() -> None:
    assert "UTC" in now.call({}, HERE)
