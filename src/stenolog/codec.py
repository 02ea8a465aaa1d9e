"""Lossless encoding of messages as JSON, and of records as lines of a log.

The fast codec (msgspec) changes some values silently: NaN becomes null, bytes become text, numeric
keys become text, and keys that are then equal are merged. The encoded payload is therefore decoded
again and compared with the input. If they differ, each field is checked, and the error names the
field that cannot be stored.
"""

import math
import re
import sys
from binascii import crc32
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import Raw

from stenolog.errors import RefusedMessage, UsageError
from stenolog.records import (
    FORMAT,
    ChangeRecord,
    Message,
    Record,
    Span,
    StateRecord,
    UnknownRecord,
    VoidRecord,
    decode_object,
)

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""Maximum size of a message as JSON."""
MAX_DEPTH: Final = 200
"""Maximum nesting depth of a message."""
MAX_KEY_BYTES: Final = 1024
"""Maximum size of a session key in UTF-8."""
MAX_TOKEN_BYTES: Final = 256
"""Maximum size of an idempotency key (`once`) in UTF-8."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


# --- the caller's object ---------------------------------------------------------------------


def encode_message(message: Message | Mapping[str, Any]) -> bytes:
    """Return a message as compact JSON in one line. Raises RefusedMessage."""
    if type(message) is dict:
        return encode_object(message)
    if isinstance(message, Message):
        return message.to_json()
    if not isinstance(message, Mapping):
        raise RefusedMessage("", f"a message is a mapping, not {_describe_type(message)}")
    try:
        fields = dict(message)
    except Exception as error:
        raise RefusedMessage("", f"it cannot be read: {error!r}") from error
    return encode_object(fields)


def _describe_type(message: object) -> str:
    """Return the type name of a message, with a hint for pydantic objects of the OpenAI client."""
    hint = "; pass message.model_dump(exclude_none=True)" if hasattr(message, "model_dump") else ""
    return type(message).__name__ + hint


def encode_object(fields: dict[str, Any]) -> bytes:
    """Return an object as compact JSON that decodes to the same object. Raises RefusedMessage."""
    try:
        payload = _encode(fields)
        is_lossless = _is_all_text(fields) or _decode(payload) == fields  # guard: nan-refused
    except (TypeError, ValueError, RuntimeError, OverflowError, msgspec.MsgspecError):
        payload, is_lossless = b"", False
    if not is_lossless:
        try:
            payload = _encode_slowly(fields)
        except RuntimeError as error:
            raise RefusedMessage("", f"changed while it was being read: {error}") from error
    size = len(payload)
    if size > MAX_MESSAGE_BYTES:
        raise RefusedMessage("", f"{size:,} bytes as JSON; the limit is {MAX_MESSAGE_BYTES:,}")
    # The nesting depth is at most the number of brackets, which is nearly always below the limit.
    if size > 2 * MAX_DEPTH and payload.count(b"{") + payload.count(b"[") > MAX_DEPTH:
        _check_value(fields, "", 1)
    return payload


def _is_all_text(fields: dict[str, Any]) -> bool:
    """Return whether all keys and values are text, which the fast codec never changes silently."""
    for name, value in fields.items():
        if type(name) is not str or type(value) is not str:
            return False
    return True


def _encode_slowly(fields: dict[str, Any]) -> bytes:
    """Encode a value that the fast codec rejects or changes. Raises RefusedMessage."""
    _check_value(fields, "", 1)
    try:
        payload = _encode(fields)
    except (TypeError, ValueError):
        # The fast codec rejects lone surrogates and subclasses of str, int and float.
        payload = _encode_with_json(fields, separators=(",", ":"), allow_nan=False).encode()
    if decode_object(payload) != _tuples_to_lists(fields):
        raise RefusedMessage("", "JSON would change its value")
    return payload


def _encode_with_json(value: Any, **options: Any) -> str:
    """Encode with the standard library, imported on first use."""
    import json

    return json.dumps(value, **options)


