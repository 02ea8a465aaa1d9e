"""Tests the message type of the public API."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import example, given
from msgspec import Raw

from stenolog.codec import encode_object
from stenolog.records import Message, UnknownRecord, decode_object, timestamp
from support.strategies import texts, values

AT = "2026-11-15T12:00:00.000123Z"


def message(payload: bytes, seq: int = 1) -> Message:
    return Message(seq=seq, _at=AT, _body=Raw(payload))


def test_the_fields_of_the_object_are_attributes() -> None:
    found = message(b'{"role":"user","content":[1],"tool_call_id":"c1","name":null}')
    assert (found.role, found.content, found.tool_call_id, found.name) == ("user", [1], "c1", None)
    with pytest.raises(AttributeError, match="'refusal'"):
        _ = found.refusal


@pytest.mark.parametrize("payload", [b"{}", b'{"x":1}', b'{"x":"\\ud800"}'])
def test_role_and_content_have_values_when_the_object_lacks_them(payload: bytes) -> None:
    found = message(payload)
    assert (found.role, found.content) == ("", None)
    assert found.get("role") is None
    assert "content" not in found


def test_message_reads_like_the_stored_mapping() -> None:
    stored = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}]}
    found = message(encode_object(stored))
    assert isinstance(found, Mapping)
    assert found["role"] == "assistant"
    assert found["content"] is None
    assert (found.get("tool_calls"), found.get("name"), found.get("name", "x")) == (
        [{"id": "c1"}],
        None,
        "x",
    )
    assert ("content" in found, "name" in found, 7 in found) == (True, False, False)
    assert (list(found), len(found)) == (["role", "content", "tool_calls"], 3)
    assert list(found.keys()) == list(stored)
    assert list(found.values()) == list(stored.values())
    assert list(found.items()) == list(stored.items())
    assert dict(found) == {**found} == stored
    with pytest.raises(KeyError, match="'name'"):
        _ = found["name"]


@given(values())
@example({"keys": 1, "items": [2], "get": {"values": 3}, "seq": 4, "\ud800": 5})
def test_mapping_has_every_field_of_the_object(content: Any) -> None:
    stored = content if isinstance(content, dict) else {"content": content}
    found = message(encode_object(stored))
    assert json.dumps(dict(found)) == json.dumps(found.to_dict())
    assert all(json.dumps(found[name]) == json.dumps(found.to_dict()[name]) for name in found)


def test_message_is_true_even_if_the_object_is_empty() -> None:
    assert message(b"{}")
    assert len(message(b"{}")) == 0


@given(texts() | values(), values())
@example("user \ud800", 1 << 70)
@example(None, {"role": "other", "content": [1.0, "\udfff"]})
def test_role_and_content_are_those_of_the_object(role: Any, content: Any) -> None:
    found = message(encode_object({"x": content, "role": role, "content": content, "y": role}))
    # As JSON, because values that compare equal may differ: 1, 1.0 and True.
    for name, value in (("role", found.role), ("content", found.content)):
        assert json.dumps(value) == json.dumps(found.to_dict()[name])
    assert found.content is not found.content or not isinstance(found.content, list | dict)


def test_fields_named_like_our_attributes_are_readable() -> None:
    payload = b'{"at":1,"body":2,"seq":3,"once":4,"part":5,"joined":6,"kind":7,"hidden":8}'
    found = message(payload)
    assert found.to_dict() == decode_object(payload)
    assert (found.seq, found.hidden) == (1, False)
    assert (found.body, found.once, found.part, found.joined, found.kind) == (2, 4, 5, 6, 7)


def test_to_dict_returns_a_new_copy() -> None:
    found = message(b'{"content":["x"]}')
    found.to_dict()["content"].append("y")
    assert found.to_dict() == {"content": ["x"]}
    assert found.to_json() == b'{"content":["x"]}'


def test_message_is_immutable() -> None:
    found = message(b"{}")
    for name in ("seq", "hidden", "content", "_body"):
        with pytest.raises(AttributeError):
            setattr(found, name, 2)


def test_messages_are_compared_by_seq_and_bytes() -> None:
    one = message(b'{"a":1}')
    assert one == message(b'{"a":1}')
    assert hash(one) == hash(message(b'{"a":1}'))
    assert one != message(b'{"a":1.0}')
    assert one != message(b'{"a":1}', seq=2)
    assert one != {"a": 1}


def test_time_of_a_message_is_utc_with_microseconds() -> None:
    moment = message(b"{}").at
    assert moment == datetime(2026, 11, 15, 12, 0, 0, 123, tzinfo=UTC)
    assert timestamp(moment) == AT
    elsewhere = moment.astimezone(timezone(timedelta(hours=5, minutes=30)))
    assert timestamp(elsewhere) == AT
    assert timestamp(datetime(2026, 1, 1, tzinfo=UTC)) == "2026-01-01T00:00:00.000000Z"
    assert timestamp(datetime(1, 2, 3, tzinfo=UTC)) == "0001-02-03T00:00:00.000000Z"


def test_repr_of_a_message_is_short_and_has_its_seq() -> None:
    assert repr(message(b'{"a":1}', seq=7)) == 'Message(7, {"a":1})'
    hidden = Message(seq=2, _at=AT, _body=Raw(b'{"a":"%b"}' % (b"x" * 200)), hidden=True)
    assert repr(hidden).startswith('Message(2, hidden, {"a":"xxx')
    assert len(repr(hidden)) < 120


@pytest.mark.parametrize(
    ("kind", "optional"), [("x-note", True), ("note", False), ("xnote", False)]
)
def test_p13_only_kinds_marked_optional_are_optional(kind: str, optional: bool) -> None:
    assert UnknownRecord(kind=kind, seq=1, at=AT).optional is optional


@pytest.mark.parametrize("payload", [b'{"a":"\\ud800"}', b'{"\\udfff":[{"b":"\\ud800\\ud800"}]}'])
def test_p10_payloads_with_lone_surrogates_are_read(payload: bytes) -> None:
    found = decode_object(payload)
    assert found
    assert decode_object(Raw(payload)) == found
