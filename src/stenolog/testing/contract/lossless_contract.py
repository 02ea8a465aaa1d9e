"""Tests of promise P10: messages are returned as stored, and errors name the invalid field."""
# ruff: noqa: D102 - tests have names instead of docstrings

import json
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from msgspec import Raw

from stenolog.errors import RefusedMessage, UsageError
from stenolog.stores.base import Store
from stenolog.testing.contract.open_store_base import (
    ContractPart,
    append,
    assert_raises,
    visible_texts,
)
from stenolog.testing.strategies import NASTY_TEXTS, messages


def exact_text(value: Any) -> str:
    """Return the value as text that distinguishes 1, 1.0 and True, and the order of fields."""
    return json.dumps(value)


def _nested_list(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


class _MyStr(str):
    """A subclass of str, as frameworks use it."""


class _IntSubclass(int):
    """A subclass of int."""


def _cyclic_message() -> dict[str, Any]:
    message: dict[str, Any] = {"role": "user"}
    message["self"] = message
    return message


VALID_MESSAGES: dict[str, Callable[[], Any]] = {
    "an empty object": dict,
    "order and unknown fields": lambda: {"z": 1, "role": "user", "a": {"y": 1, "x": 2}},
    "record fields": lambda: {"kind": "state", "seq": 7, "at": "x", "crc": "0", "body": {}},
    "names with a dash and a dot": lambda: {"-object": 1, "-hidden": True, "_at": 2, "a.b": 3},
    "1 and 1.0 and true": lambda: {"a": [1, 1.0, True, 0, 0.0, -0.0, False, None]},
    "4,300 digits": lambda: {"a": [10**4300 - 1, 1 - 10**4300]},
    "integers past 64 bits": lambda: {"a": [2**53 + 1, 2**63, 2**64, -(2**64), 10**100]},
    "smallest and largest floats": lambda: {"a": [5e-324, 1.7976931348623157e308, 0.1, 1e22]},
    "a lone surrogate": lambda: {"content": "\ud800", "\udfff": "x", "c": "\udc00\ud800"},
    "NUL": lambda: {"content": "\x00", "a\x00": "\x00b"},
    "nasty text": lambda: {"content": list(NASTY_TEXTS), **dict.fromkeys(NASTY_TEXTS, 1)},
    "a record as text": lambda: {"content": '{"kind":"message","seq":1}\n,"crc":"00000000"}'},
    "200 deep": lambda: {"content": _nested_list(199)},
    "many empty lists": lambda: {"content": [[] for _ in range(500)]},
    "ten megabytes": lambda: {"role": "tool", "content": "0123456789\n" * 1_000_000},
    "eleven megabytes of text past ASCII": lambda: {"content": "\u00e9\U0001f600" * 1_900_000},
}

INVALID_MESSAGES: dict[str, tuple[Callable[[], Any], str]] = {
    "NaN": (lambda: {"content": float("nan")}, "content"),
    "Infinity": (lambda: {"content": [{"score": float("inf")}]}, "content[0].score"),
    "-Infinity": (lambda: {"a": {"b": [1, float("-inf")]}}, "a.b[1]"),
    "a cycle": (_cyclic_message, "self.self"),
    "a number as key": (lambda: {"a": {1: "x"}}, "a"),
    "two keys with the same text": (lambda: {"a": {1: "x", "1": "y"}}, "a"),
    "None as key": (lambda: {"content": [{None: 1}]}, "content[0]"),
    "bytes": (lambda: {"content": b"x"}, "content"),
    "a bytearray": (lambda: {"content": [bytearray(b"x")]}, "content[0]"),
    "a set": (lambda: {"tags": {"x"}}, "tags"),
    "a frozenset": (lambda: {"tags": frozenset("x")}, "tags"),
    "a Decimal": (lambda: {"price": Decimal("1.10")}, "price"),
    "a datetime": (lambda: {"when": datetime(2026, 1, 1, tzinfo=UTC)}, "when"),
    "a UUID": (lambda: {"id": UUID(int=1)}, "id"),
    "an object": (lambda: {"content": object()}, "content"),
    "raw bytes of JSON": (lambda: {"content": Raw(b"1\n2")}, "content"),
    "a surrogate pair as two characters": (lambda: {"content": "\ud83d\ude00"}, "content"),
    "a surrogate pair in a field name": (lambda: {"a": {"\ud83d\ude00": 1}}, "a"),
    "4,301 digits": (lambda: {"a": [1, 10**4300]}, "a[1]"),
    "201 deep": (lambda: {"content": _nested_list(200)}, "content[0]"),
    "thousands deep": (lambda: {"content": _nested_list(5_000)}, "content[0]"),
    "more than 64 MiB": (lambda: {"content": "x" * (64 * 1024 * 1024)}, ""),
    "a list for a message": (lambda: ["x"], ""),
    "text for a message": (lambda: "x", ""),
    "nothing for a message": (lambda: None, ""),
}


class Lossless(ContractPart):
    """Values that a message may contain."""

    @pytest.mark.parametrize("case", VALID_MESSAGES)
    def test_p10_valid_message_is_stored_and_read_back_unchanged(
        self, store: Store, case: str
    ) -> None:
        fields = VALID_MESSAGES[case]()
        store.add_full_message("a", fields)
        [message] = store.get_history("a")
        assert exact_text(message.to_dict()) == exact_text(dict(message)) == exact_text(fields)
        store.add_messages("b", [fields, message])
        store.clear("b")
        store.compact("b")
        stored = [exact_text(m.to_dict()) for m in store.get_history("b", full=True)]
        assert stored == [exact_text(fields)] * 2

    @pytest.mark.parametrize("case", INVALID_MESSAGES)
    def test_p10_invalid_message_is_rejected_with_its_field(self, store: Store, case: str) -> None:
        make_message, field = INVALID_MESSAGES[case]
        append(store, "a", "before")
        fields = make_message()
        with pytest.raises(RefusedMessage) as raised:
            store.add_full_message("a", fields)
        actual = raised.value.field
        assert actual == field or (field and len(actual) > 60 and actual.startswith(field))
        with pytest.raises(RefusedMessage):
            store.add_messages("a", [{"role": "user", "content": "fine"}, fields])
        assert_raises(RefusedMessage, store.set_history, "a", [fields])
        assert visible_texts(store, "a") == ["before"]
        assert append(store, "a", "after") == [2]

    def test_p10_tuples_are_stored_as_lists(self, store: Store) -> None:
        store.add_message("a", "user", ({"x": (1, 2)}, ()))
        assert visible_texts(store, "a") == [[{"x": [1, 2]}, []]]

    def test_p10_subclasses_of_str_and_int_are_stored_as_plain_values(self, store: Store) -> None:
        store.add_full_message("a", {_MyStr("role"): _MyStr("user"), "content": _IntSubclass(7)})
        [message] = store.get_history("a")
        assert exact_text(message.to_dict()) == '{"role": "user", "content": 7}'
        assert type(message.content) is int

    @settings(
        max_examples=60,
        deadline=None,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
            HealthCheck.too_slow,
        ],
    )
    @given(given_message=messages())
    def test_p10_any_json_object_is_read_back_unchanged(
        self, store: Store, given_message: dict[str, Any]
    ) -> None:
        seq = store.add_full_message("a", given_message)
        [message] = store.get_history("a", after=seq - 1)
        assert exact_text(message.to_dict()) == exact_text(given_message)

    @pytest.mark.parametrize("text", NASTY_TEXTS)
    def test_p10_summary_and_meta_are_read_back_unchanged(self, store: Store, text: str) -> None:
        append(store, "a", "1", "2")
        store.set_meta("a", title=text, **{"x" + text: [text]})
        store.checkpoint("a", summary="about " + text, upto=1)
        store.compact("a")
        assert store.get_summary("a") == "about " + text
        assert store.info("a").meta == {"title": text, "x" + text: [text]}
        store.set_summary("a", "later")
        store.undo("a")
        assert store.get_summary("a") == "about " + text

    def test_p10_long_summary_is_stored(self, store: Store) -> None:
        store.set_summary("a", "long \u00e9 " * 200_000)
        assert store.get_summary("a") == "long \u00e9 " * 200_000

    def test_p10_meta_that_cannot_be_encoded_is_rejected(self, store: Store) -> None:
        store.set_meta("a", title="x")
        for wrong in (float("nan"), b"x", {1: 2}, "\ud83d\ude00"):
            assert_raises(UsageError, store.set_meta, "a", title=wrong)
        assert store.info("a").meta == {"title": "x"}
