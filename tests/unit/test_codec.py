"""Tests lossless encoding of messages and lines, and that damage is always detected."""

import json
from binascii import crc32
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Raw

from stenolog import codec
from stenolog.errors import RefusedMessage, UsageError
from stenolog.records import (
    FORMAT,
    Archive,
    Change,
    ChangeRecord,
    Message,
    State,
    StateRecord,
    Token,
    Undo,
    UnknownRecord,
    Void,
    VoidRecord,
    decode_object,
)
from support.contract.append_contract import INVALID_MESSAGES, VALID_MESSAGES, exact_text
from support.strategies import NASTY_TEXTS, messages, texts

AT = "2026-11-15T12:00:00.000000Z"

tokens = st.none() | texts().filter(bool)
parts = st.none() | st.tuples(st.integers(1, 9), st.integers(1, 9))


def signed(text: bytes) -> bytes:
    """Return a line with a valid crc."""
    return text + b',"crc":"%08x"}' % crc32(text)


def full_state() -> State:
    return State(
        format=FORMAT,
        key="A:b/\u00e9",
        uid="0123456789abcdef",
        generation=3,
        created=AT,
        floor=4,
        hidden=[(6, 7), (9, 9)],
        number=12,
        summary="so far \ud800 \x00 \u2028",
        meta={"title": "x", "tags": ["\udfff"]},
        undo=[
            Undo(
                number=11,
                op="replace",
                newly_hidden=[(6, 7)],
                appended=(8, 9),
                old_summary="before",
            )
        ],
        lost=[(2, 2)],
        void=[(3, 3)],
        void_bytes=17,
        archive=Archive(name="1-4.jsonl.gz", first=1, last=4),
        tokens=[Token("t1", 1, 2, "00ff")],
    )


def full_change() -> Change:
    return Change(
        op="replace",
        number=5,
        floor=2,
        hidden=[(4, 5)],
        newly_hidden=[(4, 5)],
        appended=(6, 7),
        summary="now",
        old_summary="before \ud800",
        undoes=4,
        meta={"a": None},
    )


LINES = {
    "message": codec.message_line(7, AT, b'{"role":"user","content":"hello \xc3\xa9"}'),
    "member": codec.message_line(
        8, AT, b'{"role":"tool"}', joined=True, part=(2, 3), once="t-\x00"
    ),
    "surrogate": codec.message_line(9, AT, b'{"content":"\\ud800"}'),
    "state": codec.control_line("state", 1, AT, full_state()),
    "change": codec.control_line("change", 6, AT, full_change(), part=(1, 3)),
    "void": codec.control_line(
        "void", 6, AT, Void(bytes=3, seqs=[(4, 5)], changes=[2]), joined=True
    ),
    "unknown": signed(b'{"kind":"lease","seq":6,"at":"%s","body":{}' % AT.encode()) + b"\n",
}


# --- the caller's object -------------------------------------------------------------------------


@pytest.mark.parametrize("case", VALID_MESSAGES)
def test_p10_valid_message_is_encoded_and_decoded_unchanged(case: str) -> None:
    given_object = VALID_MESSAGES[case]()
    payload = codec.encode_message(given_object)
    assert exact_text(decode_object(payload)) == exact_text(given_object)
    assert b"\n" not in payload


@pytest.mark.quick(8)
@pytest.mark.parametrize("case", INVALID_MESSAGES)
def test_p10_invalid_value_is_rejected_with_its_field(case: str) -> None:
    make, field = INVALID_MESSAGES[case]
    with pytest.raises(RefusedMessage) as raised:
        codec.encode_message(make())
    assert raised.value.field.startswith(field)
    assert raised.value.reason
    assert str(raised.value).startswith(raised.value.field or "message")


@given(messages())
def test_p10_any_json_object_is_read_back_unchanged(given_object: dict[str, Any]) -> None:
    payload = codec.encode_message(given_object)
    assert exact_text(decode_object(payload)) == exact_text(given_object)
    assert b"\n" not in payload
    assert payload == codec.encode_message(given_object)


