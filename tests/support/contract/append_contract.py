"""Tests of appends, unknown keys (promises P1, P2, P8) and idempotency keys (P12).

Further tests check that messages are returned unchanged, and that errors name the invalid field
(P10).
"""

import inspect
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from types import MappingProxyType
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from msgspec import Raw

from stenolog.errors import NoSuchSession, OnceConflict, RefusedMessage, UsageError
from stenolog.stores.admin import StoreAdmin
from stenolog.stores.base import Store
from support.contract.call_table import CALL_TABLE, CREATES, CallRow
from support.contract.open_store_base import (
    ContractPart,
    all_messages,
    append,
    assert_raises,
    user_message,
    user_messages,
    visible_texts,
)
from support.store_calls import Call
from support.strategies import NASTY_TEXTS, messages

_NEW_YEAR = datetime(2020, 1, 1, tzinfo=UTC)


class Appends(ContractPart):
    """Tests of appending messages."""

    def test_p1_seqs_count_up_from_one_in_each_session(self, store: Store) -> None:
        assert append(store, "a", "one", "two") == [1, 2]
        assert store.add_messages("a", user_messages("three", "four")) == [3, 4]
        assert store.add_full_message("a", user_message("five")) == 5
        assert append(store, "b", "another session") == [1]
        assert visible_texts(store, "a") == ["one", "two", "three", "four", "five"]

    def test_p1_stored_message_has_the_given_fields_with_seq_and_time(self, store: Store) -> None:
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        fields = {"role": "assistant", "content": None, "tool_calls": [call], "seq": "mine"}
        earliest_time = datetime.now(UTC) - timedelta(seconds=1)
        store.add_full_message("a", fields)
        [message] = store.get_history("a")
        assert message.to_dict() == fields
        assert (message.seq, message.hidden, message.role) == (1, False, "assistant")
        assert message.content is None
        assert message.tool_calls == [call]
        assert message.at.utcoffset() == timedelta(0)
        assert earliest_time <= message.at <= datetime.now(UTC) + timedelta(seconds=1)
        with pytest.raises(AttributeError, match="name"):
            _ = message.name

    def test_a_message_is_a_copy_that_cannot_be_changed(self, store: Store) -> None:
        fields: dict[str, Any] = {"role": "user", "content": ["x"]}
        store.add_full_message("a", fields)
        fields["content"].append("y")
        [message] = store.get_history("a")
        message.to_dict()["content"].append("y")
        with pytest.raises(AttributeError):
            message.seq = 2  # type: ignore[misc]
        assert message.to_dict() == {"role": "user", "content": ["x"]}
        assert visible_texts(store, "a") == [["x"]]

    def test_any_mapping_and_any_message_of_a_store_can_be_added(self, store: Store) -> None:
        store.add_full_message("a", MappingProxyType(user_message("x")))
        [message] = store.get_history("a")
        store.add_full_message("b", message)
        store.add_messages("b", [message, user_message("y")])
        assert visible_texts(store, "b") == ["x", "x", "y"]
        assert [m.seq for m in store.get_history("b")] == [1, 2, 3]

    def test_p2_batch_with_one_invalid_message_is_rejected_completely(self, store: Store) -> None:
        append(store, "a", "before")
        with pytest.raises(RefusedMessage):
            store.add_messages("a", [user_message("x"), {"role": "user", "content": float("nan")}])
        with pytest.raises(RefusedMessage):
            store.set_history("a", [user_message("x"), {"role": "user", "content": b"bytes"}])
        assert all_messages(store, "a") == [(1, "before", False)]
        assert append(store, "a", "after") == [2]

    def test_empty_batch_stores_nothing(self, store: Store) -> None:
        assert store.add_messages("a", []) == []
        assert store.list_sessions() == []
        append(store, "a", "x")
        assert store.add_messages("a", []) == []
        assert visible_texts(store, "a") == ["x"]

    def test_messages_keep_the_given_times(self, store: Store) -> None:
        zone = timezone(timedelta(hours=-7))
        first_time = datetime(2019, 12, 31, 23, 59, 59, 123456, tzinfo=zone)
        times = [first_time, datetime(1, 2, 3, tzinfo=UTC), datetime(9999, 12, 31, 23, tzinfo=UTC)]
        assert store.add_messages("a", user_messages("x", "y", "z"), at=times) == [1, 2, 3]
        stored_times = [message.at for message in store.get_history("a")]
        assert stored_times == times
        assert {moment.utcoffset() for moment in stored_times} == {timedelta(0)}
        earliest_time = datetime.now(UTC) - timedelta(seconds=1)
        store.add_messages("a", user_messages("now"))
        [newest] = store.get_history("a", last=1)
        assert earliest_time <= newest.at <= datetime.now(UTC) + timedelta(seconds=1)
        info = store.info("a")
        assert info.created <= info.updated

    def test_idempotency_key_ignores_the_time_of_a_message(self, store: Store) -> None:
        [first_time, second_time] = [datetime(2020, 1, day, tzinfo=UTC) for day in (1, 2)]
        assert store.add_messages("a", user_messages("x"), once="t", at=[first_time]) == [1]
        assert store.add_messages("a", user_messages("x"), once="t", at=[second_time]) == [1]
        assert [message.at for message in store.get_history("a")] == [first_time]

    @pytest.mark.parametrize(
        "times",
        [
            [],
            [_NEW_YEAR],
            [_NEW_YEAR] * 3,
            [_NEW_YEAR, datetime(2020, 1, 1)],  # noqa: DTZ001 - rejected
            [_NEW_YEAR, "2020-01-01T00:00:00Z"],
            [_NEW_YEAR, None],
            [_NEW_YEAR, datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=1)))],
        ],
        ids=str,
    )
    def test_p8_number_and_type_of_given_times_are_checked(self, store: Store, times: Any) -> None:
        assert_raises(UsageError, store.add_messages, "a", user_messages("x", "y"), at=times)
        assert store.list_sessions() == []


