"""nanobot's logs: a line with the session's metadata, then one message per line.

Its times have no offset: they are read as local time of this machine.
"""

from base64 import urlsafe_b64decode
from binascii import Error as NotBase64
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from stenolog.stores.json_file import JSONMessage
from stenolog.transfer.importers.chat_format import (
    ImportProblems,
    NotAMessage,
    as_message,
    as_object,
    non_empty,
    parse_json,
    parse_local_time,
)
from stenolog.transfer.importers.legacy_session import LegacySession

KIND_FIELD: Final = "_type"
"""Field that marks lines other than messages."""
KNOWN_FIELDS: Final = (KIND_FIELD, "key", "created_at", "updated_at")
"""Fields of the first line that have their own field here."""

Head = Mapping[str, Any]


def read(log: bytes, *, name: str, changed: datetime) -> LegacySession:
    """Return the session in a log of this name and modification time. Raises NotASession."""
    report = ImportProblems()
    metadata: Head = {}
    others: list[dict[str, Any]] = []
    messages: list[JSONMessage] = []
    # `last_consolidated` counts all messages, including those that cannot be imported.
    indexes: list[int] = []
    index = 0
    for number, line in enumerate(log.split(b"\n"), 1):
        if not line.strip():
            continue
        label = f"line {number}"
        try:
            fields = as_object(parse_json(line, label), label)
            kind = fields.get(KIND_FIELD)
            if kind is None:
                fields = as_message(fields, label)
        except NotAMessage as error:
            report.report_dropped(str(error))
            index += 1
            continue
        if kind == "metadata":
            metadata = fields
        elif kind is not None:
            others.append(fields)
        else:
            encoded = report.encode(fields, parse_local_time(fields.get("timestamp")), label)
            messages += encoded
            indexes += [index] * len(encoded)
            index += 1
    report.check_not_empty(messages)
    hidden = _hidden_count(metadata, index, report)
    with_visibility = [
        JSONMessage(message.payload, message.at, hidden=at < hidden)
        for message, at in zip(messages, indexes, strict=True)
    ]
    return report.session(
        "nanobot",
        _key(metadata, name),
        with_visibility,
        changed=changed,
        created=parse_local_time(metadata.get("created_at")),
        updated=parse_local_time(metadata.get("updated_at")),
        summary=_summary(metadata),
        state=non_empty(
            {n: v for n, v in metadata.items() if n not in KNOWN_FIELDS} | {"lines": others}
        ),
    )


def looks_like(log: bytes) -> bool:
    """Return whether the first line is nanobot's metadata."""
    first = next((line for line in log.split(b"\n", 3)[:3] if line.strip()), b"")
    try:
        fields = parse_json(first, "")
    except NotAMessage:
        return False
    return isinstance(fields, dict) and fields.get(KIND_FIELD) == "metadata"


def _key(metadata: Head, name: str) -> str:
    key = metadata.get("key")
    if isinstance(key, str) and key:
        return key
    stem = name.removesuffix(".jsonl")
    try:
        found = urlsafe_b64decode(stem + "=" * (-len(stem) % 4)).decode()
    except (ValueError, NotBase64):
        return stem
    return found if ":" in found and found.isprintable() else stem


def _hidden_count(metadata: Head, count: int, report: ImportProblems) -> int:
    """Return the number of messages, from the first on, that its model no longer sees."""
    given = metadata.get("last_consolidated", 0)
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= count:
        return given
    report.report_loss(f"last_consolidated is {given!r} of {count:,}: nothing is hidden")
    return 0


def _summary(metadata: Head) -> str:
    metadata_field = metadata.get("metadata")
    last = metadata_field.get("_last_summary") if isinstance(metadata_field, dict) else None
    text = last.get("text") if isinstance(last, dict) else None
    return text if isinstance(text, str) else ""