@pytest.mark.parametrize(
    "pair", [(1, True), (1, 1.0), (0, False), (0.0, -0.0), ("\u00e9", "e\u0301")]
)
def test_p10_values_that_compare_equal_are_encoded_differently(pair: tuple[Any, Any]) -> None:
    one, other = pair
    assert codec.encode_message({"a": one}) != codec.encode_message({"a": other})
    assert codec.encode_message({"a": 1, "b": 2}) != codec.encode_message({"b": 2, "a": 1})


def test_p10_non_ascii_text_is_not_escaped() -> None:
    assert codec.encode_message({"a": "\u00e9\U0001f600"}) == '{"a":"é😀"}'.encode()


def test_p10_lone_surrogate_is_escaped_and_decoded() -> None:
    payload = codec.encode_message({"a": "x\ud800y"})
    assert payload == b'{"a":"x\\ud800y"}'
    assert decode_object(payload) == {"a": "x\ud800y"}


def test_p10_mappings_and_subclasses_are_encoded_as_plain_values() -> None:
    class Text(str):
        pass

    class Share(float):
        pass

    given_object = MappingProxyType({Text("role"): Text("user"), "share": Share(0.5)})
    assert codec.encode_message(given_object) == b'{"role":"user","share":0.5}'
    assert codec.encode_message({"a": (1, (2,))}) == b'{"a":[1,[2]]}'


def test_p10_stored_message_is_encoded_byte_for_byte() -> None:
    message = Message(seq=1, _at=AT, _body=Raw(b'{"b":1.0,"a":"\\ud800"}'))
    assert codec.encode_message(message) == b'{"b":1.0,"a":"\\ud800"}'


def test_p10_size_limit_applies_to_the_payload() -> None:
    room = codec.MAX_MESSAGE_BYTES - len(b'{"a":""}')
    assert len(codec.encode_message({"a": "x" * room})) == codec.MAX_MESSAGE_BYTES
    with pytest.raises(RefusedMessage, match="67,108,865 bytes"):
        codec.encode_message({"a": "x" * (room + 1)})


def test_digest_depends_on_payload_boundaries() -> None:
    assert codec.payload_digest([b"ab", b"c"]) != codec.payload_digest([b"a", b"bc"])
    assert codec.payload_digest([b"abc"]) != codec.payload_digest([b"abc", b""])
    assert codec.payload_digest([b"abc"]) == codec.payload_digest([b"abc"])


# --- keys and idempotency keys -------------------------------------------------------------------


@pytest.mark.parametrize("key", ["a", "x" * 1024, "\u00e9" * 512, "\x00", "/", " "])
def test_p6_valid_keys_are_accepted(key: str) -> None:
    codec.check_key(key)


@pytest.mark.parametrize("key", ["", "x" * 1025, "\u00e9" * 513, "\ud800", None, 1, b"a"])
def test_p6_invalid_keys_are_rejected_by_check_key(key: Any) -> None:
    with pytest.raises(UsageError):
        codec.check_key(key)


@pytest.mark.parametrize("token", ["", "x" * 257, "\u00e9" * 129, 1, b"t", "\ud83d\ude00"])
def test_p12_invalid_idempotency_keys_are_rejected(token: Any) -> None:
    with pytest.raises(UsageError):
        codec.check_once(token)


@pytest.mark.parametrize("token", [None, "x" * 256, *filter(None, NASTY_TEXTS)])
def test_p12_valid_idempotency_keys_are_encoded(token: str | None) -> None:
    codec.check_once(token)
    line = codec.message_line(1, AT, b"{}", once=token)
    record = codec.parse_line(line[:-1])
    assert isinstance(record, Message)
    assert record._once == token


# --- lines ---------------------------------------------------------------------------------------


def test_line_matches_the_documented_format() -> None:
    line = codec.message_line(2, AT, b'{"role":"user"}', joined=True, part=(1, 2), once="t\u00e9")
    text = (
        '{"kind":"message","seq":2,"at":"2026-11-15T12:00:00.000000Z","joined":true,'
        '"part":[1,2],"once":"té","body":{"role":"user"}'
    ).encode()
    assert line == signed(text) + b"\n"
    json.loads(line)