_CALLS_WITHOUT_EFFECT = [
    *(row for row in CALL_TABLE if row.unknown_key is None or row.unknown_key in ([], "")),
    CallRow(Call("get_history", full=True), []),
    CallRow(Call("get_history", full=True, last=3, after=1), []),
    CallRow(Call("truncate_history", 0), None),
    CallRow(Call("add_messages", []), []),
]
_CREATING_CALLS = [row.call for row in CALL_TABLE if row.unknown_key is CREATES]
_REJECTED_CALLS = [row for row in CALL_TABLE if isinstance(row.unknown_key, type)]


class UnknownKeys(ContractPart):
    """Tests of calls on a key that was never used."""

    def test_every_call_on_a_session_is_in_the_table(self) -> None:
        calls = {
            name
            for interface in (Store, StoreAdmin)
            for name, method in inspect.getmembers(interface, inspect.isfunction)
            if [*inspect.signature(method).parameters][1:2] == ["key"]
        }
        assert calls - {"follow"} == {row.call.name for row in CALL_TABLE}

    @pytest.mark.parametrize("row", _REJECTED_CALLS, ids=lambda row: str(row.call))
    def test_p8_calls_that_need_a_session_raise_for_an_unknown_key(
        self, store: Store, row: CallRow
    ) -> None:
        error = assert_raises(row.unknown_key, row.call.make, store, "nobody")
        assert row.unknown_key is not NoSuchSession or error.key == "nobody"
        assert (store.list_sessions(), store.admin.list_trash(), store.admin.stamps()) == (
            [],
            [],
            {},
        )

    @pytest.mark.parametrize("row", _CALLS_WITHOUT_EFFECT, ids=lambda row: str(row.call))
    def test_calls_without_effect_create_no_session(self, store: Store, row: CallRow) -> None:
        assert row.call.outcome(store, "nobody") == row.unknown_key
        assert store.compact("nobody").archived == 0
        assert list(store.follow("nobody", timeout=0)) == []
        assert store.list_sessions() == []
        assert_raises(NoSuchSession, store.info, "nobody")

    @pytest.mark.parametrize("call", _CREATING_CALLS, ids=str)
    def test_first_write_creates_the_session(self, store: Store, call: Call) -> None:
        call.make(store, "new")
        assert store.list_sessions() == ["new"]
        assert store.info("new").key == "new"

    def test_rejected_call_creates_no_session(self, store: Store) -> None:
        assert_raises(RefusedMessage, store.add_message, "new", "user", float("inf"))
        assert_raises(RefusedMessage, store.set_history, "new", [{"content": {1, 2}}])
        assert_raises(UsageError, store.checkpoint, "new", summary="x", upto=1)
        assert_raises(UsageError, store.set_meta, "new", blob=b"bytes")
        assert_raises(UsageError, store.set_meta, "new", long="x" * 65_537)
        assert store.list_sessions() == []