def _check_value(value: Any, field: str, depth: int) -> None:
    """Raise RefusedMessage for the first value in the message that JSON cannot represent."""
    if isinstance(value, Mapping | list | tuple) and depth > MAX_DEPTH:
        raise RefusedMessage(_shorten(field), f"nested more than {MAX_DEPTH} deep, or has a cycle")
    match value:
        case None | bool():
            pass
        case str():
            _check_text(value, field)
        case int():
            _check_digits(value, field)
        case float():
            if not math.isfinite(value):
                raise RefusedMessage(field, f"{value} has no place in JSON")
        case dict():
            for name, item in value.items():
                if not isinstance(name, str):
                    raise RefusedMessage(
                        field, f"the key {name!r} is {type(name).__name__}, not text"
                    )
                _check_text(name, field)
                _check_value(item, f"{field}.{name}" if field else name, depth + 1)
        case list() | tuple():
            for index, item in enumerate(value):
                _check_value(item, f"{field}[{index}]", depth + 1)
        case _:
            raise RefusedMessage(field, f"{type(value).__name__} is not JSON")


def _check_text(text: str, field: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        # JSON decodes a surrogate pair as one character, so the stored text would differ.
        joined_text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        if joined_text != text:
            raise RefusedMessage(
                field, "join the two characters of each surrogate pair into one"
            ) from None


def _check_digits(number: int, field: str) -> None:
    max_digits = sys.int_info.default_max_str_digits
    # A decimal digit has 3.32 bits. The exact power is slow, so compute it only near the limit.
    if number.bit_length() > max_digits * 3.32 and abs(number) >= 10**max_digits:
        raise RefusedMessage(field, f"an integer of more than {max_digits:,} digits")


def _tuples_to_lists(value: Any) -> Any:
    """Return the value with tuples replaced by lists, as JSON decodes it."""
    if isinstance(value, dict):
        return {name: _tuples_to_lists(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_tuples_to_lists(item) for item in value]
    return value


def _shorten(field: str) -> str:
    return field if len(field) <= 80 else field[:79] + "…"


def payload_digest(payloads: Sequence[bytes]) -> str:
    """Return a digest of messages that were appended with one idempotency key."""
    # `hashlib` is imported here, because only calls with an idempotency key need it.
    from hashlib import blake2b

    digest = blake2b(digest_size=8)
    for payload in payloads:
        digest.update(b"%d:" % len(payload))
        digest.update(payload)
    return digest.hexdigest()


def check_key(key: str) -> None:
    """Raise UsageError unless `key` is a valid session key."""
    if not isinstance(key, str):
        raise UsageError(f"a key is text, not {type(key).__name__}")
    if not key:
        raise UsageError("a key must not be empty")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise UsageError(f"{key!r}: a lone surrogate is not text") from None
    if size > MAX_KEY_BYTES:
        raise UsageError(f"{key[:40]!r}…: {size:,} bytes of UTF-8; the limit is {MAX_KEY_BYTES:,}")


def check_once(token: str | None) -> None:
    """Raise UsageError unless `token` is None or a valid idempotency key."""
    if token is None:
        return
    if not isinstance(token, str) or not token:
        raise UsageError("an idempotency key is non-empty text")
    if len(token.encode("utf-8", "surrogatepass")) > MAX_TOKEN_BYTES:
        raise UsageError(f"an idempotency key has at most {MAX_TOKEN_BYTES} bytes of UTF-8")
    _check_text(token, "once")


def check_times(at: Sequence[datetime], count: int) -> list[str]:
    """Return `at`, the times of `count` messages, in stored form. Raises UsageError."""
    if not isinstance(at, Sequence) or len(at) != count:
        raise UsageError(f"at must have one time for each of {count:,} messages")
    for moment in at:
        if not isinstance(moment, datetime) or moment.utcoffset() is None:
            raise UsageError(f"at must have datetimes with a time zone, not {moment!r}")
    try:
        utc_times = [moment.astimezone(UTC).replace(tzinfo=None) for moment in at]
    except OverflowError as error:
        raise UsageError(f"at: {error}") from error
    # Use isoformat, because strftime omits the leading zeros of early years.
    return [f"{moment.isoformat(timespec='microseconds')}Z" for moment in utc_times]


# --- a line of a log -------------------------------------------------------------------------

LINE_START: Final = b'{"kind":"'
_CRC_LENGTH: Final = 18  # ,"crc":"0123abcd"}
_CRC_FORMAT: Final = b',"crc":"%08x"}'
_SEQ_LIMIT: Final = 1 << 63
_MAX_RECORD_STARTS: Final = 64
_CRC_FIELD: Final = re.compile(rb',"crc":"([0-9a-f]{8})"\}')

_record_decoder = msgspec.json.Decoder(Message | StateRecord | ChangeRecord | VoidRecord)
_decode_record = _record_decoder.decode
# Decodes a buffer of intact lines. Raises a msgspec error if a line has an unknown kind or a lone
# surrogate; the caller then parses the lines one by one.
decode_lines = _record_decoder.decode_lines


def plain_line(seq: int, at: str, payload: bytes) -> bytes:
    """Return the line of a message without optional fields, including the newline."""
    line = b'{"kind":"message","seq":%d,"at":"%b","body":%b' % (seq, at.encode(), payload)
    return b'%b,"crc":"%08x"}\n' % (line, crc32(line))


def message_line(
    seq: int,
    at: str,
    payload: bytes,
    *,
    joined: bool = False,
    part: Span | None = None,
    once: str | None = None,
) -> bytes:
    """Return the line of a message, including the newline."""
    field = b""
    if once is not None:
        field = b',"once":' + _encode_with_json(once, ensure_ascii=not once.isprintable()).encode()
    return _make_line(b"message", seq, at, _batch_fields(joined=joined, part=part) + field, payload)


def control_line(
    kind: str,
    seq: int,
    at: str,
    body: msgspec.Struct,
    *,
    joined: bool = False,
    part: Span | None = None,
) -> bytes:
    """Return the line of a state, change or void record, including the newline."""
    try:
        payload = _encode(body)
    except (UnicodeEncodeError, TypeError):
        # The fast codec rejects lone surrogates and subclasses of str.
        payload = _encode_with_json(msgspec.to_builtins(body), separators=(",", ":")).encode()
    return _make_line(kind.encode(), seq, at, _batch_fields(joined=joined, part=part), payload)


def _batch_fields(*, joined: bool, part: Span | None) -> bytes:
    fields = b',"joined":true' if joined else b""
    return fields if part is None else fields + b',"part":[%d,%d]' % part


def _make_line(kind: bytes, seq: int, at: str, fields: bytes, payload: bytes) -> bytes:
    envelope = (kind, seq, at.encode(), fields, payload)
    line = b'{"kind":"%b","seq":%d,"at":"%b"%b,"body":%b' % envelope
    return b'%b,"crc":"%08x"}\n' % (line, crc32(line))


def is_intact(line: bytes) -> bool:
    """Return whether the checksum of a line (without its newline) is correct."""
    return line[-_CRC_LENGTH:] == _CRC_FORMAT % crc32(line[:-_CRC_LENGTH])  # guard: record-crc


def count_intact(buffer: bytes) -> int | None:
    """Count the lines of a buffer; return None if a line is incomplete or its checksum is wrong."""
    find = buffer.find
    crcs, crc_fields = [], []
    start = 0
    while (end := find(b"\n", start)) >= 0:
        crcs.append(crc32(buffer[start : end - _CRC_LENGTH]))
        crc_fields.append(buffer[end - _CRC_LENGTH : end])
        start = end + 1
    # Comparing the checksums of all lines at once is faster than comparing them line by line.
    if start < len(buffer) or b"".join(crc_fields) != (_CRC_FORMAT * len(crcs)) % tuple(crcs):
        return None
    return len(crcs)


def parse_line(line: bytes) -> Record | None:
    """Return the record in a line (without its newline), or None if the line is damaged."""
    if not line.startswith(LINE_START) or not is_intact(line):
        return None
    try:
        record: Record = _decode_record(line)
    except msgspec.ValidationError:
        return _parse_unknown_record(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _parse_escaped(line)
    return record if 0 < record.seq < _SEQ_LIMIT else None


def salvage(line: bytes) -> list[Record]:
    """Return the intact records inside a damaged line, such as two records without a newline.

    Stored messages are never mistaken for records: quotes inside text are escaped, and an object
    inside another object follows a colon, a comma or a bracket.
    """
    records: list[Record] = []
    salvaged_upto = tried_starts = 0
    for start in _record_starts(line):
        if start < salvaged_upto:
            continue
        tried_starts += 1
        if tried_starts > _MAX_RECORD_STARTS + 2 * len(records):
            break  # limit the work for damaged bytes that look like records
        crc, crc_upto = 0, start
        for crc_match in _CRC_FIELD.finditer(line, start):
            crc, crc_upto = crc32(line[crc_upto : crc_match.start()], crc), crc_match.start()
            if int(crc_match[1], 16) == crc:
                record = parse_line(line[start : crc_match.end()])
                if record is not None:
                    records.append(record)
                    salvaged_upto = crc_match.end()
                    break
    return records


def _record_starts(line: bytes) -> Iterator[int]:
    start = line.find(LINE_START)
    while start >= 0:
        if line[start - 1 : start] not in (b":", b",", b"["):
            yield start
        start = line.find(LINE_START, start + 1)


def correct_checksum(line: bytes) -> bytes | None:
    """Return a line with its checksum corrected, or None if the line is not a complete record."""
    if line[-_CRC_LENGTH:-10] != b',"crc":"':
        return None
    line_without_crc = line[:-_CRC_LENGTH]
    corrected_line = line_without_crc + _CRC_FORMAT % crc32(line_without_crc)
    try:
        record = parse_line(corrected_line)
        corrected_line.decode()
        if isinstance(record, Message):
            record.to_dict()
    except ValueError:
        return None
    return corrected_line if record is not None else None


def plain_message(line: bytes) -> bytes | None:
    """Return the payload of a line that is a message without an envelope; None for other lines."""
    try:
        fields = _decode(line)
        if not isinstance(fields, dict) or not isinstance(fields.get("role"), str):
            return None
        return encode_object(fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RefusedMessage):
        return None


def _parse_escaped(line: bytes) -> Record | None:
    """Parse a line that the fast decoder rejects, usually because of a lone surrogate.

    The payload of a message is cut out of the line unchanged; `json` decodes the other fields.
    """
    envelope = _read_envelope(line)
    kind = envelope.get("kind")
    try:
        if kind == "message":
            start = line.find(b',"body":') + len(b',"body":')
            envelope["body"] = Raw(line[start:-_CRC_LENGTH])
            return msgspec.convert(envelope, Message)
        if kind in ("state", "change", "void"):
            return msgspec.convert(envelope, StateRecord | ChangeRecord | VoidRecord)
    except msgspec.ValidationError:
        pass
    return _parse_unknown_record(line)


def _parse_unknown_record(line: bytes) -> UnknownRecord | None:
    """Return the record of an intact line whose kind or format is newer than this code.

    Return None for a known kind and format: such a line lacks a field or has a wrong value.
    """
    envelope = _read_envelope(line)
    if envelope.get("kind") == "state":
        body = envelope.get("body")
        version = body.get("format") if isinstance(body, dict) else None
        if not isinstance(version, int) or version <= FORMAT:
            return None
        envelope["kind"] = f"state of format {version}"
    elif envelope.get("kind") in ("message", "change", "void"):
        return None
    try:
        return msgspec.convert(envelope, UnknownRecord)
    except msgspec.ValidationError:
        return None


def _read_envelope(line: bytes) -> dict[str, Any]:
    import json

    try:
        envelope: Any = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return envelope if isinstance(envelope, dict) else {}