@given(
    seq=st.integers(1, 2**62),
    given_object=messages(),
    joined=st.booleans(),
    part=parts,
    once=tokens,
)
@example(seq=1, given_object={"kind": "void", "crc": "x"}, joined=True, part=(1, 1), once=None)
@example(seq=1, given_object={"body": {"a": ',"body":'}}, joined=True, part=None, once=',"body":')
@example(seq=1, given_object={"a": "\ud800"}, joined=False, part=None, once=',"body":')
def test_p10_message_is_parsed_from_its_line(
    seq: int,
    given_object: dict[str, Any],
    joined: bool,
    part: tuple[int, int] | None,
    once: str | None,
) -> None:
    payload = codec.encode_message(given_object)
    line = codec.message_line(seq, AT, payload, joined=joined, part=part, once=once)
    assert line.count(b"\n") == 1
    assert codec.is_intact(line[:-1])
    record = codec.parse_line(line[:-1])
    assert isinstance(record, Message)
    assert (record.seq, record._at, record._joined, record._part) == (seq, AT, joined, part)
    assert record._once == once
    assert record.to_json() == payload
    assert exact_text(record.to_dict()) == exact_text(given_object)


@pytest.mark.parametrize(
    ("kind", "record_type", "body"),
    [
        ("state", StateRecord, full_state()),
        ("state", StateRecord, State(format=1, key="a", uid="u", generation=1, created=AT)),
        ("change", ChangeRecord, full_change()),
        ("change", ChangeRecord, Change(op="hide", number=1, floor=0, hidden=[])),
        ("void", VoidRecord, Void(bytes=0)),
        ("void", VoidRecord, Void(bytes=3, seqs=[(1, 2)], lost=[(3, 3)], changes=[4])),
    ],
)
def test_control_record_is_parsed_from_its_line(
    kind: str, record_type: type[Any], body: Any
) -> None:
    line = codec.control_line(kind, 5, AT, body, joined=True, part=(1, 2))
    record = codec.parse_line(line[:-1])
    assert record == record_type(seq=5, at=AT, joined=True, part=(1, 2), body=body)
    record = codec.parse_line(codec.control_line(kind, 5, AT, body)[:-1])
    assert record == record_type(seq=5, at=AT, body=body)


def test_decode_lines_equals_parsing_each_line() -> None:
    lines = [LINES[name] for name in ("message", "member", "void")]
    together = codec.decode_lines(b"".join(lines))
    assert together == [codec.parse_line(line[:-1]) for line in lines]
    assert codec.count_intact(b"".join(lines)) == len(lines)
    assert codec.count_intact(LINES["message"] + LINES["void"][:-2] + b"\n") is None
    assert codec.count_intact(LINES["message"] + LINES["void"][:-1]) is None
    assert codec.count_intact(b"") == 0


def test_p13_unknown_kind_is_parsed_as_unknown_record() -> None:
    for kind, optional in ((b"lease", False), (b"x-note", True)):
        text = b'{"kind":"%b","seq":3,"at":"%b","joined":true,"body":{"a":"\\ud800"}'
        record = codec.parse_line(signed(text % (kind, AT.encode())))
        assert isinstance(record, UnknownRecord)
        assert (record.kind, record.seq, record.joined) == (kind.decode(), 3, True)
        assert record.optional is optional


# --- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LINES)
def test_p3_every_flipped_bit_of_a_line_is_detected(name: str) -> None:
    line = LINES[name][:-1]
    assert codec.parse_line(line) is not None
    for position in range(len(line)):
        for bit in range(8):
            damaged = bytearray(line)
            damaged[position] ^= 1 << bit
            assert codec.parse_line(bytes(damaged)) is None, (position, bit)
            assert not codec.is_intact(bytes(damaged))
            assert codec.count_intact(bytes(damaged) + b"\n") is None


@pytest.mark.parametrize("name", LINES)
def test_p3_truncated_line_is_not_a_record(name: str) -> None:
    line = LINES[name][:-1]
    for length in range(len(line)):
        assert codec.parse_line(line[:length]) is None
        assert codec.salvage(line[:length]) == []
    for more in (b" ", b"}", b"\0", b"\r", b"\n"):
        assert codec.parse_line(line + more) is None