class IdempotencyKeys(ContractPart):
    """Tests of idempotency keys (`once=`)."""

    def test_p12_repeated_idempotency_key_returns_the_first_seq(self, store: Store) -> None:
        assert store.add_message("a", "user", "x", once="t1") == 1
        append(store, "a", "between")
        assert store.add_message("a", "user", "x", once="t1") == 1
        assert store.add_full_message("a", user_message("x"), once="t1") == 1
        assert store.add_messages("a", user_messages("x"), once="t1") == [1]
        assert store.add_message("a", "user", "x", once="t2") == 3
        assert visible_texts(store, "a") == ["x", "between", "x"]

    def test_p12_idempotency_key_is_not_a_field_of_the_message(self, store: Store) -> None:
        store.add_full_message("a", {"role": "user", "content": "x", "once": "mine"}, once="t1")
        [message] = store.get_history("a")
        assert message.to_dict() == {"role": "user", "content": "x", "once": "mine"}

    def test_p12_repeated_batch_returns_the_first_seqs(self, store: Store) -> None:
        append(store, "a", "before")
        batch = user_messages("x", "y", "z")
        assert store.add_messages("a", batch, once="t1") == [2, 3, 4]
        assert store.add_messages("a", batch, once="t1") == [2, 3, 4]
        assert store.add_messages("a", batch) == [5, 6, 7]

    def test_p12_idempotency_key_with_other_content_is_a_conflict(self, store: Store) -> None:
        append(store, "a", "before")
        store.add_messages("a", user_messages("x", "y"), once="t1")
        other_batches = [user_messages("x"), user_messages("y", "x"), user_messages("x", "y", "z")]
        for other in other_batches:
            error = assert_raises(OnceConflict, store.add_messages, "a", other, once="t1")
            assert (error.key, error.token, error.seq) == ("a", "t1", 2)
        assert visible_texts(store, "a") == ["before", "x", "y"]

    def test_p12_content_is_compared_in_its_encoded_form(self, store: Store) -> None:
        store.add_message("a", "user", 1, once="t1")
        assert_raises(OnceConflict, store.add_message, "a", "user", True, once="t1")
        assert_raises(OnceConflict, store.add_message, "a", "user", 1.0, once="t1")

    def test_p12_each_session_has_its_own_idempotency_keys(self, store: Store) -> None:
        assert store.add_message("a", "user", "x", once="t1") == 1
        assert store.add_message("b", "user", "y", once="t1") == 1
        assert visible_texts(store, "b") == ["y"]

    def test_p12_idempotency_keys_survive_hiding_undo_and_compaction(self, store: Store) -> None:
        store.add_message("a", "user", "x", once="t1")
        store.add_messages("a", user_messages("y", "z"), once="t2")
        store.clear("a")
        assert store.add_message("a", "user", "x", once="t1") == 1
        store.compact("a")
        assert store.add_message("a", "user", "x", once="t1") == 1
        assert store.add_messages("a", user_messages("y", "z"), once="t2") == [2, 3]
        assert_raises(OnceConflict, store.add_message, "a", "user", "other", once="t1")
        append(store, "a", "later")
        store.clear("a")
        store.compact("a")
        assert store.add_message("a", "user", "x", once="t1") == 1
        assert len(all_messages(store, "a")) == 4

    def test_p12_idempotency_keys_of_the_last_thousand_messages_are_known(
        self, store: Store
    ) -> None:
        for number in range(1000):
            store.add_message("a", "user", f"x{number}", once=f"t{number}")
        store.clear("a")
        store.compact("a")
        for number in (0, 1, 499, 998, 999):
            assert store.add_message("a", "user", f"x{number}", once=f"t{number}") == number + 1
        assert store.info("a").last_seq == 1000

    def test_p12_rejected_message_does_not_use_its_idempotency_key(self, store: Store) -> None:
        assert_raises(RefusedMessage, store.add_message, "a", "user", float("nan"), once="t1")
        assert store.add_messages("a", [], once="t1") == []
        assert store.add_message("a", "user", "x", once="t1") == 1

    def test_p8_invalid_idempotency_key_is_rejected(self, store: Store) -> None:
        for wrong in ("", "x" * 257, "\u00e9" * 129, 7, b"t"):
            with pytest.raises(UsageError):
                store.add_message("a", "user", "x", once=wrong)  # type: ignore[arg-type]
        assert store.list_sessions() == []
        assert store.add_message("a", "user", "x", once="x" * 256) == 1
        assert store.add_message("a", "user", "x", once="\u00e9" * 128) == 2

    def test_p10_any_text_can_be_an_idempotency_key(self, store: Store) -> None:
        idempotency_keys = [text for text in NASTY_TEXTS if text]
        for seq, once in enumerate(idempotency_keys, start=1):
            assert store.add_message("a", "user", "x", once=once) == seq
        store.clear("a")
        store.compact("a")
        for seq, once in enumerate(idempotency_keys, start=1):
            assert store.add_message("a", "user", "x", once=once) == seq