def test_p3_changed_crc_field_is_detected() -> None:
    line = LINES["message"][:-1]
    head, digits = line[:-10], line[-10:-2]
    assert codec.parse_line(head.replace(b'"crc"', b'"crb"') + digits + b'"}') is None
    for other in (digits.upper(), digits[:-1] + b" ", b"0x" + digits[2:]):
        if other != digits:
            assert codec.parse_line(head + other + b'"}') is None


@given(st.binary(max_size=60))
@example(b'message","seq":1,"at":"x","body":{}\x00')
@example(b'x-foo","seq":1,"at":"\xff"')
@example(b'message","seq":1,"body":{"a":"\\ud800"}')
@example(b'message","seq":1,"at":"x","part":[1],"body":{"a":"\\ud800"}')
@example(b'message","seq":1,"at":"x","body":' + b"[" * 5000 + b'"\\ud800"' + b"]" * 5000)
@example(b'message","seq":%b,"at":"x","body":{}' % (b"9" * 5000))
def test_p3_line_with_valid_crc_and_invalid_content_does_not_raise(text: bytes) -> None:
    codec.parse_line(signed(codec.LINE_START + text))


@given(
    st.lists(st.sampled_from(sorted(LINES)), min_size=1, max_size=4),
    st.sampled_from([b"", b"\x0b", b"\x8a", b"garbage"]),
    st.sampled_from([b"", b"\0\0", b'{"kind":"', b'{"kind":"message","seq":3,"at":"', b'"}']),
    st.sampled_from([b"", b"\0", b"#", b'{"kind":"void"']),
)
def test_p3_records_without_newlines_are_salvaged(
    names: list[str], between: bytes, before: bytes, behind: bytes
) -> None:
    lines = [LINES[name][:-1] for name in names]
    found = codec.salvage(before + between.join(lines) + behind)
    assert found == [codec.parse_line(line) for line in lines]


def test_p3_record_after_a_damaged_one_is_salvaged() -> None:
    first, second = LINES["message"][:-1], LINES["change"][:-1]
    for position in range(len(first)):
        damaged = bytearray(first)
        damaged[position] ^= 0x01
        found = codec.salvage(bytes(damaged) + b"\x0b" + second)
        assert found == [codec.parse_line(second)], position


def test_p3_message_content_is_never_mistaken_for_a_record() -> None:
    inner = LINES["message"][:-1]
    for content in (
        json.loads(inner),
        inner.decode(),
        [json.loads(inner)],
        {"a": json.loads(inner)},
    ):
        outer = codec.message_line(9, AT, codec.encode_message({"content": content}))[:-1]
        for position in (3, 12, 20, len(outer) - 3):
            damaged = bytearray(outer)
            damaged[position] ^= 0x01
            assert codec.salvage(bytes(damaged)) == [], (content, position)
        whole = codec.message_line(9, AT, codec.encode_message(json.loads(inner)))[:-1]
        assert codec.salvage(whole[:-1] + b"#") == []


def test_p9_long_damaged_line_is_salvaged_in_linear_time() -> None:
    # Quadratic time would take minutes and exceed the suite's time limit.
    content = '{"a":"b"}' * 1_200_000
    line = codec.message_line(1, AT, codec.encode_message({"content": content}))
    assert codec.salvage(line[:50] + b"#" + line[51:-1]) == []


@pytest.mark.parametrize("name", LINES)
def test_hand_edited_line_can_be_re_signed(name: str) -> None:
    line = LINES[name][:-1]
    edited = line.replace(b'"seq":', b'"seq":1', 1)
    assert codec.parse_line(edited) is None
    again = codec.correct_checksum(edited)
    assert again is not None
    assert codec.is_intact(again)
    assert codec.parse_line(again) is not None
    assert codec.correct_checksum(line) == line


@pytest.mark.parametrize(
    "line",
    [b"", b"{}", b'{"role":"user","content":"x"}', LINES["message"][:60], LINES["message"][:-3]],
)
def test_invalid_record_is_not_re_signed(line: bytes) -> None:
    assert codec.correct_checksum(line) is None
    assert codec.correct_checksum(signed(b'{"kind":"message","seq":1')) is None