def exact_text(value: Any) -> str:
    """Return the value as text that distinguishes 1, 1.0 and True, and the order of fields."""
    return json.dumps(value)


def _nested_list(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


class _StrSubclass(str):
    """A subclass of str, such as frameworks define."""


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
    "integers beyond 64 bits": lambda: {"a": [2**53 + 1, 2**63, 2**64, -(2**64), 10**100]},
    "smallest and largest floats": lambda: {"a": [5e-324, 1.7976931348623157e308, 0.1, 1e22]},
    "a lone surrogate": lambda: {"content": "\ud800", "\udfff": "x", "c": "\udc00\ud800"},
    "NUL": lambda: {"content": "\x00", "a\x00": "\x00b"},
    "nasty text": lambda: {"content": list(NASTY_TEXTS), **dict.fromkeys(NASTY_TEXTS, 1)},
    "a record as text": lambda: {"content": '{"kind":"message","seq":1}\n,"crc":"00000000"}'},
    "200 deep": lambda: {"content": _nested_list(199)},
    "many empty lists": lambda: {"content": [[] for _ in range(500)]},
    "ten megabytes": lambda: {"role": "tool", "content": "0123456789\n" * 1_000_000},
    "eleven megabytes of non-ASCII text": lambda: {"content": "\u00e9\U0001f600" * 1_900_000},
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
    """Tests of the values that a message may contain."""

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
        stored_texts = [exact_text(m.to_dict()) for m in store.get_history("b", full=True)]
        assert stored_texts == [exact_text(fields)] * 2

    @pytest.mark.parametrize("case", INVALID_MESSAGES)
    def test_p10_invalid_message_is_rejected_with_its_field(self, store: Store, case: str) -> None:
        make_message, expected_field = INVALID_MESSAGES[case]
        append(store, "a", "before")
        fields = make_message()
        actual_field = assert_raises(RefusedMessage, store.add_full_message, "a", fields).field
        is_shortened = len(actual_field) > 60 and actual_field.startswith(expected_field)
        assert actual_field == expected_field or (expected_field and is_shortened)
        assert_raises(RefusedMessage, store.add_messages, "a", [user_message("fine"), fields])
        assert_raises(RefusedMessage, store.set_history, "a", [fields])
        assert visible_texts(store, "a") == ["before"]
        assert append(store, "a", "after") == [2]

    def test_p10_tuples_are_stored_as_lists(self, store: Store) -> None:
        store.add_message("a", "user", ({"x": (1, 2)}, ()))
        assert visible_texts(store, "a") == [[{"x": [1, 2]}, []]]

    def test_p10_subclasses_of_str_and_int_are_stored_as_plain_values(self, store: Store) -> None:
        store.add_full_message(
            "a", {_StrSubclass("role"): _StrSubclass("user"), "content": _IntSubclass(7)}
        )
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
